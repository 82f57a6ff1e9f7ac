"""Losses and head in sentence-transformers."""

from sparse_losses.integrations.sentence_transformers.head import use_splade_head
from sparse_losses.integrations.sentence_transformers.loss import (
    SentenceTransformersLoss,
    keep_texts,
)

__all__ = ["SentenceTransformersLoss", "keep_texts", "use_splade_head"]
