"""Language penalty: a cost on activating tokens of unwanted languages."""

import torch
from torch import Tensor

from sparse_losses._core.entries import entries_of
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.reduction import Reduction, reduce


@loss(activations="B V, csr", token_penalty="V, constant")
def language_penalty_loss(
    activations: Tensor,
    token_penalty: Tensor,
    *,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Sum of a row's activations, weighted by a penalty per token.

    $$\ell_i = \sum_{j=1}^{V} p_j x_{ij}$$

    $x_{ij}$ is the activation of token $j$ in row $i$, $p$ the ``token_penalty``, which is 0 for
    tokens of the wanted languages (see ``language_penalty``).

    Args:
        activations: ``[B, V]`` floating; dense or CSR, with a gradient of its pattern.
        token_penalty: ``[V]``, ``p``; cast to the dtype of the computation.
        gather: whether ``reduction`` is over the rows of all ranks, as many on each.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 activations), 0-d or ``[B]``.

    Raises:
        ValueError: for wrong shapes, devices or reduction.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import language_penalty_loss
        >>> language_penalty_loss(torch.tensor([[1.0, 0.5]]), torch.tensor([0.0, 100.0]))
        tensor(50.)

    References:
        From the notes of a Korean neural sparse retriever (its version V28a).
    """
    if activations.layout == torch.sparse_csr:
        entries = entries_of(activations)
        cost = entries.value * token_penalty[entries.column]
        values = entries.sum_rows(len(activations), cost)
    else:
        values = activations @ token_penalty
    return reduce(values, reduction, gather=gather)


class LanguagePenaltyLoss(LossModule):
    """Module of ``language_penalty_loss``; ``token_penalty`` is a buffer.

    Examples:
        >>> import torch
        >>> from sparse_losses import LanguagePenaltyLoss
        >>> LanguagePenaltyLoss(torch.tensor([0.0, 100.0]))(torch.tensor([[1.0, 0.25]]))
        tensor(25.)
    """

    token_penalty: Tensor

    def __init__(
        self, token_penalty: Tensor, *, gather: bool = False, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(language_penalty_loss, locals())
        self.register_constant("token_penalty", token_penalty)

    def forward(self, activations: Tensor, *, gather: bool | None = None) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather)
        return language_penalty_loss(activations, self.token_penalty, **options)
