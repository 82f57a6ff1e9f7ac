"""One row of distillation: the parts of the loss against the lead of the best candidate."""

import torch

from sparse_losses.functional import distillation_loss

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
    x = [-1 + 4 * i / 121 for i in range(122)]  # the grid avoids 0 and 1
    steps = torch.arange(candidates - 1, dtype=torch.float64) / (candidates - 1)
    teacher = torch.cat([torch.ones(1, dtype=torch.float64), -steps])[None] * lead
    result = {"x": x, "value": {}, "gradient": {}}
    for series, alpha_kl in (("KL", 1.0), ("z-scores", 0.0)):
        values, gradients = [], []
        for share in x:
            student = teacher.clone()
            student[0, 0] = share * lead
            student.requires_grad_()
            loss = distillation_loss(
                student,
                teacher,
                temperature=temperature,
                alpha_kl=alpha_kl,
                alpha_mse=1.0 - alpha_kl,
            )
            (gradient,) = torch.autograd.grad(loss, student)
            values.append(loss.item())
            gradients.append(gradient[0, 0].item())
        result["value"][series], result["gradient"][series] = values, gradients
    return result
