"""A callback for the ``Trainer`` of transformers, and for all trainers that inherit from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparse_losses as sl
from sparse_losses._core.extras import from_extra
from sparse_losses.distributed import sum_over_ranks

with from_extra("transformers"):
    from transformers import TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState

__all__ = ["TrainingState"]


# The type checker sees their classes as Any, and a subclass of Any is an error.
class TrainingState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback for trainers of transformers and sentence-transformers: their state and log.

    Checkpoints have the states of the schedules and the learned parameters of ``loss``, and
    ``resume_from_checkpoint`` restores them. A run that begins again before its end, as with
    ``auto_find_batch_size``, starts its schedules anew. On several processes these parameters start
    alike and their gradients are averaged; make the encoder the trainer's model. The log has the
    terms of every ``SpladeObjective``, without weights, and the diagnostics.

    Args:
        *schedules: each a ``TrainingSchedule``, or another object with ``attach(optimizer)``,
            ``state_dict`` and ``load_state_dict``.
        loss: the loss module, or a dict of them, whose parameters (a temperature, prototypes) are
            learned and not part of the trainer's model; they must be in its optimiser.
        diagnostics: by side, ``"query"`` or ``"document"``, of the training since the last log.

    Examples:
        >>> from sparse_losses import SpladeObjective
        >>> from sparse_losses.integrations.transformers import TrainingState
        >>> from sparse_losses.objective import terms
        >>> objective = SpladeObjective({"flops": (0.1, terms.flops("document"))})
        >>> callbacks = [TrainingState(loss=objective)]  # of your Trainer
    """

    def __init__(
        self,
        *schedules: Any,
        loss: nn.Module | Mapping[str, nn.Module] | None = None,
        diagnostics: Mapping[str, sl.Diagnostics] | None = None,
    ) -> None:
        self.schedules, self.diagnostics = schedules, dict(diagnostics or {})
        self.losses = dict(loss if isinstance(loss, Mapping) else {"loss": loss or nn.Module()})
        self._learned: dict[str, nn.Parameter] = {}
        self._handles: list[Any] = []
        self._start: list[dict[str, Any]] = []  # states of the schedules as training began
        self._names: list[str] = []  # of the terms
        # Their sums and numbers of batches (rows, in an evaluation) [T, 2], by whether it trains.
        self._sums: dict[bool, Tensor] = {}
        self._evaluated: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """Return what the trainer writes to ``trainer_state.json``."""
        learned = {name: x.tolist() for name, x in self._learned.items()}
        states = [one.state_dict() for one in self.schedules]
        return {"args": {}, "attributes": {}, "schedules": states, "learned": learned}

    def _restore(self, state: TrainerState, *, schedules: bool = True) -> None:
        try:
            saved = state.stateful_callbacks[type(self).__name__]
            learned = saved["learned"]
            if learned.keys() != self._learned.keys():
                raise KeyError(f"parameters {sorted(learned)}")
            with torch.no_grad():
                for name, parameter in self._learned.items():
                    parameter.copy_(torch.tensor(learned[name], dtype=torch.float64))
            states = zip(self.schedules, saved["schedules"], strict=True)
            for one, its_state in states if schedules else ():
                one.load_state_dict(its_state)
        except Exception as error:  # damaged states fail in many ways
            raise ValueError(
                f"expected {len(self.schedules)} schedules and the parameters "
                f"{sorted(self._learned)} in checkpoint-{state.global_step}, got others: resume as "
                "the run began, without `restore_callback_states_from_checkpoint`"
            ) from error

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **objects: Any) -> None:
        """Restore the state if training resumes, and attach the schedules."""
        if self._handles and not state.global_step:  # again, as with `auto_find_batch_size`
            for one, its_state in zip(self.schedules, self._start, strict=True):
                one.load_state_dict(its_state)
        self._detach()  # from a run that was interrupted
        self._start = [one.state_dict() for one in self.schedules]
        if isinstance(state.stateful_callbacks.get(type(self).__name__), list):
            raise ValueError("expected one TrainingState for all schedules, got several")
        optimizer, model = objects["optimizer"], objects["model"]
        its_own = {id(x) for x in model.parameters()}
        self._learned = {
            f"{key}.{name}": x
            for key, loss in self.losses.items()
            for name, x in loss.named_parameters()
            if x.requires_grad and id(x) not in its_own
        }
        optimized = {id(x) for group in optimizer.param_groups for x in group["params"]}
        if missing := [name for name, x in self._learned.items() if id(x) not in optimized]:
            how = "optimizers=(optimizer, None) of the Trainer"
            raise ValueError(f"expected all parameters of `loss` in {how}, got none of {missing}")
        if state.global_step:
            self._restore(state)
        if args.world_size > 1:  # each process may have drawn its own prototypes
            for parameter in self._learned.values():
                torch.distributed.broadcast(parameter.data, src=0)
        self._handles = [one.attach(optimizer) for one in self.schedules]
        modules = {getattr(one, "objective", None) for one in self.schedules}
        modules |= {module for loss in self.losses.values() for module in loss.modules()}
        objectives = [x for x in modules if isinstance(x, sl.SpladeObjective)]
        hook: Any = {"hook": self._observe, "with_kwargs": True}
        self._handles += [one.register_forward_hook(**hook) for one in objectives]
        self._names = sorted({name for one in objectives for name in one.weights})
        none = torch.zeros(len(self._names), 2, device=args.device)
        self._sums = {True: none, False: none.clone()}

    def _detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Detach, and restore the best model's learned parameters."""
        self._detach()
        if args.load_best_model_at_end and state.best_model_checkpoint and self._learned:
            best = Path(state.best_model_checkpoint, "trainer_state.json")
            self._restore(TrainerState.load_from_json(str(best)), schedules=False)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Average the gradients of the learned parameters over the processes."""
        for parameter in self._learned.values() if args.world_size > 1 else ():
            # None: this process had no batch for the loss.
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = sum_over_ranks(own) / args.world_size

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the gradients of the learned parameters: the trainer only forgets its model's."""
        for parameter in self._learned.values():
            parameter.grad = None

    def _observe(self, _: nn.Module, args: Any, kwargs: Any, output: sl.ObjectiveOutput) -> None:
        batch = args[0] if args else kwargs["batch"]
        # As the trainer's own loss: a mean over batches in training, over rows in an evaluation.
        is_training = torch.is_grad_enabled()
        share = 1 if is_training else len(batch.anchor.activations)
        for name, value in output.terms.items():
            sums = self._sums[is_training][self._names.index(name)]
            sums += torch.stack([value.detach().float() * share, torch.full_like(sums[0], share)])
        for side, diagnostics in self.diagnostics.items() if is_training else ():
            sides = (batch.anchor, batch.positive)
            one, other = sides if side == "query" else reversed(sides)
            diagnostics.update(one, other_side=other, training=True)

    def _means(self, is_training: bool, prefix: str = "") -> dict[str, float]:
        """Return the means of the terms over all processes, and forget them."""
        if not self._names:
            return {}
        summed = sum_over_ranks(self._sums[is_training]).tolist()
        self._sums[is_training].zero_()
        named = zip(self._names, summed, strict=True)
        return {f"{prefix}terms/{name}": total / n for name, (total, n) in named if n}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Add the numbers to the log of training or of an evaluation."""
        losses = [name for name in logs if name.endswith("_loss")]
        numbers: dict[str, float] = {}
        if "loss" in logs:
            numbers = self._means(True)
            for side, diagnostics in self.diagnostics.items():
                report = diagnostics.all_reduce().report()
                diagnostics.reset()
                numbers |= {f"{side}/{name}": value for name, value in report.items()}
        elif losses and "train_loss" not in logs:
            prefix = min(losses, key=len).removesuffix("loss")
            numbers = self._evaluated = self._means(False, prefix)
        logs.update(numbers)
        state.log_history[-1].update(numbers)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        """Add the terms to the metrics that the trainer returns and compares."""
        metrics.update(self._evaluated)
        self._evaluated = {}
