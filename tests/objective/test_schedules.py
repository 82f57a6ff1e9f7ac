import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import Curriculum, InfoNCELoss, Phase, SpladeBatch, Texts, Warmup
from sparse_losses import TrainingSchedule as Schedule
from tests.instruments import counting
from tests.objective.making import objective

PHASES = [
    Phase(2, temperature=0.08, weights={"info_nce": 2.5, "distillation": 2.5}),
    Phase(4, temperature=0.05, weights={"distillation": 1.5}),
    Phase(6, weights={"info_nce": 3.0, "distillation": 0.8}),
]
WEIGHTS = {"info_nce": 1.0, "distillation": 1.0, "query_flops": 0.1}


def scheduled():
    warmups = {"query_flops": Warmup(7, "quadratic"), "info_nce": Warmup(3)}
    made = objective(WEIGHTS, {"info_nce": InfoNCELoss(temperature=0.07)})
    return made, Schedule(made, Curriculum(PHASES, steps_per_epoch=4), warmups=warmups)


def temperature_of(made):
    return made.terms["info_nce"].loss.temperature


@given(st.integers(1, 10**6), st.integers(0, 2 * 10**6))
def test_a_warmup_rises_from_zero_to_one_and_stays(steps, step):
    linear, quadratic = Warmup(steps), Warmup(steps, "quadratic")
    assert linear(0) == quadratic(0) == 0.0
    assert linear(steps) == quadratic(steps) == 1.0
    assert 0.0 <= linear(step) <= linear(step + 1) <= 1.0
    assert quadratic(step) == linear(step) ** 2


def test_phases_follow_the_epochs_and_replace_weights():
    made, schedule = scheduled()
    seen = []
    for _ in range(28):
        seen.append((dict(made.weights), temperature_of(made)))
        schedule.step()
    assert seen[0][0]["info_nce"] == 0.0
    assert seen[7] == ({"info_nce": 2.5, "distillation": 2.5, "query_flops": 0.1}, 0.08)
    assert seen[8] == ({"info_nce": 1.0, "distillation": 1.5, "query_flops": 0.1}, 0.05)
    expected = {"info_nce": 3.0, "distillation": 0.8, "query_flops": 0.1}
    assert seen[16] == (expected, 0.07), "a phase without a temperature has the objective's own"
    assert seen[27] == seen[16], "the last phase stays on"


@pytest.mark.parametrize("stop", [0, 5, 10, 25])
def test_a_resumed_run_sees_the_same_numbers_to_the_bit(stop):
    made, schedule = scheduled()
    for _ in range(stop):
        schedule.step()
    other, resumed = scheduled()
    resumed.load_state_dict(copy.deepcopy(schedule.state_dict()))
    for _ in range(10):
        assert other.weights == made.weights
        assert temperature_of(other) == temperature_of(made)
        schedule.step()
        resumed.step()


def test_phases_cannot_set_a_parametrised_temperature():
    loss = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.3)))
    torch.nn.utils.parametrize.register_parametrization(loss, "temperature", torch.nn.Softplus())
    with pytest.raises(ValueError, match="that of InfoNCE is parametrised"):
        Schedule(objective({"info_nce": 1.0}, {"info_nce": loss}), Curriculum([Phase(3, 0.1)]))


def test_a_learned_temperature_is_filled_as_a_phase_begins():
    parameter = torch.nn.Parameter(torch.tensor(0.3))
    made = objective({"info_nce": 1.0}, {"info_nce": InfoNCELoss(temperature=parameter)})
    phases = Curriculum([Phase(3, temperature=0.1), Phase(9)])
    schedule = Schedule(made, phases)
    assert temperature_of(made) is parameter
    assert parameter.item() == pytest.approx(0.1)
    with torch.no_grad():
        parameter.fill_(0.2)  # learned
    schedule.step()
    assert parameter.item() == pytest.approx(0.2), "within a phase it is the optimiser's"
    state = schedule.state_dict()
    resumed = Schedule(made, phases)  # which begins with the first phase's
    assert parameter.item() == pytest.approx(0.1)
    resumed.load_state_dict(state)
    assert parameter.item() == pytest.approx(0.2)


def test_a_phase_may_postpone_a_term_and_needs_no_info_nce():
    made = objective({"query_flops": 0.1, "query_min_activation": 1.0})
    schedule = Schedule(made, Curriculum([Phase(1, 0.1, weights={"query_flops": 0.0}), Phase(9)]))
    assert made.active() == ["query_min_activation"]
    schedule.step()
    assert made.weights["query_flops"] == 0.1


@pytest.mark.parametrize("fused", [False, True])
def test_optimiser_steps_count_and_not_batches_or_steps_that_a_scaler_skips(fused):
    schedule = Schedule(objective({}))
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    handle = schedule.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for gradient in (1.0, torch.inf, 1.0):
        for _ in range(4):
            scaler.scale((parameter * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert schedule.steps_taken == 2
    handle.remove()
    optimizer.step()
    assert schedule.steps_taken == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curriculum([]), "end one after"),
        (lambda: Curriculum([Phase(3)] * 2), "end one after"),
        (lambda: Curriculum(PHASES, None), "`steps_per_epoch`"),
        (lambda: Warmup(0), "`steps`"),
        (lambda: Warmup(3, "cubic"), "`shape`"),
        (lambda: Schedule(objective({}), warmups={"a": Warmup(9)}), r"got \['a'\]"),
    ],
)
def test_wrong_input_is_an_error(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_compiled_objective_follows_a_schedule_by_the_graphs_it_has():
    torch._dynamo.reset()
    graphs, count = counting("aot_eager")
    names = ("info_nce", "query_flops", "query_min_activation", "distillation")
    made = objective(dict.fromkeys(names, 1.0))
    phases = [Phase(i + 1, 0.1 - 0.005 * i, {"info_nce": 1.0 + i}) for i in range(7)]
    warmups = {"query_flops": Warmup(10), "query_min_activation": Warmup(10, "quadratic")}
    schedule = Schedule(made, Curriculum(phases), warmups=warmups)
    compiled = torch.compile(made, fullgraph=True, backend=count)
    compiled_by_then, totals = [], set()
    x, y = torch.rand(4, 9, requires_grad=True), torch.rand(4, 9)
    batch = SpladeBatch(Texts(x), Texts(y), teacher_scores=torch.rand(4, 4))
    for step in range(7):
        made.terms["query_min_activation"].loss.threshold = 1.0 + step / 10
        made.terms["distillation"].score_scale = 20.0 + step
        total, expected = compiled(batch).total, made(batch).total
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
        total.backward()
        totals.add(total.item())
        compiled_by_then.append(len(graphs))
        schedule.step()
    assert len(totals) == 7
    # Without the terms that warm up, then with them, then with numbers that change.
    assert compiled_by_then == [1, 2, 3, 3, 3, 3, 3]
