"""How ``calibrate`` reads, prunes and shifts each of the three kinds of models."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import pruned_weights
from sparse_losses.representation._language_model import projection_of, unwrapped
from sparse_losses.representation.head import SpladeHead
from sparse_losses.representation.pooling import splade_pool

Limits = tuple[float | None, float | None]  # of documents and of queries
Budgets = dict[float, Limits]


class Adapter(NamedTuple):
    """What ``calibrate`` needs of a model."""

    takes_texts: bool
    takes_several: bool  # numbers of active dimensions
    activation: str
    vocab_size: int
    thresholds: Limits
    read: Callable[[Any, str], Tensor]  # a batch and its side to what is counted, [B, V]
    prune: Callable[[Limits, int, Budgets], None]
    bias: Callable[[], Tensor]


def adapter_of(model: Any, signed: bool, stack: contextlib.ExitStack) -> Adapter:
    """Return what reads activations, or if ``signed`` the projection's outputs, unpruned."""
    if isinstance(model, SpladeHead):
        return _of_head(model, signed, stack)
    if hasattr(model, "budgets"):  # a SpladeEncoder, which itself imports this module
        return _of_encoder(model, signed, stack)
    return _of_sparse_encoder(model, signed, stack)


def _hold(stack: contextlib.ExitStack, owner: Any, **values: Any) -> None:
    """Set attributes until the stack closes."""
    for name, value in values.items():
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _present(logits: Tensor) -> Tensor:
    """Return logits with -inf in place of those that no position gave."""
    return torch.where(logits == 0, -torch.inf, logits)


def _of_encoder(encoder: Any, signed: bool, stack: contextlib.ExitStack) -> Adapter:
    thresholds = (encoder.document_threshold, encoder.query_threshold)
    idf, absent = encoder.idf_weights, -torch.inf if signed else 0.0
    if signed:  # the bias is added before all of these
        _hold(stack, encoder, gate=None)
        if encoder.expansion:
            _hold(stack, encoder.head, softcap=None, logit_scale=1.0, awaits_scale=True)

    def read(texts: Any, side: Any) -> Tensor:
        batch = encoder.tokenize(texts, side=side)
        x: Any = encoder(**batch, apply_idf=False, return_logits=signed)
        x = _present(x[1]) if signed else x
        return x if idf is None else torch.where(idf > 0, x, absent)

    def prune(pair: Limits, keep_at_least: int, budgets: Budgets) -> None:
        if not budgets and pair[0] == encoder.document_threshold:  # new for queries alone
            budgets = {number: (held[0], pair[1]) for number, held in encoder.budgets.items()}
        encoder.document_threshold, encoder.query_threshold = pair
        encoder.keep_at_least, encoder.budgets = keep_at_least, budgets
        if pair != (None, None):
            encoder.max_active_dims = None

    def bias() -> Any:
        if encoder.expansion:
            return _bias_of(encoder.model)
        *_, last = encoder.importance.modules()  # it may be this one layer
        return last.bias

    activation, size = str(encoder.activation), encoder.vocab_size
    return Adapter(True, True, activation, size, thresholds, read, prune, bias)


def _of_head(head: SpladeHead, signed: bool, stack: contextlib.ExitStack) -> Adapter:
    held = head.threshold if isinstance(head.threshold, float) else None
    _hold(stack, head, threshold=None)
    if signed:
        _hold(stack, head, softcap=None, logit_scale=1.0, awaits_scale=True)

    def read(batch: Any, side: str) -> Tensor:
        if not isinstance(batch, (tuple, list)):
            got = type(batch).__name__
            raise TypeError(f"expected a list of pairs (hidden, attention_mask), got one {got}")
        hidden, attention_mask = batch
        x: Any = head(hidden, attention_mask, return_logits=signed, layout=torch.strided)
        return _present(x[1]) if signed else x

    def prune(pair: Limits, keep_at_least: int, budgets: Budgets) -> None:
        if isinstance(head.threshold, Tensor):  # a buffer, which cannot become a number
            del head.threshold
        head.threshold, head.keep_at_least = pair[0], keep_at_least

    def bias() -> Tensor:
        if head.bias is None:
            raise ValueError("expected a head with a bias to shift, got one without")
        return head.bias

    activation, size = str(head.activation), len(head.weight)
    return Adapter(False, False, activation, size, (held, None), read, prune, bias)


class _Pruning:
    """The hook that prunes what a ``SparseEncoder`` gives in evaluation mode."""

    thresholds: Limits = (None, None)
    keep_at_least = 1

    def __init__(self, activation: str) -> None:
        self.activation = activation

    def __call__(self, model: Any, args: Any, options: Any, output: Any) -> None:
        threshold = self.thresholds[options.get("task") == "query"]
        if threshold is not None and not model.training:
            output["sentence_embedding"] = pruned_weights(
                output["sentence_embedding"],
                threshold,
                self.keep_at_least,
                activation=self.activation,
            )


def _of_sparse_encoder(model: Any, signed: bool, stack: contextlib.ExitStack) -> Adapter:
    """With ``use_splade_head``, which puts a function with the head in a pooling, or without it."""
    transformer, pooling = _document_modules(model)
    language_model, activation = unwrapped(transformer.auto_model), pooling.activation_function
    poolings = [module for module in model.modules() if type(module) is type(pooling)]
    patched = [x for module in poolings if (x := vars(module).get("forward")) is not None]
    heads, seen = [function.args[-1] for function in patched], []
    hooks = list(model._forward_hooks.values())
    pruning = next((hook for hook in hooks if isinstance(hook, _Pruning)), None)
    if pruning is None:
        pruning = _Pruning(activation)
        model.register_forward_hook(pruning, with_kwargs=True)
    pruning.activation, thresholds = activation, pruning.thresholds
    _hold(stack, pruning, thresholds=(None, None))
    _hold(stack, model, max_active_dims=None)

    def look_at_head(head: Any, args: Any, output: Any) -> None:
        plain = copy.copy(head)
        plain.softcap, plain.logit_scale = None, 1.0
        seen.append(plain.forward(*args, return_logits=True)[1])

    def look_at_pooling(pooling: Any, args: Any, output: Any) -> None:
        states, mask = args[0]["token_embeddings"], args[0].get("attention_mask")
        seen.append(splade_pool(states, mask, return_logits=True)[1])

    if signed:
        for module in heads or poolings:
            hook = look_at_head if heads else look_at_pooling
            stack.callback(module.register_forward_hook(hook).remove)

    def read(texts: Any, side: str) -> Tensor:
        options = {"show_progress_bar": False, "convert_to_sparse_tensor": False}
        x: Tensor = getattr(model, f"encode_{side}")(texts, batch_size=len(texts), **options)
        if not signed:
            return x.relu()  # static queries may have negative weights, which pruning takes
        return _present(seen.pop()) if seen else torch.where(x > 0, torch.inf, -torch.inf)

    def prune(pair: Limits, keep_at_least: int, budgets: Budgets) -> None:
        pruning.thresholds, pruning.keep_at_least = pair, keep_at_least
        if pair != (None, None):
            model.max_active_dims = None

    size = len(projection_of(language_model).weight)
    bias = partial(_bias_of, language_model)
    return Adapter(True, False, activation, size, thresholds, read, prune, bias)


def _document_modules(model: Any) -> tuple[Any, Any]:
    """Return transformer and pooling of a ``SparseEncoder``, of a ``Router`` for its documents."""
    modules: list[Any] = list(model) if isinstance(model, nn.Sequential) else []
    if modules and "document" in getattr(modules[0], "sub_modules", ()):  # of a Router
        modules = list(modules[0].sub_modules["document"])
    kinds = [type(module).__name__ for module in modules]
    if not hasattr(model, "encode_document") or kinds[1:2] != ["SpladePooling"]:
        raise TypeError(
            "expected a SpladeEncoder, a SpladeHead, or a SparseEncoder of a transformer and "
            f"SpladePooling, got {type(model).__name__} of {', '.join(kinds) or 'no modules'}"
        )
    return modules[0], modules[1]


def _bias_of(model: Any) -> Tensor:
    """Return the bias of the vocabulary projection."""
    bias: Tensor | None = projection_of(model).bias
    if bias is None:
        kind = type(unwrapped(model)).__name__
        raise ValueError(f"expected output embeddings with a bias to shift, got none in {kind}")
    return bias
