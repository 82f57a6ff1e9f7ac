"""A ``Trainer`` of transformers for an encoder with an objective, and its collator."""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_choice, check_flag, check_integer
from sparse_losses._core.extras import from_extra
from sparse_losses._core.files import replaced_file
from sparse_losses._core.host_copy import HostCopy
from sparse_losses.objective import (
    Diagnostics,
    SparsityController,
    SpladeBatch,
    Texts,
    TrainingSchedule,
)
from sparse_losses.objective.teacher import Teacher, score_candidates
from sparse_losses.representation import SpladeEncoder

with from_extra("transformers"):
    from safetensors.torch import load_model, save_model
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

__all__ = ["SpladeCollator", "SpladeTrainer"]

TEXTS = ("anchor", "positive", "negative")
NUMBERS = {
    "positive_ids": torch.int64,
    "teacher_scores": torch.float32,
    "teacher_anchor_scores": torch.float32,
}
SIDES = {"query": "anchor", "document": "positive"}  # names in terms and in batches
REST = "objective.pt"  # the state of objective and schedules in a checkpoint
TO_PUBLISH = "to publish: `encoder.save_pretrained(folder)`, then upload the folder"
WEIGHTS = "model.safetensors"  # the Trainer looks for this name; used if the encoder is not ours


class SpladeCollator:
    """A collator that tokenizes rows of a data set for ``SpladeTrainer``.

    A row is a ``dict``. All rows of a batch must have the same of these columns; other columns are
    ignored:

    - ``anchor``, ``positive``: a text each.
    - ``negative``: a text; or a list of texts, with the same number in every row.
    - ``positive_ids``: an integer; equal ids are the same document.
    - ``teacher_scores``: a list of numbers. With negatives: scores of the positive and the row's
      own negatives, ``1 + N`` (see ``teacher_candidates``). Without negatives: scores of all
      positives of the batch, ``B``.
    - ``teacher_anchor_scores``: a list of ``B`` numbers, scores of all anchors of the batch.

    A row can hold scores of the batch's other rows only if the batches are always the same.
    Otherwise pass a ``teacher``, which scores each batch during training.

    Args:
        tokenizer: The encoder's tokenizer.
        max_length: Largest number of tokens per text; ``None``: the tokenizer's limit.
        teacher: A ``BM25Teacher``, or any function of queries and documents that returns their
            scores ``[Q, D]``. Both are dicts of ``texts``, a list of strings, and their
            ``input_ids`` and ``attention_mask``. It gives ``teacher_scores`` of all candidates:
            ``[B, B]``, or ``[B, B + N]`` with negatives.
        score_anchors: Whether ``teacher`` also gives ``teacher_anchor_scores``, for the term
            ``context_distillation``.
        teacher_candidates: Which candidates ``teacher_scores`` holds with negatives: ``"own"``, as
            above, or ``"batch"``: the batch's positives, ``B``, or all candidates, ``B + N``.

    Raises:
        ValueError: for no rows, rows without an anchor or a positive, or with different columns or
            numbers of negatives; for texts, ids or scores of another type (such as the ``None``
            that ``datasets`` uses for a missing column); for lists of scores of another length; for
            a ``max_length`` without room for a token beside the special ones.
        TypeError: for a teacher that is no function, or does not return scores.

    Examples:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> from sparse_losses.integrations.transformers import SpladeCollator
        >>> vocabulary = {"[PAD]": 0, "[UNK]": 1, "learned": 2, "sparse": 3, "retrieval": 4}
        >>> tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        >>> tokens.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]")
        >>> row = {"anchor": "sparse", "positive": "sparse retrieval", "negative": ["learned"] * 3}
        >>> batch = SpladeCollator(tokenizer, max_length=8)([row, row])
        >>> {name: column["input_ids"].shape for name, column in batch.items()}
        {'anchor': torch.Size([2, 1]), 'positive': torch.Size([2, 2]), \
'negative': torch.Size([2, 3, 1])}
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int | None = None,
        *,
        teacher: Teacher | None = None,
        score_anchors: bool = False,
        teacher_candidates: Literal["own", "batch"] = "own",
    ) -> None:
        check_flag(score_anchors=score_anchors)
        check_choice("teacher_candidates", teacher_candidates, ("own", "batch"))
        if max_length is not None:
            special = tokenizer.num_special_tokens_to_add(pair=False)
            check_integer("max_length", max_length, minimum=special + 1)
        if teacher is not None and not callable(teacher):
            raise TypeError(
                "expected `teacher` to be a BM25Teacher or another function of queries and "
                f"documents, got {teacher!r}"
            )
        if score_anchors and teacher is None:
            raise ValueError("expected a `teacher` for `score_anchors=True`, got None")
        self.tokenizer, self.max_length = tokenizer, max_length
        self.teacher, self.score_anchors = teacher, score_anchors
        self.teacher_candidates = teacher_candidates

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the fields of ``SpladeBatch``, texts as ``input_ids`` and ``attention_mask``."""
        if len(rows) == 0:
            raise ValueError("expected at least one row, got none")
        for row in rows:
            if not isinstance(row, Mapping):
                raise TypeError(f"expected rows as dicts of columns, got {row!r}")
        known = (*TEXTS, *NUMBERS)
        names = [name for name in known if name in rows[0]]
        for row in rows:
            same = [name for name in known if name in row] == names
            if not same or not {"anchor", "positive"} <= row.keys():
                optional = ", ".join(map(repr, ("negative", *NUMBERS)))
                raise ValueError(
                    "expected rows with 'anchor' and 'positive', and either all or no rows with "
                    f"{optional}, got {sorted(row)} in a batch with {sorted(rows[0])}"
                )
        columns = {name: [row[name] for row in rows] for name in names}
        inputs: dict[str, Any] = {
            name: self._tokenized(name, column) if name in TEXTS else _numbers(name, column)
            for name, column in columns.items()
        }
        if self.teacher is not None:
            inputs |= self._taught(self.teacher, inputs, columns)
        elif "teacher_scores" in inputs and "negative" in inputs:
            inputs["teacher_candidates"] = self._whose_scores(inputs)
        return inputs

    def _taught(
        self, teacher: Teacher, inputs: Mapping[str, Any], columns: Mapping[str, list[Any]]
    ) -> dict[str, Any]:
        """Return the teacher's scores of this batch."""
        if found := [
            name for name in ("teacher_scores", "teacher_anchor_scores") if name in inputs
        ]:
            raise ValueError(f"expected rows without scores because of `teacher`, got {found}")
        texts = {name: inputs[name] | {"texts": columns[name]} for name in TEXTS if name in inputs}
        if "negative" in texts and inputs["negative"]["input_ids"].ndim == 3:
            texts["negative"]["texts"] = [text for own in columns["negative"] for text in own]
        scores: dict[str, Any] = {"teacher_scores": score_candidates(teacher, **texts)}
        if "negative" in texts:
            scores["teacher_candidates"] = "batch"
        if self.score_anchors:
            anchors = score_candidates(teacher, texts["anchor"], texts["anchor"])
            scores["teacher_anchor_scores"] = anchors
        return scores

    def _whose_scores(self, inputs: Mapping[str, Any]) -> str:
        """Check the number of the rows' scores and return which candidates they are of."""
        scores, negatives = inputs["teacher_scores"], inputs["negative"]["input_ids"]
        size, is_list = len(negatives), negatives.ndim == 3
        count = negatives.shape[1] if is_list else 1
        lengths = {
            "own": {"1 + N": 1 + count},
            "batch": {"B": size, "B + N": size + (count if is_list else size)},
        }[self.teacher_candidates]
        if scores.ndim != 2 or scores.shape[1] not in lengths.values():
            wanted = " or ".join(f"{name} = {length}" for name, length in lengths.items())
            raise ValueError(
                f"expected 'teacher_scores' of {wanted} numbers per row with negatives and "
                f"teacher_candidates={self.teacher_candidates!r}, got {list(scores.shape[1:])}: "
                'use "own" for the positive and the row\'s own negatives, "batch" for the '
                "candidates of the whole batch"
            )
        return self.teacher_candidates

    def _tokenized(self, name: str, column: list[Any]) -> dict[str, Tensor]:
        for found in column:
            if isinstance(found, str):
                continue
            are_some = isinstance(found, Collection) and len(found) > 0
            is_ordered = not isinstance(found, (Set, Mapping))  # teacher scores are in order
            is_list = are_some and is_ordered and all(isinstance(text, str) for text in found)
            if name != "negative" or not is_list:
                or_more = ", or a list of one or more" if name == "negative" else ""
                raise ValueError(f"expected {name!r} to be a text{or_more}, got {found!r}")
        counts = [None if isinstance(texts, str) else len(texts) for texts in column]
        if len({*counts}) > 1:
            raise ValueError(
                f"expected the same number of texts of {name!r} in every row, got {counts} (None: "
                "a single text)"
            )
        count = counts[0]
        batch = self.tokenizer(
            column if count is None else [text for texts in column for text in texts],
            padding=True,
            padding_side="right",  # as in SpladeEncoder.tokenize
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        tensors = {key: batch[key] for key in ("input_ids", "attention_mask")}
        if count is None:
            return tensors
        return {key: tensor.unflatten(0, (-1, count)) for key, tensor in tensors.items()}


def _numbers(name: str, column: list[Any]) -> Tensor:
    if NUMBERS[name] == torch.int64:
        for number in column:
            try:
                index = operator.index(number)
            except TypeError:  # torch.tensor would round 0.25 and 0.75 to the same id
                raise ValueError(f"expected {name!r} to be integers, got {number!r}") from None
            if not -(2**63) <= index < 2**63:
                raise ValueError(f"expected {name!r} to be integers of 64 bits, got {index}")
        return torch.tensor(column, dtype=NUMBERS[name])
    rows = [_row_of_numbers(name, row) for row in column]
    counts = [len(row) for row in rows]
    if len({*counts}) > 1:
        raise ValueError(f"expected the same number of {name!r} in every row, got {counts}")
    return torch.stack(rows)


def _row_of_numbers(name: str, row: Any) -> Tensor:
    """Return a list, an array or a tensor of numbers as a tensor."""
    try:
        numbers = torch.as_tensor(row, dtype=NUMBERS[name]).detach()
    except (TypeError, ValueError, RuntimeError):  # PyTorch's errors do not name the column
        numbers = None
    if numbers is None or numbers.ndim != 1:
        raise ValueError(f"expected {name!r} to be a list of numbers in every row, got {row!r}")
    return numbers


class _Towers(nn.Module):
    """Encoder and objective as one module for DDP, compilers and optimisers."""

    # The loss is the mean over a batch, not over the labels that the Trainer counts.
    accepts_loss_kwargs = False

    def __init__(self, encoder: nn.Module, objective: Callable[..., Any], logits: bool) -> None:
        super().__init__()
        self.encoder, self.objective, self.logits = encoder, objective, logits

    def forward(self, **columns: Any) -> dict[str, Any]:
        options = {"return_logits": True} if self.logits else {}
        batch = SpladeBatch.from_columns(self.encoder, columns, **options)
        output = self.objective(batch)
        total, terms = output if isinstance(output, tuple) else (output, {})
        return {
            "loss": total,
            "terms": terms,
            "anchor": batch.anchor.activations.detach(),
            "positive": batch.positive.activations.detach(),
        }

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Enable checkpointing in the encoder; the Trainer calls it for its argument."""
        model: Any = self.encoder
        if isinstance(model, SpladeEncoder):
            model = model.model
        model.activation_checkpointing_enable(**options)


class _Means:
    """The means of named values since they were last taken, without a device wait."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[Tensor, int]] = {}

    def add(self, values: Mapping[str, Tensor], share: int = 1) -> None:
        """Add the values of a batch with its weight in the mean."""
        for name, value in values.items():
            value = value.detach().float()
            total, count = self.sums.get(name, (torch.zeros_like(value), 0))
            self.sums[name] = total + share * value, count + share

    def take(self, accelerator: Any) -> HostCopy[dict[str, float]]:
        """Return and reset the means over all processes, which must have the same names."""
        sums, self.sums = self.sums, {}
        if not sums:
            return HostCopy(torch.empty(0), lambda _: {})
        means = torch.stack([total / count for total, count in sums.values()])
        return HostCopy(
            accelerator.reduce(means, "mean"),
            lambda values: dict(zip(sums, values.tolist(), strict=True)),
        )


# The type checker sees their classes as Any, and a subclass of Any is an error.
class SpladeTrainer(Trainer):  # type: ignore[misc]
    r"""The ``Trainer`` of transformers for pairs and triplets of texts.

    It trains the encoder and the objective's parameters (such as a temperature) as one model. With
    ``gradient_accumulation_steps`` an update uses the mean of the losses of its batches. With
    several processes, an objective with ``gather=True`` gives the update of one process with the
    whole batch. The log also holds, as means since the last log, the terms without their weights
    (``info_nce``; ``eval_info_nce`` in an evaluation), the numbers of ``diagnostics``
    (``document/active_dimensions``), and the controllers' reports (``document_flops/weight``).

    A checkpoint is a folder of ``SpladeEncoder.save_pretrained`` with the state of objective and
    schedules; ``train(resume_from_checkpoint=...)`` restores all of it.

    Args:
        model: A ``SpladeEncoder``, which is trained in place; or any module that maps
            ``input_ids`` and ``attention_mask`` ``[B, S]`` to activations ``[B, V]``.
        args: The ``TrainingArguments``; ``remove_unused_columns`` is ignored.
        objective: A ``SpladeObjective``, or any callable that maps a ``SpladeBatch`` to
            a loss, or to a loss and a dict of its terms.
        schedules: ``TrainingSchedule`` and ``SparsityController`` of that objective. The trainer
            attaches them to its optimiser, whose steps they count; skipped steps do not count.
        diagnostics: By side, ``"query"`` or ``"document"``; read and reset when the loss is
            logged. They get the training batches of all processes.
        return_logits: Whether to pass the pooled logits to the objective too.
        teacher: Scores every batch, such as a ``BM25Teacher``; see ``SpladeCollator``.
        data_collator: Default: a ``SpladeCollator`` of the encoder's tokenizer and the teacher.
        **options: Other arguments of ``Trainer``, such as ``train_dataset`` and ``callbacks``.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast, TrainingArguments
        >>> from sparse_losses import SpladeObjective
        >>> from sparse_losses.integrations.transformers import SpladeCollator, SpladeTrainer
        >>> class Encoder(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding = torch.nn.Embedding(3, 5)
        ...
        ...     def forward(self, input_ids, attention_mask):
        ...         states = self.embedding(input_ids) * attention_mask[..., None]
        ...         return states.relu().amax(1)
        >>> vocabulary = {"[PAD]": 0, "sparse": 1, "retrieval": 2}
        >>> tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
        >>> tokens.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]")
        >>> rows = [{"anchor": text, "positive": text} for text in ("sparse", "retrieval")] * 2
        >>> with TemporaryDirectory() as folder:
        ...     trainer = SpladeTrainer(
        ...         Encoder(),
        ...         TrainingArguments(folder, max_steps=2, disable_tqdm=True, use_cpu=True),
        ...         objective=SpladeObjective({"info_nce": 1.0}),
        ...         data_collator=SpladeCollator(tokenizer, max_length=8),
        ...         train_dataset=rows,
        ...     )
        ...     trainer.train().global_step
        {'train_runtime': ...}
        2
    """

    # With this the Trainer divides the loss by the batches of a step, not by counted items.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        objective: Callable[[SpladeBatch], Any],
        schedules: Sequence[TrainingSchedule | SparsityController] = (),
        diagnostics: Mapping[str, Diagnostics] | None = None,
        return_logits: bool = False,
        teacher: Teacher | None = None,
        data_collator: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        check_flag(return_logits=return_logits)
        for side in diagnostics or ():
            check_choice("diagnostics", side, list(SIDES))
        terms = getattr(objective, "weights", {})
        _check_arguments(args, options, terms)
        if data_collator is None:
            if not isinstance(model, SpladeEncoder):
                raise ValueError(
                    "expected `data_collator` for a model that is no SpladeEncoder, got None"
                )
            data_collator = SpladeCollator(
                model.tokenizer,
                model.max_length,
                teacher=teacher,
                score_anchors=teacher is not None and "context_distillation" in terms,
            )
        elif teacher is not None:
            raise ValueError(
                "expected `teacher` or `data_collator`, got both: use SpladeCollator(teacher=...)"
            )
        args.remove_unused_columns = False  # it would keep only the encoder's argument names
        self.schedules, self.diagnostics = list(schedules), dict(diagnostics or {})
        self._means = {True: _Means(), False: _Means()}  # keys: whether in training
        self._sent: dict[str, HostCopy[Any]] = {}  # numbers for the next log, by the names' prefix
        super().__init__(_Towers(model, objective, return_logits), args, data_collator, **options)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "expected the whole model on every device, got FSDP or DeepSpeed, which have "
                "other checkpoints: use a plain PyTorch loop with them"
            )
        self.can_return_loss = True  # without labels
        self.add_callback(_Steps(self))

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Raise an error: the Trainer would describe the encoder together with its objective."""
        raise NotImplementedError(f"expected no model card of encoder and objective; {TO_PUBLISH}")

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Raise an error, as ``create_model_card`` does."""
        raise NotImplementedError(f"expected no upload of encoder and objective; {TO_PUBLISH}")

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the Trainer's names without the objective's: a temperature must not decay."""
        names: list[str] = super().get_decay_parameter_names(model)
        return [name for name in names if not name.startswith("objective.")]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the total of a batch, on request with the vectors ``anchor`` and ``positive``."""
        outputs = model(**inputs)
        # As in the Trainer, evaluation averages over rows and training over batches.
        share = 1 if model.training else len(inputs["anchor"]["input_ids"])
        self._means[model.training].add(outputs.pop("terms"), share)
        if model.training:
            sides = {name: Texts(outputs[name], **inputs[name]) for name in SIDES.values()}
            for side, diagnostics in self.diagnostics.items():
                own, other = ("anchor", "positive")[:: 1 if side == "query" else -1]
                diagnostics.update(sides[own], other_side=sides[other])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def send(self) -> None:
        """Start copying the numbers since the last call to the host, for the log."""
        self._sent = {"": self._means[True].take(self.accelerator)}
        for side, diagnostics in self.diagnostics.items():
            self._sent[f"{side}/"] = diagnostics.all_reduce().report_later()
            diagnostics.reset()

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Add terms, diagnostics and reports to the log of training."""
        if "loss" in logs:
            if not self._sent:
                self.send()
            for prefix, later in self._sent.items():
                logs.update({f"{prefix}{k}": v for k, v in later.read().items()})
            self._sent = {}
            for schedule in self.schedules:
                if isinstance(schedule, SparsityController):
                    report = schedule.report().items()
                    numbers = {k: v for k, v in report if isinstance(v, (int, float))}
                    logs.update({f"{schedule.term}/{k}": v for k, v in numbers.items()})
        super().log(logs, *args, **options)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Add the terms to the metrics."""
        self._means[False] = _Means()
        output = super().evaluation_loop(*args, **options)
        prefix = args[4] if len(args) > 4 else options.get("metric_key_prefix", "eval")
        terms = self._means[False].take(self.accelerator).read()
        output.metrics.update({f"{prefix}_{name}": value for name, value in terms.items()})
        return output

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # The Trainer's own method refuses tensors that two modules share, as model and head do.
        if not self.args.should_save:
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        encoder = self.model.encoder
        if isinstance(encoder, SpladeEncoder):
            encoder.save_pretrained(folder)
        else:
            with replaced_file(folder / WEIGHTS) as file:
                save_model(encoder, file.name)
        with replaced_file(folder / "training_args.bin") as file:
            torch.save(self.args, file)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        states = self._load_model(resume_from_checkpoint)["schedules"]
        if len(states) != len(self.schedules):
            raise ValueError(
                f"expected {len(states)} schedules as in {resume_from_checkpoint}, got "
                f"{len(self.schedules)}"
            )
        for schedule, state in zip(self.schedules, states, strict=True):
            schedule.load_state_dict(state)

    def _load_best_model(self) -> None:
        self._load_model(self.state.best_model_checkpoint)

    def _load_model(self, checkpoint: str) -> dict[str, Any]:
        """Load encoder and objective, and return the whole state."""
        folder, encoder, objective = Path(checkpoint), self.model.encoder, self.model.objective
        if isinstance(encoder, SpladeEncoder):
            # A new model draws random numbers, which would change the order of the rows.
            with torch.random.fork_rng(devices=[]):
                saved = SpladeEncoder.from_pretrained(folder)
            encoder.load_state_dict(saved.state_dict())
        else:
            load_model(encoder, str(folder / WEIGHTS))
        state: dict[str, Any] = torch.load(folder / REST, map_location="cpu", weights_only=True)
        if isinstance(objective, nn.Module):
            objective.load_state_dict(state["objective"])
        return state


def _check_arguments(
    args: TrainingArguments, options: Mapping[str, Any], terms: Collection[str]
) -> None:
    """Raise an error for settings of the Trainer that this one does not support."""
    if args.n_gpu > 1:
        raise ValueError(
            f"expected one process per GPU, got {args.n_gpu} GPUs in this one, which would "
            "split every batch and its negatives: start with torchrun or accelerate launch"
        )
    if args.push_to_hub:
        raise ValueError(f"expected `push_to_hub=False`, got True; {TO_PUBLISH}")
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            f"expected `neftune_noise_alpha=None`, got {args.neftune_noise_alpha}: for noise, "
            "hook `encoder.model.get_input_embeddings()`"
        )
    for refused in ("compute_loss_func", "model_init"):
        if options.get(refused) is not None:
            raise ValueError(f"expected `model` and `objective`, got `{refused}`")
    if args.label_smoothing_factor:
        raise ValueError(
            "expected `label_smoothing_factor` to be 0, as there are no classes to smooth, got "
            f"{args.label_smoothing_factor}"
        )
    best = args.metric_for_best_model or ""
    if args.greater_is_better and any(f"_{best}".endswith(f"_{term}") for term in terms):
        raise ValueError(
            "expected `greater_is_better=False` for a loss as `metric_for_best_model`, got "
            f"True for {best!r} (the default for names that do not end in 'loss'), which would "
            "keep the worst model"
        )


class _Steps(TrainerCallback):  # type: ignore[misc]  # as above
    """A callback that attaches the schedules to the optimiser and saves their state."""

    def __init__(self, trainer: SpladeTrainer) -> None:
        self.trainer = trainer
        self.attached: list[Any] = []

    def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.detach()  # from a run that was interrupted
        self.attached = [schedule.attach(optimizer) for schedule in self.trainer.schedules]

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.detach()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_log:  # our numbers arrive while the Trainer waits for the loss
            self.trainer.send()

    def detach(self) -> None:
        for handle in self.attached:
            handle.remove()
        self.attached = []

    def on_save(self, args: TrainingArguments, state: Any, *_: Any, **__: Any) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        schedules, objective = self.trainer.schedules, self.trainer.model.objective
        if args.should_save:  # after a step all processes have the same state
            saved = {
                "objective": objective.state_dict() if isinstance(objective, nn.Module) else {},
                "schedules": [schedule.state_dict() for schedule in schedules],
            }
            with replaced_file(folder / REST) as file:
                torch.save(saved, file)
        for schedule in schedules:
            if isinstance(schedule, SparsityController):
                schedule.checkpoint = str(folder)
