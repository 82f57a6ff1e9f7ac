"""A controller that adjusts a FLOPS weight until texts have the sparsity you name."""

import logging
import math
import sys
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.checks import check_choice, check_integer, check_number, check_rows
from sparse_losses._core.host_copy import HostCopy
from sparse_losses._core.precision import widest_dtype
from sparse_losses.distributed import num_ranks, sum_over_ranks
from sparse_losses.objective.batch import SpladeBatch
from sparse_losses.objective.objective import ObjectiveOutput, SpladeObjective
from sparse_losses.objective.schedules import controllers_of, count_steps, was_skipped

__all__ = ["CollapseError", "SparsityController"]

_log = logging.getLogger("sparse_losses")

SMALLEST_SHARE = 1e-6  # the lower bound, as a share of the start weight; it counts as 0
NEGLIGIBLE_SHARE = 0.15  # below this share of the start weight, other losses keep the text sparse
# In a crash, AHEAD steps from now CRASH times fewer are active than now, and than the target.
CRASH, AHEAD = 1.5, 8
STILL, PATIENCE = 0.02, 0.25  # a relative change that is none; the share of the pace until then
FAR = 0.6  # log(active / target) above which a fall is no reason to lower the weight
ROOM = 0.1  # the relative distance from the target that counts as on target
# After so many steps InfoNCE should not be between these shares of its value at chance. (It is far
# above where scores are too large.)
AT_CHANCE, LEARNS, OVER = 50, 0.85, 1.2
COLLAPSING = 0.5  # the increase of the share of dead rows that is a collapse
SHRUNK = 0.1  # the share of the first mean activation below which activations have shrunk
# The attributes that make up a state, with an underscore before each.
STATE = ["steps", "log_ratio", "active", "error", "change", "trend", "cut", "is_dying"]
STATE += ["silent_steps", "last_healthy_step", "status", "first", "mean_activation", "ranking"]
# The sizes of the lists in a state, and the types of what is no number; `type` tells bool from int.
SIZES = {"first": 2, "dead": 3, "seen": 7, "sent": 7}
KINDS = {"term": (str,), "status": (str,), "is_dying": (bool,), "dead": (int, float, type(None))}
KINDS |= dict.fromkeys(("steps", "silent_steps", "last_healthy_step"), (int,))
OPTIONAL = ("active", "error", "last_healthy_step", "first", "seen", "sent", "ranking")


REMEDIES = {  # of a status that begins so, where the target was missed
    "unreachable: too sparse": (
        "the ranking loss alone leaves fewer: raise its temperature with dot products, lower it "
        "with cosines"
    ),
    "unreachable: too dense": "raise `maximum`",
    "unreachable: activations": "raise minimum activation, or use dot products",
    "collapsing": "return to a checkpoint with a smaller `start` or learning rate",
    "above": "`calibrate` prunes the rest, or train longer",
    "below": "what is dead hardly comes back: ask for more, then prune by `calibrate`",
}


class CollapseError(RuntimeError):
    """All rows are dead: behind a ReLU no loss has a gradient that revives them.

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
    r"""Adjust the weight of a FLOPS term so that a text keeps ``target_active`` dimensions.

    Let $e = \log(a / \mathrm{target})$, where $a$ is the mean number of active dimensions of the
    rows that have any, smoothed over ``window`` optimiser steps. Let $\Delta e$ be the change of
    $e$ since the last measurement, $k$ steps ago (``every``). Then

    $$\log \lambda \leftarrow \log \lambda
    + \mathrm{clip}(g\, (k\, e + h\, \Delta e),\; -g\, k,\; g\, k)$$

    The first part raises $\lambda$ as long as texts are too dense. The second part opposes every
    change at once, before the texts overshoot the target; it keeps the weight from oscillating.
    $\lambda$ changes by a factor of at most $e^g$ per step (tenfold in 38 steps for $g = 0.06$). It
    rises at a quarter of that pace until the texts begin to change. Above 1.8 times the target it
    does not fall: a contrastive loss prunes dense texts by itself and then stops.

    A crash is a fall that will reach two thirds of the target or less within eight steps. In a
    crash the weight falls by the factor that will be missing. A fall that will end above the target
    is no crash, however fast it is.

    $\lambda$ stays between a millionth of its start (which counts as 0: the term is left out) and
    ``maximum``; while it is at a bound, no error accumulates. If it is below 15% of its start and
    too few dimensions are active, without an upward trend, the target is reported as unreachable:
    the other losses alone leave fewer.

    A model that can make all activations small at once (by a gate or a scale) satisfies FLOPS
    without making any dimension 0. The target is reported as unreachable if texts are still too
    dense and the mean activation has fallen to a tenth of its first value, and by a larger factor
    than the number of dimensions.

    A ranking loss that learns nothing shows in no count. If InfoNCE is still at chance after 50
    steps (the logarithm of the number of candidates), a warning says so.

    Rows without any active dimension are dead. When their share increases, by ``dead_share`` and
    beyond chance, the weight is halved at once. It does not rise while the share is above the first
    one (a text without tokens is always dead). If all rows are dead for ``window`` steps, training
    cannot recover, and ``CollapseError`` is raised.

    Args:
        objective: the objective whose weight is adjusted; no schedule and no other controller may
            set the same weight. ``None``: for a loop of losses without an objective.
        term: ``"document_flops"`` or ``"query_flops"``.
        weight: without an ``objective``: the first $\lambda$ of ``controller.weight``, a 0-d tensor
            on the CPU, by which you multiply your FLOPS loss.
        target_active: active dimensions per text, > 0 and below the vocabulary's size.
        start: the first $\lambda$; default: the objective's weight.
        maximum: upper bound of $\lambda$; default: a million times ``start``.
        ignore_steps: optimiser steps before the first change.
        gain: $g$, > 0.
        horizon: $h$, in optimiser steps: how strongly the controller opposes a change.
        window: optimiser steps over which measurements are smoothed.
        every: optimiser steps between two measurements. The counts of an accelerator are read one
            step later, so that training never waits for them.
        dead_share: increase of the share of dead rows that halves the weight, in [0, 1).

    Attributes:
        weight: the present $\lambda$ as a 0-d tensor, or ``None`` with an objective.
        checkpoint: the one that you saved last, for the message of ``CollapseError``.

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

        Without an objective:

        >>> from sparse_losses.functional import flops_loss
        >>> activations = torch.ones(4, 8, requires_grad=True)
        >>> controller = SparsityController(weight=0.5, target_active=2)
        >>> controller.observe(activations)
        >>> loss = controller.weight * flops_loss(activations)  # and your other losses
        >>> controller.step()  # after optimizer.step(), or attach(optimizer)
    """

    def __init__(
        self,
        objective: SpladeObjective | None = None,
        term: str = "document_flops",
        *,
        weight: float | None = None,
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
        if (objective is None) == (weight is None):
            raise TypeError("expected either `objective` or `weight`, got both or neither")
        if objective is not None and not isinstance(objective, SpladeObjective):
            kind = type(objective).__name__
            raise TypeError(f"expected `objective` to be a SpladeObjective, got {kind}")
        check_choice("term", term, ("document_flops", "query_flops"))
        check_number("target_active", target_active, minimum=0.0, exclusive=True)
        if weight is not None and start is not None:
            raise TypeError("expected no `start` beside `weight`, which is the first one")
        if objective is not None:
            _check_only_master(objective, term)
        name = "start" if weight is None else "weight"
        start = _start_weight(objective, term, name, start if weight is None else weight)
        if maximum is None:
            maximum = min(1e6 * start, sys.float_info.max)
        check_number("maximum", maximum, minimum=start)
        check_integer("ignore_steps", ignore_steps, minimum=0)
        check_number("gain", gain, minimum=0.0, exclusive=True)
        check_number("horizon", horizon, minimum=0.0)
        check_number("window", window, minimum=1.0)
        check_integer("every", every, minimum=1)
        check_number("dead_share", dead_share, minimum=0.0)
        if dead_share >= 1:
            raise ValueError(f"expected `dead_share` in [0, 1), got {dead_share!r}")
        is_whole = isinstance(target_active, Integral)
        self.target_active = int(target_active) if is_whole else float(target_active)
        self.objective, self.term = objective, term
        self.start, self.maximum = start, float(maximum)
        self.ignore_steps, self.every = int(ignore_steps), int(every)
        self.gain, self.horizon, self.window = float(gain), float(horizon), float(window)
        self.dead_share = float(dead_share)
        self.checkpoint: str | None = None

        self.weight = torch.zeros(()) if objective is None else None
        # Both tensors hold active entries, live rows, dead rows, sum of the activations, batches,
        # sum of InfoNCE over its value at chance, batches of InfoNCE:
        # `_new` of this rank since the last step, `_seen` of all ranks since the last measurement.
        self._new: Tensor | None = None
        self._seen: Tensor | None = None
        self._sent: HostCopy[list[float]] | None = None  # a measurement on its way to the host
        self._steps = 0
        self._log_ratio = 0.0  # log(weight / start)
        # The smoothed log(active / target): its level, its last change, and its trend.
        self._error: float | None = None
        self._change = 0.0
        self._trend = 0.0
        self._active: float | None = None  # the level as a number of dimensions
        self._cut = 0.0  # the log weight's decrease so far in the present crash
        # Shares of dead rows: the last one, the average, the first one.
        self._dead = self._usually_dead = 0.0
        self._first_dead: float | None = None
        self._is_dying, self._silent_steps = False, 0
        self._first: list[float] | None = None  # active dimensions, mean activation
        self._mean_activation = 0.0
        self._last_healthy_step: int | None = None
        self._ranking: float | None = None  # the smoothed share of InfoNCE's value at chance
        self._status = "waiting"
        self._write()
        if objective is not None:
            controllers_of(objective)[term] = self

    def observe(self, activations: Tensor) -> None:
        """Count a batch ``[..., V]`` without a device wait; the batches of a step add up."""
        check_rows("activations", activations)
        if self.target_active >= activations.shape[-1]:
            vocab = f"V = {activations.shape[-1]}"
            raise ValueError(f"expected `target_active` below {vocab}, got {self.target_active}")
        with torch.no_grad():
            rows = activations.detach().flatten(0, -2)
            wide = widest_dtype(rows.device)
            mass = rows.sum(1, dtype=wide)  # the sum of a dense row overflows fp16
            is_number = mass.isfinite()  # a row with a NaN is neither live nor dead
            active = (rows > 0).sum(1) * is_number
            live = active > 0
            counts = [active.sum(), live.sum(), (is_number & ~live).sum()]
            mass = torch.where(is_number, mass, 0.0).sum()
            one, zero = torch.ones_like(mass), torch.zeros_like(mass)
            new = torch.stack([*(count.to(wide) for count in counts), mass, one, zero, zero])
            self._new = _added(self._new, new)

    def step(self) -> None:
        """Take note of an optimiser step; every rank must call it.

        Raises:
            CollapseError: if every row seen in the last ``window`` steps is dead.
            RuntimeError: if no rank observed a batch, or other code changed the weight.
        """
        if self._sent is not None:
            self._decide()  # before the count: the measurement belongs to the last step
        self._steps += 1
        self._sum_over_ranks()
        if self._steps % self.every == 0:
            seen = torch.zeros(7) if self._seen is None else self._seen
            self._sent, self._seen = HostCopy(seen, Tensor.tolist), None
            if self._sent.is_here:
                self._decide()

    def _decide(self) -> None:
        """Read a measurement and set the weight."""
        assert self._sent is not None
        active, live, dead, mass, batches, ranking, ranked = self._sent.read()
        self._sent = None
        held = self._written if self.objective is None else self.objective.weights.get(self.term)
        if (weight := held) != self._written:
            raise RuntimeError(
                f"expected objective.weights[{self.term!r}] to be {self._written} as it was set "
                f"here, got {weight}: only the controller may set it"
            )
        if not batches:
            raise RuntimeError("expected `observe(activations)` before `step()`, got none")
        if ranked:
            self._note_ranking(ranking / ranked)
        if live + dead == 0:  # no texts, or only rows with NaN
            return
        self._count_dead(dead, live + dead)
        if live == 0:
            self._silent_steps += self.every
            if self._silent_steps >= self.window:
                self._status = "collapsed"
                raise CollapseError(self._collapse_message())
            self._log_ratio = max(self._log_ratio - math.log(2.0), math.log(SMALLEST_SHARE))
            self._write()
            return
        self._silent_steps = 0
        if dead == 0:
            self._last_healthy_step = self._steps
        self._mean_activation = mass / active
        if self._first is None:
            self._first = [active / live, self._mean_activation]
        self._look(active / live)
        if self._steps > self.ignore_steps or self._crash() > 0 or self._is_dying:
            self._steer()

    def _note_ranking(self, share: float) -> None:
        """Warn, once, of a ranking loss that is still at chance after 50 steps."""
        old = self._ranking
        if not math.isfinite(share) or (old == 0.0 and self._steps >= AT_CHANCE):
            return
        kept = math.exp(-self.every / self.window)
        self._ranking = share if old is None else share + kept * (old - share)
        if self._steps >= AT_CHANCE:
            if LEARNS < self._ranking < OVER:
                message = (
                    "after step %d: InfoNCE is %.0f%% of its value at chance: nothing is learned "
                    "yet, whatever the number of active dimensions"
                )
                _log.warning(message, self._steps, 100 * self._ranking)
            self._ranking = 0.0  # it was looked at

    def _sum_over_ranks(self) -> None:
        """Add what all ranks observed since the last step, so that all have the same state."""
        new, self._new = self._new, None
        if num_ranks() > 1:
            if new is None:  # zeros: otherwise the others would wait for this rank
                device = self._device()
                new = torch.zeros(7, dtype=widest_dtype(device), device=device)
            new = sum_over_ranks(new)
        self._seen = _added(self._seen, new)

    def _device(self) -> torch.device:
        if self.objective is not None:
            return self.objective.special_token_ids.device
        return torch.device("cpu") if self._seen is None else self._seen.device

    def _count_dead(self, dead: float, rows: float) -> None:
        share, usual = dead / rows, self._usually_dead
        if self._first_dead is None:
            self._first_dead = usual = share
        by_chance = 2 * math.sqrt(usual * (1 - usual) / rows)
        more = share > usual + self.dead_share + by_chance
        self._is_dying = more and share > self._dead
        self._dead = share
        self._usually_dead = usual + (1 - math.exp(-self.every / self.window)) * (share - usual)

    def _look(self, active: float) -> None:
        """Update level and trend by Holt's smoothing."""
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
        """Return how far below ``target / CRASH`` a crash will end, as a logarithm; else 0."""
        assert self._error is not None
        # The trend lags behind the end of a fall, so the last change must confirm it.
        fall = -AHEAD * max(self._trend, self._change / self.every)
        too_few = fall - self._error - math.log(CRASH)
        return max(too_few, 0.0) if fall > math.log(CRASH) else 0.0

    def _most(self) -> float:
        """Return the share of the pace at which the weight may rise: less until texts change."""
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
        # Texts follow the weight with a lag, so what an earlier measurement cut is not cut again.
        cut, self._cut = crash - self._cut, max(crash, self._cut) if crash else 0.0
        if crash:
            change = min(change, -cut) if cut > 0 else min(change, 0.0)
        if self._is_dying:
            change = min(change, -math.log(2.0))
        elif self._dead > (self._first_dead or 0.0) + self.dead_share:
            change = min(change, 0.0)
        low, high = math.log(SMALLEST_SHARE), math.log(self.maximum / self.start)
        self._log_ratio = min(max(self._log_ratio + change, low), high)
        self._write()
        status = self._status_now(crash)
        if status != self._status:
            self._status = status
            is_warning = status.startswith(("unreachable", "backing", "collapsing"))
            level = logging.WARNING if is_warning else logging.INFO
            _log.log(level, "after step %d: %s", self._steps, self)

    def _status_now(self, crash: float) -> str:
        assert self._error is not None
        high = math.log(self.maximum / self.start)
        waver = 2.0 if self._status.startswith("unreachable") else 1.0  # keeps the status stable
        is_above, is_below = self._error > math.log1p(ROOM), self._error < math.log1p(-ROOM)
        if self._dead - (self._first_dead or 0.0) > COLLAPSING:
            is_idle = self._log_ratio < math.log(NEGLIGIBLE_SHARE)
            cause = "at almost no weight of FLOPS" if is_idle else "under FLOPS"
            return f"collapsing: most texts are empty {cause}"
        if self._is_dying:
            return "backing off: texts become empty"
        if crash:
            return "backing off: active dimensions fall too fast"
        is_rising = self.horizon * self._trend >= waver * ROOM
        if is_below and self._log_ratio < math.log(NEGLIGIBLE_SHARE) and not is_rising:
            return "unreachable: too sparse at almost no weight"
        if self._log_ratio == high and is_above:
            return "unreachable: too dense at the largest weight"
        if is_above and self._shrinks():
            return "unreachable: activations shrink but stay active"
        if is_above or is_below:
            return "sparsifying" if is_above else "relaxing"
        return "on target"

    def _shrinks(self) -> bool:
        """Whether FLOPS is satisfied by small activations instead of few."""
        assert self._first is not None
        assert self._active is not None
        active, mean = self._first
        left = self._mean_activation / mean
        return left < SHRUNK and left < self._active / active

    def _write(self) -> None:
        at_floor = self._log_ratio <= math.log(SMALLEST_SHARE)
        weight = min(self.start * math.exp(self._log_ratio), self.maximum)  # despite rounding
        self._written = 0.0 if at_floor else weight
        if self.objective is not None:
            self.objective.weights[self.term] = self._written
        elif self.weight is not None:
            self.weight.fill_(self._written)

    def _collapse_message(self) -> str:
        healthy = self._last_healthy_step
        since = f"last step without dead rows: {healthy}"
        if healthy is None:
            since = "every step had dead rows"
        where = self.checkpoint or "an earlier one; name yours in `controller.checkpoint`"
        return (
            f"all rows are dead at step {self._steps} ({since}), and behind a ReLU they get no "
            f"gradient: return to a checkpoint ({where}) with a smaller `start`, or train "
            "self-reconstruction on signed logits (`return_logits=True`) until rows are alive"
        )

    def attach(self, optimizer: torch.optim.Optimizer) -> "_Handles":
        """Observe the objective's batches and count the optimiser's steps, until ``.remove()``.

        Batches count in training mode with gradients on; without an objective you ``observe`` them.
        Attaching a second time is an error.
        """
        handles: list[Any] = [count_steps(optimizer, self._after_step)]
        if self.objective is not None:
            handles.append(self.objective.register_forward_hook(self._watch, with_kwargs=True))
        return _Handles(*handles)

    def _watch(
        self,
        objective: SpladeObjective,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: ObjectiveOutput,
    ) -> None:
        # A copy of the objective has the hook too, but another controller's weight.
        if objective is not self.objective or not objective.training or not torch.is_grad_enabled():
            return
        batch: SpladeBatch = args[0] if args else kwargs["batch"]
        if (loss := output.terms.get("info_nce")) is not None and self._steps < 2 * AT_CHANCE:
            share = loss.to(widest_dtype(loss.device)) / _chance(objective, batch)
            zero = torch.zeros_like(share)
            self._new = _added(self._new, torch.stack([zero] * 5 + [share, torch.ones_like(share)]))
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
        """Return the last measurement and the weight, for a logger; ``None`` before the first."""
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
        """Return the state as one line."""
        active = "?" if self._active is None else f"{self._active:.1f}"
        return (
            f"{self.term}: {active} active of {self.target_active:g} wanted, "
            f"weight {self._written:.4g}, {self._status}"
        )

    def outcome(self) -> str:
        """Return the state as one line, with what to do where the target was missed."""
        if self._active is None or self._error is None:
            return f"{self}: nothing was measured; `attach` it, or call `observe` and `step`"
        if abs(self._active / self.target_active - 1) <= ROOM:
            return str(self)
        where = "above" if self._active > self.target_active else "below"
        found = [text for name, text in REMEDIES.items() if self._status.startswith(name)]
        return f"{self}; {found[0] if found else REMEDIES[where]}"

    def __repr__(self) -> str:
        """Return the state with the name of the class, for a list of schedules."""
        return f"{type(self).__name__}({self})"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues from; after a step the same on every rank."""
        seen = _added(self._seen, self._new)
        return {
            "term": self.term,
            "target": self.target_active,
            "start": self.start,
            "maximum": self.maximum,
            **{name: getattr(self, f"_{name}") for name in STATE},
            "dead": [self._dead, self._usually_dead, self._first_dead],
            "seen": None if seen is None else seen.tolist(),
            "sent": None if self._sent is None else self._sent.read(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state and set the weight; target and gain stay those of this controller.

        A state of another target is logged as a warning, and what it measured counts against the
        new one. After an error nothing has changed: a ``TypeError`` for values of other types, a
        ``ValueError`` for the state of another term or version or for impossible numbers.
        """
        kind = type(self).__name__
        if not isinstance(state, Mapping):
            raise TypeError(f"expected the state of a {kind}, got {type(state).__name__}")
        if others := sorted(map(str, self.state_dict().keys() ^ state.keys())):
            names = ", ".join(others)
            raise ValueError(
                f"expected the state of this version's {kind}, got one that lacks or adds {names}"
            )
        if state["term"] != self.term:
            raise ValueError(f"expected the state for {self.term!r}, got one for {state['term']!r}")
        _check_types(state)
        for name in ("target", "start", "maximum"):
            check_number(name, state[name], minimum=0.0, exclusive=True)
        if state["log_ratio"] > math.log(state["maximum"] / state["start"]):
            raise ValueError(f"expected a smaller `log_ratio`, got {state['log_ratio']}")
        for name in STATE:
            setattr(self, f"_{name}", state[name])
        self._dead, self._usually_dead, self._first_dead = state["dead"]
        self.start, self.maximum, target = state["start"], state["maximum"], state["target"]
        if self._error is not None:
            self._error += math.log(target) - math.log(self.target_active)
        if target != self.target_active:
            message = "%s: the target is %g, in the loaded state it was %g"
            _log.warning(message, self.term, self.target_active, target)
        seen, sent = (
            None if state[name] is None else torch.tensor(state[name], dtype=torch.float64)
            for name in ("seen", "sent")
        )
        self._new, self._seen = None, seen
        self._sent = None if sent is None else HostCopy(sent, Tensor.tolist)
        if self._error is not None and target != self.target_active:
            self._status = self._status_now(self._crash())
        self._write()


def _check_types(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        values = value if name in SIZES and isinstance(value, (list, tuple)) else [value]
        kinds = KINDS.get(name, (int, float))
        is_right = len(values) == SIZES.get(name, 1) and all(type(x) in kinds for x in values)
        if not (is_right or (value is None and name in OPTIONAL)):
            raise TypeError(f"expected a state with another type of {name!r}, got {value!r}")
        if not all(math.isfinite(x) for x in values if isinstance(x, float)):
            raise ValueError(f"expected finite numbers as {name!r}, got {value!r}")


def _chance(objective: SpladeObjective, batch: SpladeBatch) -> float:
    """Return InfoNCE's value if all candidates score alike."""
    loss, negative = objective.info_nce, batch.negative
    ranks = num_ranks() if objective.gather or loss.gather else 1
    candidates = ranks * len(batch.positive.activations) if loss.in_batch else 1
    if negative is not None:
        shared = ranks if negative.activations.ndim == 2 else 1
        candidates += shared * negative.activations.shape[-2]
    return math.log(candidates) if candidates > 1 else math.inf


def _start_weight(
    objective: SpladeObjective | None, term: str, name: str, start: float | None
) -> float:
    """Return the first weight as a plain number: ``torch.load`` refuses a state with NumPy's."""
    if start is None:
        assert objective is not None
        held = objective.weights.get(term, 0.0)
        if isinstance(held, Tensor) or held == 0:
            raise ValueError(
                f"expected a number > 0 as objective.weights[{term!r}], or `start`, got {held}"
            )
        start = held
    check_number(name, start, minimum=0.0, exclusive=True)
    return float(start)


def _check_only_master(objective: SpladeObjective, term: str) -> None:
    """Raise if a schedule or another controller sets the weight."""
    if term in objective.scheduled:
        raise ValueError(
            f"expected only the controller to set the weight of {term!r}, got an objective whose "
            "TrainingSchedule sets it too: leave it out of the warm-ups and phases"
        )
    if term in controllers_of(objective):
        raise ValueError(
            f"expected one controller of {term!r}, got a second one of the same objective: "
            "delete the first"
        )


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one.to(other) + other


class _Handles:
    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
