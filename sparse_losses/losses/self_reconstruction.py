"""Self-reconstruction: a text should activate its own tokens."""

import torch
from torch import Tensor

from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.reduction import Reduction, reduce
from sparse_losses._core.softmax import softplus
from sparse_losses._core.token_ids import TokenIds, check_ids, distinct_ids, id_mask


@loss(activations="B V", input_ids="B S, token ids at attention_mask", attention_mask="B S, mask")
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

    $T_i$ is the set of attended ids of row $i$, $x_{ij}$ the score of token $j$. With ``balanced``
    the loss is half the mean over $T_i$ plus half the mean over the others, so that thirty targets
    count as much as 250,000 zeros. Ignored tokens count neither in the sums nor in $V$.

    For activations $x \ge 0$ the loss is at least $(1 - k/V) \log 2$ with $k = |T_i|$, and a token
    with activation 0 gets no gradient through its ReLU. Signed pooled logits (``return_logits`` of
    ``splade_pool``) have neither limit: prefer them if inactive tokens must become active.

    Args:
        activations: ``[B, V]`` floating; activations or signed pooled logits.
        input_ids: ``[B, S]`` integers in ``[0, V)``; ignored where the mask is 0.
        attention_mask: ``[B, S]`` bool, int or float 0/1.
        ignore_token_ids: ids that are neither targets nor others, such as the special tokens.
        balanced: whether to weigh both sides equally, as above; an empty side counts as 0.
        gather: whether ``reduction`` is over the rows of all ranks, as many on each.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 activations), 0-d or ``[B]``. A row without targets is valid.

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
    x, attended, vocab_size = activations, attention_mask, activations.shape[1]
    ids = input_ids * attended
    ignored = id_mask("ignore_token_ids", ignore_token_ids, vocab_size, x.device)
    num_kept: int | Tensor = max(vocab_size, 1)
    if ignored is not None:
        attended = attended & ~ignored[ids]
        num_kept = (~ignored).sum().clamp(min=1)

    # -1 at the targets, 1 elsewhere. Compiled code multiplies by bytes in a fraction of the time in
    # which it reads booleans. Positions that are not attended write 1 to column 0.
    sign = torch.ones_like(x, dtype=torch.int8)
    sign = sign.scatter_reduce(1, ids, 1 - 2 * attended.to(sign.dtype), "amin")
    signed = sign * x
    if ignored is not None:
        signed = torch.where(ignored, -torch.inf, signed)  # softplus(-inf) = 0
    cost = softplus(signed)
    if not balanced:
        return reduce(cost.sum(-1) / num_kept, reduction, gather=gather)
    num_targets = (~distinct_ids(ids, attended)[1]).sum(-1, dtype=x.dtype)
    num_others = (num_kept - num_targets).clamp(min=1)
    ratio = num_others / num_targets  # infinite without targets, where it is not read
    cost = torch.where(sign < 0, ratio[:, None], 1.0) * cost
    return reduce(cost.sum(-1) / (2 * num_others), reduction, gather=gather)


class SelfReconstructionLoss(LossModule):
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
        ignore_token_ids = check_ids("ignore_token_ids", ignore_token_ids)
        super().__init__(self_reconstruction_loss, locals())

    def forward(
        self,
        activations: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather)
        return self_reconstruction_loss(activations, input_ids, attention_mask, **options)
