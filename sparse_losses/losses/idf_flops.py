"""IDF-weighted FLOPS: frequent tokens are penalised more, special tokens most."""

from torch import Tensor

from sparse_losses._core.column_mean import Estimator, mean_and_square
from sparse_losses._core.loss import LossModule, loss


@loss(activations="B V, csr", token_penalty="V, constant", beta=">= 0", threshold=">= 0")
def idf_flops_loss(
    activations: Tensor,
    token_penalty: Tensor,
    *,
    beta: float = 0.3,
    estimator: Estimator = "biased",
    threshold: float | None = None,
    gather: bool = False,
) -> Tensor:
    r"""Sum of an L1 and a FLOPS penalty on the mean activations, weighted by token.

    $$\ell = \sum_{j=1}^{V} w_j |m_j| + \beta \sum_{j=1}^{V} w_j m_j^2
    \qquad m_j = \frac{1}{B} \sum_{i=1}^{B} x_{ij}$$

    $x_{ij}$ is the activation of token $j$ in row $i$, $w$ the ``token_penalty`` (see
    ``idf_penalty``). Near zero the gradient of the second sum vanishes, that of the first does not.
    ``estimator="unbiased"`` replaces $m_j^2$ as in ``flops_loss``. Activations must be >= 0, which
    is not checked: values of opposite signs cancel in $m_j$.

    Args:
        activations: ``[B, V]`` floating, >= 0; dense or CSR, with a gradient of its pattern.
        token_penalty: ``[V]``, ``w``; cast to the dtype of the computation.
        beta: weight of the squared part, >= 0.
        estimator: ``"biased"`` or ``"unbiased"`` (needs ``B >= 2``).
        threshold: rows with at most this number of entries other than 0 count as rows of zeros.
        gather: whether the means are over the rows of all ranks, as many on each.

    Returns:
        0-d, fp32 (fp64 for fp64 activations), one statistic of the batch; 0 for ``B = 0``.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, or too few rows.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import idf_flops_loss
        >>> activations = torch.tensor([[2.0, 1.0]])
        >>> idf_flops_loss(activations, torch.tensor([1.0, 100.0]))  # 2 + 100 + 0.3 (4 + 100)
        tensor(133.2000)

    References:
        Minimizing FLOPs to Learn Efficient Sparse Representations. The weighting: notes of a Korean
        neural sparse retriever (its versions V25 and V26).
    """
    mean, squared_mean = mean_and_square(activations, estimator, gather, threshold)
    if beta == 0:  # 0 times the square of a large mean, which is infinite, is NaN
        return (token_penalty * mean.abs()).sum()
    return (token_penalty * (mean.abs() + beta * squared_mean)).sum()


class IdfFlopsLoss(LossModule):
    """Module of ``idf_flops_loss``; ``token_penalty`` is a buffer.

    Examples:
        >>> import torch
        >>> from sparse_losses import IdfFlopsLoss
        >>> loss = IdfFlopsLoss(torch.tensor([1.0, 100.0]), beta=0.0)
        >>> loss(torch.tensor([[2.0, 1.0]]))
        tensor(102.)
    """

    token_penalty: Tensor

    def __init__(
        self,
        token_penalty: Tensor,
        *,
        beta: float = 0.3,
        estimator: Estimator = "biased",
        threshold: float | None = None,
        gather: bool = False,
    ) -> None:
        super().__init__(idf_flops_loss, locals())
        self.register_constant("token_penalty", token_penalty)

    def forward(self, activations: Tensor, *, gather: bool | None = None) -> Tensor:
        """Return the loss; the tensors are those of the function."""
        options = self.hyperparameters(gather=gather)
        return idf_flops_loss(activations, self.token_penalty, **options)
