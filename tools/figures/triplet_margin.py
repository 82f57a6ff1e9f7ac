"""One row of triplet margin against the cosine of its positive, with evenly spread negatives."""

import numpy as np
import torch

from sparse_losses.functional import triplet_margin_loss

X = "cosine of anchor and positive"
PANELS = {"value": "loss", "gradient": "gradient by that cosine"}
LINES = {
    "m = 0.3": {"margin": 0.3, "hardest": 0.2, "spread": 0.0},
    "m = 0.6": {"margin": 0.6, "hardest": 0.2, "spread": 0.0},
    "m = 0.3, six negatives": {"margin": 0.3, "hardest": 0.2, "spread": 1.0},
}


def curves(*, margin: float, hardest: float, spread: float) -> dict:
    """Return the curves; six negatives from `hardest` down by `spread`, none on the grid."""
    x = ((np.arange(200) + 0.5) - 100) / 100
    cosine = torch.tensor(x, requires_grad=True)
    negatives = hardest - spread * np.arange(6) / 5
    loss = triplet_margin_loss(
        torch.ones(200, 1, dtype=torch.float64),
        cosine[:, None],
        torch.tensor(negatives)[None, :, None].expand(200, 6, 1),
        margin=margin,
        similarity="dot",
        reduction="none",
    )
    (gradient,) = torch.autograd.grad(loss.sum(), cosine)
    return {"x": x, "value": {"": loss.detach().numpy()}, "gradient": {"": gradient.numpy()}}
