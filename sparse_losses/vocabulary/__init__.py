"""Statistics of tokens, activations and labels: frequency, script, co-occurrence."""

from sparse_losses.vocabulary.activation_frequency import ActivationFrequency
from sparse_losses.vocabulary.bm25 import bm25_scores
from sparse_losses.vocabulary.document_frequency import DocumentFrequency
from sparse_losses.vocabulary.labels import label_similarity
from sparse_losses.vocabulary.languages import language_token_ids
from sparse_losses.vocabulary.penalties import idf_penalty, language_penalty

__all__ = [
    "ActivationFrequency",
    "DocumentFrequency",
    "bm25_scores",
    "idf_penalty",
    "label_similarity",
    "language_penalty",
    "language_token_ids",
]
