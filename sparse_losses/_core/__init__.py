"""The few lines every loss shares: checks, precision, similarity, sums, ids."""
