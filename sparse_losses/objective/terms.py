"""The terms of an objective: functions of a batch that return a 0-d tensor.

A builder names a loss and what it gets of the batch. A function of yours is a term, too, and so is
a module, whose parameters the objective then has::

    def hinge(batch):
        scores = batch.scores("dot")
        return (1 + scores - scores.diagonal()[:, None]).relu().mean()

    objective = SpladeObjective({"info_nce": (1.0, terms.info_nce()), "hinge": (0.5, hinge)})
"""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_choice, check_number
from sparse_losses._core.token_ids import TokenIds, as_mask, check_ids
from sparse_losses.losses.distillation import DistillationLoss
from sparse_losses.losses.flops import FlopsLoss
from sparse_losses.losses.info_nce import InfoNCELoss, info_nce_from_scores
from sparse_losses.losses.margin_mse import MarginMSELoss
from sparse_losses.losses.min_activation import MinActivationLoss
from sparse_losses.losses.positive_activation import PositiveActivationLoss
from sparse_losses.losses.ranknet import RankNetLoss
from sparse_losses.losses.self_reconstruction import SelfReconstructionLoss
from sparse_losses.losses.triplet_margin import TripletMarginLoss
from sparse_losses.objective.batch import Similarity, SpladeBatch, Texts, need, score
from sparse_losses.objective.scores import candidate_mask, own_candidates, taught, told_scores

Side = Literal["query", "document"]  # anchors, or positives and negatives
Loss: TypeAlias = nn.Module | None  # None is the package's loss with its defaults


class Term(nn.Module):
    """A loss and what it gets of a batch, ``compute(term, batch)``; or a function of a batch.

    The settings are attributes, which may be assigned between steps.
    """

    token_ids: Tensor

    def __init__(self, compute: Any, loss: Loss = None, ids: Any = (), **settings: Any) -> None:
        super().__init__()
        if not isinstance(loss, nn.Module | None):
            raise TypeError(f"expected a loss, a module that returns one number, got {loss!r}")
        check_choice("side", settings.get("side", "query"), ("query", "document"))
        self.loss, self.compute, self.settings = loss, compute, (*settings,)
        self.uses_scores_of_others = compute is _info_nce
        for name, value in settings.items():
            setattr(self, name, value)
        known = torch.as_tensor(check_ids("token ids", ids), dtype=torch.int64, device="cpu")
        smallest, self._largest_id = (int(x) for x in known.aminmax()) if len(known) else (0, -1)
        if smallest < 0:
            raise ValueError(f"expected token ids >= 0, got {smallest}")
        self.register_buffer("token_ids", known, persistent=False)

    def forward(self, batch: SpladeBatch) -> Tensor:
        """Return the loss of what it gets of a batch, or the function's value."""
        return self.compute(batch) if self.loss is None else self.compute(self, batch)  # type: ignore[no-any-return]

    def call(self, batch: SpladeBatch, *tensors: Tensor | None, **masks: Tensor | None) -> Tensor:
        """Call the loss, of all ranks' texts if the batch says so; a mask may be None."""
        options: dict[str, Any] = {name: mask for name, mask in masks.items() if mask is not None}
        if batch.gather:
            options["gather"] = True
        return self.loss(*tensors, **options)  # type: ignore[no-any-return,misc]

    def shown(self, activations: Tensor) -> Tensor:
        """Return activations that are 0 at ``token_ids``."""
        if len(self.token_ids) == 0:
            return activations
        if self._largest_id >= (vocab_size := activations.shape[-1]):
            raise ValueError(f"expected ids below V = {vocab_size}, got {self._largest_id}")
        return activations.index_fill(-1, self.token_ids, 0.0)

    def extra_repr(self) -> str:
        """Return the settings as ``name=value``."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.settings)


def info_nce(loss: Loss = None, *, stopword_ids: TokenIds = ()) -> Term:
    """InfoNCE of the vectors without stopwords, or of scores that another term has computed."""
    return Term(_info_nce, loss or InfoNCELoss(), stopword_ids)


def _info_nce(term: Any, batch: SpladeBatch) -> Any:
    if len(term.token_ids) == 0 and (told := told_scores(term.loss, batch)) is not None:
        return info_nce_from_scores(**told)
    vectors = [None if x is None else term.shown(x.activations) for x in batch[:3]]
    masks = {"positive_ids": batch.positive_ids, "candidate_mask": batch.candidate_mask}
    return term.call(batch, *vectors, **masks)


def triplet_margin(loss: Loss = None) -> Term:
    """The margin to each anchor's own negatives: ``[B, N, V]``, or ``[B, V]`` for one."""
    return Term(_triplet_margin, loss or TripletMarginLoss())


def _triplet_margin(term: Any, batch: SpladeBatch) -> Any:
    negative, mask = need(batch, "negative").activations, candidate_mask(batch)
    if mask is not None:
        own = own_candidates(mask, batch)
        mask = own[:, :1] & own[:, 1:]  # no margin without the positive
        negative = negative[:, None] if negative.ndim == 2 else negative
    vectors = batch.anchor.activations, batch.positive.activations, negative
    return term.call(batch, *vectors, candidate_mask=mask)


def distillation(
    loss: Loss = None,
    *,
    score_scale: float = 1.0,
    teacher_scale: float | None = None,
    similarity: Similarity = "cosine",
) -> Term:
    """Distillation of ``score_scale`` times the scores from ``teacher_scale`` times the teacher's.

    Cosines are too flat for a softmax: 1 over InfoNCE's temperature gives both the same scale.
    ``teacher_scale`` is by default ``score_scale``.
    """
    scales = {"score_scale": score_scale, "teacher_scale": teacher_scale}
    return Term(_taught, loss or DistillationLoss(), similarity=similarity, **scales)


def ranknet(
    loss: Loss = None, *, score_scale: float = 1.0, similarity: Similarity = "cosine"
) -> Term:
    """RankNet of ``score_scale`` times the scores for the order of the teacher's."""
    scales = {"score_scale": score_scale, "teacher_scale": 1.0}
    return Term(_taught, loss or RankNetLoss(), similarity=similarity, **scales)


def context_distillation(loss: Loss = None, **options: Any) -> Term:
    """Distillation of the anchors' scores with one another; the options are ``distillation``'s."""
    term = distillation(loss, **options)
    term.compute = _context
    return term


def _taught(term: Any, batch: SpladeBatch) -> Any:
    return _scaled(term, batch, *taught(batch, term.similarity))


def _context(term: Any, batch: SpladeBatch) -> Any:
    student = score(batch.anchor.activations, similarity=term.similarity)
    return _scaled(term, batch, student, need(batch, "teacher_anchor_scores"))


def _scaled(term: Any, batch: SpladeBatch, student: Tensor, teacher: Tensor) -> Any:
    teacher_scale = term.score_scale if term.teacher_scale is None else term.teacher_scale
    check_number("score_scale", term.score_scale, minimum=0.0, exclusive=True)
    check_number("teacher_scale", teacher_scale, minimum=0.0, exclusive=True)
    return term.call(batch, term.score_scale * student, teacher_scale * teacher.to(student.dtype))


def margin_mse(loss: Loss = None, *, similarity: Similarity = "cosine") -> Term:
    """MarginMSE of the positive and each anchor's own negatives, the mean over these."""
    return Term(_margin_mse, loss or MarginMSELoss(), similarity=similarity)


def _margin_mse(term: Any, batch: SpladeBatch) -> Any:
    pair = taught(batch, term.similarity, own=True)
    return term.call(batch, *(x for scores in pair for x in (scores[:, 0], scores[:, 1:])))


def flops(side: Side, loss: Loss = None, *, stopword_ids: TokenIds = ()) -> Term:
    """FLOPS (``FlopsLoss`` or ``IdfFlopsLoss``) of one side, without stopwords."""
    return Term(_activations, loss or FlopsLoss(), stopword_ids, side=side)


def language_penalty(side: Side, loss: nn.Module) -> Term:
    """The language penalty of one side; the loss has your allowed tokens."""
    return Term(_activations, loss, side=side)


def _activations(term: Any, batch: SpladeBatch) -> Any:
    return term.call(batch, term.shown(batch.texts(term.side).activations))


def min_activation(side: Side, loss: Loss = None, *, special_token_ids: TokenIds = ()) -> Term:
    """Minimum activation of one side: of no more activations than a text's own tokens, if known."""
    return Term(_min_activation, loss or MinActivationLoss(), special_token_ids, side=side)


def _min_activation(term: Any, batch: SpladeBatch) -> Any:
    texts = batch.texts(term.side)
    if (attended := texts.attention_mask) is not None:
        attended = as_mask("attention_mask", attended)
        if texts.input_ids is not None and len(term.token_ids) > 0:
            attended = attended & ~torch.isin(texts.input_ids, term.token_ids)
        attended = attended.sum(-1)
    return term.call(batch, _signed(texts), attended)


def self_reconstruction(side: Side, loss: Loss = None, *, special_token_ids: TokenIds = ()) -> Term:
    """Self-reconstruction of one side; the default loss ignores special tokens."""
    made = loss or SelfReconstructionLoss(ignore_token_ids=special_token_ids)
    return Term(_self_reconstruction, made, side=side)


def _self_reconstruction(term: Any, batch: SpladeBatch) -> Any:
    texts = batch.texts(term.side)
    return term.call(batch, _signed(texts), *_tokens(texts, term.side))


def positive_activation(side: Side, loss: Loss = None, *, special_token_ids: TokenIds = ()) -> Term:
    """A side's activations of its partner's tokens; the default loss ignores special tokens."""
    made = loss or PositiveActivationLoss(ignore_token_ids=special_token_ids)
    return Term(_positive_activation, made, side=side)


def _positive_activation(term: Any, batch: SpladeBatch) -> Any:
    one, other = batch[:2] if term.side == "query" else (batch.positive, batch.anchor)
    name = "document" if term.side == "query" else "query"
    return term.call(batch, one.activations, *_tokens(other, name))


def _signed(texts: Texts) -> Tensor:
    return texts.activations if texts.logits is None else texts.logits


def _tokens(texts: Texts, side: str) -> list[Tensor]:
    return [need(texts, name, side) for name in ("input_ids", "attention_mask")]
