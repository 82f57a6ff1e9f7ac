"""The settings of a ``SpladeEncoder``, as saved, and the parts that it is built of."""

from typing import Any, get_args

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import Activation
from sparse_losses._core.checks import (
    check_choice,
    check_integer,
    check_number,
    check_shapes,
)
from sparse_losses._core.precision import compute_dtype
from sparse_losses.representation._language_model import position_limits
from sparse_losses.representation.encoding import check_pruning
from sparse_losses.representation.gate import ContextGate

SIDES = ("document", "query")
# Arguments of the constructor that are kept as attributes, shown and saved, with their defaults.
SETTINGS: dict[str, Any] = {
    **{"expansion": True, "pool_special_tokens": True, "activation": "relu"},
    **{"softcap": None, "logit_scale": None, "bidirectional": True},
    **{"prune_ratio": None, "max_active_dims": None},
    **{"document_threshold": None, "query_threshold": None, "keep_at_least": 1, "budgets": {}},
    "prompts": None,
}


def check(settings: dict[str, Any]) -> None:
    """Raise unless these settings, or their defaults, go together."""
    settings = {"importance": "mlp", "max_length": None, **SETTINGS, **settings}
    expansion = settings["expansion"]
    activations = get_args(Activation) + (() if expansion else ("identity",))
    check_choice("activation", settings["activation"], activations)
    check_choice("importance", settings["importance"], ("mlp",) if expansion else ("mlp", "linear"))
    numbers = {name: settings[name] for name in ("softcap", "logit_scale")}
    if not expansion and any(x is not None for x in numbers.values()):
        raise ValueError("expected no `softcap` and `logit_scale` with expansion=False")
    thresholds = {f"{side}_threshold": settings[f"{side}_threshold"] for side in SIDES}
    for number, pair in dict(settings["budgets"]).items():
        thresholds |= {f"budgets[{number}][{i}]": x for i, x in enumerate(pair)}
    for name, x in {**numbers, **thresholds}.items():
        if x is not None and (name, x) != ("logit_scale", "auto"):
            check_number(name, x, minimum=0.0, exclusive=name in numbers)
    check_integer("keep_at_least", settings["keep_at_least"], minimum=0)
    check_pruning(settings["prune_ratio"], settings["max_active_dims"])


def importance(kind: str, hidden_size: int) -> nn.Module:
    """Return the network that gives each position its logit, without expansion."""
    last = nn.Linear(hidden_size, 1)
    # All tokens start active: behind the activation's ReLU an inactive one has no gradient.
    nn.init.ones_(last.bias)
    if kind == "linear":
        return last
    return nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Dropout(0.1), last)


def position_logits(importance: nn.Module, hidden: Tensor) -> Tensor:
    """Return the logit of each position's own token ``[B, S]``, without expansion."""
    logits: Tensor = importance(hidden)[:, :, 0].to(compute_dtype(hidden=hidden))
    return logits


def token_logits(logits: Tensor, input_ids: Tensor, pooled: Tensor, vocab_size: int) -> Tensor:
    """Return the largest logit of every token of the texts, 0 at the others, without expansion."""
    # The positions that do not count go to an extra column.
    columns = torch.where(pooled, input_ids, vocab_size)
    largest = logits.new_zeros(logits.shape[0], vocab_size + 1)
    return largest.scatter_reduce(1, columns, logits, "amax", include_self=False)[:, :-1]


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Give the tokenizer a padding token if it has none; raise for ids that the model lacks."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        what = f"ids below the model's vocabulary size {vocab_size}"
        raise ValueError(f"expected `tokenizer` to have {what}, got the id {largest}")


def gate(given: object, hidden_size: int, vocab_size: int) -> ContextGate | None:
    """Return the gate, for ``True`` a new one; raise for one of other sizes."""
    if given is True:
        heads = next(n for n in (4, 2, 1) if hidden_size % n == 0)
        return ContextGate(hidden_size, vocab_size, num_heads=heads)
    if not isinstance(given, ContextGate):
        if given not in (None, False):
            raise TypeError(f"expected `gate` to be a ContextGate or a flag, got {given!r}")
        return None
    expected, sizes = (hidden_size, vocab_size), (given.hidden_size, given.vocab_size)
    if sizes != expected:
        raise ValueError(f"expected `gate` of hidden and vocab_size {expected}, got {sizes}")
    return given


def idf_weights(given: Tensor, vocab_size: int) -> Tensor:
    """Return a copy in fp32; raise unless it is one finite number >= 0 a token."""
    check_shapes(idf_weights=(given, "V"))
    copied = given.detach().clone(memory_format=torch.contiguous_format).float()
    if len(copied) != vocab_size or not (copied.isfinite() & (copied >= 0)).all():
        raise ValueError(f"expected `idf_weights` to be V = {vocab_size} finite numbers >= 0")
    return copied


def max_length(given: int | None, model: Any, tokenizer: Any) -> int | None:
    """Return the largest number of tokens: by default the limit of model and tokenizer, if any."""
    limits = position_limits(model)
    if given is None:
        known = [x for x in (*limits, tokenizer.model_max_length) if x < 10**9]  # 1e30: unknown
        return min((int(x) for x in known), default=None)
    check_integer("max_length", given, minimum=tokenizer.num_special_tokens_to_add() + 1)
    if limits and given > (most := min(limits)):
        raise ValueError(f"expected `max_length` <= {most}, the model's positions, got {given}")
    return int(given)
