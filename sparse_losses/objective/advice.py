"""Rules that turn the symptoms of a training run into the settings to change."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from sparse_losses._core.checks import check_choice
from sparse_losses.losses.idf_flops import IdfFlopsLoss
from sparse_losses.objective.gradient_report import GradientReport
from sparse_losses.objective.objective import SpladeObjective
from sparse_losses.objective.schedules import controllers_of
from sparse_losses.objective.terms import NEEDS

# The thresholds beyond which a number is a symptom. All are our choice, except the share of foreign
# tokens (the notes on V28 set it as their goal).
DEAD_ROWS = 0.01
DENSE_ROWS = 0.5
SMALL_ACTIVATION = 0.01
INPUT_RECALL = 0.5
DOMINANT_SHARE, STRONG_SHARE = 0.9, 0.3
# FLOPS' gradient falls with the root of the active dimensions: tenfold or more on the way from the
# whole vocabulary to a hundredth of it. A ratio of 9 to 1 then is 90 to 1 on dense texts now.
DOMINANT_DENSE_SHARE = 0.99
ALIKE = 0.5  # the share of active dimensions that two texts have in common
CONFLICT_COSINE, CONFLICT_SHARE = -0.5, 0.1
OSCILLATION, TURNS = 0.25, 0.9
FEWEST_LOSSES = 8
CONTROLLED = ("texts are not sparse", "FLOPS dominates the gradient")
# Rules on one number each: its name, the threshold and the side of it that is a symptom; the
# symptom, the evidence, and what to change.
TOKEN_RULES = [
    (
        ("stopword_top", ">", 0.3),
        ("stopwords are on top", "{:.0%} of the largest activations"),
        (("{side}_flops", "up"), ("stopword_penalty", "up")),
    ),
    (
        ("semantic_ratio", "<", 1.0),
        ("content words are suppressed", "their mean activation is {:.2f} of the stopwords'"),
        (("idf_alpha", "down"), ("{side}_min_activation", "up")),
    ),
    (
        ("special_top", ">", 0.1),
        ("special tokens are on top", "{:.0%} of the largest activations"),
        (("special_penalty", "up"), ("ignore_token_ids", "set to the special tokens")),
    ),
    (
        ("foreign_share", ">", 0.05),
        ("tokens of other languages are active", "{:.0%} of the active entries"),
        (("{side}_language_penalty", "up"),),
    ),
    (
        ("input_recall", "<", INPUT_RECALL),
        ("a text's own tokens are missing", "{:.0%} of them are active"),
        (("{side}_self_reconstruction", "up"), ("self_reconstruction.balanced", "to True")),
    ),
    (
        ("other_side_recall", "<", 0.3),
        ("related words are not learned", "{:.0%} of the other side's tokens are active"),
        (("{side}_positive_activation", "up"),),
    ),
]


class Finding(NamedTuple):
    """A problem of a training run, the evidence for it, and the settings to change.

    Attributes:
        symptom: what is wrong.
        evidence: the numbers that show it.
        changes: pairs of a setting and a direction, the most useful first.

    Examples:
        >>> from sparse_losses import Finding
        >>> print(Finding("texts are not sparse", "9 of 9", (("document_flops", "up"),)))
        texts are not sparse (9 of 9): document_flops up
    """

    symptom: str
    evidence: str
    changes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return the finding as one line."""
        changes = ", ".join(f"{setting} {direction}" for setting, direction in self.changes)
        return f"{self.symptom} ({self.evidence}): {changes}"


def advise(
    report: Mapping[str, float],
    gradients: GradientReport | None = None,
    *,
    objective: SpladeObjective | None = None,
    side: str = "document",
    losses: Sequence[float] = (),
    validation_losses: Sequence[float] = (),
) -> list[Finding]:
    """Return what is wrong with a run and what to change, the most serious finding first.

    With the ``objective``, only settings of the run are named, and findings that none of them can
    change are left out. A weight that a ``SparsityController`` sets is changed by its
    ``target_active``; making dense texts sparse is left to it.

    Args:
        report: what ``Diagnostics.report()`` returned; rules are skipped where a number is missing.
        gradients: what ``gradient_report`` returned; it shows which term causes a problem.
        objective: the objective of the run; ``None``: all settings are named.
        side: whose activations the report describes, ``"query"`` or ``"document"``.
        losses: totals of recent steps or epochs, in order; at least eight, except to find a NaN.
        validation_losses: validation losses of recent steps or epochs; at least eight, too.

    Examples:
        >>> from sparse_losses import advise
        >>> for finding in advise({"dead_rows": 0.25, "active_dimensions": 3.0}):
        ...     print(finding)
        texts become empty (25% of the rows are dead): document_flops down, its warm-up longer, \
document_min_activation up
    """
    if not isinstance(report, Mapping):
        raise TypeError(f"expected `report` from Diagnostics.report(), got {type(report).__name__}")
    check_choice("side", side, ("query", "document"))
    if objective is not None and not isinstance(objective, SpladeObjective):
        kind = type(objective).__name__
        raise TypeError(f"expected `objective` to be a SpladeObjective, got {kind}")
    findings = [
        *_sparsity_findings(report, gradients, side),
        *_size_findings(report, side),
        *_token_findings(report, side),
        *_gradient_findings(gradients),
        *_loss_findings(losses, validation_losses, side),
    ]
    return findings if objective is None else list(_that_apply(findings, objective, side))


def _that_apply(
    findings: Sequence[Finding], objective: SpladeObjective, side: str
) -> Iterator[Finding]:
    """Yield the findings with changes of settings that the objective has."""
    controllers = controllers_of(objective)
    # While a controller brings down the other side's texts, these are on their way, too.
    statuses = [controller.report()["status"] for controller in controllers.values()]
    is_early = any(status.startswith(("waiting", "sparsifying")) for status in statuses)
    for finding in findings:
        if (is_early or f"{side}_flops" in controllers) and finding.symptom in CONTROLLED:
            continue
        changes = []
        for setting, direction in finding.changes:
            if setting in controllers:
                opposite = {"up": "down", "down": "up"}[direction]
                changes.append((f"the controller's target_active of {setting}", opposite))
            elif _is_setting(setting, objective, side):
                changes.append((setting, direction))
        if changes:
            yield finding._replace(changes=tuple(changes))


def _is_setting(setting: str, objective: SpladeObjective, side: str) -> bool:
    """Whether the objective has a setting, and not yet as advised; others are the trainer's."""
    weights, own = objective.weights, objective.self_reconstruction

    def is_on(term: str) -> bool:
        weight = weights.get(term, 0.0)
        return isinstance(weight, Tensor) or weight != 0 or term in objective.scheduled

    on_tokens = {"self_reconstruction": own, "positive_activation": objective.positive_activation}
    used = [name for name in on_tokens if is_on(f"query_{name}") or is_on(f"document_{name}")]
    if setting in ("idf_alpha", "stopword_penalty", "special_penalty"):
        return isinstance(objective.flops, IdfFlopsLoss) and is_on(f"{side}_flops")
    if setting == "ignore_token_ids":
        ignored = [getattr(on_tokens[name], setting, None) for name in used]
        return any(ids is None or len(ids) == 0 for ids in ignored)
    if setting == "self_reconstruction.balanced":
        return "self_reconstruction" in used and not getattr(own, "balanced", True)
    if setting == "its warm-up":
        return f"{side}_flops" in objective.scheduled
    if setting == "info_nce.similarity":
        return is_on("info_nce") and objective.info_nce.similarity == "cosine"
    if setting.startswith("distillation"):
        return is_on("distillation")
    return is_on(setting) if setting in NEEDS else True


def _sparsity_findings(
    report: Mapping[str, float], gradients: GradientReport | None, side: str
) -> Iterator[Finding]:
    flops = f"{side}_flops"
    # The FLOPS terms of both sides act on the same network.
    pull = None
    if gradients is not None:
        pull = sum(v for name, v in _shares(gradients).items() if name.endswith("_flops"))
    evidence = "" if pull is None else f"; FLOPS is {pull:.0%} of the gradient"
    dead = report.get("dead_rows", 0.0)
    is_dense = report.get("dense_rows", 0.0) >= DENSE_ROWS
    is_dominant = pull is not None and pull > (DOMINANT_DENSE_SHARE if is_dense else DOMINANT_SHARE)
    active, alike = report.get("active_dimensions", 0.0), _alike(report)
    less = ((flops, "down"), ("its warm-up", "longer"), (f"{side}_min_activation", "up"))
    if dead >= DEAD_ROWS:
        yield Finding("texts become empty", f"{dead:.0%} of the rows are dead{evidence}", less)
    elif is_dominant:
        left = f", {active:.0f} dimensions are active" if active else ""
        evidence = f"FLOPS is {pull:.0%} of the gradient{left}"
        yield Finding("FLOPS dominates the gradient", evidence, less)
    elif not is_dense and alike > ALIKE and report.get("input_recall", 1.0) < INPUT_RECALL:
        yield Finding(
            "texts have collapsed onto the same tokens",
            f"of {active:.0f} active dimensions two texts share {alike:.0%}, and "
            f"{report['input_recall']:.0%} of a text's own tokens are active{evidence}",
            (*less, ("pool_special_tokens", "to False")),
        )
    # Dense texts are no problem while FLOPS has a large share of the gradient: they get sparser.
    if is_dense and not (pull or 0.0) > STRONG_SHARE:
        yield Finding(
            "texts are not sparse",
            f"{report['dense_rows']:.0%} of the rows activate more than a quarter of the "
            f"vocabulary{evidence}",
            ((flops, "up"),),
        )


def _alike(report: Mapping[str, float]) -> float:
    """Return the share of a live text's active dimensions that another live text also has."""
    texts, active = report.get("texts", 0.0), report.get("active_dimensions", 0.0)
    live = round(texts * (1 - report.get("dead_rows", 0.0)))
    if live < 2 or not active:
        return 0.0
    # `index_flops` averages over all pairs of texts, each with itself too; dead texts add nothing.
    with_itself = (texts / live) ** 2 * report.get("index_flops", 0.0) / active
    return (live * with_itself - 1) / (live - 1)


def _size_findings(report: Mapping[str, float], side: str) -> Iterator[Finding]:
    value = report.get("mean_activation", SMALL_ACTIVATION)
    if value < SMALL_ACTIVATION and report.get("dead_rows", 0.0) < 1:
        less = ((f"{side}_flops", "down"), (f"{side}_min_activation", "up"))
        changes = (*less, ("info_nce.similarity", "to 'dot', which sees scale"))
        yield Finding("activations shrink but stay active", f"their mean is {value:.2g}", changes)


def _token_findings(report: Mapping[str, float], side: str) -> Iterator[Finding]:
    for (name, sign, threshold), (symptom, evidence), changes in TOKEN_RULES:
        value = report.get(name, threshold)
        if value > threshold if sign == ">" else value < threshold:
            settings = tuple((setting.format(side=side), to) for setting, to in changes)
            yield Finding(symptom, evidence.format(value), settings)


def _gradient_findings(gradients: GradientReport | None) -> Iterator[Finding]:
    if gradients is None:
        return
    shares = _shares(gradients)
    for (a, b), cosine in gradients.cosines.items():
        weaker, stronger = sorted((a, b), key=lambda name: shares[name])
        if cosine < CONFLICT_COSINE and shares[weaker] > CONFLICT_SHARE:
            yield Finding(
                "two terms conflict",
                f"{a} and {b} have a cosine of {cosine:.2f}; they are {shares[a]:.0%} and "
                f"{shares[b]:.0%} of the gradient",
                ((stronger, "down"),),
            )


def _loss_findings(
    losses: Sequence[float], validation_losses: Sequence[float], side: str
) -> Iterator[Finding]:
    for name, values in (("loss", losses), ("validation loss", validation_losses)):
        if lost := sum(not math.isfinite(value) for value in values):
            evidence = f"{lost} of {len(values)} values of the {name}"
            changes = (("learning rate", "down"), ("loss scale of fp16", "down"))
            yield Finding("the loss is not finite", evidence, changes)
            return
    if len(losses) >= FEWEST_LOSSES:
        steps = [after - before for before, after in itertools.pairwise(losses)]
        turns = sum(a * b < 0 for a, b in itertools.pairwise(steps))
        swing = sum(map(abs, steps)) / len(steps)
        level = sum(map(abs, losses)) / len(losses)
        # Independent losses change direction at two steps in three; an oscillation at nearly all.
        if turns > TURNS * (len(steps) - 1) and swing > OSCILLATION * level:
            evidence = f"{turns} turns in {len(losses)} values, by {swing / level:.0%} at a time"
            changes = (("distillation", "up"), ("distillation.temperature", "up"))
            yield Finding("the loss oscillates", evidence, changes)
    if len(validation_losses) >= FEWEST_LOSSES and len(losses) >= FEWEST_LOSSES:
        (rise, doubt), (fall, _) = _slope(validation_losses), _slope(losses)
        if rise > 2 * doubt and fall < 0:
            evidence = f"validation rises by {rise:.3g} a step, the loss falls by {-fall:.3g}"
            yield Finding("overfitting", evidence, ((f"{side}_flops", "up"), ("dropout", "up")))


def _shares(gradients: GradientReport) -> dict[str, float]:
    total = sum(gradients.norms.values()) or 1.0
    return {name: norm / total for name, norm in gradients.norms.items()}


def _slope(values: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares slope of the second half and its standard error."""
    half = np.array(values[len(values) // 2 :])
    half -= half[0]  # constant values then have a slope of exactly 0
    (slope, _), covariance = np.polyfit(range(len(half)), half, deg=1, cov=True)
    return float(slope), math.sqrt(covariance[0, 0])
