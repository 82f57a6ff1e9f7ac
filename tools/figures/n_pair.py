"""One row of N-pair against the cosine of its positive, all negatives at cosine 0."""

import numpy as np
import torch

from sparse_losses.functional import n_pair_loss

X = "cosine of anchor and positive"
PANELS = {"value": "loss, in nats", "gradient": "gradient by their dot product"}
LINES = {
    f"length {length:g}": {"length": length, "negatives": 31} for length in (1.0, 2.0, 4.0, 8.0)
}


def curves(*, length: float, negatives: int) -> dict:
    """Return the curves; anchor and positive both have `length`."""
    x = (np.arange(200) + 0.5) / 100 - 1
    dot = torch.tensor(length**2 * x, requires_grad=True)
    loss = n_pair_loss(
        torch.ones(200, 1, dtype=torch.float64),
        dot[:, None],
        torch.zeros(negatives, 1, dtype=torch.float64),
        reduction="none",
    )
    (gradient,) = torch.autograd.grad(loss.sum(), dot)
    return {
        "x": x,
        "value": {"": loss.detach().numpy()},
        "gradient": {"": gradient.numpy()},
    }
