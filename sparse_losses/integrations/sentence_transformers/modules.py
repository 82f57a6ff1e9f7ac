"""Modules of a ``SparseEncoder`` that a saved ``SpladeEncoder`` names."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from sparse_losses._core.extras import from_extra

with from_extra("sentence-transformers"):
    from sentence_transformers.base.modules import Module

__all__ = ["IdfWeights", "WithoutExpansion"]


# The type checker sees their classes as Any, and a subclass of Any is an error.
class IdfWeights(Module):  # type: ignore[misc]
    """A module of a ``SparseEncoder`` that multiplies the vectors with one weight per token.

    ``SpladeEncoder.save_pretrained`` writes it as the last module if there are idf weights. Load
    the folder with ``SparseEncoder(folder, trust_remote_code=True)``: sentence-transformers
    requires this for modules of other packages.

    Args:
        vocab_size: size of the vocabulary, V.

    Examples:
        >>> import torch
        >>> from sparse_losses.integrations.sentence_transformers import IdfWeights
        >>> idf_weights = IdfWeights(3)
        >>> idf_weights.weight.copy_(torch.tensor([1.0, 0.0, 0.5]))
        tensor([1.0000, 0.0000, 0.5000])
        >>> idf_weights({"sentence_embedding": torch.ones(1, 3)})["sentence_embedding"]
        tensor([[1.0000, 0.0000, 0.5000]])
    """

    config_keys = ["vocab_size"]  # noqa: RUF012  # as in the base class

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight: Tensor
        self.register_buffer("weight", torch.ones(vocab_size))

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Return the features with a weighted ``sentence_embedding`` ``[B, V]``."""
        features["sentence_embedding"] = features["sentence_embedding"] * self.weight
        return features

    def get_embedding_dimension(self) -> int:
        """Return V."""
        return self.vocab_size

    def save(
        self, output_path: str, *args: Any, safe_serialization: bool = True, **kw: Any
    ) -> None:
        """Write ``config.json`` and the weights."""
        self.save_config(output_path)
        self.save_torch_weights(output_path, safe_serialization=safe_serialization)

    @classmethod
    def load(cls, model_name_or_path: str, **options: Any) -> "IdfWeights":
        """Load a module that ``save`` or ``SpladeEncoder.save_pretrained`` wrote."""
        where = ("subfolder", "token", "cache_folder", "revision", "local_files_only")
        options = {key: value for key, value in options.items() if key in where}
        config = cls.load_config(model_name_or_path=model_name_or_path, **options)
        module = cls(**config)
        cls.load_torch_weights(model_name_or_path=model_name_or_path, model=module, **options)
        return module


class WithoutExpansion(Module):  # type: ignore[misc]  # as above
    """The module entry of a saved ``SpladeEncoder`` without expansion; loading it is an error."""

    # The base class requires these methods; this class has no objects.
    def forward(self, features: dict[str, Any], **options: Any) -> NoReturn:
        """Raise ``NotImplementedError``."""
        raise NotImplementedError

    def save(self, output_path: str, *args: Any, **options: Any) -> NoReturn:
        """Raise ``NotImplementedError``."""
        raise NotImplementedError

    @classmethod
    def load(cls, model_name_or_path: str, **options: Any) -> NoReturn:
        """Raise an error that names the loader."""
        raise ValueError(
            f"{model_name_or_path} is a SpladeEncoder without expansion, for which sentence-"
            "transformers has no modules: load it with SpladeEncoder.from_pretrained"
        )
