"""Draw docs/assets/front.svg, the picture of the README: ``python -m tools.front``.

The picture is small and comes from committed results, so it is committed too, and GitHub shows it.
Its own background suits light and dark pages.
"""

from pathlib import Path

from benchmarks.run.table import read

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
RESULTS = ROOT / "benchmarks" / "results" / "aims-run-1.csv"
CASE = "B=16 S=256 V=30522 H=768 0.5%"
NAMES = {
    "eager": "plain PyTorch",
    "sentence-transformers": "sentence-transformers",
    "ours": "sparse-losses",
}
STYLE = """<style>
text { font: 15px system-ui, sans-serif; fill: #1f2933 }
.title { font-weight: 600 } .ground { fill: #fff } .bar { fill: #8795a1 } .ours { fill: #b3541e }
</style>"""


def panel(left: int, title: str, values: list[float], texts: list[str]) -> list[str]:
    """Return the bars of one quantity."""
    lines = [f'<text class="title" x="{left}" y="16">{title}</text>']
    for number, (value, text) in enumerate(zip(values, texts, strict=True)):
        y, width = 28 + 30 * number, 120 * value / max(values)
        style = "ours" if number == len(values) - 1 else "bar"
        lines.append(
            f'<rect class="{style}" x="{left}" y="{y}" width="{width:.1f}" height="20" rx="2"/>'
        )
        lines.append(f'<text x="{left + width + 6:.1f}" y="{y + 15}">{text}</text>')
    return lines


def draw() -> str:
    """Return the picture: memory on the left, time on the right."""
    head = {
        x["variant"]: x for x in read(RESULTS) if (x["loss"], x["case"]) == ("splade_head", CASE)
    }
    memory = [float(head[name]["peak_bytes"]) / 2**20 for name in NAMES]
    seconds = [float(head[name]["seconds"]) for name in NAMES]
    labels = [
        f'<text x="174" y="{43 + 30 * n}" text-anchor="end">{name}</text>'
        for n, name in enumerate(NAMES.values())
    ]
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="-6 -8 606 136" role="img" '
        'aria-label="Peak memory and time of the SPLADE head">',
        STYLE,
        '<rect class="ground" x="-6" y="-8" width="606" height="136" rx="4"/>',
        *labels,
        *panel(184, "Peak memory", memory, [f"{value:,.0f} MiB" for value in memory]),
        *panel(408, "Time", seconds, [f"{value:.2f} s" for value in seconds]),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ASSETS / "front.svg").write_text(draw(), encoding="utf-8")
