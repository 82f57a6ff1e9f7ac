"""Code that all losses share: checks, precision, similarity, sums and token ids."""
