"""Minimum activation of a text with a few equally active tokens; all others are 0."""

import numpy as np
import torch

from sparse_losses.functional import min_activation_loss

X = "activation of each of the text's tokens"
PANELS = {"value": "loss of the text", "gradient": "gradient by that activation"}
LINES = {"": {"tokens": 3, "top_k": 5, "threshold": 0.5}}


def curves(*, tokens: int, top_k: int, threshold: float) -> dict:
    """Return the curves, one row per activation; the grid avoids the kinks."""
    height = torch.tensor(0.00317 + np.arange(200) * 0.01).requires_grad_()
    silent = torch.zeros(200, top_k, dtype=torch.float64)
    rows = torch.cat([height[:, None].expand(-1, tokens), silent], dim=1)
    value, gradient = {}, {}
    for name, counts in (
        ("without token counts", None),
        ("with token counts", torch.full((200,), tokens)),
    ):
        loss = min_activation_loss(rows, counts, top_k=top_k, threshold=threshold, reduction="none")
        (slope,) = torch.autograd.grad(loss.sum(), height, retain_graph=True)
        value[name], gradient[name] = loss.detach().numpy(), slope.numpy()
    return {"x": height.detach().numpy(), "value": value, "gradient": gradient}
