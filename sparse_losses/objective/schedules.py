"""Weights and temperatures that change during training, counted in optimiser steps."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_losses._core.checks import check_choice, check_integer, check_number
from sparse_losses.objective.objective import SpladeObjective


@dataclasses.dataclass(frozen=True)
class Phase:
    """The settings from the ``first`` to the ``last`` epoch (or step), both included.

    ``temperature`` is InfoNCE's; ``None`` restores the objective's own (a tensor keeps its value).
    ``weights`` replace the objective's by name.
    """

    first: int
    last: int
    temperature: float | None = None
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Phases that follow one another, by ``"epoch"`` (from 1) or optimiser ``"step"`` (from 0).

    Examples:
        >>> from sparse_losses import Curriculum, Phase
        >>> curriculum = Curriculum([Phase(1, 8, temperature=0.08), Phase(9, 25, temperature=0.05)])
        >>> [curriculum.at(epoch).temperature for epoch in (1, 8, 9, 26)]
        [0.08, 0.08, 0.05, 0.05]
    """

    phases: Sequence[Phase]
    unit: Literal["epoch", "step"] = "epoch"

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, ("epoch", "step"))
        object.__setattr__(self, "phases", (*self.phases,))
        lasts = [0 if self.unit == "epoch" else -1, *(phase.last for phase in self.phases)]
        firsts = [phase.first for phase in self.phases]
        if not firsts or firsts != [last + 1 for last in lasts[:-1]] or lasts != sorted({*lasts}):
            raise ValueError(
                f"expected phases without a gap from {self.unit} {lasts[0] + 1}, got {self.phases}"
            )

    def at(self, number: int) -> Phase:
        """Return the phase of an epoch or step; the last phase has no end."""
        check_integer(self.unit, number, minimum=self.phases[0].first)
        return next((phase for phase in self.phases if number <= phase.last), self.phases[-1])


@dataclasses.dataclass(frozen=True)
class Warmup:
    r"""A factor that rises from 0 to 1: $\min(1, n / N)$, or its square.

    Here $n$ is the number of optimiser steps taken and $N$ is ``steps``.

    Examples:
        >>> from sparse_losses import Warmup
        >>> [Warmup(4, "quadratic")(step) for step in range(6)]
        [0.0, 0.0625, 0.25, 0.5625, 1.0, 1.0]
    """

    steps: int
    shape: Literal["linear", "quadratic"] = "linear"

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, minimum=1)
        check_choice("shape", self.shape, ("linear", "quadratic"))

    def __call__(self, step: int) -> float:
        """Return the factor after ``step`` optimiser steps."""
        share = min(1.0, step / self.steps)
        return share if self.shape == "linear" else share**2


class TrainingSchedule:
    """Set an objective's weights and temperature by the number of optimiser steps.

    A weight is that of the phase, or the objective's if the phase has none, times its warm-up. A
    term that the objective lacks, or has with a weight of 0, stays off in every phase: to start a
    term later, set it to 0 in the early phases. The temperature is that of the term ``info_nce``.

    Args:
        objective: the objective whose weights are set.
        curriculum: phases by epoch (which need ``steps_per_epoch``) or by step.
        warmups: the warm-up of each term by its name.
        steps_per_epoch: optimiser steps per epoch: fewer than batches if gradients are accumulated.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeObjective, TrainingSchedule, Warmup
        >>> from sparse_losses.objective import terms
        >>> objective = SpladeObjective({"document_flops": (0.1, terms.flops("document"))})
        >>> schedule = TrainingSchedule(objective, warmups={"document_flops": Warmup(10)})
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        >>> _ = schedule.attach(optimizer)
        >>> optimizer.step()
        >>> round(objective.weights["document_flops"], 4)
        0.01
    """

    def __init__(
        self,
        objective: SpladeObjective,
        curriculum: Curriculum | None = None,
        *,
        warmups: Mapping[str, Warmup] | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        if not isinstance(getattr(objective, "_orig_mod", objective), SpladeObjective):  # compiled
            raise TypeError(f"expected `objective` to be a SpladeObjective, got {objective!r}")
        if curriculum is not None and curriculum.unit == "epoch" or steps_per_epoch is not None:
            check_integer("steps_per_epoch", steps_per_epoch, minimum=1)
        self.objective, self.curriculum, self.warmups = objective, curriculum, dict(warmups or {})
        self.steps_per_epoch, self.steps_taken = steps_per_epoch, 0
        self.base = dict(objective.weights)
        self.base_temperature = getattr(self._ranking, "temperature", None)
        on = {name for name in objective.active() if not isinstance(self.base[name], Tensor)}
        for name, warmup in self.warmups.items():
            if name not in on or not isinstance(warmup, Warmup):
                raise ValueError(
                    f"expected a Warmup of a term whose weight is a number other than 0, got "
                    f"{warmup!r} of {name!r}: {self.base.get(name, 'no term')}"
                )
        phases = () if curriculum is None else curriculum.phases
        self._names = on & {*self.warmups, *(name for phase in phases for name in phase.weights)}
        self._phase: Phase | None = None
        self._apply()

    @property
    def _ranking(self) -> Any:
        terms = self.objective.terms
        return getattr(terms["info_nce"], "loss", None) if "info_nce" in terms else None

    @property
    def epoch(self) -> int | None:
        """The epoch that the next step belongs to, from 1; ``None`` without ``steps_per_epoch``."""
        size = self.steps_per_epoch
        return None if size is None else self.steps_taken // size + 1

    @property
    def phase(self) -> Phase | None:
        """The phase that the next step belongs to."""
        if self.curriculum is None:
            return None
        number = self.epoch if self.curriculum.unit == "epoch" else self.steps_taken
        return self.curriculum.at(number or 0)

    def step(self) -> None:
        """Take note of an optimiser step and set the weights of the next one."""
        for name, was in self._set.items():
            if self.objective.weights.get(name) != was:
                raise RuntimeError(
                    f"expected the scheduled weight of {name!r} to be {was} as it was set, got "
                    f"{self.objective.weights.get(name)}: change `schedule.base` instead"
                )
        self.steps_taken += 1
        self._apply()

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Count the optimiser's steps, without those a ``GradScaler`` skips, until ``.remove()``."""
        # The wrappers of accelerate and Lightning are also called where no step is taken.
        optimizer = getattr(optimizer, "optimizer", optimizer)
        hooks = getattr(optimizer, "_optimizer_step_post_hooks", {}).values()
        if any(getattr(hook, "__self__", None) is self for hook in hooks):
            raise RuntimeError("expected to be attached once, or every step would count twice")
        return optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimiser that skips its step
        if found_inf is None or not bool(found_inf):
            self.step()

    def __repr__(self) -> str:
        """Return the step and the scheduled weights."""
        return f"TrainingSchedule(step {self.steps_taken}, weights {self._set})"

    def state_dict(self) -> dict[str, float]:
        """Return the number of steps taken, and the temperature if it is a tensor."""
        state: dict[str, float] = {"steps_taken": self.steps_taken}
        if isinstance(temperature := getattr(self._ranking, "temperature", None), Tensor):
            state["temperature"] = temperature.item()
        return state

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go to the step of a state and set its weights, by this schedule's phases and warm-ups."""
        if not isinstance(state, Mapping) or {*state} - {"temperature"} != {"steps_taken"}:
            raise ValueError(f"expected the state of a TrainingSchedule, got {state!r}")
        check_integer("steps_taken", state["steps_taken"], minimum=0)
        self.steps_taken = int(state["steps_taken"])
        self._apply()
        if "temperature" in state:  # replaces the phase's by the value learned since
            self._set_temperature(state["temperature"])

    def _apply(self) -> None:
        phase = self.phase
        now = self.base if phase is None else {**self.base, **phase.weights}
        self._set = {name: now[name] for name in self._names}
        for name, warmup in self.warmups.items():
            self._set[name] = warmup(self.steps_taken) * now[name]
        self.objective.weights.update(self._set)
        if phase is not None and phase != self._phase:
            self._phase = phase
            self._set_temperature(phase.temperature)

    def _set_temperature(self, value: float | None) -> None:
        loss = self._ranking
        if isinstance(held := getattr(loss, "temperature", None), Tensor):
            if value is not None:
                with torch.no_grad():
                    held.fill_(value)
        elif loss is not None:
            loss.temperature = self.base_temperature if value is None else value
