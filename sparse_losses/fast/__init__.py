"""The same numbers computed another way, by the stem of the loss."""
