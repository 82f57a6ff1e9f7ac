"""The package and its peers: benchmarks/results/cpu-quick.csv, the largest case of each kind."""

from matplotlib.figure import Figure

from benchmarks.run.table import largest_cases
from tools.figures._shared import over_ours, results

PANELS = {"seconds": "time over ours", "peak_bytes": "peak extra memory over ours"}
PEERS = {
    "eager": ("plain formula", "o"),
    "torch.compile": ("the same, compiled", "x"),
    "ours, compiled": ("ours, compiled", "s"),
    "sentence-transformers": ("sentence-transformers", "^"),
    "pytorch-metric-learning": ("pytorch-metric-learning", "D"),
    "info-nce-pytorch": ("info-nce-pytorch", "+"),
}


def draw(figure: Figure, *, stacked: bool = False) -> None:
    """Draw time and memory side by side, or ``stacked`` for a narrow screen."""
    figure.set_size_inches((4.6, 12) if stacked else (8.4, 6.4))
    rows = [
        row
        for row in results("cpu-quick.csv")
        if row["pass"] == "forward+backward" and row["status"].startswith("ok")
    ]
    over_ours(figure, rows, PANELS, PEERS, largest_cases(rows), stacked=stacked)
