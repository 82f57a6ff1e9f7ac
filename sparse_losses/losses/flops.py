"""FLOPS: the expected cost of a dot product through an inverted index (Minimizing FLOPs, 2020)."""

from torch import Tensor

from sparse_losses._core.column_mean import Estimator, mean_and_square
from sparse_losses._core.loss import LossModule, loss


@loss(activations="B V, csr", token_weight="V, optional, constant, >= 0", threshold=">= 0")
def flops_loss(
    activations: Tensor,
    token_weight: Tensor | None = None,
    *,
    estimator: Estimator = "biased",
    threshold: float | None = None,
    gather: bool = False,
) -> Tensor:
    r"""FLOPS regulariser: sum over the vocabulary of the squared mean activation of each token.

    $$\ell = \sum_{j=1}^{V} w_j m_j^2 \qquad m_j = \frac{1}{B} \sum_{i=1}^{B} x_{ij}$$

    $x_{ij} \ge 0$ is the activation of token $j$ in row $i$, $w_j$ its ``token_weight``, by default
    1. A weight that stands inside the square, as in DF-FLOPS, has to be squared.

    The expectation of the loss depends on the batch size: it is
    $\sum_j w_j (\mu_j^2 + \sigma_j^2 / B)$. ``estimator="unbiased"`` replaces $m_j^2$ by

    $$\frac{\bigl(\sum_i x_{ij}\bigr)^2 - \sum_i x_{ij}^2}{B (B - 1)}$$

    whose expectation is $\mu_j^2$ at any batch size: a weight tuned at one batch size or number of
    devices fits another, though not another vocabulary. The estimate is 0 for a token that is
    active in one row only, and the gradient of a row comes from the *other* rows.

    Activations must be >= 0, which is not checked: signed logits cancel in the mean.

    Args:
        activations: ``[B, V]`` floating, >= 0; dense or CSR, with a gradient of its pattern.
        token_weight: ``[V]``, ``w``, >= 0; cast to the dtype of the computation.
        estimator: ``"biased"`` (as in the paper) or ``"unbiased"`` (needs ``B >= 2``).
        threshold: rows with at most this number of entries other than 0 count as rows of zeros.
        gather: whether the means are over the rows of all ranks, as many on each.

    Returns:
        0-d, fp32 (fp64 for fp64 inputs), one statistic of the whole batch, hence no ``reduction``;
        0 for ``B = 0``.

    Raises:
        ValueError: for wrong shapes, devices, weights or hyperparameters, or too few rows.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import flops_loss
        >>> activations = torch.tensor([[2.0, 0.0, 1.0], [2.0, 1.0, 0.0]])
        >>> flops_loss(activations)  # 2^2 + 0.5^2 + 0.5^2
        tensor(4.5000)
        >>> flops_loss(activations, estimator="unbiased")  # 2 * 2 + 0 * 1 + 1 * 0
        tensor(4.)

    References:
        Minimizing FLOPs to Learn Efficient Sparse Representations. Exploring l0 Sparsification for
        Inference-free Sparse Retrievers (``threshold``).
    """
    _, squared_mean = mean_and_square(activations, estimator, gather, threshold)
    return (squared_mean if token_weight is None else token_weight * squared_mean).sum()


class FlopsLoss(LossModule):
    """Module of ``flops_loss``; ``token_weight`` is a buffer, which may be changed in place.

    Examples:
        >>> import torch
        >>> from sparse_losses import FlopsLoss
        >>> FlopsLoss()(torch.eye(4))  # four tokens, each in one row of four
        tensor(0.2500)
    """

    token_weight: Tensor | None

    def __init__(
        self,
        token_weight: Tensor | None = None,
        *,
        estimator: Estimator = "biased",
        threshold: float | None = None,
        gather: bool = False,
    ) -> None:
        super().__init__(flops_loss, locals())
        self.register_constant("token_weight", token_weight)

    def forward(self, activations: Tensor, *, gather: bool | None = None) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        return flops_loss(activations, self.token_weight, **self.hyperparameters(gather=gather))
