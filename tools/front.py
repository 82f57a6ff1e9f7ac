"""Draw docs/assets/front.svg, the README's picture: ``python -m tools.front``.

It is small and comes from committed results, so it is committed too, and GitHub shows it. Its
colours follow the reader's light or dark setting.
"""

from benchmarks.run.table import RESULTS as BENCHMARKS
from benchmarks.run.table import Row
from tools.tables import DOCS, HEAD, MIB, PEER, figure, one, seconds

PICTURE = DOCS / "assets" / "front.svg"
GROUPS = {  # title: file, what its rows have in common, variants with their names
    "The SPLADE head, 16 texts of 256 tokens, two CPU cores": (
        "aims-run-1.csv",
        HEAD,
        {"eager": "plain PyTorch", PEER: PEER, "ours": "sparse-losses"},
    ),
    "A training step in bf16, 32 pairs of 256 tokens, one H200": (
        "cuda-training.csv",
        {"pairs": "32"},
        {"eager": "plain PyTorch", "ours": "sparse-losses"},
    ),
}
STYLE = """<style>
text { font: 17px system-ui, sans-serif; fill: #1f2933 }
.title { font-weight: 600 } .ground { fill: #fff } .bar { fill: #8795a1 } .ours { fill: #b3541e }
@media (prefers-color-scheme: dark) {
text { fill: #e3e6ec } .ground { fill: #1e2129 } .bar { fill: #6b7785 } .ours { fill: #f0a070 }
}
</style>"""


def bars(left: int, top: int, values: list[float], texts: list[str]) -> list[str]:
    """Return the bars of one quantity; the last one is ours."""
    lines = []
    for number, (value, text) in enumerate(zip(values, texts, strict=True)):
        y, width = top + 30 * number, 96 * value / max(values)
        style = "ours" if number == len(values) - 1 else "bar"
        lines.append(
            f'<rect class="{style}" x="{left}" y="{y}" width="{width:.1f}" height="20" rx="2"/>'
            f'<text x="{left + width + 6:.1f}" y="{y + 16}">{text}</text>'
        )
    return lines


def front() -> str:
    """Return the picture: memory on the left, time on the right, a group for each device."""
    lines = [
        '<text class="title" x="208" y="14">Peak memory</text>',
        '<text class="title" x="428" y="14">Time</text>',
    ]
    y = 44
    for title, (file, common, names) in GROUPS.items():
        rows: list[Row] = [one(BENCHMARKS / file, **common, variant=name) for name in names]
        memory = [float(row["peak_bytes"]) / MIB for row in rows]
        times = [float(row["seconds"]) for row in rows]
        shown = [seconds(x) if x < 0.5 else f"{figure(x)} s" for x in times]
        lines.append(f'<text x="4" y="{y}">{title}</text>')
        for place, name in enumerate(names.values()):
            lines.append(f'<text x="198" y="{y + 28 + 30 * place}" text-anchor="end">{name}</text>')
        lines += bars(208, y + 12, memory, [f"{x:,.0f} MiB" for x in memory])
        lines += bars(428, y + 12, times, shown)
        y += 44 + 30 * len(names)
    height = y - 20
    head = f'viewBox="-6 -8 606 {height}" role="img" aria-label="Memory and time, with and without"'
    ground = f'<rect class="ground" x="-6" y="-8" width="606" height="{height}" rx="4"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {head}>'
    return "\n".join([svg, STYLE, ground, *lines, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(front(), encoding="utf-8")
