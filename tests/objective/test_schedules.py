import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import (
    V26,
    Curriculum,
    InfoNCELoss,
    Phase,
    SparsityController,
    SpladeBatch,
    SpladeObjective,
    Texts,
    TrainingSchedule,
    Warmup,
)
from tests.instruments import counting

PHASES = Curriculum(
    [
        Phase(1, 2, temperature=0.08, weights={"info_nce": 2.5, "distillation": 2.5}),
        Phase(3, 4, temperature=0.05, weights={"distillation": 1.5}),
        Phase(5, 6, weights={"info_nce": 3.0, "distillation": 0.8}),
    ]
)


def _objective():
    return SpladeObjective(
        {"info_nce": 1.0, "distillation": 1.0, "query_flops": 0.1},
        info_nce=InfoNCELoss(temperature=0.07),
    )


def _schedule(objective):
    return TrainingSchedule(
        objective,
        PHASES,
        warmups={"query_flops": Warmup(7, "quadratic"), "info_nce": Warmup(3)},
        steps_per_epoch=4,
    )


def _state(objective):
    return dict(objective.weights), objective.info_nce.temperature


@given(st.integers(1, 10**6), st.integers(0, 2 * 10**6))
def test_a_warmup_rises_from_zero_to_one_and_stays(steps, step):
    linear, quadratic = Warmup(steps), Warmup(steps, "quadratic")
    assert linear(0) == quadratic(0) == 0.0
    assert linear(steps) == quadratic(steps) == 1.0
    assert 0.0 <= quadratic(step) <= linear(step) <= 1.0
    assert linear(step) <= linear(step + 1)
    assert quadratic(step) == linear(step) ** 2


def test_phases_follow_the_epochs_and_replace_weights():
    objective = _objective()
    schedule = _schedule(objective)
    seen = []
    for _ in range(28):
        seen.append((schedule.epoch, *_state(objective)))
        schedule.step()
    assert [epoch for epoch, *_ in seen] == [n for n in range(1, 8) for _ in range(4)]
    assert seen[0][1]["info_nce"] == 0.0
    assert seen[7][1] == {"info_nce": 2.5, "distillation": 2.5, "query_flops": 0.1}
    assert seen[7][2] == 0.08
    assert seen[8][1] == {"info_nce": 1.0, "distillation": 1.5, "query_flops": 0.1}
    assert seen[8][2] == 0.05
    assert seen[16][1] == {"info_nce": 3.0, "distillation": 0.8, "query_flops": 0.1}
    assert seen[16][2] == 0.07, "a phase without a temperature has the objective's own"
    assert seen[27][1:] == seen[16][1:], "the last phase stays on"


@pytest.mark.parametrize("stop", [0, 5, 10, 25])
def test_a_resumed_run_sees_the_same_numbers_to_the_bit(stop):
    objective = _objective()
    schedule = _schedule(objective)
    for _ in range(stop):
        schedule.step()
    saved = copy.deepcopy(schedule.state_dict())
    other = _objective()
    resumed = _schedule(other)
    resumed.load_state_dict(saved)
    for _ in range(10):
        assert _state(other) == _state(objective)
        schedule.step()
        resumed.step()


def test_a_learned_temperature_is_copied_into_as_a_phase_begins():
    parameter = torch.nn.Parameter(torch.tensor(0.3))
    objective = SpladeObjective({"info_nce": 1.0}, info_nce=InfoNCELoss(temperature=parameter))
    phases = Curriculum([Phase(0, 2, temperature=0.1), Phase(3, 9)], unit="step")
    schedule = TrainingSchedule(objective, phases)
    assert objective.info_nce.temperature is parameter
    assert parameter.item() == pytest.approx(0.1)
    with torch.no_grad():
        parameter.fill_(0.2)  # learned
    schedule.step()
    assert parameter.item() == pytest.approx(0.2), "within a phase it is the optimiser's"
    state = schedule.state_dict()
    resumed = TrainingSchedule(objective, phases)  # which begins with the first phase's
    resumed.load_state_dict(state)
    assert parameter.item() == pytest.approx(0.2)
    resumed.load_state_dict({"steps_taken": 3})  # of a number that was not learned
    assert parameter.item() == pytest.approx(0.2)


def test_a_term_that_was_set_to_0_stays_off_in_every_phase():
    objective = SpladeObjective({"info_nce": 1.0, "query_flops": 0.0})
    phases = Curriculum(
        [Phase(i, i, weights={"query_flops": 0.1, "info_nce": 2.0 + i}) for i in range(3)],
        unit="step",
    )
    schedule = TrainingSchedule(objective, phases)
    for step in range(4):
        assert objective.weights == {"info_nce": 2.0 + min(step, 2), "query_flops": 0.0}
        schedule.step()
    with pytest.raises(ValueError, match="'query_flops', got 0 in the objective"):
        TrainingSchedule(objective, phases, warmups={"query_flops": Warmup(2)})


def test_a_phase_may_postpone_a_term():
    objective = SpladeObjective({"info_nce": 1.0, "query_flops": 0.1})
    phases = Curriculum([Phase(0, 0, weights={"query_flops": 0.0}), Phase(1, 9)], unit="step")
    schedule = TrainingSchedule(objective, phases)
    assert objective.active() == ["info_nce"]
    schedule.step()
    assert objective.weights["query_flops"] == 0.1


def test_phases_and_presets_are_data_that_does_not_change():
    for one in (PHASES, Phase(1, 2, weights={"info_nce": 1.0}), V26):
        assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert dataclasses.asdict(V26)["weights"]["info_nce"] == 3.0
    with pytest.raises(TypeError, match="no change"):
        PHASES.phases[0].weights["info_nce"] = 9.0
    phases = [Phase(1, 3)]
    curriculum = Curriculum(phases)
    phases.clear()
    assert curriculum.phases == (Phase(1, 3),)
    for one, name in ((curriculum, "phases"), (Phase(1, 3), "last"), (Warmup(3), "steps")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, name, 9)


def _warmed(weights, steps=2):
    return TrainingSchedule(SpladeObjective(weights), warmups={"query_flops": Warmup(steps)})


def test_optimiser_steps_count_and_not_batches():
    schedule = _warmed({"query_flops": 1.0}, 10)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter])
    handle = schedule.attach(optimizer)
    for micro_batch in range(8):
        parameter.sum().backward()
        if micro_batch % 4 == 3:
            optimizer.step()
    assert schedule.steps_taken == 2
    with pytest.raises(RuntimeError, match="attached once"):
        schedule.attach(optimizer)
    handle.remove()
    optimizer.step()
    assert schedule.steps_taken == 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_does_not_count(fused):
    schedule = TrainingSchedule(SpladeObjective({}))
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    schedule.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for gradient in (torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((parameter * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert schedule.steps_taken == 1


def test_a_scheduled_weight_changed_by_other_code_is_an_error():
    objective = _objective()
    schedule = _schedule(objective)
    objective.weights["query_flops"] = 7.0
    with pytest.raises(RuntimeError, match=r"query_flops.*got 7\.0"):
        schedule.step()


def test_a_term_has_one_schedule_or_one_controller():
    options = {"target_active": 10}
    for schedule in (
        {"warmups": {"query_flops": Warmup(4)}},
        {"curriculum": Curriculum([Phase(0, 9, weights={"query_flops": 2.0})], unit="step")},
    ):
        objective = SpladeObjective({"query_flops": 1.0, "document_flops": 1.0})
        TrainingSchedule(objective, **schedule)
        with pytest.raises(ValueError, match=r"weight of 'query_flops'.* TrainingSchedule sets it"):
            SparsityController(objective, "query_flops", **options)
        steering = SparsityController(objective, "document_flops", **options)
        with pytest.raises(ValueError, match="by a SparsityController, got both for document_fl"):
            TrainingSchedule(objective, warmups={steering.term: Warmup(4)})


def test_weights_that_are_not_scheduled_may_be_changed():
    objective = SpladeObjective({"info_nce": 1.0, "query_flops": 1.0})
    schedule = TrainingSchedule(objective, warmups={"query_flops": Warmup(2)})
    objective.weights["info_nce"] = 5.0
    schedule.step()
    assert objective.weights == {"info_nce": 5.0, "query_flops": 0.5}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curriculum([]), "at least one phase"),
        (lambda: Curriculum([Phase(1, 3), Phase(5, 6)]), "begins with epoch 4, got 5"),
        (lambda: PHASES.at(0), "`epoch`"),
        (lambda: Phase(3, 2), "`last`"),
        (lambda: Phase(1, 2, weights={"flops": 1.0}), "`weights`"),
        (lambda: Warmup(0), "`steps`"),
        (lambda: TrainingSchedule(_objective(), PHASES), "`steps_per_epoch`"),
        (lambda: TrainingSchedule(_objective(), warmups={"flops": Warmup(2)}), "`warmups`"),
        (lambda: _warmed({"query_flops": torch.ones(())}), "as tensors"),
        (lambda: TrainingSchedule("x"), "`objective` to be"),
        (lambda: TrainingSchedule(_objective(), warmups={"info_nce": 5}), "`warmups` to be"),
    ],
)
def test_wrong_input_is_an_error(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"steps": 3}, "state of a TrainingSchedule, got {'steps': 3}"),
        ({"steps_taken": -1}, "`steps_taken`"),
        ({"steps_taken": 3, "temperature": 0.0}, "`temperature`"),
        (None, "the state of a TrainingSchedule, got None"),
    ],
)
def test_the_state_of_something_else_is_not_loaded(state, message):
    schedule = TrainingSchedule(SpladeObjective({"query_flops": 1.0}))
    with pytest.raises((ValueError, TypeError), match=message):
        schedule.load_state_dict(state)
    assert schedule.steps_taken == 0


def test_a_compiled_objective_follows_a_schedule_by_the_graphs_it_has():
    torch._dynamo.reset()
    graphs, count = counting("aot_eager")
    phases = [
        Phase(i, i, temperature=0.1 - 0.005 * i, weights={"info_nce": 1.0 + i}) for i in range(7)
    ]
    objective = SpladeObjective(
        {"info_nce": 1.0, "query_flops": 1.0, "query_min_activation": 1.0, "distillation": 1.0}
    )
    warmups = {"query_flops": Warmup(10), "query_min_activation": Warmup(10, "quadratic")}
    schedule = TrainingSchedule(objective, Curriculum(phases, unit="step"), warmups=warmups)
    compiled = torch.compile(objective, fullgraph=True, backend=count)
    compiled_by_then, totals = [], set()
    x, y = torch.rand(4, 9, requires_grad=True), torch.rand(4, 9)
    batch = SpladeBatch(Texts(x), Texts(y), teacher_scores=torch.rand(4, 4))
    for step in range(7):
        objective.min_activation.threshold = 1.0 + step / 10
        objective.score_scale = 20.0 + step
        total, expected = compiled(batch).total, objective(batch).total
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
        total.backward()
        totals.add(total.item())
        compiled_by_then.append(len(graphs))
        schedule.step()
    assert len(totals) == 7
    # Without the terms that warm up, then with them, then with numbers that change.
    assert compiled_by_then == [1, 2, 3, 3, 3, 3, 3]
