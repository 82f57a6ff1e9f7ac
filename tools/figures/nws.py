"""One row of NWS against the cosine of a key that shares no label with it."""

import numpy as np
import torch
from torch import Tensor

from sparse_losses.functional import nws_loss

X = "cosine of query and key"
PANELS = {"value": "loss, in nats", "gradient": "gradient by that cosine"}
LINES = {
    f"S = {s}": {"similarity": s, "beta": 1.0, "temperature": 0.07, "prototypes": 31}
    for s in (0.0, 0.5, 0.9, 1.0)
}
POSITIVE = 0.5  # the cosine of the query and its own prototype


def curves(*, similarity: float, beta: float, temperature: float, prototypes: int) -> dict:
    """Return the curves; the labels of query, key and each prototype differ.

    The similarity of the query's and the key's label is `similarity`.
    """
    query, own, side, other = torch.eye(4, dtype=torch.float64)
    query.requires_grad_()
    prototype = other.repeat(prototypes + 1, 1)  # at cosine 0, except that of the query's label
    prototype[0] = POSITIVE * query.detach() + np.sqrt(1 - POSITIVE**2) * own
    query_labels, key_labels = torch.eye(prototypes + 1, dtype=torch.int64)[:2, None]
    alike = torch.eye(prototypes + 1, dtype=torch.float64)
    alike[0, 1] = alike[1, 0] = similarity

    def row(x: float) -> tuple[Tensor, Tensor]:
        # Only the key has a component along `side`, so the gradient along it is the key's alone.
        part = np.sqrt(1 - x**2)
        loss = nws_loss(
            query[None],
            query_labels,
            prototype,
            alike,
            key=(x * query.detach() + part * side)[None],
            key_labels=key_labels,
            beta=beta,
            temperature=temperature,
            eps=0.0,
        )
        (gradient,) = torch.autograd.grad(loss, query)
        return loss.detach(), gradient[2] / part

    x = (np.arange(200) + 0.5) / 100 - 1
    value, gradient = zip(*map(row, x), strict=True)
    return {"x": x, "value": {"": np.array(value)}, "gradient": {"": np.array(gradient)}}
