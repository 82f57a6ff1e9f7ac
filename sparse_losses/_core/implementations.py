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
    """A computation of the value of a definition together with its gradient.

    Attributes:
        name: the value of ``impl`` that selects it.
        unsupported_reason: maps the arguments to ``None`` if it supports the call, else to the
            words that follow "expected" in the error.
        is_preferred: maps the arguments to whether ``impl="auto"`` selects it.
        compute: is called as ``compute(needs, **arguments)``, where ``needs`` are the names of the
            tensors that need a gradient; returns the value and the gradients by name. (Callers of
            ``choose`` alone define their own signature.)
        compiles: whether ``torch.compile`` can trace it.
        purpose: the calls for which ``is_preferred``, in words, for ``explain``.
    """

    name: str
    unsupported_reason: Callable[[Arguments], str | None]
    is_preferred: Callable[[Arguments], bool]
    compute: Callable[..., Any]
    compiles: bool = False
    purpose: str = "calls that gain from it"


def always(arguments: Arguments) -> bool:
    """``is_preferred`` of an implementation that is faster wherever it supports the call."""
    return True


def is_exported() -> bool:
    """Whether ``torch.export``, the ONNX exporter or ``torch.jit.trace`` records the call."""
    if not hasattr(torch.compiler, "is_exporting"):  # before PyTorch 2.7
        return False
    return bool(torch.compiler.is_exporting() or torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def choose(
    implementations: Sequence[Implementation], impl: str, arguments: Arguments
) -> Implementation | None:
    """Return the one named ``impl``, or for ``"auto"`` the first supported and preferred one.

    ``None`` means the definition. It is used under ``torch.func`` and, unless the implementation
    compiles, under ``torch.compile``; one that is named by ``impl`` is checked there all the same.
    Exporters get the definition, too, as only this package has the others' operators.

    Raises:
        ValueError: if the implementation named by ``impl`` does not support the call.
    """
    verdicts = _verdicts(implementations, impl, arguments)
    if not torch.compiler.is_compiling() and _is_explaining.get():
        raise _Explanation(verdicts)
    for implementation, objection in verdicts:
        if not objection:
            return implementation
    return None


def _verdicts(
    implementations: Sequence[Implementation], impl: str, arguments: Arguments
) -> Iterator[tuple[Implementation, str]]:
    """Yield implementations and what speaks against each, nothing for one that is taken."""
    is_eager = can_bring_its_gradient(*arguments.values()) and not is_exported()
    is_plain = is_eager or not (is_transformed() or is_exported())
    for implementation in implementations:
        can_run = is_eager or (implementation.compiles and is_plain)
        is_named = impl == implementation.name
        if not is_named and impl != "auto":
            yield implementation, f'impl="{impl}" was asked for'
            continue
        if not is_named and not can_run:
            yield implementation, "torch.compile, torch.func and exporters need the definition"
            continue
        reason = implementation.unsupported_reason(arguments)
        if reason is not None and is_named:
            raise ValueError(
                f'expected {reason} with impl="{impl}"; impl="auto" selects one that can'
            )
        if not can_run:
            yield implementation, "torch.compile, torch.func and exporters need the definition"
        elif reason is not None:
            yield implementation, f"it needs {reason.rstrip(',')}"
        elif not (is_named or implementation.is_preferred(arguments)):
            yield implementation, f"it is for {implementation.purpose}"
        else:
            yield implementation, ""


_is_explaining = ContextVar("_is_explaining", default=False)


class _Explanation(Exception):  # it ends the call that it explains
    def __init__(self, verdicts: Iterator[tuple[Implementation, str]]) -> None:
        self.verdicts = verdicts


def explain(loss: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return which implementation a call takes and why, in words; the loss is not computed.

    Args:
        loss: a loss function or module, ``splade_head`` or ``splade_pool``, not compiled.
        *args: what it would be called with.
        **kwargs: likewise. With ``gather=True`` every rank must explain the call.

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
    name = getattr(loss, "__name__", type(loss).__name__)
    token = _is_explaining.set(True)
    try:
        loss(*args, **kwargs)
    except _Explanation as explanation:
        taken, lines = "definition", []
        for implementation, objection in explanation.verdicts:
            if not objection:
                taken = implementation.name
                break
            lines.append(f'\n  not "{implementation.name}": {objection}')
        return f'{name} takes "{taken}"' + "".join(lines)
    finally:
        _is_explaining.reset(token)
    return f'{name} takes "definition", which it has alone'


def compute(
    definition: Callable[..., Tensor],
    implementations: Sequence[Implementation],
    impl: str,
    arguments: Arguments,
) -> Tensor:
    """Return ``definition(**arguments)``, computed by the implementation that is chosen.

    With ``create_graph=True`` the gradient is computed again, through the definition.

    Raises:
        ValueError: if the implementation named by ``impl`` does not support the call.
    """
    implementation = choose(implementations, impl, arguments)
    if implementation is None:
        return definition(**arguments)
    value = with_own_gradient(definition, implementation.compute, arguments)
    return average_grad_over_ranks(value) if arguments.get("gather") else value
