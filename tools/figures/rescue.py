"""Runs with bad weights, without and with a controller: `docs/results/rescue-steps.csv`."""

from matplotlib.figure import Figure

from tools.figures._shared import results

PANELS = {"collapse": "FLOPS weights a hundred times", "never sparse": "a thousandth of them"}
TARGET = 128  # --target-active of the runs with a controller


def draw(figure: Figure) -> None:
    """Draw active dimensions by step, a line per seed; a mark where the cause was first named."""
    steps, runs = results("rescue-steps.csv"), results("rescue.csv")
    both = figure.subplots(1, 2, sharey=True)
    for axes, (name, title) in zip(both, PANELS.items(), strict=True):
        for number, (suffix, label) in enumerate({"": "as it is", ", steered": "steered"}.items()):
            own = [run for run in runs if run["variant"] == name + suffix]
            for seed, run in enumerate(own):
                points = [
                    (int(row["step"]), max(float(row["active"]), 0.5))  # 0 has no logarithm
                    for row in steps
                    if (row["variant"], row["seed"]) == (run["variant"], run["seed"])
                ]
                axes.plot(
                    *zip(*points, strict=True),
                    color=f"C{number}",
                    linestyle=("-", "--")[number],
                    linewidth=1.5,
                    label=None if seed else label,
                )
                if run["named_at"]:
                    step = int(run["named_at"])
                    axes.plot(step, dict(points)[step], "o", color=f"C{number}")
        text = axes.spines["left"].get_edgecolor()
        axes.axhline(TARGET, color=text, linewidth=1, linestyle=":", label=f"asked for: {TARGET}")
        axes.set(title=title, xlabel="step", yscale="log")
    both[0].set_ylabel("active dimensions of a document")
    both[1].legend(loc="lower right")
