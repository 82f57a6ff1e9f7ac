"""Minimum activation: every text should keep a few active tokens."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.entries import largest_of_rows
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.reduction import Reduction, reduce


@loss(
    activations="B V, csr, entries >= 0",
    token_counts="B, integer, optional",
    top_k="integer >= 1",
    threshold="finite",
)
def min_activation_loss(
    activations: Tensor,
    token_counts: Tensor | None = None,
    *,
    top_k: int = 5,
    threshold: float = 0.5,
    gather: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Hinge loss on the mean of a row's largest activations, which should reach a threshold.

    $$\ell_i = \max\Bigl(0, \theta - \frac{1}{k_i} \sum_{r=1}^{k_i} x_{i(r)}\Bigr)
    \qquad k_i = \min(k, n_i)$$

    $x_{i(r)}$ is the $r$-th largest activation of row $i$, $k$ is ``top_k``, $\theta$ the
    ``threshold``, $n_i$ the row's token count ($k_i = k$ without ``token_counts``). An all-zero
    row cannot be revived, as a zero ReLU output has no gradient: pass signed pooled logits for
    that. The same vector for every text satisfies the loss, so it does not prevent collapse.

    Args:
        activations: ``[B, V]`` floating; activations or signed pooled logits. A CSR tensor has
            entries >= 0, and a gradient of its pattern.
        token_counts: ``[B]`` integers; limits $k_i$, so that a query of three tokens need not
            activate five. A row with count 0 is not valid.
        top_k: ``k``, the number of activations averaged, 1 to ``V``.
        threshold: the mean to reach, finite, in units of the activations.
        gather: whether ``reduction`` is over the rows of all ranks, as many on each.
        reduction: ``"none"`` (``[B]``), ``"mean"`` over the valid rows, or ``"sum"``.

    Returns:
        fp32 (fp64 for fp64 inputs), 0-d or ``[B]``, >= 0.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, such as ``top_k > V``.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import min_activation_loss
        >>> activations = torch.tensor([[0.3, 0.1, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0]])
        >>> min_activation_loss(activations, top_k=2, reduction="none")
        tensor([0.3000, 0.0000])

    References:
        From the notes of a Korean neural sparse retriever (its versions V22 to V26).
    """
    if top_k > activations.shape[1]:
        raise ValueError(f"expected `top_k` of at most V = {activations.shape[1]}, got {top_k}")
    if activations.layout == torch.sparse_csr:
        largest, _ = largest_of_rows(activations, top_k)
    else:
        largest = activations.gather(1, activations.detach().topk(top_k).indices)
    if token_counts is None:
        mean, valid = largest.mean(-1), None
    else:
        counts = token_counts.clamp(max=top_k)
        is_counted = torch.arange(top_k, device=largest.device) < counts[:, None]
        mean = torch.where(is_counted, largest, 0.0).sum(-1) / counts.clamp(min=1)
        valid = counts > 0
    # `threshold - mean` would compile a new graph for every threshold.
    return reduce(nnf.relu(-mean + threshold), reduction, valid, gather=gather)


class MinActivationLoss(LossModule):
    """Module of ``min_activation_loss``.

    Examples:
        >>> import torch
        >>> from sparse_losses import MinActivationLoss
        >>> loss = MinActivationLoss(top_k=2, threshold=1.0)
        >>> loss(torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(0.5000)
        >>> loss(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([1]))  # a text of one token
        tensor(0.)
    """

    def __init__(
        self,
        *,
        top_k: int = 5,
        threshold: float = 0.5,
        gather: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(min_activation_loss, locals())

    def forward(
        self, activations: Tensor, token_counts: Tensor | None = None, *, gather: bool | None = None
    ) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather)
        return min_activation_loss(activations, token_counts, **options)
