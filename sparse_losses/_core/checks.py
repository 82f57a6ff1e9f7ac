"""Argument checks; their errors say what was expected and what was passed."""

import math
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparse_losses._core.private_torch import transforms_are_active

PLAIN = (Tensor, nn.Parameter)


class Declared(NamedTuple):
    """The declaration of one tensor."""

    shapes: tuple[tuple[str, ...], ...]  # alternatives, each with its named dimensions
    remarks: frozenset[str]


def declared(text: str) -> Declared:
    """Parse a declaration such as ``"N D or B N D, optional, csr"``: shapes, then remarks."""
    shapes, *remarks = (part.strip() for part in text.split(","))
    return Declared(tuple(tuple(s.split()) for s in shapes.split(" or ")), frozenset(remarks))


def check_shapes(**tensors: tuple[Tensor | None, str]) -> dict[str, int]:
    """Call ``check_tensors`` on tensors with their declarations: ``x=(x, "B V")``."""
    declarations = {name: declared(text) for name, (_, text) in tensors.items()}
    return check_tensors(declarations, {name: x for name, (x, _) in tensors.items()})


def check_tensors(
    declaration: Mapping[str, Declared], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Check tensors, all on one device; return the size of each dimension, which the first sets."""
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    owner, one = "", None
    for name, (shapes, remarks) in declaration.items():
        tensor: Any = arguments.get(name)
        if tensor is None and "optional" in remarks:
            continue
        if type(tensor) not in PLAIN:
            tensor = _checked_type(name, tensor)
        if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_nested:
            _check_layout(name, tensor, remarks)
        received = tensor.shape
        shape = shapes[0]
        for other in shapes[1:]:  # PyTorch 2.6 cannot compile `next` with a default
            shape = shape if len(shape) == len(received) else other
        if len(shape) != len(received):
            wanted = " or ".join("[" + ", ".join(s) + "]" for s in shapes)
            raise ValueError(f"expected `{name}` of shape {wanted}, got {list(received)}")
        for letter, size in zip(shape, received, strict=True):
            before = sizes.get(letter)
            if before == size:
                continue
            if before is not None:
                known = [str(sizes[o]) if first.get(o, name) != name else o for o in shape]
                raise ValueError(
                    f"expected `{name}` of shape [{', '.join(shape)}] = [{', '.join(known)}] "
                    f"({letter} = {before} from `{first[letter]}`), got {list(received)}"
                )
            sizes[letter], first[letter] = size, name
        if one is None:
            owner, one = name, tensor
        elif not (one.is_cpu and tensor.is_cpu) and tensor.device != one.device:  # slow
            where = f"{one.device}, where `{owner}` is"
            raise ValueError(f"expected `{name}` on {where}, got {tensor.device}")
    return sizes


def _checked_type(name: str, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected `{name}` to be a torch.Tensor, got {type(tensor).__name__}")
    if type(tensor).__name__ == "DTensor":
        raise TypeError(
            f"expected `{name}` to be a plain tensor, got a DTensor: hand over `full_tensor()`, or "
            "call the module that `fully_shard` has wrapped"
        )
    return tensor


def _check_layout(name: str, tensor: Tensor, remarks: frozenset[str]) -> None:
    if tensor.is_complex():
        raise TypeError(f"expected `{name}` to be real, got {tensor.dtype}")
    if tensor.is_nested:
        raise TypeError(
            f"expected `{name}` to be dense, got a nested tensor: pad it, with "
            "`torch.nested.to_padded_tensor`, and give a mask"
        )
    is_matrix = tensor.layout == torch.sparse_csr and tensor.ndim == 2
    if tensor.layout != torch.strided and not ("csr" in remarks and is_matrix):
        wanted = "dense or a matrix in torch.sparse_csr" if "csr" in remarks else "dense"
        received = f"{tensor.layout} {list(tensor.shape)}"
        raise TypeError(f"expected `{name}` to be {wanted}, got {received}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise a ``ValueError`` that lists the choices unless ``value`` is one of them."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"expected `{name}` to be one of {allowed}, got {value!r}")


def check_choices(name: str, values: object, choices: Sequence[object]) -> None:
    """Raise unless ``values`` is a tuple or list of choices, the first choice among them."""
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"expected `{name}` to be a tuple, got {values!r}")
    for value in values:
        check_choice(name, value, choices)
    if choices[0] not in values:
        raise ValueError(f"expected `{name}` to contain {choices[0]!r}, got {values!r}")


def check_number(
    name: str, value: object, *, minimum: float = -math.inf, exclusive: bool = False
) -> None:
    """Raise unless ``value`` is a finite real number >= ``minimum`` (> if ``exclusive``)."""
    # A hyperparameter may be symbolic here; a comparison would specialise the compiled graph.
    if torch.compiler.is_compiling():
        return
    bound = f" {'>' if exclusive else '>='} {minimum:g}" if minimum > -math.inf else ""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"expected `{name}` to be a number{bound}, got {type(value).__name__}")
    number: Any = value
    is_finite = abs(number) <= sys.float_info.max  # also of an integer that no float can hold
    if not is_finite or number < minimum or (exclusive and number == minimum):
        raise ValueError(f"expected `{name}` to be a finite number{bound}, got {value!r}")


def check_integer(name: str, value: object, *, minimum: int) -> None:
    """Raise unless ``value`` is an integer >= ``minimum``."""
    if torch.compiler.is_compiling():
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"expected `{name}` to be an integer, got {type(value).__name__}")
    if int(value) < minimum:
        raise ValueError(f"expected `{name}` to be an integer >= {minimum}, got {value!r}")


def check_flag(**flags: object) -> None:
    """Raise unless all values are bool; the string ``"False"``, for one, would count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"expected `{name}` to be True or False, got {value!r}")


def check_zero_one(name: str, tensor: Tensor, mask: Tensor | None = None) -> None:
    """Raise if a value, in the rows of ``mask``, is neither 0 nor 1; only where reading is free."""
    if tensor.dtype != torch.bool and values_can_be_checked(tensor):
        wrong = tensor != (tensor != 0)  # True equals 1
        wrong = wrong if mask is None else wrong & mask[:, None]
        if wrong.any():
            raise ValueError(f"expected `{name}` to be 0 or 1, got {tensor[wrong][0].item():g}")


def check_weights(name: str, weights: Tensor | None) -> None:
    """Raise if a weight is below 0; only where reading is free."""
    if weights is not None and values_can_be_checked(weights) and (weights < 0).any():
        raise ValueError(f"expected `{name}` >= 0, got {weights.min().item():g}")


def check_unit_interval(name: str, tensor: Tensor) -> None:
    """Raise unless all values are finite and in [0, 1]; only where reading is free."""
    if tensor.numel() > 0 and values_can_be_checked(tensor):
        low, high = tensor.aminmax()
        # The tolerance is for rounding; a NaN fails this comparison.
        if not (low >= -1e-6 and high <= 1 + 1e-6):
            received = f"got values from {low.item():g} to {high.item():g}"
            raise ValueError(f"expected `{name}` finite and in [0, 1], {received}")


def check_csr(name: str, x: Tensor) -> None:
    """Raise unless the columns of a CSR tensor rise in each row; only where reading is free."""
    column, starts = x.col_indices(), x.crow_indices()[1:-1]
    if not values_can_be_checked(column) or len(column) == 0:
        return
    low, high = (bound.item() for bound in column.aminmax())
    if low < 0 or high >= x.shape[1]:
        raise ValueError(f"expected columns of `{name}` in [0, {x.shape[1]}), got {low} to {high}")
    rises = column.diff() > 0
    rises[starts[(starts > 0) & (starts < len(column))] - 1] = True  # a new row
    if not rises.all():
        raise ValueError(
            f"expected `{name}` with rising columns in each row, got unsorted or repeated ones: "
            "sort its entries and add those of one column"
        )


def check_entries(name: str, x: Tensor) -> None:
    """Raise if an entry of a CSR tensor is below 0; only where reading is free."""
    if x.layout == torch.sparse_csr:
        check_weights(name, x.values())


def check_bound(name: str, value: object, bound: str) -> None:
    """Raise unless a number is within a bound as ``loss`` declares it."""
    bound, _, learnable = bound.partition(", ")
    if learnable and isinstance(value, Tensor):
        if value.ndim != 0:
            raise ValueError(
                f"expected `{name}` to be a number or a 0-d tensor, got a tensor of shape "
                f"{list(value.shape)}"
            )
        if not value.is_floating_point():
            raise TypeError(f"expected `{name}` to be floating point, got {value.dtype}")
    elif bound == "finite":
        check_number(name, value)
    elif bound.startswith("integer"):
        check_integer(name, value, minimum=int(bound.removeprefix("integer >= ")))
    else:
        operator, minimum = bound.split()
        check_number(name, value, minimum=float(minimum), exclusive=operator == ">")


def values_can_be_checked(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` can be read without a device sync or a graph break."""
    # A trace would keep the branch that today's values take.
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and type(tensor) in (Tensor, nn.Parameter)  # a subclass may have no values
        and tensor.is_cpu
        and not transforms_are_active()
    )
