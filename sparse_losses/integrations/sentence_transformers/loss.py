"""A loss of this package as a loss of sentence-transformers."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import sparse_losses as sl
from sparse_losses._core.checks import (
    check_choice,
    check_flag,
    check_integer,
    values_can_be_checked,
)
from sparse_losses.distributed import num_ranks
from sparse_losses.integrations.sentence_transformers.columns import (
    COMPUTE,
    Columns,
    compute_loss,
    has_tokens,
    texts_of_column,
)
from sparse_losses.integrations.sentence_transformers.versions import (
    HAS_GRADIENT_CACHE,
    CachedLossMixin,
    embed_columns,
)
from sparse_losses.objective.teacher import Teacher

USED_BY: dict[str, tuple[type, ...]] = {
    "similarity": (sl.DistillationLoss, sl.MarginMSELoss, sl.RankNetLoss),
    "labels_are_positive_ids": (sl.InfoNCELoss, sl.SpladeObjective),
    "teacher": (sl.SpladeObjective,),
    "prototype": (sl.NWSLoss,),
}


# The type checker sees their classes as Any, and a subclass of Any is an error.
class SentenceTransformersLoss(CachedLossMixin, nn.Module):  # type: ignore[misc]
    """A loss of this package as a loss of sentence-transformers.

    Use it as the ``loss`` of a ``SparseEncoderTrainer`` or ``SentenceTransformerTrainer``, alone or
    in a dict, or inside ``SpladeLoss`` and ``CachedSpladeLoss``, as loss or as regulariser. The
    order of the dataset's columns gives their meaning: anchors, positives, negatives.

    - ``SpladeObjective``: all columns, with their token ids and masks. One column of negatives is
      ``[B, V]``; several are each anchor's own negatives ``[B, n, V]``. The trainer logs the
      weighted terms.
    - InfoNCE, N-pair: every negative is a candidate of every anchor (with ``in_batch=False``, only
      of its own anchor).
    - Triplet margin: an anchor's own negatives.
    - Distillation, RankNet, MarginMSE, and an objective with these terms: ``labels`` are the
      teacher's scores of the positive and the negatives, ``[B, 1 + n]``; for MarginMSE also the
      margins between them, ``[B, n]``, or ``[B]`` for one negative.
    - Pairwise contrastive: two columns; ``labels`` are 0/1.
    - NWS: ``labels`` are multi-hot, ``[B, L]``; a second column holds keys with the same labels.
    - FLOPS, IDF-FLOPS, minimum activation, language penalty: the rows of all columns together.
    - Self-reconstruction: the same. Positive activation: the anchors, with the tokens of their
      positives. These two need token ids, which ``SpladeLoss`` does not pass on.

    An empty text in a column of negatives means that the row has fewer: the losses of scores (all
    but N-pair) leave it out, whatever its label. Also for this, token ids are needed.

    Args:
        model: a ``SparseEncoder`` or ``SentenceTransformer``.
        loss: the loss, which reduces to one number.
        similarity: ``"dot"`` (the default) or ``"cosine"``: the similarity of distillation, RankNet
            and MarginMSE. InfoNCE has its own, which a ``SpladeObjective`` uses for all scores.
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

    special_token_ids: Tensor
    # These exist only during a forward pass with gradient caching.
    _columns: list[dict[str, Any]]
    _cached: Tensor | sl.ObjectiveOutput
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
        check_flag(labels_are_positive_ids=labels_are_positive_ids)
        options = {"similarity": similarity, "teacher": teacher, "prototype": prototype}
        _check_options(loss, **options, labels_are_positive_ids=labels_are_positive_ids or None)
        check_choice("similarity", similarity, (None, "dot", "cosine"))
        if mini_batch_size is not None:
            check_integer("mini_batch_size", mini_batch_size, minimum=1)
            if not HAS_GRADIENT_CACHE:
                raise ValueError(
                    "expected sentence-transformers 6.2 or newer for `mini_batch_size`"
                )
        self.model = model  # the trainer replaces it by the compiled or distributed model
        self.loss = loss
        tokenizer = getattr(model, "tokenizer", None)
        special = {*getattr(tokenizer, "all_special_ids", ())}
        special -= {getattr(tokenizer, "unk_token_id", None)}  # an unknown word is a word
        self.register_buffer(
            "special_token_ids", torch.tensor([*special], dtype=torch.int64), persistent=False
        )
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
        """Return the loss of tokenized columns; for an objective its weighted terms."""
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
            parameters = [*self.loss.parameters(), self.prototype]
            learned = [x for x in parameters if x is not None and x.requires_grad]
            gradients = torch.autograd.grad(total, leaves + learned, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients, strict=False):
                leaf.grad = gradient
            self._learned = list(zip(learned, gradients[len(leaves) :], strict=True))
            total = total.detach()
        return total

    def compute_loss_from_embeddings(
        self, embeddings: Sequence[Tensor] | Tensor, labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Compute the loss of columns ``[B, V]``, or of rows ``[N, V]``, for ``SpladeLoss``."""
        vectors = [embeddings] if isinstance(embeddings, Tensor) else list(embeddings)
        return self._named(self._value([{} for _ in vectors], vectors, labels))

    def _value(
        self, columns: Sequence[dict[str, Any]], vectors: Sequence[Tensor], labels: Tensor | None
    ) -> Tensor | sl.ObjectiveOutput:
        texts = [texts_of_column(x, column) for x, column in zip(vectors, columns, strict=True)]
        there = None
        if len(texts) > 2 and all(x.input_ids is not None for x in texts[2:]):
            own = [has_tokens(column, self.special_token_ids) for column in columns[2:]]
            there = torch.stack(own, 1)
            # Ranks do not know of each other whether they need a mask.
            if num_ranks() == 1 and values_can_be_checked(there) and there.all():
                there = None
        flag, teacher, prototype = self.labels_are_positive_ids, self.teacher, self.prototype
        options = Columns(texts, labels, there, self.similarity, flag, teacher, prototype)
        return compute_loss(self.loss, options)

    def _named(self, value: Tensor | sl.ObjectiveOutput) -> Tensor | dict[str, Tensor]:
        """Return the values by name: the trainer adds them up and logs each."""
        if isinstance(value, Tensor):
            return value
        assert isinstance(self.loss, sl.SpladeObjective)
        weights = self.loss.weights
        named = {name: (weights[name] * term).detach() for name, term in value.terms.items()}
        if not named:
            return value.total
        # The first value carries the gradient of the total.
        first = next(iter(named))
        named[first] = named[first] + (value.total - value.total.detach())
        return named

    def get_config_dict(self) -> dict[str, Any]:
        """Return the loss and its options for the model card."""
        loss, weights = self.loss, None
        if isinstance(loss, sl.SpladeObjective):  # whose repr has all losses, active or not
            weights = {name: float(weight) for name, weight in loss.weights.items()}
        options = {
            "loss": "SpladeObjective" if weights else repr(loss),
            "weights": weights,
            "similarity": self.similarity if isinstance(loss, USED_BY["similarity"]) else None,
            "teacher": self.teacher and repr(self.teacher),
            "labels_are_positive_ids": self.labels_are_positive_ids,
            "mini_batch_size": self.mini_batch_size,
        }
        return {name: value for name, value in options.items() if value}


def _check_options(loss: nn.Module, **options: object) -> None:
    name = type(loss).__name__
    if not isinstance(loss, tuple(COMPUTE)):
        raise TypeError(f"expected a loss of sparse_losses or a SpladeObjective, got {name}")
    if getattr(loss, "reduction", "mean") == "none":
        raise ValueError("expected a loss that reduces to one number, got reduction='none'")
    for option, value in options.items():
        if value is not None and not isinstance(loss, USED_BY[option]):
            users = " or ".join(user.__name__ for user in USED_BY[option])
            raise ValueError(f"expected `{option}` for {users} only, got one for {name}")
    if isinstance(loss, sl.NWSLoss) and options["prototype"] is None:
        raise ValueError(f"expected `prototype` for {name}, got None")
