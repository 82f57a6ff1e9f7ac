"""The threshold at which texts keep a given number of dimensions."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import Activation
from sparse_losses._core.checks import check_choice, check_number, check_rows
from sparse_losses._core.dtensors import agree, full
from sparse_losses.representation._language_model import evaluating, projection_of, unwrapped
from sparse_losses.representation.encoding import batches, check_texts
from sparse_losses.representation.head import SpladeHead

if TYPE_CHECKING:
    from sparse_losses.representation.encoder import SpladeEncoder


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
        ValueError: if fewer entries are active (no threshold adds any), or if an activation is that
            of no finite logit: NaN, infinite or above 709.78, the logarithm of the largest float.
        TypeError: if ``activations`` is not a dense tensor.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import calibrate_threshold
        >>> logits = torch.tensor([[1.0, 2.0, 0.0], [4.0, 6.0, 8.0]])
        >>> t = calibrate_threshold(logits.log1p(), target_active=1.5)
        >>> round(t, 4), (logits > t).sum().item()
        (3.0, 3)
    """
    check_rows("activations", activations)
    check_choice("activation", activation, get_args(Activation))
    agree(
        "calibrate_threshold",
        False,
        {"activations": activations},
        target=target_active,
        activation=activation,
    )
    rows = full(activations.detach()).flatten(0, -2)
    positive = _inverted(rows[~(rows <= 0)], activation)  # a NaN too
    if not positive.isfinite().all():
        raise ValueError(
            f"expected `activations` to be those of finite logits, got {rows.max().item():g}"
        )
    return _threshold([positive], len(rows), target_active)


def calibrate(
    model: Any,
    data: Sequence[str] | Iterable[tuple[Tensor, Tensor]],
    target_active: float,
    *,
    method: Literal["prune", "shift"] | None = None,
) -> float:
    """Make a model's vectors keep ``target_active`` dimensions each, on average.

    ``SpladeEncoder.calibrate`` explains both methods. ``"shift"`` changes the bias of a
    ``SparseEncoder``, which its folder saves; ``"prune"`` needs ``use_splade_head`` and sets a
    threshold for documents and queries that is not saved.

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
        ValueError: if fewer dimensions are active, for a method that the model does not have, or
            without a bias to shift or a config's ``decoder_bias`` to add one.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeHead, calibrate
        >>> head = SpladeHead(torch.eye(4))
        >>> hidden = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]])
        >>> calibrate(head, [(hidden, torch.ones(1, 1))], target_active=2)
        2.5
        >>> (head(hidden) > 0).tolist()
        [[True, True, False, False]]
    """
    check_choice("method", method, (None, "prune", "shift"))
    if isinstance(model, SpladeHead):
        check_choice("method", method, (None, "prune"))
        return _prune_head(model, data, target_active)
    check_texts(data)
    texts: Any = data
    if hasattr(model, "calibrate"):
        own: float = model.calibrate(texts, target_active, method=method or "prune")
        return own
    return _calibrate_sparse_encoder(model, list(texts), target_active, method or "shift")


def _prune_head(head: SpladeHead, data: Any, target_active: float) -> float:
    rows, positive = 0, []
    with torch.no_grad():
        for hidden, attention_mask in data:
            _, logits = head(hidden, attention_mask, return_logits=True)  # not pruned
            logits = full(logits)
            rows += len(logits)
            positive.append(logits[logits > 0])
    t = _threshold(positive, rows, target_active)
    if isinstance(head.threshold, Tensor):  # a buffer, which cannot become a number
        del head.threshold
    head.threshold = t
    return t


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


def _calibrate_sparse_encoder(
    model: Any, texts: list[str], target_active: float, method: str
) -> float:
    transformer, pooling = document_modules(model)
    inner = unwrapped(transformer.auto_model)
    patched = vars(pooling).get("forward")  # by `use_splade_head`; its last argument is the head
    if method == "prune" and patched is None:
        raise ValueError(
            "expected method='shift', or a model with use_splade_head, which can prune, got 'prune'"
        )
    head = SpladeHead.from_masked_lm(inner) if patched is None else patched.args[-1]
    options = {"convert_to_sparse_tensor": True, "save_to_cpu": True, "show_progress_bar": False}
    held, head.threshold = head.threshold, None
    try:
        vectors = model.encode_document(texts, **options).coalesce()
        logits = _inverted(vectors.values(), pooling.activation_function)
        if method == "shift":
            logits = _before_scale_and_cap(logits, head)
        t = _threshold([logits], len(texts), target_active)
    finally:
        head.threshold = held
    if method == "prune":
        head.threshold = t
    else:
        _reshard(model)
        with torch.no_grad():
            _bias_of(inner).sub_(t)
    return t


def calibrate_encoder(
    encoder: "SpladeEncoder",
    texts: Sequence[str],
    target_active: float,
    method: str,
    batch_size: int,
) -> float:
    """Return the threshold; with ``"shift"`` it has been subtracted from the bias."""
    logits_of = _shifted_logits if method == "shift" else _pruned_logits
    with torch.no_grad(), evaluating(encoder):
        t = _threshold(
            (
                logits_of(encoder, **encoder.tokenize([texts[i] for i in numbers]))
                for numbers in batches(texts, batch_size)
            ),
            len(texts),
            target_active,
            signed=method == "shift",
        )
    if method == "shift":
        _reshard(encoder)
        with torch.no_grad():
            _bias(encoder).sub_(t)
    return t


def _reshard(model: nn.Module) -> None:
    """Let FSDP2 drop the whole parameters of the last batch: what is changed there is lost."""
    for module in model.modules():
        if reshard := getattr(module, "reshard", None):
            reshard()


def _pruned_logits(encoder: "SpladeEncoder", **batch: Tensor) -> Tensor:
    _, logits = encoder(**batch, return_logits=True, apply_idf=False)
    return _counted(encoder, full(logits), 0.0)


def _shifted_logits(encoder: "SpladeEncoder", input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the outputs of the projection with which a dimension can become active."""
    hidden = encoder._hidden(input_ids, attention_mask)
    pooled = encoder._pooled(input_ids, attention_mask)
    if encoder.expansion:
        _, logits = encoder.head(hidden, pooled, return_logits=True)
        logits = _before_scale_and_cap(full(logits), encoder.head)
        logits = torch.where(pooled.any(1, keepdim=True), logits, -torch.inf)
    else:
        logits = encoder._token_logits(hidden, input_ids, pooled, absent=-torch.inf)
    return _counted(encoder, logits, -torch.inf)


def _counted(encoder: "SpladeEncoder", logits: Tensor, above: float) -> Tensor:
    """Return the logits above a number, of the dimensions whose idf weight is not 0."""
    is_counted = ~(logits <= above)  # a NaN too
    if encoder.idf_weights is not None:
        is_counted &= encoder.idf_weights > 0
    logits = logits[is_counted]
    if not logits.isfinite().all():
        raise ValueError("expected finite logits, got others")
    return logits


def _before_scale_and_cap(logits: Tensor, head: SpladeHead) -> Tensor:
    """Return the outputs of the vocabulary projection, which its bias is part of."""
    if head.softcap is not None:  # rounding may have taken a logit to its cap
        limit = 1.0 - torch.finfo(torch.float32).eps
        logits = head.softcap * (logits / head.softcap).clamp(-limit, limit).atanh()
    return logits / head.logit_scale


def _inverted(activations: Tensor, activation: str) -> Tensor:
    logits = activations.double().expm1()
    return logits.expm1() if activation == "log1p_relu" else logits


def _bias(encoder: "SpladeEncoder") -> Tensor:
    if not encoder.expansion:
        *_, last = encoder.importance.modules()  # it may be this one layer
        assert isinstance(last, nn.Linear)
        return last.bias
    encoder.head.bias = _bias_of(unwrapped(encoder.model))
    return encoder.head.bias


def _bias_of(model: Any) -> Tensor:
    """Return the bias of the projection; if there is none, add it to the model and its config."""
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


def _threshold(
    batches_of_logits: Iterable[Tensor], texts: int, target_active: float, *, signed: bool = False
) -> float:
    """Return a number in a gap that ``target_active`` logits a text are above.

    Equal logits are kept or dropped together, whichever is nearer the target; at least one is kept.
    If all are kept it is 0, or for ``signed`` logits a number below them.
    """
    check_number("target_active", target_active, minimum=0.0, exclusive=True)
    kept = round(target_active * texts)
    if kept == 0:
        raise ValueError(
            f"expected enough texts to keep at least one dimension, got {texts} texts and a "
            f"`target_active` of {target_active}"
        )
    # Enough logits to find the gap below the threshold even if equal texts have equal entries.
    largest, total, held = torch.empty(0, dtype=torch.float64), 0, 2 * kept + texts
    below = -math.inf  # the largest that is not held, and not equal to the last that is
    for logits in batches_of_logits:
        total += len(logits)
        seen = torch.cat([largest, logits.double().cpu()]).sort(descending=True).values
        largest, rest = seen[:held], seen[held:]
        below = max([below, *rest[rest < largest[-1:]][:1].tolist()])
    if kept > total:
        raise ValueError(
            f"expected `target_active` of at most {total / texts:.4g}, the mean that "
            f"{'can be' if signed else 'are'} active, got {target_active}"
        )
    edge = largest[kept - 1]
    more, fewer = int((largest >= edge).sum()), int((largest > edge).sum())
    kept = more if more - kept <= kept - fewer or fewer == 0 else fewer
    if kept < len(largest):
        below = largest[kept].item()
    if below > -math.inf:
        return largest[kept - 1].item() / 2 + below / 2  # the sum could overflow
    return largest[-1].item() - 1.0 if signed else 0.0
