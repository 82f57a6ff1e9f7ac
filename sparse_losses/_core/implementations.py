"""Selection among the ways to compute a loss: its definition and the faster alternatives."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from sparse_losses._core.own_gradient import (
    can_bring_its_gradient,
    is_transformed,
    with_own_gradient,
)
from sparse_losses.distributed import average_grad_over_ranks

__all__ = ["Arguments", "Implementation", "Options", "always", "choose", "compute", "never"]

Arguments: TypeAlias = Sequence[Any]
Options: TypeAlias = Mapping[str, Any]


class Implementation(NamedTuple):
    """One way to compute the value of a definition together with its gradient.

    Attributes:
        name: the value of ``impl`` that selects it.
        unsupported_reason: maps ``(arguments, options)`` to ``None`` if the way supports the call, else to
            the words that follow "expected" in the error.
        is_preferred: maps ``(arguments, options)`` to whether ``impl="auto"`` selects it.
        compute: maps ``(needs, *arguments, **options)`` to the value and the gradients, in order.
            Callers of ``choose`` alone define their own signature.
        compiles: whether ``torch.compile`` can trace it; default False.
    """

    name: str
    unsupported_reason: Callable[[Arguments, Options], str | None]
    is_preferred: Callable[[Arguments, Options], bool]
    compute: Callable[..., Any]
    compiles: bool = False


def always(arguments: Arguments, options: Options) -> bool:
    """``pays`` of a way that is faster wherever it supports the call."""
    return True


def never(arguments: Arguments, options: Options) -> bool:
    """``pays`` of a way that is selected by name only."""
    return False


def choose(
    ways: Sequence[Implementation], impl: str, arguments: Arguments, options: Options
) -> Implementation | None:
    """Return the way named by ``impl``, or for ``"auto"`` the first that supports it and pays.

    ``None`` means the definition. It is used under ``torch.func`` and, unless the way compiles,
    under ``torch.compile``; a way named by ``impl`` is checked there all the same.

    Raises:
        ValueError: if the way named by ``impl`` does not support the call.
    """
    is_eager = can_bring_its_gradient(*arguments)
    is_plain = is_eager or not is_transformed()
    for way in ways:
        can_run = is_eager or (way.compiles and is_plain)
        if impl != way.name and not (impl == "auto" and can_run):
            continue
        why = way.unsupported_reason(arguments, options)
        if why is not None and impl == way.name:
            raise ValueError(f'expected {why} with impl="{impl}"; impl="auto" selects one that can')
        if can_run and why is None and (impl == way.name or way.is_preferred(arguments, options)):
            return way
    return None


def compute(
    definition: Callable[..., Tensor],
    ways: Sequence[Implementation],
    impl: str,
    arguments: Arguments,
    options: Options,
) -> Tensor:
    """Return ``definition(*arguments, **options)``, computed by the way that ``choose`` selects.

    With ``create_graph=True`` the gradient is computed again, through the definition.

    Raises:
        ValueError: if the way named by ``impl`` does not support the call.
    """
    way = choose(ways, impl, arguments, options)
    if way is None:
        return definition(*arguments, **options)
    value = with_own_gradient(
        functools.partial(definition, **options),
        functools.partial(way.compute, **options),
        *arguments,
    )
    return average_grad_over_ranks(value) if options.get("gather") else value
