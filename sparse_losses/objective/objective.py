"""The weighted sum of many losses over one batch."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_choice, check_flag, check_number
from sparse_losses._core.dtensors import agree, beside_dtensors, full, is_dtensor, refuse, whole
from sparse_losses._core.loss import LossModule, shown
from sparse_losses._core.precision import autocast_off, compute_dtype
from sparse_losses._core.token_ids import TokenIds, as_mask, check_ids
from sparse_losses.distributed import gather_rows, num_ranks, rank, skip_size_check
from sparse_losses.losses._false_negatives import false_negative_mask
from sparse_losses.losses.distillation import DistillationLoss
from sparse_losses.losses.flops import FlopsLoss
from sparse_losses.losses.idf_flops import IdfFlopsLoss
from sparse_losses.losses.info_nce import InfoNCELoss
from sparse_losses.losses.language_penalty import LanguagePenaltyLoss
from sparse_losses.losses.margin_mse import MarginMSELoss
from sparse_losses.losses.min_activation import MinActivationLoss
from sparse_losses.losses.positive_activation import PositiveActivationLoss
from sparse_losses.losses.ranknet import RankNetLoss
from sparse_losses.losses.self_reconstruction import SelfReconstructionLoss
from sparse_losses.losses.triplet_margin import TripletMarginLoss
from sparse_losses.objective.batch import SpladeBatch, Texts, token_counts
from sparse_losses.objective.shared_scores import (
    candidates,
    info_nce_of_shared_scores,
    of_this_rank,
    own_candidates,
    scored_candidates,
    shared_scores,
    takes_scores,
)
from sparse_losses.objective.terms import (
    NEEDS,
    check_batch,
    check_loss,
    check_needs,
    check_texts,
    check_weights,
)

TAUGHT = ("distillation", "margin_mse", "ranknet")  # the losses of `teacher_scores`
# The losses that need the vectors of one side only.
ON_TEXTS = ("flops", "min_activation", "language_penalty", "self_reconstruction")


class ObjectiveOutput(NamedTuple):
    """The output of ``SpladeObjective``.

    Attributes:
        total: the weighted sum to minimise, 0-d.
        terms: the value of every active term, without its weight and without a graph.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeBatch, SpladeObjective, Texts
        >>> batch = SpladeBatch(Texts(torch.eye(2)), Texts(torch.eye(2)))
        >>> SpladeObjective({"query_flops": 3.0})(batch)
        ObjectiveOutput(total=tensor(1.5000), terms={'query_flops': tensor(0.5000)})
    """

    total: Tensor
    terms: dict[str, Tensor]


class SpladeObjective(nn.Module):
    r"""A weighted sum of losses over one ``SpladeBatch``.

    $$\mathcal{L} = \sum_k \lambda_k \, \ell_k$$

    ``weights`` holds $\lambda$ by the names of the terms: ``info_nce``, ``triplet_margin``,
    ``distillation``, ``context_distillation``, ``margin_mse``, ``ranknet``, and for each side,
    ``query_...`` (anchors) and ``document_...`` (positives and negatives): ``flops``,
    ``min_activation``, ``language_penalty``, ``self_reconstruction`` and ``positive_activation``
    (one side's activations of the other side's tokens). The losses are modules that hold their own
    hyperparameters (``objective.info_nce.temperature``). Weights may change between steps. A term
    without a weight, or with the weight 0, is not computed, unless its weight is a tensor.

    The losses of teacher scores use InfoNCE's similarity, and share one product with it.

    Args:
        weights: $\lambda$ by name.
        info_nce: default ``InfoNCELoss()``; the other losses have such defaults, too. No loss may
            have ``reduction="none"``.
        triplet_margin: needs each anchor's own negatives: ``[B, N, V]``, or ``[B, V]`` for one.
        distillation: loss on ``score_scale`` times the scores.
        context_distillation: the same on the anchors' scores with one another.
        margin_mse: needs the same negatives as ``triplet_margin``, and averages over them.
        ranknet: the order of the teacher's scores, for ``score_scale`` times the student's.
        flops: ``FlopsLoss`` or ``IdfFlopsLoss``.
        min_activation: averages no more activations than a text has tokens, where its mask is
            known.
        self_reconstruction: loss on the logits where the batch has them; by default it ignores
            special tokens.
        positive_activation: by default it ignores special tokens.
        language_penalty: has no default, because it needs your allowed tokens.
        special_token_ids: tokens that do not count as a text's own; the defaults above ignore them.
        stopword_ids: tokens that are hidden from InfoNCE and FLOPS. (Training collapses if they are
            hidden from the activation losses too.)
        score_scale: factor on the student's scores in distillation and RankNet, > 0. Cosines differ
            too little for a softmax; 1 over InfoNCE's temperature gives the losses the same scale.
        teacher_scale: factor on the teacher's scores; default: ``score_scale``. Use 1 for logits.
        gather: whether all losses use the texts of all ranks. Teacher scores are then of all ranks'
            candidates, ``[B, W B + W N]``, or of this rank's alone, ``[B, B + N]``, which leaves
            the others out.
        impl: ``"auto"`` uses the ``impl`` of each loss, ``"definition"`` computes every loss by its
            formula, operation by operation.

    Shape:
        - Input: a ``SpladeBatch``.
        - Output: ``ObjectiveOutput``; all values fp32 (fp64 for fp64 activations), 0-d.

    Raises:
        ValueError: for an unknown term, or an active term that lacks a loss or an input.

    Examples:
        >>> import torch
        >>> from sparse_losses import FlopsLoss, InfoNCELoss, SpladeBatch, SpladeObjective, Texts
        >>> objective = SpladeObjective(
        ...     {"info_nce": 2.0, "document_flops": 0.5},
        ...     info_nce=InfoNCELoss(temperature=1.0),
        ... )
        >>> total, terms = objective(SpladeBatch(Texts(torch.eye(3)), Texts(torch.eye(3))))
        >>> {name: round(value.item(), 4) for name, value in terms.items()}
        {'info_nce': 0.5514, 'document_flops': 0.3333}
        >>> round(total.item(), 3)  # 2 * 0.5514 + 0.5 * 0.3333
        1.27
    """

    special_token_ids: Tensor
    stopword_ids: Tensor

    def __init__(
        self,
        weights: Mapping[str, float | Tensor],
        *,
        info_nce: InfoNCELoss | None = None,
        triplet_margin: TripletMarginLoss | None = None,
        distillation: DistillationLoss | None = None,
        context_distillation: DistillationLoss | None = None,
        margin_mse: MarginMSELoss | None = None,
        ranknet: RankNetLoss | None = None,
        flops: FlopsLoss | IdfFlopsLoss | None = None,
        min_activation: MinActivationLoss | None = None,
        self_reconstruction: SelfReconstructionLoss | None = None,
        positive_activation: PositiveActivationLoss | None = None,
        language_penalty: LanguagePenaltyLoss | None = None,
        special_token_ids: TokenIds = (),
        stopword_ids: TokenIds = (),
        score_scale: float = 1.0,
        teacher_scale: float | None = None,
        gather: bool = False,
        impl: Literal["auto", "definition"] = "auto",
    ) -> None:
        super().__init__()
        check_flag(gather=gather)
        special = _sorted_ids("special_token_ids", special_token_ids)
        stopwords = _sorted_ids("stopword_ids", stopword_ids)
        if len(stopwords) and int(stopwords[0]) < 0:
            raise ValueError(f"expected `stopword_ids` >= 0, got {int(stopwords[0])}")
        self.weights: dict[str, float | Tensor] = dict(weights)
        self.scheduled: set[str] = set()  # the weights that a TrainingSchedule sets
        self.info_nce = info_nce or InfoNCELoss()
        self.triplet_margin = triplet_margin or TripletMarginLoss()
        self.distillation = distillation or DistillationLoss()
        self.context_distillation = context_distillation or DistillationLoss()
        self.margin_mse = margin_mse or MarginMSELoss()
        self.ranknet = ranknet or RankNetLoss()
        self.flops = flops or FlopsLoss()
        self.min_activation = min_activation or MinActivationLoss()
        self.self_reconstruction = self_reconstruction or SelfReconstructionLoss(
            ignore_token_ids=special
        )
        self.positive_activation = positive_activation or PositiveActivationLoss(
            ignore_token_ids=special
        )
        self.language_penalty = language_penalty
        for name, classes in LOSSES.items():
            check_loss(name, getattr(self, name), classes)
        self.register_buffer("special_token_ids", special)
        self.register_buffer("stopword_ids", stopwords)
        self._largest_stopword_id = int(stopwords[-1]) if len(stopwords) else -1
        self.score_scale, self.teacher_scale = score_scale, teacher_scale
        self.gather = gather
        self.impl: Literal["auto", "definition"] = impl
        self._check_settings()
        check_weights(self.weights)

    def forward(self, batch: SpladeBatch) -> ObjectiveOutput:
        """Return the weighted sum and the value of every active term."""
        # The compiler fails at operators of DTensors; mypy does not know the type of `disable`.
        if torch.compiler.is_compiling() and any(map(is_dtensor, _tensors(batch).values())):
            return torch.compiler.disable(self.forward)(batch)  # type: ignore[no-any-return, no-untyped-call]
        terms = self.terms(batch)
        total: Tensor | None = None
        for name, term in terms.items():
            weight = self.weights[name]
            if total is None:
                total = weight * term
            elif isinstance(weight, Tensor) or torch.compiler.is_compiling():
                total = total + weight * term
            else:  # one operation; a compiler would compile `alpha` as a constant
                total = torch.add(total, term, alpha=weight)
        if total is None:  # without terms the sum is 0 and must be part of the graph
            x: Any = batch.anchor.activations
            x = x.to_local() if is_dtensor(x) else x
            total = x.flatten()[:0].to(compute_dtype(activations=x)).sum()
        return ObjectiveOutput(total, {name: term.detach() for name, term in terms.items()})

    def _check_settings(self) -> None:
        """Check the settings that are no loss's own; they may be assigned between steps."""
        check_choice("impl", self.impl, ("auto", "definition"))
        check_number("score_scale", self.score_scale, minimum=0.0, exclusive=True)
        if self.teacher_scale is not None:
            check_number("teacher_scale", self.teacher_scale, minimum=0.0, exclusive=True)

    def terms(self, batch: SpladeBatch) -> dict[str, Tensor]:
        """Return the active terms, without their weights, each with its graph.

        Raises:
            ValueError: for an active term that lacks a loss or an input.
        """
        try:
            self._check_settings()
            active = self.active()
            check_texts(batch)
            check_batch(batch)
            check_needs(active, self.weights, batch)
        except (TypeError, ValueError) as error:
            tensors = [*_tensors(batch).values(), self.special_token_ids]
            refuse("SpladeObjective", self.gather, tensors, error)
            raise
        compares = self._agree_across_ranks(active, batch) and not torch.compiler.is_compiling()
        once = skip_size_check() if compares else nullcontext()  # compared above, for all terms
        device = batch.anchor.activations.device
        with autocast_off(device), beside_dtensors(*_tensors(batch).values()), once:
            terms: dict[str, Tensor] = whole(self._terms(active, batch))
        return terms

    @torch.no_grad()
    def false_negatives(self, batch: SpladeBatch) -> Tensor:
        """Return the share of the negatives in the batch that InfoNCE leaves out by their score.

        They are the other rows' positives. The scores are computed for this share alone: call it
        every few steps, and log the share or pass it to ``Diagnostics.update``. It is 0-d, of this
        rank's rows, and without a device wait.
        """
        check_texts(batch)
        check_batch(batch)
        loss, x = self.info_nce, batch.anchor.activations
        bounds = {n: getattr(loss, f"false_negative_{n}", None) for n in ("margin", "ratio")}
        if bounds == {"margin": None, "ratio": None} or not loss.in_batch:
            return torch.zeros((), device=x.device)
        ranks = num_ranks() if self.gather or loss.gather else 1
        first, size = rank() * len(x) if ranks > 1 else 0, ranks * len(x)
        own = torch.arange(first, first + len(x), device=x.device)[:, None]
        own = own == torch.arange(size, device=x.device)
        is_negative = ~own
        if batch.positive_ids is not None:
            ids = full(batch.positive_ids)
            is_negative &= ids[:, None] != gather_rows(ids, ranks > 1)
        if batch.candidate_mask is not None:
            there = as_mask("batch.candidate_mask", batch.candidate_mask)[:, :size]
            own = own & there
            is_negative &= there & own.any(1, keepdim=True)  # or the row is not valid
        shown = self._without_stopwords(batch) if len(self.stopword_ids) > 0 else batch
        with autocast_off(x.device), beside_dtensors(*_tensors(batch).values()):
            scores = self._scores(shown.anchor, shown.positive, None, ranks)
            is_left_out = ~false_negative_mask(scores, own, **bounds) & is_negative
            share: Tensor = whole(is_left_out.sum() / is_negative.sum().clamp(min=1))
        return share

    def active(self) -> list[str]:
        """Return the terms that are computed, in the order of their computation.

        Raises:
            ValueError: for a name that is no term.
        """
        check_weights(self.weights)
        return [name for name in NEEDS if _counts(self.weights.get(name, 0.0))]

    def _agree_across_ranks(self, active: Sequence[str], batch: SpladeBatch) -> bool:
        """Return whether other ranks take part, after checking that terms and sizes agree."""
        x, tensors = batch.anchor.activations, _tensors(batch)
        if self.gather is False and not any(is_dtensor(each) for each in tensors.values()):
            return False
        values: dict[str, object] = {}
        if not torch.compiler.is_compiling():  # a number may be symbolic there
            values = {"B": x.shape[0], "V": x.shape[1]}
            for name, each in tensors.items():
                kind = "floating point" if each.is_floating_point() else "integers"
                is_padded = name.endswith(("input_ids", "attention_mask"))
                values[f"`{name}`"] = f"{kind} {list(each.shape[: -1 if is_padded else None])}"
            values |= self._settings(active)
        return agree(f"SpladeObjective of {', '.join(active)}", self.gather, tensors, **values)

    def _settings(self, active: Sequence[str]) -> dict[str, str]:
        """Return the weights and hyperparameters that must be equal on all ranks, by name."""
        values = {f"weights[{term!r}]": shown(self.weights[term]) for term in active}
        for name in ("score_scale", "teacher_scale", "impl"):
            values[f"`{name}`"] = shown(getattr(self, name))
        used = {term.removeprefix("query_").removeprefix("document_") for term in active}
        for name in LOSSES:
            loss = getattr(self, name)
            if name in used and isinstance(loss, LossModule):
                own = loss.hyperparameters()
                own.pop("gather", None)  # the objective's holds
                values.update((f"`{name}.{key}`", shown(value)) for key, value in own.items())
        return values

    def _terms(self, active: Sequence[str], batch: SpladeBatch) -> dict[str, Tensor]:
        shown = None  # to InfoNCE and FLOPS, where they do not see all
        if len(self.stopword_ids) > 0 and {"info_nce", "query_flops", "document_flops"} & {*active}:
            shown = self._without_stopwords(batch)
        terms = self._score_terms(active, batch, shown)
        anchor, positive = batch.anchor, batch.positive
        for side, one, other in (("query", anchor, positive), ("document", positive, anchor)):
            if {f"{side}_{name}" for name in ON_TEXTS} & {*active}:
                terms.update(self._text_terms(active, side, batch, shown))
            if (name := f"{side}_positive_activation") in active:
                tokens = other.input_ids, other.attention_mask
                terms[name] = self._call(self.positive_activation, one.activations, *tokens)
        return terms

    def _score_terms(
        self, active: Sequence[str], batch: SpladeBatch, shown: SpladeBatch | None
    ) -> dict[str, Tensor]:
        """Return the terms on scores; InfoNCE gets ``shown`` where stopwords are hidden."""
        terms: dict[str, Tensor] = {}
        anchor, positive, negative = batch.anchor, batch.positive, batch.negative
        teacher_scores, teacher_anchor_scores = batch.teacher_scores, batch.teacher_anchor_scores
        teacher_scale = self.score_scale if self.teacher_scale is None else self.teacher_scale
        scores, ranks = None, 1
        if {*TAUGHT} & {*active} and teacher_scores is not None:
            ranks = self._ranks_of_teacher(anchor, negative, teacher_scores)
            scores = self._scores(anchor, positive, negative, ranks)
            if batch.candidate_mask is not None:
                mask = self._candidate_mask(batch)
                if ranks < (num_ranks() if self.gather else 1):
                    mask = of_this_rank(mask, batch)
                mask = candidates(mask, batch, teacher_scores.shape, ranks)
                teacher_scores = teacher_scores.to(scores.dtype).masked_fill(~mask, -torch.inf)
        if "info_nce" in active:
            is_whole = shown is None and not (
                self.gather or getattr(self.info_nce, "gather", False)
            )
            terms["info_nce"] = self._info_nce(shown or batch, scores if is_whole else None)
        # The checks above ensure the inputs of active terms; the `is not None` are for the types.
        if "triplet_margin" in active and negative is not None:
            terms["triplet_margin"] = self._triplet_margin(batch, negative)
        if scores is not None and teacher_scores is not None:
            student = candidates(scores, batch, teacher_scores.shape, ranks)
            teacher_scores = teacher_scores.to(scores.dtype)
            if "distillation" in active:
                sides = _scaled(student, self.score_scale), _scaled(teacher_scores, teacher_scale)
                terms["distillation"] = self._call(self.distillation, *sides)
            if "margin_mse" in active:
                terms["margin_mse"] = self._margin_mse(scores, batch, teacher_scores, ranks)
            if "ranknet" in active:
                sides = _scaled(student, self.score_scale), teacher_scores
                terms["ranknet"] = self._call(self.ranknet, *sides)
        if "context_distillation" in active and teacher_anchor_scores is not None:
            ranks = self._ranks_of_teacher(anchor, None, teacher_anchor_scores)
            own = self._scores(anchor, anchor, None, ranks)
            teacher = _scaled(teacher_anchor_scores.to(own.dtype), teacher_scale)
            sides = _scaled(own, self.score_scale), teacher
            terms["context_distillation"] = self._call(self.context_distillation, *sides)
        return terms

    def _info_nce(self, batch: SpladeBatch, scores: Tensor | None) -> Tensor:
        """Compute InfoNCE of the shared scores if the module takes them, else of the vectors."""
        loss, negative = self.info_nce, batch.negative
        mask = batch.candidate_mask
        leaves_out = mask, loss.false_negative_margin, loss.false_negative_ratio
        # The scores lack the second direction of the negatives, and other sources of negatives.
        is_enough = loss.in_batch and not (loss.symmetric and negative is not None)
        is_enough = is_enough and set(loss.negatives_from) == {"document"}
        is_enough = is_enough and all(each is None for each in leaves_out)
        if scores is None or not is_enough or not takes_scores(loss):
            return self._call(
                loss,
                batch.anchor.activations,
                batch.positive.activations,
                None if negative is None else negative.activations,
                positive_ids=batch.positive_ids,
                **({} if mask is None else {"candidate_mask": mask}),
            )
        loss.check_hyperparameters()
        settings = loss.hyperparameters()
        options = {name: settings[name] for name in ("symmetric", "decoupled", "reduction")}
        return info_nce_of_shared_scores(scores / loss.temperature, batch.positive_ids, **options)

    def _triplet_margin(self, batch: SpladeBatch, negative: Texts) -> Tensor:
        anchor, positive, vectors = (
            x.activations for x in (batch.anchor, batch.positive, negative)
        )
        if batch.candidate_mask is None:
            return self._call(self.triplet_margin, anchor, positive, vectors)
        ranks = num_ranks() if self.gather else 1
        own = own_candidates(self._candidate_mask(batch), negative, ranks)
        vectors = vectors if vectors.ndim == 3 else vectors[:, None]
        mask = own[:, :1] & own[:, 1:]  # a row without its positive is not valid
        return self._call(self.triplet_margin, anchor, positive, vectors, mask)

    def _candidate_mask(self, batch: SpladeBatch) -> Tensor:
        """Return the batch's mask as bool; raise if it has another number of columns."""
        assert batch.candidate_mask is not None
        ranks = num_ranks() if self.gather else 1
        received, width = list(batch.candidate_mask.shape), ranks * len(batch.anchor.activations)
        if batch.negative is not None:
            shape = batch.negative.activations.shape
            width += shape[-2] * (ranks if len(shape) == 2 else 1)
        if received[1] != width:
            raise ValueError(
                f"expected `batch.candidate_mask` of shape [B, B + N] = [{received[0]}, {width}], "
                f"got {received}"
            )
        return as_mask("batch.candidate_mask", batch.candidate_mask)

    def _ranks_of_teacher(self, anchor: Texts, negative: Texts | None, teacher: Tensor) -> int:
        """Return how many ranks' candidates the teacher scored: 1 (this rank's) or all."""
        ranks = num_ranks() if self.gather else 1
        wanted = ranks * len(anchor.activations)
        if negative is not None:
            own = negative.activations.shape[-2]
            wanted += own if negative.activations.ndim == 3 else ranks * own
        return ranks if teacher.ndim == 2 and teacher.shape[1] == wanted else 1

    def _scores(self, anchor: Texts, positive: Texts, negative: Texts | None, ranks: int) -> Tensor:
        """Return the scores of positives, then negatives, ``[B, B + N]``, of one or all ranks."""
        check_choice("info_nce.similarity", self.info_nce.similarity, ("cosine", "dot"))
        query, key = anchor.activations, positive.activations
        others = None if negative is None else negative.activations
        if ranks > 1:
            key = gather_rows(key)
            if others is not None and others.ndim == 2:  # own negatives are not gathered
                others = gather_rows(others)
        is_cosine = self.info_nce.similarity == "cosine"
        return shared_scores(query, key, others, cosine=is_cosine)

    def _margin_mse(
        self, scores: Tensor, batch: SpladeBatch, teacher: Tensor, ranks: int
    ) -> Tensor:
        own = own_candidates(scores, batch.negative, ranks)
        scored = scored_candidates(scores, batch, teacher.shape, ranks)
        if scored == "positives":
            raise ValueError(
                "the term 'margin_mse' needs `batch.teacher_scores` of the negatives too, got "
                f"{list(teacher.shape)}, for the positives alone"
            )
        if scored == "all":
            teacher = own_candidates(teacher, batch.negative, ranks)
        sides = (x for scores in (own, teacher) for x in (scores[:, 0], scores[:, 1:]))
        return self._call(self.margin_mse, *sides)

    def _text_terms(
        self, active: Sequence[str], side: str, batch: SpladeBatch, shown: SpladeBatch | None
    ) -> dict[str, Tensor]:
        """Return the terms on the vectors of one side; FLOPS gets those of ``shown``."""
        terms: dict[str, Tensor] = {}
        activations, input_ids, attention_mask, logits = texts = _side(batch, side)
        signed = activations if logits is None else logits
        if f"{side}_flops" in active:
            x = texts if shown is None else _side(shown, side)
            terms[f"{side}_flops"] = self._call(self.flops, x.activations)
        if f"{side}_min_activation" in active:
            counts = token_counts(input_ids, attention_mask, self.special_token_ids)
            terms[f"{side}_min_activation"] = self._call(self.min_activation, signed, counts)
        if f"{side}_language_penalty" in active:
            if self.language_penalty is None:
                raise ValueError(
                    f"the term '{side}_language_penalty' needs "
                    "SpladeObjective(language_penalty=LanguagePenaltyLoss(...)), got None"
                )
            penalty = self._call(self.language_penalty, activations)
            terms[f"{side}_language_penalty"] = penalty
        if f"{side}_self_reconstruction" in active:
            terms[f"{side}_self_reconstruction"] = self._call(
                self.self_reconstruction, signed, input_ids, attention_mask
            )
        return terms

    def _without_stopwords(self, batch: SpladeBatch) -> SpladeBatch:
        vocab_size = batch.anchor.activations.shape[-1]
        if self._largest_stopword_id >= vocab_size:
            raise ValueError(
                f"expected `stopword_ids` below V = {vocab_size}, got {self._largest_stopword_id}"
            )
        # Not by `_replace`, which PyTorch 2.6 cannot compile.
        negative = None if batch.negative is None else self._hide(batch.negative)
        return SpladeBatch(
            self._hide(batch.anchor), self._hide(batch.positive), negative, *batch[3:]
        )

    def _hide(self, texts: Texts) -> Texts:
        return Texts(texts.activations.index_fill(-1, self.stopword_ids, 0.0), *texts[1:])

    def _call(self, loss: nn.Module, *tensors: Tensor | None, **options: Any) -> Tensor:
        if self.gather:
            options["gather"] = True
        if self.impl == "definition" and hasattr(loss, "impl"):
            options["impl"] = "definition"
        value: Tensor = loss(*tensors, **options)
        return value

    def extra_repr(self) -> str:
        """Return the weights and the settings that are no loss's own."""
        scales = f"score_scale={self.score_scale}, teacher_scale={self.teacher_scale}"
        return f"weights={self.weights}, {scales}, gather={self.gather}, impl={self.impl!r}"


# The classes that each argument of a loss accepts, by its name.
LOSSES: dict[str, list[type[LossModule]]] = {
    name: [each for each in get_args(hint) if issubclass(each, LossModule)]
    for name, hint in get_type_hints(SpladeObjective.__init__).items()
    if name in {each.removeprefix("query_").removeprefix("document_") for each in NEEDS}
}


def _scaled(scores: Tensor, scale: float) -> Tensor:
    return scores if scale == 1.0 else scale * scores


def _counts(weight: float | Tensor) -> bool:
    # Reading a tensor would wait for the device.
    return isinstance(weight, Tensor) or weight != 0


def _tensors(batch: SpladeBatch) -> dict[str, Tensor]:
    named: dict[str, Any] = {}
    for name in SpladeBatch._fields:
        value = getattr(batch, name, None)
        fields = Texts._fields if isinstance(value, Texts) else ()
        named[name] = value
        named.update((f"{name}.{field}", getattr(value, field)) for field in fields)
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}


def _side(batch: SpladeBatch, side: str) -> Texts:
    """Return the anchors, or positives and negatives as one, which copies them."""
    if side == "query":
        return batch.anchor
    negative = batch.negative
    if negative is None:
        return batch.positive
    return batch.positive.join(negative.flatten() if negative.activations.ndim == 3 else negative)


def _sorted_ids(name: str, token_ids: TokenIds) -> Tensor:
    ids = check_ids(name, token_ids)
    return torch.tensor(sorted({int(t) for t in ids} if ids is not None else ()), dtype=torch.int64)
