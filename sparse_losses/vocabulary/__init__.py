"""Statistics of tokens, activations and labels: frequency, script, co-occurrence."""
