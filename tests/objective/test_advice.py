import math
import random

import pytest

from sparse_losses import Diagnostics, GradientReport
from sparse_losses.functional import advise

HEALTHY = {
    "dead_rows": 0.0,
    "dense_rows": 0.0,
    "active_dimensions": 120.0,
    "stopword_top": 0.05,
    "semantic_ratio": 2.0,
    "mean_activation": 0.8,
    "special_top": 0.0,
    "foreign_share": 0.01,
    "input_recall": 0.9,
    "other_side_recall": 0.6,
}


def _gradients(cosine=0.0, **norms):
    names = list(norms)
    return GradientReport(norms, {(a, b): cosine for i, b in enumerate(names) for a in names[:i]})


def test_a_healthy_run_gets_no_advice():
    losses = [1 / (n + 1) for n in range(20)]
    gradients = _gradients(info_nce=1.0, document_flops=0.5)
    assert advise(HEALTHY, gradients, losses=losses, validation_losses=losses) == []
    assert advise({}) == []


# The table of the notes: problem, symptom, what to turn and which way; below it ours.
@pytest.mark.parametrize(
    ("symptom", "changes"),
    [
        ({"stopword_top": 0.6}, [("document_flops", "up"), ("stopword_penalty", "up")]),
        ({"semantic_ratio": 0.5}, [("idf_alpha", "down"), ("document_min_activation", "up")]),
        ({"input_recall": 0.2}, [("document_self_reconstruction", "up")]),
        ({"other_side_recall": 0.1}, [("document_positive_activation", "up")]),
        ({"special_top": 0.4}, [("special_penalty", "up")]),
        ({"foreign_share": 0.91}, [("document_language_penalty", "up")]),
        ({"dead_rows": 0.2}, [("document_flops", "down"), ("document_min_activation", "up")]),
        ({"mean_activation": 0.004}, [("document_min_activation", "up")]),
        ({"dense_rows": 0.9}, [("document_flops", "up"), ("info_nce.temperature", "up")]),
    ],
)
def test_a_symptom_names_the_setting_its_direction_and_the_evidence(symptom, changes):
    (finding,) = advise({**HEALTHY, **symptom})
    assert [change for change in finding.changes if change in changes] == changes
    number = next(iter(symptom.values()))
    shown = [form.format(number) for form in ("{:.0%}", "{:.2f}", "{:.2g}")]
    assert any(number in finding.evidence for number in shown)


def test_the_other_side():
    (finding,) = advise({"dead_rows": 0.5}, side="query")
    assert finding.changes[0] == ("query_flops", "down")
    with pytest.raises(ValueError, match="`side`"):
        advise({}, side="anchor")


def test_collapse_is_foreseen_in_the_gradients():
    gradients = _gradients(info_nce=0.1, query_flops=15.0, document_flops=15.0)
    (finding,) = advise(HEALTHY, gradients)
    assert finding.changes[0] == ("document_flops", "down")
    assert "100% of the gradient" in finding.evidence


def test_a_dense_run_under_strong_pressure_is_not_told_to_press_harder():
    gradients = _gradients(info_nce=0.1, document_flops=30.0)
    findings = advise({**HEALTHY, "dense_rows": 1.0}, gradients)
    assert ("document_flops", "up") not in [c for f in findings for c in f.changes]


def test_what_rules_a_dense_text_is_not_yet_a_collapse():
    """With every dimension active FLOPS is loud, and grows quiet as they go out."""
    dense = {**HEALTHY, "dense_rows": 1.0, "active_dimensions": 8000.0}
    loud, too_loud = (_gradients(info_nce=1.0, document_flops=norm) for norm in (12.0, 120.0))
    assert advise(dense, loud) == []
    assert advise(HEALTHY, loud)[0].changes[0] == ("document_flops", "down")
    assert advise(dense, too_loud)[0].changes[0] == ("document_flops", "down")


COLLAPSED = {"texts": 32.0, "active_dimensions": 4.0, "index_flops": 3.2, "input_recall": 0.02}


def test_a_collapse_without_a_dead_row_is_named():
    first, *_ = advise({**HEALTHY, **COLLAPSED})
    assert first.symptom == "texts have collapsed onto the same tokens"
    assert first.changes[0] == ("document_flops", "down")
    assert "share 79%" in first.evidence  # (32 * 0.8 - 1) / 31


@pytest.mark.parametrize(
    "change",
    [
        {"input_recall": 0.9},  # what they share they may well have in common
        {"index_flops": 1.0},
        {"dense_rows": 1.0},
        {"texts": 1.0, "index_flops": 4.0},  # one text is like itself
        {"active_dimensions": 0.0, "index_flops": 0.0},
    ],
)
def test_texts_that_are_alike_have_not_always_collapsed(change):
    found = advise({**HEALTHY, **COLLAPSED, **change})
    assert "texts have collapsed onto the same tokens" not in [one.symptom for one in found]


def test_two_that_fight():
    (finding,) = advise(HEALTHY, _gradients(cosine=-0.8, info_nce=1.0, document_flops=0.5))
    assert finding.changes == (("info_nce", "down"),)
    assert "-0.80" in finding.evidence
    assert advise(HEALTHY, _gradients(cosine=-0.8, info_nce=1.0, document_flops=0.01)) == []


def test_an_unstable_loss():
    losses = [1.0 + (-1) ** n * 0.5 for n in range(12)]
    (finding,) = advise(HEALTHY, losses=losses)
    assert finding.changes == (("distillation", "up"), ("distillation.temperature", "up"))
    assert advise(HEALTHY, losses=losses[:4]) == []


def test_noise_is_neither_oscillation_nor_overfitting():
    rng = random.Random(0)
    said = []
    for _ in range(200):
        losses = [max(rng.gauss(1.0, 0.4), 0.05) for _ in range(20)]
        validation = [rng.gauss(1.0, 0.1) for _ in range(20)]
        said += advise(HEALTHY, losses=losses, validation_losses=validation)
    symptoms = [finding.symptom for finding in said]
    assert symptoms.count("the loss oscillates") < 10
    assert symptoms.count("overfitting") < 10


def test_overfitting():
    losses = [math.exp(-n / 5) for n in range(20)]
    validation = [1 + (n - 8) ** 2 / 100 for n in range(20)]
    (finding,) = advise(HEALTHY, losses=losses, validation_losses=validation)
    assert finding.changes == (("document_flops", "up"), ("dropout", "up"))


def test_the_gravest_comes_first():
    findings = advise({**HEALTHY, "stopword_top": 0.9, "dead_rows": 0.3})
    assert [finding.symptom for finding in findings] == [
        "texts fall silent",
        "stopwords are on top",
    ]
    assert "document_flops down" in str(findings[0])


def test_a_report_is_asked_for():
    with pytest.raises(TypeError, match=r"as Diagnostics.report\(\) gives it, got Diagnostics"):
        advise(Diagnostics(5))
