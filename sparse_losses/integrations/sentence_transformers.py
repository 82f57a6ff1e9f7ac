"""For sentence-transformers: idf weights behind its pooling, as ``SpladeEncoder`` has them."""

from typing import Any, NoReturn

import torch
from sentence_transformers.base.modules import Module
from torch import Tensor

__all__ = ["IdfWeights", "WithoutExpansion"]


# Their classes are not looked into by the type checker, and a subclass of Any is an error to it.
class IdfWeights(Module):  # type: ignore[misc]
    """Multiplies the vectors of a ``SparseEncoder`` with one weight a token.

    The last module of the folders that ``SpladeEncoder.save_pretrained`` writes if there are idf
    weights; load them with ``SparseEncoder(folder, trust_remote_code=True)``, which sentence-
    transformers wants for every module that is not its own.

    Args:
        vocab_size: V.

    Example:
        >>> import torch
        >>> from sparse_losses.integrations.sentence_transformers import IdfWeights
        >>> idf_weights = IdfWeights(3)
        >>> idf_weights.weight.copy_(torch.tensor([1.0, 0.0, 0.5]))
        tensor([1.0000, 0.0000, 0.5000])
        >>> idf_weights({"sentence_embedding": torch.ones(1, 3)})["sentence_embedding"]
        tensor([[1.0000, 0.0000, 0.5000]])
    """

    config_keys = ["vocab_size"]  # noqa: RUF012  # the base class declares it so

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight: Tensor
        self.register_buffer("weight", torch.ones(vocab_size))

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        """The same features, their ``sentence_embedding`` ``[B, V]`` weighted."""
        features["sentence_embedding"] = features["sentence_embedding"] * self.weight
        return features

    def get_embedding_dimension(self) -> int:
        """V."""
        return self.vocab_size

    def save(
        self, output_path: str, *args: Any, safe_serialization: bool = True, **kw: Any
    ) -> None:
        """Writes ``config.json`` and the weights."""
        self.save_config(output_path)
        self.save_torch_weights(output_path, safe_serialization=safe_serialization)

    @classmethod
    def load(cls, model_name_or_path: str, **options: Any) -> "IdfWeights":
        """Reads what :meth:`save` wrote, or ``SpladeEncoder.save_pretrained``."""
        where = ("subfolder", "token", "cache_folder", "revision", "local_files_only")
        options = {key: value for key, value in options.items() if key in where}
        config = cls.load_config(model_name_or_path=model_name_or_path, **options)
        module = cls(**config)
        cls.load_torch_weights(model_name_or_path=model_name_or_path, model=module, **options)
        return module


class WithoutExpansion(Module):  # type: ignore[misc]  # as above
    """What the folder of a ``SpladeEncoder`` without expansion names: it loads as nothing."""

    # Abstract in the base class; no object of this one is ever made.
    def forward(self, features: dict[str, Any], **options: Any) -> NoReturn:
        """Never."""
        raise NotImplementedError

    def save(self, output_path: str, *args: Any, **options: Any) -> NoReturn:
        """Never."""
        raise NotImplementedError

    @classmethod
    def load(cls, model_name_or_path: str, **options: Any) -> NoReturn:
        """Says what does load it."""
        raise ValueError(
            f"{model_name_or_path} is a SpladeEncoder without expansion, which sentence-"
            "transformers has no modules for: load it with SpladeEncoder.from_pretrained"
        )
