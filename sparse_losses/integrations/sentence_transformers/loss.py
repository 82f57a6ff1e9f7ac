"""A loss of this package as a loss of sentence-transformers."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn

import sparse_losses as sl
from sparse_losses._core.entries import concatenated
from sparse_losses.distributed import gather_rows, num_ranks
from sparse_losses.objective import terms
from sparse_losses.objective.teacher import score_batch


# The type checker sees their classes as Any, and a subclass of Any is an error.
class SentenceTransformersLoss(CachedLossMixin, nn.Module):  # type: ignore[misc]
    """A loss of this package as a loss of sentence-transformers.

    It is the ``loss`` of a ``SparseEncoderTrainer`` or ``SentenceTransformerTrainer``, alone or in
    a dict, or part of ``SpladeLoss`` and ``CachedSpladeLoss``, as loss or as regulariser. The
    columns of the dataset are, in this order, anchors, positives and ``n`` of negatives.

    - InfoNCE and N-pair share all negatives among the anchors. A ``SpladeObjective`` shares those
      of one column; of several, an anchor has only its own, as in the other losses.
    - ``labels`` are a teacher's scores ``[B, 1 + n]``; for MarginMSE alone also margins ``[B, n]``;
      for pairwise contrastive 0/1 ``[B]``; for InfoNCE and triplet margin ids, with
      ``labels_are_ids``.
    - A negative is left out if its id is that of the row's positive; and of distillation, RankNet
      and MarginMSE if its score is ``-inf``.
    - Distillation, RankNet and MarginMSE alone compare dot products. To distil a bi-encoder's
      cosines into dot products, take ``terms.distillation(similarity="dot", score_scale=1.0,
      teacher_scale=1 / t)``, with the temperature ``t`` at which the bi-encoder was trained.

    Args:
        model: a ``SparseEncoder`` or ``SentenceTransformer``.
        loss: the loss, which reduces to one number.
        labels_are_ids: whether ``labels`` are integers that name the positives ``[B]``, or all
            documents ``[B, 1 + n]``. For InfoNCE, triplet margin and ``SpladeObjective``.
        teacher: for a ``SpladeObjective``: a ``SentenceTransformer``, a ``BM25Teacher``, or another
            function of queries and documents, dicts of ``input_ids``, ``attention_mask`` and, after
            ``keep_texts(trainer)``, ``texts``, that returns their scores ``[Q, D]``. It scores all
            candidates of a batch in the place of ``labels``, and is not trained.
        mini_batch_size: number of texts embedded at a time, twice, with the graph of one mini-batch
            only (gradient caching); the gradient is that of the whole batch. Default: all.

    Examples:
        >>> import torch
        >>> from sparse_losses import InfoNCELoss
        >>> from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
        >>> model = torch.nn.Identity()  # in place of your SparseEncoder
        >>> loss = SentenceTransformersLoss(model, InfoNCELoss(temperature=1.0))
        >>> loss.compute_loss_from_embeddings([torch.eye(3), torch.eye(3)])
        tensor(0.5514)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        *,
        labels_are_ids: bool = False,
        teacher: Any = None,
        mini_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self._name = name = type(loss).__name__
        self._kind: Any = next((kind for kind in type(loss).__mro__ if kind in LOSSES), None)
        if self._kind is None or getattr(loss, "reduction", "mean") == "none":
            known = ", ".join(kind.__name__ for kind in LOSSES)
            raise TypeError(f"expected {known}, of one number, got {loss!r}")
        given = {"teacher": teacher is not None, "labels_are_ids": labels_are_ids}
        used, received = LOSSES[self._kind][2:], [option for option, x in given.items() if x]
        if {*received} - {*used}:
            raise ValueError(f"expected options of {name} ({used}), got {received}")
        self.model = model  # the trainer replaces it by the compiled or distributed model
        self.loss, self.labels_are_ids = loss, labels_are_ids
        self.mini_batch_size, self.uses_gradient_cache = mini_batch_size, bool(mini_batch_size)
        objective: Any = loss
        if self._kind in TERMS:
            term = TERMS[self._kind](loss)
            objective = sl.SpladeObjective({name: (1.0, term)}, gather=objective.gather)
        # Not as submodules: a trainer would optimise the teacher, and see the loss twice.
        self.__dict__.update(teacher=teacher, _objective=objective)

    def forward(self, sentence_features: Iterable[Any], labels: Tensor | None = None) -> Tensor:
        """Return the loss of tokenized columns."""
        self._columns = list(sentence_features)
        inputs = [{k: x for k, x in one.items() if k != "texts"} for one in self._columns]
        if self.mini_batch_size is None:
            layouts = {getattr(module, "layout", None) for module in self.model.modules()}
            if torch.sparse_csr in layouts:
                vectors = [self.model(column)["sentence_embedding"] for column in inputs]
            else:  # in one pass
                vectors = embed_columns(self.model, inputs)
            return self.calculate_loss([[x] for x in vectors], labels)
        kind = next(x.device.type for x in inputs[0].values() if isinstance(x, Tensor))
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # Without a cache of weights: those of the first pass have no graph.
        self._autocast: Any = partial(torch.autocast, kind, dtype, enabled, cache_enabled=False)
        self._learned: list[tuple[Tensor, Tensor | None]] = []
        total: Tensor = super().forward_cached(inputs, labels)
        # The loss's own parameters get their gradient in the trainer's backward pass, so that it is
        # divided and scaled like the model's.
        for parameter, gradient in self._learned:
            if gradient is not None:
                total = total + ((parameter - parameter.detach()) * gradient).sum()
        return total

    def embed_minibatch(self, *args: Any, **options: Any) -> Any:
        """Embed a mini-batch: the second time, in the backward pass, under the same autocast."""
        with self._autocast():
            return super().embed_minibatch(*args, **options)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Compute the loss of embeddings in mini-batches; their mixin calls it as second step."""
        least, compute, *_ = LOSSES[self._kind]
        if len(reps) < least:
            raise ValueError(f"{self._name} expected {least} columns or more, got {len(reps)}")
        if self.mini_batch_size is not None and reps[0][0].layout != torch.strided:
            expected = "no mini_batch_size with layout=torch.sparse_csr"
            raise ValueError(f"{self._name} expected {expected}, got {self.mini_batch_size}")
        texts = []
        for parts, column in zip(reps, self._columns, strict=True):
            vectors, names = concatenated(parts), ("input_ids", "attention_mask")
            tokens = [column.get(name) for name in names]  # if they have one row per vector
            is_known = all(x is not None and x.ndim == 2 and len(x) == len(vectors) for x in tokens)
            texts.append(sl.Texts(vectors, *(tokens if is_known else ())))
        total: Tensor = compute(self, texts, labels)
        if with_backward:
            leaves = [part for column in reps for part in column]
            learned: list[Tensor] = [x for x in self.loss.parameters() if x.requires_grad]
            gradients = torch.autograd.grad(total, leaves + learned, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients, strict=False):
                leaf.grad = gradient
            self._learned = list(zip(learned, gradients[len(leaves) :], strict=True))
            total = total.detach()
        return total

    def compute_loss_from_embeddings(self, embeddings: Any, labels: Tensor | None = None) -> Tensor:
        """Compute the loss of columns ``[B, V]``, or of rows ``[N, V]``, for ``SpladeLoss``."""
        vectors = [embeddings] if isinstance(embeddings, Tensor) else embeddings
        self._columns = [{} for _ in vectors]
        return self.calculate_loss([[x] for x in vectors], labels)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the loss and its options for the model card."""
        names = ("loss", "labels_are_ids", "mini_batch_size")
        options = {name: repr(getattr(self, name)) for name in names if getattr(self, name)}
        return options | ({} if self.teacher is None else {"teacher": type(self.teacher).__name__})


def keep_texts(trainer: Any) -> Any:
    """Let a trainer of sentence-transformers hand on the texts to its losses; return the trainer.

    A bi-encoder as ``teacher`` reads them: the student's tokens leave out what the student cuts or
    does not know. Losses of sentence-transformers would hand the texts to the model: use none.

    Examples:
        ``keep_texts(SparseEncoderTrainer(model, loss=loss, train_dataset=data)).train()``
    """
    collator = trainer.data_collator
    collator.preprocess_fn = partial(_with_texts, collator.preprocess_fn)
    return trainer


def _with_texts(preprocess: Callable[..., Any], texts: Any, **options: Any) -> dict[str, Any]:
    return {**preprocess(texts, **options), "texts": list(texts)}


def _rows(texts: Sequence[sl.Texts]) -> Tensor | None:
    return concatenated([x.activations for x in texts]) if texts else None


def _of_batch(own: Any, texts: list[sl.Texts], labels: Tensor | None) -> Any:
    """Compute the objective of a batch."""
    anchor, positive, *others = texts
    # An anchor has the negatives of all rows, or its own.
    shares = own.loss.in_batch if own._kind is sl.InfoNCELoss else len(others) == 1
    negative = reduce(sl.Texts.join, others) if others else None
    if negative is not None and not shares:
        if negative.activations.layout != torch.strided:
            expected = "negatives that all anchors share with layout=torch.sparse_csr"
            raise ValueError(f"{own._name} expected {expected}, got {len(others)} of each anchor")
        parts = [None if x is None else torch.stack(x.chunk(len(others)), 1) for x in negative]
        negative = sl.Texts(*parts)  # type: ignore[arg-type]  # the first is never None
    batch = sl.SpladeBatch(anchor, positive, negative)
    known = _of_labels(own, labels, len(anchor.activations), len(others), shares)
    if own.teacher is not None:
        sides = [side._asdict() for side in batch.sides() if side is not None]
        for side, i in zip(sides, (slice(1), slice(1, 2), slice(2, None)), strict=False):
            if all("texts" in column for column in own._columns):
                rows = zip(*[column["texts"] for column in own._columns[i]], strict=True)
                side["texts"] = [text for row in rows for text in row]
        # Of all anchors with one another, if a term compares them.
        compares = any(getattr(x, "of", "") == "anchors" for x in own._objective.terms.values())
        known |= score_batch(own.teacher, *sides, score_anchors=compares)
    return own._objective(batch._replace(**known)).total


def _of_labels(own: Any, labels: Any, size: int, count: int, shares: bool) -> dict[str, Any]:
    """Return what the labels are in a batch: ids of the documents, or a teacher's scores."""
    received = None if labels is None else [*labels.shape]
    if not own.labels_are_ids and own._kind not in DISTILLED:
        if labels is None or own.teacher is not None:
            return {}
        if own._kind is not sl.SpladeObjective:
            needed = "labels alone with `labels_are_ids=True`, as ids of documents"
            raise ValueError(f"{own._name} expected {needed}, got labels {received}")
    margins = [[size, count], *([[size]] if count == 1 else [])]
    if own._kind is sl.MarginMSELoss and received in margins:
        labels = nn.functional.pad(-labels.reshape(size, -1), (1, 0))  # scores of the margins
        received = [*labels.shape]
    shapes = [[size], [size, 1 + count]] if own.labels_are_ids else [[size, 1 + count]]
    if received not in shapes:
        raise ValueError(f"{own._name} expected labels as {shapes}, got {received}")
    if not own.labels_are_ids:
        return {"teacher_scores": labels, "teacher_candidates": "own"}
    positive, ids = labels.reshape(size, -1).tensor_split([1], 1)
    fields, gather = {"positive_ids": positive[:, 0]}, own._objective.gather
    if ids.shape[1]:
        ids = gather_rows(ids.T.flatten(), gather) if shares else ids  # [N] or [B, n]
        keys = size * (num_ranks() if gather else 1)
        fields["candidate_mask"] = nn.functional.pad(positive != ids, (keys, 0), value=True)
    return fields


def _n_pair(own: SentenceTransformersLoss, texts: list[sl.Texts], labels: Any) -> Any:
    if labels is not None:
        raise ValueError(f"{own._name} expected no labels, got {list(labels.shape)}")
    return own.loss(_rows(texts[:1]), _rows(texts[1:2]), _rows(texts[2:]))


# The losses that are computed as the only term of an objective.
TERMS: dict[type, Callable[[Any], Any]] = {
    sl.InfoNCELoss: terms.info_nce,
    sl.TripletMarginLoss: terms.triplet_margin,
    sl.DistillationLoss: partial(terms.distillation, similarity="dot"),
    sl.MarginMSELoss: partial(terms.margin_mse, similarity="dot"),
    sl.RankNetLoss: partial(terms.ranknet, similarity="dot"),
}
DISTILLED = (sl.DistillationLoss, sl.MarginMSELoss, sl.RankNetLoss)
# By class the least number of columns, what computes the loss, its options.
LOSSES: dict[type, tuple[Any, ...]] = {
    sl.SpladeObjective: (2, _of_batch, "labels_are_ids", "teacher"),
    sl.InfoNCELoss: (2, _of_batch, "labels_are_ids"),
    sl.TripletMarginLoss: (3, _of_batch, "labels_are_ids"),
    **dict.fromkeys(DISTILLED, (3, _of_batch)),
    sl.NPairLoss: (2, _n_pair),
    sl.PairwiseContrastiveLoss: (2, lambda x, t, y: x.loss(_rows(t[:1]), _rows(t[1:]), y)),
    sl.SelfReconstructionLoss: (1, lambda x, t, y: x.loss(*reduce(sl.Texts.join, t)[:3])),
    sl.PositiveActivationLoss: (2, lambda x, t, y: x.loss(_rows(t[:1]), *t[1][1:3])),
    **dict.fromkeys(
        (sl.FlopsLoss, sl.IdfFlopsLoss, sl.MinActivationLoss, sl.LanguagePenaltyLoss),
        (1, lambda x, t, y: x.loss(_rows(t))),
    ),
}
