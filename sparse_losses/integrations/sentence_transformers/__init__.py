"""Losses and head in sentence-transformers."""

from sparse_losses.integrations.sentence_transformers.head import (
    remove_splade_head,
    use_splade_head,
)
from sparse_losses.integrations.sentence_transformers.loss import (
    SentenceTransformersLoss,
    keep_texts,
)
from sparse_losses.representation.folder import UnsupportedEncoder

__all__ = [
    "SentenceTransformersLoss",
    "UnsupportedEncoder",
    "keep_texts",
    "remove_splade_head",
    "use_splade_head",
]

# Checkpoints and model cards name the class by this path, whatever file it is in.
SentenceTransformersLoss.__module__ = __name__
