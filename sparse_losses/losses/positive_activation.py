"""Positive activation: an anchor should activate the tokens of its positive."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.entries import values_at
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.reduction import Reduction, number_of_nonzeros, reduce
from sparse_losses._core.token_ids import TokenIds, check_ids, distinct_ids, id_mask


@loss(
    activations="B V, csr, uncast",
    positive_input_ids="B S, token ids at positive_attention_mask",
    positive_attention_mask="B S, mask",
    token_weight="V, optional, constant, >= 0",
)
def positive_activation_loss(
    activations: Tensor,
    positive_input_ids: Tensor,
    positive_attention_mask: Tensor,
    token_weight: Tensor | None = None,
    *,
    saturating: bool = False,
    ignore_token_ids: TokenIds | None = None,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Negative mean of an anchor's activations at the tokens of its positive.

    $$\ell_i = -\frac{\sum_{j \in T_i} u_j x_{ij}}{\sum_{j \in T_i} u_j}$$

    $T_i$ is the set of attended ids of the positive of row $i$, $x_{ij}$ the activation of token
    $j$ in the anchor, $u$ the ``token_weight`` (default 1). The loss is unbounded below and raises
    stopwords first. ``saturating`` replaces $-x_{ij}$ by $\log(1 + e^{-x_{ij}}) > 0$.

    Args:
        activations: ``[B, V]`` floating; activations of the anchors, dense or CSR, with a gradient
            of its pattern.
        positive_input_ids: ``[B, S]`` integers in ``[0, V)``; ignored where the mask is 0.
        positive_attention_mask: ``[B, S]`` bool, int or float 0/1.
        token_weight: ``[V]``, ``u`` >= 0; cast to the dtype of the computation.
        saturating: whether to replace $-x_{ij}$ as above.
        ignore_token_ids: ids left out of $T_i$, such as the special tokens.
        gather: whether ``reduction`` is over the rows of all ranks, as many on each.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 activations), 0-d or ``[B]``. A row is not valid if $T_i$ is empty or
        has a total weight of 0.

    Raises:
        ValueError: for wrong shapes, devices, reduction, ids or weights.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import positive_activation_loss
        >>> activations = torch.tensor([[1.0, 2.0, 3.0]])
        >>> ids, mask = torch.tensor([[2, 1, 2]]), torch.tensor([[1, 1, 1]])
        >>> positive_activation_loss(activations, ids, mask)  # tokens 1 and 2, each once
        tensor(-2.5000)

    References:
        From the notes of a Korean neural sparse retriever (its versions V22 to V26).
    """
    x, ids, attended = activations, positive_input_ids, positive_attention_mask
    dtype = torch.promote_types(x.dtype, torch.float32)
    ignored = id_mask("ignore_token_ids", ignore_token_ids, x.shape[1], ids.device)
    if ignored is not None:
        attended = attended & ~ignored[ids * attended]
    ids, repeats = distinct_ids(ids, attended)  # what is not attended counts as a repeat
    found = values_at(x, ids) if x.layout == torch.sparse_csr else x.gather(1, ids)
    if token_weight is None:  # minus the number of tokens
        weight, divisor = None, repeats.sum(-1, keepdim=True, dtype=dtype) - ids.shape[1]
    else:
        weight = token_weight[ids].masked_fill(repeats, 0.0)
        is_void = ~weight.any(-1, keepdim=True)  # a NaN is not 0, so that it is visible
        repeats = repeats | is_void
        if ids.shape[1]:  # a mean sees no scale, and sums of scaled weights stay in range
            largest = weight.detach().amax(-1, keepdim=True)
            weight = (weight / largest.masked_fill(is_void, 1.0)).masked_fill(repeats, 0.0)
        divisor = -weight.sum(-1, keepdim=True)
    if saturating:
        found = nnf.logsigmoid(found.to(dtype).masked_fill(repeats, 0.0))
    found = found if weight is None else found * weight
    is_mean = reduction == "mean" and not gather
    if is_mean:  # of the rows too, in the same division
        divisor = divisor * number_of_nonzeros(divisor.detach())
    # What is divided by infinity has no gradient. It is masked once more: it may be a NaN.
    cost = found / divisor.masked_fill(repeats, torch.inf)
    with torch.no_grad():
        cost.masked_fill_(repeats, 0.0)
    if is_mean:
        return cost.sum()
    return reduce(cost.sum(-1), reduction, ~repeats.all(-1), gather, zeroed=True)


class PositiveActivationLoss(LossModule):
    """Module of ``positive_activation_loss``; ``token_weight`` is a buffer.

    Examples:
        >>> import torch
        >>> from sparse_losses import PositiveActivationLoss
        >>> loss = PositiveActivationLoss(torch.tensor([0.0, 3.0, 1.0]))  # say, by idf
        >>> activations = torch.tensor([[9.0, 1.0, 2.0]])
        >>> loss(activations, torch.tensor([[0, 1, 2]]), torch.tensor([[1, 1, 1]]))
        tensor(-1.2500)
    """

    token_weight: Tensor | None

    def __init__(
        self,
        token_weight: Tensor | None = None,
        *,
        saturating: bool = False,
        ignore_token_ids: TokenIds | None = None,
        gather: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        ignore_token_ids = check_ids("ignore_token_ids", ignore_token_ids)
        super().__init__(positive_activation_loss, locals())
        self.register_constant("token_weight", token_weight)

    def forward(
        self,
        activations: Tensor,
        positive_input_ids: Tensor,
        positive_attention_mask: Tensor,
        *,
        gather: bool | None = None,
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        text = positive_input_ids, positive_attention_mask
        options = self.hyperparameters(gather=gather)
        return positive_activation_loss(activations, *text, self.token_weight, **options)
