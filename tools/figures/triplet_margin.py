"""One row of triplet margin against the cosine of its positive, with evenly spread negatives."""

import numpy as np
import torch

from sparse_losses.functional import triplet_margin_loss
from tools.figures._shared import slopes

X = "cosine of anchor and positive"
PANELS = {"value": "loss", "gradient": "gradient by that cosine"}
LINES = {
    "m = 0.3": {"margin": 0.3, "hardest": 0.2, "spread": 0.0},
    "m = 0.6": {"margin": 0.6, "hardest": 0.2, "spread": 0.0},
    "m = 0.3, six negatives": {"margin": 0.3, "hardest": 0.2, "spread": 1.0},
}


def curves(*, margin: float, hardest: float, spread: float) -> dict:
    """Return the curves; six negatives from `hardest` down by `spread`, none on the grid."""
    anchor = torch.ones(200, 1, dtype=torch.float64)
    negatives = torch.tensor(hardest - spread * np.arange(6) / 5)[None, :, None].expand(200, 6, 1)
    options = {"margin": margin, "similarity": "dot", "reduction": "none"}

    def loss(cosine: torch.Tensor) -> torch.Tensor:
        return triplet_margin_loss(anchor, cosine[:, None], negatives, **options)

    return slopes(((np.arange(200) + 0.5) - 100) / 100, {"": loss})
