"""A callback for the ``Trainer`` of transformers, and for all trainers that inherit from it."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparse_losses as sl
from sparse_losses._core.extras import from_extra
from sparse_losses.distributed import sum_over_ranks
from sparse_losses.representation.encoding import check_texts

with from_extra("transformers"):
    from safetensors.torch import load, save
    from transformers import TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState

__all__ = ["TrainingState"]


# The type checker sees their classes as Any, and a subclass of Any is an error.
class TrainingState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback that attaches, saves, resumes and logs what a ``Trainer`` does not know.

    It works in the ``Trainer`` of transformers and in the trainers of sentence-transformers.

    - **Steps** are the optimiser's, without those that a ``GradScaler`` skips.
    - **Checkpoints** have the states of the schedules and the learned parameters of ``loss``;
      ``resume_from_checkpoint`` restores them.
    - **Several processes.** Make the encoder the trainer's model, and call that in
      ``compute_loss``: DDP sees no other calls. The learned parameters of ``loss`` start alike on
      all processes, and their gradients are averaged.
    - **Accumulation.** Of a batch with ``labels`` a ``Trainer`` takes your loss for a sum, and does
      not divide it, unless its model is a ``SpladeEncoder``: for other models, set the trainer's
      ``model_accepts_loss_kwargs = False``.
    - **The log** has the terms of every ``SpladeObjective``, without weights, and the diagnostics.
    - **The end.** ``calibrate(encoder, calibrate_on, calibrate_to, queries=queries,
      query_target=query_target)`` runs on four fifths of the texts; its result and the active
      dimensions of the last fifth are printed. The checkpoints are not calibrated.

    Args:
        *schedules: each a ``TrainingSchedule``, or another object with ``attach(optimizer)``,
            ``state_dict`` and ``load_state_dict``, or a function of the trainer's number of steps
            that returns a list of them.
        loss: the loss module, or a dict of them, whose parameters (a temperature, prototypes) are
            learned and not part of the trainer's model; they must be in its optimiser.
        diagnostics: by side, ``"query"`` or ``"document"``, of the training since the last log.
        calibrate_on: documents like those that will be indexed.
        calibrate_to: active dimensions per document after calibration.
        queries: queries like those that will be asked.
        query_target: active dimensions per query.
        encoder: the encoder to calibrate; default: the trainer's model.

    Examples:
        >>> from sparse_losses import SpladeObjective, TrainingSchedule, Warmup
        >>> from sparse_losses.integrations.transformers import TrainingState
        >>> from sparse_losses.objective import terms
        >>> objective = SpladeObjective({"flops": (0.1, terms.flops("document"))})
        >>> schedule = TrainingSchedule(objective, warmups={"flops": Warmup(100)})
        >>> callbacks = [TrainingState(schedule, loss=objective)]  # of your Trainer
    """

    def __init__(
        self,
        *schedules: Any,
        loss: nn.Module | Mapping[str, nn.Module] | None = None,
        diagnostics: Mapping[str, sl.Diagnostics] | None = None,
        calibrate_on: Sequence[str] | None = None,
        calibrate_to: float | Sequence[float] | None = None,
        queries: Sequence[str] | None = None,
        query_target: float | Sequence[float] | None = None,
        encoder: nn.Module | None = None,
    ) -> None:
        for one in schedules:
            if isinstance(one, nn.Module) or not (hasattr(one, "attach") or callable(one)):
                raise TypeError(f"expected schedules, got {one!r}: is it the `loss`?")
        for texts in (calibrate_on, queries):
            check_texts(texts or [])
        if (calibrate_on is None) != (calibrate_to is None):
            raise ValueError("expected `calibrate_on` with `calibrate_to`, got one of them")
        named = loss if isinstance(loss, Mapping) else {"loss": loss or nn.Module()}
        self.losses, self.diagnostics = dict(named), dict(diagnostics or {})
        self.calibrate_on, self.calibrate_to, self.encoder = calibrate_on, calibrate_to, encoder
        self.queries, self.query_target = queries, query_target
        self._given, self.schedules = schedules, [x for x in schedules if hasattr(x, "attach")]
        self._learned: dict[str, nn.Parameter] = {}
        self._handles: list[Any] = []
        # Sums of the terms and of their batches (rows, in an evaluation), by whether it trains.
        self._terms: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
        self._evaluated: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """Return what the trainer writes to ``trainer_state.json``."""
        tensors = {name: x.detach().cpu().contiguous() for name, x in self._learned.items()}
        learned = base64.b64encode(save(tensors)).decode()
        states = [one.state_dict() for one in self.schedules]
        return {"args": {}, "attributes": {}, "schedules": states, "learned": learned}

    def _restore(self, state: TrainerState, *, schedules: bool = True) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        try:
            tensors = load(base64.b64decode(saved["learned"]))
            if tensors.keys() != self._learned.keys():
                raise KeyError(f"parameters {sorted(tensors)}")
            with torch.no_grad():
                for name, parameter in self._learned.items():
                    parameter.copy_(tensors[name].reshape(parameter.shape))
            states = zip(self.schedules, saved["schedules"], strict=True)
            for one, its_state in states if schedules else ():
                one.load_state_dict(its_state)
        except Exception as error:  # damaged tensors fail in many ways
            raise ValueError(
                f"expected the state of {len(self.schedules)} schedules and of the parameters "
                f"{sorted(self._learned)} in checkpoint-{state.global_step}, got another: resume "
                "with the TrainingState of the saved run and without "
                "`restore_callback_states_from_checkpoint`, which replaces it"
            ) from error

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **objects: Any) -> None:
        """Restore the state if training resumes, and attach the schedules."""
        self._detach()  # from a run that was interrupted
        if isinstance(state.stateful_callbacks.get(type(self).__name__), list):
            raise ValueError("expected one TrainingState for all schedules, got several")
        self._encoder = objects["model"] if self.encoder is None else self.encoder
        if self.calibrate_on is not None and not hasattr(self._encoder, "encode_document"):
            kind = type(self._encoder).__name__
            raise TypeError(f"expected `encoder`, a SpladeEncoder or SparseEncoder, got {kind}")
        for one in self._given:
            if not hasattr(one, "attach"):
                self.schedules += one(state.max_steps)
        self._given = ()
        optimizer, model = objects["optimizer"], {id(x) for x in objects["model"].parameters()}
        self._learned = {
            f"{key}.{name}": x
            for key, loss in self.losses.items()
            for name, x in loss.named_parameters()
            if x.requires_grad and id(x) not in model
        }
        optimized = {id(x) for group in optimizer.param_groups for x in group["params"]}
        if missing := [name for name, x in self._learned.items() if id(x) not in optimized]:
            raise ValueError(
                f"expected the parameters of `loss` in the optimiser, got one without {missing}: "
                "pass the Trainer optimizers=(optimizer, None) with them, or make the loss a "
                "submodule of the model"
            )
        if state.global_step:
            self._restore(state)
        if args.world_size > 1:  # each process may have drawn its own prototypes
            for parameter in self._learned.values():
                torch.distributed.broadcast(parameter.data, src=0)
        self._terms = {True: {}, False: {}}
        self._handles = [one.attach(optimizer) for one in self.schedules]
        for objective in self._objectives():
            hook = objective.register_forward_hook(self._observe, with_kwargs=True)
            self._handles.append(hook)

    def _objectives(self) -> list[sl.SpladeObjective]:
        modules: list[Any] = [getattr(one, "objective", None) for one in self.schedules]
        modules += [module for loss in self.losses.values() for module in loss.modules()]
        return list(dict.fromkeys(x for x in modules if isinstance(x, sl.SpladeObjective)))

    def _detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Detach, restore the best model's learned parameters, calibrate the encoder."""
        self._detach()
        if args.load_best_model_at_end and state.best_model_checkpoint and self._learned:
            best = Path(state.best_model_checkpoint, "trainer_state.json")
            self._restore(TrainerState.load_from_json(str(best)), schedules=False)
        if self.calibrate_on is None:
            return
        sides = {"document": list(self.calibrate_on), "query": list(self.queries or ())}
        given = [[x for i, x in enumerate(texts) if i % 5 != 4] for texts in sides.values()]
        options: dict[str, Any] = {"queries": given[1] or None, "query_target": self.query_target}
        result = sl.calibrate(self._encoder, given[0], self.calibrate_to, **options, verbose=False)
        counts = []
        for side, texts in sides.items():
            if others := texts[4::5]:
                vectors = getattr(self._encoder, f"encode_{side}")(others)
                active = (vectors.to_sparse_csr().values() > 0).sum().item() / len(others)
                counts.append(f"{active:.1f} per {side}")
        if state.is_world_process_zero:
            print(result, f"active dimensions of other texts: {', '.join(counts)}", sep="\n")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Average the gradients of the learned parameters over the processes."""
        for parameter in self._learned.values() if args.world_size > 1 else ():
            if parameter.grad is None:  # this process had no batch for the loss
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= args.world_size

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the gradients of the learned parameters: the trainer only forgets its model's."""
        for parameter in self._learned.values():
            parameter.grad = None

    def _observe(self, _: nn.Module, args: Any, kwargs: Any, output: sl.ObjectiveOutput) -> None:
        batch = args[0] if args else kwargs["batch"]
        # As the trainer's own loss: a mean over batches in training, over rows in an evaluation.
        is_training = torch.is_grad_enabled()
        share, sums = 1 if is_training else len(batch.anchor.activations), self._terms[is_training]
        for name, value in output.terms.items():
            new = torch.stack([value.detach().float() * share, torch.full_like(value, share)])
            sums[name] = sums[name] + new if name in sums else new
        for side, diagnostics in self.diagnostics.items() if is_training else ():
            sides = (batch.anchor, batch.positive)
            one, other = sides if side == "query" else reversed(sides)
            diagnostics.update(one, other_side=other)

    def _means(self, is_training: bool, prefix: str, device: torch.device) -> dict[str, float]:
        """Return the means of the terms over all processes, and forget them."""
        sums, self._terms[is_training] = self._terms[is_training], {}
        names = sorted({name for one in self._objectives() for name in one.weights})
        zero = torch.zeros(2, device=device)  # of a term without a batch in this process
        pairs = [sums.get(name, zero) for name in names]
        summed = sum_over_ranks(torch.stack(pairs)).tolist() if pairs else []
        named = zip(names, summed, strict=True)
        return {f"{prefix}terms/{name}": total / n for name, (total, n) in named if n}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Add the numbers to the log of training or of an evaluation."""
        losses = [name for name in logs if name.endswith("_loss")]
        if "loss" in logs:
            numbers = self._means(True, "", args.device)
            for side, diagnostics in self.diagnostics.items():
                report = diagnostics.all_reduce().report()
                diagnostics.reset()
                numbers |= {f"{side}/{name}": value for name, value in report.items()}
        elif losses and "train_loss" not in logs:
            prefix = min(losses, key=len).removesuffix("loss")
            numbers = self._evaluated = self._means(False, prefix, args.device)
        else:
            return
        logs.update(numbers)
        state.log_history[-1].update(numbers)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        """Add the terms to the metrics that the trainer returns and compares."""
        metrics.update(self._evaluated)
        self._evaluated = {}
