"""What modules that still speak of DTensors import, until they do not; plain tensors pass."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from sparse_losses.distributed import agree_across_ranks
from sparse_losses.distributed import refuse_across_ranks as refuse

__all__ = ["agree", "beside_dtensors", "full", "is_dtensor", "refuse", "whole"]


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is a DTensor."""
    return type(x).__name__ == "DTensor"


def full(x: Tensor) -> Tensor:
    """Return all of ``x`` as a plain tensor."""
    return x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]


def whole(value: Any) -> Any:
    """Return ``value``."""
    return value


def beside_dtensors(*tensors: Any) -> AbstractContextManager[Any]:
    """Return an empty context."""
    return nullcontext()


def ranks_of(x: Tensor) -> int:
    """Return how many ranks know all of ``x``."""
    return 1


def agree(call: str, gather: object, tensors: Any, **values: object) -> bool:
    """Call ``agree_across_ranks``."""
    return agree_across_ranks(call, gather, *tensors.values(), **values)


def refuse_dtensors(**tensors: object) -> None:
    """Do nothing."""


def check_replicated(name: str, x: Tensor, mesh: Any) -> None:
    """Do nothing."""


def on_parts(*args: Any, **kwargs: Any) -> Any:
    """Raise."""
    raise TypeError
