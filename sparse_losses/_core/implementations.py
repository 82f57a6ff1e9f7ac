"""Selection of one implementation of a loss: its definition or a faster alternative."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparse_losses._core.own_gradient import (
    can_bring_its_gradient,
    is_transformed,
    with_own_gradient,
)
from sparse_losses.distributed import average_grad_over_ranks

Arguments: TypeAlias = Mapping[str, Any]  # tensors and hyperparameters, by name


class Implementation(NamedTuple):
    """A computation of a definition's value with its gradient; see ``with_own_gradient``."""

    name: str  # the value of `impl`
    unsupported_reason: Callable[[Arguments], str | None]  # the words that follow "expected"
    is_preferred: Callable[[Arguments], bool]  # by `impl="auto"`
    compute: Callable[..., Any]
    compiles: bool = False  # whether `torch.compile` can trace it
    purpose: str = "calls that gain from it"  # the calls for which `is_preferred`, in words


def as_dict(call: Any) -> dict[str, Any]:
    """Return the fields of a named tuple; PyTorch 2.6 cannot compile its ``_asdict``."""
    return {name: getattr(call, name) for name in type(call)._fields}


def is_exported() -> bool:
    """Whether ``torch.export``, the ONNX exporter or ``torch.jit.trace`` records the call."""
    if not hasattr(torch.compiler, "is_exporting"):  # before PyTorch 2.7
        return False
    return bool(torch.compiler.is_exporting() or torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def choose(
    implementations: Sequence[Implementation], impl: str, arguments: Arguments
) -> Implementation | None:
    """Return the one named ``impl``, or for ``"auto"`` the first supported and preferred one.

    ``None`` is the definition: for ``torch.func``, exporters and, unless it compiles, a graph.
    """
    chosen, objections = None, ""
    for implementation, objection in _verdicts(implementations, impl, arguments):
        if not objection:
            chosen = implementation
            break
        objections += f'\n  not "{implementation.name}": {objection}'
    if not torch.compiler.is_compiling() and _is_explained.get():
        raise _Explained(f'"{chosen.name if chosen else "definition"}"{objections}')
    return chosen


def _verdicts(
    implementations: Sequence[Implementation], impl: str, arguments: Arguments
) -> Iterator[tuple[Implementation, str]]:
    """Yield implementations and what speaks against each, nothing for one that is taken."""
    is_eager = can_bring_its_gradient(*arguments.values()) and not is_exported()
    is_plain = is_eager or not (is_transformed() or is_exported())
    for each in implementations:
        is_named = impl == each.name
        can_run = is_eager or (each.compiles and is_plain)
        objection = "torch.compile, torch.func and exporters need the definition"
        if impl not in ("auto", each.name):
            objection = f'impl="{impl}" was asked for'
        elif is_named or can_run:
            reason = each.unsupported_reason(arguments)
            if reason is not None and is_named:
                raise ValueError(
                    f'expected {reason} with impl="{impl}"; impl="auto" selects one that can'
                )
            if reason is not None:
                objection = f"it takes {reason.rstrip(',')}"
            elif can_run:
                is_taken = is_named or each.is_preferred(arguments)
                objection = "" if is_taken else f"it is for {each.purpose}"
        yield each, objection


class _Explained(Exception):
    """Ends the call that it explains, with what this would take."""


_is_explained = ContextVar("_is_explained", default=False)


def explain(loss: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return which implementation a call takes and why, in words; the choice ends the call.

    Args:
        loss: a loss function or module, ``splade_head`` or ``splade_pool``, not compiled.
        *args: the positional arguments of the call.
        **kwargs: its keyword arguments. With ``gather=True``, call ``explain`` on every rank.

    Returns:
        A line with the name of the implementation, and a line for each one that comes before it.

    Raises:
        ValueError: as the call would, for wrong arguments.

    Examples:
        >>> import torch
        >>> from sparse_losses import explain, info_nce_loss
        >>> x = torch.randn(4, 8)
        >>> print(explain(info_nce_loss, x, x, impl="direct"))
        info_nce_loss takes "direct"
          not "nonzeros": impl="direct" was asked for
          not "blocks": impl="direct" was asked for
    """
    if not hasattr(loss, "declaration") and not hasattr(loss, "_declaration"):
        raise TypeError(f"expected one loss, `splade_head` or `splade_pool`, got {loss!r}")
    taken, token = '"definition", which it has alone', _is_explained.set(True)
    try:
        loss(*args, **kwargs)
    except _Explained as explained:
        taken = str(explained)
    finally:
        _is_explained.reset(token)
    return f"{getattr(loss, '__name__', type(loss).__name__)} takes {taken}"


def compute(
    definition: Callable[..., Tensor],
    implementations: Sequence[Implementation],
    impl: str,
    arguments: Arguments,
) -> Tensor:
    """Return ``definition(**arguments)``, computed by the implementation that is chosen."""
    implementation = choose(implementations, impl, arguments)
    if implementation is None:
        return definition(**arguments)
    value = with_own_gradient(definition, implementation.compute, arguments)
    return average_grad_over_ranks(value) if arguments.get("gather") else value
