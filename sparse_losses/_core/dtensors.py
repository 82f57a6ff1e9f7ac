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

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparse_losses._core.private_torch import assert_on_device
from sparse_losses.distributed import (
    REFUSAL,
    agree_across_ranks,
    described,
    fingerprint,
    raise_difference,
    skips_size_check,
)

# Functions import these classes where there is a DTensor, as the import takes a third of a second.
# What mypy is told to ignore below are their attributes.
DTensor: TypeAlias = Any
Placement: TypeAlias = Any
Mesh: TypeAlias = Any

OLDEST = 2, 13  # the version whose DTensors are tested; 2.6 lacks operators
COLUMNS = "VDF"  # dimensions that may be sharded, if every rank has a part of them
SHARDED = "BNK" + COLUMNS  # and with rows; positions and candidates may not


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is a DTensor."""
    return type(x).__name__ == "DTensor"


def beside_dtensors(*tensors: Any) -> AbstractContextManager[Any]:
    """Return a context for definitions with these tensors, if a DTensor is among them."""
    meshes = [x.device_mesh for x in tensors if is_dtensor(x)]
    if not meshes:
        return nullcontext()
    _check_version()
    return _BesideDTensors(meshes[0])


def _check_version() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < OLDEST:
        raise ValueError(
            f"expected PyTorch {OLDEST[0]}.{OLDEST[1]} or newer for DTensors, got "
            f"{torch.__version__}: use plain tensors and `gather=True`"
        )


def full(x: Tensor) -> Tensor:
    """Return all of ``x`` as a plain tensor."""
    return x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]


def whole(value: Any) -> Any:
    """Return results for the user: numbers as plain tensors, others as they are."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    return full(value) if isinstance(value, Tensor) and value.ndim == 0 else value


def ranks_of(x: Tensor) -> int:
    """Return how many ranks know all of ``x``: 1 for a plain tensor."""
    return x.device_mesh.size() if is_dtensor(x) else 1  # type: ignore[attr-defined]


def is_first(x: Any) -> bool:
    """Return whether this rank counts for its mesh; every rank does with a plain tensor."""
    return not (is_dtensor(x) and any(x.device_mesh.get_coordinate()))


def on_one_rank(*tensors: Any) -> list[Tensor]:
    """Return whole tensors on the first rank of their mesh, and without rows on the others."""
    rows = slice(None) if all(map(is_first, tensors)) else slice(0)
    return [full(x)[rows] for x in tensors]


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
    for number, placement in enumerate(x.placements):
        is_shard = type(placement).__name__ == "Shard" and dims[placement.dim] in SHARDED
        if not (is_shard or placement.is_replicate() or placement.is_partial()):
            places = [f"Shard({i})" for i, letter in enumerate(dims) if letter in SHARDED]
            either = " or ".join([*places, "Replicate()"])
            raise ValueError(f"expected `{name}` placed as {either}, got {placement!r}")
        if is_shard and dims[placement.dim] in COLUMNS and _leaves_out(x, number):
            raise ValueError(
                f"expected `{name}` to have a part for each of {x.device_mesh.size(number)} ranks "
                f"along {dims[placement.dim]} = {x.shape[placement.dim]}: use Replicate()"
            )


def agree(call: str, gather: object, tensors: Mapping[str, Any], **values: object) -> bool:
    """Call ``agree_across_ranks``; if there are DTensors, compare them over their mesh.

    A rank knows the shape of a DTensor by what it was told, or by its own part alone.

    Raises:
        ValueError: on every rank, if shapes, placements or values differ, or if a part has not the
            size that the shape gives it, on an accelerator an assertion of the device; if PyTorch
            is older than 2.13.
    """
    dtensors = [x for x in tensors.values() if is_dtensor(x)]
    if not dtensors:
        return agree_across_ranks(call, gather, *tensors.values(), **values)
    _check_version()
    if gather is not False:
        raise ValueError(
            "expected gather=False with a DTensor, whose placement says what is global"
        )
    if skips_size_check.get() or torch.compiler.is_compiling():
        return True
    values |= {f"`{name}`": _layout(x) for name, x in tensors.items()}
    _compare(call, dtensors[0], values)
    return True


def refuse(call: str, gather: object, arguments: Iterable[object], error: Exception) -> None:
    """Tell the other ranks, if they compare this call, why this rank has refused its arguments.

    They raise an error that repeats this one, which is the caller's to raise.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    dtensors = [x for x in tensors if is_dtensor(x)]
    said = {REFUSAL: f"{type(error).__name__}: {error}"}
    with suppress(ValueError, RuntimeError):  # what the others did wrong, or that they have left
        if not dtensors:
            agree_across_ranks(call, bool(gather), *tensors or [torch.empty(0)], **said)
        elif not (skips_size_check.get() or torch.compiler.is_compiling()):
            _compare(call, dtensors[0], said)


def _compare(call: str, first: DTensor, values: Mapping[str, object]) -> None:
    """Raise on every rank if values differ, without a wait for an accelerator: by their hash."""
    text = described(call, values)
    own = torch.full((1,), fingerprint(text), device=first.device)
    largest, smallest = _extremes(own, first.device_mesh)
    is_same = (largest == smallest).all()
    if type(is_same) is not Tensor or not is_same.is_cpu:
        assert_on_device(is_same, f"expected the same sizes and settings on every rank for {call}")
    elif not is_same:
        everyone = {dist.get_rank(): text}
        for group in _groups(first.device_mesh):
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, everyone, group=group)
            everyone = {rank: said for part in parts for rank, said in part.items()}
        raise_difference(call, everyone)


@torch.no_grad()
def check_replicated(name: str, x: Tensor, mesh: Mesh) -> None:
    """Raise if a plain tensor ``[..., D]``, which counts as replicated, differs between ranks.

    The ranks compare the norm and the D sums; rounding changes these by far less than 3% of the
    norm, another text or dropout by more.
    """
    if skips_size_check.get() or torch.compiler.is_compiling():
        return
    dtype = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dtype=dtype)
    sums = x.flatten(0, -2).sum(0, dtype=dtype)
    largest, smallest = _extremes(torch.cat([norm[None], sums]), mesh)
    differs = torch.linalg.vector_norm(largest - smallest) > 0.03 * largest[0]  # not if it is NaN
    message = f"expected the same `{name}` on every rank beside DTensors: a plain tensor counts as "
    hint = "replicated. Use the same batches and seeds; with FSDP2, call the wrapped module itself"
    assert_on_device(~differs, message + hint)


def _groups(mesh: Mesh) -> list[Any]:
    return [mesh.get_group(number) for number in range(mesh.ndim)]


def _extremes(x: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest of all ranks' ``x``, element by element."""
    extremes = torch.stack([x, -x])
    for group in _groups(mesh):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return extremes[0], -extremes[1]


def _layout(x: Any) -> str:
    """Return shape and placements, and the own part if it is not what they say."""
    if not is_dtensor(x):
        return "None" if x is None else str(list(x.shape))
    with torch.no_grad():
        part = list(x.to_local().shape)
    expected, _ = _own_part(x)
    layout = f"{list(x.shape)} of {x.dtype} placed as {list(x.placements)}"
    if part == expected:
        return layout
    return f"{layout}, of which rank {dist.get_rank()} has {part} instead of {expected}"


def on_parts(
    function: Callable[..., Any], result: str, **tensors: tuple[Tensor | None, str]
) -> Any:
    """Return ``function(**tensors)``, computed by every rank for its own parts.

    Tensors come with the names of their dimensions, as ``weight=(weight, "V H")``; ``result`` names
    those of the results. A dimension that is sharded in one tensor is sharded in all. The gradient
    of a tensor without that dimension is summed over the ranks once.

    Raises:
        ValueError: if tensors are sharded by different dimensions along one of the mesh.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    present: dict[str, tuple[Any, list[str]]] = {
        name: (x, dims.split()) for name, (x, dims) in tensors.items() if x is not None
    }
    first = next(x for x, _ in present.values() if is_dtensor(x))
    sharded: list[dict[str, str]] = [{} for _ in first.placements]  # and by which tensor
    sizes: dict[str, int] = {}
    for name, (x, dims) in present.items():
        sizes.update(zip(dims, x.shape, strict=False))
        for found, placement in zip(sharded, x.placements if is_dtensor(x) else (), strict=False):
            if placement.is_shard():
                found[dims[placement.dim]] = name
    for found in sharded:
        if len(found) > 1:
            (letter, name), (other, its), *_ = found.items()
            raise ValueError(
                f"expected `{its}` sharded along {letter}, as `{name}` is, or along another "
                f"dimension of the mesh, got {other}"
            )
    along = ["".join(found) for found in sharded]

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


class _BesideDTensors(TorchFunctionMode):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        values = [*args, *kwargs.values()]
        values += [each for x in values if type(x) in (list, tuple) for each in x]
        if not any(map(is_dtensor, values)):
            return function(*args, **kwargs)
        args = [self._beside(x) for x in args]
        kwargs = {name: self._beside(x) for name, x in kwargs.items()}
        return _summed(_OPERATORS.get(function, function)(*args, **kwargs))

    def _beside(self, x: Any) -> Any:
        if type(x) in (list, tuple):
            return type(x)(self._beside(each) for each in x)
        is_plain = isinstance(x, Tensor) and not is_dtensor(x)
        return _replicated(x, self._mesh) if is_plain else x


def _replicated(x: Tensor, mesh: Mesh) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate

    places = [Replicate()] * mesh.ndim
    # The second step alone sums a gradient over ranks in a way that has a derivative.
    return DTensor.from_local(x, mesh, places, run_check=False).redistribute(placements=places)


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


def _leaves_out(x: DTensor, number: int) -> bool:
    """Return whether a rank has no part of ``x`` along a dimension of the mesh."""
    ranks, size = x.device_mesh.size(number), x.shape[x.placements[number].dim]
    return bool(-(-size // ranks) * (ranks - 1) >= size)


def _own_part(x: DTensor) -> tuple[list[int], list[int]]:
    """Return the shape of this rank's part of ``x``, and where in ``x`` it starts."""
    sizes, starts = list(x.shape), [0] * x.ndim
    for number, p in enumerate(x.placements):
        if p.is_shard():
            ranks, rank = x.device_mesh.size(number), x.device_mesh.get_local_rank(number)
            sizes[p.dim], start = p.local_shard_size_and_offset(sizes[p.dim], ranks, rank)
            starts[p.dim] += start
    return sizes, starts


def _from_parts(
    part: Tensor, like: DTensor, shape: Sequence[int], placements: Sequence[Placement]
) -> DTensor:
    """Return the DTensor of ``shape`` on the mesh of ``like``, of which every rank has a part."""
    stride = torch.empty(shape, device="meta").stride()
    return type(like).from_local(
        part, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


# Operators on rows that are sharded: rows are exchanged for columns, not gathered


def _by_columns(x: DTensor) -> DTensor:
    """Return all rows of some columns of ``x``, instead of all columns of some rows.

    On CPUs PyTorch gathers and drops the rest.
    """
    from torch.distributed.tensor import Replicate, Shard

    to = Shard(x.ndim - 1) if x.ndim > 1 and x.is_floating_point() else Replicate()
    places = [to if p.is_shard(0) else p for p in x.placements]
    # The second step moves nothing but second derivatives, which PyTorch would leave by rows.
    return x.redistribute(placements=places).redistribute(placements=places)


def _matmul(a: DTensor, b: DTensor) -> DTensor:
    """Multiply rows by rows. PyTorch would gather ``b``."""
    sides = [{p.dim for p in x.placements if p.is_shard()} for x in (a, b)]
    if a.ndim == b.ndim == 2 and sides in ([{0}, {1}], [{0}, {0}], [{1}, {1}]):
        product = _by_columns(a) @ _by_columns(b.T).T
        return product.redistribute(placements=a.placements) if sides[0] == {0} else product
    return a @ b


def _cat(tensors: Sequence[DTensor], dim: int = 0) -> DTensor:
    """Concatenate rows, of which PyTorch would gather all."""
    if dim % tensors[0].ndim == 0 and any(_sharded_along(x, 0) for x in tensors):
        tensors = [_by_columns(x) for x in tensors]
    return torch.cat(tensors, dim)  # type: ignore[arg-type]


def _flatten(x: DTensor, start_dim: int = 0, end_dim: int = -1) -> DTensor:
    """Flatten the first dimensions, which PyTorch cannot if their parts are uneven."""
    parts = math.prod(x.device_mesh.size(number) for number in _sharded_along(x, 0))
    return (_by_columns(x) if len(x) % parts else x).flatten(start_dim, end_dim)


def _on_all_ranks(reduce: Callable[..., Any], x: DTensor, *args: Any, **options: Any) -> Any:
    """Reduce ``x``, of which every rank gets a part: PyTorch fails on a rank that has none."""
    from torch.distributed.tensor import Replicate

    places = [
        Replicate() if p.is_shard() and _leaves_out(x, number) else p
        for number, p in enumerate(x.placements)
    ]
    return reduce(x.redistribute(placements=places), *args, **options)


# Operators on columns that are sharded: every rank uses its own


def _own_columns(x: DTensor, ids: DTensor) -> tuple[Tensor, Tensor]:
    """Return ids as numbers of a rank's own columns of ``x``, and which of them it has."""
    ids = ids.redistribute(placements=_of_rows(x)).to_local()
    is_known = ((ids >= 0) & (ids < x.shape[1])).all()
    assert_on_device(is_known, f"expected token ids in [0, V) with V = {x.shape[1]}")
    (_, size), (_, first) = _own_part(x)
    is_own = (ids >= first) & (ids < first + size)
    return torch.where(is_own, ids - first, 0), is_own


def _gather(x: DTensor, dim: int, index: DTensor) -> DTensor:
    if x.ndim != 2 or dim % 2 != 1 or not _sharded_along(x, 1):
        return x.gather(dim, index)
    from torch.distributed.tensor import Partial

    columns, is_own = _own_columns(x, index)
    part = x.to_local().gather(1, columns).masked_fill(~is_own, 0)
    placements = [Partial() if p.is_shard(1) else p for p in x.placements]
    return _from_parts(part, x, (len(x), index.shape[1]), placements)


def _scatter_reduce(x: DTensor, dim: int, index: DTensor, src: DTensor, reduce: str) -> DTensor:
    """Write minima into columns of integers."""
    assert (dim, x.ndim, reduce) == (1, 2, "amin")
    columns, is_own = _own_columns(x, index)
    values = src.redistribute(placements=_of_rows(x)).to_local()
    values = values.masked_fill(~is_own, torch.iinfo(values.dtype).max)
    part = x.to_local().scatter_reduce(1, columns, values, reduce)
    return _from_parts(part, x, x.shape, x.placements)


def _topk(x: DTensor, k: int, dim: int = -1) -> Any:
    """Return the largest of the last dimension: of every rank's largest, the largest.

    PyTorch takes the result of another ``k`` that it has met before.
    """
    assert dim % x.ndim == x.ndim - 1
    numbers = _sharded_along(x, -1)
    ranks = math.prod(x.device_mesh.size(number) for number in numbers)
    if numbers and x.shape[-1] < ranks * (k + ranks):  # a rank may have fewer than k columns
        return _topk(x.redistribute(placements=_of_rows(x)), k)
    values, index = x.to_local().topk(k)
    shape, (_, starts) = (*x.shape[:-1], ranks * k), _own_part(x)
    parts = values, index + starts[-1]
    values, index = (_from_parts(each, x, shape, x.placements) for each in parts)
    if numbers:
        values, index = (each.redistribute(placements=_of_rows(x)) for each in (values, index))
        values, place = _topk(values, k)
        index = index.gather(-1, place)
    return torch.return_types.topk((values, index))


def _max(x: DTensor, dim: int, keepdim: bool = False) -> Any:
    if dim % x.ndim != x.ndim - 1 or not _sharded_along(x, dim):
        return x.max(dim, keepdim)
    values, index = _topk(x, 1)
    if not keepdim:
        values, index = values.squeeze(-1), index.squeeze(-1)
    return torch.return_types.max((values, index))


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
    # The second derivative of PyTorch's `abs` is a plain tensor.
    Tensor.abs: lambda x: x * x.sign() if x.requires_grad else x.abs(),
    Tensor.amax: functools.partial(_on_all_ranks, Tensor.amax),
    Tensor.amin: functools.partial(_on_all_ranks, Tensor.amin),
    Tensor.flatten: _flatten,
    Tensor.gather: _gather,
    Tensor.max: _max,
    Tensor.scatter_reduce: _scatter_reduce,
    Tensor.topk: _topk,
}
