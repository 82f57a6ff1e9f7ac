"""The layers of a language model between its hidden states and its logits."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

# What a model makes of these in place of its projection's output tells the scale and the soft cap.
PROBE = (-1e5, -100.0, -1.0, -1e-3, 1e-3, 1.0, 100.0, 1e5)


class Projection(NamedTuple):
    """The logits of a language model: ``cap(logit_scale * linear(transform(hidden)))``."""

    transform: nn.Module | None
    linear: Any  # an `nn.Linear`, or PEFT's LoRA layer around it
    logit_scale: float
    softcap: float | None  # c, where the logits are c tanh(z / c)


def unwrapped(model: Any) -> Any:
    """Return the model of transformers inside a ``PeftModel``, which has the adapters in it."""
    if not hasattr(model, "get_base_model"):
        return model
    if model.active_peft_config.is_prompt_learning:
        kind = model.active_peft_config.peft_type.value
        raise TypeError(f"expected adapters inside the layers, such as LoRA, got {kind}")
    return model.get_base_model()


def projection_of(model: Any) -> Any:
    """Return the vocabulary projection that a model uses now, or ``None``."""
    layer = getattr(unwrapped(model), "get_output_embeddings", lambda: None)()
    return _active(layer)


def head_of(model: Any) -> Projection:
    """Return the layers of a masked or causal language model after its hidden states.

    Architectures name these layers differently, and some apply an activation in code. So the model
    reads eight tokens while hooks record the modules that run after the encoder. The result shares
    their parameters, and its output is compared with that of the model's own projection, whose
    place known numbers then take: the logits show what the model does with them.
    """
    model = unwrapped(model)
    base = getattr(model, "base_model", None)
    layer = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(base, nn.Module) or base is model or layer is None:
        raise TypeError(
            "expected `model` to be a masked or causal language model of transformers, such as "
            f"AutoModelForMaskedLM loads, got {type(model).__name__}"
        )
    linear = _active(layer)
    weight = getattr(linear, "weight", None)
    if not isinstance(getattr(linear, "base_layer", linear), nn.Linear):
        raise _unknown(model, f"its output embeddings are a {type(linear).__name__}")
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        raise _unknown(model, f"its output embeddings are quantised, a {type(linear).__name__}")

    called: list[nn.Module] = []
    states: list[Tensor] = []
    outputs: list[Tensor] = []

    def probed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        outputs.append(output)
        return torch.tensor(PROBE, device=output.device)[:, None].expand(output.shape).clone()

    hooks = [
        child.register_forward_hook(lambda module, args, output: called.append(module))
        for child in model.children()
    ]
    hooks.append(base.register_forward_hook(lambda module, args, output: states.append(output[0])))
    hooks.append(layer.register_forward_hook(probed))
    tokens = torch.ones(1, len(PROBE), dtype=torch.int64, device=linear.weight.device)
    try:
        with torch.no_grad(), evaluating(model):
            logits = model(input_ids=tokens, attention_mask=tokens, return_dict=True).logits
    except Exception as error:
        raise _unknown(model, f"it does not read eight tokens ({error})") from error
    finally:
        for hook in hooks:
            hook.remove()

    layers = called[called.index(base) + 1 :] if base in called else []
    if not layers or not outputs or layer not in set(layers[-1].modules()):
        raise _unknown(model, "its output embeddings do not come last")
    last = layers.pop()
    if last is not layer:
        layers.append(_without(last, layer))
    transform = nn.Sequential(*layers) if layers else None
    try:
        with torch.no_grad(), evaluating(model):
            transformed = states[-1] if transform is None else transform(states[-1])
            output = nnf.linear(transformed, adapted_weight(linear), linear.bias)
    except Exception as error:  # a layer does more with the projection than call it
        raise _unknown(model, f"without its output embeddings it fails ({error})") from error
    if not _agree(output, outputs[-1]):
        raise _unknown(model, "its output embeddings give no product with the states before them")
    scale, softcap = _after_projection(logits)
    if scale is None:
        raise _unknown(model, "its logits are not the output of its output embeddings")
    return Projection(transform, linear, scale, softcap)


def check_bidirectional(model: Any) -> None:
    """Raise if a causal language model does not attend to later positions as its config says."""
    tokens = torch.ones(2, 3, dtype=torch.int64, device=next(model.parameters()).device)
    tokens[1, -1] = 0
    with torch.no_grad(), evaluating(model):
        states = model.base_model(tokens, attention_mask=torch.ones_like(tokens))[0]
    if torch.equal(states[0, 0], states[1, 0]):
        raise ValueError(
            f"expected a {type(model).__name__} that attends both ways by `config.is_causal`, got "
            "an older one: upgrade transformers, or pass bidirectional=False"
        )


def _agree(actual: Tensor, expected: Tensor) -> bool:
    rounding = 1e-4 if actual.element_size() > 2 else 3e-2
    size = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return actual.shape == expected.shape and torch.allclose(
        actual.to(expected.dtype), expected, rtol=0.0, atol=rounding * size, equal_nan=True
    )


def _after_projection(logits: Tensor) -> tuple[float | None, float | None]:
    """Return the scale and the soft cap that turn ``PROBE`` into ``logits``; ``None``: others."""
    probe = torch.tensor(PROBE, dtype=torch.float64)
    found = logits[0, :, 0].double().cpu()
    scale, largest = (found[4] / probe[4]).item(), found[-1].item()
    expected, softcap = scale * probe, None
    if scale > 0 and largest < 0.99 * expected[-1].item():
        softcap = largest
        expected = softcap * (expected / softcap).tanh()
    every = found[:, None].expand(logits.shape[1:]).to(logits)
    relative = torch.allclose(found, expected, rtol=1e-3, atol=0.0)
    if scale <= 0 or not relative or not torch.equal(logits[0], every):
        return None, None
    return float(f"{scale:.6g}"), None if softcap is None else float(f"{softcap:.6g}")


def _active(layer: Any) -> Any:
    """Return the trained copy of a layer that PEFT trains as a whole (``modules_to_save``)."""
    if not hasattr(layer, "modules_to_save"):
        return layer
    if not layer.active_adapters or layer.disable_adapters:
        return layer.original_module
    return layer.modules_to_save[layer.active_adapters[0]]


def adapted_weight(linear: Any) -> Tensor:
    """Return the weight of the projection with its LoRA adapters, ``W + scaling * B A``.

    Raises:
        TypeError: for adapters whose output is no product with a matrix.
    """
    weight: Tensor = linear.weight  # PEFT's layer gives that of its base layer
    if not hasattr(linear, "base_layer"):
        return weight
    if not hasattr(linear, "lora_A"):
        raise TypeError(
            "expected LoRA as the only adapter of the output embeddings, got a "
            f"{type(linear).__module__}.{type(linear).__name__}"
        )
    if linear.disable_adapters or linear.merged:
        return weight
    for name in linear.active_adapters:
        if name not in linear.lora_A:
            continue
        dropout = getattr(linear.lora_dropout[name], "p", 0.0)
        for option, is_used in (
            (f"lora_dropout={dropout}", dropout > 0),
            ("DoRA or another variant", name in linear.lora_variant),
            ("lora_bias", linear.lora_B[name].bias is not None),
        ):
            if is_used:
                raise TypeError(
                    "expected plain LoRA on the output embeddings, whose product with the hidden "
                    f"states is part of the head, got {option}"
                )
        weight = weight + linear.get_delta_weight(name)
    return weight


def _unknown(model: object, why: str) -> TypeError:
    return TypeError(
        f"expected a language model with known layers, got {type(model).__name__}: {why}. "
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
