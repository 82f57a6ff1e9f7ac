"""IDF-FLOPS of a frequent and a rare token by mean activation, compared with FLOPS."""

import numpy as np
import torch
from torch.func import vmap

from sparse_losses import idf_penalty
from sparse_losses.functional import flops_loss, idf_flops_loss
from tools.figures._shared import slopes

X = "mean activation of the token"
PANELS = {"value": "cost of the token", "gradient": "pull, times B"}
LINES = {"": {"alpha": 4.0, "beta": 0.3}}
TOKENS = {"most frequent token": 0.0, "in the middle": 0.5, "rarest": 1.0}  # idf, from 0 to 1


def curves(*, alpha: float, beta: float) -> dict:
    """Return the curves of three tokens with penalties of `idf_penalty`, in one text (B = 1)."""
    idf = torch.tensor(list(TOKENS.values()), dtype=torch.float64)
    losses = {
        name: lambda x, w=w: vmap(lambda a: idf_flops_loss(a[None, None], w[None], beta=beta))(x)
        for name, w in zip(TOKENS, idf_penalty(idf, alpha=alpha), strict=True)
    }
    losses["FLOPS"] = vmap(lambda a: flops_loss(a[None, None]))
    return slopes(np.linspace(0.01, 2.01, 201), losses)
