"""The law of the descent, on models of what follows a weight."""

import dataclasses
import itertools
import math
import random

import pytest

from sparse_losses.objective.descent import Descent  # the law has no tensors; its class has


class Texts:
    """Active dimensions that follow the weight late, with noise, as a network's do.

    From ``dense`` dimensions they fall by themselves to ``alone``. FLOPS is their square, by which
    a weight has more effect on dense texts.
    """

    def __init__(self, dense=4000.0, alone=600.0, lag=8.0, response=0.53, noise=0.1):
        self.active, self.alone, self.lag = dense, alone, lag
        self.response, self.noise, self.rng = response, noise, random.Random(3)

    def step(self, weight):
        settled = self.alone / (1 + weight / 1e-4) ** self.response
        self.active *= (settled / self.active) ** (1 / self.lag)
        return self.active * math.exp(self.rng.gauss(0, self.noise))


def made(steps=300, maximum=None):
    return Descent(steps, maximum, first_weight=1e-4)


def run(law, texts, target, steps=None, ranking=0.5):
    """Take the law's steps; return active dimensions, weights and statuses."""
    seen, weights, statuses = [], [], []
    for _ in range(steps or law.steps):
        active = max(texts.step(law.weight), 0.1)
        seen.append(texts.active)
        law.step += 1
        law.look_at_ranking(ranking)
        law.look_at_dead(0.0, 32)
        law.look(math.log(active / target), 1.0)
        weights.append(law.weight)
        statuses.append(law.status)
    return seen, weights, statuses


@pytest.mark.parametrize("dense", [4000.0, 700.0, 300.0])
@pytest.mark.parametrize("lag", [3.0, 8.0, 16.0])
@pytest.mark.parametrize("response", [0.45, 0.65])
@pytest.mark.parametrize("steps", [100, 300, 1000])
@pytest.mark.parametrize("target", [32, 128])
def test_a_run_ends_on_its_target_from_above(target, steps, response, lag, dense):
    law = made(steps)
    seen, _, statuses = run(law, Texts(dense, min(600, dense), lag, response), target)
    end = sum(seen[-10:]) / 10 / target
    assert 0.95 < end < 1.5
    if steps > 100:
        assert end < 1.35
    first = next(n for n, active in enumerate(seen) if active < 1.5 * target)
    assert all(1 / 1.5 < active / target < 2 for active in seen[first:])
    assert not any(status.startswith("unreachable") for status in statuses)


def test_flops_is_off_until_the_fall_by_itself_has_stopped():
    law, texts = made(), Texts(lag=10.0, noise=0.0)
    seen, weights, _ = run(law, texts, 32)
    start = next(n for n, weight in enumerate(weights) if weight > 0)
    slope = math.log(seen[start] / seen[start - 1])
    assert -0.04 < slope < 0
    assert seen[start] > 600
    assert law.started_at == start + 1
    assert weights[start] == pytest.approx(1e-4, rel=0.2)


@pytest.mark.parametrize(
    ("ranking", "starts_at"), [(0.84, 5), (0.86, None), (1.19, None), (30.0, 20), (math.nan, 5)]
)
def test_flops_waits_until_the_ranking_loss_learns_or_is_far_above_chance(ranking, starts_at):
    law = made()
    run(law, Texts(600.0, noise=0.0), 32, ranking=ranking)
    assert law.started_at == starts_at


@pytest.mark.parametrize(
    ("ranking", "warns"), [(0.86, True), (0.84, False), (1.1, True), (1.3, False)]
)
def test_a_ranking_loss_at_chance_is_told_once_at_step_50(ranking, warns):
    law, told = made(), []
    for step in range(1, 120):
        law.step = step
        if law.look_at_ranking(ranking):
            told.append(step)
        law.look(3.0, 1.0)
        waits = law.status == "waiting: ranking loss at chance"
        assert waits == (warns and step >= 50 and law.started_at is None)
    assert told == [50] * warns


def test_the_weight_does_not_rise_while_the_ranking_loss_passes_chance():
    law, texts = made(), Texts(600.0, noise=0.0)
    run(law, texts, 32, steps=40, ranking=30.0)
    before = law.weight
    for share in (1.1, 1.0, 0.9):
        law.ranking = share
        run(law, texts, 32, steps=10, ranking=share)
        assert law.weight <= before
    law.ranking = 0.8
    run(law, texts, 32, steps=10, ranking=0.8)
    assert law.weight > 2 * before


def test_flops_that_undoes_the_ranking_loss_is_off_until_it_learns_again_and_then_less():
    law = made()

    def steps(number, ranking):
        for _ in range(number):
            law.look_at_terms(ranking, 100.0, 0.03)
            run(law, Texts(600.0, 600.0, response=0.0, noise=0.0), 32, steps=1, ranking=ranking)

    steps(40, 0.5)
    before = law.weight
    assert before > 0
    steps(10, 0.95)
    assert (law.weight, law.status) == (0.0, "braking: ranking loss back at chance")
    steps(2, 0.5)
    steps(1, 0.5)
    assert 0 < law.weight < 0.5 * before
    assert law.status == "sparsifying: more FLOPS would undo the ranking loss"
    steps(150, 0.5)
    assert law.weight > before
    assert law.status == "sparsifying: FLOPS is four times the ranking terms"


@pytest.mark.parametrize("every", [2, 5])
def test_texts_may_be_looked_at_every_few_steps(every):
    law, texts, seen = made(), Texts(lag=10.0), []
    for step in range(1, 301):
        active = texts.step(law.weight)
        law.step = step
        law.look_at_ranking(0.5)
        if step % every == 0:
            law.look_at_dead(0.0, 32)
            law.look(math.log(active / 32), 1.0)
        seen.append(active)
    assert 0.95 < sum(seen[-10:]) / 10 / 32 < 1.4
    assert min(seen) > 32 / 1.6


def test_the_plan_bends_towards_the_target_and_the_weight_follows_it():
    """Without noise and lag the count is where it should be in the middle of the plan."""
    law, texts = made(1000), Texts(600.0, lag=1.0, noise=0.0)
    seen, _, _ = run(law, texts, 32)
    middle = law.started_at + 300
    height = math.log(600 / 32) - math.log(1.1)
    planned = 32 * 1.1 * math.exp(height * (1 - 300 / (0.6 * (1000 - law.started_at))) ** 1.5)
    assert seen[middle] == pytest.approx(planned, rel=0.15)


def test_a_run_of_unknown_length_is_planned_for_300_steps_and_then_held():
    law = made(None)
    seen, _, statuses = run(law, Texts(), 32, steps=900)
    known, _, _ = run(made(), Texts(), 32)
    assert seen[:300] == known
    assert statuses[400:].count("on target") > 400


@pytest.mark.parametrize("alone", [20.0, 25.0])
def test_a_target_above_what_the_other_losses_leave_is_unreachable_said_once_and_kept(alone):
    law = made()
    _, weights, statuses = run(law, Texts(4000.0, alone), 32)
    assert set(weights) == {0.0}
    changes = [status for status, _ in itertools.groupby(statuses)]
    assert changes == ["waiting", "unreachable: too sparse without FLOPS"]
    assert statuses.index(changes[-1]) < 120


def test_a_target_is_not_unreachable_while_dimensions_rise():
    law, statuses = made(), []
    for step in range(1, 80):
        law.step = step
        law.look(math.log(2 * 1.03**step / 32), 1.0)
        statuses.append(law.status)
    assert {*statuses} == {"waiting"}


def test_a_run_that_comes_back_above_an_unreachable_target_is_steered():
    law, texts = made(), Texts(4000.0, 20.0)
    assert run(law, texts, 32, steps=200)[2][-1].startswith("unreachable")
    texts.alone = 600.0
    seen, weights, statuses = run(law, texts, 32, steps=200)
    assert max(weights) > 0
    assert statuses[-1] in ("on target", "sparsifying")
    assert seen[-1] < 1.5 * 32


def test_what_a_later_loss_prunes_below_the_target_ends_without_flops_and_unreachable():
    law, texts = made(), Texts(600.0)
    run(law, texts, 32, steps=200)
    texts.alone = 15.0
    _, weights, statuses = run(law, texts, 32, steps=200)
    assert weights[-1] == 0.0
    assert "relaxing" in statuses
    assert statuses[-1] == "unreachable: too sparse without FLOPS"


def test_the_weight_stays_within_its_bounds():
    law = made(maximum=0.01)
    _, weights, statuses = run(law, Texts(600.0, response=0.1), 32)
    assert max(weights) == weights[-1] == pytest.approx(0.01)
    assert statuses[-1] == "unreachable: too dense at the largest weight"
    assert law.log_ratio == pytest.approx(math.log(100))  # no error accumulates


@pytest.mark.parametrize(("ranking", "counts_as"), [(10.0, 10.0), (0.1, 0.5)])
def test_flops_is_at_most_four_times_the_ranking_terms(ranking, counts_as):
    """Texts that stay dense for long: a larger weight would act no sooner, but far too strongly."""
    law, texts = made(), Texts(3000, 3000, response=0.0)
    law.look_at_terms(ranking, flops=200.0, start=0.03)
    assert law.first_weight == pytest.approx(0.03 * ranking / 200)
    _, weights, _ = run(law, texts, 32)
    most = 4 * counts_as / 200
    assert weights[-1] == pytest.approx(most)
    for _ in range(20):  # the activations shrink, and with them FLOPS
        law.look_at_terms(ranking, flops=2.0, start=0.03)
    _, weights, _ = run(law, texts, 32, steps=1)
    assert most < weights[-1] < 2 * most, "what it would have risen to is not made up for"
    law.maximum = most / 2
    assert law.weight == most / 2


def test_a_single_batch_of_huge_activations_does_not_end_the_descent():
    law, texts = made(), Texts(3000, 3000, response=0.0)
    law.look_at_terms(10.0, flops=200.0, start=0.03)
    run(law, texts, 32, steps=60)
    before = law.weight
    law.look_at_terms(10.0, flops=200e12, start=0.03)
    run(law, texts, 32, steps=1)
    assert law.weight < 1e-3 * before
    for _ in range(60):
        if law.weight:  # without a weight FLOPS is not measured
            law.look_at_terms(10.0, flops=200.0, start=0.03)
        run(law, texts, 32, steps=1)
    assert law.weight == pytest.approx(before, rel=0.01)
    assert law.status == "sparsifying: FLOPS is four times the ranking terms"


def test_a_count_that_no_weight_changes_is_unreachable():
    law = made(None)
    run(law, Texts(3000, 3000, response=0.0), 32, steps=2000)
    assert math.isfinite(law.weight)
    assert law.status == "unreachable: too dense at the largest weight"


def test_a_fall_that_will_end_above_the_target_takes_no_weight_away():
    law, texts = made(), Texts(3000, 3000, response=0.0, noise=0.0)
    run(law, texts, 32, steps=50)
    before, count = law.log_ratio, 3000.0
    while count > 300:  # twice as fast as planned
        count *= 0.9
        law.step += 1
        law.look(math.log(count / 32), 1.0)
    assert law.log_ratio >= before
    while count > 20:
        count *= 0.9
        law.step += 1
        law.look(math.log(count / 32), 1.0)
    assert law.log_ratio + law.brake < before - 1


def test_a_crash_is_braked_before_the_smoothed_count_is_below_the_target():
    """From 90 to 3 in 18 steps, as dense texts fall."""
    law = made()
    run(law, Texts(600.0, noise=0.0), 32, steps=100)
    before, first, braked = law.weight, law.level, {}
    for n in range(1, 19):
        law.step += 1
        law.look(first - 0.19 * n, 1.0)
        braked[law.level > 0] = law.weight
    assert braked[True] < 0.6 * before
    assert braked[False] == law.weight < 0.01 * before
    assert law.status == "braking: active dimensions fall below the target"


@pytest.mark.parametrize(("dead", "is_braked"), [(0.04, False), (0.2, True)])
def test_dying_texts_take_the_weight_away_until_they_live(dead, is_braked):
    law = made()
    run(law, Texts(600.0, noise=0.0), 32, steps=100)
    before = law.weight
    for _ in range(40):
        law.step += 1
        law.look_at_dead(dead, 32)
        law.look(law.level, 1.0)
    assert (law.status == "braking: texts become empty") == is_braked
    assert (law.weight < before / 2) == is_braked
    for _ in range(40):
        law.step += 1
        law.look_at_dead(0.0, 32)
        law.look(law.level, 1.0)
    assert law.brake == 0.0
    assert law.weight > before / 2


@pytest.mark.parametrize("every", [1, 5])
def test_texts_that_were_empty_from_the_first_look_on_brake_nothing(every):
    law = made()
    rng, texts = random.Random(1), Texts()
    for step in range(1, 301):
        active = texts.step(law.weight)
        law.step = step
        if step % every:
            continue
        law.look_at_dead(sum(rng.random() < 0.1 for _ in range(16)) / 16, 16)
        law.look(math.log(active / 32), 1.0)
        assert "empty" not in law.status
    assert law.usual_dead == pytest.approx(0.1, abs=0.05)
    assert law.level < 0.4


@pytest.mark.parametrize(("weight", "how"), [(1e-4, "under"), (0.0, "without")])
def test_mostly_dead_texts_are_a_collapse_that_names_its_cause(weight, how):
    law = Descent(300, None, first_weight=weight)
    for step in range(1, 60):
        law.step = step
        law.look_at_dead(0.0 if step < 20 else 0.99, 32)
        law.look(3.0 if step < 20 else -1.5, 1.0)
        if law.more_dead > 0.5:
            break
    assert (
        law.status
        == f"collapsing: most texts are empty {'without' if law.weight == 0 else how} FLOPS"
    )


def test_shrinking_activations_are_named_where_the_count_does_not_fall_with_them():
    for active, mean, is_named in ((300, 0.05, True), (300, 0.2, False), (40, 0.05, False)):
        law = made()
        for step in range(1, 150):
            law.step = step
            law.look(math.log((1000 if step < 20 else active) / 20), 1.0 if step < 20 else mean)
            assert "shrink" not in law.status or step > 20 + 30
        named = law.status == "unreachable: activations shrink but stay active"
        assert named == is_named, (active, mean)


def test_the_law_is_its_fields():
    """A copy of the fields continues as the law itself."""
    law, texts = made(), Texts()
    run(law, texts, 32, steps=120)
    other, same = Descent(**dataclasses.asdict(law)), Texts()
    same.active, same.rng = texts.active, random.Random()
    same.rng.setstate(texts.rng.getstate())
    assert run(law, texts, 32, steps=50) == run(other, same, 32, steps=50)
