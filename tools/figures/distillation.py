"""One row of distillation: the parts of the loss against the lead of the best candidate."""

import torch

from sparse_losses.functional import distillation_loss
from tools.figures._shared import slopes

X = "student's lead / teacher's lead"
PANELS = {"value": "each part of the loss", "gradient": "gradient by the best candidate's score"}
LINES = {
    name: {"lead": lead, "temperature": 3.0, "candidates": 8}
    for name, lead in (("cosines, lead 0.5", 0.5), ("over 0.05, lead 10", 10.0))
}


def curves(*, lead: float, temperature: float, candidates: int) -> dict:
    """Return the curves; the teacher's best leads by `lead`, the others are evenly spaced below.

    The student has the teacher's scores except for the best one.
    """
    steps = torch.arange(candidates - 1, dtype=torch.float64) / (candidates - 1)
    teacher = torch.cat([torch.ones(1, dtype=torch.float64), -steps])[None] * lead

    def loss(best: torch.Tensor, alpha_kl: float) -> torch.Tensor:
        options = {"temperature": temperature, "alpha_kl": alpha_kl, "alpha_mse": 1 - alpha_kl}
        students = [torch.cat([score[None, None], teacher[:, 1:]], dim=1) for score in best]
        return torch.stack([distillation_loss(row, teacher, **options) for row in students])

    x = [-1 + 4 * i / 121 for i in range(122)]  # the grid avoids 0 and 1
    losses = {"KL": lambda best: loss(best, 1.0), "z-scores": lambda best: loss(best, 0.0)}
    return slopes([share * lead for share in x], losses) | {"x": x}
