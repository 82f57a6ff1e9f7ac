"""The losses in sentence-transformers' trainers, and idf weights as one of its modules."""

from sparse_losses.integrations.sentence_transformers.loss import SentenceTransformersLoss
from sparse_losses.integrations.sentence_transformers.modules import IdfWeights, WithoutExpansion

__all__ = ["IdfWeights", "SentenceTransformersLoss", "WithoutExpansion"]

# Saved folders and model cards name the classes by this path, whatever file they are in.
for _public in (IdfWeights, SentenceTransformersLoss, WithoutExpansion):
    _public.__module__ = __name__
