"""A controller that brings a FLOPS weight to where texts have the sparsity you name."""

import base64
import dataclasses
import logging
import math
import sys
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_losses._core.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_rows,
    check_shapes,
)
from sparse_losses._core.dtensors import agree, beside_dtensors, full, is_dtensor, ranks_of
from sparse_losses._core.host_copy import HostCopy
from sparse_losses._core.precision import widest_dtype
from sparse_losses.distributed import maximum_over_ranks, num_ranks, sum_over_ranks
from sparse_losses.objective.batch import SpladeBatch
from sparse_losses.objective.descent import HIGH, LOW, Descent
from sparse_losses.objective.objective import TAUGHT, ObjectiveOutput, SpladeObjective
from sparse_losses.objective.schedules import controllers_of, count_steps, was_skipped
from sparse_losses.vocabulary.activation_frequency import ActivationFrequency

__all__ = ["CollapseError", "SparsityController"]

_log = logging.getLogger("sparse_losses")

RANKING = ("info_nce", "triplet_margin", "context_distillation", *TAUGHT)
# A measurement: active entries, live rows, dead rows, sum of the activations, batches; of InfoNCE
# over its value at chance, the sum and its batches; of the ranking terms and of FLOPS, likewise.
SIZE = 10
LARGEST = 1e38  # of a weight, which fp32 holds
MEMORY = 10, 100  # steps that the frequencies of `target_posting` remember, a 30th of the run
UNSEEN = 50  # steps without a batch that are an error
OWN = ("steps", "maximum")  # settings, which a resumed run may change

REMEDIES = {  # of a status that begins so, where the target was missed
    "unreachable: too sparse": (
        "the ranking loss alone leaves fewer: raise its temperature with dot products, lower it "
        "with cosines"
    ),
    "unreachable: too dense": "raise `maximum`",
    "unreachable: activations": "raise minimum activation, or use dot products",
    "collapsing": "return to a checkpoint with a smaller learning rate",
    "waiting: ranking": "nothing was learned: change learning rate, temperature or initialisation",
    "braking: ranking loss": "ask for more, train longer, or with a smaller learning rate",
    "braking": "the count still moves: train longer, or with a smaller learning rate",
    "sparsifying: more FLOPS": "ask for more, train longer, or with a smaller learning rate",
    "sparsifying: FLOPS": "train longer, or with a larger learning rate",
    "above": "`calibrate` prunes the rest, or train longer",
    "below": "what is dead hardly comes back: ask for more, then prune by `calibrate`",
}


class CollapseError(RuntimeError):
    """All rows are dead: behind a ReLU no loss has a gradient that revives them.

    Examples:
        >>> import torch
        >>> from sparse_losses import CollapseError, SparsityController
        >>> controller = SparsityController(weight=1.0, target_active=2)
        >>> controller.checkpoint = "step-900.pt"  # the last one you saved
        >>> try:
        ...     for _ in range(20):
        ...         controller.observe(torch.zeros(4, 8))
        ...         controller.step()
        ... except CollapseError as error:
        ...     print("step-900.pt" in str(error))
        True
    """


class SparsityController:
    r"""Set the weight of a FLOPS term so that a text keeps ``target_active`` dimensions.

    With ``target_posting`` instead, the longest posting list holds that share of the texts.

    A dimension that is dead behind a ReLU hardly comes back, and pruning from above is nearly free.
    So the controller comes from above, and there is no weight to guess:

    1. It waits with the weight 0 until the active dimensions have stopped falling by themselves and
       the ranking loss is below chance.
    2. The first weight makes FLOPS the share ``start`` of the ranking terms. From there the weight
        follows a plan: $e = \log(a / \mathrm{target})$, where $a$ is the smoothed mean number of
        active dimensions of the rows that have any, falls to $\log 1.15$ at 60% of the remaining
        ``steps``, the slower the nearer it comes, and stays there: calibration prunes the rest.
        With the planned level $p$, the trend $\dot e$ and the planned trend $\dot p$ each step
        changes

        $$\log \lambda \leftarrow \log \lambda + g\, (e - p) + (\dot e - \dot p) - 1.9\, \dot p$$

        where the last part keeps the pressure as FLOPS falls with the dimensions. A fall that will
        end above the aim lowers no weight. FLOPS is at most four times the ranking terms, where
        these are known: more would not act sooner, and then far too strongly.
    3. It brakes as soon as a fall would end below the target, while texts die, and while a ranking
       loss that had learned is back at chance: if need be, down to 0. After the latter, FLOPS
       over the ranking terms is at most a third of the ratio that undid them; the bound then rises.

    Rows without any active dimension are dead; those that were dead from the first steps on (texts
    of unknown tokens) do not count. If all rows stay dead, training cannot recover, and
    ``CollapseError`` is raised. The target is reported as unreachable if the other losses alone
    leave fewer, if ``maximum`` leaves more, or if activations shrink and stay active (a gate or a
    scale satisfies FLOPS without making any dimension 0). No count shows that a ranking loss learns
    nothing: if InfoNCE is still at chance after 50 steps (the logarithm of the number of
    candidates), a warning says so.

    Args:
        objective: the objective whose weight is set; no schedule and no other controller may set
            the same weight. The weight that it has is used where it has no ranking term. ``None``:
            for a loop of losses without an objective.
        term: ``"document_flops"`` or ``"query_flops"``.
        weight: without an ``objective``: the first $\lambda$ of ``controller.weight``, a 0-d tensor
            on the CPU, by which you multiply your FLOPS loss. It is 0 while the controller waits.
            ``observe(..., info_nce=)`` gives another first weight.
        target_active: active dimensions per text, > 0 and below the vocabulary's size.
        target_posting: instead of it, the share in (0, 1) of the texts that the longest posting
            list holds: the largest ``frequency()`` of an ``ActivationFrequency`` of the texts seen,
            which remembers a thirtieth of the run, 10 to 100 steps. It falls sooner with DF-FLOPS,
            ``penalty() ** 2`` as ``token_weight``.
        steps: optimiser steps of the whole run; ``None``: planned as 300.
        start: FLOPS at first, as a share of the weighted ranking terms, > 0.
        maximum: upper bound of $\lambda$; default: no bound.

    Attributes:
        weight: the present $\lambda$ as a 0-d tensor, or ``None`` with an objective.
        checkpoint: the checkpoint that you saved last; ``CollapseError`` names it.

    Examples:
        >>> import torch
        >>> from sparse_losses import SparsityController, SpladeObjective
        >>> objective = SpladeObjective({"document_flops": 0.01})
        >>> controller = SparsityController(objective, target_active=2, steps=100)
        >>> for _ in range(30):
        ...     controller.observe(torch.ones(4, 8))  # eight active: too many
        ...     controller.step()
        >>> objective.weights["document_flops"] > 0.01
        True
        >>> controller.report()["active"]
        8.0

        Without an objective:

        >>> from sparse_losses.functional import flops_loss
        >>> activations = torch.ones(4, 8, requires_grad=True)
        >>> controller = SparsityController(weight=0.5, target_active=2)
        >>> controller.observe(activations)  # and info_nce=, if you have it
        >>> loss = controller.weight * flops_loss(activations)  # and your other losses
        >>> controller.step()  # after optimizer.step(), or attach(optimizer)
    """

    def __init__(
        self,
        objective: SpladeObjective | None = None,
        term: str = "document_flops",
        *,
        weight: float | None = None,
        target_active: float | None = None,
        target_posting: float | None = None,
        steps: int | None = None,
        start: float = 0.03,
        maximum: float | None = None,
    ) -> None:
        if (objective is None) == (weight is None):
            raise TypeError("expected either `objective` or `weight`, got both or neither")
        if objective is not None and not isinstance(objective, SpladeObjective):
            kind = type(objective).__name__
            raise TypeError(f"expected `objective` to be a SpladeObjective, got {kind}")
        check_choice("term", term, ("document_flops", "query_flops"))
        if (target_active is None) == (target_posting is None):
            raise TypeError(
                "expected either `target_active` or `target_posting`, got both or neither"
            )
        name = "target_active" if target_posting is None else "target_posting"
        target = target_active if target_posting is None else target_posting
        check_number(name, target, minimum=0.0, exclusive=True)
        if target_posting is not None and target_posting >= 1:
            raise ValueError(f"expected `target_posting` below 1, got {target_posting!r}")
        check_number("start", start, minimum=0.0, exclusive=True)
        if weight is not None:
            check_number("weight", weight, minimum=0.0, exclusive=True)
        if maximum is not None:
            check_number("maximum", maximum, minimum=0.0, exclusive=True)
        if objective is not None:
            _check_only_master(objective, term)
        # A plain number: `torch.load` and JSON refuse a state with NumPy's.
        self.target = int(target) if isinstance(target, Integral) else float(target or 0.0)
        self.target_active = self.target if target_posting is None else None
        self.target_posting = None if target_posting is None else self.target
        self.frequency: ActivationFrequency | None = None  # made when V is known
        self.objective, self.term, self.start = objective, term, float(start)
        self._descent = Descent(None, None if maximum is None else float(maximum))
        self.steps = steps
        self._descent.first_weight = _given_weight(objective, term, weight)
        self.checkpoint: str | None = None
        self.weight = torch.zeros(()) if objective is None else None
        self._observes_batches = True
        self._new: Tensor | None = None  # of this rank since the last step
        self._sent: HostCopy[list[float]] | None = None  # a measurement on its way to the host
        self._write()
        if objective is not None:
            controllers_of(objective)[term] = self

    def observe(
        self,
        activations: Tensor,
        *,
        info_nce: Tensor | None = None,
        candidates: int | None = None,
    ) -> None:
        """Count a batch ``[..., V]`` without a device wait; the batches of a step add up.

        Without an objective, the value of InfoNCE ``[]``, with the weight 1 in your loss, and the
        number of candidates of a query (default: the rows of the batch) show whether anything is
        learned; beside the FLOPS of these activations the value gives the first and the largest
        weight, as an objective does. Pass it in every step: the bound is that of the last value.
        """
        check_rows("activations", activations)
        if info_nce is not None:
            if self.objective is not None:
                raise TypeError("expected no `info_nce` beside an objective, which knows its own")
            check_shapes(info_nce=(info_nce, ""))
        if candidates is not None:
            check_integer("candidates", candidates, minimum=2)
        agree("SparsityController.observe", False, {"activations": activations})
        vocab_size = activations.shape[-1]
        if self.target >= vocab_size:
            raise ValueError(f"expected `target_active` below V = {vocab_size}, got {self.target}")
        with torch.no_grad(), beside_dtensors(activations):
            rows = activations.detach().flatten(0, -2)
            if self.target_posting is not None:
                if self.frequency is None:
                    self.frequency = ActivationFrequency(vocab_size, decay=self._decay()).to(
                        rows.device
                    )
                self.frequency.update(rows)
            wide = widest_dtype(rows.device)
            mass = rows.sum(1, dtype=wide)  # the sum of a dense row overflows fp16
            is_number = mass.isfinite()  # a row with a NaN is neither live nor dead
            active = (rows > 0).sum(1) * is_number
            live = active > 0
            counts = [active.sum(), live.sum(), (is_number & ~live).sum()]
            mass = torch.where(is_number, mass, 0.0).sum()
            new = [*(count.to(wide) for count in counts), mass, torch.ones_like(mass)]
            if is_dtensor(activations):  # the ranks know the same, and `step` adds up theirs
                new = [full(x) / ranks_of(activations) for x in new]
            self._add(*new)
            if info_nce is not None:
                flops = full(rows.mean(0, dtype=wide).square().sum())
                value, candidates = full(info_nce.detach()).to(flops), candidates or len(rows)
                # As with an objective: infinite activations leave no number to divide.
                self._add(value.abs() + 0 * flops, flops, torch.ones_like(flops), at=7)
                if candidates > 1:  # a last batch may have a single row
                    self._add(value / math.log(candidates), torch.ones_like(value), at=5)

    def _add(self, *values: Tensor, at: int = 0) -> None:
        """Add values to the measurement of this step, from the position ``at`` on."""
        zero = torch.zeros_like(values[0])
        new = torch.stack([zero] * at + [*values] + [zero] * (SIZE - at - len(values)))
        self._new = new if self._new is None else self._new.to(new) + new

    def step(self) -> None:
        """Take note of an optimiser step; every rank must call it.

        Raises:
            CollapseError: if every row stays dead.
            RuntimeError: if no rank observed a batch in 50 steps, or other code changed the weight.
        """
        if self._sent is not None:
            self._decide()  # before the count: the measurement belongs to the last step
        self._descent.step += 1
        self._sent = HostCopy(self._over_ranks(), Tensor.tolist)
        if self._sent.is_here:
            self._decide()

    def _over_ranks(self) -> Tensor:
        """Return what all ranks observed in this step, so that all have the same state."""
        new, self._new = self._new, None
        if new is None:  # zeros: otherwise the others would wait for this rank
            held = None if self.objective is None else self.objective.special_token_ids.device
            device = held or torch.device("cpu")
            new = torch.zeros(SIZE, dtype=widest_dtype(device), device=device)
        new = sum_over_ranks(new) if num_ranks() > 1 else new
        if self.target_posting is not None and num_ranks() > 1:
            # A rank without a batch so far learns V here; all take part.
            size = 0 if self.frequency is None else self.frequency.vocab_size
            largest = maximum_over_ranks(torch.full_like(new[:1], size))
            if self.frequency is None and (size := int(largest)):
                self.frequency = ActivationFrequency(size, decay=self._decay()).to(new.device)
        if self.frequency is None:
            return torch.cat([new, new[:1]])
        longest = self.frequency.all_reduce().frequency().max()[None].to(new)
        # Frequencies fade with the batches of a rank, of which some may have had fewer.
        return torch.cat([new, maximum_over_ranks(longest)])

    def _decide(self) -> None:
        """Read a measurement and set the weight."""
        assert self._sent is not None
        active, live, dead, mass, batches, *terms, longest = self._sent.read()
        self._sent = None
        held = self._written if self.objective is None else self.objective.weights.get(self.term)
        if held != self._written:
            raise RuntimeError(
                f"expected objective.weights[{self.term!r}] to be {self._written} as it was set "
                f"here, got {held}: only the controller may set it"
            )
        self._note_terms(*terms)
        if not batches:  # other losses may have taken the step
            self._descent.unseen_steps += 1
            if self._descent.unseen_steps >= UNSEEN:
                raise RuntimeError(
                    f"expected `observe(activations)` before `step()`, got none in {UNSEEN} steps"
                )
            return
        self._descent.unseen_steps = 0
        if live + dead == 0:  # no texts, or only rows with NaN
            return
        before = self._descent.status
        self._descent.look_at_dead(dead / (live + dead), live + dead)
        if live == 0:
            self._descent.silent_steps += 1
            if self._descent.silent_steps >= self._descent.window:
                self._descent.status = "collapsed"
                raise CollapseError(self._collapse_message())
        else:
            self._descent.silent_steps = 0
            measured = active / live if self.target_posting is None else longest
            mean = max(mass / active, sys.float_info.min)  # logits may have a negative sum
            self._descent.look(math.log(measured / self.target), mean)
        self._write()
        status, bounded = self._descent.status, "sparsifying"  # which comes and goes with the bound
        if status != before and not (status.startswith(bounded) and before.startswith(bounded)):
            is_warning = status.startswith(
                ("unreachable", "collapsing", "braking: texts", "braking: ranking")
            )
            level = logging.WARNING if is_warning else logging.INFO
            _log.log(level, "after step %d: %s", self._descent.step, self)

    @property
    def steps(self) -> int | None:
        """The optimiser steps of the whole run, by which the descent is planned."""
        return self._descent.steps

    @steps.setter
    def steps(self, steps: int | None) -> None:
        if steps is not None:
            check_integer("steps", steps, minimum=1)
        self._descent.steps = None if steps is None else int(steps)

    def _note_terms(
        self, share: float, ranked: float, ranking: float, flops: float, batches: float
    ) -> None:
        """Warn of a ranking loss at chance, and bound the weight."""
        if ranked and self._descent.look_at_ranking(share / ranked):
            message = (
                "after step %d: InfoNCE is %.0f%% of its value at chance: nothing is learned yet, "
                "whatever the number of active dimensions"
            )
            _log.warning(message, self._descent.step, 100 * (self._descent.ranking or 0.0))
        if flops and math.isfinite(ranking / flops):
            self._descent.look_at_terms(ranking / batches, flops / batches, self.start)
            self._write()

    def _decay(self) -> float:
        return 1 - 1 / min(max(self._descent.planned_steps / 30, MEMORY[0]), MEMORY[1])

    def _write(self) -> None:
        self._written = min(self._descent.weight, LARGEST)
        if self.objective is not None:
            self.objective.weights[self.term] = self._written
        elif self.weight is not None:
            self.weight.fill_(self._written)

    def _collapse_message(self) -> str:
        healthy = self._descent.last_healthy_step
        since = f"last step without dead rows: {healthy}"
        if healthy is None:
            since = "every step had dead rows"
        where = self.checkpoint or "an earlier one; name yours in `controller.checkpoint`"
        return (
            f"all rows are dead at step {self._descent.step} ({since}), and behind a ReLU they get "
            f"no gradient: return to a checkpoint ({where}) with a smaller learning rate, or train "
            "self-reconstruction on signed logits (`return_logits=True`) until rows are alive"
        )

    def attach(self, optimizer: torch.optim.Optimizer, *, observe: bool = True) -> "_Handles":
        """Observe the objective's batches and count the optimiser's steps, until ``.remove()``.

        Batches count in training mode with gradients on. Without an objective, or with
        ``observe=False``, you ``observe`` the texts: held-out documents, say, every few steps.
        Attaching a second time is an error.
        """
        check_flag(observe=observe)
        self._observes_batches = observe
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
        texts = batch.anchor if self.term == "query_flops" else batch.positive
        if self._observes_batches:
            self.observe(texts.activations)
            if self.term == "document_flops" and batch.negative is not None:
                self.observe(batch.negative.activations)
        self._look_at_terms(objective, batch, texts.activations, output.terms)

    def _look_at_terms(
        self,
        objective: SpladeObjective,
        batch: SpladeBatch,
        activations: Tensor,
        terms: Mapping[str, Tensor],
    ) -> None:
        """Measure the ranking terms and FLOPS, which has no term while its weight is 0."""
        wide, waits = widest_dtype(activations.device), self._descent.started_at is None
        if (loss := terms.get("info_nce")) is not None:
            share = loss.detach().to(wide) / _chance(objective, batch)
            self._add(share, torch.ones_like(share), at=5)
        ranking = [objective.weights[name] * terms[name] for name in RANKING if name in terms]
        flops = terms.get(self.term)
        if ranking and (waits or flops is not None):
            with torch.no_grad():
                if flops is None:
                    gathers = {"gather": True} if objective.gather else {}
                    flops = objective.flops(activations.detach(), **gathers)
                flops = flops.to(wide)
                values = sum(term.to(wide).abs() for term in ranking) + 0 * flops
                self._add(values, flops, torch.ones_like(flops), at=7)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not was_skipped(optimizer):
            self.step()

    def report(self) -> dict[str, float | str | None]:
        """Return the last measurement and the weight, for a logger; ``None`` before the first."""
        state = self._descent
        return {
            "step": state.step,
            "target": self.target,
            "active": self._measured() if self.target_posting is None else None,
            "longest_list": None if self.target_posting is None else self._measured(),
            "dead_rows": state.dead,
            "weight": self._written,
            "mean_activation": None if state.level is None else state.mean_activation,
            "status": state.status,
        }

    def _measured(self) -> float | None:
        """Return the smoothed level as what is measured: dimensions, or a share of the texts."""
        level = self._descent.level
        return None if level is None else self.target * math.exp(level)

    def __str__(self) -> str:
        """Return the state as one line."""
        measured, state = self._measured(), f"weight {self._written:.4g}, {self._descent.status}"
        if self.target_posting is not None:
            share = "?" if measured is None else f"{measured:.1%}"
            return f"{self.term}: longest list {share} of {self.target:.1%} wanted, {state}"
        active = "?" if measured is None else f"{measured:.1f}"
        return f"{self.term}: {active} active of {self.target:g} wanted, {state}"

    def outcome(self) -> str:
        """Return the state as one line, with what to do where the target was missed."""
        level, status = self._descent.level, self._descent.status
        if level is None:
            return f"{self}: nothing was measured; `attach` it, or call `observe` and `step`"
        if LOW <= level <= HIGH and not status.startswith(("braking", "collaps")):
            return str(self)
        remedies = [text for name, text in REMEDIES.items() if status.startswith(name)]
        return f"{self}; {remedies[0] if remedies else REMEDIES['above' if level > 0 else 'below']}"

    def __repr__(self) -> str:
        """Return the state with the name of the class, for a list of schedules."""
        return f"{type(self).__name__}({self})"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues from; after a step the same on every rank."""
        return {
            "term": self.term,
            "kind": "target_active" if self.target_posting is None else "target_posting",
            "target": self.target,
            "frequency": None if self.frequency is None else _packed(self.frequency),
            **{name: x for name, x in vars(self._descent).items() if name not in OWN},
            "new": None if self._new is None else self._new.tolist(),
            "sent": None if self._sent is None else self._sent.read(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state and set the weight; the target stays that of this controller.

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
        check_number("target", state["target"], minimum=0.0, exclusive=True)
        if state["kind"] != (own := self.state_dict()["kind"]):
            raise ValueError(f"expected the state of a `{own}`, got that of a `{state['kind']}`")
        packed = state["frequency"]
        frequency = None if packed is None else _unpacked(packed, self._decay())
        fields = {name: x for name, x in state.items() if hasattr(self._descent, name)}
        _check_state(fields, state["new"], state["sent"])
        new, sent = (
            None if state[name] is None else torch.tensor(state[name], dtype=torch.float64)
            for name in ("new", "sent")
        )
        descent = dataclasses.replace(self._descent, **fields)
        try:
            _ = descent.weight
        except (ArithmeticError, TypeError) as error:
            raise ValueError(f"expected possible numbers in a state, got {fields}") from error
        if descent.level is not None:
            shift = math.log(state["target"] / self.target)
            descent.level += shift
            descent.mass += shift
            descent.first_level += shift
            descent.first = (descent.first or 1.0) * math.exp(shift)
        if state["target"] != self.target:
            message = "%s: the target is %g, in the loaded state it was %g"
            _log.warning(message, self.term, self.target, state["target"])
        if frequency is not None:
            held = frequency if self.frequency is None else self.frequency
            self.frequency = frequency.to(held.active.device)
        self._descent, self._new = descent, new
        self._sent = None if sent is None else HostCopy(sent, Tensor.tolist)
        self._write()


def _check_state(fields: Mapping[str, Any], *measurements: Any) -> None:
    """Raise unless the law's fields are finite and the measurements have their sizes."""
    numbers = [x for name, x in fields.items() if name != "status" and x is not None]
    if not all(isinstance(x, (int, float)) and abs(x) < LARGEST for x in numbers):
        raise ValueError(f"expected finite numbers in a state, got {fields}")
    # Of a batch that was not finite these may be so, too.
    for values, size in zip(measurements, (SIZE, SIZE + 1), strict=True):
        if values is not None and np.asarray(values, dtype=np.float64).shape != (size,):
            raise ValueError(f"expected {size} numbers as a measurement, got {values!r}")


def _packed(frequency: ActivationFrequency) -> str:
    """Return the counts of all ranks, and of this one since, as text, which JSON takes."""
    both = (frequency.active, frequency.num_texts, frequency.own_active, frequency.own_num_texts)
    counts = torch.cat([x.flatten() for x in both]).cpu().numpy()
    return base64.b64encode(counts.tobytes()).decode()


def _unpacked(text: Any, decay: float) -> ActivationFrequency:
    try:
        counts = np.frombuffer(base64.b64decode(text, validate=True), np.float32).copy()
        counts = counts.reshape(2, -1)
        frequency = ActivationFrequency(counts.shape[1] - 1, decay=decay)
    except Exception as error:  # damaged text fails in many ways
        raise ValueError(f"expected the counts of a state, got {text!r:.40}") from error
    if not (np.isfinite(counts).all() and counts.min() >= 0):
        raise ValueError("expected finite counts >= 0 in a state")
    for prefix, row in zip(("", "own_"), torch.from_numpy(counts), strict=True):
        getattr(frequency, f"{prefix}active").copy_(row[:-1])
        getattr(frequency, f"{prefix}num_texts").copy_(row[-1])
    return frequency


def _chance(objective: SpladeObjective, batch: SpladeBatch) -> float | Tensor:
    """Return InfoNCE's value if all candidates score alike; infinity where it is not known."""
    loss, negative = objective.info_nce, batch.negative
    ranks = num_ranks() if objective.gather or getattr(loss, "gather", False) else 1
    bounds = (getattr(loss, f"false_negative_{name}", None) for name in ("margin", "ratio"))
    is_sum = getattr(loss, "reduction", "mean") == "sum"
    if is_sum or any(bound is not None for bound in bounds):
        return math.inf
    decoupled = int(getattr(loss, "decoupled", False))
    if batch.candidate_mask is not None:
        candidates_of_row = batch.candidate_mask.sum(1) - decoupled
        return candidates_of_row.clamp(min=1).log().mean()
    in_batch = ranks * len(batch.positive.activations) if getattr(loss, "in_batch", True) else 1
    candidates = in_batch + (in_batch - 1) * (len(getattr(loss, "negatives_from", [0])) - 1)
    if negative is not None:
        shared = ranks if negative.activations.ndim == 2 else 1
        candidates += shared * negative.activations.shape[-2]
    candidates -= decoupled
    return math.log(candidates) if candidates > 1 else math.inf


def _given_weight(objective: SpladeObjective | None, term: str, weight: float | None) -> float:
    """Return the first weight where no ranking term gives it, as a plain number."""
    given = weight if objective is None else objective.weights.get(term) or 1.0
    if isinstance(given, Tensor):
        raise TypeError(f"expected objective.weights[{term!r}] to be a number, got a tensor")
    return float(given or 1.0)


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


class _Handles:
    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
