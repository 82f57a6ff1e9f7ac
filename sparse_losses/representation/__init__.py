"""From hidden states to sparse vectors."""

from sparse_losses.representation.pooling import splade_pool, token_weights

__all__ = ["splade_pool", "token_weights"]
