"""The ``@loss`` decorator: checks and casts the arguments of a loss before its formula.

Its arguments declare the function's tensors and the bounds of its numbers::

    @loss(activations="B V", token_penalty="V, constant", beta=">= 0")

A tensor is declared by its shapes (``"N D or B N D"``, one capital letter per dimension) and by
remarks. Without remarks it is data: a floating-point tensor that takes part in the choice of the
dtype of the computation and is cast to it.

- ``optional``: may be ``None``. ``csr``: may be sparse (``torch.sparse_csr``), columns rising.
- ``uncast``: data that keeps its dtype.
- ``halves``: data. In eager mode it keeps its half-precision dtype if all tensors with this remark
  have that dtype and the device returns their products in fp32.
- ``layer``: uncast, and multiplied by a layer of the model. Under autocast it is cast to autocast's
  dtype, as by ``nn.Linear``; not on the CPU, where products stay in fp32.
- ``detached``: has no gradient: a teacher's scores, the keys of a momentum encoder.
- ``constant``: cast, but without a part in the choice of the dtype: a penalty, weights.
- ``>= 0``, ``entries >= 0`` (of CSR), ``0 to 1``: other values are refused where reading is free.
- ``mask``: bool, int or float 0/1; converted to bool.
- ``labels``: multi-hot rows, 0 or 1; unchanged. With ``labels at m`` only where mask ``m`` is set.
- ``integer``: ids and counts; unchanged.
- ``token ids at m``: ids in ``[0, V)`` where mask ``m`` is set, anything elsewhere; int64.

What one rank refuses is told to all ranks of the call, so whatever depends on values is refused
here. The bodies refuse sizes and settings alone, which are the same on all ranks.

A number is declared by its bound: ``"finite"``, ``">= 0"``, ``"> 0"`` or ``"integer >= 1"``. With
``learnable`` after a bound it may also be a 0-d tensor of any value, which is cast. A number may be
``None`` where that is its default. Flags and choices need no declaration: their annotations
``bool`` and ``Literal`` define what is allowed; ``tuple[Literal[...], ...]`` stands for several of
the choices, the first always among them.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import (
    Declared,
    check_bound,
    check_choice,
    check_choices,
    check_csr,
    check_entries,
    check_flag,
    check_tensors,
    check_unit_interval,
    check_weights,
    check_zero_one,
    declared,
    values_can_be_checked,
)
from sparse_losses._core.implementations import is_exported
from sparse_losses._core.own_gradient import can_bring_its_gradient
from sparse_losses._core.precision import autocast_off, compute_dtype
from sparse_losses._core.products import HALVES, returns_fp32
from sparse_losses._core.token_ids import as_mask, attended_ids
from sparse_losses.distributed import agree_across_ranks, refuse_across_ranks

NO_DATA = ("mask", "integer", "labels", "token ids")
LEARNABLE = ", learnable"
PADDED = "S"  # the padded length differs between ranks

P = ParamSpec("P")
R = TypeVar("R")


class _Declaration(NamedTuple):
    tensors: Mapping[str, Declared]
    numbers: Mapping[str, str]
    flags: tuple[str, ...]
    choices: Mapping[str, tuple[object, ...]]
    several: Mapping[str, tuple[object, ...]]
    defaults: Mapping[str, Any]

    def check(self, hyperparameters: Mapping[str, Any]) -> None:
        """Raise for an invalid flag, choice or number."""
        for name, value in hyperparameters.items():
            if name in self.flags:
                check_flag(**{name: value})
            elif name in self.choices:
                check_choice(name, value, self.choices[name])
            elif name in self.several:
                check_choices(name, value, self.several[name])
            elif name in self.numbers and (value is not None or self.defaults[name] is not None):
                check_bound(name, value, self.numbers[name])


def loss(**declarations: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare the arguments of a loss: its body runs with them checked and cast, autocast off."""
    tensors = {name: declared(text) for name, text in declarations.items() if text[0].isupper()}
    numbers = {name: text for name, text in declarations.items() if name not in tensors}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
        names = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        kinds = {n: (typing.get_origin(h), typing.get_args(h)) for n, h in hints.items()}
        choices = {n: args for n, (origin, args) in kinds.items() if origin is Literal}
        several = {n: typing.get_args(args[0]) for n, (o, args) in kinds.items() if o is tuple}
        flags = tuple(n for n, h in hints.items() if h is bool and n not in ("gather", "return"))
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        declaration = _Declaration(tensors, numbers, flags, choices, several, defaults)
        learnable = [name for name, bound in numbers.items() if bound.endswith(LEARNABLE)]
        steps, first = _steps(tensors), names[0]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            # PyTorch 2.6 compiles strict=False as strict=True.
            arguments: dict[str, Any] = {**dict(zip(names, args)), **kwargs}  # noqa: B905
            is_wrong = len(arguments) < len(args) + len(kwargs)  # too many, or a duplicate
            if is_wrong or first not in arguments:
                return function(*args, **kwargs)  # Python raises the error
            try:
                if kwargs:
                    declaration.check(kwargs)
                sizes = check_tensors(tensors, arguments)
                dtype = _cast(steps, arguments, sizes)
                data = arguments[first]
                for name in learnable:
                    if isinstance(number := arguments.get(name), Tensor):
                        if not number.is_cpu and number.device != data.device:
                            where = f"{data.device}, where `{first}` is, or on the CPU"
                            raise ValueError(f"expected `{name}` on {where}, got {number.device}")
                        arguments[name] = number.to(dtype)
            except (TypeError, ValueError) as error:
                gather = arguments.get("gather")
                refuse_across_ranks(function.__name__, gather, arguments.values(), error)
                raise
            if arguments.get("gather", False) is not False:
                _agree(function.__name__, declaration, arguments, sizes)
            # This test is cheaper than entering the context.
            is_plain = data.is_cpu and not torch.compiler.is_compiling()
            if (is_plain or is_exported()) and not torch.is_autocast_enabled(data.device.type):
                # mypy cannot type a call by keywords alone.
                return function(**arguments)  # type: ignore[call-arg]
            with autocast_off(data.device):
                return function(**arguments)  # type: ignore[call-arg]  # as above

        checked.declaration = declaration  # type: ignore[attr-defined]  # for the module
        return checked

    return decorate


class _Step(NamedTuple):
    """The treatment of one tensor, parsed once from its remarks."""

    name: str
    kind: str
    mask: str  # the name after "at"
    is_data: bool
    is_detached: bool
    check: Callable[[str, Tensor], None] | None


CHECKS = {">= 0": check_weights, "0 to 1": check_unit_interval, "entries >= 0": check_entries}


def _steps(tensors: Mapping[str, Declared]) -> list[_Step]:
    """Return the steps of a declaration, masks first: other tensors are checked at them."""
    steps = []
    for name, (_, remarks) in tensors.items():
        masks = dict(remark.split(" at ") for remark in remarks if " at " in remark)
        kinds = (*NO_DATA, "layer", "halves", "uncast")
        kind = next((kind for kind in kinds if kind in remarks or kind in masks), "cast")
        is_data = kind not in NO_DATA and "constant" not in remarks
        check = next((CHECKS[remark] for remark in CHECKS if remark in remarks), None)
        mask = masks.get(kind, "")
        steps.append(_Step(name, kind, mask, is_data, "detached" in remarks, check))
    return sorted(steps, key=lambda step: step.kind != "mask")


def _cast(
    steps: Sequence[_Step], arguments: dict[str, Any], sizes: Mapping[str, int]
) -> torch.dtype:
    """Check, detach, cast and convert the tensors; return the dtype to compute in."""
    data: dict[str, Tensor] = {}
    cast, halves = [], []
    for name, kind, mask, is_data, is_detached, check in steps:
        tensor = arguments.get(name)
        if tensor is None:
            continue
        if is_data and tensor.dtype != torch.float32:
            data[name] = tensor
        if check is not None:
            check(name, tensor)
        if tensor.layout == torch.sparse_csr:
            check_csr(name, tensor)
        if is_detached:
            arguments[name] = tensor.detach()
        if kind == "cast":
            cast.append(name)
        elif kind == "mask":
            arguments[name] = as_mask(name, tensor)
        elif kind == "integer":
            if tensor.is_floating_point() or tensor.dtype == torch.bool:
                raise TypeError(f"expected `{name}` to be integers, got {tensor.dtype}")
        elif kind == "labels":
            check_zero_one(name, tensor, arguments.get(mask))
        elif kind == "token ids":
            arguments[name] = attended_ids(name, tensor, arguments[mask], sizes["V"], gathered=True)
        elif kind == "layer":
            arguments[name] = _as_layer(tensor)
        elif kind == "halves":
            halves.append(name)
    dtype = compute_dtype(**data) if data else torch.float32
    if halves and not _multiplied_as_halves([arguments[name] for name in halves]):
        cast += halves
    for name in cast:
        if arguments[name].dtype != dtype:  # this test is cheaper than a call of `to`
            arguments[name] = arguments[name].to(dtype)
    return dtype


def _multiplied_as_halves(inputs: Sequence[Tensor]) -> bool:
    """Whether the device can multiply the inputs in their half dtype and return fp32."""
    dtype = inputs[0].dtype
    return (
        dtype in HALVES
        and all(x.dtype == dtype and x.layout == torch.strided for x in inputs)
        and can_bring_its_gradient(*inputs)
        and returns_fp32(inputs[0].device, dtype)
    )


def _as_layer(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    is_cast = device not in ("cpu", "meta") and tensor.dtype != torch.float64
    is_cast = is_cast and torch.is_autocast_enabled(device)
    return tensor.to(torch.get_autocast_dtype(device)) if is_cast else tensor


def _agree(
    call: str, declaration: _Declaration, arguments: Mapping[str, Any], sizes: Mapping[str, int]
) -> None:
    """Raise unless all ranks make the same call with the same sizes and hyperparameters."""
    tensors = declaration.tensors
    compared: dict[str, object] = {}
    if not torch.compiler.is_compiling():  # a number may be symbolic there
        letters = {letter for shapes, _ in tensors.values() for shape in shapes for letter in shape}
        compared = {letter: sizes.get(letter, 0) for letter in sorted(letters - {PADDED})}
        for name in tensors:
            ndim = getattr(arguments.get(name), "ndim", None)
            compared[f"number of dimensions of `{name}`"] = ndim
        given = {**declaration.defaults, **arguments}
        for name in sorted(given.keys() - tensors.keys() - {"gather"}):
            compared[f"`{name}`"] = shown(given[name])
    present = (arguments.get(name) for name in tensors)
    agree_across_ranks(call, arguments.get("gather", False), *present, **compared)


class LossModule(nn.Module):
    """Base of all loss modules: hyperparameters as plain attributes, and their repr."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Store the hyperparameters among a constructor's arguments, its ``locals()``, checked."""
        super().__init__()
        # `loss` sets the attribute; mypy knows no attributes of functions.
        self._declaration: _Declaration = function.declaration  # type: ignore[attr-defined]
        known = self._declaration.defaults.keys() - self._declaration.tensors.keys()
        self._names = tuple(name for name in arguments if name in known)
        for name in self._names:
            setattr(self, name, arguments[name])
        values = self.hyperparameters()
        self._declaration.check(values)
        check_flag(gather=values.get("gather", False))

    def register_constant(self, name: str, tensor: Tensor | None) -> None:
        """Check a tensor as the function would, and register it as a buffer without a gradient."""
        declared = self._declaration.tensors[name]
        check_tensors({name: declared}, {name: tensor})
        tensor = None if tensor is None else tensor.detach()
        # The compiler cannot trace the questions, and makes no inference tensors.
        if tensor is not None and not torch.compiler.is_compiling():
            if type(tensor) is Tensor and not tensor.is_meta:  # a fake tensor has no values
                for remark in CHECKS.keys() & declared.remarks:
                    CHECKS[remark](name, tensor.cpu())
            if tensor.is_inference():  # which autograd cannot save
                with torch.inference_mode(False):
                    tensor = tensor.clone()
        self.register_buffer(name, tensor)

    def hyperparameters(self, **overrides: Any) -> dict[str, Any]:
        """Return the hyperparameters by name; overrides that are not ``None`` take precedence."""
        values = {name: getattr(self, name) for name in self._names}
        values.update((name, value) for name, value in overrides.items() if value is not None)
        return values

    def extra_repr(self) -> str:
        """Return the hyperparameters as ``name=value``."""
        values = {name: getattr(self, name) for name in self._names}
        return ", ".join(f"{name}={_repr(value)}" for name, value in values.items())


def _repr(value: Any) -> str:
    has_values = isinstance(value, Tensor) and value.device.type != "meta"
    return repr(value.tolist()) if has_values else repr(value)


def shown(value: Any) -> str:
    """Return the representation of a hyperparameter; a number is read only where that is free."""
    if isinstance(value, Tensor):
        is_free = value.ndim < 2 and values_can_be_checked(value)
        return repr(value.tolist()) if is_free else f"a tensor {list(value.shape)}"
    is_plain = isinstance(value, (bool, int, float, str, list, tuple))
    return repr(value) if is_plain else f"of {type(value)}"  # an iterator is the ranks' own
