"""Gathers and sums over the ranks of a process group, with exact gradients.

The gradient of gathered rows is the sum of the gradients from all ranks that used them, so the
gradient of the sum of all ranks' losses is exact. If all W ranks compute the same loss, that sum is
W times the loss, and DistributedDataParallel divides by W when it averages gradients: the result is
the gradient of one process with the whole batch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# PyTorch 2.13 has new names and warns of the old ones. We use public functions that write into a
# tensor because the compiler can trace them.
if dist.is_available():
    _all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    _reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

skips_size_check = ContextVar("skips_size_check", default=False)
REFUSAL = "refusal"  # the name of what a rank says that refuses its arguments


def num_ranks() -> int:
    """Return the number of ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_rows(x: Tensor, gather: bool = True) -> Tensor:
    """Return the rows of all ranks ``[W B, ...]``, in the order of the ranks, with gradients.

    Every rank must call it, with the same shape and dtype. Without ``gather`` it returns ``x``.

    Examples:
        >>> import torch
        >>> from sparse_losses.distributed import gather_rows
        >>> gather_rows(torch.ones(2, 3)).shape  # no process group: one rank
        torch.Size([2, 3])
    """
    if not gather or num_ranks() == 1:
        return x
    if x.dtype == torch.bool:  # not every backend can send bool
        return gather_rows(x.to(torch.uint8)).to(torch.bool)
    # PyTorch's `Function.apply` has no types.
    gathered: Tensor = _Gather.apply(x)  # type: ignore[no-untyped-call]
    return gathered


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of all ranks' ``x``, with its gradient.

    Every rank must call it, with the same shape and dtype.

    Examples:
        >>> import torch
        >>> from sparse_losses.distributed import sum_over_ranks
        >>> sum_over_ranks(torch.ones(2))  # no process group: one rank
        tensor([1., 1.])
    """
    if num_ranks() == 1:
        return x
    total: Tensor = _Sum.apply(x)  # type: ignore[no-untyped-call]  # as above
    return total


def average_grad_over_ranks(value: Tensor) -> Tensor:
    """Return a value that all ranks share; its gradient is the mean over the ranks."""
    if num_ranks() == 1:
        return value
    shared: Tensor = _Shared.apply(value)  # type: ignore[no-untyped-call]  # as above
    return shared


def scatter_sum(x: Tensor) -> Tensor:
    """Return this rank's rows ``[B, ...]`` of the sum over ranks of ``x [W B, ...]``.

    Every rank must call it, with the same shape and dtype.
    """
    if num_ranks() == 1:
        return x
    own: Tensor = _Scatter.apply(x)  # type: ignore[no-untyped-call]  # as above
    return own


def maximum_over_ranks(x: Tensor) -> Tensor:
    """Return the elementwise maximum of all ranks' ``x``, without a gradient."""
    if num_ranks() == 1:
        return x
    largest = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def agree_across_ranks(call: str, gather: object, *data: Tensor | None, **values: object) -> bool:
    """Return whether other ranks take part in a call with ``gather``; if so, check their values.

    ``values`` are the sizes, flags, choices and numbers that must be equal on all ranks; the width
    of the widest dtype, which is sent, is compared too. One number per rank is exchanged: a hash.
    Only if hashes differ do the ranks exchange the values, for the error. Compiled code compares
    nothing: the caller must ensure equal values.

    Raises:
        TypeError: for a ``gather`` that is no bool.
        ValueError: on every rank, if the ranks have different values or are in different calls.
    """
    if not isinstance(gather, bool):
        raise TypeError(f"expected `gather` to be True or False, got {gather!r}")
    if not gather or num_ranks() == 1:
        return False
    present = [x for x in data if x is not None]
    if torch.compiler.is_compiling() or type(present[0]) not in (Tensor, nn.Parameter):
        return True
    if not skips_size_check.get():
        width = max([4, *(x.element_size() for x in present if x.is_floating_point())])
        _check_agreement(call, present[0].device, {**values, "precision, in bytes,": width})
    return True


def refuse_across_ranks(
    call: str, gather: object, arguments: Iterable[object], error: Exception
) -> None:
    """Tell the ranks that wait in ``agree_across_ranks`` why this rank has refused its arguments.

    They raise an error that repeats this one, which is the caller's to raise.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)] or [torch.empty(0)]
    with suppress(ValueError, RuntimeError):  # what the others did wrong, or that they have left
        refusal = {REFUSAL: f"{type(error).__name__}: {error}"}
        agree_across_ranks(call, gather is True, *tensors, **refusal)


@contextmanager
def skip_size_check() -> Iterator[None]:
    """Skip the comparison of sizes within the block: the caller has compared them already."""
    token = skips_size_check.set(True)
    try:
        yield
    finally:
        skips_size_check.reset(token)


def _check_agreement(call: str, device: torch.device, values: dict[str, object]) -> None:
    own = described(call, values)
    mine = fingerprint(own)
    hashes = gather_rows(torch.tensor([mine], device=device)).tolist()
    if hashes.count(mine) == len(hashes):
        return
    size = torch.tensor([len(own)], device=device)
    longest = int(gather_rows(size).max())
    text = torch.tensor([*own, *[32] * (longest - len(own))], dtype=torch.uint8, device=device)
    everyone = enumerate(gather_rows(text[None]).tolist())
    raise_difference(call, {rank: bytes(row) for rank, row in everyone}, " with gather=True")


def described(call: str, values: Mapping[str, object]) -> bytes:
    """Return a call and its values as a text that ranks can compare."""
    return json.dumps([call, {name: str(value) for name, value in values.items()}]).encode()


def fingerprint(text: bytes) -> int:
    """Return a hash below 2^56."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def raise_difference(call: str, everyone: Mapping[int, bytes], how: str = "") -> None:
    """Raise for the first value that differs in what the ranks, by number, have described."""
    said = {r: json.loads(text) for r, text in everyone.items()}
    if refusals := {r: its[REFUSAL] for r, (_, its) in said.items() if REFUSAL in its}:
        listed = "; ".join(f"on rank {r} {error}" for r, error in refusals.items())
        raise ValueError(
            f"expected every rank to accept its arguments for {call}{how}, got {listed}"
        )
    if elsewhere := [r for r, (theirs, _) in said.items() if theirs != call]:
        raise ValueError(
            f"expected every rank to be in {call}{how}, as rank {rank()} is, got ranks "
            f"{elsewhere} in another loss"
        )
    for name in dict.fromkeys(name for _, theirs in said.values() for name in theirs):
        received = {r: theirs.get(name) for r, (_, theirs) in said.items()}
        if len(set(received.values())) > 1:
            listed = ", ".join(f"{value} on rank {r}" for r, value in received.items())
            hint = "; the last batch of an epoch? Drop it (drop_last=True)" if name == "B" else ""
            raise ValueError(
                f"expected the same {name} on every rank for {call}{how}, got {listed}{hint}"
            )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gathered = x.new_empty((num_ranks() * x.shape[0], *x.shape[1:]))
        _all_gather(gathered, x.contiguous(), group=None)  # PyTorch 2.6 compiles it named only
        return gathered

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return _Scatter.apply(*upstream)  # type: ignore[no-untyped-call]  # as above


class _Scatter(torch.autograd.Function):
    """Each rank's own rows of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        own = x.new_empty((x.shape[0] // num_ranks(), *x.shape[1:]))
        _reduce_scatter(own, x.contiguous())
        return own

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return _Gather.apply(*upstream)  # type: ignore[no-untyped-call]  # as above


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return _Sum.apply(*upstream)  # type: ignore[no-untyped-call]  # as above


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return _Sum.apply(*upstream) / num_ranks()  # type: ignore[no-untyped-call]  # as above
