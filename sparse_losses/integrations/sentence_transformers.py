"""Our losses in sentence-transformers' trainers, and idf weights as one of its modules."""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses import (
    DistillationLoss,
    FlopsLoss,
    IdfFlopsLoss,
    InfoNCELoss,
    LanguagePenaltyLoss,
    MarginMSELoss,
    MinActivationLoss,
    NPairLoss,
    NWSLoss,
    ObjectiveOutput,
    PairwiseContrastiveLoss,
    PositiveActivationLoss,
    SelfReconstructionLoss,
    SparsityController,
    SpladeBatch,
    SpladeObjective,
    Texts,
    TrainingSchedule,
    TripletMarginLoss,
    __version__,
)
from sparse_losses._core.checks import check_choice, check_flag, check_integer
from sparse_losses._core.extras import from_extra
from sparse_losses._core.files import replaced_file
from sparse_losses._core.precision import compute_dtype
from sparse_losses._core.similarity import normalize
from sparse_losses.objective.teacher import Teacher, score_candidates
from sparse_losses.representation.folder import IdfWeights, WithoutExpansion

with from_extra("sentence-transformers"):
    from sentence_transformers.base.losses.gradcache import CachedLossMixin
    from sentence_transformers.base.losses.merged_forward import embed_columns
    from sentence_transformers.base.modules import Module
    from transformers import TrainerCallback

__all__ = ["IdfWeights", "LossState", "SentenceTransformersLoss", "WithoutExpansion"]

SUPPORTED = (
    SpladeObjective,
    InfoNCELoss,
    NPairLoss,
    TripletMarginLoss,
    PairwiseContrastiveLoss,
    DistillationLoss,
    MarginMSELoss,
    NWSLoss,
    FlopsLoss,
    IdfFlopsLoss,
    MinActivationLoss,
    LanguagePenaltyLoss,
    SelfReconstructionLoss,
    PositiveActivationLoss,
)


# The type checker sees their classes as Any, and a subclass of Any is an error.
class SentenceTransformersLoss(CachedLossMixin, nn.Module):  # type: ignore[misc]
    """A loss of this package as a loss of sentence-transformers.

    Use it as the ``loss`` of a ``SparseEncoderTrainer`` or ``SentenceTransformerTrainer``, alone or
    in a dict, or inside ``SpladeLoss`` and ``CachedSpladeLoss``, as loss or as regulariser. The
    order of the dataset's columns gives their meaning, as there: anchors, positives, negatives.

    - ``SpladeObjective``: all columns, with their token ids and masks. One column of negatives is
      ``[B, V]``; several are each anchor's own negatives ``[B, n, V]``. The weighted terms are
      logged.
    - InfoNCE, N-pair: every negative is a candidate of every anchor (with ``in_batch=False`` of its
      own anchor only).
    - Triplet margin: an anchor's own negatives.
    - Distillation, MarginMSE, and an objective with these terms: ``labels`` are the teacher's
      scores of the positive and the negatives, ``[B, 1 + n]``; for MarginMSE also the margins
      between them, ``[B, n]``, or ``[B]`` for one negative.
    - Pairwise contrastive: two columns; ``labels`` are 0/1.
    - NWS: ``labels`` are multi-hot, ``[B, L]``; a second column holds keys with the same labels.
    - FLOPS, IDF-FLOPS, minimum activation, language penalty: the rows of all columns together.
    - Self-reconstruction: likewise. Positive activation: the anchors, with the tokens of their
      positives. These two need token ids, which ``SpladeLoss`` does not pass on.

    Args:
        model: a ``SparseEncoder`` or ``SentenceTransformer``.
        loss: the loss, which reduces to one number.
        similarity: ``"dot"`` (the default) or ``"cosine"``: the similarity of distillation and
            MarginMSE. InfoNCE has its own, which a ``SpladeObjective`` uses for all scores.
        labels_are_positive_ids: whether ``labels`` are InfoNCE's ``positive_ids``, ``[B]``
            integers: positives with equal ids are the same document and not each other's negatives.
            For InfoNCE, alone or in a ``SpladeObjective``.
        teacher: for a ``SpladeObjective``: a ``BM25Teacher``, or another function of queries and
            documents (dicts of ``input_ids`` and ``attention_mask``) that returns their scores
            ``[Q, D]``. It scores all candidates of a batch and replaces ``labels``.
        prototype: prototypes ``[L, F]`` of NWS; an ``nn.Parameter`` is learned.
        mini_batch_size: number of texts embedded at a time, twice, with the graph of one mini-batch
            only (gradient caching); loss and gradient are those of the whole batch. Default: all.

    Raises:
        TypeError: for a loss of another package.
        ValueError: for ``reduction="none"`` or options that the loss does not use; when called, for
            columns or labels that do not fit.

    Examples:
        >>> import torch
        >>> from sparse_losses import InfoNCELoss
        >>> from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
        >>> model = torch.nn.Identity()  # in place of your SparseEncoder
        >>> loss = SentenceTransformersLoss(model, InfoNCELoss(temperature=1.0))
        >>> loss.compute_loss_from_embeddings([torch.eye(3), torch.eye(3)])
        tensor(0.5514)
    """

    # These exist only during a forward pass with gradient caching.
    _columns: list[dict[str, Any]]
    _cached: Tensor | ObjectiveOutput
    _learned: list[tuple[Tensor, Tensor | None]]

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        *,
        similarity: str | None = None,
        labels_are_positive_ids: bool = False,
        teacher: Teacher | None = None,
        prototype: Tensor | None = None,
        mini_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(loss, SUPPORTED):
            raise TypeError(
                f"expected a loss of sparse_losses or a SpladeObjective, got {type(loss).__name__}"
            )
        if getattr(loss, "reduction", "mean") == "none":
            raise ValueError("expected a loss that reduces to one number, got reduction='none'")
        name = type(loss).__name__
        if similarity is not None:
            check_choice("similarity", similarity, ("dot", "cosine"))
            if not isinstance(loss, (DistillationLoss, MarginMSELoss)):
                raise ValueError(
                    "expected `similarity` for DistillationLoss or MarginMSELoss only, got "
                    f"{similarity!r} for {name}"
                )
        check_flag(labels_are_positive_ids=labels_are_positive_ids)
        if labels_are_positive_ids and not isinstance(loss, (InfoNCELoss, SpladeObjective)):
            raise ValueError(
                "expected `labels_are_positive_ids` for InfoNCELoss or a SpladeObjective, got "
                f"{name}"
            )
        if teacher is not None and not isinstance(loss, SpladeObjective):
            raise ValueError(f"expected `teacher` for a SpladeObjective, got one for {name}")
        if isinstance(loss, NWSLoss) != (prototype is not None):
            raise ValueError(
                "expected `prototype` for NWSLoss and for no other loss, got "
                f"{'None' if prototype is None else 'one'} for {name}"
            )
        if mini_batch_size is not None:
            check_integer("mini_batch_size", mini_batch_size, minimum=1)
        self.model = model  # the trainer replaces it by the compiled or distributed model
        self.loss = loss
        self.similarity = similarity or "dot"
        self.labels_are_positive_ids = labels_are_positive_ids
        self.teacher = teacher
        self.prototype: Tensor | None
        if isinstance(prototype, nn.Parameter):
            self.prototype = prototype
        else:
            self.register_buffer("prototype", prototype)
        self.mini_batch_size = mini_batch_size
        self.uses_gradient_cache = mini_batch_size is not None

    def forward(
        self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of tokenized columns; for an objective its weighted terms, to be summed.

        Args:
            sentence_features: one dict per column, as the trainer collects them.
            labels: see the class.
        """
        columns = list(sentence_features)
        if self.mini_batch_size is None:
            return self._named(self._value(columns, embed_columns(self.model, columns), labels))
        self._columns = columns
        self._learned = []
        total: Tensor = super().forward_cached(columns, labels)
        # The loss's own parameters get their gradient in the trainer's backward pass, so that it is
        # divided and scaled like the model's.
        for parameter, gradient in self._learned:
            if gradient is not None:
                total = total + ((parameter - parameter.detach()) * gradient).sum()
        cached = self._cached
        del self._columns, self._learned, self._cached
        return self._named(total if isinstance(cached, Tensor) else cached._replace(total=total))

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Compute the loss of embeddings in mini-batches; their mixin calls it as second step."""
        self._cached = self._value(self._columns, [torch.cat(column) for column in reps], labels)
        total = self._cached if isinstance(self._cached, Tensor) else self._cached.total
        if with_backward:
            leaves = [part for column in reps for part in column]
            everything = [
                *self.loss.parameters(),
                *([] if self.prototype is None else [self.prototype]),
            ]
            learned = [x for x in everything if x.requires_grad]
            gradients = torch.autograd.grad(total, leaves + learned, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients, strict=False):
                leaf.grad = gradient
            self._learned = list(zip(learned, gradients[len(leaves) :], strict=True))
            total = total.detach()
        return total

    def compute_loss_from_embeddings(
        self, embeddings: Sequence[Tensor] | Tensor, labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Compute the loss of embeddings, for ``SpladeLoss``.

        Args:
            embeddings: a list of ``[B, V]``, one per column; or rows to regularise, ``[N, V]``.
            labels: see the class.
        """
        vectors = [embeddings] if isinstance(embeddings, Tensor) else list(embeddings)
        return self._named(self._value([{} for _ in vectors], vectors, labels))

    def _value(
        self, columns: Sequence[dict[str, Any]], vectors: Sequence[Tensor], labels: Tensor | None
    ) -> Tensor | ObjectiveOutput:
        loss, count = self.loss, len(vectors)
        name = type(loss).__name__
        texts = [_texts(x, column) for x, column in zip(vectors, columns, strict=True)]
        value: Tensor | ObjectiveOutput
        if isinstance(loss, (FlopsLoss, IdfFlopsLoss, MinActivationLoss, LanguagePenaltyLoss)):
            value = loss(torch.cat(list(vectors)))
            return value
        if isinstance(loss, SelfReconstructionLoss):
            every = reduce(Texts.join, texts)
            if every.input_ids is None or every.attention_mask is None:
                raise ValueError(_no_ids(name))
            value = loss(every.activations, every.input_ids, every.attention_mask)
            return value
        if isinstance(loss, NWSLoss):
            if labels is None or count > 2:
                raise ValueError(
                    f"{name} expected labels [B, L] and one column or two (queries, keys), got "
                    f"{_shape(labels)} and {count} columns"
                )
            key = vectors[1] if count == 2 else None
            key_labels = labels if count == 2 else None
            value = loss(vectors[0], labels, self.prototype, key=key, key_labels=key_labels)
            return value

        if count < 2:
            raise ValueError(f"{name} expected two columns or more (anchors, positives), got 1")
        anchor, positive, *negatives = vectors
        if isinstance(loss, SpladeObjective):
            value = loss(self._batch(loss, texts, labels))
        elif isinstance(loss, PositiveActivationLoss):
            ids, mask = texts[1].input_ids, texts[1].attention_mask
            if ids is None or mask is None:
                raise ValueError(_no_ids(name))
            value = loss(anchor, ids, mask)
        elif isinstance(loss, NPairLoss):
            value = loss(anchor, positive, torch.cat(negatives) if negatives else None)
        elif isinstance(loss, InfoNCELoss):
            join = torch.cat if loss.in_batch else _own
            positive_ids = labels if self.labels_are_positive_ids else None
            negative = join(negatives) if negatives else None
            value = loss(anchor, positive, negative, positive_ids=positive_ids)
        elif isinstance(loss, PairwiseContrastiveLoss):
            if negatives or labels is None:
                raise ValueError(
                    f"{name} expected two columns and labels [B], got {count} and {_shape(labels)}"
                )
            value = loss(anchor, positive, labels)
        elif not negatives:
            raise ValueError(f"{name} expected a column of negatives, got only two columns")
        elif isinstance(loss, TripletMarginLoss):
            value = loss(anchor, positive, _own(negatives))
        else:
            student = _scores(vectors, self.similarity)
            if isinstance(loss, DistillationLoss):
                value = loss(student, _teacher_scores(name, labels, student, margins=False))
            else:
                teacher = _teacher_scores(name, labels, student, margins=True)
                best, others = student[:, :1].expand_as(student[:, 1:]), student[:, 1:]
                best_t, others_t = teacher[:, :1].expand_as(others), teacher[:, 1:]
                value = loss(*(x.flatten() for x in (best, others, best_t, others_t)))
        return value

    def _batch(
        self, objective: SpladeObjective, texts: Sequence[Texts], labels: Tensor | None
    ) -> SpladeBatch:
        anchor, positive, *others = texts
        negative = None
        if len(others) == 1:
            negative = others[0]
        elif others:
            joined = reduce(Texts.join, others)
            known = {name: x for name, x in joined._asdict().items() if x is not None}
            negative = joined._replace(**{n: _own(x.chunk(len(others))) for n, x in known.items()})
        batch = SpladeBatch(anchor, positive, negative)
        if self.labels_are_positive_ids:
            batch = batch._replace(positive_ids=labels)
        if self.teacher is not None:
            return batch._replace(**_taught(self.teacher, objective, batch))
        if self.labels_are_positive_ids:
            return batch
        if taught := {"distillation", "margin_mse"} & {*objective.active()}:
            candidates = anchor.activations.new_empty(len(anchor.activations), 1 + len(others))
            margins = "distillation" not in taught
            teacher = _teacher_scores("SpladeObjective", labels, candidates, margins=margins)
            return batch._replace(teacher_scores=teacher, teacher_candidates="own")
        return batch

    def _named(self, value: Tensor | ObjectiveOutput) -> Tensor | dict[str, Tensor]:
        """Return the values by name: the trainer adds them up and logs each."""
        if isinstance(value, Tensor):
            return value
        assert isinstance(self.loss, SpladeObjective)
        weights = self.loss.weights
        named = {name: (weights[name] * term).detach() for name, term in value.terms.items()}
        if not named:
            return value.total
        # The first value carries the gradient of the total.
        first = next(iter(named))
        named[first] = named[first] + (value.total - value.total.detach())
        return named

    def get_config_dict(self) -> dict[str, Any]:
        """Return the loss's settings for the model card."""
        config: dict[str, Any] = {"loss": repr(self.loss)}
        if isinstance(self.loss, SpladeObjective):
            weights = self.loss.weights
            names = {n.removeprefix("query_").removeprefix("document_") for n in weights}
            config = {
                "loss": "SpladeObjective",
                "weights": {name: float(weight) for name, weight in weights.items()},
                **{name: repr(getattr(self.loss, name)) for name in sorted(names)},
            }
        if isinstance(self.loss, (DistillationLoss, MarginMSELoss)):
            config["similarity"] = self.similarity
        if self.teacher is not None:
            config["teacher"] = repr(self.teacher)
        if self.labels_are_positive_ids:
            config["labels_are_positive_ids"] = True
        if self.mini_batch_size is not None:
            config["mini_batch_size"] = self.mini_batch_size
        return config

    @property
    def citation(self) -> str:
        """The BibTeX entry for the model card."""
        return (
            "@software{sparse_losses,\n"
            "    title = {sparse-losses: losses for learned sparse retrieval and contrastive "
            "encoders},\n"
            "    author = {{The sparse-losses authors}},\n"
            f"    version = {{{__version__}}},\n"
            "}\n"
        )


def _texts(activations: Tensor, column: dict[str, Any]) -> Texts:
    """Return the vectors of a column, with its token ids if they have one row per vector."""
    ids, mask = column.get("input_ids"), column.get("attention_mask")
    for x in (ids, mask):
        if x is None or x.ndim != 2 or len(x) != len(activations):
            return Texts(activations)
    return Texts(activations, ids, mask)


def _taught(teacher: Teacher, objective: SpladeObjective, batch: SpladeBatch) -> dict[str, Any]:
    """Return the teacher's scores for the terms that need them."""
    anchor, positive = batch.anchor._asdict(), batch.positive._asdict()
    negative = None if batch.negative is None else batch.negative._asdict()
    if any(column and column["input_ids"] is None for column in (anchor, positive, negative)):
        raise ValueError(_no_ids("`teacher`"))
    scores: dict[str, Any] = {}
    if {"distillation", "margin_mse"} & {*objective.active()}:
        scores["teacher_scores"] = score_candidates(teacher, anchor, positive, negative)
        scores["teacher_candidates"] = "batch"
    if "context_distillation" in objective.active():
        scores["teacher_anchor_scores"] = score_candidates(teacher, anchor, anchor)
    return scores


def _own(columns: Sequence[Tensor]) -> Tensor:
    """Stack ``n`` columns ``[B, V]`` to ``[B, n, V]``."""
    return torch.stack(list(columns), dim=1)


def _scores(vectors: Sequence[Tensor], similarity: str) -> Tensor:
    """Return the scores of the anchors with their positives and negatives, ``[B, 1 + n]``."""
    dtype = compute_dtype(**{f"column_{i}": x for i, x in enumerate(vectors)})
    anchor, *others = [x.to(dtype) for x in vectors]
    if similarity == "cosine":
        anchor, *others = [normalize(x) for x in (anchor, *others)]
    return torch.stack([(anchor * x).sum(-1) for x in others], dim=1)


def _teacher_scores(name: str, labels: Tensor | None, student: Tensor, *, margins: bool) -> Tensor:
    """Return scores ``[B, 1 + n]``; for margins, scores with these differences."""
    rows, candidates = student.shape
    if labels is not None and labels.shape == (rows, candidates):
        return labels.to(student.dtype)
    if margins and labels is not None and labels.shape == (rows,):
        labels = labels[:, None]
    if not margins or labels is None or labels.shape != (rows, candidates - 1):
        raise ValueError(
            f"{name} expected labels [{rows}, {candidates}], the teacher's scores of positive and "
            f"negatives{f', or [{rows}, {candidates - 1}], its margins' if margins else ''}, got "
            f"{_shape(labels)}"
        )
    return torch.nn.functional.pad(-labels.to(student.dtype), (1, 0))


def _shape(labels: Tensor | None) -> str:
    return "None" if labels is None else str(list(labels.shape))


def _no_ids(name: str) -> str:
    return (
        f"{name} expected token ids and attention masks [B, S] with the vectors, got none "
        "(SpladeLoss passes on vectors only: use a term of a SpladeObjective instead)"
    )


class LossState(TrainerCallback):  # type: ignore[misc]  # as above
    """A callback that saves, resumes and synchronises the state outside the trainer's model.

    - It attaches schedules and controllers to the optimiser, and detaches them after training.
    - It saves the parameters of the losses (a temperature, prototypes) and the state of schedules
      and controllers in ``sparse_losses.pt`` in each checkpoint, and loads them when training
      resumes. The trainer itself saves only the model and its optimiser's state.
    - With several devices, it copies the losses' parameters from the first device to all at the
      start and averages their gradients before every optimiser step. The trainer does so for the
      model only.

    Args:
        trainer: a ``SparseEncoderTrainer`` or ``SentenceTransformerTrainer``; pass the callback to
            its ``add_callback``.
        steered: schedules and controllers of a ``SpladeObjective``.
        checkpoint: the folder to resume from; default: ``checkpoint-<step>`` in ``output_dir``.

    Raises:
        FileNotFoundError: when training resumes from a folder without that file.

    Examples:
        >>> from sparse_losses.integrations.sentence_transformers import LossState
        >>> def with_state(trainer, schedule):
        ...     trainer.add_callback(LossState(trainer, schedule))
        ...     return trainer
    """

    FILE = "sparse_losses.pt"

    def __init__(
        self,
        trainer: Any,
        *steered: TrainingSchedule | SparsityController,
        checkpoint: str | Path | None = None,
    ) -> None:
        self.trainer = trainer
        self.steered = steered
        self.checkpoint = checkpoint
        self._handles: list[Any] = []

    def _learned(self) -> Iterator[tuple[str, nn.Parameter]]:
        losses = self.trainer.loss
        losses = losses if isinstance(losses, dict) else {"loss": losses}
        of_the_model = {id(x) for x in self.trainer.model.parameters()}
        for name, parameter in nn.ModuleDict(losses).named_parameters():
            if id(parameter) not in of_the_model:
                yield name, parameter

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the saved state if training resumes, and attach the schedules."""
        self.on_train_end(args, state, control)
        if state.global_step:
            folder = Path(self.checkpoint or f"{args.output_dir}/checkpoint-{state.global_step}")
            if not (folder / self.FILE).exists():
                raise FileNotFoundError(
                    f"expected {self.FILE} in {folder}, where LossState wrote it, got none: pass "
                    "LossState(checkpoint=...) the folder you resume from"
                )
            saved = torch.load(folder / self.FILE, map_location="cpu", weights_only=True)
            learned = dict(self._learned())
            if learned.keys() != saved["learned"].keys() or len(self.steered) != len(
                saved["steered"]
            ):
                raise ValueError(
                    f"expected the state of {sorted(learned)} and {len(self.steered)} schedules "
                    f"and controllers in {folder / self.FILE}, got that of "
                    f"{sorted(saved['learned'])} and {len(saved['steered'])}"
                )
            with torch.no_grad():
                for name, parameter in learned.items():
                    parameter.copy_(saved["learned"][name])
            for one, its_state in zip(self.steered, saved["steered"], strict=True):
                one.load_state_dict(its_state)
        if args.world_size > 1:  # each device may have drawn its own prototypes
            for _, parameter in self._learned():
                torch.distributed.broadcast(parameter.data, src=0)
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper has no hooks
        self._handles = [one.attach(optimizer) for one in self.steered]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach the schedules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Average the gradients of the losses' parameters over the devices."""
        if args.world_size == 1:
            return
        for _, parameter in self._learned():
            if parameter.grad is None:  # this device had no batch for the loss
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= args.world_size

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write ``sparse_losses.pt`` into the checkpoint that was just written."""
        if not args.should_save:  # after a step all devices have the same state
            return
        folder = Path(f"{args.output_dir}/checkpoint-{state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        saved = {
            "learned": {name: parameter.detach().cpu() for name, parameter in self._learned()},
            "steered": [one.state_dict() for one in self.steered],
        }
        with replaced_file(folder / self.FILE) as file:
            torch.save(saved, file)


Module.register(IdfWeights)  # it cannot inherit where sentence-transformers may be missing
