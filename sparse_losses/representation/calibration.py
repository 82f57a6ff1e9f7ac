"""The threshold at which texts keep a given number of dimensions."""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import Activation
from sparse_losses._core.checks import check_choice, check_number, check_rows
from sparse_losses.representation._language_model import (
    evaluating,
    head_of,
    projection_of,
    unwrapped,
)
from sparse_losses.representation.encoding import batches, check_texts

if TYPE_CHECKING:
    from sparse_losses.representation.encoder import SpladeEncoder

__all__ = ["calibrate", "calibrate_threshold", "shift_bias"]

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
    return _threshold_of(rows[rows > 0], len(rows), target_active, activation)


def calibrate(
    model: Any, data: Sequence[str], target_active: float, *, method: str | None = None
) -> float:
    """Shift the bias of a model's logits so that texts keep ``target_active`` dimensions each.

    For a ``SpladeEncoder`` this is its ``calibrate``. Of a ``SparseEncoder`` of sentence-
    transformers, with or without ``use_splade_head``, the bias of the vocabulary projection is
    shifted in place, and saved with the model's folder. The shift lowers the weights that stay,
    too, of documents and queries.

    Args:
        model: a ``SpladeEncoder``; or a ``SparseEncoder`` of a fill-mask transformer and
            ``SpladePooling``.
        data: texts like those to be encoded, such as a sample of the documents.
        target_active: active dimensions per text, on average, > 0.
        method: ``"shift"``, which is the default.

    Returns:
        The number that was subtracted from the bias.

    Raises:
        TypeError: for another model, or anything but a sequence of strings.
        ValueError: if fewer dimensions are active, or if the model has no bias and its config no
            ``decoder_bias`` to add one.

    Examples:
        >>> import sparse_losses
        >>> sparse_losses.calibrate("a string", ["a text"], target_active=64)
        Traceback (most recent call last):
        TypeError: expected a SpladeEncoder, or a SparseEncoder of ..., got str of no modules

        ``sparse_losses.calibrate(sparse_encoder, documents[:1000], target_active=64)``
    """
    check_choice("method", method, (None, "shift"))
    check_texts(data)
    if hasattr(model, "calibrate"):
        own: float = model.calibrate(data, target_active)
        return own
    modules = list(model) if isinstance(model, nn.Sequential) else []
    kinds = [type(module).__name__ for module in modules]
    if not hasattr(model, "encode_document") or kinds[1:2] != ["SpladePooling"]:
        raise TypeError(
            "expected a SpladeEncoder, or a SparseEncoder of a transformer and SpladePooling, got "
            f"{type(model).__name__} of {', '.join(kinds) or 'no modules'}"
        )
    check_number("target_active", target_active, minimum=0.0, exclusive=True)
    inner = unwrapped(modules[0].auto_model)
    patched = vars(inner).pop("forward", None)  # by `use_splade_head`, which gives no logits
    try:
        found = head_of(inner)
    finally:
        if patched is not None:
            inner.forward = patched
    options = {"convert_to_sparse_tensor": True, "save_to_cpu": True, "show_progress_bar": False}
    vectors = model.encode_document(list(data), **options).coalesce()
    activation: Any = modules[1].activation_function
    t = _threshold_of(vectors.values(), len(data), target_active, activation)
    if found.softcap is not None:
        t = found.softcap * math.atanh(t / found.softcap)
    with torch.no_grad():
        _bias_of(inner).sub_(t / found.logit_scale)
    return t / found.logit_scale


def _threshold_of(active: Tensor, rows: int, target_active: float, activation: str) -> float:
    """Return the threshold of the logits that leaves so many of the ``active`` activations."""
    values = active.double().cpu().sort(descending=True).values.expm1()
    if activation == "log1p_relu":
        values = values.expm1()
    kept = round(target_active * rows)
    if kept > len(values):
        raise ValueError(
            f"expected `target_active` of at most {len(values) / max(rows, 1):.4g}, the mean that "
            f"are active, got {target_active}"
        )
    if kept == 0:
        raise ValueError(f"expected enough rows to keep at least one entry, got {rows}")
    return max(_threshold(values, kept), 0.0)


def shift_bias(
    encoder: "SpladeEncoder", texts: Sequence[str], target_active: float, batch_size: int
) -> float:
    """Subtract from the bias what leaves ``target_active`` dimensions per text, and return it."""
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
            logits, own = _ungated_logits(encoder, **batch)
            possible += len(logits)
            logits, index = logits.topk(min(held, len(logits)))
            tokens = torch.cat([tokens, own[index].cpu()])
            largest, order = torch.cat([largest, logits.double().cpu()]).sort(descending=True)
            largest, tokens = largest[:held], tokens[order][:held]
    if kept > possible:
        raise ValueError(
            f"expected `target_active` of at most {possible / len(texts):.4g}, the mean that "
            f"can be active, got {target_active}"
        )
    bias = _bias(encoder)
    own_bias = bias.detach().cpu()[tokens if encoder.expansion else torch.zeros_like(tokens)]
    t = max(_threshold(largest, kept), largest[-1].item() - 1.0)
    t = _threshold_of_rounded(largest, kept, t, own_bias)
    with torch.no_grad():
        bias.sub_(t)
    return t


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
    tokens = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    if encoder.idf_weights is not None:
        counted = encoder.idf_weights > 0
        logits, tokens = logits[:, counted], tokens[:, counted]
    if logits.isnan().any() or logits.isposinf().any():
        raise ValueError("expected finite logits, got others")
    can_be = logits > -torch.inf
    return logits[can_be], tokens[can_be]


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
