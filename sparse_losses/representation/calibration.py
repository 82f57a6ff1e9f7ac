"""The threshold at which texts keep a given number of dimensions."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import Activation
from sparse_losses._core.checks import check_choice, check_number, check_rows
from sparse_losses.representation._language_model import (
    Projection,
    evaluating,
    head_of,
    projection_of,
    unwrapped,
)
from sparse_losses.representation.encoding import batches, check_texts
from sparse_losses.representation.head import SpladeHead

if TYPE_CHECKING:
    from sparse_losses.representation.encoder import SpladeEncoder

__all__ = ["calibrate", "calibrate_threshold", "pruning_threshold", "shift_bias"]

LARGEST = math.log(sys.float_info.max)  # of an activation: the logarithm of the largest number


def calibrate_threshold(
    activations: Tensor, target_active: float, *, activation: Activation = "relu"
) -> float:
    r"""Find the threshold that leaves ``target_active`` dimensions per text, on average.

    Activations are $x = \log(1 + \max(0, z))$ of pooled logits $z$. The threshold $t$ is in units
    of $z$, so it can be subtracted from a bias: $e^x - 1 > t$ holds for that many entries per row.

    Args:
        activations: pooled vectors ``[..., V]``, floating, without idf weights or gate.
        target_active: mean number of entries to keep per row, > 0.
        activation: as in ``splade_head``, which made the activations.

    Returns:
        $t \ge 0$, halfway between the smallest entry that is kept and the largest that is not; 0 if
        all are kept. Equal entries are kept or dropped together, whichever is nearer the target.

    Raises:
        ValueError: if fewer entries are active (no threshold adds any), or if an activation is not
            finite or is above 709.78, the logarithm of the largest float.
        TypeError: if ``activations`` is not a dense tensor.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import calibrate_threshold
        >>> logits = torch.tensor([[1.0, 2.0, 0.0], [4.0, 6.0, 8.0]])
        >>> t = calibrate_threshold(logits.log1p(), target_active=1.5)
        >>> round(t, 4), (logits > t).sum().item()
        (3.0, 3)
    """
    check_number("target_active", target_active, minimum=0.0, exclusive=True)
    check_rows("activations", activations)
    check_choice("activation", activation, get_args(Activation))
    rows = activations.detach().flatten(0, -2)
    largest = math.log1p(LARGEST) if activation == "log1p_relu" else LARGEST
    wrong = rows[~(rows.isfinite() & (rows <= largest))]
    if len(wrong):
        raise ValueError(
            "expected `activations` to be log(1 + z) of finite logits z, so at most "
            f"{largest:.2f}, got {wrong[0].item():g}"
        )
    return _threshold_of(_logits_of(rows[rows > 0], activation), len(rows), target_active)


def calibrate(
    model: Any,
    data: Sequence[str] | Iterable[tuple[Tensor, Tensor]],
    target_active: float,
    *,
    method: Literal["prune", "shift"] | None = None,
) -> float:
    """Make a model's vectors keep ``target_active`` dimensions each, on average.

    ``"prune"`` sets a threshold of the pooled logits, ``"shift"`` subtracts it from the bias of the
    vocabulary projection, which lowers the weights that stay, too.

    - A ``SpladeEncoder`` is calibrated by its ``calibrate``, of the documents.
    - A ``SpladeHead`` gets a ``threshold``.
    - Of a ``SparseEncoder`` of sentence-transformers, with or without ``use_splade_head``, the bias
      is shifted in place, and saved with the model's folder. ``"prune"`` needs ``use_splade_head``:
      the threshold holds for documents and queries, in this process; it is not saved.

    Args:
        model: a ``SpladeEncoder``, a ``SpladeHead``, or a ``SparseEncoder`` of a fill-mask
            transformer and ``SpladePooling``, or of a ``Router`` with these for documents.
        data: texts like those to be encoded, such as a sample of the documents; for a
            ``SpladeHead`` batches ``(hidden, attention_mask)`` of ``[B, S, H]`` and ``[B, S]``.
        target_active: active dimensions per text, on average, > 0.
        method: ``"prune"`` or ``"shift"``; default: ``"shift"`` for a ``SparseEncoder``, else
            ``"prune"``, the only one for a ``SpladeHead``.

    Returns:
        The threshold, or the number that was subtracted from the bias.

    Raises:
        TypeError: for another model, or data of another kind.
        ValueError: if fewer dimensions are active, for a method that the model does not have, or if
            ``"shift"`` finds no bias and the model's config has no ``decoder_bias`` to add one.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeHead, calibrate
        >>> head = SpladeHead(torch.eye(4))
        >>> hidden = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]])
        >>> calibrate(head, [(hidden, torch.ones(1, 1))], target_active=2)
        2.5
        >>> (head(hidden) > 0).tolist()
        [[True, True, False, False]]

        ``sparse_losses.calibrate(sparse_encoder, documents[:1000], target_active=64)``
    """
    check_choice("method", method, (None, "prune", "shift"))
    check_number("target_active", target_active, minimum=0.0, exclusive=True)
    if isinstance(model, SpladeHead):
        check_choice("method", method, (None, "prune"))
        t = _threshold_of_head(model, data, target_active)
        if isinstance(model.threshold, Tensor):  # a buffer, which cannot become a number
            del model.threshold
        model.threshold = t
        return t
    check_texts(data)
    texts: Any = data
    if hasattr(model, "calibrate"):
        own: float = model.calibrate(texts, target_active, method=method or "prune")
        return own
    return _calibrate_sparse_encoder(model, list(texts), target_active, method or "shift")


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


def _threshold_of_head(head: SpladeHead, data: Any, target_active: float) -> float:
    rows, positive = 0, []
    with torch.no_grad():
        for hidden, attention_mask in data:
            _, logits = head(hidden, attention_mask, return_logits=True)  # not pruned
            rows += len(logits)
            positive.append(logits[logits > 0].double().cpu())
    if not positive:
        raise ValueError("expected at least one batch of `data`, got none")
    return _threshold_of(torch.cat(positive), rows, target_active)


def _calibrate_sparse_encoder(
    model: Any, texts: list[str], target_active: float, method: str
) -> float:
    transformer, pooling = document_modules(model)
    inner = unwrapped(transformer.auto_model)
    patched = vars(pooling).get("forward")  # by `use_splade_head`
    if method == "prune" and patched is None:
        raise ValueError(
            "expected method='shift', or a model with use_splade_head, which can prune, got 'prune'"
        )
    # The other method subtracts from the bias what is left of the logits by their scale and cap.
    found = _head_of_patched(inner) if method == "shift" else None
    options = {"convert_to_sparse_tensor": True, "save_to_cpu": True, "show_progress_bar": False}
    with _without_threshold(patched):
        vectors = model.encode_document(texts, **options).coalesce()
    logits = _logits_of(vectors.values(), pooling.activation_function)
    t = _threshold_of(logits, len(texts), target_active)
    if found is None:
        patched.args[-1].threshold = t
        return t
    if found.softcap is not None:
        t = found.softcap * math.atanh(t / found.softcap)
    with torch.no_grad():
        _bias_of(inner).sub_(t / found.logit_scale)
    return t / found.logit_scale


@contextmanager
def _without_threshold(patched: Any) -> Iterator[None]:
    head: Any = SimpleNamespace(threshold=None) if patched is None else patched.args[-1]
    held, head.threshold = head.threshold, None
    try:
        yield
    finally:
        head.threshold = held


def _head_of_patched(model: Any) -> Projection:
    """Return the head of a model whose ``forward`` may be patched so that it gives no logits."""
    patched = vars(model).pop("forward", None)
    try:
        return head_of(model)
    finally:
        if patched is not None:
            model.forward = patched


def _logits_of(active: Tensor, activation: str) -> Tensor:
    logits = active.double().cpu().expm1()
    return logits.expm1() if activation == "log1p_relu" else logits


def _threshold_of(positive: Tensor, rows: int, target_active: float) -> float:
    """Return the threshold that leaves so many of the ``positive`` logits a row."""
    values = positive.sort(descending=True).values
    kept = round(target_active * rows)
    if kept > len(values):
        raise ValueError(
            f"expected `target_active` of at most {len(values) / max(rows, 1):.4g}, the mean that "
            f"are active, got {target_active}"
        )
    if kept == 0:
        raise ValueError(f"expected enough rows to keep at least one entry, got {rows}")
    return max(_threshold(values, kept), 0.0)


def pruning_threshold(
    encoder: "SpladeEncoder", texts: Sequence[str], target_active: float, batch_size: int
) -> float:
    """Return the threshold of the pooled logits that leaves ``target_active`` dimensions."""
    largest, _, possible, kept = _largest(
        encoder, texts, target_active, batch_size, _positive_logits
    )
    _check_enough(kept, possible, len(texts), target_active, "are active")
    return max(_threshold(largest, kept), 0.0)


def shift_bias(
    encoder: "SpladeEncoder", texts: Sequence[str], target_active: float, batch_size: int
) -> float:
    """Subtract from the bias what leaves ``target_active`` dimensions per text, and return it."""
    largest, tokens, possible, kept = _largest(
        encoder, texts, target_active, batch_size, _ungated_logits
    )
    _check_enough(kept, possible, len(texts), target_active, "can be active")
    bias = _bias(encoder)
    own_bias = bias.detach().cpu()[tokens if encoder.expansion else torch.zeros_like(tokens)]
    t = max(_threshold(largest, kept), largest[-1].item() - 1.0)
    t = _threshold_of_rounded(largest, kept, t, own_bias)
    with torch.no_grad():
        bias.sub_(t)
    return t


def _check_enough(kept: int, possible: int, texts: int, target_active: float, what: str) -> None:
    if kept > possible:
        raise ValueError(
            f"expected `target_active` of at most {possible / texts:.4g}, the mean that {what}, "
            f"got {target_active}"
        )


def _largest(
    encoder: "SpladeEncoder",
    texts: Sequence[str],
    target_active: float,
    batch_size: int,
    logits_of: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, int, int]:
    """Return the largest logits, their tokens, the number of all, and how many are kept."""
    check_number("target_active", target_active, minimum=0.0, exclusive=True)
    kept = round(target_active * len(texts))
    if kept == 0:
        raise ValueError(
            f"expected enough texts to keep at least one dimension, got {len(texts)} texts and "
            f"a `target_active` of {target_active}"
        )
    # Enough logits to find the gap below the threshold even if equal texts have equal entries.
    largest, possible, held = torch.empty(0, dtype=torch.float64), 0, 2 * kept + len(texts)
    tokens = torch.empty(0, dtype=torch.int64)
    with torch.inference_mode(), evaluating(encoder):
        for numbers in batches(texts, batch_size):
            batch = encoder.tokenize([texts[i] for i in numbers])
            logits, own = logits_of(encoder, **batch)
            possible += len(logits)
            logits, index = logits.topk(min(held, len(logits)))
            tokens = torch.cat([tokens, own[index].cpu()])
            largest, order = torch.cat([largest, logits.double().cpu()]).sort(descending=True)
            largest, tokens = largest[:held], tokens[order][:held]
    return largest, tokens, possible, kept


def _positive_logits(encoder: "SpladeEncoder", **batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return all texts' positive logits, after the gate, and their tokens."""
    _, logits = encoder(**batch, return_logits=True, apply_idf=False)
    logits, tokens = _counted(encoder, logits)
    return logits[logits > 0], tokens[logits > 0]


def _ungated_logits(
    encoder: "SpladeEncoder", input_ids: Tensor, attention_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return all texts' logits that can be active, before the gate, and their tokens."""
    hidden = encoder._hidden(input_ids, attention_mask)
    pooled = encoder._pooled(input_ids, attention_mask)
    logits: Tensor
    if encoder.expansion:
        _, logits = encoder.head(hidden, pooled, return_logits=True)
        logits = logits[pooled.any(1)]
        # What is subtracted from the bias counts before the soft cap and the scale.
        if (cap := encoder.head.softcap) is not None:
            logits = cap * (logits / cap).atanh()
        logits = logits / encoder.head.logit_scale
    else:
        logits = encoder._token_logits(hidden, input_ids, pooled, absent=-torch.inf)
    logits, tokens = _counted(encoder, logits)
    can_be = logits > -torch.inf
    return logits[can_be], tokens[can_be]


def _counted(encoder: "SpladeEncoder", logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of the dimensions whose idf weight is not 0, and their tokens."""
    tokens = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    if encoder.idf_weights is not None:
        counted = encoder.idf_weights > 0
        logits, tokens = logits[:, counted], tokens[:, counted]
    if logits.isnan().any() or logits.isposinf().any():
        raise ValueError("expected finite logits, got others")
    return logits, tokens


def _bias(encoder: "SpladeEncoder") -> Tensor:
    """Return the bias of all logits; if there is none, add it to the model and its config."""
    if not encoder.expansion:
        *_, last = encoder.importance.modules()  # it may be this one layer
        assert isinstance(last, nn.Linear)
        return last.bias
    bias = _bias_of(unwrapped(encoder.model))
    encoder.head.bias = bias
    return bias


def _bias_of(model: Any) -> Tensor:
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


def _threshold(values: Tensor, kept: int) -> float:
    """Return the middle of the gap below the first ``kept`` of the descending ``values``.

    Equal entries are kept or dropped together, whichever is nearer to ``kept``; at least one is
    kept. If all are kept the threshold is minus infinity.
    """
    edge = values[kept - 1]
    more, fewer = int((values >= edge).sum()), int((values > edge).sum())
    kept = more if more - kept <= kept - fewer or fewer == 0 else fewer
    if kept == len(values):
        return -math.inf
    return values[kept - 1].item() / 2 + values[kept].item() / 2  # the sum could overflow


def _threshold_of_rounded(values: Tensor, kept: int, exact: float, bias: Tensor) -> float:
    """Return the threshold next to ``exact`` that keeps nearest to ``kept`` of the ``values``.

    Each of the ``values`` contains its entry of ``bias``; the threshold is subtracted from that,
    and the difference is rounded to the dtype of ``bias``.
    """

    def missed(t: float) -> int:
        change = (bias - t).double() - bias.double()
        return abs(int((values + change > 0).sum()) - kept)

    step = torch.finfo(bias.dtype).eps / 4  # half of the least distance of two numbers
    nearest_first = sorted(range(-4, 5), key=abs)
    return min((exact * (1 + k * step) for k in nearest_first), key=missed)
