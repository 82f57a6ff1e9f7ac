"""One pair of pairwise contrastive against its distance, with the same and different labels."""

import numpy as np
import torch

from sparse_losses.functional import pairwise_contrastive_loss
from tools.figures._shared import slopes

X = "Euclidean distance of the pair"
PANELS = {"value": "loss", "gradient": "gradient by the distance"}
LINES = {"m = 1": {"margin": 1.0}}


def curves(*, margin: float) -> dict:
    """Return the curves; distance 0 is left out, as the gradient there is 0 by convention."""
    origin = torch.zeros(150, 1, dtype=torch.float64)

    def loss(distance: torch.Tensor, same: bool) -> torch.Tensor:
        labels = torch.full((150,), same)
        options = {"margin": margin, "reduction": "none"}
        return pairwise_contrastive_loss(origin, distance[:, None], labels, **options)

    losses = {"same": lambda x: loss(x, True), "different": lambda x: loss(x, False)}
    return slopes((np.arange(150) + 0.5) / 50, losses)
