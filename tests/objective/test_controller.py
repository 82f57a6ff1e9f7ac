import copy
import inspect
import itertools
import json
import math
import random
import re

import numpy as np
import pytest
import torch

from sparse_losses import (
    CollapseError,
    ObjectiveOutput,
    SparsityController,
    SpladeBatch,
    SpladeObjective,
    Texts,
)
from sparse_losses.objective.controller import REMEDIES, _chance  # a warning alone shows it

V = 1000


def _rows(active, dead=0, rows=10):
    """``rows`` texts with so many active dimensions, ``dead`` of them silent."""
    x = torch.zeros(rows, V)
    x[: rows - dead, :active] = 1.0
    return x


def _controller(objective=None, **options):
    objective = objective or SpladeObjective({"document_flops": 0.01})
    options = {"target_active": 50, "ignore_steps": 0, "every": 1} | options
    return objective, SparsityController(objective, **options)


def _weight(objective):
    return objective.weights["document_flops"]


def _look(controller, activations, times=1):
    """Take so many steps with the same texts; return the status after them."""
    for _ in range(times):
        controller.observe(activations)
        controller.step()
    return controller.report()["status"]


class _Plant:
    """Active dimensions that follow the weight with a lag, as a network's do."""

    def __init__(self, objective, dense=600.0, lag=30.0, needed=2.0, floor=1.0):
        self.objective, self.active = objective, dense
        self.dense, self.lag, self.needed, self.floor = dense, lag, needed, floor

    def step(self):
        weight = _weight(self.objective)
        settled = max(self.dense / (1 + weight * self.needed), self.floor)
        self.active *= (settled / self.active) ** (1 / self.lag)
        return _rows(max(round(self.active), 1))


class _Training:
    """A run whose learning rate decays to 0, of texts that InfoNCE prunes by itself.

    From ``dense`` dimensions nothing moves at first; then all but about 150 become inactive,
    whatever the weight. From there on they follow it with a lag, the longer the slower the
    optimiser is.
    """

    def __init__(self, objective, steps, dense, lag, response, alone=150.0):
        self.objective, self.steps, self.active = objective, steps, dense
        self.dense, self.lag, self.response, self.alone = dense, lag, response, alone
        self.step_, self.rng = 0, random.Random(7)

    def settled(self, weight):
        return self.alone / (1 + weight / 0.02) ** self.response

    def step(self):
        self.step_ += 1
        if self.active > 2 * self.alone and self.step_ < 40:
            return self.look()
        rate = 2 * (1 - self.step_ / self.steps)
        fall = math.log(self.settled(_weight(self.objective)) / self.active)
        self.active *= math.exp(max(rate * fall / self.lag, -0.15))  # a step goes so far at most
        return self.look()

    def look(self):
        return _rows(max(round(self.active * math.exp(self.rng.gauss(0, 0.05))), 1))


@pytest.mark.parametrize("response", [0.5, 1.0])
@pytest.mark.parametrize("lag", [10, 25])
@pytest.mark.parametrize("dense", [900.0, 120.0])
@pytest.mark.parametrize("steps", [250, 500])
@pytest.mark.parametrize("target", [32, 64, 128])
def test_a_short_training_ends_within_10_percent_of_its_target(target, steps, dense, lag, response):
    objective, controller = _controller(
        SpladeObjective({"document_flops": 0.03}), target_active=target, ignore_steps=20, every=5
    )
    training = _Training(objective, steps, dense, lag, response)
    statuses = [_look(controller, training.step()) for _ in range(steps)]
    assert training.active == pytest.approx(target, rel=0.1)
    assert statuses[-1] == "on target"


@pytest.mark.parametrize("dense", [900.0, 140.0])
def test_an_unreachable_target_is_reported_by_step_100(dense):
    objective, controller = _controller(
        SpladeObjective({"document_flops": 0.03}), target_active=128, ignore_steps=20, every=5
    )
    training = _Training(objective, 250, dense, 10, 0.7, alone=80.0)
    statuses = [_look(controller, training.step()) for _ in range(250)]
    assert statuses[99] == statuses[-1] == "unreachable: too sparse at almost no weight"


@pytest.mark.parametrize("target", [20, 400])
@pytest.mark.parametrize("lag", [5, 80])
@pytest.mark.parametrize("start", [1e-4, 10.0])
def test_the_target_is_reached_and_held(target, lag, start):
    objective, controller = _controller(target_active=target, start=start)
    plant = _Plant(objective, lag=lag)
    seen = []
    for _ in range(1500):
        status = _look(controller, plant.step())
        seen.append(plant.active)
    assert all(abs(active / target - 1) < 0.1 for active in seen[-200:])
    if start < 1:  # from a weight that is far too large nothing steers away in a few steps
        assert min(seen) > target / 3, "it does not fall through the target"
    assert status == "on target"


def test_the_weight_moves_by_a_bounded_factor_and_within_bounds():
    objective, controller = _controller(gain=0.05, maximum=0.5, start=0.01)
    weights = [_weight(objective)]
    for step in range(200):
        _look(controller, _rows(900 - step))
        weights.append(_weight(objective))
    ratios = [b / a for a, b in itertools.pairwise(weights)]
    assert max(ratios) <= math.exp(0.05) * (1 + 1e-9)
    assert weights[-1] == pytest.approx(0.5)
    assert controller.report()["status"] == "unreachable: too dense at the largest weight"


def test_in_a_crash_the_weight_falls_faster_than_it_may_rise():
    """From a weight far too large the text falls within a few looks, as a network's does."""
    objective, controller = _controller(start=10.0, every=5)
    for active, is_crash in ((900, False), (890, False), (150, None), (12, True)):
        before = _weight(objective)
        statuses = {_look(controller, _rows(active)) for _ in range(10)}
        change = math.log(_weight(objective) / before)
        if is_crash is None:  # on its way through the target, and not there yet
            assert change <= 0
            continue
        assert (change < -2 * 10 * controller.gain) == is_crash, active
        assert any(status.startswith("backing off") for status in statuses) == is_crash
    assert controller.report()["active"] == pytest.approx(12, rel=0.1), "hardly any average"


def test_the_weight_recovers_from_a_start_100_times_too_large():
    """A weight a hundred times too large: it falls by what is missing, and finds back."""
    objective, controller = _controller(start=3.0, target_active=64, every=5, ignore_steps=20)
    training = _Training(objective, 500, 900.0, 10, 0.7)
    weights = []
    for _ in range(500):
        _look(controller, training.step())
        weights.append(_weight(objective))
    assert 0.03 < min(weights) < 0.5
    assert training.active == pytest.approx(64, rel=0.1)


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("target", [50, 100])
def test_a_fall_that_ends_above_the_target_is_no_crash(every, target):
    """A contrastive loss prunes a dense text by itself: 8% a step, and then no further."""
    objective, controller = _controller(start=1.0, target_active=target, every=every)
    for step in range(100):
        active = 900 * math.exp(-0.08 * min(max(step - 30, 0), 17.5))  # down to 222
        assert not _look(controller, _rows(round(active))).startswith("backing off")
    assert _weight(objective) > 0.1


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize(
    ("noise", "within"),
    [
        (lambda rng: math.exp(rng.gauss(0, 0.2)), 0.1),
        (lambda rng: math.exp(rng.gauss(0, 0.5)), 0.4),
        (lambda rng: 0.1 if rng.random() < 0.02 else 1.0, 0.3),  # one look in fifty
        (lambda rng: rng.choice([1.0, 0.4]), 0.8),  # of which 0.63 is the geometric mean
    ],
)
def test_noisy_batches_do_not_keep_it_from_the_target(every, noise, within):
    objective, controller = _controller(target_active=100, every=every)
    plant, rng = _Plant(objective), random.Random(1)
    seen = []
    for _ in range(1500):
        active = int((plant.step()[0] > 0).sum())
        _look(controller, _rows(max(round(active * noise(rng)), 1)))
        seen.append(active)
    assert sum(seen[-300:]) / 300 == pytest.approx(100, rel=within)


FALL = -math.log(1.5) / 8  # a third within eight steps


@pytest.mark.parametrize(
    ("active", "every", "trend", "change", "is_crash"),
    [
        (105, 5, -0.1, -0.5, True),
        (105, 5, -0.1, -0.1, False),  # slowed down: the trend lags behind
        (60, 1, FALL, FALL, False),
        (60, 1, 1.01 * FALL, 1.01 * FALL, True),
    ],
)
def test_a_crash_is_a_fall_by_more_than_a_third_within_eight_steps(
    active, every, trend, change, is_crash
):
    _, controller = _controller(target_active=100, every=every)
    _look(controller, _rows(active), times=every)
    state = controller.state_dict() | {"trend": trend, "change": change}
    _, resumed = _controller(target_active=101, every=every)
    resumed.load_state_dict(state)
    assert resumed.report()["status"].startswith("backing off: active") == is_crash


def test_no_error_accumulates_at_a_bound():
    objective, controller = _controller(maximum=0.02, window=1.0, horizon=0.0)
    _look(controller, _rows(900), times=500)
    assert _weight(objective) == pytest.approx(0.02)
    _look(controller, _rows(10), times=10)
    assert _weight(objective) < 0.02 * math.exp(-0.05 * 5)


def test_a_closing_gate_is_reported_as_shrinking_activations():
    """The only parameter is a scale, so all dimensions stay."""
    torch.manual_seed(0)
    table, log_gate = torch.rand(8, 200), torch.nn.Parameter(torch.zeros(()))
    objective = SpladeObjective({"document_flops": 0.1})
    controller = SparsityController(objective, target_active=20, ignore_steps=0)
    optimizer = torch.optim.Adam([log_gate], lr=0.05)
    controller.attach(optimizer)
    statuses = []
    for _ in range(150):
        texts = Texts(log_gate.exp() * table)
        total, _ = objective(SpladeBatch(texts, texts))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        statuses.append(controller.report()["status"])
    assert log_gate.item() < math.log(0.1)
    assert statuses[10] == "sparsifying"
    assert statuses[-1] == "unreachable: activations shrink but stay active"
    assert controller.report()["mean_activation"] < 0.05


def test_shrinking_activations_are_not_reported_while_dimensions_fall_too():
    objective, controller = _controller(target_active=50)
    for active, scale in ((900, 1.0), (400, 0.3), (60, 0.09)):
        _look(controller, scale * _rows(active), times=100)
    assert controller.report()["mean_activation"] == pytest.approx(0.09)
    assert controller.report()["status"] == "sparsifying"
    assert _weight(objective) > 0.01


def test_dead_rows_halve_the_weight_once_and_keep_it_from_rising():
    objective, controller = _controller(start=1.0, dead_share=0.05)
    _look(controller, _rows(900, rows=50), times=3)
    before = _weight(objective)
    assert before > 1.0
    for _ in range(200):  # until they are what is usual, and longer
        _look(controller, _rows(900, dead=10, rows=50))
        assert _weight(objective) == pytest.approx(before / 2)
        if _ == 0:
            assert controller.report()["status"].startswith("backing off")
            assert controller.report()["dead_rows"] == pytest.approx(0.2)
    # no more than at first: it goes on
    _look(controller, _rows(900, dead=1, rows=50), times=2)
    assert _weight(objective) > before / 2


def test_dead_rows_by_chance_are_no_alarm():
    """Of 200 rows 20 are dead: 5% and two standard deviations (4.2%) more are 38.5 rows."""
    _, controller = _controller(dead_share=0.05, window=1000.0)
    _look(controller, _rows(900, dead=20, rows=200), times=3)
    for dead, is_alarm in ((38, False), (39, True)):
        status = _look(controller, _rows(900, dead=dead, rows=200))
        assert status.startswith("backing off: texts") == is_alarm


LEVEL, SLOPE = 1 - math.exp(-1.0), (1 - math.exp(-0.5)) ** 2  # the shares of a surprise
THIRD = LEVEL + SLOPE + LEVEL * (1 - LEVEL - SLOPE)  # of a step, the level two looks later


@pytest.mark.parametrize(
    ("looks", "horizon", "pull"),
    [
        ([110], 20.0, math.log(1.1)),
        ([91], 20.0, math.log(0.91)),
        ([60], 20.0, math.log(0.6)),
        ([10], 20.0, -1.0),
        ([900], 20.0, 0.25),  # nothing has moved yet
        ([900, 900, 890], 20.0, 0.25),
        ([900, 870], 20.0, 1.0),
        ([60, 61], 0.0, math.log(0.6) + LEVEL * math.log(61 / 60)),
        ([60, 80], 10.0, math.log(0.6) + (1 + 10 / 2) * LEVEL * math.log(80 / 60)),  # on its way
        ([110, 110], 20.0, math.log(1.1)),
        ([110, 100], 20.0, math.log(1.1) * (1 - (1 + 20 / 2) * LEVEL)),
        ([150, 110], 60.0, -1.0),
        ([300, 200], 60.0, 0.0),  # far away still
        ([999, 700], 10.0, math.log(9.99) + (1 + 10 / 2) * LEVEL * math.log(700 / 999)),
        ([100, 110, 110], 4.0, math.log(1.1) * (THIRD + 4 / 2 * (THIRD - LEVEL))),
    ],
)
def test_the_change_of_the_weight_is_the_formulas(looks, horizon, pull):
    """Two steps a look, a window of four."""
    options = {"target_active": 100, "every": 2, "window": 4.0, "horizon": horizon, "start": 1.0}
    objective, controller = _controller(**options)
    for active in looks:
        before = _weight(objective)
        _look(controller, _rows(active), times=2)
    change = math.log(_weight(objective) / before)
    assert change == pytest.approx(2 * controller.gain * pull)


@pytest.mark.parametrize("start", [0.01, 1e3])
def test_mostly_dead_rows_are_a_collapse_that_names_its_cause(start):
    _, controller = _controller(start=start)
    _look(controller, _rows(900))
    status = _look(controller, _rows(3, dead=49, rows=50))
    assert status == "collapsing: most texts are empty under FLOPS"
    status = _look(controller, _rows(3, dead=49, rows=50), times=400)
    assert status == "collapsing: most texts are empty at almost no weight of FLOPS"


@pytest.mark.parametrize(
    ("share", "steps", "warns"), [(1.0, 60, 1), (0.8, 60, 0), (1.3, 60, 0), (1.0, 49, 0)]
)
@pytest.mark.parametrize("every", [1, 5])
def test_a_ranking_loss_at_chance_is_named_once_after_50_steps(share, steps, warns, every, caplog):
    objective = SpladeObjective({"info_nce": 2.0, "document_flops": 0.01})
    controller = SparsityController(objective, target_active=50, every=every)
    batch = SpladeBatch(Texts(_rows(400)), Texts(_rows(400)), Texts(_rows(400)))
    output = ObjectiveOutput(torch.tensor(0.0), {"info_nce": torch.tensor(share * math.log(20))})
    for _ in range(steps):
        controller._watch(objective, (batch,), {}, output)
        controller.step()
    told = [record for record in caplog.records if "InfoNCE is 100% of its" in record.message]
    assert len(told) == warns
    assert all(record.levelname == "WARNING" for record in told)


def test_chance_is_the_logarithm_of_the_candidates():
    """Equal texts: all candidates score alike."""
    rows, own = Texts(_rows(400)), Texts(_rows(400).expand(10, 10, V).transpose(0, 1)[:, :3])
    for negative in (None, rows, own):
        objective = SpladeObjective({"info_nce": 1.0})
        batch = SpladeBatch(rows, rows, negative)
        value = objective(batch).terms["info_nce"].item()
        assert value == pytest.approx(_chance(objective, batch))


def test_a_loop_without_an_objective_multiplies_by_the_weight():
    controller = SparsityController(weight=0.25, target_active=50, every=1, ignore_steps=0)
    assert (controller.weight.shape, controller.weight.item()) == ((), 0.25)
    parameter = torch.nn.Parameter(torch.ones(V))
    optimizer = torch.optim.SGD([parameter], lr=1e-6)
    handle = controller.attach(optimizer)
    weight = controller.weight
    for _ in range(3):
        controller.observe(parameter.expand(4, V))
        (controller.weight * parameter.square().sum()).backward()
        optimizer.step()
    assert weight is controller.weight, "it is changed in place"
    assert 0.25 < weight.item() == pytest.approx(controller.report()["weight"])
    handle.remove()
    optimizer.step()
    assert controller.report()["step"] == 3
    resumed = SparsityController(weight=9.0, target_active=50, every=1, ignore_steps=0)
    resumed.load_state_dict(controller.state_dict())
    assert torch.equal(resumed.weight, weight)


def test_when_all_rows_are_dead_it_names_the_checkpoint():
    objective, controller = _controller(window=3)
    controller.checkpoint = "runs/7/step-1.pt"
    for active in (900, 0, 0, 5, 0, 0):  # a row that is alive again ends the wait for the third
        before = _weight(objective)
        _look(controller, _rows(active, dead=0 if active else 10))
        if not active:  # a batch of nothing but empty texts is no collapse
            assert _weight(objective) == pytest.approx(before / 2)
    controller.observe(_rows(0, dead=10))
    with pytest.raises(CollapseError, match=r"step 7.*dead rows: 4\).*runs/7/step-1\.pt.*logits"):
        controller.step()
    assert "collapsed" in str(controller)


def test_a_target_is_not_unreachable_while_dimensions_rise():
    """From the bottom, where hardly any weight is left, dimensions come back."""
    _, controller = _controller(target_active=100)
    statuses = []
    for step in range(400):
        active = 900 if step < 3 else 2 if step < 80 else min(2 + (step - 80) / 3, 95)
        statuses.append(_look(controller, _rows(round(active))))
    assert {status for status in statuses[100:250] if status} <= {"relaxing"}


def test_a_resumed_run_steers_as_the_first_one_would():
    objective, controller = _controller(every=3, ignore_steps=4)
    plant = _Plant(objective)
    for step in range(100):
        if step == 40:
            state = controller.state_dict()
            active = plant.active
        _look(controller, plant.step())
    other, resumed = _controller(every=3, ignore_steps=4)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    plant_again = _Plant(other)
    plant_again.active = active
    for _ in range(60):
        _look(resumed, plant_again.step())
    assert other.weights == objective.weights
    assert resumed.report() == controller.report()


@pytest.mark.parametrize(("target", "status"), [(256, "relaxing"), (16, "sparsifying")])
def test_a_resumed_run_with_another_target_steers_to_that(target, status, caplog):
    _, controller = _controller(target_active=64, every=5)
    assert _look(controller, _rows(64), times=200) == "on target"
    objective, resumed = _controller(target_active=target, every=5)
    resumed.load_state_dict(controller.state_dict())
    assert f"the target is {target}, in the loaded state it was 64" in caplog.text
    assert resumed.state_dict()["error"] == pytest.approx(math.log(64 / target), abs=1e-6)
    report, before = resumed.report(), _weight(objective)
    assert (report["active"], report["status"]) == (pytest.approx(64), status)
    assert _look(resumed, _rows(64), times=6) == status
    change = math.log(_weight(objective) / before)
    assert change == pytest.approx(math.copysign(0.06 * 5, 64 - target) / (4 if target < 64 else 1))


def test_attached_controllers_observe_their_side_in_training_and_count_optimiser_steps():
    objective = SpladeObjective({"query_flops": 0.1, "document_flops": 0.2})
    query, document = (
        SparsityController(objective, term, target_active=20, every=2, ignore_steps=0)
        for term in ("query_flops", "document_flops")
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    handle = document.attach(optimizer)
    query.attach(optimizer)
    batch = SpladeBatch(Texts(_rows(5)), Texts(_rows(300)), Texts(_rows(100).expand(10, 10, V)))
    for _ in range(2):
        objective(batch)
        objective.eval()
        objective(SpladeBatch(Texts(_rows(1)), Texts(_rows(1))))  # a validation batch
        objective.train()
        optimizer.step()
    # 10 positives of 300 and 100 negatives of 100.
    assert document.report()["active"] == pytest.approx((10 * 300 + 100 * 100) / 110)
    assert query.report()["active"] == 5.0
    assert objective.weights["query_flops"] < 0.1
    assert _weight(objective) > 0.2
    with pytest.raises(RuntimeError, match="attached once"):
        document.attach(optimizer)
    handle.remove()
    optimizer.step()
    assert document.report()["step"] == 2


def test_a_weight_changed_by_other_code_is_an_error():
    objective, controller = _controller()
    objective.weights["document_flops"] = 3.0
    controller.observe(_rows(900))
    with pytest.raises(RuntimeError, match="only the controller may set it"):
        controller.step()


def test_rows_with_nan_and_empty_batches_change_nothing():
    objective, controller = _controller()
    _look(controller, _rows(900))
    before = _weight(objective)
    _look(controller, torch.full((4, V), torch.nan))
    _look(controller, torch.zeros(0, V))
    assert _weight(objective) == before
    mixed = _rows(900)
    mixed[3, 5] = torch.nan
    _look(controller, mixed)
    assert controller.report()["dead_rows"] == 0.0
    assert _weight(objective) > before


def test_a_copy_of_an_attached_objective_is_not_watched():
    objective, controller = _controller()
    controller.attach(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    other = copy.deepcopy(objective)
    other(SpladeBatch(Texts(_rows(5)), Texts(_rows(300))))
    with pytest.raises(RuntimeError, match="observe"):
        controller.step()
    objective(batch=SpladeBatch(Texts(_rows(5)), Texts(_rows(300))))
    controller.step()
    assert controller.report()["active"] == 300.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_active": 0}, "`target_active`"),
        ({"start": 0.0}, "`start` to be .* > 0"),
        ({"start": 1.0, "maximum": 0.5}, "`maximum`"),
        ({"gain": 0.0}, "`gain`"),
        ({"window": 0.5}, "`window`"),
        ({"every": 0}, "`every`"),
        ({"dead_share": 1.0}, "`dead_share`"),
        ({"term": "info_nce"}, "`term`"),
        ({"objective": SpladeObjective({"info_nce": 1.0})}, "`start`, got 0"),
    ],
)
def test_wrong_settings_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        _controller(**options)


def test_wrong_inputs_are_errors():
    with pytest.raises(TypeError, match="`objective` to be a SpladeObjective, got dict"):
        SparsityController({"document_flops": 0.1}, target_active=3)
    for both in ({}, {"objective": SpladeObjective({}), "weight": 1.0}):
        with pytest.raises(TypeError, match="either `objective` or `weight`, got"):
            SparsityController(**both, target_active=3)
    with pytest.raises(TypeError, match="no `start` beside `weight`"):
        SparsityController(weight=1.0, start=1.0, target_active=3)
    with pytest.raises(ValueError, match=r"`weight` to be .* > 0"):
        SparsityController(weight=0.0, target_active=3)
    _, controller = _controller(target_active=V)
    with pytest.raises(RuntimeError, match="observe"):
        controller.step()
    with pytest.raises(ValueError, match=r"expected `activations` of shape \[\.\.\., V\], got"):
        controller.observe(_rows(3)[0])
    with pytest.raises(ValueError, match=f"expected `target_active` below V = {V}, got {V}"):
        controller.observe(_rows(3))
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Linear"):
        controller.attach(torch.nn.Linear(2, 2))


def test_a_second_controller_of_a_term_is_refused_at_construction():
    objective, controller = _controller(SpladeObjective({"document_flops": 1.0, "query_flops": 1}))
    with pytest.raises(ValueError, match="expected one controller of 'document_flops', got a sec"):
        _controller(objective)
    _controller(objective, term="query_flops")
    _controller(copy.deepcopy(objective))  # the copy's weight is another
    del controller
    _controller(objective)


@pytest.mark.parametrize(
    ("looks", "least", "most"),
    [
        ([_rows(900)] * 10, 1.0, 1.0),
        ([_rows(900)] * 11, 1.001, 2.0),
        ([_rows(900), _rows(900, dead=5)], 0.5, 0.5),
        ([_rows(900), *[_rows(20)] * 5], 0.0, 0.9),  # a crash
        ([_rows(40), _rows(45)], 1.0, 1.0),
    ],
)
def test_brakes_alone_act_in_the_ignored_steps(looks, least, most):
    objective, controller = _controller(ignore_steps=10, window=5)
    for rows in looks:
        _look(controller, rows)
    share = _weight(objective) / 0.01
    assert least * (1 - 1e-9) <= share <= most * (1 + 1e-9)


def test_a_state_holds_plain_numbers_whatever_it_was_made_with(tmp_path):
    """``torch.load`` and JSON refuse NumPy's, which a sweep over an array brings."""
    objective = SpladeObjective({"document_flops": np.float32(0.125)})
    options = {name: np.int64(1) for name in ("every", "ignore_steps", "window")}
    controller = SparsityController(
        objective, target_active=np.int64(40), gain=np.float64(0.06), **options
    )
    for active in (900, 600, 700):
        _look(controller, _rows(active), times=5)
    state = controller.state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert json.loads(json.dumps(state)) == state
    resumed = SparsityController(
        SpladeObjective({"document_flops": 1.0}), target_active=40, gain=0.06, window=1, every=1
    )
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.state_dict() == state


def test_a_list_of_schedules_shows_the_state():
    _, controller = _controller(target_active=40)
    _look(controller, _rows(60))
    assert "document_flops: 60.0 active of 40 wanted" in str(controller)
    assert repr([controller]) == f"[SparsityController({controller})]"


@pytest.mark.parametrize(
    ("active", "start", "said"),
    [
        (64, 1.0, None),
        (20, 1.0, "what is dead hardly comes back"),
        (150, 1.0, "`calibrate` prunes the rest"),
    ],
)
def test_the_outcome_says_what_to_do_where_the_target_was_missed(active, start, said):
    controller = SparsityController(weight=start, target_active=64)
    assert "`attach` it, or call `observe` and `step`" in controller.outcome()
    for _ in range(10):
        controller.observe((torch.arange(200) < active).float().expand(4, 200))
        controller.step()
    if said is None:
        assert controller.outcome() == str(controller)
    else:
        assert controller.outcome() == f"{controller}; {controller.outcome().partition('; ')[2]}"
        assert said in controller.outcome()


def test_every_remedy_is_of_a_status_and_every_unreachable_status_has_one():
    source = inspect.getsource(SparsityController._status_now)
    found = re.findall(r'"((?:unreachable|collapsing): [^"{]*)', source)
    assert len(found) == 4
    for status in found:
        assert sum(status.startswith(name) for name in REMEDIES) == 1


def test_before_the_first_measurement_there_is_nothing_to_report_and_a_state_to_load():
    _, controller = _controller(target_active=40)
    report = controller.report()
    assert [report[n] for n in ("active", "dead_rows", "mean_activation")] == [None] * 3
    _, other = _controller(target_active=30)
    other.load_state_dict(controller.state_dict())
    assert other.report() == {**report, "target": 30}


def test_the_state_of_something_else_is_an_error():
    _, controller = _controller()
    state = controller.state_dict()
    for wrong, message in (
        (state | {"term": "query_flops"}, "state for 'document_flops', got one for 'query_flops'"),
        ({"steps_taken": 3}, "SparsityController, got one that lacks or adds active"),
        (None, "state of a SparsityController, got NoneType"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            controller.load_state_dict(wrong)
    assert controller.state_dict() == state


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *((name, math.nan) for name in ("log_ratio", "active", "error", "trend", "cut", "start")),
        ("mean_activation", math.inf),
        ("dead", [0.0, math.nan, 0.0]),
        ("sent", [math.nan] * 7),
        ("of_a_later_version", 1),
        ("log_ratio", 800),
        ("log_ratio", "0"),
        ("status", 3),
        ("is_dying", "no"),
        ("steps", 2.5),
        ("target", 0),
        ("start", None),
        ("first", 3.0),
        ("first", [1.0]),
        ("seen", [None] * 7),
        ("dead", None),
    ],
)
def test_a_damaged_state_is_an_error_and_changes_nothing(name, bad):
    objective, controller = _controller()
    _look(controller, _rows(900))
    before, weights = controller.state_dict(), dict(objective.weights)
    with pytest.raises((ValueError, TypeError), match=f"expected .*{name}"):
        controller.load_state_dict({**before, name: bad})
    assert controller.state_dict() == before
    assert objective.weights == weights


def test_the_largest_start_has_a_finite_maximum():
    objective = SpladeObjective({"document_flops": 1e305})
    _, controller = _controller(objective, target_active=2, gain=1.0)
    _look(controller, _rows(900), times=40)
    assert _weight(objective) <= controller.maximum < math.inf
    assert _weight(objective) == pytest.approx(controller.maximum)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dense_rows_in_half_precision_are_counted(dtype):
    _, controller = _controller(target_active=50)
    x = torch.full((3, 100_000), 2.0, dtype=dtype)  # a sum of 200,000, which fp16 does not hold
    x[2, 0] = math.nan
    _look(controller, x)
    report = controller.report()
    assert (report["active"], report["mean_activation"]) == (100_000, 2.0)
