"""One pair of pairwise contrastive against its distance, with the same and different labels."""

import numpy as np
import torch

from sparse_losses.functional import pairwise_contrastive_loss

X = "Euclidean distance of the pair"
PANELS = {"value": "loss", "gradient": "gradient by the distance"}
LINES = {"m = 1": {"margin": 1.0}}


def curves(*, margin: float) -> dict:
    """Return the curves; distance 0 is left out, as the gradient there is 0 by convention."""
    x = (np.arange(150) + 0.5) / 50
    result: dict = {"x": x, "value": {}, "gradient": {}}
    for series, same in (("same", True), ("different", False)):
        distance = torch.tensor(x, requires_grad=True)
        loss = pairwise_contrastive_loss(
            torch.zeros(150, 1, dtype=torch.float64),
            distance[:, None],
            torch.full((150,), same),
            margin=margin,
            reduction="none",
        )
        (gradient,) = torch.autograd.grad(loss.sum(), distance)
        result["value"][series] = loss.detach().numpy()
        result["gradient"][series] = gradient.numpy()
    return result
