"""DTensors in the definitions: tensors that are sharded over a mesh of ranks.

PyTorch computes with a DTensor as if it were whole and moves what an operator needs, so that a
definition runs as it is, within ``beside_dtensors``. There

- a plain tensor beside a DTensor counts as replicated, in the backward pass too, which runs outside
  of the context, and gets its whole gradient on every rank (PyTorch's ``implicit_replication``
  covers neither);
- a sum over ranks is taken once, not by every operator that uses it;
- the operators at the end of this file replace those that PyTorch lacks, or for which it would
  gather ``[B, V]``.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparse_losses._core.private_torch import assert_on_device

# Functions import these classes where there is a DTensor, as the import takes a third of a second.
# What mypy is told to ignore below are their attributes, and `apply` of autograd's functions.
DTensor: TypeAlias = Any
Placement: TypeAlias = Any
Mesh: TypeAlias = Any

T = TypeVar("T")

OLDEST = 2, 13  # the version whose DTensors are tested; 2.6 lacks operators
SHARDED = "BNKVDF"  # dimensions that may be sharded: rows and columns, not positions or candidates


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is a DTensor."""
    return type(x).__name__ == "DTensor"


def beside_dtensors(*tensors: Any) -> AbstractContextManager[Any]:
    """Return a context for definitions with these tensors, if a DTensor is among them."""
    meshes = [x.device_mesh for x in tensors if is_dtensor(x)]
    if meshes:
        check_version()
    return _BesideDTensors(meshes[0]) if meshes else nullcontext()


def check_version() -> None:
    """Raise for a PyTorch whose DTensors lack operators, or have not been tested.

    Raises:
        ValueError: if PyTorch is older than 2.13.
    """
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < OLDEST:
        raise ValueError(
            f"expected PyTorch {OLDEST[0]}.{OLDEST[1]} or newer for DTensors, got "
            f"{torch.__version__}: use plain tensors and `gather=True`"
        )


def whole(value: T) -> T:
    """Return results for the user: numbers as plain tensors, no sum outstanding."""
    result: Any = value
    if isinstance(value, tuple):
        result = tuple(whole(each) for each in value)
    elif isinstance(value, dict):
        result = {name: whole(each) for name, each in value.items()}
    elif is_dtensor(value):
        result = _summed(value) if result.ndim else result.full_tensor()
    return result  # type: ignore[no-any-return]


def full(x: Tensor) -> Tensor:
    """Return a statistic as a plain tensor, of all ranks where it is a DTensor."""
    return x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]


def ranks_of(x: Tensor) -> int:
    """Return how many ranks know all of ``x``: 1 for a plain tensor."""
    return x.device_mesh.size() if is_dtensor(x) else 1  # type: ignore[attr-defined]


def chosen(x: Tensor, is_chosen: Tensor) -> Tensor:
    """Return ``x[is_chosen]``; of DTensors those of all ranks, in no order, on the CPU."""
    if not is_dtensor(x):
        return x[is_chosen]
    whole_x: DTensor = _summed(x)
    mask: DTensor = _summed(is_chosen)
    part: Tensor = whole_x.to_local()[mask.redistribute(placements=whole_x.placements).to_local()]
    for number, placement in enumerate(whole_x.placements):
        if placement.is_shard():
            group = whole_x.device_mesh.get_group(number)
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, part.cpu(), group=group)
            part = torch.cat(parts)
    return part.cpu()


def rows_of_rank(*tensors: Any) -> list[Tensor]:
    """Return the rows of this rank; of those that several ranks have, all are one rank's."""
    first = next(x for x in tensors if is_dtensor(x))
    mesh, rows = first.device_mesh, _replicate(first.placements, lambda p: not p.is_shard(0))
    numbers = [number for number, placement in enumerate(rows) if placement.is_replicate()]
    others = (x if is_dtensor(x) else _replicated(x, mesh) for x in tensors)
    parts = [x.redistribute(placements=rows).to_local() for x in others]
    is_first = not any(mesh.get_local_rank(number) for number in numbers)
    return [part if is_first else part[:0] for part in parts]


def refuse_dtensors(**tensors: object) -> None:
    """Raise for a DTensor, in functions that are not called in a training step."""
    for name, x in tensors.items():
        if is_dtensor(x):
            raise TypeError(
                f"expected `{name}` to be a plain tensor, got a DTensor: hand over `full_tensor()`"
            )


def check_placements(name: str, x: DTensor, dims: Sequence[str], mesh: Mesh | None) -> None:
    """Raise for a placement with which losses cannot be computed, or a second mesh."""
    if mesh not in (None, x.device_mesh):
        raise ValueError(f"expected `{name}` on the mesh {mesh}, got {x.device_mesh}")
    for placement in x.placements:
        is_shard = type(placement).__name__ == "Shard" and dims[placement.dim] in SHARDED
        if not (is_shard or placement.is_replicate() or placement.is_partial()):
            places = [f"Shard({i})" for i, letter in enumerate(dims) if letter in SHARDED]
            either = " or ".join([*places, "Replicate()"])
            raise ValueError(f"expected `{name}` placed as {either}, got {placement!r}")


def on_parts(
    function: Callable[..., Any], result: str, **tensors: tuple[Tensor | None, str]
) -> Any:
    """Return ``function(**tensors)``, computed by every rank for its own parts.

    Tensors come with the names of their dimensions, as ``weight=(weight, "V H")``; ``result`` names
    those of the results. A dimension that is sharded in one tensor is sharded in all. The gradient
    of a tensor without that dimension is summed over the ranks once.

    Raises:
        ValueError: if tensors are sharded by different dimensions along one of the mesh, or a rank
            is left without columns.
    """
    check_version()
    from torch.distributed.tensor import Partial, Replicate, Shard

    present: dict[str, tuple[Any, list[str]]] = {
        name: (x, dims.split()) for name, (x, dims) in tensors.items() if x is not None
    }
    first = next(x for x, _ in present.values() if is_dtensor(x))
    along = _sharded_dimensions(present, first.device_mesh)
    sizes = {
        letter: n for x, dims in present.values() for letter, n in zip(dims, x.shape, strict=False)
    }
    for number, letter in enumerate(along):
        if letter not in ("", "B") and 0 in _chunks(sizes[letter], first.device_mesh, number)[0]:
            raise ValueError(
                f"expected {letter} = {sizes[letter]} to leave a part for each of the "
                f"{first.device_mesh.size(number)} ranks that share it"
            )

    def placed(dims: Sequence[str], otherwise: Placement) -> list[Placement]:
        """Return the placements of a tensor: ``otherwise`` where others are sharded, not it."""
        own = [Shard(dims.index(d)) if d in dims else otherwise if d else None for d in along]
        return [placement or Replicate() for placement in own]

    parts = {}
    for name, (x, dims) in present.items():
        x = x if is_dtensor(x) else _replicated(x, first.device_mesh)
        x = x.redistribute(placements=placed(dims, Replicate()))
        parts[name] = x.to_local(grad_placements=placed(dims, Partial()))
    outputs, dims = function(**parts), result.split()
    shape, placements = [sizes[letter] for letter in dims], placed(dims, Replicate())
    if isinstance(outputs, tuple):
        return tuple(_from_parts(each, first, shape, placements) for each in outputs)
    return _from_parts(outputs, first, shape, placements)


def _sharded_dimensions(tensors: dict[str, tuple[Any, list[str]]], mesh: Mesh) -> list[str]:
    """Return the dimension of the tensors that is sharded along each of the mesh, or ``""``."""
    along, owner = [""] * mesh.ndim, [""] * mesh.ndim
    for name, (x, dims) in tensors.items():
        for number, placement in enumerate(x.placements if is_dtensor(x) else ()):
            if not placement.is_shard():
                continue
            letter = dims[placement.dim]
            if along[number] not in ("", letter):
                raise ValueError(
                    f"expected `{name}` sharded along {along[number]}, as `{owner[number]}` is, or "
                    f"along another dimension of the mesh, got {placement!r}, along {letter}"
                )
            along[number], owner[number] = letter, name
    return along


class _BesideDTensors(TorchFunctionMode):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(is_dtensor(x) for x in _flat([*args, *kwargs.values()])):
            return function(*args, **kwargs)
        args = [self._beside(x) for x in args]
        kwargs = {name: self._beside(x) for name, x in kwargs.items()}
        return _summed(_OPERATORS.get(function, function)(*args, **kwargs))

    def _beside(self, x: Any) -> Any:
        if type(x) in (list, tuple):
            return type(x)(self._beside(each) for each in x)
        is_plain = isinstance(x, Tensor) and not is_dtensor(x)
        return _replicated(x, self._mesh) if is_plain else x


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for x in values:
        yield from x if isinstance(x, list | tuple) else (x,)


def _replicated(x: Tensor, mesh: Mesh) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _summed(x: Any) -> Any:
    if not is_dtensor(x) or not any(p.is_partial() for p in x.placements):
        return x
    return x.redistribute(placements=_replicate(x.placements, lambda p: p.is_partial()))


def _replicate(
    placements: Sequence[Placement], which: Callable[[Placement], bool]
) -> list[Placement]:
    from torch.distributed.tensor import Replicate

    return [Replicate() if which(p) else p for p in placements]


def _of_rows(x: DTensor) -> list[Placement]:
    """Return the placements of ``x`` with its last dimension replicated."""
    return _replicate(x.placements, lambda p: p.is_shard(x.ndim - 1))


def _sharded_along(x: DTensor, dim: int) -> list[int]:
    """Return the dimensions of the mesh along which dimension ``dim`` of ``x`` is sharded."""
    return [number for number, p in enumerate(x.placements) if p.is_shard(dim % x.ndim)]


def _chunks(size: int, mesh: Mesh, number: int) -> tuple[list[int], int]:
    """Return the sizes of all parts along a dimension of the mesh, and which is this rank's."""
    ranks = mesh.size(number)
    most = -(-size // ranks)
    parts = [max(min(most, size - rank * most), 0) for rank in range(ranks)]
    return parts, mesh.get_local_rank(number)


def _from_parts(
    part: Tensor, like: DTensor, shape: Sequence[int], placements: Sequence[Placement]
) -> DTensor:
    """Return the DTensor of ``shape`` on the mesh of ``like``, of which every rank has a part."""
    stride = torch.empty(shape, device="meta").stride()
    return type(like).from_local(
        part, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


# ------------------------------------------------------------------------------------------------
# Operators on rows that are sharded: what belongs to others is exchanged, not gathered


class _AllToAll(torch.autograd.Function):
    """Sends a part of a vector to every rank and returns what all ranks have sent to this one."""

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, sent_sizes: list[int], sizes: list[int], group: Any
    ) -> Tensor:
        ctx.back = sizes, sent_sizes, group
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent.contiguous(), sizes, sent_sizes, group)
        return received

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return _AllToAll.apply(*upstream, *ctx.back), None, None, None  # type: ignore[no-untyped-call]


def _matmul(a: DTensor, b: DTensor) -> DTensor:
    """Multiply rows by rows.

    PyTorch would gather ``b``. Here every rank gets some columns of all rows, so that it never
    holds all of ``[B, V]``; the products are added up, and a rank keeps its own rows of the scores.
    """
    numbers = _sharded_along(a, 0) if a.ndim == b.ndim == 2 else []
    if not numbers or numbers != _sharded_along(b, 1):
        return a @ b
    from torch.distributed.tensor import Partial, Replicate, Shard

    by_column, by_row = list(a.placements), list(b.placements)
    sums: list[Placement] = [Replicate()] * a.device_mesh.ndim
    rows = list(sums)
    for number in range(a.device_mesh.ndim):
        if number in numbers:
            sums[number], rows[number] = Partial(), Shard(0)
        elif a.placements[number].is_shard(1) or b.placements[number].is_shard(0):
            sums[number], by_column[number], by_row[number] = Partial(), Shard(1), Shard(0)
    a, b = a.redistribute(placements=by_column), b.redistribute(placements=by_row)
    part = _columns_of_rows(a, numbers) @ _columns_of_rows(b.T, numbers).T
    return _from_parts(part, a, (len(a), b.shape[1]), sums).redistribute(placements=rows)


def _columns_of_rows(x: DTensor, numbers: list[int]) -> Any:
    """Return all rows of some columns of ``x``, instead of all columns of some rows."""
    mesh, size, part = x.device_mesh, len(x), x.to_local()
    rows: dict[int, list[int]] = {}
    for number in numbers:
        rows[number], own = _chunks(size, mesh, number)
        size = rows[number][own]
    for number in reversed(numbers):
        columns, own = _chunks(part.shape[1], mesh, number)
        sent = torch.cat([each.flatten() for each in part.split(columns, dim=1)])
        sent_sizes = [rows[number][own] * n for n in columns]
        sizes = [n * columns[own] for n in rows[number]]
        flat = _AllToAll.apply(sent, sent_sizes, sizes, mesh.get_group(number))  # type: ignore[no-untyped-call]
        part = flat.view(sum(rows[number]), columns[own])
    return part


def _cat(tensors: Sequence[DTensor], dim: int = 0) -> DTensor:
    """Concatenate rows, of which PyTorch would gather all."""
    like = next((x for x in tensors if _sharded_along(x, 0)), None)
    if like is None or dim % like.ndim:
        return torch.cat(tensors, dim)  # type: ignore[arg-type]
    parts = [x.redistribute(placements=like.placements).to_local() for x in tensors]
    shape = (sum(len(x) for x in tensors), *like.shape[1:])
    return _in_order(torch.cat(parts), [len(x) for x in tensors], 1, like, shape, like.placements)


def _flatten(x: DTensor, start_dim: int = 0, end_dim: int = -1) -> DTensor:
    """Flatten the first dimensions, which PyTorch cannot if their parts are uneven."""
    end = end_dim % x.ndim
    if start_dim or not any(len(x) % x.device_mesh.size(n) for n in _sharded_along(x, 0)):
        return x.flatten(start_dim, end_dim)
    from torch.distributed.tensor import Shard

    shifted = [Shard(p.dim - end) if p.is_shard() and p.dim > end else p for p in x.placements]
    shape = (math.prod(x.shape[: end + 1]), *x.shape[end + 1 :])
    part = x.to_local().flatten(0, end)
    return _in_order(part, [len(x)], math.prod(x.shape[1 : end + 1]), x, shape, shifted)


def _in_order(
    part: Tensor,
    lengths: Sequence[int],
    size: int,
    like: DTensor,
    shape: Sequence[int],
    placements: Sequence[Placement],
) -> DTensor:
    """Return the DTensor of all rows, of which every rank has a part of each of several tensors.

    The tensors have ``lengths``, sharded like ``like``, and ``size`` rows for each. A rank sends
    the rows that are another's from now on.
    """
    mesh, (number, *others) = like.device_mesh, _sharded_along(like, 0)
    if others:
        raise ValueError("expected rows sharded along one dimension of the mesh, got two")
    own, places = mesh.get_local_rank(number), np.arange(size * sum(lengths))
    parts = [
        _split(x, [size * n for n in _chunks(length, mesh, number)[0]])
        for x, length in zip(_split(places, [size * n for n in lengths]), lengths, strict=True)
    ]
    before = [np.concatenate(each) for each in zip(*parts, strict=True)]  # of the rows of each rank
    after = _split(places, _chunks(len(places), mesh, number)[0])
    sent = [int(np.isin(before[own], each).sum()) for each in after]
    received = [np.sort(each[np.isin(each, after[own])]) for each in before]
    row_size = math.prod(part.shape[1:])
    flat = _AllToAll.apply(  # type: ignore[no-untyped-call]
        part[before[own].argsort().tolist()].flatten(),
        [row_size * n for n in sent],
        [row_size * len(each) for each in received],
        mesh.get_group(number),
    )
    order = np.concatenate(received).argsort().tolist()
    return _from_parts(flat.view(len(order), *part.shape[1:])[order], like, shape, placements)


def _split(x: Any, sizes: list[int]) -> list[Any]:
    return np.split(x, np.cumsum(sizes)[:-1])


# ------------------------------------------------------------------------------------------------
# Operators on columns that are sharded: every rank uses its own


def _own_range(x: DTensor) -> tuple[int, int]:
    """Return the first of a rank's own columns of ``x``, and their number."""
    first, size = 0, x.shape[-1]
    for number in _sharded_along(x, -1):
        sizes, own = _chunks(size, x.device_mesh, number)
        first, size = first + sum(sizes[:own]), sizes[own]
    return first, size


def _own_columns(x: DTensor, ids: DTensor) -> tuple[Tensor, Tensor]:
    """Return ids as numbers of a rank's own columns of ``x``, and which of them it has."""
    first, size = _own_range(x)
    ids = ids.redistribute(placements=_of_rows(x)).to_local()
    is_known = ((ids >= 0) & (ids < x.shape[1])).all()
    if not ids.is_cpu:
        assert_on_device(is_known, f"expected token ids in [0, V) with V = {x.shape[1]}")
    elif not is_known:
        extremes = f"{ids.min().item()} to {ids.max().item()}"
        raise ValueError(f"expected token ids in [0, V) with V = {x.shape[1]}, got {extremes}")
    is_own = (ids >= first) & (ids < first + size)
    return torch.where(is_own, ids - first, 0), is_own


def _gather(x: DTensor, dim: int, index: DTensor) -> DTensor:
    if x.ndim != 2 or dim % 2 != 1 or not _sharded_along(x, 1):
        return x.gather(dim, index)
    from torch.distributed.tensor import Partial

    if x.dtype == torch.bool:  # not every backend can send bool
        return _summed(_gather(x.to(torch.uint8), dim, index)).bool()
    part, (columns, is_own) = x.to_local(), _own_columns(x, index)
    if part.shape[1]:
        part = part.gather(1, columns).masked_fill(~is_own, 0)
    else:  # zeros, and part of the graph
        part = part.sum(1, keepdim=True).expand(is_own.shape)
    placements = [Partial() if p.is_shard(1) else p for p in x.placements]
    return _from_parts(part, x, (len(x), index.shape[1]), placements)


def _scatter_reduce(x: DTensor, dim: int, index: DTensor, src: DTensor, reduce: str) -> DTensor:
    """Write minima into columns of integers."""
    assert (dim, x.ndim, reduce) == (1, 2, "amin")
    part, (columns, is_own) = x.to_local(), _own_columns(x, index)
    values = src.redistribute(placements=_of_rows(x)).to_local()
    values = values.masked_fill(~is_own, torch.iinfo(values.dtype).max)
    if part.shape[1]:
        part = part.scatter_reduce(1, columns, values, reduce)
    return _from_parts(part, x, x.shape, x.placements)


def _topk(x: DTensor, k: int, dim: int = -1) -> Any:
    """Return the largest of the last dimension: of every rank's largest, the largest.

    PyTorch takes the result of another ``k`` that it has met before.
    """
    assert dim % x.ndim == x.ndim - 1
    numbers, (first, size) = _sharded_along(x, -1), _own_range(x)
    part = torch.nn.functional.pad(x.to_local(), (0, max(k - size, 0)), value=-torch.inf)
    values, index = part.topk(k)
    ranks = math.prod(x.device_mesh.size(number) for number in numbers)
    shape = (*x.shape[:-1], ranks * k)
    values, index = (_from_parts(each, x, shape, x.placements) for each in (values, index + first))
    if numbers:
        values, index = (each.redistribute(placements=_of_rows(x)) for each in (values, index))
        values, place = _topk(values, k)
        index = index.gather(-1, place)
    return torch.return_types.topk((values, index))


def _max(x: DTensor, *args: Any, **options: Any) -> Any:
    dim = options.get("dim", args[0] if args else None)
    if not isinstance(dim, int) or dim % x.ndim != x.ndim - 1 or not _sharded_along(x, dim):
        return x.max(*args, **options)
    values, index = _topk(x, 1)
    if not options.get("keepdim", False):
        values, index = values.squeeze(-1), index.squeeze(-1)
    return torch.return_types.max((values, index))


def _amax(x: DTensor, dim: Any = (), keepdim: bool = False) -> DTensor:
    """Return the maximum; PyTorch's fails on a rank whose part is empty, as uneven parts may be."""
    if x.to_local().numel() or not x.numel():
        return x.amax(dim, keepdim)
    from torch.distributed.tensor import Partial

    like = x.detach().sum(dim, keepdim)
    placements = [Partial("max") if p.is_partial() else p for p in like.placements]
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    part = torch.full_like(like.to_local(), lowest, dtype=x.dtype)
    return _from_parts(part, x, like.shape, placements)


def _amin(x: DTensor, dim: Any = (), keepdim: bool = False) -> DTensor:
    return -_summed(_amax(-x, dim, keepdim))


def _vector_norm(x: DTensor, **options: Any) -> DTensor:
    """Return the Euclidean norm; PyTorch's has no gradient where it is a sum over ranks."""
    squares = _summed(x.square().sum(**options))
    is_zero = squares == 0
    return squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


_OPERATORS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.linalg.vector_norm: _vector_norm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.amax: _amax,
    Tensor.amin: _amin,
    Tensor.flatten: _flatten,
    Tensor.gather: _gather,
    Tensor.max: _max,
    Tensor.scatter_reduce: _scatter_reduce,
    Tensor.topk: _topk,
}
