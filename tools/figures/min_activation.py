"""Minimum activation of a text with a few equally active tokens; all others are 0."""

import numpy as np
import torch

from sparse_losses.functional import min_activation_loss
from tools.figures._shared import slopes

X = "activation of each of the text's tokens"
PANELS = {"value": "loss of the text", "gradient": "gradient by that activation"}
LINES = {"": {"tokens": 3, "top_k": 5, "threshold": 0.5}}


def curves(*, tokens: int, top_k: int, threshold: float) -> dict:
    """Return the curves, one row per activation; the grid avoids the kinks."""
    silent = torch.zeros(200, top_k, dtype=torch.float64)
    options = {"top_k": top_k, "threshold": threshold, "reduction": "none"}

    def loss(height: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
        rows = torch.cat([height[:, None].expand(-1, tokens), silent], dim=1)
        return min_activation_loss(rows, counts, **options)

    counts = torch.full((200,), tokens)
    losses = {
        "without token counts": loss,
        "with token counts": lambda height: loss(height, counts),
    }
    return slopes(0.00317 + np.arange(200) * 0.01, losses)
