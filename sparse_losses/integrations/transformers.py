"""A callback for the ``Trainer`` of transformers, and for all trainers that inherit from it."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_choice, check_number
from sparse_losses._core.dtensors import full
from sparse_losses._core.extras import from_extra
from sparse_losses.distributed import sum_over_ranks
from sparse_losses.objective.batch import SpladeBatch
from sparse_losses.objective.controller import SparsityController
from sparse_losses.objective.diagnostics import Diagnostics
from sparse_losses.objective.objective import ObjectiveOutput, SpladeObjective
from sparse_losses.representation.encoder import SpladeEncoder
from sparse_losses.representation.encoding import check_texts
from sparse_losses.sparsity.calibration import calibrate
from sparse_losses.sparsity.models import document_modules

with from_extra("transformers"):
    from safetensors.torch import load, save
    from transformers import TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState

__all__ = ["TrainingState"]

FOLDS = 5  # of the texts to calibrate on every fifth is left out, and counted


def _active_dimensions(encoder: Any, texts: Sequence[str]) -> float:
    """Return the mean number of active dimensions of documents as they are indexed."""
    bar = "show_progress" if isinstance(encoder, SpladeEncoder) else "show_progress_bar"
    vectors = encoder.encode_document(list(texts), **{bar: False})
    active: int = (vectors.to_sparse_csr().values() > 0).sum().item()
    return active / len(texts)


# The type checker sees their classes as Any, and a subclass of Any is an error.
class TrainingState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback that attaches, saves, resumes and logs what a ``Trainer`` does not know.

    It works in the ``Trainer`` of transformers and in the trainers of sentence-transformers.

    - **Steps.** A controller without ``steps`` plans its descent over the steps of the trainer.
      Schedules and controllers count the optimiser's steps, not the batches that are accumulated,
      and not the steps that a ``GradScaler`` skips.
    - **Checkpoints.** ``trainer_state.json`` has their states and the learned parameters of
      ``loss``. ``train(resume_from_checkpoint=...)`` restores them on every process,
      ``load_best_model_at_end`` the parameters.
    - **Several processes.** The learned parameters start alike on all of them, and their gradients
      are averaged before every step of the optimiser.
    - **The log** has the terms without their weights, the diagnostics, and the state of every
      controller; the page on trainers lists the keys.
    - **The end** prints each controller's target and what became of it. With ``calibrate_on`` the
      encoder is calibrated (``sparse_losses.calibrate``) on four fifths of these texts, and the
      active dimensions of the last fifth are counted. The checkpoints are not calibrated.

    Args:
        *schedules_and_controllers: ``TrainingSchedule``, ``SparsityController``, or other objects
            with their ``attach(optimizer)``, ``state_dict`` and ``load_state_dict``.
        loss: the loss module, or a dict of them, whose parameters (a temperature, prototypes) are
            learned but are not part of the trainer's model; they must be in its optimiser. Default:
            no loss.
        diagnostics: by side, ``"query"`` or ``"document"``, of the training since the last log.
        calibrate_on: a sample of the documents that will be indexed, at least five texts.
        calibrate_to: active dimensions per document after calibration; default: the controller's
            ``target_active``. Pruning adds none, so let the controller keep 50% more.
        encoder: the encoder to calibrate; default: the trainer's model.

    Raises:
        ValueError: when training starts: for a second ``TrainingState``, learned parameters that
            are not in the optimiser, a checkpoint without the state of objects and parameters.

    Examples:
        >>> from sparse_losses import SparsityController, SpladeObjective
        >>> from sparse_losses.integrations.transformers import TrainingState
        >>> objective = SpladeObjective({"info_nce": 1.0, "document_flops": 0.01})
        >>> controller = SparsityController(objective, target_active=128)
        >>> callbacks = [TrainingState(controller, loss=objective)]  # of your Trainer
    """

    def __init__(
        self,
        *schedules_and_controllers: Any,
        loss: nn.Module | Mapping[str, nn.Module] | None = None,
        diagnostics: Mapping[str, Diagnostics] | None = None,
        calibrate_on: Sequence[str] | None = None,
        calibrate_to: float | None = None,
        encoder: nn.Module | None = None,
    ) -> None:
        for side in diagnostics or ():
            check_choice("diagnostics", side, ["query", "document"])
        if wrong := [x for x in schedules_and_controllers if not hasattr(x, "attach")]:
            raise TypeError(f"expected schedules and controllers, got {wrong}: is it the `loss`?")
        named = loss if isinstance(loss, Mapping) else {"loss": loss or nn.Module()}
        if not all(isinstance(module, nn.Module) for module in named.values()):
            raise TypeError(f"expected `loss` to be a module or a dict of modules, got {loss!r}")
        self.steered = schedules_and_controllers
        self.losses: dict[str, nn.Module] = dict(named)
        self.diagnostics = dict(diagnostics or {})
        self.calibrate_on, self.encoder = calibrate_on, encoder
        if calibrate_to is None:
            targets = {one.term: one.target_active for one in self._controllers()}
            calibrate_to = targets.get("document_flops")
        self.calibrate_to = calibrate_to or 0.0
        if calibrate_on is not None:
            check_texts(calibrate_on)
            check_number("calibrate_to", self.calibrate_to, minimum=0.0, exclusive=True)
            if len(calibrate_on) < FOLDS:
                raise ValueError(
                    f"expected `calibrate_on` of at least five texts, got {len(calibrate_on)}"
                )
        self._encoder: Any = encoder
        self._learned: dict[str, nn.Parameter] = {}
        self._handles: list[Any] = []
        # The sums of the terms and of their batches (rows, in an evaluation), by name.
        self._terms: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
        self._evaluated: dict[str, float] = {}

    def _controllers(self) -> list[SparsityController]:
        return [one for one in self.steered if isinstance(one, SparsityController)]

    def _objectives(self) -> list[SpladeObjective]:
        modules = [getattr(one, "objective", None) for one in self.steered]
        modules += [module for loss in self.losses.values() for module in loss.modules()]
        return list(dict.fromkeys(m for m in modules if isinstance(m, SpladeObjective)))

    def state(self) -> dict[str, Any]:
        """Return what the trainer writes to ``trainer_state.json``."""
        tensors = {name: x.detach().cpu().contiguous() for name, x in self._learned.items()}
        return {
            "args": {},
            "attributes": {},
            "schedules": [one.state_dict() for one in self.steered],
            "learned": sorted(tensors),
            "tensors": base64.b64encode(save(tensors)).decode() if tensors else "",
        }

    def _restore(self, state: TrainerState, *, schedules: bool = True) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        names, states = saved.get("learned", []), saved.get("schedules", [])
        if names != sorted(self._learned) or len(states) != len(self.steered):
            raise ValueError(
                f"expected a checkpoint with the state of {len(self.steered)} schedules and "
                f"controllers and of the parameters {sorted(self._learned)}, got one with "
                f"{len(states)} and {names}: resume with the TrainingState of the saved run "
                "and without `restore_callback_states_from_checkpoint`, which replaces it"
            )
        try:
            tensors = load(base64.b64decode(saved["tensors"])) if names else {}
            with torch.no_grad():
                for name, parameter in self._learned.items():
                    parameter.copy_(tensors[name].reshape(parameter.shape))
        except Exception as error:  # damaged tensors fail in many ways
            raise ValueError(f"{names} of checkpoint-{state.global_step} are damaged") from error
        for one, its_state in zip(self.steered, states, strict=True) if schedules else ():
            one.load_state_dict(its_state)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **objects: Any) -> None:
        """Restore the state if training resumes, and attach schedules and controllers."""
        self._detach()  # from a run that was interrupted
        if isinstance(state.stateful_callbacks.get(type(self).__name__), list):
            raise ValueError("expected one TrainingState for all schedules, got several")
        self._encoder = objects["model"] if self.encoder is None else self.encoder
        if self.calibrate_on is not None and not isinstance(self._encoder, SpladeEncoder):
            document_modules(self._encoder)  # an error now, and not after the training
        optimizer = objects["optimizer"]
        model = {id(x) for x in objects["model"].parameters()}
        learned = {
            f"{key}.{name}": x
            for key, loss in self.losses.items()
            for name, x in loss.named_parameters()
            if x.requires_grad and id(x) not in model
        }
        optimized = {id(x) for group in optimizer.param_groups for x in group["params"]}
        if missing := [name for name, x in learned.items() if id(x) not in optimized]:
            raise ValueError(
                f"expected the parameters of `loss` in the optimiser, got one without {missing}: "
                "pass the Trainer optimizers=(optimizer, None) with them, or make the loss a "
                "submodule of the model"
            )
        self._learned = learned
        if state.global_step:
            self._restore(state)
        if args.world_size > 1:  # each process may have drawn its own prototypes
            for parameter in learned.values():
                torch.distributed.broadcast(parameter.data, src=0)
        self._terms = {True: {}, False: {}}
        self._handles = [one.attach(optimizer) for one in self.steered]
        for controller in self._controllers():
            controller.steps = controller.steps or state.max_steps
        for objective in self._objectives():
            hook = objective.register_forward_hook(self._observe, with_kwargs=True)
            self._handles.append(hook)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Detach, restore the best model's learned parameters, calibrate, and print the targets."""
        self._detach()
        if args.load_best_model_at_end and state.best_model_checkpoint and self._learned:
            best = Path(state.best_model_checkpoint, "trainer_state.json")
            self._restore(TrainerState.load_from_json(str(best)), schedules=False)
        lines = [controller.outcome() for controller in self._controllers()]
        if self.calibrate_on is not None:
            lines.append(self._calibrate())
        for line in lines if state.is_world_process_zero else ():
            print(line)

    def _calibrate(self) -> str:
        """Calibrate to the documents' target, and report it and the texts that were left out."""
        encoder, target, texts = self._encoder, self.calibrate_to, list(self.calibrate_on or ())
        given = [text for number, text in enumerate(texts) if number % FOLDS]
        done = "after calibration"
        try:
            calibrate(encoder, given, target)
        except ValueError as error:
            if "`target_active` of at most" not in str(error):
                raise
            done = "not calibrated, which only removes dimensions"
        return (
            f"documents: {_active_dimensions(encoder, given):.1f} active of {target:g} wanted, "
            f"{done}; {_active_dimensions(encoder, texts[::FOLDS]):.1f} on texts left out of it"
        )

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

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Name the checkpoint for the error of a controller whose texts collapse."""
        for controller in self._controllers():
            controller.checkpoint = str(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def _observe(self, _: nn.Module, args: Any, kwargs: Any, output: ObjectiveOutput) -> None:
        batch: SpladeBatch = args[0] if args else kwargs["batch"]
        # As the trainer's own loss: a mean over batches in training, over rows in an evaluation.
        is_training = torch.is_grad_enabled()
        share = 1 if is_training else len(batch.anchor.activations)
        sums = self._terms[is_training]
        values = {f"terms/{name}": value for name, value in output.terms.items()}
        for controller in self._controllers() if not is_training else ():
            texts = batch.anchor if controller.term == "query_flops" else batch.positive
            active = full((texts.activations > 0).sum(-1).float().mean())
            values[f"{controller.term}/active"] = active
        for name, value in values.items():
            new = torch.stack([value.detach().float() * share, torch.full_like(value, share)])
            sums[name] = sums[name] + new if name in sums else new
        for side, diagnostics in self.diagnostics.items() if is_training else ():
            sides = (batch.anchor, batch.positive)
            one, other = sides if side == "query" else reversed(sides)
            diagnostics.update(one, other_side=other)

    def _means(self, is_training: bool, prefix: str, device: torch.device) -> dict[str, float]:
        """Return the means of the terms over all processes, and forget them."""
        sums, self._terms[is_training] = self._terms[is_training], {}
        # A process may have had no batch of a term, or of any.
        zero = torch.zeros(2, device=device)
        names = sorted({f"terms/{name}" for one in self._objectives() for name in one.weights})
        names += [f"{controller.term}/active" for controller in self._controllers()]
        pairs = [sums.get(name, zero) for name in names]
        summed = sum_over_ranks(torch.stack(pairs)).tolist() if pairs else []
        named = zip(names, summed, strict=True)
        return {f"{prefix}{name}": total / n for name, (total, n) in named if n}

    def _reports(self) -> Iterator[tuple[str, float | str]]:
        for side, diagnostics in self.diagnostics.items():
            report = diagnostics.all_reduce().report()
            diagnostics.reset()
            yield from ((f"{side}/{name}", value) for name, value in report.items())
        for controller in self._controllers():
            measured = controller.report()
            for name in ("target", "active", "weight", "status", "dead_rows"):
                value = measured[name]
                if value is not None:  # before the first measurement
                    yield f"{controller.term}/{name}", value

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Add the numbers to the log of training or of an evaluation."""
        numbers: dict[str, Any]
        losses = [name for name in logs if name.endswith("_loss")]
        if "loss" in logs:
            numbers = dict(self._reports()) | self._means(True, "", args.device)
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
