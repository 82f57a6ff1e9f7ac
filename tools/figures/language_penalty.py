"""A token of another language under the language penalty and under FLOPS, by its pooled logit."""

import numpy as np
import torch
from torch.func import grad, vmap

from sparse_losses.functional import flops_loss, language_penalty_loss

X = "pooled logit of the token"
PANELS = {"value": "cost of the token", "gradient": "pull on its logit in one text, times B"}
LINES = {"": {"cost": 0.5, "flops": 0.5, "texts": 20}}
ROWS = 100


def curves(*, cost: float, flops: float, texts: int) -> dict:
    """Return the curves; the token is equally active in `texts` of 100 texts.

    `cost` is the weight times the penalty.
    """
    x = np.linspace(0.025, 5.025, 201)
    penalty = torch.tensor([cost], dtype=torch.float64)

    def column(own, other):
        activation = torch.log1p(torch.stack([own, other]).relu())
        rows = [
            activation[:1],
            activation[1:].expand(texts - 1),
            activation.new_zeros(ROWS - texts),
        ]
        return torch.cat(rows)[:, None]

    losses = {
        "language penalty": lambda *z: language_penalty_loss(column(*z), penalty),
        "FLOPS": lambda *z: flops * flops_loss(column(*z)),
    }
    value, gradient = {}, {}
    for name, loss in losses.items():
        z = torch.tensor(x)
        value[name] = vmap(loss)(z, z).numpy()
        gradient[name] = ROWS * vmap(grad(loss))(z, z).numpy()
    return {"x": x, "value": value, "gradient": gradient}
