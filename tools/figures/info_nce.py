"""One row of InfoNCE against the cosine of its positive, all negatives at cosine 0."""

import numpy as np
import torch

from sparse_losses.functional import info_nce_loss
from tools.figures._shared import slopes

X = "cosine of anchor and positive"
PANELS = {"value": "loss, in nats", "gradient": "gradient by that cosine"}
LINES = {f"t = {t}": {"temperature": t, "negatives": 31} for t in (0.02, 0.07, 0.2, 1.0)}


def curves(*, temperature: float, negatives: int) -> dict:
    """Return the curves; with `similarity="dot"` the gradient is that of the score itself."""
    anchor = torch.ones(201, 1, dtype=torch.float64)
    negative = torch.zeros(negatives, 1, dtype=torch.float64)
    options = {"temperature": temperature, "similarity": "dot", "in_batch": False}

    def loss(cosine: torch.Tensor) -> torch.Tensor:
        return info_nce_loss(anchor, cosine[:, None], negative, **options, reduction="none")

    return slopes(np.linspace(-1, 1, 201), {"": loss})
