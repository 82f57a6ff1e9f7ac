"""One row of N-pair against the cosine of its positive, all negatives at cosine 0."""

import numpy as np
import torch

from sparse_losses.functional import n_pair_loss
from tools.figures._shared import slopes

X = "cosine of anchor and positive"
PANELS = {"value": "loss, in nats", "gradient": "gradient by their dot product"}
LINES = {
    f"length {length:g}": {"length": length, "negatives": 31} for length in (1.0, 2.0, 4.0, 8.0)
}


def curves(*, length: float, negatives: int) -> dict:
    """Return the curves; anchor and positive both have `length`."""
    anchor = torch.ones(200, 1, dtype=torch.float64)
    negative = torch.zeros(negatives, 1, dtype=torch.float64)
    cosine = (np.arange(200) + 0.5) / 100 - 1
    curves = slopes(
        length**2 * cosine,
        {"": lambda dot: n_pair_loss(anchor, dot[:, None], negative, reduction="none")},
    )
    return curves | {"x": cosine}
