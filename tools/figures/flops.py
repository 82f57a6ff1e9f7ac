"""The mean of FLOPS over batches of independent texts, by batch size.

A token has activation 1 in a share of the texts. The mean over batches is exact: column k is a
token that is active in k rows, weighted by the binomial probability of k.
"""

import numpy as np
import torch

from sparse_losses.functional import flops_loss

X = "rows of the batch"
LOG_X = True
PANELS = {"value": "average loss", "gradient": "average pull on an active entry, times B"}
LINES = {
    "in 2% of texts": {"share": 0.02, "vocabulary": 30_522},
    "in 0.5%": {"share": 0.005, "vocabulary": 30_522},
}
SIZES = [round(2 ** (i / 2)) for i in range(4, 21)]  # 4 to 1,024


def binomial(rows: int, share: float) -> torch.Tensor:
    """Return the probabilities that 0 to `rows` rows are active."""
    k = torch.arange(rows + 1, dtype=torch.float64)
    n = torch.tensor(float(rows), dtype=torch.float64)
    choices = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return (choices + k * np.log(share) + (n - k) * np.log1p(-share)).exp()


def average(rows: int, share: float, estimator: str, first_is_active: bool) -> tuple[float, float]:
    """Return a token's loss and the first row's gradient, averaged over the rest of the batch."""
    others = rows - first_is_active
    weight = binomial(others, share).sqrt()
    count = torch.arange(others + 1) + first_is_active
    active = torch.arange(rows)[:, None] < count
    x = active.double().requires_grad_()
    loss = flops_loss(x * weight, estimator=estimator)
    (gradient,) = torch.autograd.grad(loss, x)
    return loss.item(), gradient[0].sum().item()


def curves(*, share: float, vocabulary: int) -> dict:
    """Return the curves of both estimators for `vocabulary` such tokens."""
    value, gradient = {}, {}
    for estimator in ("biased", "unbiased"):
        value[estimator] = [vocabulary * average(b, share, estimator, False)[0] for b in SIZES]
        gradient[estimator] = [b * average(b, share, estimator, True)[1] for b in SIZES]
    return {"x": SIZES, "value": value, "gradient": gradient}
