"""The layers of a masked language model between its hidden states and its logits."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

__all__ = ["evaluating", "head_of"]


def head_of(model: Any) -> tuple[nn.Module | None, nn.Linear]:
    """Return the layers before a masked LM's vocabulary projection, and the projection.

    Architectures name these layers differently, and some apply an activation in code. So the model
    reads eight tokens while hooks record the modules that run after the encoder. The result shares
    their parameters, and its logits are compared with the model's own.
    """
    base = getattr(model, "base_model", None)
    projection = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(base, nn.Module) or base is model or projection is None:
        raise TypeError(
            "expected `model` to be a masked language model of transformers, such as "
            f"AutoModelForMaskedLM loads, got {type(model).__name__}"
        )
    if not isinstance(projection, nn.Linear):
        raise _unknown(model, f"its output embeddings are a {type(projection).__name__}")

    called: list[nn.Module] = []
    states: list[Tensor] = []
    hooks = [
        child.register_forward_hook(lambda module, args, output: called.append(module))
        for child in model.children()
    ]
    hooks.append(base.register_forward_hook(lambda module, args, output: states.append(output[0])))
    tokens = torch.ones(1, 8, dtype=torch.int64, device=projection.weight.device)
    try:
        with torch.no_grad(), evaluating(model):
            logits = model(input_ids=tokens, attention_mask=tokens, return_dict=True).logits
    except Exception as error:
        raise _unknown(model, f"it does not read eight tokens ({error})") from error
    finally:
        for hook in hooks:
            hook.remove()

    layers = called[called.index(base) + 1 :] if base in called else []
    if not layers or projection not in set(layers[-1].modules()):
        raise _unknown(model, "its output embeddings do not come last")
    last = layers.pop()
    if last is not projection:
        layers.append(_without(last, projection))
    transform = nn.Sequential(*layers) if layers else None

    try:
        with torch.no_grad(), evaluating(model):
            transformed = states[-1] if transform is None else transform(states[-1])
            ours = nnf.linear(transformed, projection.weight, projection.bias)
    except Exception as error:  # a layer does more with the projection than call it
        raise _unknown(model, f"without its output embeddings it fails ({error})") from error
    rounding = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 3e-2
    size = logits.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    if ours.shape != logits.shape or not torch.allclose(
        ours, logits, rtol=0.0, atol=rounding * size, equal_nan=True
    ):
        raise _unknown(model, "its logits are not the output of its output embeddings")
    return transform, projection


def _unknown(model: object, why: str) -> TypeError:
    return TypeError(
        f"expected a masked language model with known layers, got {type(model).__name__}: {why}. "
        "Pass the layers of such a model yourself: SpladeHead(weight, bias, transform=layers)"
    )


def _without(module: nn.Module, projection: nn.Module) -> nn.Module:
    """Return ``module`` without ``projection``; all other parts are the same objects."""
    if module is projection:
        return nn.Identity()
    for name, child in module.named_children():
        if projection in set(child.modules()):
            twin = copy.copy(module)
            twin._modules = {**module._modules, name: _without(child, projection)}
            return twin
    raise AssertionError("expected `projection` inside `module`")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode within the block, then restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
