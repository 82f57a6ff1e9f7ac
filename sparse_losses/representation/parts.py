"""The settings of a ``SpladeEncoder``, as saved, and the parts that it is built of."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import Activation
from sparse_losses._core.checks import check_choice, check_integer, check_number, check_shapes
from sparse_losses._core.precision import compute_dtype
from sparse_losses.representation._language_model import position_limits
from sparse_losses.representation.encoding import check_pruning
from sparse_losses.representation.gate import ContextGate

SIDES = ("document", "query")
# Arguments of the constructor that are kept as attributes, shown and saved.
SETTINGS = (
    *("expansion", "pool_special_tokens", "activation", "softcap", "logit_scale", "bidirectional"),
    *("prune_ratio", "max_active_dims", "budgets", "keep_at_least", "prompts"),
)


def check(settings: dict[str, Any], importance: str) -> None:
    """Raise unless all of these settings go together."""
    expansion = settings["expansion"]
    activations = get_args(Activation) + (() if expansion else ("identity",))
    check_choice("activation", settings["activation"], activations)
    check_choice("importance", importance, ("mlp",) if expansion else ("mlp", "linear"))
    numbers = {name: settings[name] for name in ("softcap", "logit_scale")}
    if not expansion and any(x is not None for x in numbers.values()):
        raise ValueError("expected no `softcap` and `logit_scale` with expansion=False")
    for name, x in numbers.items():
        if x is not None and (name, x) != ("logit_scale", "auto"):
            check_number(name, x, minimum=0.0, exclusive=True)
    budgets = settings["budgets"]
    if not isinstance(budgets, Mapping) or any(len(pair) != 2 for pair in budgets.values()):
        raise ValueError(f"expected `budgets` as pairs of thresholds by number, got {budgets!r}")
    for number, pair in budgets.items():
        for threshold in (x for x in pair if x is not None):
            check_number(f"budgets[{number}]", threshold, minimum=0.0)
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


def token_logits(
    importance: nn.Module,
    hidden: Tensor,
    input_ids: Tensor,
    pooled: Tensor,
    vocab_size: int,
    *,
    absent: float = 0.0,
) -> Tensor:
    """Return the largest logit of each token in a text ``[B, V]``, without expansion."""
    logits: Tensor = importance(hidden)[:, :, 0].to(compute_dtype(hidden=hidden))
    # The positions that do not count go to an extra column.
    columns = torch.where(pooled, input_ids, vocab_size)
    largest = logits.new_full((logits.shape[0], vocab_size + 1), absent)  # export sees no `len`
    largest = largest.scatter_reduce(1, columns, logits, "amax", include_self=False)
    return largest[:, :-1]


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Give the tokenizer a padding token if it has none; raise for ids that the model lacks."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        what = f"ids below the model's vocabulary size {vocab_size}"
        raise ValueError(f"expected `tokenizer` to have {what}, got the id {largest}")


def gate(given: Any, hidden_size: int, vocab_size: int) -> ContextGate | None:
    """Return the gate, for ``True`` a new one; raise for one of other sizes."""
    if given is True:
        heads = next(n for n in (4, 2, 1) if hidden_size % n == 0)
        return ContextGate(hidden_size, vocab_size, num_heads=heads)
    if not given:
        return None
    if not isinstance(given, ContextGate):
        raise TypeError(f"expected `gate` to be a ContextGate or a flag, got {given!r}")
    expected, sizes = (hidden_size, vocab_size), (given.hidden_size, given.vocab_size)
    if sizes != expected:
        raise ValueError(f"expected `gate` of hidden and vocab_size {expected}, got {sizes}")
    return given


def idf_weights(given: Tensor | Literal[False] | None, vocab_size: int) -> Tensor | None:
    """Return a copy in fp32, if any; raise unless it is one finite number >= 0 a token."""
    if given is None or given is False:
        return None
    check_shapes(idf_weights=(given, "V"))
    if len(given) != vocab_size or not (given.isfinite() & (given >= 0)).all():
        raise ValueError(f"expected `idf_weights` to be V = {vocab_size} finite numbers >= 0")
    return torch.empty(vocab_size, dtype=torch.float32).copy_(given.detach())


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
