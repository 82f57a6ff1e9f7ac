"""What is read from a language model: its vocabulary projection, its attention, its limit."""

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

# What a model makes of these in place of its projection's output tells the scale and the soft cap.
PROBE = (-1e5, -100.0, -1.0, -1e-3, 1e-3, 1.0, 100.0, 1e5)
# What models compute by functions between their layers.
FUNCTIONS = (nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.SiLU(), nn.Tanh())


class Projection(NamedTuple):
    """The logits of a language model: ``cap(logit_scale * linear(transform(hidden)))``."""

    transform: nn.Module | None
    linear: Any  # an `nn.Linear` or a `TiedProjection`
    logit_scale: float
    softcap: float | None  # c, where the logits are c tanh(z / c)


class TiedProjection(NamedTuple):
    """The product with the input embeddings at the end of a layer, which adds its own bias."""

    layer: Any
    embeddings: Any

    @property
    def weight(self) -> Any:
        """The matrix of the embeddings."""
        return self.embeddings.weight

    @property
    def bias(self) -> Any:
        """The bias of the layer."""
        return self.layer.bias


def unwrapped(model: Any) -> Any:
    """Return the model of transformers inside ``torch.compile`` and a ``PeftModel``."""
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "get_base_model"):
        return model
    if model.active_peft_config.is_prompt_learning:
        kind = model.active_peft_config.peft_type.value
        raise TypeError(f"expected adapters inside the layers, such as LoRA, got {kind}")
    return unwrapped(model.get_base_model())


def saves_weights(model: Any) -> bool:
    """Return whether saving a model saves all of its weights, and not its adapters alone."""
    model = getattr(model, "_orig_mod", model)
    return unwrapped(model) is model and not getattr(model, "_hf_peft_config_loaded", False)


def warn_of_adapters(model: nn.Module, what: str) -> None:
    """Warn of a change of weights that is lost when a model with adapters is saved."""
    if not all(map(saves_weights, model.modules())):
        warnings.warn(
            f"with adapters {what} is not saved, because it is in the model's weights: merge the "
            "adapters before saving, or save the model before adding them",
            stacklevel=3,
        )


def projection_of(model: Any) -> Any:
    """Return the vocabulary projection that a model uses now; ``==`` tells whether two are one."""
    model = unwrapped(model)
    layer: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if hasattr(layer, "modules_to_save"):  # PEFT trains a copy
        is_used = layer.active_adapters and not layer.disable_adapters
        copies, original = layer.modules_to_save, layer.original_module
        layer = copies[layer.active_adapters[0]] if is_used else original
    config, rows = model.config.get_text_config(), getattr(layer, "out_features", None)
    # Of a resized layer, transformers 5.0 leaves `out_features` as it was.
    if rows is not None and getattr(config, "vocab_size", rows) not in (rows, len(layer.weight)):
        for module in model.modules():  # DeBERTa names another layer, beside the logits' bias
            bias = getattr(module, "bias", None)
            if layer in module.children() and isinstance(bias, Tensor) and len(bias) != rows:
                return TiedProjection(module, model.get_input_embeddings())
    return layer


def head_of(model: Any) -> Projection:
    """Return the layers of a masked or causal language model after its hidden states.

    Architectures name these layers differently, and some apply an activation in code. So the model
    reads eight tokens while hooks record the layers after its encoder, which are followed from the
    input of the projection back to the hidden states. Known numbers take the place of the
    projection's output: the logits show what follows it. A ``TypeError`` names anything else.
    """
    model = unwrapped(model)
    base = getattr(model, "base_model", None)
    linear = projection_of(model) if isinstance(base, nn.Module) else None
    if linear is None:
        raise TypeError(
            "expected `model` to be a masked or causal language model of transformers, such as "
            f"AutoModelForMaskedLM loads, got {type(model).__name__}"
        )
    is_tied, embeddings = isinstance(linear, TiedProjection), model.get_input_embeddings()
    weight: Any = getattr(linear, "weight", None)
    if hasattr(linear, "base_layer") or (
        hasattr(embeddings, "base_layer") and embeddings.weight is weight
    ):
        why = "adapters on its output embeddings, or on input embeddings that are tied to them"
        instead = "Adapt other layers, or train a copy of the output by PEFT's `modules_to_save`"
        raise _unknown(model, f"it has {why}, which merging them would change too", instead)
    if base is model:
        raise _unknown(model, "its `base_model` is the model itself")
    is_matrix = isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2
    if not is_matrix or not (is_tied or isinstance(linear, nn.Linear)):
        raise _unknown(model, f"its output embeddings are no matrix but a {type(linear).__name__}")
    layer = linear.layer if is_tied else linear
    with evaluating(model):
        try:
            hidden, calls, logits = _recorded(model, weight, None if is_tied else layer)
        except Exception as error:
            raise _unknown(model, f"it does not read eight tokens ({error})") from error
        at = next((i for i, call in enumerate(calls) if call[0] is layer), None)
        if at is None:
            raise _unknown(model, "its output embeddings are not a layer after its hidden states")
        _, source, output = calls[at]
        layers = _chain(calls, hidden, calls[at - 1][2] if is_tied else source)
        scale, softcap = (1.0, None) if is_tied else _after_projection(logits)
        if layers is None and source.shape == hidden.shape and linear.bias is None:
            factor = (source / hidden).nanmedian().item()  # MiniCPM divides by a constant here
            layers, hidden, scale = [], hidden * factor, scale and float(f"{scale * factor:.6g}")
        transform = nn.Sequential(*layers) if layers else None
        try:
            states = hidden if transform is None else transform(hidden)
            is_known = _same(nnf.linear(states, weight, linear.bias), output)
        except (RuntimeError, TypeError):  # its layers take more than hidden states
            is_known = False
    if layers is None or not is_known:
        raise _unknown(model, "its output embeddings give no product with its hidden states")
    follows = not torch.equal(output, logits) if is_tied else logits.requires_grad
    if scale is None or follows:
        raise _unknown(model, "its logits are not the output of its output embeddings")
    return Projection(transform, linear, scale, softcap)


def _recorded(model: Any, weight: Tensor, probed: Any) -> tuple[Tensor, list[Any], Tensor]:
    """Return hidden states, calls of layers (layer, input, output), and the logits of ``PROBE``."""
    base, calls = model.base_model, []
    probe = torch.tensor(PROBE, dtype=torch.float32, device=weight.device)[:, None]
    tokens = torch.arange(len(PROBE), device=weight.device)[None] % len(weight)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)} | without_cache(base)

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if tensors and isinstance(output, Tensor):
            calls.append((module, tensors[0], output))
        return probe.expand(output.shape).clone() if module is probed else None

    inside = {model, *base.modules()}
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if module not in inside:
                hooks.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        return base(**inputs)[0], calls, model(**inputs, return_dict=True).logits


def _chain(calls: list[Any], start: Tensor, end: Tensor) -> list[nn.Module] | None:
    """Return the layers and functions that lead from ``start`` to ``end``, ``None``: unknown."""
    layers: list[nn.Module] = []
    while not _same(start, end):
        # An outer module is recorded after those inside it.
        steps = (
            (source, [module] if function is None else [module, function])
            for function in (None, *FUNCTIONS)
            for module, source, output in reversed(calls)
            if _same(function(output) if function else output, end) and not _same(source, end)
        )
        end, step = next(steps, (start, []))
        if not step or len(layers) > len(calls):
            return None
        layers = [*step, *layers]
    return layers


def _same(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape or not expected.is_floating_point():
        return False
    rounding = 1e-4 if actual.element_size() > 2 else 3e-2
    size = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    actual = actual.to(expected.dtype)
    return torch.allclose(actual, expected, rtol=0.0, atol=rounding * size, equal_nan=True)


def _after_projection(logits: Tensor) -> tuple[float | None, float | None]:
    """Return the scale and the soft cap that turn ``PROBE`` into ``logits``; ``None``: others."""
    probe = torch.tensor(PROBE, dtype=torch.float64, device="cpu")
    found = logits[0, :, 0].detach().double().cpu()
    scale, largest = (found[4] / probe[4]).item(), found[-1].item()
    expected, softcap = scale * probe, None
    if scale > 0 and largest < 0.99 * expected[-1].item():
        softcap = float(f"{largest:.6g}")
        expected = largest * (expected / largest).tanh()
    every = found[:, None].expand(logits.shape[1:]).to(logits)
    relative = torch.allclose(found, expected, rtol=1e-3, atol=0.0)
    if scale <= 0 or not relative or not torch.equal(logits[0], every):
        return None, None
    return float(f"{scale:.6g}"), softcap


def _unknown(model: object, why: str, instead: str = "") -> TypeError:
    by_hand = "Pass the layers of such a model yourself: SpladeHead(weight, bias, transform=layers)"
    return TypeError(
        f"expected a language model with known layers, got {type(model).__name__}: {why}. "
        f"{instead or by_hand}"
    )


def set_attention(model: Any, *, bidirectional: bool) -> None:
    """Make a causal model attend both ways, or again one way; a masked one is left as it is."""
    config = model.config.get_text_config()
    before = getattr(config, "is_causal", True)
    if not bidirectional:
        if before is False:
            config.is_causal = True
        return
    if not _is_causal(model):
        return
    config.is_causal = False
    try:
        why = "that stays causal" if _is_causal(model) else ""
    except Exception as error:
        why = f"that fails ({error})"
    if why:
        config.is_causal = before
        raise ValueError(
            f"expected a {type(model).__name__} that attends both ways with `config.is_causal = "
            f"False`, got one {why}, as older ones do: upgrade transformers, or pass "
            "bidirectional=False"
        )


def _is_causal(model: Any) -> bool:
    """Return whether the first of eight positions ignores all others."""
    base, embedded = model.base_model, list[Tensor]()
    first = torch.arange(8, device=next(model.parameters()).device)[None] % 4

    def state(ids: Tensor) -> Any:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | without_cache(base)
        return base(**inputs)[0][0, 0]

    with torch.no_grad(), evaluating(model):
        one, other = state(first), state(first + (first.cumsum(1) > 0))  # the same first token
    if torch.equal(one, other) or (one - other).norm() > 0.02 * one.norm():
        return torch.equal(one, other)
    # Experts round a state by which others they read as well: its gradient is exact.
    keep = model.get_input_embeddings().register_forward_hook(
        lambda *call: embedded.append(call[-1].requires_grad_())
    )
    try:
        with keep, torch.inference_mode(False), torch.enable_grad(), evaluating(model):
            one = state(first.clone())  # autograd cannot save an inference tensor
            weighted = (one * torch.arange(len(one), device=one.device)).sum()
            return not torch.autograd.grad(weighted, embedded)[0][0, 1:].any()
    except RuntimeError:  # of quantised layers, or no embeddings were looked up
        return False


def without_cache(base: Any) -> dict[str, Any]:
    """Return the input that keeps a decoder from storing keys and values."""
    return {"use_cache": False} if "use_cache" in inspect.signature(base.forward).parameters else {}


def position_limits(model: Any) -> list[int]:
    """Return the numbers of positions that a model knows, none if any length will do."""
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0]
    for name, module in model.named_modules():
        weight, first = getattr(module, "weight", None), getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and isinstance(weight, Tensor):
            # RoBERTa and its descendants number positions from the padding index on.
            limits.append(len(weight) - (0 if first is None else first + 1))
    return [limit for limit in limits if limit > 0]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode within the block, then restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    kinds: list[Any] = [(x, x.attention_type) for x, _ in modes if hasattr(x, "set_attention_type")]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for module, kind in kinds:  # BigBird changes it when it reads a short text
            if module.attention_type != kind:
                module.set_attention_type(kind)
