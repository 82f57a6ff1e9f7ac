"""One text's self-reconstruction against the score of its own tokens, in both forms."""

import math

import torch

from sparse_losses.functional import self_reconstruction_loss

X = "score of the text's own tokens"
PANELS = {"value": "loss, in nats", "pull": "log10 of the pull on one own token"}
LINES = {f"V = {v:,}": {"vocabulary": v, "tokens": 30, "others": 0.0} for v in (8000, 250_000)}


def curves(*, vocabulary: int, tokens: int, others: float) -> dict:
    """Return the curves; all other tokens score `others`; the pull is the negative gradient."""
    x = [-6 + i / 10 for i in range(121)]
    ids = torch.arange(tokens)[None]
    row = torch.full((1, vocabulary), others, dtype=torch.float64)
    result = {"x": x, "value": {}, "pull": {}}
    for series, balanced in (("plain", False), ("balanced", True)):
        values, pulls = [], []
        for score in x:
            row[:, :tokens] = score
            leaf = row.clone().requires_grad_()
            loss = self_reconstruction_loss(leaf, ids, torch.ones_like(ids), balanced=balanced)
            (gradient,) = torch.autograd.grad(loss, leaf)
            values.append(loss.item())
            pulls.append(math.log10(-gradient[0, 0].item()))
        result["value"][series], result["pull"][series] = values, pulls
    return result
