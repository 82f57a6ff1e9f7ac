"""Self-reconstruction: a text activates its own tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_flag, check_shapes, describe
from sparse_losses._core.fused import can_fuse, fuse
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses._core.reduction import Reduction, check_reduction, reduce
from sparse_losses._core.softmax import softplus, softplus_into
from sparse_losses._core.token_ids import (
    TokenIds,
    as_mask,
    attended_ids,
    check_ids,
    first_occurrences,
    id_mask,
)
from sparse_losses.distributed import agree_across_ranks

__all__ = ["SelfReconstructionLoss", "self_reconstruction_loss"]

HELD = 1 << 20  # numbers at once: fewer, and starting threads takes longer than their work


@full_precision
def self_reconstruction_loss(
    activations: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    ignore_token_ids: TokenIds | None = None,
    balanced: bool = False,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Binary cross-entropy between a row's scores and the set of tokens in its text.

    $$\ell_i = \frac{1}{V} \Bigl( \sum_{j \in T_i} \log(1 + e^{-x_{ij}})
    + \sum_{j \notin T_i} \log(1 + e^{x_{ij}}) \Bigr)$$

    $T_i$ are the attended ids of row $i$, each once; $x_{ij}$ the score of token $j$. ``balanced``
    takes half the mean over $T_i$ plus half the mean over the others, so that thirty targets are
    not drowned by 250,000 zeros. Ignored tokens leave both sums and $V$.

    On activations $x \ge 0$ the value cannot fall below $(1 - k/V) \log 2$ with $k = |T_i|$ tokens,
    and a silent token gets no gradient through its ReLU. Signed pooled logits (``return_logits`` of
    ``splade_pool``) have neither limit; prefer them where a token
    must be woken, activations where the text's tokens are active and only need to stay so.

    Args:
        activations: ``[B, V]`` floating; activations or signed pooled logits.
        input_ids: ``[B, S]`` integers in ``[0, V)``; not looked at where the mask is 0.
        attention_mask: ``[B, S]`` bool, int or float 0/1.
        ignore_token_ids: ids that are neither target nor other, such as the special tokens, which
            a FLOPS penalty would punish while this loss raised them.
        balanced: see above; an empty side counts 0.
        gather: whether ``"mean"`` and ``"sum"`` are over the rows of all ranks, whose number is the
            same on each (see ``sparse_losses.distributed``).
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 activations), 0-d or ``[B]``. A row without attended ids is valid: all
        of its tokens are others.

    Raises:
        ValueError: for wrong shapes, devices or reduction, or attended ids outside ``[0, V)``.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import self_reconstruction_loss
        >>> logits = torch.tensor([[4.0, -4.0, -4.0]])
        >>> ids, mask = torch.tensor([[0, 0, 2]]), torch.tensor([[1, 1, 0]])
        >>> self_reconstruction_loss(logits, ids, mask)  # log(1 + exp(-4))
        tensor(0.0181)

    References:
        From the notes of a Korean neural sparse retriever (its versions V22 to V26).
    """
    size = check_shapes(
        activations=(activations, "B V"),
        input_ids=(input_ids, "B S"),
        attention_mask=(attention_mask, "B S"),
    )
    check_flag(balanced=balanced)
    check_reduction(reduction)
    gather = agree_across_ranks(
        "self_reconstruction_loss", gather, activations, B=activations.shape[0]
    )
    x = activations.to(compute_dtype(activations=activations))
    vocab_size = size["V"]
    attended = as_mask("attention_mask", attention_mask)
    ids = attended_ids("input_ids", input_ids, attended, vocab_size)
    ignored = id_mask("ignore_token_ids", ignore_token_ids, vocab_size, x.device)
    num_kept = x.new_full((), vocab_size)
    if ignored is not None:
        attended = attended & ~ignored[ids]
        num_kept = num_kept - ignored.sum()

    ids, is_target = first_occurrences(ids, attended)
    # Row value: share * (sum over the others + ratio * sum over the targets).
    share, ratio = 1 / num_kept.clamp(min=1), x.new_ones(size["B"])
    if balanced:
        num_targets = is_target.sum(-1).to(x.dtype)
        num_others = (num_kept - num_targets).clamp(min=1)
        share, ratio = 0.5 / num_others, num_others / num_targets.clamp(min=1)
    parts = ids, is_target, ignored, ratio
    if can_fuse(x):
        sums = fuse(_row_sums, _row_sums_and_gradient, x, *parts)
    else:
        sums = _row_sums(x, *parts)
    return reduce(share * sums, reduction, gather=gather)


def _row_sums(
    x: Tensor, ids: Tensor, is_target: Tensor, ignored: Tensor | None, ratio: Tensor
) -> Tensor:
    # Targets are taken out before the sum, not subtracted after it, which would cancel: -inf
    # has softplus 0. No multi-hot target is built.
    others = x.scatter_add(1, ids, torch.where(is_target, -torch.inf, 0.0).to(x.dtype))
    if ignored is not None:
        others = torch.where(ignored, -torch.inf, others)
    target_sum = torch.where(is_target, softplus(-x.gather(1, ids)), 0.0).sum(-1)
    return softplus(others).sum(-1) + ratio * target_sum


def _row_sums_and_gradient(
    needs: Sequence[bool],
    x: Tensor,
    ids: Tensor,
    is_target: Tensor,
    ignored: Tensor | None,
    ratio: Tensor,
) -> tuple[Tensor, list[Tensor | None]]:
    """The same with the gradient by ``x``, some rows at a time: the rest is never held whole."""
    # Ids sort first where they are targets: slots that are not say again what the first one says,
    # and in a row without targets what stands in column 0.
    ids = torch.where(is_target, ids, ids[:, :1])
    some = is_target[:, :1]
    target = x.gather(1, ids)
    of_target = torch.where(some, -ratio[:, None] * (-target).sigmoid(), target.sigmoid())
    other = torch.where(some, 0.0, softplus(target))
    target_sum = torch.where(is_target, softplus(-target), 0.0).sum(-1)
    sums = ratio * target_sum
    gradient = torch.empty_like(x) if needs[0] else None
    step = max(HELD // x.shape[1], 1)
    buffer = torch.empty_like(x[:step])
    for first in range(0, x.shape[0], step):
        rows = slice(first, first + step)
        others = softplus_into(buffer[: x[rows].shape[0]], x[rows]).scatter_(
            1, ids[rows], other[rows]
        )
        if gradient is not None:
            torch.sigmoid(x[rows], out=gradient[rows]).scatter_(1, ids[rows], of_target[rows])
        if ignored is not None:
            others.masked_fill_(ignored, 0.0)
            if gradient is not None:
                gradient[rows].masked_fill_(ignored, 0.0)
        sums[rows] += others.sum(-1)
    return sums, [gradient, None, None, None, None]


class SelfReconstructionLoss(nn.Module):
    """Module of ``self_reconstruction_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import SelfReconstructionLoss
        >>> loss = SelfReconstructionLoss(ignore_token_ids=[0], balanced=True)
        >>> activations = torch.tensor([[3.0, 2.0, 0.0, 0.0]])
        >>> loss(activations, torch.tensor([[0, 1]]), torch.tensor([[1, 1]]))
        tensor(0.4100)
    """

    def __init__(
        self,
        *,
        ignore_token_ids: TokenIds | None = None,
        balanced: bool = False,
        gather: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        check_flag(balanced=balanced, gather=gather)
        check_reduction(reduction)
        self.ignore_token_ids = check_ids("ignore_token_ids", ignore_token_ids)
        self.balanced = balanced
        self.gather = gather
        self.reduction: Reduction = reduction

    def forward(self, activations: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The loss; tensors as in the function."""
        return self_reconstruction_loss(
            activations,
            input_ids,
            attention_mask,
            ignore_token_ids=self.ignore_token_ids,
            balanced=self.balanced,
            gather=self.gather,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        """The hyperparameters."""
        return describe(self, "ignore_token_ids", "balanced", "gather", "reduction")
