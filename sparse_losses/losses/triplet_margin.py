"""Triplet margin loss: the positive closer than the negative by a margin (FaceNet, 2015)."""

from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.products import as_single
from sparse_losses._core.reduction import Reduction, reduce, reduce_means
from sparse_losses._core.similarity import normalize


@loss(
    anchor="B D, halves",
    positive="B D, halves",
    negative="B D or B N D, halves",
    candidate_mask="B N, mask, optional",
    margin="finite",
)
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    candidate_mask: Tensor | None = None,
    margin: float = 0.3,
    similarity: Literal["cosine", "dot", "euclidean"] = "cosine",
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Hinge loss: the positive should be more similar than the negative by a margin.

    $$\ell_i = \max\bigl(0, m - \mathrm{sim}(a_i, p_i) + \mathrm{sim}(a_i, n_i)\bigr)$$

    $m$ is the margin. With several negatives per row, $\ell_i$ is the mean over those that
    exist. With ``"euclidean"``, $\mathrm{sim}(a, b) = -\lVert a - b \rVert_2^2$, the squared
    distance.

    Args:
        anchor: ``[B, D]`` floating.
        positive: ``[B, D]``.
        negative: ``[B, D]``, or ``[B, N, D]``.
        candidate_mask: ``[B, N]`` bool, int or float 0/1; marks negatives ``[B, N, D]`` that exist.
        margin: ``m``, in units of the similarity, finite.
        similarity: ``"cosine"`` (of the rows, normalised here), ``"dot"`` or ``"euclidean"``.
        gather: whether ``reduction`` is over the rows of all ranks, as many on each.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``, >= 0. A row without a negative is not valid.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import triplet_margin_loss
        >>> a, n = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])
        >>> triplet_margin_loss(a, a, n)  # 0.3 - 1 + cos(45 degrees)
        tensor(0.0071)

    References:
        FaceNet: A Unified Embedding for Face Recognition and Clustering, section 3.1.
    """
    if negative.ndim == 3 and negative.shape[1] == 0:
        candidate_mask = negative.new_zeros(negative.shape[:2], dtype=torch.bool)
    if candidate_mask is not None:
        if negative.ndim == 2:
            raise ValueError(
                "expected `candidate_mask` only with `negative` of shape [B, N, D], "
                f"got {list(negative.shape)}"
            )
        valid = candidate_mask.any(1)
        # What is not there may be NaN, which must not reach a gradient: 0 * NaN is NaN.
        anchor, positive = (x.masked_fill(~valid[:, None], 0.0) for x in (anchor, positive))
        negative = negative.masked_fill(~candidate_mask[:, :, None], 0.0)
    prepare = normalize if similarity == "cosine" else as_single
    anchor, positive, negative = prepare(anchor), prepare(positive), prepare(negative)
    near, far = _similarities(anchor, positive, negative, similarity == "euclidean")
    # The number comes last: `margin - near` would compile a new graph for every margin.
    hinges = nnf.relu(far - near + margin)
    if candidate_mask is None:
        return reduce(hinges.mean(-1), reduction, gather=gather)
    total = hinges.masked_fill(~candidate_mask, 0.0).sum(1)
    return reduce_means(total, candidate_mask.sum(1, dtype=total.dtype), reduction, gather)


def _similarities(
    anchor: Tensor, positive: Tensor, negative: Tensor, squared_distance: bool
) -> tuple[Tensor, Tensor]:
    """Return ``sim(a, p)`` as ``[B, 1]`` and ``sim(a, n)`` as ``[B, N]``."""
    is_one = negative.ndim == 2
    if squared_distance:
        near = -(anchor - positive).square().sum(-1, keepdim=True)
        far = -(anchor[:, None] - (negative[:, None] if is_one else negative)).square().sum(-1)
        return near, far
    near = (anchor * positive).sum(-1, keepdim=True)
    if is_one:  # a stack of one would compile to a matrix product
        return near, (anchor * negative).sum(-1, keepdim=True)
    return near, torch.einsum("bd,bnd->bn", anchor, negative)


class TripletMarginLoss(LossModule):
    """Module of ``triplet_margin_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import TripletMarginLoss
        >>> a, n = torch.zeros(1, 2), torch.ones(1, 2)
        >>> TripletMarginLoss(margin=5.0, similarity="euclidean")(a, a, n)
        tensor(3.)
    """

    def __init__(
        self,
        *,
        margin: float = 0.3,
        similarity: Literal["cosine", "dot", "euclidean"] = "cosine",
        gather: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(triplet_margin_loss, locals())

    def forward(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor,
        *,
        candidate_mask: Tensor | None = None,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather, candidate_mask=candidate_mask)
        return triplet_margin_loss(anchor, positive, negative, **options)
