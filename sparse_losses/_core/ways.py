"""A loss is defined once; other ways to compute it are declared beside the definition."""

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

__all__ = ["Arguments", "Options", "Way", "always", "choose", "compute", "never"]

Arguments: TypeAlias = Sequence[Any]
Options: TypeAlias = Mapping[str, Any]


class Way(NamedTuple):
    """One way to compute the value of a definition together with its gradient.

    Attributes:
        name: what ``impl`` says to ask for it.
        why_not: ``(arguments, options)`` to the words that follow "expected", or ``None``.
        pays: ``(arguments, options)`` to whether ``impl="auto"`` takes it.
        compute: ``(needs, *arguments, **options)`` to the value and the gradients, in order; where
            the caller asks ``choose`` alone, whatever that caller does with it.
        compiles: whether it is made of operators that ``torch.compile`` knows.
    """

    name: str
    why_not: Callable[[Arguments, Options], str | None]
    pays: Callable[[Arguments, Options], bool]
    compute: Callable[..., Any]
    compiles: bool = False


def always(arguments: Arguments, options: Options) -> bool:
    """What a way says that pays wherever it can take the call."""
    return True


def never(arguments: Arguments, options: Options) -> bool:
    """What a way says that is taken by its name only."""
    return False


def choose(ways: Sequence[Way], impl: str, arguments: Arguments, options: Options) -> Way | None:
    """The way that ``impl`` names, or for ``"auto"`` the first that can and pays.

    ``None`` is the definition: under ``torch.func``, and compiled unless the way compiles; then a
    way that ``impl`` names is checked, and the definition computes the same number.

    Raises:
        ValueError: if the way that ``impl`` names cannot take the call.
    """
    is_eager = can_bring_its_gradient(*arguments)
    is_plain = is_eager or not is_transformed()
    for way in ways:
        can_run = is_eager or (way.compiles and is_plain)
        if impl != way.name and not (impl == "auto" and can_run):
            continue
        why = way.why_not(arguments, options)
        if why is not None and impl == way.name:
            raise ValueError(f'expected {why} with impl="{impl}"; impl="auto" takes one that can')
        if can_run and why is None and (impl == way.name or way.pays(arguments, options)):
            return way
    return None


def compute(
    definition: Callable[..., Tensor],
    ways: Sequence[Way],
    impl: str,
    arguments: Arguments,
    options: Options,
) -> Tensor:
    """``definition(*arguments, **options)``, by the way that ``choose`` finds.

    Compiled and under ``torch.func`` it is the definition; with ``create_graph=True`` the gradient
    is computed again, through the definition.

    Raises:
        ValueError: if the way that ``impl`` names cannot take the call.
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
