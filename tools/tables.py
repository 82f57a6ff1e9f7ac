"""Write the tables of README.md and docs/ from the committed results: ``python -m tools.tables``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; ``NAME`` is a key of
``TABLES``. The home page gets the text of README.md between its marks ``home``.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.run.table import RESULTS as BENCHMARKS
from benchmarks.run.table import ROOT, Row, read
from tools import compatibility

DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
MIB = 2**20
PEER = "sentence-transformers"
HEAD = {"loss": "splade_head", "case": "B=16 S=256 V=30522 H=768 0.5%"}
TABLE = re.compile(
    r"(?P<start><!-- table: (?P<name>[^>]+) -->\n).*?(?P<end><!-- end of table -->\n)", re.DOTALL
)
HOME = re.compile(r"(<!-- home -->\n)(.*?)(<!-- end of home -->\n)", re.DOTALL)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """Return a table; the first columns hold words, the others numbers, aligned to the right."""
    lines = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(number: float) -> str:
    """Return three digits of a number, or all digits of a whole one."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def share(number: float, digits: int = 3) -> str:
    """Return a number from 0 to 1 without the 0 before its point."""
    return f"{number:.{digits}f}".removeprefix("0") if number < 1 else f"{number:.{digits}f}"


def seconds(number: float) -> str:
    """Return a time in the unit that suits it."""
    return f"{figure(1e3 * number)} ms" if number < 1 else f"{number:.1f} s"


def one(path: Path, **wanted: str) -> Row:
    """Return the only row that has these values."""
    (row,) = (row for row in read(path) if all(row[key] == x for key, x in wanted.items()))
    return row


def cost(row: Row) -> str:
    """Return memory and time of a row."""
    mib = row.get("peak_mib") or float(row["peak_bytes"]) / MIB
    return f"{figure(float(mib))} MiB, {seconds(float(row['seconds']))}"


# What a user saves, on the first page in three languages.
FRONT = {
    "": (
        ("", "with this package", "without it"),
        "a step of `SparseEncoderTrainer`, 16 texts of 256 tokens, 250,002 columns, 2 CPU cores",
        "a training step on an H200 in bf16, 32 pairs of 256 tokens, 250,002 columns",
        "the SPLADE head on 16 texts of 256 tokens, 30,522 columns, 2 CPU cores",
    ),
    " ko": (
        ("", "이 패키지를 쓰면", "쓰지 않으면"),
        "`SparseEncoderTrainer` 한 스텝, 256토큰 텍스트 16개, 열 250,002개, CPU 코어 2개",
        "H200에서 bf16 학습 한 스텝, 256토큰 32쌍, 열 250,002개",
        "SPLADE 헤드, 256토큰 텍스트 16개, 열 30,522개, CPU 코어 2개",
    ),
    " ja": (
        ("", "本パッケージあり", "なし"),
        "`SparseEncoderTrainer` の 1 ステップ、256 トークン 16 件、250,002 列、CPU 2 コア",
        "H200、bf16 での学習 1 ステップ、256 トークン 32 組、250,002 列",
        "SPLADE ヘッド、256 トークン 16 件、30,522 列、CPU 2 コア",
    ),
}


def front(language: str) -> str:
    """Memory and time with this package and without it."""
    head, *labels = FRONT[language]
    step = functools.partial(
        one, BENCHMARKS / "sentence-transformers-step.csv", vocabulary="250002"
    )
    gpu = functools.partial(one, BENCHMARKS / "cuda-training.csv", pairs="32")
    head_row = functools.partial(one, BENCHMARKS / "aims-run-1.csv", **HEAD)
    pairs = [
        (step(variant="use_splade_head"), step(variant=PEER)),
        (gpu(variant="ours"), gpu(variant="eager")),
        (head_row(variant="ours"), head_row(variant=PEER)),
    ]
    rows = [
        (label, cost(ours), cost(other)) for label, (ours, other) in zip(labels, pairs, strict=True)
    ]
    return markdown(head, rows)


def memory() -> str:
    """Peak memory and times of the plain formula, of sentence-transformers and of this package."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in read(BENCHMARKS / "aims-run-1.csv"):
        cases.setdefault((row["loss"], row["case"]), {})[row["variant"]] = row
    rows = []
    for about, variants in cases.items():
        found = [variants.get(name) for name in ("eager", PEER, "ours")]
        peaks = ["-" if row is None else figure(float(row["peak_bytes"]) / MIB) for row in found]
        times = ["-" if row is None else figure(1e3 * float(row["seconds"])) for row in found]
        rows.append((*about, *peaks, *times))
    labels = ("plain", PEER, "sparse-losses")
    heading = [f"{label}, {unit}" for unit in ("MiB", "ms") for label in labels]
    return markdown(("loss", "case", *heading), rows, words=2)


def gpu() -> str:
    """A training step on a GPU by its number of pairs."""
    cells: dict[str, list[str]] = {}
    for row in read(BENCHMARKS / "cuda-training.csv"):
        cell = cost(row) if row["status"] == "ok" else "out of memory"
        cells.setdefault(row["pairs"], []).append(cell)
    head = ("pairs", "plain formulas", "sparse-losses")
    return markdown(head, [(pairs, *both) for pairs, both in cells.items()], words=0)


def step() -> str:
    """A training step in sentence-transformers, with the head and without it."""
    path = BENCHMARKS / "sentence-transformers-step.csv"
    rows = [
        (
            f"{int(v):,}",
            *(cost(one(path, vocabulary=v, variant=x)) for x in ("use_splade_head", PEER)),
        )
        for v in dict.fromkeys(row["vocabulary"] for row in read(path))
    ]
    return markdown(("vocabulary", "with `use_splade_head`", "without"), rows)


def encode() -> str:
    """Texts per second by the size of the batch."""
    path = BENCHMARKS / "encode.csv"
    rows = []
    for size in dict.fromkeys(row["batch_size"] for row in read(path)):
        both = [one(path, batch_size=size, variant=name) for name in ("SpladeEncoder", PEER)]
        cells = [
            f"{float(x['texts_per_second']):.0f} texts/s, {figure(float(x['peak_mib']))} MiB"
            for x in both
        ]
        rows.append((size, *cells))
    return markdown(("texts in a batch", "`SpladeEncoder`", PEER), rows)


def caching() -> str:
    """What gradient caching costs and saves."""
    head = ("pairs", "mini-batch", "peak extra memory, MiB", "CPU time, s")
    rows = [
        (
            row["pairs"],
            row["mini_batch_size"],
            f"{int(row['peak_bytes']) / MIB:,.0f}",
            f"{float(row['cpu_seconds']):.1f}",
        )
        for row in read(BENCHMARKS / "caching.csv")
    ]
    return markdown(head, rows, words=0)


def ranks() -> str:
    """InfoNCE on four ranks."""
    rows = [
        (
            f"{row['rows']} x {row['columns']}",
            "plain formula" if row["variant"] == "eager" else f"`{row['variant']}`",
            seconds(float(row["seconds"])),
            f"{int(row['peak_bytes_without_gradients']) / MIB:.1f} MiB",
        )
        for row in read(BENCHMARKS / "ranks.csv")
        if row["ranks"] == "4" and row["peak_bytes_without_gradients"]
    ]
    return markdown(("rows of each rank", "variant", "time", "extra memory"), rows, words=2)


TABLES: dict[str, Callable[[], str]] = {
    **{f"front{language}": functools.partial(front, language) for language in FRONT},
    "memory": memory,
    "gpu": gpu,
    "step": step,
    "encode": encode,
    "caching": caching,
    "ranks": ranks,
    "compatibility": compatibility.table,
}


def filled(text: str) -> str:
    """Return a page with its tables written anew."""

    def table(match: re.Match[str]) -> str:
        return f"{match['start']}\n{TABLES[match['name']]()}\n\n{match['end']}"

    return TABLE.sub(table, text)


def home(readme: str) -> str:
    """Return README.md's text as the home page has it, with links from docs/."""
    found = HOME.search(readme)
    assert found, "README.md has no marks of the home page"
    text = re.sub(r"\]\((?!docs/|[a-z]+:|#)(\w+)\.md", lambda m: f"]({m[1].lower()}.md", found[2])
    return text.replace("](docs/", "](")


def main() -> None:
    """Write every page that has a table, and the home page."""
    front_page = home((ROOT / "README.md").read_text(encoding="utf-8"))
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        old = page.read_text(encoding="utf-8")
        new = filled(old)
        if page == DOCS / "index.md":
            new = filled(HOME.sub(lambda match: match[1] + front_page + match[3], old))
        if new != old:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
