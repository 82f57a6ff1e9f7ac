"""The presets, number by number, against the tables of the notes they come from."""

import dataclasses
import math

import pytest
import torch

import sparse_losses as sl
from sparse_losses.functional import idf_penalty
from sparse_losses.presets import COSINE, RECOMMENDED, V22, V23, V25, V26, V28

# "Loss weights by version" and the "V26 settings" of every section, from the notes on loss
# functions; then "Weights by phase (V26)". The phases of V28 name no info_nce: it is V26's.
TABLE = """
                             V22     V23     V25     V26
info_nce                     2.0     2.5     3.0     3.0
query_self_reconstruction    4.0     1.0     0.5     0.5
query_positive_activation    10.0    3.0     2.0     2.0
triplet_margin               2.5     0.0     0.0     0.0
query_flops                  0.005   0.003   0.002   0.010
query_min_activation         1.0     1.0     1.0     1.0
distillation                 -       1.0     2.0     2.0
temperature                  -       -       -       0.07
margin                       -       -       -       0.3
idf_alpha                    -       -       2.5     4.0
special_penalty              -       -       -       100.0
stopword_penalty             -       -       5.0     15.0
beta                         -       -       0.3     0.3
top_k                        -       -       -       5
threshold                    -       -       -       0.5
distillation_temperature     -       -       -       3.0
alpha_kl                     -       -       -       0.7
alpha_mse                    -       -       -       0.3
"""
PHASES = """
epochs   temperature   info_nce   distillation
1-8      0.08          2.5        2.5
9-17     0.05          3.0        1.5
18-25    0.04          3.0        0.8
"""


def _rows(table):
    head, *lines = (line.split() for line in table.strip().splitlines())
    return head, [(name, [None if x == "-" else float(x) for x in rest]) for name, *rest in lines]


def test_weights_and_settings_are_those_of_the_notes():
    names, rows = _rows(TABLE)
    for column, preset in enumerate((V22, V23, V25, V26)):
        assert preset.name == names[column]
        assert preset.weights.keys() <= {name for name, _ in rows[:7]}
        held = [preset.weights.get(name) for name, _ in rows[:7]]
        held += [getattr(preset, name) for name, _ in rows[7:]]
        assert held == [values[column] for _, values in rows], preset.name


@pytest.mark.parametrize("preset", [V26, V28], ids=["V26", "V28"])
def test_phases_are_those_of_the_notes(preset):
    (_, _, *names), rows = _rows(PHASES)
    for phase, (epochs, (temperature, *weights)) in zip(
        preset.curriculum.phases, rows, strict=True
    ):
        first, last = map(int, epochs.split("-"))
        expected = dict(zip(names, weights, strict=True))
        assert phase == sl.Phase(first, last, temperature=temperature, weights=expected)
    assert preset.curriculum.unit == "epoch"


def test_v28_is_v26_with_a_language_penalty_and_context_distillation():
    more = {"query_language_penalty": 0.5, "context_distillation": 1.0}
    assert V28.weights == {**V26.weights, **more}
    assert V28.language_penalty == 100.0
    assert [*V28.training.values()] == [25, 24, 3.0e-5, 4, 256, 4, 0.1]
    changed = {"name", "weights", "language_penalty", "training", "ours"}
    kept = {field.name for field in dataclasses.fields(V26)} - changed
    assert all(getattr(V28, name) == getattr(V26, name) for name in kept)
    assert "2.5, 3.0 and 3.0" in V28.ours["phases"]  # which V28's notes do not give


def _batch(size=4, vocab=30):
    def side():
        ids, mask = torch.randint(0, vocab, (size, 6)), torch.ones(size, 6, dtype=torch.int64)
        return sl.Texts(torch.rand(size, vocab, requires_grad=True), ids, mask)

    scores = torch.randn(size, size)
    return sl.SpladeBatch(side(), side(), teacher_scores=scores, teacher_anchor_scores=scores)


@pytest.mark.parametrize("preset", [RECOMMENDED, COSINE], ids=lambda preset: preset.name)
def test_an_objective_has_the_presets_numbers(preset):
    objective = preset.objective(idf=torch.rand(30) * 5, special_token_ids=[0, 1])
    assert objective.weights == preset.weights
    for loss, names in (
        (objective.info_nce, ("temperature", "similarity", "symmetric")),
        (objective.distillation, ("alpha_kl", "alpha_mse")),
        (objective.self_reconstruction, ("balanced",)),
        (objective, ("teacher_scale",)),
    ):
        assert [getattr(loss, name) for name in names] == [getattr(preset, name) for name in names]
    assert list(objective.self_reconstruction.ignore_token_ids) == [0, 1]
    assert objective.score_scale == (preset.score_scale or 1.0)
    assert type(objective.flops) is (sl.IdfFlopsLoss if preset is COSINE else sl.FlopsLoss)
    assert set(objective(_batch()).terms) == set(preset.weights)
    assert preset.objective(idf=torch.rand(30), score_scale=3.0).score_scale == 3.0


def test_v28_trains():
    idf = torch.rand(30) * 5
    ids = {"special_token_ids": [0, 1], "stopword_ids": [2]}
    objective = V28.objective(idf=idf, **ids, allowed_token_ids=range(20))
    expected = idf_penalty(idf, alpha=4.0, special_penalty=100.0, stopword_penalty=15.0, **ids)
    assert torch.equal(objective.flops.token_penalty, expected)
    assert objective.language_penalty.token_penalty.tolist() == [0.0] * 20 + [100.0] * 10
    assert objective.distillation.temperature == 3.0
    (schedule,) = V28.schedules(objective, steps_per_epoch=1)
    total, terms = objective(_batch())
    assert set(terms) == {name for name, weight in V28.weights.items() if weight}
    assert total.isfinite()
    assert objective.info_nce.temperature == 0.08
    for _ in range(8):
        schedule.step()
    assert objective.info_nce.temperature == 0.05
    assert [objective.weights[name] for name in ("info_nce", "distillation")] == [3.0, 1.5]


def test_v25_treats_special_tokens_as_any_other_and_stopwords_may_be_hidden():
    idf = torch.linspace(0, 5, 30)
    kept = {name: getattr(V26, name) for name in V25.missing()}
    options = {"idf": idf, "special_token_ids": [0], "stopword_ids": [3]}
    penalty = V25.replace(**kept).objective(**options).flops.token_penalty
    assert torch.equal(penalty, idf_penalty(idf, alpha=2.5, stopword_ids=[3], stopword_penalty=5.0))
    for hidden in (False, True):
        objective = V26.objective(**options, hide_stopwords=hidden)
        assert objective.stopword_ids.tolist() == [3] * hidden


def test_numbers_that_the_notes_lack_must_be_set():
    assert V22.missing() == ["temperature", "margin", "top_k", "threshold"]
    assert V26.missing() == V28.missing() == RECOMMENDED.missing() == COSINE.missing() == []
    with pytest.raises(ValueError, match=r"V22, got None for temp.*V22.replace\(temperature="):
        V22.objective()
    with pytest.raises(ValueError, match="V26 weighs FLOPS by token and needs `idf`"):
        V26.objective()
    with pytest.raises(ValueError, match="`allowed_token_ids`"):
        V28.objective(idf=torch.rand(30))
    ready = V22.replace(temperature=0.05, margin=0.3, top_k=5, threshold=0.5)
    assert type(ready.objective().flops) is sl.FlopsLoss
    assert V22.temperature is None, "a preset is not changed"
    with pytest.raises(dataclasses.FrozenInstanceError):
        V22.temperature = 1.0


def test_losses_that_are_passed_need_no_numbers():
    losses = {
        "info_nce": sl.InfoNCELoss(temperature=0.05),
        "triplet_margin": sl.TripletMarginLoss(margin=0.2),
        "min_activation": sl.MinActivationLoss(top_k=2, threshold=0.4),
    }
    objective = V22.objective(**losses)
    assert all(getattr(objective, name) is loss for name, loss in losses.items())
    assert type(V26.replace(beta=None).objective(flops=sl.FlopsLoss()).flops) is sl.FlopsLoss
    with pytest.raises(ValueError, match="got None for temperature, margin: set"):
        V22.objective(info_nce=None, min_activation=losses["min_activation"])
    theirs = V26.replace(weights={"document_language_penalty": 0.005})
    assert theirs.missing() == ["language_penalty"]
    loss = sl.LanguagePenaltyLoss(torch.tensor([0.0, 100.0]))
    assert theirs.objective(idf=torch.rand(2), language_penalty=loss).language_penalty is loss


def test_warm_ups_and_targets_become_schedules():
    preset = RECOMMENDED.replace(warmup={"query_flops": 0.25}, target_active={})
    objective = preset.objective()
    (schedule,) = preset.schedules(objective, steps=40)
    assert schedule.warmups == {"query_flops": sl.Warmup(10, "quadratic")}
    assert objective.weights["query_flops"] == 0.0
    assert objective.weights["document_flops"] == RECOMMENDED.weights["document_flops"]

    targets = {"document_flops": 12, "query_flops": 6}
    preset = RECOMMENDED.replace(target_active=targets)
    schedule, *controllers = preset.schedules(preset.objective(), steps=40)
    assert schedule.warmups == {}, "a term with a target does not warm up"
    assert {c.term: c.target_active for c in controllers} == targets
    assert [c.steps for c in controllers] == [40, 40]


def test_schedules_need_their_numbers_of_steps():
    with pytest.raises(TypeError, match="expected `steps` to be an integer, got NoneType"):
        RECOMMENDED.schedules(RECOMMENDED.objective())
    with pytest.raises(ValueError, match="`steps_per_epoch`"):
        V26.schedules(V26.objective(idf=torch.rand(30)))
    with pytest.raises(ValueError, match="expected `steps` to be an integer"):
        RECOMMENDED.schedules(RECOMMENDED.objective(), steps=0)
    alone = RECOMMENDED.without("query_flops", "document_flops")
    assert alone.schedules(alone.objective())[0].warmups == {}


def test_schedules_that_fail_leave_the_objective_as_it_was():
    objective = RECOMMENDED.objective()
    objective.weights["query_flops"] = 0.0
    before = dict(objective.weights)
    with pytest.raises(ValueError, match="query_flops"):
        RECOMMENDED.schedules(objective, steps=40)
    assert (objective.weights, objective.scheduled) == (before, set())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"warmup": {"flops": 0.5}}, ValueError, "`warmups` .*'flops'"),
        ({"warmup": {"query_flops": 2}}, ValueError, r"shares in \(0, 1\], got {'query_flops': 2}"),
        ({"target_active": {"document_flops": -3}}, ValueError, "`target_active` .* > 0, got -3"),
        ({"target_active": {"info_nce": 3}}, ValueError, "`term` .*'info_nce'"),
        ({"target_active": 64}, TypeError, "expected `target_active` as a dict by name, got 64"),
        ({"weights": {"foo": 1.0}}, ValueError, "`weights` to be one of .*, got 'foo'"),
        ({"weights": {"info_nce": math.nan}}, ValueError, r"weights\['info_nce'\]` to be a finite"),
    ],
)
def test_wrong_numbers_are_errors(changes, error, message):
    def run():
        preset = RECOMMENDED.replace(**changes)
        preset.schedules(preset.objective(), steps=9)

    with pytest.raises(error, match=message):
        run()


@pytest.mark.parametrize(
    "preset",
    [
        V28.without("distillation", "context_distillation"),
        V28.replace(weights={"distillation": 0.0, "context_distillation": 0.0}),
    ],
    ids=["without", "replace"],
)
def test_a_removed_term_is_off_in_every_phase(preset):
    left = {name for name, weight in V28.weights.items() if weight and "distil" not in name}
    for curriculum in (preset.curriculum, V26.curriculum):
        objective = preset.objective(idf=torch.rand(30), allowed_token_ids=range(20))
        schedule = sl.TrainingSchedule(objective, curriculum, steps_per_epoch=1)
        for epoch in range(1, 27):
            assert {name for name, weight in objective.weights.items() if weight} == left
            assert objective.weights["info_nce"] == (2.5 if epoch <= 8 else 3.0)
            schedule.step()


def test_without_changes_nothing_else():
    alone = V28.without("distillation")
    assert alone.replace(weights={"distillation": 2.0}, curriculum=V28.curriculum) == V28
    assert [p.temperature for p in alone.curriculum.phases] == [0.08, 0.05, 0.04]
    assert V22.without("triplet_margin").missing() == ["temperature", "top_k", "threshold"]
    with pytest.raises(ValueError, match=r"`terms` .*'distillation'.* got 'teacher'"):
        V26.without("teacher")


def test_a_term_that_the_objective_lacks_gets_no_controller():
    objective = RECOMMENDED.without("document_flops").objective()
    assert len(RECOMMENDED.schedules(objective, steps=10)) == 1
    assert "document_flops" not in objective.weights
