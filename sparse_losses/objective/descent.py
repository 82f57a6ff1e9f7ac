r"""The law by which a controller sets a FLOPS weight, in plain numbers.

A dimension that is dead behind a ReLU hardly comes back, and pruning from above costs next to
nothing. The descent therefore comes from above: an error below the target is the costly one.
"""

import dataclasses
import math

LEARNS, OVER = 0.85, 1.2  # shares of chance: below, the ranking loss learns; above, scores shrink
LEARNED, UNLEARNED = 0.8, 0.9  # further apart than the noise of a small batch
AT_CHANCE = 50  # the step of the warning
FIRST_LOOKS, SETTLED = 5, -0.03  # steps, and the trend, at which the fall has stopped by itself
FLAT_LOOKS, FLAT = 20, -0.01  # the same where the scores are too large, or activations shrink
# Times the target, after this share of the steps that are left; the plan's power of the time left.
AIM, LENGTH, BEND = 1.15, 0.6, 1.5
UNPLANNED = 300  # the steps for which a run of unknown length is planned
FAR = 1.0  # the level above which shrinking activations count as a fall
POWER = 1.9  # FLOPS falls with about this power of the active dimensions
# log(weight / first): its bounds, of which the lower counts as 0, and its fastest fall.
LEAST, GREATEST, FALL = -7.0, 30.0, -0.4
# A ranking loss that FLOPS undoes: by how much the log share then falls, and rises in a run.
UNDONE, LESS, RECOVERY = "braking: ranking loss back at chance", 1.0, 10.0
HASTE = 1.5  # how much faster an error below the target is mended
BELOW, PAUSE = 0.3, -3.0  # a brake: from which distance below the target on; the strongest, 0
IDLE = -4.5  # log of FLOPS' share over its first one, at which the other losses decide
DYING, COLLAPSING = 0.05, 0.5  # shares of dead rows beyond the usual one
USUAL = 10  # the first looks, whose dead rows are the usual ones
SMALLEST = 0.05  # of the ranking terms, for the first weight: an easy task's are near 0
MOST, LARGE = 4.0, 0.5  # FLOPS over the ranking terms, at most; these then count as at least LARGE
LOW, HIGH = math.log(0.9), math.log(1.3)  # the levels that count as on target
SHRUNK = 0.1  # the share of the first mean activation below which activations have shrunk


@dataclasses.dataclass
class Descent:
    """The law and its state; every field is part of a controller's ``state_dict``.

    A level is the smoothed log(measured / target) and a trend its change per step, by Holt's
    method. ``ranking`` is the smoothed ranking loss over its value at chance.
    """

    steps: int | None
    maximum: float | None
    step: int = 0
    looked_at: int = 0  # the step of the last look
    level: float | None = None
    trend: float = 0.0
    mass: float = 0.0  # the smoothed log of a text's summed activations, over the target
    mass_trend: float = 0.0
    ranking: float | None = None
    has_learned: bool = False
    looks: int = 0
    dead: float | None = None
    usual_dead: float = 0.0  # the mean of the first looks
    tolerated: float = DYING
    first: float | None = None  # measured / target
    first_mean: float = 0.0
    mean_activation: float = 0.0
    last_healthy_step: int | None = None
    silent_steps: int = 0  # without a row that is alive
    unseen_steps: int = 0  # without a batch
    started_at: int | None = None  # None: FLOPS is off until the count has settled
    first_level: float = 0.0
    first_weight: float = 0.0  # before the start: what it would be
    log_most: float | None = None  # log of the weight at which FLOPS dominates
    share: float = MOST  # FLOPS over the ranking terms, at most
    log_ratio: float = 0.0  # log(weight / first_weight)
    brake: float = 0.0  # log of a factor that is there for a while
    idle_steps: int = 0  # below the target without FLOPS and without an upward trend
    shrunk_steps: int = 0  # far above the target with much smaller activations
    status: str = "waiting"

    @property
    def planned_steps(self) -> int:
        """The steps of the run, or those for which an unknown run is planned."""
        return self.steps or UNPLANNED

    @property
    def window(self) -> float:
        """The steps of smoothing, and the lag with which the count follows the weight."""
        return min(max(self.planned_steps / 40, 4.0), 12.0)

    @property
    def weight(self) -> float:
        """The present weight."""
        if self.started_at is None or self.log_ratio <= LEAST or self.brake <= PAUSE:
            return 0.0
        return min(self.first_weight * math.exp(self.log_ratio + self.brake), self.most)

    @property
    def most(self) -> float:
        """The largest weight now: beyond it FLOPS acts no sooner, and then far too strongly."""
        most = math.inf if self.log_most is None else math.exp(self.log_most)
        return most if self.maximum is None else min(most, self.maximum)

    @property
    def more_dead(self) -> float:
        """The share of rows that are dead beyond the usual one."""
        return (self.dead or 0.0) - self.usual_dead

    @property
    def unlearns(self) -> bool:
        """Whether the ranking loss had learned and is back at chance."""
        return self.has_learned and UNLEARNED < (self.ranking or 0.0) < OVER

    def look(self, level: float, mean_activation: float) -> None:
        """Take note of log(measured / target) and of the mean of the active activations."""
        steps, self.looked_at = self.step - self.looked_at, self.step
        if self.level is None:
            self.level, self.first, self.first_mean = level, math.exp(level), mean_activation
            self.mass = level + math.log(mean_activation)
        kept = math.exp(-steps / self.window) if self.step > FIRST_LOOKS else 0.5
        self.level, self.trend = _smoothed(self.level, self.trend, level, steps, kept)
        mass = level + math.log(mean_activation)
        self.mass, self.mass_trend = _smoothed(self.mass, self.mass_trend, mass, steps, kept)
        self.mean_activation = mean_activation
        self._steer(steps)

    def look_at_dead(self, share: float, rows: float) -> None:
        """Take note of the share of rows without an active dimension."""
        if share == 0:
            self.last_healthy_step = self.step
        if self.dead is None:
            self.dead = share
        steps = max(self.step - self.looked_at, 1)
        self.dead += (1 - math.exp(-steps / self.window)) * (share - self.dead)
        self.looks += 1
        if self.looks <= USUAL:  # texts of unknown tokens are always dead
            usual = self.usual_dead = self.usual_dead + (share - self.usual_dead) / self.looks
            self.tolerated = DYING + 2 * math.sqrt(usual * (1 - usual) / (rows * self.looks))

    def look_at_ranking(self, share: float) -> bool:
        """Take note of the ranking loss over its value at chance; return whether to warn."""
        if math.isfinite(share):
            self.ranking = share if self.ranking is None else 0.8 * self.ranking + 0.2 * share
        self.has_learned |= (self.ranking or OVER) < LEARNED
        is_time = self.step == AT_CHANCE and self.ranking is not None
        return is_time and LEARNS < (self.ranking or 0.0) < OVER and not self.has_learned

    def look_at_terms(self, ranking: float, flops: float, start: float) -> None:
        """Take note of weighted ranking terms and FLOPS, for the first and the largest weight."""
        if self.started_at is None:
            self.first_weight = start * max(ranking, SMALLEST) / flops
        most = math.log(self.share * max(ranking, LARGE) / flops)
        self.log_most = most if self.log_most is None else (self.log_most + most) / 2

    def _steer(self, steps: int) -> None:
        """Set the weight ``steps`` after the look before."""
        assert self.level is not None
        if self.started_at is None and self._may_start(self.level):
            self.started_at, self.first_level = self.step, self.level
        if self.started_at is not None:
            self._follow(self.started_at, self.level, steps)
        self._count_idle(self.level, steps)
        shrinks = self.level > HIGH and self.trend > FLAT and self._shrinks(self.level)
        self.shrunk_steps = self.shrunk_steps + steps if shrinks else 0
        self.status = self._status(self.level)

    def _may_start(self, level: float) -> bool:
        """Whether the fall has stopped by itself, above the target, and the ranking loss learns."""
        ranking = 0.0 if self.ranking is None else self.ranking
        if ranking > OVER:  # scores that are too large shrink, with FLOPS sooner
            return self.step >= FLAT_LOOKS and self.trend > FLAT and level > 0
        has_settled = self.step >= FIRST_LOOKS and self.trend > SETTLED
        return ranking < LEARNS and has_settled and level > 0

    def _follow(self, started_at: int, level: float, steps: int) -> None:
        """Follow the plan: a line from the first level to the aim, which then is held."""
        length = max(LENGTH * (self.planned_steps - started_at), self.planned_steps / 5)
        left = max(started_at + length - self.step, 0.0)
        aim = math.log(AIM)
        height = max(self.first_level - aim, 0.0)
        planned = aim + height * (left / length) ** BEND
        slope = -BEND * height / length * (left / length) ** (BEND - 1)
        gain = min(max(20 / self.planned_steps, 0.025), 0.1)
        rise = min(max(40 / self.planned_steps, 0.06), 0.4)
        # Far above, activations may shrink for long before the first of them die, all at once.
        trend = min(self.trend, self.mass_trend) if level > FAR else self.trend
        change = gain * (level - planned) * (HASTE if level < 0 else 1) + trend - slope
        change = max(min(change, rise), FALL)
        if level + 2 * self.window * trend > aim:  # it will not fall too far
            change = max(change, 0.0)
        if slope:  # the same pressure at fewer dimensions needs a larger weight
            change -= POWER * slope * min(max(2 - trend / slope, 0.0), 1.0)
        ahead, deaths = level + self.window * self.trend, self.more_dead - self.tolerated
        self.brake = max(min(ahead + BELOW, 0.0) - 10 * max(deaths, 0.0), PAUSE)
        is_early = self.step <= self.planned_steps / 3
        at_chance = is_early and LEARNS < (self.ranking or 0.0) < OVER
        if deaths > 0 or at_chance:
            change = min(change, 0.0)
        if self.unlearns:  # no FLOPS until it has learned again, and then less
            if self.status != UNDONE and self.log_most is not None:
                present = math.log(self.first_weight) + self.log_ratio
                lower = min(present - self.log_most, 0.0) - LESS
                self.share, self.log_most = self.share * math.exp(lower), self.log_most + lower
            self.brake = PAUSE
        else:
            self.share = min(self.share * math.exp(RECOVERY * steps / self.planned_steps), MOST)
        # Down to a bound, too, it falls by steps: a single batch may have set it.
        high = math.log(self.most / self.first_weight) if self.most < math.inf else GREATEST
        change = min(change, max((max(high, LEAST + 1) - self.log_ratio) / steps, FALL))
        self.log_ratio = min(max(self.log_ratio + steps * change, LEAST), GREATEST)

    def _count_idle(self, level: float, steps: int) -> None:
        """Count steps next to no FLOPS, below the target, without an upward trend; others off."""
        share = self.log_ratio + self.brake + POWER * (level - self.first_level)
        is_off = self.weight == 0.0 or share < IDLE
        is_rising = self.planned_steps / 10 * self.trend > HIGH
        is_idle = level < LOW and is_off and not is_rising
        self.idle_steps = max(self.idle_steps + (steps if is_idle else -steps), 0)

    def _status(self, level: float) -> str:
        is_above, is_below = level > HIGH, level < LOW
        if self.more_dead > COLLAPSING:
            how = "under" if self.weight else "without"
            return f"collapsing: most texts are empty {how} FLOPS"
        # What FLOPS has pruned may need longer to come back.
        patience = max(self.planned_steps / 10, 10) * (1 if self.started_at is None else 2)
        was_unreachable = self.status.startswith("unreachable: too sparse") and is_below
        if self.idle_steps >= patience or was_unreachable:
            return "unreachable: too sparse without FLOPS"
        if self.more_dead > self.tolerated and self.started_at is not None:
            return "braking: texts become empty"
        if self.started_at is None:
            is_time = self.step >= AT_CHANCE and self.ranking is not None
            at_chance = is_time and LEARNS < (self.ranking or 0.0) < OVER
            return "waiting: ranking loss at chance" if at_chance else "waiting"
        if self.unlearns:
            return UNDONE
        if self.brake < -0.5:
            return "braking: active dimensions fall below the target"
        if is_above and (self.weight == self.maximum or self.log_ratio == GREATEST):
            return "unreachable: too dense at the largest weight"
        if self.shrunk_steps >= self.planned_steps / 10:
            return "unreachable: activations shrink but stay active"
        if is_above and self.share < MOST and self.weight > self.most / 2:
            return "sparsifying: more FLOPS would undo the ranking loss"
        if is_above and self.weight == self.most:
            return "sparsifying: FLOPS is four times the ranking terms"
        if is_above or is_below:
            return "sparsifying" if is_above else "relaxing"
        return "on target"

    def _shrinks(self, level: float) -> bool:
        """Whether FLOPS is satisfied by small activations instead of few."""
        left = self.mean_activation / self.first_mean
        return left < SHRUNK and left < math.exp(level) / (self.first or 1.0)


def _smoothed(
    level: float, trend: float, seen: float, steps: int, kept: float
) -> tuple[float, float]:
    """Return level and trend after a look, by Holt's method."""
    surprise = seen - (level + steps * trend)
    return seen - kept**2 * surprise, trend + 0.4 * (1 - kept) * surprise / steps
