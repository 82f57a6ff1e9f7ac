"""Weights and temperatures that change during training, counted in optimiser steps."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

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
        self.objective, self.curriculum, self.warmups = objective, curriculum, dict(warmups or {})
        self.base, self.steps_taken = dict(objective.weights), 0
        if wrong := [*(self.warmups.keys() - objective.active())]:
            raise ValueError(f"expected warm-ups of terms in {objective.active()}, got {wrong}")
        phases = curriculum.phases if curriculum else ()
        named = {*self.warmups, *(name for phase in phases for name in phase.weights)}
        self._names = named.intersection(objective.active())
        self._ranking: Any = getattr(getattr(objective.terms, "info_nce", None), "loss", None)
        self._temperature = getattr(self._ranking, "temperature", None)
        self._phase: Phase | None = None
        numbers = [phase.temperature for phase in phases if phase.temperature is not None]
        if numbers and self._ranking is not None and is_parametrized(self._ranking, "temperature"):
            what = "phases without a temperature, as that of InfoNCE is parametrised"
            raise ValueError(f"expected {what}, got {numbers}")
        self._apply()

    def step(self) -> None:
        """Take note of an optimiser step and set the weights of the next one."""
        self.steps_taken += 1
        self._apply()

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Count the optimiser's steps, not those that a ``GradScaler`` skips; see ``.remove()``."""
        # The wrappers of accelerate and Lightning are also called where no step is taken.
        optimizer = getattr(optimizer, "optimizer", optimizer)

        def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not bool(getattr(optimizer, "found_inf", False)):  # or a fused one took no step
                self.step()

        return optimizer.register_step_post_hook(count)

    def state_dict(self) -> dict[str, float]:
        """Return the number of steps taken, and the temperature if it is a tensor."""
        held = self._temperature
        learned = {"temperature": held.item()} if isinstance(held, Tensor) else {}
        return {"steps_taken": self.steps_taken, **learned}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue after the steps of a state, by this schedule's phases and warm-ups."""
        self.steps_taken = int(state["steps_taken"])
        self._apply()
        if isinstance(self._temperature, Tensor) and "temperature" in state:  # learned since
            self._temperature.detach().fill_(state["temperature"])

    def _apply(self) -> None:
        phase = Phase(0) if self.curriculum is None else self.curriculum(self.steps_taken)
        now = {**self.base, **phase.weights}
        factors = {name: warmup(self.steps_taken) for name, warmup in self.warmups.items()}
        self.objective.weights.update({n: factors.get(n, 1.0) * now[n] for n in self._names})
        if phase != self._phase and self._ranking is not None:
            if not isinstance(self._temperature, Tensor):
                self._ranking.temperature = phase.temperature or self._temperature
            elif phase.temperature is not None:
                self._temperature.detach().fill_(phase.temperature)
        self._phase = phase
