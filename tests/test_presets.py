"""The presets, number by number, against the tables of the notes they come from."""

import dataclasses
import math

import pytest
import torch

from sparse_losses import (
    COSINE,
    RECOMMENDED,
    V22,
    V23,
    V25,
    V26,
    V28,
    Curriculum,
    FlopsLoss,
    IdfFlopsLoss,
    InfoNCELoss,
    LanguagePenaltyLoss,
    MinActivationLoss,
    Phase,
    Preset,
    SpladeBatch,
    Texts,
    TrainingSchedule,
    TripletMarginLoss,
    Warmup,
)
from sparse_losses.functional import idf_penalty

PRESETS = (V22, V23, V25, V26)

# "Loss weights by version", from the notes on loss functions.
WEIGHTS = """
                             V22     V23     V25     V26
info_nce                     2.0     2.5     3.0     3.0
query_self_reconstruction    4.0     1.0     0.5     0.5
query_positive_activation    10.0    3.0     2.0     2.0
triplet_margin               2.5     0.0     0.0     0.0
query_flops                  0.005   0.003   0.002   0.010
query_min_activation         1.0     1.0     1.0     1.0
distillation                 -       1.0     2.0     2.0
"""

# "V26 settings" of every section, and the column of V25 where there is one.
SETTINGS = """
                             V25     V26
temperature                  -       0.07
margin                       -       0.3
idf_alpha                    2.5     4.0
special_penalty              -       100.0
stopword_penalty             5.0     15.0
beta                         0.3     0.3
top_k                        -       5
threshold                    -       0.5
distillation_temperature     -       3.0
alpha_kl                     -       0.7
alpha_mse                    -       0.3
"""

# "Weights by phase (V26)"; the phases of V28 name no info_nce, which is V26's.
PHASES = """
epochs   temperature   info_nce   distillation
1-8      0.08          2.5        2.5
9-17     0.05          3.0        1.5
18-25    0.04          3.0        0.8
"""


def _rows(table):
    head, *lines = (line.split() for line in table.strip().splitlines())
    return head, lines


def _number(text):
    return None if text == "-" else float(text)


def test_weights():
    head, lines = _rows(WEIGHTS)
    for name, *values in lines:
        for preset, value in zip(PRESETS, values, strict=True):
            assert preset.name in head
            assert preset.weights.get(name) == _number(value), (preset.name, name)
    for preset in PRESETS:
        assert set(preset.weights) <= {name for name, *_ in lines}


def test_settings():
    _, lines = _rows(SETTINGS)
    for name, *values in lines:
        for preset, value in zip((V25, V26), values, strict=True):
            assert getattr(preset, name) == _number(value), (preset.name, name)
    for preset in (V22, V23):
        assert preset.idf_alpha is None


@pytest.mark.parametrize("preset", [V26, V28], ids=["V26", "V28"])
def test_phases(preset):
    (_, _, *names), lines = _rows(PHASES)
    expected = []
    for epochs, temperature, *weights in lines:
        first, last = map(int, epochs.split("-"))
        weights = dict(zip(names, map(float, weights), strict=True))
        expected.append(Phase(first, last, temperature=float(temperature), weights=weights))
    assert preset.curriculum.phases == tuple(expected)
    assert preset.curriculum.unit == "epoch"


def test_v28_is_v26_with_a_language_penalty_and_context_distillation():
    more = {"query_language_penalty": 0.5, "context_distillation": 1.0}
    assert V28.weights == {**V26.weights, **more}
    assert V28.language_penalty == 100.0
    changed = {"name", "weights", "language_penalty", "training", "ours"}
    kept = {field.name for field in dataclasses.fields(V26)} - changed
    assert all(getattr(V28, name) == getattr(V26, name) for name in kept)
    training = {
        "num_epochs": 25,
        "batch_size": 24,
        "learning_rate": 3.0e-5,
        "gradient_accumulation_steps": 4,
        "context_gate_hidden": 256,
        "context_attention_heads": 4,
        "context_gate_dropout": 0.1,
    }
    assert training.items() <= V28.training.items()


def test_v28_has_the_info_nce_of_v26_in_its_phases_and_says_that_it_is_ours():
    assert [phase.weights["info_nce"] for phase in V28.curriculum.phases] == [2.5, 3.0, 3.0]
    assert "2.5, 3.0 and 3.0" in V28.ours["phases"]


def _recommended(**changes):
    preset = RECOMMENDED.replace(**changes)
    options = {"idf": torch.rand(30) * 5, "special_token_ids": [0, 1], "stopword_ids": [2]}
    return preset, preset.objective(**options)


def test_the_recommended_objective_has_the_presets_numbers():
    preset, objective = _recommended()
    assert preset.missing() == []
    assert objective.weights == RECOMMENDED.weights
    assert objective.info_nce.temperature == RECOMMENDED.temperature
    assert objective.info_nce.similarity == "dot"
    assert not objective.info_nce.symmetric
    assert type(objective.flops) is FlopsLoss, "no token costs more than another"
    alphas = objective.distillation.alpha_kl, objective.distillation.alpha_mse
    assert alphas == (RECOMMENDED.alpha_kl, RECOMMENDED.alpha_mse)
    batch = _batch()
    total, terms = objective(batch)
    total.backward()
    assert set(terms) == set(RECOMMENDED.weights)
    batch = batch._replace(teacher_scores=0.1 * batch.teacher_scores + 3.0)  # of any scale
    torch.testing.assert_close(objective(batch)[1]["distillation"], terms["distillation"])


def test_the_objective_for_cosines_has_the_presets_numbers():
    objective = COSINE.objective(idf=torch.rand(30) * 5, special_token_ids=[0, 1])
    assert COSINE.missing() == []
    assert objective.weights == COSINE.weights
    assert objective.info_nce.temperature == COSINE.temperature
    assert objective.info_nce.symmetric
    assert objective.info_nce.similarity == "cosine"
    assert objective.self_reconstruction.balanced
    assert list(objective.self_reconstruction.ignore_token_ids) == [0, 1]
    scales = objective.score_scale, objective.teacher_scale
    assert scales == (COSINE.score_scale, COSINE.teacher_scale)
    total, terms = objective(_batch())
    total.backward()
    assert set(terms) == set(COSINE.weights)
    plain = COSINE.replace(score_scale=None, symmetric=False, balanced=False)
    objective = plain.objective(idf=torch.rand(30), score_scale=3.0)
    assert objective.score_scale == 3.0
    assert not objective.info_nce.symmetric
    assert not objective.self_reconstruction.balanced


def test_warm_ups_and_targets_become_schedules():
    preset, objective = _recommended(warmup={"query_flops": 0.25}, target_active={})
    (schedule,) = preset.schedules(objective, steps=40)
    assert schedule.warmups == {"query_flops": Warmup(10, "quadratic")}
    assert objective.weights["query_flops"] == 0.0
    assert objective.weights["document_flops"] == RECOMMENDED.weights["document_flops"]

    targets = {"document_flops": 12, "query_flops": 6}
    preset, objective = _recommended(target_active=targets)
    schedule, *controllers = preset.schedules(objective)
    assert schedule.warmups == {}, "a term with a target does not warm up"
    assert {c.term: c.target_active for c in controllers} == targets
    assert [c.start for c in controllers] == [RECOMMENDED.weights[term] for term in targets]

    objective = V26.objective(idf=torch.rand(30))
    (schedule,) = V26.schedules(objective, steps_per_epoch=3)
    assert (schedule.curriculum, schedule.steps_per_epoch) == (V26.curriculum, 3)


def test_schedules_ask_for_the_steps_that_they_need():
    preset, objective = _recommended()
    with pytest.raises(ValueError, match=r"`steps` of the whole training for .* query_flops"):
        preset.schedules(objective)
    with pytest.raises(ValueError, match="`steps_per_epoch`"):
        V26.schedules(V26.objective(idf=torch.rand(30)))
    alone = RECOMMENDED.without("query_flops", "document_flops")
    assert (dict(alone.warmup), dict(alone.target_active)) == ({}, {})
    (schedule,) = alone.schedules(alone.objective(idf=torch.rand(30)))
    assert schedule.warmups == {}


def test_schedules_that_fail_leave_the_objective_as_it_was():
    preset = RECOMMENDED.replace(target_active={"document_flops": 12})
    for off in ("document_flops", "query_flops"):  # the controller's and the schedule's
        objective = preset.objective(idf=torch.rand(30))
        objective.weights[off] = 0.0
        before = dict(objective.weights)
        with pytest.raises(ValueError, match=off):
            preset.schedules(objective, steps=40)
        assert (objective.weights, objective.scheduled) == (before, set())


def test_a_phase_and_a_target_do_not_set_the_same_weight():
    phased = Curriculum([Phase(1, 2, weights={"document_flops": 0.5})])
    with pytest.raises(ValueError, match="a phase and a `target_active` for document_flops"):
        RECOMMENDED.replace(curriculum=phased)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": {"flops": 0.5}}, "`warmup` .*'flops'"),
        ({"warmup": {"query_flops": 2}}, r"shares in \(0, 1\], got {'query_flops': 2}"),
        ({"warmup": {"query_flops": 0}}, r"warmup\['query_flops'\]"),
        ({"target_active": {"document_flops": -3}}, r"target_active\['document_flops'\]"),
        ({"target_active": {"info_nce": 3}}, "`target_active` .*'document_flops'.*'info_nce'"),
    ],
)
def test_warm_ups_and_targets_that_make_no_sense_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        RECOMMENDED.replace(**changes)


@pytest.mark.parametrize("name", ["target_active", "warmup", "training", "ours"])
def test_a_number_in_place_of_a_dict_is_an_error(name):
    with pytest.raises(TypeError, match=rf"expected `{name}` as a dict such as {{.*}}, got 64"):
        RECOMMENDED.replace(**{name: 64})


def test_the_numbers_of_a_printed_preset_are_in_one_column():
    lines = str(RECOMMENDED).splitlines()[1:]
    assert "  target active of document_flops         64" in lines
    assert {len(line) - len(line.split()[-1]) for line in lines} == {42}


def test_what_nobody_gave_must_be_set():
    assert V22.missing() == ["temperature", "margin", "top_k", "threshold"]
    assert V26.missing() == V28.missing() == []
    with pytest.raises(ValueError, match=r"V22, got None for temp.*V22.replace\(temperature="):
        V22.objective()
    with pytest.raises(ValueError, match="V26 weighs FLOPS by token and needs `idf`"):
        V26.objective()
    with pytest.raises(ValueError, match="`allowed_token_ids`"):
        V28.objective(idf=torch.rand(30))
    with pytest.raises(ValueError, match="`weights`"):
        V26.replace(weights={"doc_flops": 1.0})
    assert isinstance(V26.objective(flops=FlopsLoss()).flops, FlopsLoss)
    ready = V22.replace(temperature=0.05, margin=0.3, top_k=5, threshold=0.5)
    assert ready.missing() == []
    assert isinstance(ready.objective().flops, FlopsLoss)
    assert V22.temperature is None, "a preset is not changed"


def _batch(size=4, vocab=30):
    def side():
        ids, mask = torch.randint(0, vocab, (size, 6)), torch.ones(size, 6, dtype=torch.int64)
        return Texts(torch.rand(size, vocab, requires_grad=True), ids, mask)

    scores = torch.randn(size, size)
    return SpladeBatch(side(), side(), teacher_scores=scores, teacher_anchor_scores=scores)


def test_v28_trains():
    idf = torch.rand(30) * 5
    ids = {"special_token_ids": [0, 1], "stopword_ids": [2]}
    objective = V28.objective(idf=idf, **ids, allowed_token_ids=range(20))
    assert isinstance(objective.flops, IdfFlopsLoss)
    expected = idf_penalty(idf, alpha=4.0, special_penalty=100.0, stopword_penalty=15.0, **ids)
    assert torch.equal(objective.flops.token_penalty, expected)
    penalised = objective.language_penalty.token_penalty.nonzero().flatten().tolist()
    assert penalised == list(range(20, 30))
    assert set(objective.language_penalty.token_penalty.tolist()) == {0.0, 100.0}
    assert objective.distillation.temperature == 3.0
    schedule = TrainingSchedule(objective, V28.curriculum, steps_per_epoch=1)
    total, terms = objective(_batch())
    assert set(terms) == {name for name, weight in V28.weights.items() if weight}
    assert total.isfinite()
    assert objective.info_nce.temperature == 0.08
    for _ in range(8):
        schedule.step()
    assert objective.info_nce.temperature == 0.05
    assert objective.weights["distillation"] == 1.5
    assert objective.weights["info_nce"] == 3.0


def test_v25_treats_special_tokens_as_any_other_and_stopwords_may_be_hidden():
    idf = torch.linspace(0, 5, 30)
    kept = {name: getattr(V26, name) for name in V25.missing()}
    options = {"idf": idf, "special_token_ids": [0], "stopword_ids": [3]}
    penalty = V25.replace(**kept).objective(**options).flops.token_penalty
    expected = idf_penalty(idf, alpha=2.5, stopword_ids=[3], stopword_penalty=5.0)
    assert torch.equal(penalty, expected)
    for hidden in (False, True):
        made = V26.objective(**options, hide_stopwords=hidden)
        assert made.stopword_ids.tolist() == [3] * hidden


def test_a_preset_prints_every_number_and_marks_what_is_ours():
    text = str(V28)
    for number in ("3", "0.5", "0.01", "0.07", "100", "15", "25", "2.5", "3e-05", "BAAI/bge-m3"):
        assert number in text
    assert "ours: context_distillation" in text
    assert "temperature                             ?" in str(V22)
    text = str(COSINE)
    for line in ("warmup of query_flops ", "target active of document_flops ", "bm25", "balanced"):
        assert line in text
    assert "symmetric" not in str(V26)


OFF = {
    "without": V28.without("distillation", "context_distillation"),
    "replace": V28.replace(weights={"distillation": 0.0, "context_distillation": 0.0}),
}


@pytest.mark.parametrize("preset", OFF.values(), ids=OFF)
@pytest.mark.parametrize("curriculum", ["its own", "V26's"])
def test_a_term_that_is_taken_away_is_off_in_every_phase(preset, curriculum):
    objective = preset.objective(idf=torch.rand(30), allowed_token_ids=range(20))
    phases = V26.curriculum if curriculum == "V26's" else preset.curriculum
    schedule = TrainingSchedule(objective, phases, steps_per_epoch=1)
    for epoch in range(1, 27):
        weights = {name: weight for name, weight in objective.weights.items() if weight}
        assert set(weights) == {name for name in V28.weights if V28.weights[name]} - {
            "distillation",
            "context_distillation",
        }
        assert weights["info_nce"] == (2.5 if epoch <= 8 else 3.0)
        schedule.step()


def test_taking_a_term_away_changes_nothing_else():
    alone = V28.without("distillation")
    assert alone.replace(weights={"distillation": 2.0}, curriculum=V28.curriculum) == V28
    assert [p.temperature for p in alone.curriculum.phases] == [0.08, 0.05, 0.04]
    assert "distillation" in V28.weights
    assert V22.without("distillation") == V22, "it has none"
    assert V22.without("triplet_margin").missing() == ["temperature", "top_k", "threshold"]
    with pytest.raises(ValueError, match=r"`terms` .*'distillation'.* got 'teacher'"):
        V26.without("teacher")


def test_a_preset_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        V26.weights["info_nce"] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        V26.temperature = 1.0


def test_a_loss_that_is_given_needs_no_number():
    # In the notes' V26 there is none of it.
    theirs = V26.replace(weights={"document_language_penalty": 0.005})
    assert theirs.missing() == ["language_penalty"]
    loss = LanguagePenaltyLoss(torch.tensor([0.0, 100.0]))
    objective = theirs.objective(idf=torch.rand(2), language_penalty=loss)
    assert objective.language_penalty is loss
    made = theirs.replace(language_penalty=100.0).objective(
        idf=torch.rand(2), allowed_token_ids=[0]
    )
    assert torch.equal(made.language_penalty.token_penalty, loss.token_penalty)


@pytest.mark.parametrize("steps", [0, -5, 2.5])
def test_a_wrong_number_of_steps_is_an_error(steps):
    objective = RECOMMENDED.objective()
    with pytest.raises((ValueError, TypeError), match="expected `steps` to be an integer"):
        RECOMMENDED.schedules(objective, steps=steps)


def test_losses_that_are_passed_need_no_numbers_of_the_preset():
    losses = {
        "info_nce": InfoNCELoss(temperature=0.05),
        "triplet_margin": TripletMarginLoss(margin=0.2),
        "min_activation": MinActivationLoss(top_k=2, threshold=0.4),
    }
    objective = V22.objective(**losses)
    assert objective.info_nce is losses["info_nce"]
    assert objective.min_activation is losses["min_activation"]
    assert isinstance(V26.replace(beta=None).objective(flops=FlopsLoss()).flops, FlopsLoss)
    del losses["triplet_margin"]
    with pytest.raises(ValueError, match="got None for margin: set"):
        V22.objective(**losses)
    with pytest.raises(ValueError, match="got None for temperature, margin: set"):
        V22.objective(info_nce=None, min_activation=losses["min_activation"])


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ({"foo": 1.0}, ValueError, "`weights` to be one of .*, got 'foo'"),
        ({"info_nce": "x"}, TypeError, r"`weights\['info_nce'\]` to be a number, got str"),
        ({"info_nce": math.nan}, ValueError, r"`weights\['info_nce'\]` to be a finite number"),
    ],
)
def test_the_weights_of_a_preset_are_checked(weights, error, message):
    with pytest.raises(error, match=message):
        Preset("mine", weights)
    with pytest.raises(error, match=message):
        V26.replace(weights=weights)
