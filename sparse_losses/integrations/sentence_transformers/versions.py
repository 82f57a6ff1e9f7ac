"""Names of sentence-transformers, which version 5 keeps in other places or lacks."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sparse_losses._core.extras import from_extra

__all__ = [
    "HAS_GRADIENT_CACHE",
    "CachedLossMixin",
    "Module",
    "SparseEncoder",
    "SpladePooling",
    "Transformer",
    "embed_columns",
]

with from_extra("sentence-transformers"):
    from sentence_transformers import SparseEncoder

try:
    from sentence_transformers.base.losses.gradcache import CachedLossMixin
    from sentence_transformers.base.losses.merged_forward import embed_columns
    from sentence_transformers.base.modules import Module
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

    HAS_GRADIENT_CACHE = True
except ModuleNotFoundError:
    from sentence_transformers.models import Module  # type: ignore[import-not-found]
    from sentence_transformers.sparse_encoder import models

    SpladePooling, Transformer = models.SpladePooling, models.MLMTransformer

    HAS_GRADIENT_CACHE = False

    class CachedLossMixin:  # type: ignore[no-redef]
        """Nothing: the losses of version 5 cache gradients each in their own way."""

    def each_column(model: Any, columns: Sequence[dict[str, Any]]) -> list[Tensor]:
        """Return the vectors of every column."""
        return [model(column)["sentence_embedding"] for column in columns]

    embed_columns = each_column  # the API pages cannot read one name as import and function
