"""Draw docs/assets/front.svg and target.svg, the README's pictures: ``python -m tools.front``.

They are small and come from committed results, so they are committed too, and GitHub shows them.
Their own background suits light and dark pages.
"""

from math import log2
from pathlib import Path

from benchmarks.run.table import read

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
RESULTS = ROOT / "benchmarks" / "results" / "aims-run-1.csv"
RUNS = ROOT / "docs" / "results" / "collection.csv"
CASE = "B=16 S=256 V=30522 H=768 0.5%"
NAMES = {
    "eager": "plain PyTorch",
    "sentence-transformers": "sentence-transformers",
    "ours": "sparse-losses",
}
GIVEN = [  # system, what its user gives it, the rows of the results, what is asked for
    ("sentence-transformers", "weight 0.1", "sentence-transformers, weight 0.1", 0),
    ("", "with a teacher", "sentence-transformers, weight 0.1, BM25 as teacher", 0),
    ("sparse-losses", "target 64", "RECOMMENDED, target 64", 64),
    ("", "target 32", "RECOMMENDED, target 32", 32),
    ("", "pruned to 32", "RECOMMENDED, target 64, pruned to 32", 32),
]
STYLE = """<style>
text { font: 17px system-ui, sans-serif; fill: #1f2933 }
.title { font-weight: 600 } .ground { fill: #fff } .bar { fill: #8795a1 } .ours { fill: #b3541e }
.open { fill: #fff; stroke-width: 2 } .bar.open { stroke: #8795a1 } .ours.open { stroke: #b3541e }
.name { paint-order: stroke; stroke: #fff; stroke-width: 6px }
line { stroke: #cbd2d9 } .target { stroke: #1f2933; stroke-width: 2 }
</style>"""


def picture(height: int, label: str, lines: list[str]) -> str:
    """Return an SVG of the pictures' common width with its ground and style."""
    box = f'x="-6" y="-8" width="606" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-6 -8 606 {height}" role="img" '
            f'aria-label="{label}">',
            STYLE,
            f'<rect class="ground" {box} rx="4"/>',
            *lines,
            "</svg>\n",
        ]
    )


def panel(left: int, title: str, values: list[float], texts: list[str]) -> list[str]:
    """Return the bars of one quantity."""
    lines = [f'<text class="title" x="{left}" y="16">{title}</text>']
    for number, (value, text) in enumerate(zip(values, texts, strict=True)):
        y, width = 30 + 34 * number, 96 * value / max(values)
        style = "ours" if number == len(values) - 1 else "bar"
        lines.append(
            f'<rect class="{style}" x="{left}" y="{y}" width="{width:.1f}" height="22" rx="2"/>'
        )
        lines.append(f'<text x="{left + width + 6:.1f}" y="{y + 18}">{text}</text>')
    return lines


def front() -> str:
    """Return the picture of the head: memory on the left, time on the right."""
    head = {
        x["variant"]: x for x in read(RESULTS) if (x["loss"], x["case"]) == ("splade_head", CASE)
    }
    memory = [float(head[name]["peak_bytes"]) / 2**20 for name in NAMES]
    seconds = [float(head[name]["seconds"]) for name in NAMES]
    labels = [
        f'<text x="198" y="{48 + 34 * n}" text-anchor="end">{name}</text>'
        for n, name in enumerate(NAMES.values())
    ]
    lines = [
        *labels,
        *panel(208, "Peak memory", memory, [f"{value:,.0f} MiB" for value in memory]),
        *panel(428, "Time", seconds, [f"{value:.2f} s" for value in seconds]),
    ]
    return picture(148, "Peak memory and time of the SPLADE head", lines)


def reached(name: str) -> dict[str, list[float]]:
    """Return each collection's active dimensions of a document, one number per run."""
    runs: dict[str, list[float]] = {}
    for row in read(RUNS):
        if row["row"] == name:
            runs.setdefault(row["collection"], []).append(float(row["active_document"]))
    return runs


def target() -> str:
    """Return the picture of sparsity: a point per run, a row per weight or target."""

    def x(active: float) -> float:
        return 148 + 214 * log2(active / 24)  # 24 dimensions on the left, 96 on the right

    def point(left: float, y: float, style: str) -> str:
        return f'<circle class="{style}" cx="{left:.1f}" cy="{y}" r="5.5"/>'

    lines = [
        f'<line x1="{x(tick):.1f}" y1="34" x2="{x(tick):.1f}" y2="288"/>'
        f'<text x="{x(tick):.1f}" y="310" text-anchor="middle">{tick}</text>'
        for tick in (24, 32, 48, 64, 96)
    ]
    lines.append('<text class="title" x="4" y="16">Active dimensions of a document</text>')
    for left, collection, style in ((430, "MED", "bar"), (510, "TIME", "bar open")):
        lines += [point(left, 10, style), f'<text x="{left + 12}" y="16">{collection}</text>']
    y = 10
    for system, given, name, asked in GIVEN:
        if system:
            y += 42
            lines.append(f'<text class="name" x="4" y="{y}">{system}</text>')
        y += 30 if system else 36
        lines.append(f'<text x="138" y="{y + 6}" text-anchor="end">{given}</text>')
        if asked:
            ends = f'x1="{x(asked):.1f}" y1="{y - 16}" x2="{x(asked):.1f}"'
            lines.append(f'<line class="target" {ends} y2="{y + 16}"/>')
        for collection, values in reached(name).items():
            below, fill = (7, " open") if collection == "time" else (-7, "")
            style = ("ours" if asked else "bar") + fill
            lines += [point(x(value), y + below, style) for value in sorted(values)]
    return picture(330, "Active dimensions by a fixed FLOPS weight, by a target, and pruned", lines)


PICTURES = {"front": front, "target": target}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ASSETS / f"{name}.svg").write_text(draw(), encoding="utf-8")
