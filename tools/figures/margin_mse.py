"""One pair of MarginMSE against the student's margin, with InfoNCE of the same pair."""

import torch

from sparse_losses.functional import margin_mse_loss, n_pair_loss
from tools.figures._shared import slopes

X = "the student's margin"
PANELS = {"value": "loss", "gradient": "gradient by that margin"}
LINES = {"": {"margin": 3.0}}


def curves(*, margin: float) -> dict:
    """Return the curves; both negatives score 0; InfoNCE has temperature 1 and dot products."""
    zero = torch.zeros(161, dtype=torch.float64)
    one = torch.ones(161, 1, dtype=torch.float64)
    losses = {
        "MarginMSE": lambda x: margin_mse_loss(x, zero, zero + margin, zero, reduction="none"),
        "InfoNCE": lambda x: n_pair_loss(one, x[:, None], zero[:, None, None], reduction="none"),
    }
    return slopes([-5 + i / 10 for i in range(161)], losses)
