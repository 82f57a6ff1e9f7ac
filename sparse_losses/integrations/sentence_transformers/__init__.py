"""Losses and head in sentence-transformers, and idf weights as one of its modules."""

from sentence_transformers.base.modules import Module

from sparse_losses.integrations.sentence_transformers.head import (
    remove_splade_head,
    use_splade_head,
)
from sparse_losses.integrations.sentence_transformers.loss import (
    SentenceTransformersLoss,
    keep_texts,
)
from sparse_losses.representation.folder import IdfWeights, UnsupportedEncoder

__all__ = [
    "IdfWeights",
    "SentenceTransformersLoss",
    "UnsupportedEncoder",
    "keep_texts",
    "remove_splade_head",
    "use_splade_head",
]

Module.register(IdfWeights)  # it cannot inherit where sentence-transformers may be missing
# Checkpoints and model cards name the class by this path, whatever file it is in.
SentenceTransformersLoss.__module__ = __name__
