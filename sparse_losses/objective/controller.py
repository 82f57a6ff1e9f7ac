"""Names the sparsity instead of the weight: a controller that steers a FLOPS weight."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.checks import check_choice, check_integer, check_number
from sparse_losses._core.later import Later
from sparse_losses._core.precision import widest_dtype
from sparse_losses.distributed import num_ranks, sum_over_ranks
from sparse_losses.objective.batch import SpladeBatch
from sparse_losses.objective.objective import SpladeObjective
from sparse_losses.objective.schedules import count_steps, was_skipped

__all__ = ["CollapseError", "SparsityController"]

_log = logging.getLogger("sparse_losses")

SMALLEST_SHARE = 1e-6  # of the weight it starts with; what is reached there is called 0
NEGLIGIBLE_SHARE = 0.15  # from where on down it is not the term that keeps the text sparse
# A crash: so many times fewer, so many steps from now, and so many times below the target then.
CRASH, AHEAD = 1.5, 8
STILL, PATIENCE = 0.02, 0.25  # a relative change; a share of the pace
FAR = 0.6  # of log(active / target): from there a fall is no reason to lower the weight
ROOM = 0.1  # around the target, relative
SHRUNK = 0.1  # times the first mean activation


class CollapseError(RuntimeError):
    """Every row is silent: behind a ReLU no loss brings one back.

    Examples:
        >>> import torch
        >>> from sparse_losses import CollapseError, SparsityController, SpladeObjective
        >>> objective = SpladeObjective({"document_flops": 1.0})
        >>> controller = SparsityController(objective, target_active=2, every=1, window=1)
        >>> controller.checkpoint = "step-900.pt"  # the last one you saved
        >>> controller.observe(torch.zeros(4, 8))
        >>> try:
        ...     controller.step()
        ... except CollapseError as error:
        ...     print("step-900.pt" in str(error))
        True
    """


class SparsityController:
    r"""Steers the weight of a FLOPS term so that a text keeps ``target_active`` dimensions.

    With $e = \log(a / \mathrm{target})$, where $a$ is the mean number of active dimensions of the
    rows that have any, smoothed over ``window`` optimiser steps, and $\Delta e$ what changed since
    the last look, $k$ steps ago (``every``):

    $$\log \lambda \leftarrow \log \lambda
    + \mathrm{clip}(g\, (k\, e + h\, \Delta e),\; -g\, k,\; g\, k)$$

    The first part raises $\lambda$ as long as texts are too dense. The second part answers a change
    at once, against its direction, before it has carried the texts past the target: it is what
    keeps the weight from swinging. $\lambda$ moves by a factor of at most $e^g$ a step (tenfold in
    38 steps for $g = 0.06$), and rises at a quarter of that pace while texts are as they were at
    first. At 1.8 times the target and more it does not fall, as a contrastive loss prunes dense
    texts by itself and then stops.

    A fall that will go through the target, to two thirds of it within eight steps, is a crash, and
    the weight falls by the factor that will be missing. A fall that will stay above is no crash,
    however fast it is.

    $\lambda$ stays between a millionth of its start (which counts as 0: the term is left out) and
    ``maximum``; at a bound it waits there, and nothing winds up. Where less than 15% of the start
    is left and fewer are active still, without a trend to more, the target is reported as
    unreachable: the other losses alone leave fewer.

    What it counts are dimensions above 0. A model that can make all activations small at once (a
    gate, a scale) satisfies FLOPS that way, and no dimension goes out. It is reported as
    unreachable when the text is too dense still, and the mean activation has fallen to a tenth of
    what it was at first, and by a larger factor than the number of dimensions.

    Rows without any active dimension are dead. As they become more, by ``dead_share`` and beyond
    chance, the weight is halved at once, and it does not rise while there are more than at first
    (a text without tokens is always dead). If for ``window`` steps no row is alive, training cannot
    recover, and a ``CollapseError`` says so.

    Args:
        objective: whose weight is steered; no schedule may set the same one.
        term: ``"document_flops"`` or ``"query_flops"``.
        target_active: active dimensions per text, > 0, below the vocabulary's size.
        start: $\lambda$ to begin with; default: the objective's weight.
        maximum: upper bound of $\lambda$; default: a million times ``start``.
        ignore_steps: optimiser steps before the first change.
        gain: $g$, > 0.
        horizon: $h$, in optimiser steps: how strongly a change is answered.
        window: optimiser steps over which looks are smoothed.
        every: steps between two looks at the numbers. What an accelerator counted is read a step
            later, so that training never waits for it.
        dead_share: of rows, in [0, 1).

    Examples:
        >>> import torch
        >>> from sparse_losses import SparsityController, SpladeObjective
        >>> objective = SpladeObjective({"info_nce": 1.0, "document_flops": 0.01})
        >>> controller = SparsityController(objective, target_active=2, ignore_steps=0, every=1)
        >>> controller.observe(torch.ones(4, 8))  # eight active: too many
        >>> controller.step()
        >>> objective.weights["document_flops"] > 0.01
        True
        >>> controller.report()["active"]
        8.0
    """

    def __init__(
        self,
        objective: SpladeObjective,
        term: str = "document_flops",
        *,
        target_active: float,
        start: float | None = None,
        maximum: float | None = None,
        ignore_steps: int = 20,
        gain: float = 0.06,
        horizon: float = 25.0,
        window: float = 8.0,
        every: int = 5,
        dead_share: float = 0.01,
    ) -> None:
        check_choice("term", term, ("document_flops", "query_flops"))
        check_number("target_active", target_active, minimum=0.0, exclusive=True)
        if term in objective.scheduled:
            raise ValueError(
                f"expected {term!r} to be steered by one alone, got an objective whose "
                f"TrainingSchedule sets its weight: make both anew, and leave {term!r} out of the "
                "schedule's warm-ups and phases"
            )
        if start is None:
            held = objective.weights.get(term, 0.0)
            if isinstance(held, Tensor) or held == 0:
                raise ValueError(
                    f"expected a number > 0 as objective.weights[{term!r}], or `start`, got {held}"
                )
            start = held
        check_number("start", start, minimum=0.0, exclusive=True)
        if maximum is None:
            maximum = 1e6 * start
        check_number("maximum", maximum, minimum=start)
        check_integer("ignore_steps", ignore_steps, minimum=0)
        check_number("gain", gain, minimum=0.0, exclusive=True)
        check_number("horizon", horizon, minimum=0.0)
        check_number("window", window, minimum=1.0)
        check_integer("every", every, minimum=1)
        check_number("dead_share", dead_share, minimum=0.0)
        if dead_share >= 1:
            raise ValueError(f"expected `dead_share` in [0, 1), got {dead_share!r}")
        self.objective, self.term, self.target_active = objective, term, target_active
        self.start, self.maximum = start, maximum
        self.ignore_steps, self.gain, self.horizon = ignore_steps, gain, horizon
        self.window, self.every, self.dead_share = window, every, dead_share
        self.checkpoint: str | None = None

        # Active entries, live rows, dead rows, sum of the activations, batches: on this rank since
        # the last step, and on all ranks since the last look.
        self._new: Tensor | None = None
        self._seen: Tensor | None = None
        self._sent: Later[list[float]] | None = None  # a look that is on its way to the host
        self._steps = 0
        self._log_ratio = 0.0  # of the weight to its start
        # Of log(active / target), smoothed: its level, what the last look changed, and the trend.
        self._error: float | None = None
        self._change = 0.0
        self._trend = 0.0
        self._active: float | None = None  # what the level stands for
        self._cut = 0.0  # what the weight's logarithm lost to the crash that goes on
        # Shares of dead rows: at the last look, on average, at the first one.
        self._dead = self._usually_dead = 0.0
        self._first_dead: float | None = None
        self._is_dying, self._silent_steps = False, 0
        self._first: tuple[float, float] | None = None  # active dimensions, mean activation
        self._mean_activation = 0.0
        self._last_healthy_step: int | None = None
        self._status = "waiting"
        self._write()

    def observe(self, activations: Tensor) -> None:
        """Counts a batch ``[..., V]``; waits for nothing. Several a step add up."""
        if activations.ndim < 2:
            raise ValueError(
                f"expected `activations` of shape [..., V], got {list(activations.shape)}"
            )
        if self.target_active >= activations.shape[-1]:
            raise ValueError(
                f"expected `target_active` below V = {activations.shape[-1]}, got "
                f"{self.target_active}"
            )
        with torch.no_grad():
            rows = activations.detach().flatten(0, -2)
            wide = widest_dtype(rows.device)
            mass = rows.sum(1, dtype=wide)  # in fp16 a dense row's sum would not be finite
            is_number = mass.isfinite()  # a row with a NaN says nothing
            active = (rows > 0).sum(1) * is_number
            live = active > 0
            counts = [active.sum(), live.sum(), (is_number & ~live).sum()]
            mass = torch.where(is_number, mass, 0.0).sum()
            new = torch.stack([*(count.to(wide) for count in counts), mass, torch.ones_like(mass)])
            self._new = _added(self._new, new)

    def step(self) -> None:
        """One optimiser step was taken; of several ranks, every one calls it.

        Raises:
            CollapseError: if every row seen in the last ``window`` steps is dead.
            RuntimeError: if nothing was observed (on any rank), or someone else changed the weight.
        """
        if self._sent is not None:
            self._decide()  # as if the step were not over yet
        self._steps += 1
        self._share()
        if self._steps % self.every == 0:
            seen = torch.zeros(5) if self._seen is None else self._seen
            self._sent, self._seen = Later(seen, Tensor.tolist), None
            if self._sent.is_here:
                self._decide()

    def _decide(self) -> None:
        """Reads what a look found, and sets the weight."""
        assert self._sent is not None
        active, live, dead, mass, batches = self._sent.read()
        self._sent = None
        if self.objective.weights.get(self.term) != self._written:
            raise RuntimeError(
                f"expected objective.weights[{self.term!r}] to be {self._written} as it was set "
                f"here, got {self.objective.weights.get(self.term)}: let one alone steer it"
            )
        if not batches:
            raise RuntimeError("expected `observe(activations)` before `step()`, got none")
        if live + dead == 0:  # no text, or nothing but NaN
            return
        self._count_dead(dead, live + dead)
        if live == 0:
            self._silent_steps += self.every
            if self._silent_steps >= self.window:
                raise CollapseError(self._obituary())
            self._log_ratio = max(self._log_ratio - math.log(2.0), math.log(SMALLEST_SHARE))
            self._write()
            return
        self._silent_steps = 0
        if dead == 0:
            self._last_healthy_step = self._steps
        self._mean_activation = mass / active
        if self._first is None:
            self._first = active / live, self._mean_activation
        self._look(active / live)
        if self._steps > self.ignore_steps or self._crash() > 0 or self._is_dying:
            self._steer()

    def _share(self) -> None:
        """Adds what all ranks observed since the last step.

        Every step, so that all know the same after it and any of them may save the state. A rank
        that observed nothing adds nothing, and leaves nobody waiting.
        """
        new, self._new = self._new, None
        if num_ranks() > 1:
            if new is None:
                device = self.objective.special_token_ids.device
                new = torch.zeros(5, dtype=widest_dtype(device), device=device)
            new = sum_over_ranks(new)
        self._seen = _added(self._seen, new)

    def _count_dead(self, dead: float, rows: float) -> None:
        """Takes in a new share of dead rows, and says whether they become more."""
        share, usual = dead / rows, self._usually_dead
        if self._first_dead is None:
            self._first_dead = usual = share
        by_chance = 2 * math.sqrt(usual * (1 - usual) / rows)
        more = share > usual + self.dead_share + by_chance
        self._is_dying = more and share > self._dead
        self._dead = share
        self._usually_dead = usual + self._share_of_a_look * (share - usual)

    @property
    def _share_of_a_look(self) -> float:
        """In the average share of dead rows."""
        return 1 - math.exp(-self.every / self.window)

    def _look(self, active: float) -> None:
        """Takes a new mean into level and trend, as Holt's smoothing does."""
        error = math.log(active / self.target_active)
        if self._error is None:
            self._error, self._active = error, active
            return
        kept = math.exp(-self.every / self.window)
        before, expected = self._error, self._error + self.every * self._trend
        self._error = expected + (1 - kept**2) * (error - expected)
        self._change = self._error - before
        self._trend += (1 - kept) ** 2 * (error - expected) / self.every
        self._active = self.target_active * math.exp(self._error)

    def _crash(self) -> float:
        """By how much, in logarithms, a crash will end too low; 0 if there is none."""
        assert self._error is not None
        # The trend goes on for a while after a fall has ended: the last look has to agree.
        fall = -AHEAD * max(self._trend, self._change / self.every)
        too_few = fall - self._error - math.log(CRASH)
        return max(too_few, 0.0) if fall > math.log(CRASH) else 0.0

    def _most(self) -> float:
        """How fast the weight may rise: slowly while texts are as they were at first.

        All dimensions are on then, say, and what the weight does to them cannot be seen yet.
        """
        assert self._first is not None
        assert self._active is not None
        has_moved = abs(math.log(self._active / self._first[0])) > STILL
        return 1.0 if has_moved else PATIENCE

    def _steer(self) -> None:
        assert self._error is not None
        pace, crash = self.gain * self.every, self._crash()
        change = self.gain * (self.every * self._error + self.horizon * self._change)
        change = min(max(change, -pace), pace * self._most())
        if self._error > FAR:
            change = max(change, 0.0)
        # What was made up for already is still on its way: texts follow the weight with a lag.
        cut, self._cut = crash - self._cut, max(crash, self._cut) if crash else 0.0
        if crash:
            change = min(change, -cut) if cut > 0 else min(change, 0.0)
        if self._is_dying:
            change = min(change, -math.log(2.0))
        elif self._dead > (self._first_dead or 0.0) + self.dead_share:
            change = min(change, 0.0)
        if self._steps <= self.ignore_steps:  # which holds for all but the brakes
            change = min(change, 0.0)
        low, high = math.log(SMALLEST_SHARE), math.log(self.maximum / self.start)
        self._log_ratio = min(max(self._log_ratio + change, low), high)
        self._write()
        waver = 2.0 if self._status.startswith("unreachable") else 1.0  # what is said is kept to
        is_above, is_below = self._error > math.log1p(ROOM), self._error < math.log1p(-ROOM)
        if self._is_dying:
            status = "backing off: rows fall silent"
        elif crash:
            status = "backing off: dimensions go out too fast"
        elif (
            is_below
            and self._log_ratio < math.log(NEGLIGIBLE_SHARE)
            and self.horizon * self._trend < waver * ROOM  # nor is it on its way back
        ):
            status = "unreachable: fewer are active with hardly any weight"
        elif self._log_ratio == high and is_above:
            status = "unreachable: more are active at the largest weight"
        elif is_above and self._shrinks():
            status = "unreachable: activations shrink instead of going out"
        elif is_above or is_below:
            status = "sparsifying" if is_above else "relaxing"
        else:
            status = "on target"
        if status != self._status:
            self._status = status
            level = (
                logging.WARNING if status.startswith(("unreachable", "backing")) else logging.INFO
            )
            _log.log(level, "after step %d: %s", self._steps, self)

    def _shrinks(self) -> bool:
        """Whether FLOPS is satisfied by small activations, not by few."""
        assert self._first is not None
        assert self._active is not None
        active, mean = self._first
        left = self._mean_activation / mean
        return left < SHRUNK and left < self._active / active

    def _write(self) -> None:
        at_floor = self._log_ratio <= math.log(SMALLEST_SHARE)
        self._written = 0.0 if at_floor else self.start * math.exp(self._log_ratio)
        self.objective.weights[self.term] = self._written

    def _obituary(self) -> str:
        healthy = self._last_healthy_step
        since = (
            "none was ever alive" if healthy is None else f"the last without a dead row: {healthy}"
        )
        where = self.checkpoint or "one from before; name yours in `controller.checkpoint`"
        return (
            f"every row is silent at step {self._steps} ({since}), and behind a ReLU nothing gets "
            f"a gradient: return to a checkpoint ({where}), with a smaller `start`"
        )

    def attach(self, optimizer: torch.optim.Optimizer) -> "_Handles":
        """Observes the objective's batches and counts the optimiser's steps by itself.

        Batches count in training mode with gradients on. ``.remove()`` on what it returns ends it.

        Raises:
            RuntimeError: if it counts this optimiser's steps already.
        """
        steps = count_steps(optimizer, self._after_step)
        return _Handles(steps, self.objective.register_forward_hook(self._watch, with_kwargs=True))

    def _watch(
        self, objective: SpladeObjective, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
    ) -> None:
        # A copy of the objective brings the hook along, and is another's.
        if objective is not self.objective or not objective.training or not torch.is_grad_enabled():
            return
        batch: SpladeBatch = args[0] if args else kwargs["batch"]
        if self.term == "query_flops":
            self.observe(batch.anchor.activations)
            return
        self.observe(batch.positive.activations)
        if batch.negative is not None:
            self.observe(batch.negative.activations)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not was_skipped(optimizer):
            self.step()

    def report(self) -> dict[str, float | str | None]:
        """What it saw last and did about it, for a logger; ``None`` before the first look."""
        return {
            "step": self._steps,
            "target": self.target_active,
            "active": self._active,
            "dead_rows": None if self._first_dead is None else self._dead,
            "weight": self._written,
            "mean_activation": None if self._first is None else self._mean_activation,
            "status": self._status,
        }

    def __str__(self) -> str:
        """One line."""
        active = "?" if self._active is None else f"{self._active:.1f}"
        return (
            f"{self.term}: {active} active of {self.target_active:g} wanted, "
            f"weight {self._written:.4g}, "
            f"{self._status}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to go on as this one would.

        After a step it is the same on every rank.
        """
        seen = _added(self._seen, self._new)
        return {
            "term": self.term,
            "steps": self._steps,
            "log_ratio": self._log_ratio,
            "active": self._active,
            "error": self._error,
            "change": self._change,
            "trend": self._trend,
            "cut": self._cut,
            "dead": [self._dead, self._usually_dead, self._first_dead],
            "is_dying": self._is_dying,
            "silent_steps": self._silent_steps,
            "last_healthy_step": self._last_healthy_step,
            "status": self._status,
            "first": self._first,
            "mean_activation": self._mean_activation,
            "seen": None if seen is None else seen.tolist(),
            "sent": None if self._sent is None else self._sent.read(),
            "start": self.start,
            "maximum": self.maximum,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, and sets the weight; target and gain are those it was made with.

        Raises:
            ValueError: for the state of something else, or of another term's controller.
        """
        known = self.state_dict().keys()
        if missing := sorted(known - state.keys()):
            raise ValueError(
                f"expected the state of a SparsityController, got one without {', '.join(missing)}"
            )
        if unknown := sorted(map(str, state.keys() - known)):
            raise ValueError(
                "expected the state of this version's SparsityController, got one with "
                f"{', '.join(unknown)}"
            )
        if state["term"] != self.term:
            raise ValueError(f"expected the state for {self.term!r}, got {state['term']!r}'s")
        for name, value in state.items():
            numbers = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(x, float) and not math.isfinite(x) for x in numbers):
                raise ValueError(f"expected finite numbers as {name!r} of the state, got {value}")
        for name, size in {"dead": 3, "first": 2, "seen": 5, "sent": 5}.items():
            if state[name] is not None and len(state[name]) != size:
                raise ValueError(
                    f"expected {size} numbers as {name!r} of the state, got {state[name]}"
                )
        for name in ("steps", "silent_steps"):
            check_integer(name, state[name], minimum=0)
        check_number("start", state["start"], minimum=0.0, exclusive=True)
        check_number("maximum", state["maximum"], minimum=state["start"])
        self._steps, self._log_ratio = state["steps"], state["log_ratio"]
        self._active, self._error = state["active"], state["error"]
        self._change, self._trend, self._cut = state["change"], state["trend"], state["cut"]
        self._dead, self._usually_dead, self._first_dead = state["dead"]
        self._is_dying, self._silent_steps = state["is_dying"], state["silent_steps"]
        self._last_healthy_step = state["last_healthy_step"]
        self._status, self.start, self.maximum = state["status"], state["start"], state["maximum"]
        self._first, self._mean_activation = state["first"], state["mean_activation"]
        seen = state["seen"]
        self._seen = None if seen is None else torch.tensor(seen, dtype=torch.float64)
        sent = state["sent"]
        values = torch.tensor(sent or [], dtype=torch.float64)
        self._sent = None if sent is None else Later(values, Tensor.tolist)
        self._new = None
        self._write()


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one.to(other) + other


class _Handles:
    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
