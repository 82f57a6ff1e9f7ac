import math
import re

import pytest
import torch

from sparse_losses import (
    COSINE,
    RECOMMENDED,
    Diagnostics,
    GradientReport,
    SparsityController,
    SpladeObjective,
)
from sparse_losses.functional import advise
from sparse_losses.objective.advice import _alike  # no finding shows its value below a half

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


def symptoms(*args, **options):
    return [finding.symptom for finding in advise(*args, **options)]


def test_a_healthy_run_gets_no_advice():
    losses = [1 / (n + 1) for n in range(20)]
    gradients = _gradients(info_nce=1.0, document_flops=0.5)
    assert advise(HEALTHY, gradients, losses=losses, validation_losses=losses) == []
    assert advise(HEALTHY, losses=losses, validation_losses=[0.3] * 20) == []
    assert advise({}) == []


def test_findings_name_the_weights_of_their_side():
    (finding,) = advise({"dead_rows": 0.5}, side="query")
    assert finding.changes[0] == ("query_flops", "down")
    with pytest.raises(ValueError, match="`side`"):
        advise({}, side="anchor")


COLLAPSED = {"texts": 32.0, "active_dimensions": 4.0, "index_flops": 3.2, "input_recall": 0.02}


def test_a_collapse_without_a_dead_row_is_named():
    first, *_ = advise({**HEALTHY, **COLLAPSED})
    assert first.symptom == "texts have collapsed onto the same tokens"
    assert first.changes[0][0] == "document_flops"
    assert first.changes[-1] == ("pool_special_tokens", "to False")
    assert "share 79%" in first.evidence  # (32 * 0.8 - 1) / 31


@pytest.mark.parametrize(
    "change",
    [
        {"dense_rows": 1.0},
        {"texts": 1.0, "index_flops": 4.0},  # one text is like itself
        {"active_dimensions": 0.0, "index_flops": 0.0},
    ],
)
def test_texts_that_are_alike_have_not_always_collapsed(change):
    findings = symptoms({**HEALTHY, **COLLAPSED, **change})
    assert "texts have collapsed onto the same tokens" not in findings


def test_dead_rows_do_not_make_texts_less_alike():
    """Four live texts of one code: as many silent ones beside them change nothing."""

    def alike(live, dead):
        diagnostics = Diagnostics(40)
        diagnostics.update(torch.cat([live, torch.zeros(dead, 40)]))
        return _alike(diagnostics.report())

    live = (torch.arange(40) < 4).float().expand(4, -1)
    assert [alike(live, dead) for dead in (0, 4, 60)] == [pytest.approx(1.0)] * 3
    assert alike(torch.eye(4, 40), 4) == pytest.approx(0.0, abs=1e-12)
    assert alike(live[:1], 4) == 0.0  # there is no other


def _flops(share, cosine=0.0):
    return _gradients(cosine, info_nce=1 - share, document_flops=share)


# The table of docs/diagnostics.md: a number, where it is silent and where not, and what to change.
THRESHOLDS = """
dead_rows          0.0099  0.01    texts become empty  document_flops down
dense_rows         0.499   0.5     texts are not sparse  document_flops up
mean_activation    0.01    0.0099  activations shrink but stay active  document_flops down
stopword_top       0.3     0.301   stopwords are on top  document_flops up, stopword_penalty up
semantic_ratio     1.0     0.99    content words are suppressed  idf_alpha down
special_top        0.1     0.101   special tokens are on top  special_penalty up
foreign_share      0.05    0.051   tokens of other languages are active  document_language_pen
input_recall       0.5     0.499   a text's own tokens are missing  document_self_reconstruction up
other_side_recall  0.3     0.299   related words are not learned  document_positive_activation up
"""
THRESHOLDS = [re.split("  +", line) for line in THRESHOLDS.strip().splitlines()]
GRADIENT_THRESHOLDS = [
    ("FLOPS dominates the gradient", {}, _flops(0.899), _flops(0.901)),
    ("FLOPS dominates the gradient", {"dense_rows": 1.0}, _flops(0.989), _flops(0.991)),
    ("texts are not sparse", {"dense_rows": 1.0}, _flops(0.301), _flops(0.299)),
    ("two terms conflict", {}, _flops(0.4, -0.499), _flops(0.4, -0.501)),
    ("two terms conflict", {}, _flops(0.099, -0.8), _flops(0.101, -0.8)),
    ("two terms conflict", {}, _flops(0.901, -0.8), _flops(0.899, -0.8)),
]


@pytest.mark.parametrize(("name", "healthy", "ill", "symptom", "changes"), THRESHOLDS)
def test_a_symptom_begins_at_its_threshold_and_names_what_to_change(
    name, healthy, ill, symptom, changes
):
    assert symptom not in symptoms({**HEALTHY, name: float(healthy)})
    report = {**HEALTHY, name: float(ill)}
    finding = next(each for each in advise(report) if each.symptom == symptom)
    assert any(form.format(float(ill)) in finding.evidence for form in ("{:.0%}", "{:.2g}"))
    assert str(finding).split("): ")[1].startswith(changes)


@pytest.mark.parametrize(("symptom", "report", "healthy", "ill"), GRADIENT_THRESHOLDS)
def test_a_symptom_of_gradients_begins_at_its_threshold(symptom, report, healthy, ill):
    reported = [symptoms({**HEALTHY, **report}, each) for each in (healthy, ill)]
    assert [symptom in each for each in reported] == [False, True]


@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("swing", [0.24, 0.26])
def test_oscillation_begins_at_eight_losses_and_a_quarter_of_the_level(count, swing):
    losses = [1 + swing / 2 * (-1) ** n for n in range(count)]  # which move by `swing` at a time
    changes = [finding.changes for finding in advise(HEALTHY, losses=losses)]
    expected = [(("distillation", "up"), ("distillation.temperature", "up"))]
    assert changes == (expected if count == 8 and swing > 0.25 else [])


@pytest.mark.parametrize(("straight", "oscillates"), [(2, False), (1, True)])
def test_oscillation_turns_at_more_than_nine_steps_in_ten(straight, oscillates):
    """Of twenty places to turn, the last ones are passed without: 18 are 90%, 19 are more."""
    losses, step = [1.0], 0.5
    for place in range(21):
        losses.append(losses[-1] + step)
        if place < 20 - straight:
            step = -step
    assert bool(advise(HEALTHY, losses=losses)) == oscillates


@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("error", [1.9, 2.1])
def test_overfitting_begins_at_eight_losses_and_two_standard_errors(count, error):
    """A rise of `error` standard errors over the second half, four losses."""
    noise = [1.0, -3.0, 3.0, -1.0]  # without mean and slope; sum of squares 20
    doubt = (20 / 2 / 5) ** 0.5  # of a slope: residuals over two, over the spread of 0 to 3
    half = [10 + error * doubt * n + r for n, r in enumerate(noise)]
    validation = ([10.0] * 4 + half)[8 - count :]
    losses = [1 / (n + 1) for n in range(count)]
    findings = advise({}, losses=losses, validation_losses=validation)
    changes = [each.changes for each in findings if each.symptom == "overfitting"]
    expected = [(("document_flops", "up"), ("dropout", "up"))]
    assert changes == (expected if count == 8 and error > 2 else [])


def test_terms_with_opposed_gradients_conflict():
    (finding,) = advise(HEALTHY, _gradients(cosine=-0.8, info_nce=1.0, document_flops=0.5))
    assert finding.changes == (("info_nce", "down"),)
    assert "-0.80" in finding.evidence


def test_the_most_severe_comes_first():
    findings = symptoms({**HEALTHY, "stopword_top": 0.9, "dead_rows": 0.3})
    assert findings == ["texts become empty", "stopwords are on top"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["losses", "validation_losses"])
def test_a_loss_that_is_not_finite_is_named_at_once(name, value):
    (finding,) = advise(HEALTHY, **{name: [1.0, value]})
    assert finding.symptom == "the loss is not finite"
    assert finding.evidence.startswith("1 of 2 values of the ")


ILL = {
    "texts": 32.0,
    "dead_rows": 0.1,
    "dense_rows": 0.9,
    "active_dimensions": 120.0,
    "stopword_top": 0.9,
    "semantic_ratio": 0.5,
    "mean_activation": 0.001,
    "special_top": 0.9,
    "foreign_share": 0.9,
    "input_recall": 0.1,
    "other_side_recall": 0.1,
}


def named(objective, report=ILL, **options):
    """The settings that are named, in order."""
    findings = advise(report, objective=objective, **options)
    return list(dict.fromkeys(name for finding in findings for name, _ in finding.changes))


def test_only_settings_of_the_objective_are_named():
    objective = RECOMMENDED.without("document_flops").objective()
    assert named(objective) == [], "not one of them is in this recipe"
    assert named(objective, side="query") == ["query_flops"]
    assert advise(ILL, objective=SpladeObjective({"info_nce": 1.0})) == [
        finding._replace(changes=(("info_nce.similarity", "to 'dot', which sees scale"),))
        for finding in advise(ILL)
        if finding.symptom == "activations shrink but stay active"
    ]


def test_settings_that_are_as_advised_are_not_named():
    objective = COSINE.objective(idf=torch.ones(30), special_token_ids=[0, 1])
    names = named(objective)
    assert {"idf_alpha", "stopword_penalty", "document_self_reconstruction"} < {*names}
    assert not {"self_reconstruction.balanced", "ignore_token_ids"} & {*names}
    objective = SpladeObjective({"document_self_reconstruction": 1.0})
    names = named(objective)
    assert names == [
        "ignore_token_ids",
        "document_self_reconstruction",
        "self_reconstruction.balanced",
    ]
    losses = [1.0, 2.0] * 10
    assert named(objective, HEALTHY, losses=losses) == []
    assert named(RECOMMENDED.objective(), HEALTHY, losses=losses)[0] == "distillation"


def test_a_controller_is_told_by_its_target_and_left_to_make_texts_sparse():
    objective = RECOMMENDED.objective()
    assert "texts are not sparse" in [f.symptom for f in advise(ILL, objective=objective)]
    controller = SparsityController(objective, target_active=64)
    first, *others = advise(ILL, objective=objective)
    assert first.changes == (("the controller's target_active of document_flops", "up"),)
    assert "texts are not sparse" not in [finding.symptom for finding in others]
    assert controller.target_active == 64, "the controller lives"


def test_no_text_has_to_be_sparse_before_the_other_side_is():
    objective = RECOMMENDED.objective()
    controller = SparsityController(objective, target_active=64)
    for status, active in (("waiting", 400), ("sparsifying", 400), ("on target", 70)):
        while controller.report()["status"] != status:
            controller.observe(torch.ones(4, 400) * (torch.arange(400) < active))
            controller.step()
        found = [f.symptom for f in advise(ILL, objective=objective, side="query")]
        assert ("texts are not sparse" in found) == (status == "on target")


def test_arguments_of_another_kind_are_errors():
    with pytest.raises(TypeError, match=r"from Diagnostics.report\(\), got Diagnostics"):
        advise(Diagnostics(5))
    with pytest.raises(TypeError, match="`objective` to be a SpladeObjective, got dict"):
        advise(HEALTHY, objective={})
