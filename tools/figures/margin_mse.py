"""One pair of MarginMSE against the student's margin, with InfoNCE of the same pair."""

import torch

from sparse_losses.functional import margin_mse_loss, n_pair_loss

X = "the student's margin"
PANELS = {"value": "loss", "gradient": "gradient by that margin"}
LINES = {"": {"margin": 3.0}}


def curves(*, margin: float) -> dict:
    """Return the curves; both negatives score 0; InfoNCE has temperature 1 and dot products."""
    x = [-5 + i / 10 for i in range(161)]
    student = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros_like(student)
    one = torch.ones(len(x), 1, dtype=torch.float64)
    losses = {
        "MarginMSE": margin_mse_loss(student, zero, zero + margin, zero, reduction="none"),
        "InfoNCE": n_pair_loss(one, student[:, None], zero[:, None, None], reduction="none"),
    }
    result = {"x": x, "value": {}, "gradient": {}}
    for series, loss in losses.items():
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        result["value"][series] = loss.tolist()
        result["gradient"][series] = gradient.tolist()
    return result
