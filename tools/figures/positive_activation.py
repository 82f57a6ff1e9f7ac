"""One token of a positive against its activation in the anchor: linear and saturating."""

import torch

from sparse_losses.functional import positive_activation_loss
from tools.figures._shared import slopes

X = "activation of one token of the positive"
PANELS = {"value": "loss of the row", "gradient": "gradient by that activation"}
LINES = {f"weight {w}": {"weight": w, "tokens": 10, "others": 1.0} for w in (1.0, 0.1)}


def curves(*, weight: float, tokens: int, others: float) -> dict:
    """Return the curves; the other `tokens - 1` tokens have weight 1 and activation `others`."""
    rest = torch.full((121, tokens - 1), others, dtype=torch.float64)
    ids = torch.arange(tokens).expand(121, -1)
    weights = torch.tensor([weight] + [1.0] * (tokens - 1), dtype=torch.float64)

    def loss(x: torch.Tensor, saturating: bool = False) -> torch.Tensor:
        texts = (torch.cat([x[:, None], rest], dim=1), ids, torch.ones_like(ids))
        options = {"saturating": saturating, "reduction": "none"}
        return positive_activation_loss(*texts, weights, **options)

    losses = {"plain": loss, "saturating": lambda x: loss(x, saturating=True)}
    return slopes([i / 20 for i in range(121)], losses)
