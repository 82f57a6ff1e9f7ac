"""Draw the docs' pictures for light and dark pages: ``python -m tools.figures [NAME ...]``."""

import sys
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from tools.figures import curves, results

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
# The colours are those of docs/assets/stylesheets/site.css.
PALETTES = {
    "light": {"text": "#333333", "lines": ["#1f6583", "#b3541e", "#4d7c32", "#7a4a9e"]},
    "dark": {"text": "#d5d8e0", "lines": ["#7cc4e0", "#f0a070", "#a5d67f", "#c9a3e8"]},
}
DASHES = ["-", "--", ":", "-."]  # distinguish lines without colour


def style(palette: str) -> dict[str, object]:
    """Return settings of a transparent picture with text as paths, the same on every machine."""
    text, lines = PALETTES[palette]["text"], PALETTES[palette]["lines"]
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), text)
    return colours | {
        "axes.edgecolor": text,
        "axes.grid": True,
        "axes.prop_cycle": plt.cycler(color=lines) + plt.cycler(linestyle=DASHES),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "grid.alpha": 0.2,
        "grid.color": text,
        "legend.frameon": False,
        "lines.linewidth": 2,
        "svg.fonttype": "path",
        "svg.hashsalt": "sparse-losses",
    }


def draw_panels(figure: Figure, drawn: curves.Figure) -> None:
    """Draw every line in each of the panels."""
    lines = {label: drawn.curves(**settings) for label, settings in drawn.lines.items()}
    panels = figure.subplots(1, len(drawn.panels), squeeze=False)[0]
    for axes, (key, title) in zip(panels, drawn.panels.items(), strict=True):
        dashes = cycle(DASHES)
        for label, result in lines.items():
            for series, values in result[key].items():
                name = ", ".join(filter(None, (series, label)))
                axes.plot(result["x"], values, label=name, linestyle=next(dashes))
        axes.set(title=title, xlabel=drawn.x)
        if drawn.log_x:
            axes.set_xscale("log")
        axes.legend()


def draw(name: str) -> None:
    """Write `<name>-<palette>.svg` for every palette."""
    for palette in PALETTES:
        with plt.rc_context(style(palette)):
            figure = plt.figure(figsize=(8.4, 3.3), layout="constrained")
            if name in curves.FIGURES:
                draw_panels(figure, curves.FIGURES[name])
            else:
                results.FIGURES[name](figure)
            figure.savefig(FOLDER / f"{name}-{palette}.svg", metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [*curves.FIGURES, *results.FIGURES]:
        draw(name)
