"""Calculated times of the plain formula and of a peer over ours, on two GPUs."""

from matplotlib.figure import Figure

from tools.figures._shared import over_ours, results

PANELS = {
    "h100_seconds": "H100: calculated time over ours",
    "a10g_seconds": "A10G: calculated time over ours",
}
SERIES = {"eager": ("plain formula", "o"), "sentence-transformers": ("sentence-transformers", "^")}


def draw(figure: Figure) -> None:
    """Draw one line per case."""
    rows = results("calculated.csv")
    cases = list(dict.fromkeys((row["loss"], row["case"]) for row in rows))
    figure.set_size_inches(8.4, 1 + 0.15 * len(cases))
    over_ours(figure, rows, PANELS, SERIES, cases, markersize=4.5, joined=" ")
