"""Weights and temperatures that change during training, counted in optimiser steps."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_choice, check_integer
from sparse_losses.objective.objective import SpladeObjective


@dataclasses.dataclass(frozen=True)
class Phase:
    """InfoNCE's temperature and weights by name, up to an epoch; without a number the objective's.

    A temperature that is a tensor is filled as the phase begins, and is the optimiser's within it.

    Examples:
        >>> from sparse_losses import Phase
        >>> Phase(8, temperature=0.08, weights={"distillation": 2.5})
        Phase(last=8, temperature=0.08, weights={'distillation': 2.5})
    """

    last: int
    temperature: float | None = None
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Phases by epoch, from 1, as a function of the optimiser's step; the last one has no end.

    Examples:
        >>> from sparse_losses import Curriculum, Phase
        >>> curriculum = Curriculum([Phase(8, 0.08), Phase(25, 0.05)], steps_per_epoch=100)
        >>> [curriculum(step).temperature for step in (0, 799, 800, 9999)]
        [0.08, 0.08, 0.05, 0.05]
    """

    phases: Sequence[Phase]
    steps_per_epoch: int = 1

    def __post_init__(self) -> None:
        check_integer("steps_per_epoch", self.steps_per_epoch, minimum=1)
        lasts = [phase.last for phase in self.phases]
        if not lasts or lasts != sorted({0, *lasts})[1:]:
            raise ValueError(f"expected phases that end one after the other, got {self.phases}")

    def __call__(self, step: int) -> Phase:
        """Return the phase of the step after ``step`` steps."""
        epoch = step // self.steps_per_epoch + 1
        return next((phase for phase in self.phases if epoch <= phase.last), self.phases[-1])


@dataclasses.dataclass(frozen=True)
class Warmup:
    """A factor that rises from 0 to 1 in ``steps`` optimiser steps, or the square of it.

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
        return min(1.0, step / self.steps) ** (1 if self.shape == "linear" else 2)


class TrainingSchedule:
    """Set an objective's weights and InfoNCE's temperature by the number of optimiser steps.

    A weight is that of the phase, or the objective's, times its warm-up. A term that the objective
    lacks, or has with a weight of 0, stays off: to start one later, give early phases a 0.

    Examples:
        >>> from sparse_losses import RECOMMENDED, TrainingSchedule, Warmup
        >>> objective = RECOMMENDED.objective()
        >>> schedule = TrainingSchedule(objective, warmups={"info_nce": Warmup(10)})
        >>> schedule.step()  # or once `schedule.attach(optimizer)`
        >>> objective.weights
        {'info_nce': 0.1}
    """

    def __init__(
        self,
        objective: SpladeObjective,
        curriculum: Curriculum | None = None,
        *,
        warmups: Mapping[str, Warmup] | None = None,
    ) -> None:
        self.objective, self.warmups, self.steps_taken = objective, dict(warmups or {}), 0
        self.curriculum = curriculum or Curriculum([Phase(1)])
        if wrong := [*(self.warmups.keys() - objective.active())]:
            raise ValueError(f"expected warm-ups of terms in {objective.active()}, got {wrong}")
        named = {*self.warmups}.union(*(phase.weights for phase in self.curriculum.phases))
        self.base = {name: objective.weights[name] for name in named & {*objective.active()}}
        self._ranking: Any = getattr(getattr(objective.terms, "info_nce", None), "loss", None)
        self._temperature = getattr(self._ranking, "temperature", None)
        self._apply(is_new=True)

    def step(self) -> None:
        """Take note of an optimiser step and set the weights of the next one."""
        before = self.curriculum(self.steps_taken)
        self.steps_taken += 1
        self._apply(is_new=self.curriculum(self.steps_taken) != before)

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Count the optimiser's steps, not those that a ``GradScaler`` skips; see ``.remove()``."""
        # The wrappers of accelerate and Lightning are also called where no step is taken.
        optimizer = getattr(optimizer, "optimizer", optimizer)

        def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not bool(getattr(optimizer, "found_inf", False)):  # or a fused one took no step
                self.step()

        return optimizer.register_step_post_hook(count)

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps taken; a learned temperature is in the objective's state."""
        return {"steps_taken": self.steps_taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the steps of a state, by this schedule's phases and warm-ups."""
        self.steps_taken = state["steps_taken"]
        self._apply(is_new=not isinstance(self._temperature, nn.Parameter))

    def _apply(self, is_new: bool) -> None:
        """Set the weights and, if the phase is new, the temperature."""
        phase = self.curriculum(self.steps_taken)
        for name, base in self.base.items():
            factor = self.warmups[name](self.steps_taken) if name in self.warmups else 1.0
            self.objective.weights[name] = factor * phase.weights.get(name, base)
        if is_new and isinstance(self._temperature, Tensor):
            if phase.temperature is not None:
                self._temperature.detach().fill_(phase.temperature)
        elif is_new and self._ranking is not None:
            self._ranking.temperature = phase.temperature or self._temperature
