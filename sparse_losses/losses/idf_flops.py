"""IDF-weighted FLOPS: tokens that say little pay more, special tokens pay most."""

from torch import Tensor, nn

from sparse_losses._core.checks import check_flag, check_number, check_shapes, describe
from sparse_losses._core.column_mean import Estimator, check_estimator, mean_and_square
from sparse_losses._core.precision import compute_dtype, full_precision
from sparse_losses.distributed import agree_across_ranks, num_ranks

__all__ = ["IdfFlopsLoss", "idf_flops_loss"]


@full_precision
def idf_flops_loss(
    activations: Tensor,
    token_penalty: Tensor,
    *,
    beta: float = 0.3,
    estimator: Estimator = "biased",
    gather: bool = False,
) -> Tensor:
    r"""Weighted L1 and FLOPS of the mean activations.

    $$\ell = \sum_{j=1}^{V} w_j |m_j| + \beta \sum_{j=1}^{V} w_j m_j^2
    \qquad m_j = \frac{1}{B} \sum_{i=1}^{B} x_{ij}$$

    $x_{ij}$ is the activation of token $j$ in row $i$, $w$ the ``token_penalty`` (see
    ``idf_penalty``). The first sum goes on pressing where the second
    fades, near zero. ``estimator="unbiased"`` replaces $m_j^2$ as in
    ``flops_loss``; the first sum needs no correction.

    Args:
        activations: ``[B, V]`` floating.
        token_penalty: ``[V]``, ``w``; cast to the dtype of the computation.
        beta: weight of the squared part, >= 0.
        estimator: ``"biased"`` or ``"unbiased"`` (needs ``B >= 2``).

        gather: whether the means are over the rows of all ranks, whose number is the same on each
            (see ``sparse_losses.distributed``); sums of ``[V]`` are sent, no rows.

    Returns:
        0-d, fp32 (fp64 for fp64 activations): one statistic of the whole batch, hence no
        ``reduction``. 0 for ``B = 0``.

    Raises:
        ValueError: for wrong shapes, devices or hyperparameters, or ``"unbiased"`` with fewer than
            two rows.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import idf_flops_loss
        >>> activations = torch.tensor([[2.0, 1.0]])
        >>> idf_flops_loss(activations, torch.tensor([1.0, 100.0]))  # 2 + 100 + 0.3 (4 + 100)
        tensor(133.2000)

    References:
        Minimizing FLOPs to Learn Efficient Sparse Representations. The weighting comes from the
        notes of a Korean neural sparse retriever (its versions V25 and V26).
    """
    check_shapes(activations=(activations, "B V"), token_penalty=(token_penalty, "V"))
    _check(beta)
    gather = agree_across_ranks(
        "idf_flops_loss", gather, activations, B=len(activations), V=activations.shape[1]
    )
    check_estimator(estimator, len(activations) * (num_ranks() if gather else 1))
    x = activations.to(compute_dtype(activations=activations))
    w = token_penalty.to(x.dtype)
    mean, squared_mean = mean_and_square(x, estimator, gather)
    return (w * (mean.abs() + beta * squared_mean)).sum()


def _check(beta: float) -> None:
    check_number("beta", beta, minimum=0.0)


class IdfFlopsLoss(nn.Module):
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
        gather: bool = False,
    ) -> None:
        super().__init__()
        check_shapes(token_penalty=(token_penalty, "V"))
        _check(beta)
        check_estimator(estimator)
        check_flag(gather=gather)
        self.register_buffer("token_penalty", token_penalty.detach())
        self.beta = beta
        self.estimator: Estimator = estimator
        self.gather = gather

    def forward(self, activations: Tensor) -> Tensor:
        """The loss; tensors as in the function."""
        return idf_flops_loss(
            activations,
            self.token_penalty,
            beta=self.beta,
            estimator=self.estimator,
            gather=self.gather,
        )

    def extra_repr(self) -> str:
        """The hyperparameters."""
        return describe(self, "beta", "estimator", "gather")
