"""Weights and temperatures that change during training, counted in optimiser steps."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from sparse_losses._core.checks import check_choice, check_integer, check_learnable, check_number
from sparse_losses.objective.objective import SpladeObjective
from sparse_losses.objective.terms import NEEDS


class ReadOnly(dict[str, Any]):
    """A dict that cannot be changed, but copied and pickled."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("expected no change of a preset's or a phase's numbers: create another")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = _refuse
    __ior__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


@dataclasses.dataclass(frozen=True)
class Phase:
    """The settings from the ``first`` to the ``last`` epoch (or step), both included.

    Attributes:
        first: first epoch (counted from 1) or step (counted from 0).
        last: last epoch or step; the last phase of a curriculum continues after it.
        temperature: InfoNCE's temperature; ``None`` restores the objective's own (a tensor keeps
            its value).
        weights: weights by name; they replace the objective's.

    Examples:
        >>> from sparse_losses import Phase
        >>> Phase(1, 8, temperature=0.08, weights={"distillation": 2.5})
        Phase(first=1, last=8, temperature=0.08, weights={'distillation': 2.5})
    """

    first: int
    last: int
    temperature: float | None = None
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integer("first", self.first, minimum=0)
        check_integer("last", self.last, minimum=self.first)
        if self.temperature is not None:
            check_learnable("temperature", self.temperature)
        for name, weight in self.weights.items():
            check_choice("weights", name, list(NEEDS))
            check_number(f"weights[{name!r}]", weight)
        object.__setattr__(self, "weights", ReadOnly(self.weights))


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Phases that follow one another without a gap.

    Attributes:
        phases: the phases in order.
        unit: unit of their numbers: ``"epoch"`` (from 1) or ``"step"`` (of the optimiser, from 0).

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
        phases = tuple(self.phases)
        object.__setattr__(self, "phases", phases)
        expected = 1 if self.unit == "epoch" else 0
        if not phases:
            raise ValueError("expected at least one phase, got none")
        for phase in phases:
            if phase.first != expected:
                raise ValueError(
                    f"expected a phase that begins with {self.unit} {expected}, got {phase.first}"
                )
            expected = phase.last + 1

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

    A weight is that of the phase, or the objective's if the phase has none, times its warm-up.
    A term that the objective lacks, or has with a weight of 0, stays off in every phase: to start
    a term later, set it to 0 in the early phases. At the start of a phase, its temperature is
    copied into a temperature that is a tensor or ``nn.Parameter``.

    Args:
        objective: the objective whose weights are set; ``objective.scheduled`` names them. No
            controller may set the same weights.
        curriculum: phases by epoch (which need ``steps_per_epoch``) or by step.
        warmups: the warm-up of each term by its name.
        steps_per_epoch: optimiser steps per epoch: fewer than batches if gradients are accumulated.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeObjective, TrainingSchedule, Warmup
        >>> objective = SpladeObjective({"info_nce": 1.0, "document_flops": 0.1})
        >>> schedule = TrainingSchedule(objective, warmups={"document_flops": Warmup(10)})
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        >>> _ = schedule.attach(optimizer)
        >>> objective.weights["document_flops"]
        0.0
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
        is_named = isinstance(warmups, Mapping | None)
        if not is_named or not all(isinstance(w, Warmup) for w in (warmups or {}).values()):
            raise TypeError(f"expected `warmups` to be Warmup objects by name, got {warmups!r}")
        if steps_per_epoch is not None:
            check_integer("steps_per_epoch", steps_per_epoch, minimum=1)
        elif curriculum is not None and curriculum.unit == "epoch":
            raise ValueError("expected `steps_per_epoch` for phases by epoch, got None")
        self.objective = objective
        self.curriculum = curriculum
        self.warmups = dict(warmups or {})
        self.steps_per_epoch = steps_per_epoch
        self.steps_taken = 0
        for name in self.warmups:
            check_choice("warmups", name, list(NEEDS))
        self.base = dict(objective.weights)
        self.base_temperature = objective.info_nce.temperature
        phases, on = () if curriculum is None else curriculum.phases, {*objective.active()}
        names = {*self.warmups, *(name for phase in phases for name in phase.weights)}
        self._names = names & on
        if tensors := [n for n in self._names if isinstance(self.base.get(n), Tensor)]:
            raise ValueError(f"expected numbers as scheduled weights, got {tensors} as tensors")
        if steered := sorted(names.intersection(controllers_of(objective))):
            raise ValueError(
                "expected each weight to be set by a schedule or by a SparsityController, got both "
                f"for {', '.join(steered)}"
            )
        if off := [name for name in self.warmups if name not in on]:
            raise ValueError(
                f"expected a weight to warm up for {off[0]!r}, got 0 in the objective (does "
                "another schedule warm it up?)"
            )
        objective.scheduled |= self._names
        self._set: dict[str, float | Tensor] = {}
        self._phase: Phase | None = None
        self._apply()

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
        assert number is not None
        return self.curriculum.at(number)

    def step(self) -> None:
        """Take note of an optimiser step and set the weights of the next one.

        Raises:
            RuntimeError: if other code changed a scheduled weight.
        """
        for name, was in self._set.items():
            if self.objective.weights.get(name) != was:
                raise RuntimeError(
                    f"expected the scheduled weight {name!r} to be {was} as it was set, got "
                    f"{self.objective.weights.get(name)}: change `schedule.base` instead; only "
                    "the schedule may set the weight"
                )
        self.steps_taken += 1
        self._apply()

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Count the optimiser's steps, without those a ``GradScaler`` skips, until ``.remove()``.

        Attaching a second time is an error.
        """
        return count_steps(optimizer, self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not was_skipped(optimizer):
            self.step()

    def __repr__(self) -> str:
        """Return the step, the epoch and the scheduled weights."""
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        return f"TrainingSchedule(step {self.steps_taken}{epoch}, weights {self._set})"

    def state_dict(self) -> dict[str, float]:
        """Return the number of steps taken, and the temperature if it is a tensor."""
        state: dict[str, float] = {"steps_taken": self.steps_taken}
        if isinstance(self.objective.info_nce.temperature, Tensor):
            state["temperature"] = self.objective.info_nce.temperature.item()
        return state

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go to the step of a state and set its weights, by this schedule's phases and warm-ups."""
        if not isinstance(state, Mapping) or {*state} - {"temperature"} != {"steps_taken"}:
            raise ValueError(f"expected the state of a TrainingSchedule, got {state!r}")
        check_integer("steps_taken", state["steps_taken"], minimum=0)
        check_number("temperature", state.get("temperature", 1.0), minimum=0.0, exclusive=True)
        self.steps_taken = int(state["steps_taken"])
        self._apply()
        held = self.objective.info_nce.temperature
        if isinstance(held, Tensor) and "temperature" in state:
            with torch.no_grad():  # replaces the phase's by the value learned since
                held.fill_(state["temperature"])

    def _apply(self) -> None:
        phase = self.phase
        now = self.base if phase is None else {**self.base, **phase.weights}
        self._set = {name: now[name] for name in self._names}
        for name, warmup in self.warmups.items():
            self._set[name] = warmup(self.steps_taken) * now[name]
        self.objective.weights.update(self._set)
        if phase is None or phase == self._phase:
            return
        self._phase = phase
        info_nce = self.objective.info_nce
        if not isinstance(info_nce.temperature, Tensor):
            info_nce.temperature = phase.temperature or self.base_temperature
        elif phase.temperature is not None:
            with torch.no_grad():
                info_nce.temperature.fill_(phase.temperature)


# By objective and term; weak, so that a controller that was deleted makes room for another.
_CONTROLLERS: WeakKeyDictionary[SpladeObjective, WeakValueDictionary[str, Any]]
_CONTROLLERS = WeakKeyDictionary()


def controllers_of(objective: SpladeObjective) -> WeakValueDictionary[str, Any]:
    """Return the controllers of the objective's weights by term."""
    return _CONTROLLERS.setdefault(objective, WeakValueDictionary())


def count_steps(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    """Register a method to be called after every step, one of each object."""
    # The wrappers of accelerate and Lightning are also called where no step is taken.
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not hasattr(optimizer, "register_step_post_hook"):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    owner = getattr(hook, "__self__", None)
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", {}).values()
    if any(getattr(other, "__self__", None) is owner for other in hooks):
        raise RuntimeError("expected to be attached once, or every step would count twice")
    return optimizer.register_step_post_hook(hook)


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a ``GradScaler`` made a fused optimiser skip its step."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)
