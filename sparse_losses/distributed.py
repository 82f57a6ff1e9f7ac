"""Gathers and sums over the ranks of a process group, with exact gradients.

The gradient of gathered rows is the sum of the gradients of all ranks that used them: that of the
sum of all ranks' losses. If all W ranks compute the same loss, it is W times the loss's, and
DistributedDataParallel divides by W: the gradient of one process with the whole batch.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# PyTorch 2.13 has new names. What writes into a tensor can be traced by the compiler.
if dist.is_available():
    _all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    _reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REFUSAL = "refusal"  # the name of what a rank says that refuses its arguments


def num_ranks() -> int:
    """Return the number of ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_rows(x: Tensor, gather: bool = True) -> Tensor:
    """Return the rows of all ranks ``[W B, ...]``, in the order of the ranks, with gradients.

    Every rank must call it, with the same shape and dtype.

    Examples:
        >>> import torch
        >>> from sparse_losses.distributed import gather_rows
        >>> gather_rows(torch.ones(2, 3)).shape  # no process group: one rank
        torch.Size([2, 3])
    """
    if gather and x.dtype == torch.bool and num_ranks() > 1:  # not every backend can send bool
        return gather_rows(x.to(torch.uint8)).to(torch.bool)
    return _unless_alone("gather", x) if gather else x


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of all ranks' ``x``, of the same shape and dtype, with its gradient."""
    return _unless_alone("sum", x)


def average_grad_over_ranks(value: Tensor) -> Tensor:
    """Return a value that all ranks share; its gradient is the mean over the ranks."""
    return _unless_alone("share", value)


def scatter_sum(x: Tensor) -> Tensor:
    """Return this rank's rows ``[B, ...]`` of the sum over ranks of ``x [W B, ...]``."""
    return _unless_alone("scatter", x)


def _unless_alone(name: str, x: Tensor) -> Tensor:
    result: Tensor = _Map.apply(x, name) if num_ranks() > 1 else x  # type: ignore[no-untyped-call]
    return result


def maximum_over_ranks(x: Tensor) -> Tensor:
    """Return the elementwise maximum of all ranks' ``x``, without a gradient."""
    if num_ranks() > 1:
        x = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def agree_across_ranks(call: str, gather: object, *data: Tensor | None, **values: object) -> None:
    """Raise on every rank unless all make this call, with equal ``values`` and precision.

    A hash is exchanged, and values only if hashes differ. Compiled code compares nothing.
    """
    if not isinstance(gather, bool):
        raise TypeError(f"expected `gather` to be True or False, got {gather!r}")
    if not gather or num_ranks() == 1 or torch.compiler.is_compiling():
        return
    present = [x for x in data if x is not None]
    if type(present[0]) in (Tensor, nn.Parameter):  # a subclass may have no values
        width = max([4, *(x.element_size() for x in present if x.is_floating_point())])
        _compare(call, present[0].device, {**values, "precision, in bytes,": width})


def refuse_across_ranks(
    call: str, gather: object, arguments: Iterable[object], error: Exception
) -> None:
    """Tell the ranks that wait in ``agree_across_ranks`` the error, which the caller raises."""
    tensors = [x for x in arguments if isinstance(x, Tensor)] or [torch.empty(0)]
    refusal = {REFUSAL: f"{type(error).__name__}: {error}"}
    with suppress(ValueError, RuntimeError):  # what the others did wrong, or that they have left
        agree_across_ranks(call, gather is True, *tensors, **refusal)


def _compare(call: str, device: torch.device, values: dict[str, object]) -> None:
    """Raise for the first value that differs between the ranks."""
    named = {"call": call, **{name: str(value) for name, value in values.items()}}
    text = json.dumps(named).encode()
    own = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    hashes = gather_rows(torch.tensor([own], device=device)).tolist()
    if hashes.count(own) == len(hashes):
        return
    longest = int(gather_rows(torch.tensor([len(text)], device=device)).max())
    padded = torch.tensor([*text.ljust(longest)], dtype=torch.uint8, device=device)
    everyone = [json.loads(bytes(row)) for row in gather_rows(padded[None]).tolist()]
    where = f"for {call} with gather=True"
    if refusals := {r: its[REFUSAL] for r, its in enumerate(everyone) if REFUSAL in its}:
        listed = ", ".join(f"on rank {r} {error}" for r, error in refusals.items())
        raise ValueError(f"expected every rank to accept its arguments {where}, got {listed}")
    for name in dict.fromkeys(name for its in everyone for name in its):
        received = [its.get(name) for its in everyone]
        if len(set(received)) > 1:
            listed = ", ".join(f"{value} on rank {r}" for r, value in enumerate(received))
            hint = "; the last batch of an epoch? Drop it (drop_last=True)" if name == "B" else ""
            raise ValueError(f"expected the same {name} on every rank {where}, got {listed}{hint}")


class _Map(torch.autograd.Function):
    """A linear map of all ranks' tensors, by its name; its gradient is another one's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        function, ctx.adjoint = MAPS[name]
        return function(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return _Map.apply(*upstream, ctx.adjoint), None  # type: ignore[no-untyped-call]


def _gathered(x: Tensor) -> Tensor:
    gathered = x.new_empty((num_ranks() * x.shape[0], *x.shape[1:]))
    _all_gather(gathered, x.contiguous(), group=None)  # PyTorch 2.6 compiles it named only
    return gathered


def _scattered(x: Tensor) -> Tensor:
    own = x.new_empty((x.shape[0] // num_ranks(), *x.shape[1:]))
    _reduce_scatter(own, x.contiguous())
    return own


def _summed(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


MAPS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "gather": (_gathered, "scatter"),
    "scatter": (_scattered, "gather"),
    "sum": (_summed, "sum"),
    "share": (Tensor.clone, "mean"),
    "mean": (lambda x: _summed(x) / num_ranks(), "mean"),
}
