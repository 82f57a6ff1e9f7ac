"""Dense activations in, as many dimensions as you name out."""
