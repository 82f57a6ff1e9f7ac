"""The terms of an objective: functions of a batch that return a 0-d tensor.

A builder names a loss and what it gets of the batch. A function of yours is a term, too, and so is
a module, whose parameters the objective then has::

    def hinge(batch):
        scores = batch.scores("dot")
        return (1 + scores - scores.diagonal()[:, None]).relu().mean()

    objective = SpladeObjective({"info_nce": (1.0, terms.info_nce()), "hinge": (0.5, hinge)})
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from sparse_losses._core.checks import check_choice, check_number
from sparse_losses._core.entries import with_values
from sparse_losses._core.token_ids import TokenIds, as_mask, check_ids, id_mask
from sparse_losses.distributed import num_ranks, rank
from sparse_losses.losses.distillation import DistillationLoss
from sparse_losses.losses.flops import FlopsLoss
from sparse_losses.losses.info_nce import InfoNCEFromScoresLoss, InfoNCELoss, info_nce_from_scores
from sparse_losses.losses.margin_mse import MarginMSELoss
from sparse_losses.losses.min_activation import MinActivationLoss
from sparse_losses.losses.positive_activation import PositiveActivationLoss
from sparse_losses.losses.ranknet import RankNetLoss
from sparse_losses.losses.self_reconstruction import SelfReconstructionLoss
from sparse_losses.losses.triplet_margin import TripletMarginLoss
from sparse_losses.objective.batch import Similarity, SpladeBatch, Texts, score

Side = Literal["query", "document"]  # anchors, or positives and negatives
Loss: TypeAlias = nn.Module | None  # None is the package's loss with its defaults
# Settings that InfoNCE of scores takes over. Not `gather`: it exchanges no candidates there.
FROM_SCORES = InfoNCEFromScoresLoss().hyperparameters().keys() - {"gather"}
DEFAULTS = InfoNCELoss().hyperparameters()


class Term(nn.Module):
    """A function of a batch and of settings, such as a loss: ``function(batch, **settings)``.

    The settings are attributes, which may be assigned between steps.
    """

    def __init__(self, function: Callable[..., Tensor], **settings: Any) -> None:
        super().__init__()
        if not isinstance(loss := settings.get("loss", self), nn.Module):
            raise TypeError(f"expected a loss, a module that returns one number, got {loss!r}")
        check_choice("side", settings.get("side", "query"), get_args(Side))
        self.function, self.settings = function, (*settings,)
        self.is_last = function is _info_nce  # as it can use the scores of others
        for name, value in settings.items():
            if name.endswith("_ids"):
                ids = torch.as_tensor(check_ids(name, value), dtype=torch.int64, device="cpu")
                self.register_buffer(name, ids, persistent=False)
            else:
                setattr(self, name, value)

    def forward(self, batch: SpladeBatch) -> Tensor:
        """Return the function's value."""
        return self.function(batch, **{name: getattr(self, name) for name in self.settings})


def _call(loss: Any, batch: SpladeBatch, *tensors: Any, **masks: Tensor | None) -> Tensor:
    """Call a loss, of all ranks' texts if the batch says so; a mask may be None."""
    options: dict[str, Any] = {name: mask for name, mask in masks.items() if mask is not None}
    if batch.gather:
        options["gather"] = True
    value: Tensor = loss(*tensors, **options)
    return value


def _hide(ids: Tensor, x: Tensor) -> Tensor:
    hidden = id_mask("stopword_ids", ids, x.shape[-1], x.device)
    if hidden is None:
        return x
    if x.layout == torch.strided:
        return x.masked_fill(hidden, 0.0)
    return with_values(x, x.values().masked_fill(hidden[x.col_indices()], 0.0))


def info_nce(loss: Loss = None, *, stopword_ids: TokenIds = ()) -> Term:
    """InfoNCE of the vectors without stopwords, or of scores that another term has computed."""
    return Term(_info_nce, loss=loss or InfoNCELoss(), stopword_ids=stopword_ids)


def _info_nce(batch: SpladeBatch, loss: Any, stopword_ids: Tensor) -> Tensor:
    ids, mask = batch.positive_ids, batch.candidate_mask
    is_plain = type(loss) is InfoNCELoss and not (loss._forward_hooks or loss._forward_pre_hooks)
    if is_plain and not batch.gather and len(stopword_ids) == 0:
        settings = loss.hyperparameters()
        similarity = settings.pop("similarity")
        told = {name: settings.pop(name) for name in FROM_SCORES & settings.keys()}
        # What scores cannot express is at its default. A tensor never counts as one, nor does an
        # option that InfoNCE itself lacks.
        others = [(x, DEFAULTS.get(name, loss)) for name, x in settings.items()]
        is_told = all(not isinstance(x, Tensor) and x == default for x, default in others)
        if is_told and similarity in (batch.memory or {}):  # another term has computed the scores
            scores, whole = batch.scores(similarity), _candidate_mask(batch)
            own = torch.eye(*scores.shape, dtype=torch.bool, device=scores.device)
            if ids is not None:
                more = (0, scores.shape[1] - len(ids))
                differs = nnf.pad(ids[:, None] != ids, more, value=True) | own
                whole = differs if whole is None else differs & whole
            return info_nce_from_scores(scores, own, candidate_mask=whole, **told)
    if mask is not None and not getattr(loss, "in_batch", True):  # own positive, the negatives
        mask = cast(Tensor, _candidate_mask(batch))
        mask = torch.cat([mask.diagonal()[:, None], mask[:, len(mask) :]], 1)
    vectors = [None if x is None else _hide(stopword_ids, x.activations) for x in batch.sides()]
    return _call(loss, batch, *vectors, positive_ids=ids, candidate_mask=mask)


def triplet_margin(loss: Loss = None) -> Term:
    """The margin to each anchor's own negatives: ``[B, N, V]``, or ``[B, V]`` for one."""
    return Term(_triplet_margin, loss=loss or TripletMarginLoss())


def _triplet_margin(batch: SpladeBatch, loss: Any) -> Tensor:
    negative, mask = _need(batch, "negative").activations, _candidate_mask(batch)
    if negative.ndim == 2 and negative.layout == torch.strided:  # CSR the loss refuses by name
        negative = negative[:, None]
    if mask is not None:
        own = _own_candidates(mask, batch)
        mask = own[:, :1] & own[:, 1:]  # no margin without the positive
    vectors = batch.anchor.activations, batch.positive.activations, negative
    return _call(loss, batch, *vectors, candidate_mask=mask)


def distillation(
    loss: Loss = None,
    *,
    score_scale: float = 1.0,
    teacher_scale: float | None = None,
    similarity: Similarity = "cosine",
    of: Literal["candidates", "anchors"] = "candidates",
) -> Term:
    """Distillation of ``score_scale`` times the scores from ``teacher_scale`` times the teacher's.

    Cosines are too flat for a softmax: 1 over InfoNCE's temperature gives both the same scale.
    ``teacher_scale`` is by default ``score_scale``; ``of`` says what is scored with the anchors.
    """
    loss = loss or DistillationLoss()
    return Term(_distillation, **locals())


def context_distillation(loss: Loss = None, **options: Any) -> Term:
    """Distillation of the anchors' scores with one another; the options are ``distillation``'s."""
    return distillation(loss, of="anchors", **options)


def ranknet(loss: Loss = None, *, similarity: Similarity = "cosine") -> Term:
    """RankNet of the scores for the order of the teacher's."""
    return distillation(loss or RankNetLoss(), similarity=similarity)


def _distillation(
    batch: SpladeBatch, loss: Any, score_scale: float, teacher_scale: Any, similarity: Any, of: str
) -> Tensor:
    teacher_scale = score_scale if teacher_scale is None else teacher_scale
    check_number("score_scale", score_scale, minimum=0.0, exclusive=True)
    check_number("teacher_scale", teacher_scale, minimum=0.0, exclusive=True)
    student, teacher = _taught(batch, similarity, of)
    return _call(loss, batch, score_scale * student, teacher_scale * teacher)


def _taught(batch: SpladeBatch, similarity: Similarity, of: str) -> tuple[Tensor, Tensor]:
    """Return scores ``[B, C]`` and a teacher's, which are ``-inf`` for what is left out.

    They are of the ``"candidates"`` that it scored, of the positive and the anchor's ``"own"``
    negatives, or of all ``"anchors"``.
    """
    check_choice("of", of, ("candidates", "own", "anchors"))
    if of == "anchors":
        student = score(batch.anchor.activations, similarity=similarity)
        return student, _need(batch, "teacher_anchor_scores").to(student.dtype)
    scores, mask = batch.scores(similarity), _candidate_mask(batch)
    teacher, wanted = _need(batch, "teacher_scores").to(scores.dtype), batch.teacher_candidates
    check_choice("batch.teacher_candidates", wanted, ("own", "batch", None))
    size, received = teacher.shape
    columns: dict[str, list[int]] = {"batch": [scores.shape[1]], "own": []}
    if batch.negative is not None:
        columns["batch"].append(size)  # of the positives alone
        first, *own = batch.negative.activations.shape[:-1]
        columns["own"] += [1 + (own[0] if own else 1)] if first == size else []
    fitting = [x for x, numbers in columns.items() if received in numbers and wanted in (None, x)]
    if not fitting or (len(fitting) == 2 and received != scores.shape[1]):
        either = [f"[{size}, {n}] ({name})" for name, own in columns.items() for n in own]
        expected = f"`batch.teacher_scores` of shape {' or '.join(either)}, and `batch."
        expected += 'teacher_candidates` to be "batch" or "own" where two fit'
        raise ValueError(f"expected {expected}, got {list(teacher.shape)} and {wanted!r}")
    is_own = fitting == ["own"]

    def select(x: Tensor) -> Tensor:
        return _own_candidates(x, batch) if is_own or of == "own" else x[:, :received]

    its_scores = teacher if is_own else select(teacher)
    if mask is not None:
        its_scores = its_scores.masked_fill(~select(mask), -torch.inf)
    return select(scores), its_scores


def margin_mse(loss: Loss = None, *, similarity: Similarity = "cosine") -> Term:
    """MarginMSE of the positive and each anchor's own negatives, the mean over these."""
    return Term(_margin_mse, loss=loss or MarginMSELoss(), similarity=similarity)


def _margin_mse(batch: SpladeBatch, loss: Any, similarity: Similarity) -> Tensor:
    pair = _taught(batch, similarity, "own")
    return _call(loss, batch, *(x for scores in pair for x in (scores[:, 0], scores[:, 1:])))


def flops(side: Side, loss: Loss = None, *, stopword_ids: TokenIds = ()) -> Term:
    """FLOPS (``FlopsLoss`` or ``IdfFlopsLoss``) of one side, without stopwords."""
    return Term(_activations, side=side, loss=loss or FlopsLoss(), stopword_ids=stopword_ids)


def language_penalty(side: Side, loss: nn.Module) -> Term:
    """The language penalty of one side; the loss has your allowed tokens."""
    return Term(_activations, side=side, loss=loss, stopword_ids=())


def _activations(batch: SpladeBatch, side: Side, loss: Any, stopword_ids: Tensor) -> Tensor:
    return _call(loss, batch, _hide(stopword_ids, batch.texts(side).activations))


def min_activation(side: Side, loss: Loss = None, *, special_token_ids: TokenIds = ()) -> Term:
    """Minimum activation of one side: of no more activations than a text's own tokens, if known."""
    loss = loss or MinActivationLoss()
    return Term(_min_activation, **locals())


def _min_activation(batch: SpladeBatch, side: Side, loss: Any, special_token_ids: Tensor) -> Tensor:
    texts = batch.texts(side)
    if (own := texts.attention_mask) is not None:
        own = as_mask("attention_mask", own)
        if texts.input_ids is not None and len(special_token_ids) > 0:
            own = own & ~torch.isin(texts.input_ids, special_token_ids)
        own = own.sum(-1)
    return _call(loss, batch, _signed(texts), own)


def self_reconstruction(side: Side, loss: Loss = None) -> Term:
    """Self-reconstruction of one side; ``ignore_token_ids`` of the loss are the special tokens."""
    return Term(_self_reconstruction, side=side, loss=loss or SelfReconstructionLoss())


def _self_reconstruction(batch: SpladeBatch, side: Side, loss: Any) -> Tensor:
    texts = batch.texts(side)
    return _call(loss, batch, _signed(texts), *_tokens(texts, side))


def positive_activation(side: Side, loss: Loss = None) -> Term:
    """A side's activations of its partner's tokens; ``ignore_token_ids`` as above."""
    return Term(_positive_activation, side=side, loss=loss or PositiveActivationLoss())


def _positive_activation(batch: SpladeBatch, side: Side, loss: Any) -> Tensor:
    if side == "query":
        return _call(loss, batch, batch.anchor.activations, *_tokens(batch.positive, "document"))
    return _call(loss, batch, batch.positive.activations, *_tokens(batch.anchor, "query"))


def _signed(texts: Texts) -> Tensor:
    return texts.activations if texts.logits is None else texts.logits


def _tokens(texts: Texts, side: str) -> list[Tensor]:
    return [_need(texts, name, side) for name in ("input_ids", "attention_mask")]


def _need(part: Any, name: str, whose: str = "batch") -> Any:
    if (value := getattr(part, name)) is None:
        raise ValueError(f"expected `{whose}.{name}`, got None")
    return value


def _own_candidates(x: Tensor, batch: SpladeBatch) -> Tensor:
    """Select the positive and the anchor's own negatives, ``[B, 1 + N]``, of ``x [B, B + N]``."""
    negative, size = _need(batch, "negative").activations, len(x)
    number = negative.shape[-2]
    if x.shape[1] != size + number or (negative.ndim == 2 and number != size):
        raise ValueError(f"expected B positives and each one's own negatives, got {list(x.shape)}")
    others = x[:, size:] if negative.ndim == 3 else x[:, size:].diagonal()[:, None]
    return torch.cat([x.diagonal()[:, None], others], dim=1)


def _candidate_mask(batch: SpladeBatch) -> Tensor | None:
    """Return ``candidate_mask`` of this rank's candidates; with ``gather`` it has all ranks'."""
    if (mask := batch.candidate_mask) is None:
        return None
    ranks, own = (num_ranks(), rank()) if batch.gather else (1, 0)
    shape = (0, 0) if batch.negative is None else batch.negative.activations.shape
    sizes = [len(mask)] * ranks + [shape[-2]] * (ranks if len(shape) == 2 else 1)
    if mask.shape[1] != sum(sizes):
        expected = f"`batch.candidate_mask` of shape [B, B + N] = {[len(mask), sum(sizes)]}"
        raise ValueError(f"expected {expected}, got {list(mask.shape)}")
    parts = torch.split(as_mask("batch.candidate_mask", mask), sizes, 1)
    return torch.cat([parts[own], parts[-1] if len(shape) == 3 else parts[ranks + own]], 1)
