"""How ``calibrate`` reads, prunes and shifts each of the three kinds of models."""

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import logits_at, pruned_weights
from sparse_losses.representation._language_model import projection_of, unwrapped
from sparse_losses.representation.encoder import SpladeEncoder
from sparse_losses.representation.encoding import batches
from sparse_losses.representation.head import SpladeHead
from sparse_losses.representation.pooling import splade_pool

Thresholds = tuple[float | None, float | None]  # of documents and of queries
Budgets = dict[float, Thresholds]


def adapter_of(model: Any) -> Any:
    """Return what reads and changes a model."""
    if isinstance(model, SpladeHead):
        return OfHead(model)
    return OfEncoder(model) if isinstance(model, SpladeEncoder) else OfSparseEncoder(model)


def _batches(texts: Any, batch_size: int, show_progress: bool | None) -> Iterator[list[str]]:
    """Yield texts of similar length; without a choice a progress bar comes after ten seconds."""
    delay = 10 if show_progress is None else 0
    is_shown = show_progress is not False
    for numbers in batches(texts, batch_size, is_shown, desc="Calibrating", delay=delay):
        yield [texts[i] for i in numbers]


class OfEncoder:
    """A ``SpladeEncoder``, which keeps thresholds and budgets as settings."""

    takes_several, takes_texts = True, True

    def __init__(self, encoder: SpladeEncoder) -> None:
        self.model, self.activation = encoder, encoder.activation
        self.vocab_size = encoder.vocab_size
        self.thresholds: Thresholds = (encoder.document_threshold, encoder.query_threshold)

    def read(self, texts: Any, side: Any, signed: bool, *batching: Any) -> Iterator[Tensor]:
        """Yield activations ``[B, V]``, or the signed outputs of the projection."""
        encoder, gate, idf = self.model, self.model.gate, self.model.idf_weights
        if signed:  # the bias is added before the gate
            encoder.gate = None
        try:
            for some in _batches(texts, *batching):
                x: Any = encoder(
                    **encoder.tokenize(some, side=side), apply_idf=False, return_logits=signed
                )
                if signed:
                    x = _projected(x[1], encoder.head if encoder.expansion else None)
                yield x if idf is None else torch.where(idf > 0, x, -torch.inf if signed else 0.0)
        finally:
            encoder.gate = gate

    def prune(self, thresholds: Thresholds, keep_at_least: int, budgets: Budgets) -> None:
        """Set the thresholds."""
        self.model.document_threshold, self.model.query_threshold = thresholds
        self.model.keep_at_least, self.model.budgets = keep_at_least, budgets

    def bias(self) -> Tensor:
        """Return the bias of the projection, or of the importance layer."""
        if self.model.expansion:
            self.model.head.bias = _bias_of(self.model.model)
            return self.model.head.bias
        *_, last = self.model.importance.modules()  # it may be this one layer
        assert isinstance(last, nn.Linear)
        return last.bias


class OfHead:
    """A ``SpladeHead``, which has one threshold: that of documents."""

    takes_several, takes_texts, thresholds = False, False, (None, None)

    def __init__(self, head: SpladeHead) -> None:
        self.model, self.activation, self.vocab_size = head, head.activation, len(head.weight)

    def read(self, data: Any, side: str, signed: bool, *batching: Any) -> Iterator[Tensor]:
        """Yield the activations of batches of hidden states."""
        held, self.model.threshold = self.model.threshold, None
        try:
            for hidden, attention_mask in data:
                x: Any = self.model(hidden, attention_mask, return_logits=signed)
                yield _projected(x[1], self.model) if signed else x
        finally:
            self.model.threshold = held

    def prune(self, thresholds: Thresholds, keep_at_least: int, budgets: Budgets) -> None:
        """Set the threshold."""
        if isinstance(self.model.threshold, Tensor):  # a buffer, which cannot become a number
            del self.model.threshold
        self.model.threshold, self.model.keep_at_least = thresholds[0], keep_at_least

    def bias(self) -> Tensor:
        """Return the head's bias."""
        if self.model.bias is None:
            raise ValueError("expected a head with a bias to shift, got one without")
        return self.model.bias


class OfSparseEncoder:
    """A ``SparseEncoder`` of sentence-transformers, with ``use_splade_head`` or without it."""

    takes_several, takes_texts = False, True

    def __init__(self, model: Any) -> None:
        transformer, pooling = document_modules(model)
        self.model, self.activation = model, pooling.activation_function
        self.language_model = unwrapped(transformer.auto_model)
        self.poolings = [x for x in model.modules() if type(x) is type(pooling)]
        self.vocab_size = len(projection_of(self.language_model).weight)
        owner = getattr(vars(model).get("forward"), "__self__", None)  # accelerate's is the model
        self.pruning = owner if isinstance(owner, _Pruning) else _Pruning(model)
        self.thresholds: Thresholds = self.pruning.thresholds

    def read(self, texts: Any, side: str, signed: bool, *batching: Any) -> Iterator[Tensor]:
        """Yield what the pooling gives, or the signed outputs of the projection before it."""
        seen: list[Tensor] = []
        hooks = [x.register_forward_hook(partial(self._look, seen, signed)) for x in self.poolings]
        held, self.model.max_active_dims = self.model.max_active_dims, None
        self.pruning.thresholds, encode = (None, None), getattr(self.model, f"encode_{side}")
        try:
            for some in _batches(texts, *batching):
                vectors = encode(some, batch_size=len(some), show_progress_bar=False)
                # Vectors of static queries come from no pooling: all of them stay.
                yield seen.pop() if seen else torch.where(vectors.to_dense() > 0, torch.inf, 0.0)
        finally:
            self.model.max_active_dims, self.pruning.thresholds = held, self.thresholds
            for hook in hooks:
                hook.remove()

    def _look(self, seen: list[Tensor], signed: bool, pooling: Any, args: Any, output: Any) -> None:
        weights, head = output["sentence_embedding"], _head_of(pooling)
        if not signed:
            seen.append(weights)
            return
        states, mask = args[0]["token_embeddings"], args[0].get("attention_mask")
        if "cu_seq_lens_q" in args[0]:  # all texts in one row: only what is active is known
            logits = logits_at(weights.double(), self.activation)
        elif head is None:
            logits = splade_pool(states, mask, return_logits=True)[1]
        else:
            logits = head(states, mask, return_logits=True)[1]
        seen.append(_projected(logits, head or SpladeHead.from_masked_lm(self.language_model)))

    def prune(self, thresholds: Thresholds, keep_at_least: int, budgets: Budgets) -> None:
        """Prune in this process."""
        self.pruning.thresholds, self.pruning.keep_at_least = thresholds, keep_at_least
        owner = getattr(vars(self.model).get("forward"), "__self__", None)
        if thresholds != (None, None) and owner is not self.pruning:
            self.model.forward = self.pruning.forward
            for pooling in self.poolings:
                pooling.register_forward_hook(self.pruning.prune)
                pooling.save = partial(_save, pooling, self.pruning)

    def bias(self) -> Tensor:
        """Return the bias of the projection."""
        bias = _bias_of(self.language_model)
        for pooling in self.poolings:
            if head := _head_of(pooling):
                head.bias = bias
        return bias


class _Pruning:
    """What prunes a ``SparseEncoder``: its model tells the side, its poolings drop dimensions."""

    def __init__(self, model: Any) -> None:
        self.model, self.side, self.keep_at_least = model, 0, 1
        self.thresholds: Thresholds = (None, None)

    def forward(self, features: Any, **options: Any) -> Any:
        self.side = int(options.get("task") == "query")
        return type(self.model).forward(self.model, features, **options)

    def prune(self, pooling: Any, args: Any, output: Any) -> None:
        threshold, name = self.thresholds[self.side], "sentence_embedding"
        if threshold is not None and not pooling.training:
            activation = pooling.activation_function
            output[name] = pruned_weights(
                output[name], threshold, self.keep_at_least, activation=activation
            )


def document_modules(model: Any) -> tuple[Any, Any]:
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


def _head_of(pooling: Any) -> Any:
    """Return the head of ``use_splade_head``, the last argument of what it puts in place."""
    patched = vars(pooling).get("forward")
    return None if patched is None else patched.args[-1]


def _save(pooling: Any, pruning: _Pruning, *args: Any, **options: Any) -> None:
    if pruning.thresholds != (None, None):
        warnings.warn(
            "the thresholds of `calibrate` are not saved, as sentence-transformers has no place "
            "for them: set the model's `max_active_dims` as well, or calibrate after loading",
            stacklevel=2,
        )
    type(pooling).save(pooling, *args, **options)


def _projected(logits: Tensor, head: SpladeHead | None) -> Tensor:
    """Return the outputs of the projection, which its bias is part of, -inf for absent logits."""
    logits = torch.where(logits == 0, -torch.inf, logits)
    if head is None:
        return logits
    if head.softcap is not None:  # rounding may have taken a logit to its cap
        limit = 1.0 - torch.finfo(torch.float32).eps
        inside = (logits / head.softcap).clamp(-limit, limit)
        logits = torch.where(logits.isinf(), logits, head.softcap * inside.atanh())
    return logits / head.logit_scale


def _bias_of(model: Any) -> Tensor:
    """Return the bias of the projection; if there is none, add it to the model and its config."""
    model = unwrapped(model)
    projection = projection_of(model)
    if projection.bias is None:
        if not hasattr(model.config, "decoder_bias"):
            raise ValueError(
                "expected a model whose output embeddings have a bias, or whose config has a "
                f"`decoder_bias` to add one, got {type(model).__name__}"
            )
        projection.bias = nn.Parameter(projection.weight.new_zeros(len(projection.weight)))
        model.config.decoder_bias = True
    bias: Tensor = projection.bias
    return bias
