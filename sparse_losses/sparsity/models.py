"""How ``calibrate`` reads, prunes and shifts each of the three kinds of models."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import pruned_weights
from sparse_losses.representation import parts
from sparse_losses.representation._language_model import projection_of
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
    budgets: Budgets  # that it has, the largest number's by default
    read: Callable[[Any, Any], Tensor]  # a batch and its side to what is counted, [B, V]
    prune: Callable[[Budgets, int], None]
    bias: Callable[[], Tensor | None]


def adapter_of(model: Any, signed: bool, stack: contextlib.ExitStack) -> Adapter:
    """Return what reads activations, or if ``signed`` the projection's outputs, unpruned.

    Scale, soft cap and gate keep the sign of these outputs, to which the bias is added before.
    Those that no position gave are -inf.
    """
    if isinstance(model, SpladeHead):
        return _of_head(model, signed, stack)
    if hasattr(model, "budgets"):  # a SpladeEncoder, which itself imports this module
        return _of_encoder(model, signed, stack)
    return _of_sparse_encoder(model, signed, stack)


def default(budgets: Budgets) -> Limits:
    """Return the thresholds that are used by default."""
    return budgets[max(budgets)] if budgets else (None, None)


def _hold(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack closes."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _outputs(head: Any, batch: Any, output: object = None) -> Tensor:
    """Return the outputs of a head's projection; as a hook, in place of its vectors."""
    plain = copy.copy(head)
    plain.softcap, plain.logit_scale, plain.awaits_scale = None, 1.0, True
    logits: Any = plain.forward(*batch, return_logits=True, layout=torch.strided)[1]
    return _present(logits, *batch[1:])


def _present(logits: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Return logits with -inf for texts without positions."""
    if attention_mask is None:
        return logits
    return torch.where(attention_mask.bool().any(1, keepdim=True), logits, -torch.inf)


def _of_encoder(encoder: Any, signed: bool, stack: contextlib.ExitStack) -> Adapter:
    idf, size = encoder.idf_weights, encoder.vocab_size
    if signed and encoder.expansion:
        stack.callback(encoder.head.register_forward_hook(_outputs).remove)

    def read(texts: Any, side: Any) -> Tensor:
        batch = encoder.tokenize(texts, side=side)
        if signed and not encoder.expansion:
            hidden, pooled, _ = encoder._read(**batch)
            of_texts = hidden, batch["input_ids"], pooled
            x = parts.token_logits(encoder.importance, *of_texts, size, absent=-torch.inf)
        else:
            x = encoder(**batch, apply_idf=False)
        return x if idf is None else torch.where(idf > 0, x, -torch.inf if signed else 0.0)

    def prune(budgets: Budgets, keep_at_least: int) -> None:
        encoder.budgets, encoder.keep_at_least = budgets, keep_at_least
        if budgets:
            encoder.max_active_dims = None

    def bias() -> Any:
        if encoder.expansion:
            return projection_of(encoder.model).bias
        *_, last = encoder.importance.modules()  # it may be this one layer
        return last.bias

    return Adapter(True, True, encoder.activation, size, encoder.budgets, read, prune, bias)


def _of_head(head: SpladeHead, signed: bool, stack: contextlib.ExitStack) -> Adapter:
    held: Budgets = {0.0: (head.threshold, None)} if isinstance(head.threshold, float) else {}
    _hold(stack, head, "threshold", None)

    def read(batch: Any, side: str) -> Any:
        if not isinstance(batch, (tuple, list)):
            got = type(batch).__name__
            raise TypeError(f"expected a list of pairs (hidden, attention_mask), got one {got}")
        return _outputs(head, batch) if signed else head(*batch, layout=torch.strided)

    def prune(budgets: Budgets, keep_at_least: int) -> None:
        if isinstance(head.threshold, Tensor):  # a buffer, which cannot become a number
            del head.threshold
        head.threshold, head.keep_at_least = default(budgets)[0], keep_at_least

    own = str(head.activation), len(head.weight), held
    return Adapter(False, False, *own, read, prune, lambda: head.bias)


class _Pruning:
    """The hook that prunes what a ``SparseEncoder`` gives in evaluation mode."""

    keep_at_least = 1

    def __init__(self, activation: str) -> None:
        self.activation, self.budgets = activation, Budgets()

    def __call__(self, model: Any, args: Any, options: Any, output: Any) -> None:
        threshold = default(self.budgets)[options.get("task") == "query"]
        if threshold is not None and not model.training:
            whole, least = output["sentence_embedding"], self.keep_at_least
            kept = pruned_weights(whole, threshold, least, activation=self.activation)
            output["sentence_embedding"] = kept


def _of_sparse_encoder(model: Any, signed: bool, stack: contextlib.ExitStack) -> Adapter:
    """With ``use_splade_head``, which puts a function with the head in a pooling, or without it."""
    chain: list[Any] = list(model) if isinstance(model, nn.Sequential) else []
    routes = getattr(chain[0], "sub_modules", {}) if chain else {}  # of a Router
    modules = {side: [*routes[side]] if side in routes else chain for side in parts.SIDES}
    kinds = [type(module).__name__ for module in modules["document"]]
    if not hasattr(model, "encode_document") or kinds[1:2] != ["SpladePooling"]:
        raise TypeError(
            "expected a SpladeEncoder, a SpladeHead, or a SparseEncoder of a transformer and "
            f"SpladePooling, got {type(model).__name__} of {', '.join(kinds) or 'no modules'}"
        )
    language_model, pooling = modules["document"][0].auto_model, modules["document"][1]
    hooks = [hook for hook in model._forward_hooks.values() if isinstance(hook, _Pruning)]
    pruning = hooks[0] if hooks else _Pruning(pooling.activation_function)
    if not hooks:
        model.register_forward_hook(pruning, with_kwargs=True)
    held = pruning.budgets
    _hold(stack, pruning, "budgets", {})
    _hold(stack, model, "max_active_dims", None)

    def show_outputs(pooling: Any, args: Any, output: Any) -> None:
        logits, mask = args[0]["token_embeddings"], args[0].get("attention_mask")
        pooled: Any = splade_pool(logits, mask, return_logits=True)
        output["sentence_embedding"] = _present(pooled[1], mask)

    for module in model.modules():
        if signed and type(module) is type(pooling):
            function = vars(module).get("forward")
            hooked, hook = (function.args[-1], _outputs) if function else (module, show_outputs)
            stack.callback(hooked.register_forward_hook(hook).remove)

    def read(texts: Any, side: str) -> Tensor:
        options = {"show_progress_bar": False, "convert_to_sparse_tensor": False}
        x: Tensor = getattr(model, f"encode_{side}")(texts, batch_size=len(texts), **options)
        if not signed:
            return x.relu()  # static queries may have negative weights, which pruning takes
        if type(modules[side][-1]) is type(pooling):
            return x
        return torch.where(x > 0, torch.inf, -torch.inf)  # these no bias changes

    def prune(budgets: Budgets, keep_at_least: int) -> None:
        pruning.budgets, pruning.keep_at_least = budgets, keep_at_least
        if budgets:
            model.max_active_dims = None

    own = pruning.activation, len(projection_of(language_model).weight), held
    return Adapter(True, False, *own, read, prune, lambda: projection_of(language_model).bias)
