"""The terms of an objective: their names, their losses, and what each needs of a batch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_choice, check_number, check_shapes
from sparse_losses._core.loss import LossModule
from sparse_losses.objective.batch import SIDES, SpladeBatch, Texts

# Every term, and the parts of the batch that it requires.
NEEDS: dict[str, tuple[str, ...]] = {
    "info_nce": (),
    "triplet_margin": ("negative",),
    "distillation": ("teacher_scores",),
    "margin_mse": ("negative", "teacher_scores"),
    "ranknet": ("teacher_scores",),
    "context_distillation": ("teacher_anchor_scores",),
    "query_flops": (),
    "document_flops": (),
    "query_min_activation": (),
    "document_min_activation": (),
    "query_language_penalty": (),
    "document_language_penalty": (),
    "query_self_reconstruction": ("anchor.input_ids", "anchor.attention_mask"),
    "document_self_reconstruction": (
        "positive.input_ids",
        "positive.attention_mask",
        "negative.input_ids",  # if there are negatives
        "negative.attention_mask",
    ),
    "query_positive_activation": ("positive.input_ids", "positive.attention_mask"),
    "document_positive_activation": ("anchor.input_ids", "anchor.attention_mask"),
}

# Where what is missing can come from, for the message of an error.
SOURCES = {
    "teacher_scores": ": BM25Teacher computes them; or leave the term out",
    "teacher_anchor_scores": (
        ": SpladeBatch.from_columns(score_anchors=True) computes them; or leave the term out"
    ),
}


def check_weights(weights: Mapping[str, float | Tensor]) -> None:
    """Raise for a name that is no term, or a weight that is no number."""
    for name, weight in weights.items():
        check_choice("weights", name, list(NEEDS))
        if not isinstance(weight, Tensor):
            check_number(f"weights[{name!r}]", weight)
        elif weight.ndim:
            raise ValueError(
                f"expected weights[{name!r}] to be a number or a 0-d tensor, got one of shape "
                f"{list(weight.shape)}"
            )


def check_loss(name: str, loss: object, classes: Sequence[type[nn.Module]]) -> None:
    """Raise for a loss of another class, or one that returns rows; a user's modules may pass."""
    classes = tuple(classes)
    is_another = isinstance(loss, LossModule) and not isinstance(loss, classes)
    if loss is not None and (is_another or not isinstance(loss, nn.Module)):
        expected = " or ".join(each.__name__ for each in classes)
        received = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
        raise TypeError(f"expected `{name}` to be an instance of {expected}, got {received}")
    if getattr(loss, "reduction", "mean") == "none":
        raise ValueError(f"expected `{name}` to reduce to one number, got reduction='none'")


def check_texts(batch: object) -> None:
    """Raise unless the objective received one ``SpladeBatch`` of ``Texts``."""
    expected = "SpladeBatch(Texts(activations, ...), Texts(activations, ...))"
    if not isinstance(batch, SpladeBatch):
        received = type(batch).__name__
        raise TypeError(f"expected `batch` to be a SpladeBatch, {expected}, got {received}")
    for side in SIDES:
        texts = getattr(batch, side)
        if not isinstance(texts, Texts) and not (side == "negative" and texts is None):
            raise TypeError(
                f"expected `batch.{side}` to be Texts, {expected}, got {type(texts).__name__}"
            )


def check_batch(batch: SpladeBatch) -> None:
    """Raise unless the tensors of a batch belong together."""
    ids, teachers = batch.positive_ids, ("teacher_scores", "teacher_anchor_scores")
    check_choice("batch.teacher_candidates", batch.teacher_candidates, ("own", "batch", None))
    if isinstance(ids, Tensor) and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise TypeError(f"expected `positive_ids` to be integers, got {ids.dtype}")
    shapes: dict[str, tuple[Tensor | None, str]] = {
        "anchor.activations": (batch.anchor.activations, "B V"),
        "positive.activations": (batch.positive.activations, "B V"),
        "positive_ids": (ids, "B, optional"),
        "teacher_scores": (batch.teacher_scores, "B C, optional"),
        "teacher_anchor_scores": (batch.teacher_anchor_scores, "B A, optional"),
        "candidate_mask": (batch.candidate_mask, "B K, optional"),
    }
    if batch.negative is not None:
        shapes["negative.activations"] = (batch.negative.activations, "N V or B N V")
    check_shapes(**shapes)
    for name in teachers:
        scores = getattr(batch, name)
        if scores is not None and scores.dtype == torch.bool:
            raise TypeError(f"expected `{name}` to be numbers, got {scores.dtype}")
    for side in SIDES:
        texts = getattr(batch, side)
        if texts is not None:
            rows = "B N" if texts.activations.ndim == 3 else "B"
            shapes = {f"{side}.activations": (texts.activations, f"{rows} V")}
            shapes[f"{side}.logits"] = (texts.logits, f"{rows} V, optional")
            for name in ("input_ids", "attention_mask"):
                shapes[f"{side}.{name}"] = (getattr(texts, name), f"{rows} S, optional")
            check_shapes(**shapes)


def check_needs(
    active: Sequence[str], weights: Mapping[str, float | Tensor], batch: SpladeBatch
) -> None:
    """Raise for an active term that lacks an input; the error names its weight."""
    for term in active:
        for path in NEEDS[term]:
            if path.startswith("negative.") and batch.negative is None:
                continue
            part: object = batch
            for name in path.split("."):
                part = getattr(part, name)
            if part is None:
                raise ValueError(
                    f"the term {term!r} (weight {weights[term]}) needs `batch.{path}`, "
                    f"got None{SOURCES.get(path, '')}"
                )
    if (negative := batch.negative) is None:
        return
    # A field that only one of them has would be left out for both, and change the value.
    for term in ("document_min_activation", "document_self_reconstruction"):
        for name in ("attention_mask", "logits", "input_ids") if term in active else ():
            if (getattr(batch.positive, name) is None) != (getattr(negative, name) is None):
                raise ValueError(
                    f"the term {term!r} needs `{name}` of positives and negatives, or of neither"
                )
    for term in ("triplet_margin", "margin_mse"):
        shape, size = negative.activations.shape, len(batch.anchor.activations)
        if term in active and len(shape) == 2 and shape[0] != size:
            raise ValueError(
                f"the term {term!r} needs each anchor's own negatives, [B, N, V] or one "
                f"each [B, V], with B = {size}, got {list(shape)}"
            )
