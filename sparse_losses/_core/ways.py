"""A loss is defined once; other ways to compute it are declared beside the definition."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from sparse_losses._core.own_gradient import can_bring_its_gradient, with_own_gradient
from sparse_losses.distributed import average_grad_over_ranks

__all__ = ["Arguments", "Options", "Way", "compute"]

Arguments: TypeAlias = Sequence[Any]
Options: TypeAlias = Mapping[str, Any]


class Way(NamedTuple):
    """One way to compute the value of a definition together with its gradient.

    Attributes:
        name: what ``impl`` says to ask for it.
        why_not: ``(arguments, options)`` to the words that follow "expected", or ``None``.
        pays: ``(arguments, options)`` to whether ``impl="auto"`` takes it.
        compute: ``(needs, *arguments, **options)`` to the value and the gradients, in order.
    """

    name: str
    why_not: Callable[[Arguments, Options], str | None]
    pays: Callable[[Arguments, Options], bool]
    compute: Callable[..., Any]


def compute(
    definition: Callable[..., Tensor],
    ways: Sequence[Way],
    impl: str,
    arguments: Arguments,
    options: Options,
) -> Tensor:
    """``definition(*arguments, **options)``, by the first way that can and pays, or the one named.

    Compiled, under ``torch.func`` and for second derivatives it is always the definition.

    Raises:
        ValueError: if the way that ``impl`` names cannot take the call.
    """
    is_eager = can_bring_its_gradient(*arguments)
    for way in ways:
        if impl != way.name and not (impl == "auto" and is_eager):
            continue
        why = way.why_not(arguments, options)
        if why is not None and impl == way.name:
            raise ValueError(f'expected {why} with impl="{impl}"; impl="auto" takes what can')
        if is_eager and why is None and (impl == way.name or way.pays(arguments, options)):
            value = with_own_gradient(
                functools.partial(definition, **options),
                functools.partial(way.compute, **options),
                *arguments,
            )
            return average_grad_over_ranks(value) if options.get("gather") else value
    return definition(*arguments, **options)
