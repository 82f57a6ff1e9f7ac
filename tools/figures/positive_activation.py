"""One token of a positive against its activation in the anchor: linear and saturating."""

import torch

from sparse_losses.functional import positive_activation_loss

X = "activation of one token of the positive"
PANELS = {"value": "loss of the row", "gradient": "gradient by that activation"}
LINES = {f"weight {w}": {"weight": w, "tokens": 10, "others": 1.0} for w in (1.0, 0.1)}


def curves(*, weight: float, tokens: int, others: float) -> dict:
    """Return the curves; the other `tokens - 1` tokens have weight 1 and activation `others`."""
    x = [i / 20 for i in range(121)]
    activations = torch.full((len(x), tokens), others, dtype=torch.float64)
    activations[:, 0] = torch.tensor(x, dtype=torch.float64)
    activations.requires_grad_()
    ids = torch.arange(tokens).expand(len(x), -1)
    token_weight = torch.ones(tokens, dtype=torch.float64)
    token_weight[0] = weight
    result = {"x": x, "value": {}, "gradient": {}}
    for series, saturating in (("plain", False), ("saturating", True)):
        loss = positive_activation_loss(
            activations,
            ids,
            torch.ones_like(ids),
            token_weight,
            saturating=saturating,
            reduction="none",
        )
        (gradient,) = torch.autograd.grad(loss.sum(), activations)
        result["value"][series] = loss.tolist()
        result["gradient"][series] = gradient[:, 0].tolist()
    return result
