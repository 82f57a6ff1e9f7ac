"""V26's phases and a warm-up, as a schedule sets them at every step of the objective."""

import torch
from matplotlib.figure import Figure

from sparse_losses import V26, TrainingSchedule, Warmup

STEPS_PER_EPOCH, EPOCHS, WARMUP = 100, 27, 600


def history(shape: str) -> tuple[list[float], list[dict[str, float]]]:
    """Return temperature and weights at every step; V26's phases are the first 25 epochs."""
    objective = V26.objective(idf=torch.rand(10))
    schedule = TrainingSchedule(
        objective,
        V26.curriculum,
        warmups={"query_flops": Warmup(WARMUP, shape)},
        steps_per_epoch=STEPS_PER_EPOCH,
    )
    temperatures, weights = [], []
    for _ in range(STEPS_PER_EPOCH * EPOCHS):
        temperatures.append(float(objective.info_nce.temperature))
        weights.append({name: float(weight) for name, weight in objective.weights.items()})
        schedule.step()
    return temperatures, weights


def draw(figure: Figure) -> None:
    """Draw temperature, weights and warm-up side by side."""
    temperatures, weights = history("quadratic")
    _, linear = history("linear")
    epochs = [1 + step / STEPS_PER_EPOCH for step in range(len(temperatures))]
    left, middle, right = figure.subplots(1, 3)
    left.plot(epochs, temperatures)
    left.set(title="temperature of InfoNCE", xlabel="epoch", ylim=(0, 0.09))
    for name in ("info_nce", "distillation"):
        middle.plot(epochs, [each[name] for each in weights], label=name)
    middle.set(title="weights", xlabel="epoch", ylim=(0, 3.4))
    middle.legend(loc="lower left")
    for axes in (left, middle):
        axes.set_xticks([1, 9, 18, 26])
    steps = range(WARMUP + 150)
    right.plot(steps, [weights[step]["query_flops"] for step in steps], label="quadratic")
    right.plot(steps, [linear[step]["query_flops"] for step in steps], label="linear")
    right.set(title="query_flops, warmed up", xlabel="optimiser step", ylim=(0, 0.0115))
    right.set_xticks([0, 300, 600])
    right.legend(loc="lower right")
