"""``python -m benchmarks.summary a.csv b.csv ...``: several runs in one table, beside the aims.

A single run says what happened once. Of several, the median is the figure and the range from the
lowest to the highest says how far to trust it.
"""

import argparse
import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import Row, read

__all__ = ["AIMS", "Aim", "Merged", "judge", "markdown", "merge", "one_rule_for_all"]

FORWARD, TRAINING = "forward", "forward+backward"
MIB = 2**20
Key = tuple[str, str, str, str, str]  # loss, case, pass, variant, allocator


@dataclass(frozen=True)
class Spread:
    """The median of the runs and their range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """NaN where no run has a figure."""
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan)
        return cls(statistics.median(known), min(known), max(known))

    def __str__(self) -> str:
        """Three digits are more than a machine repeats."""
        if math.isnan(self.median):
            return "-"
        if self.low == self.high:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"


@dataclass(frozen=True)
class Merged:
    """One variant of one case over all runs."""

    key: Key
    elements: int
    kind: str
    runs: int
    seconds: Spread
    speedup: Spread
    peak_bytes: float
    peak_bytes_without_gradients: float
    memory_ratio: float  # of eager's peak
    share_of_ceiling: Spread
    status: str


def merge(tables: Sequence[Sequence[Row]]) -> list[Merged]:
    """Rows of the same key, one a run, in the order of the first table that has them."""
    found: dict[Key, list[Row]] = defaultdict(list)
    for rows in tables:
        for row in rows:
            found[_key(row)].append(row)
    eager = {key: _number(rows[0], "peak_bytes") for key, rows in found.items()}
    merged = []
    for key, rows in found.items():
        good = [row for row in rows if row["status"].startswith("ok")]
        loss, case, pass_, _, allocator = key
        base = eager.get((loss, case, pass_, "eager", allocator), math.nan)
        peak = Spread.of(_number(row, "peak_bytes") for row in good).high
        own = Spread.of(_number(row, "peak_bytes_without_gradients") for row in good).high
        merged.append(
            Merged(
                key,
                int(rows[0]["elements"]),
                rows[0]["kind"],
                len(good),
                Spread.of(_number(row, "seconds") for row in good),
                Spread.of(_number(row, "speedup") for row in good),
                peak,
                own,
                peak / base if base else math.nan,
                Spread.of(_number(row, "share_of_ceiling") for row in good),
                next((r["status"] for r in rows if not r["status"].startswith("ok")), "ok"),
            )
        )
    return merged


def _key(row: Row) -> Key:
    return row["loss"], row["case"], row["pass"], row["variant"], row["allocator"]


def _number(row: Row, name: str) -> float:
    return float(row[name]) if row[name] else math.nan


# The aims.


@dataclass(frozen=True)
class Aim:
    """What a figure should reach: of a variant of a case, at the most favourable common ground."""

    text: str
    loss: str
    case: str
    variant: str
    figure: str  # speedup, time (of eager's), memory (of eager's), MiB, against (another variant)
    bound: float
    allocators: tuple[str, ...] = ("default", "warm")
    other: str = "eager"

    def measured(self, rows: dict[Key, Merged], allocator: str) -> float:
        """The figure, NaN where it was not measured."""
        row = rows.get((self.loss, self.case, TRAINING, self.variant, allocator))
        if row is None or row.runs == 0:
            return math.nan
        if self.figure == "time":
            return 1 / row.speedup.median
        if self.figure == "memory":
            return row.memory_ratio
        if self.figure == "MiB":
            return row.peak_bytes / MIB
        if self.figure == "MiB without gradients":
            return row.peak_bytes_without_gradients / MIB
        if self.figure == "against":
            other = rows.get((self.loss, self.case, TRAINING, self.other, allocator))
            return row.speedup.median / other.speedup.median if other else math.nan
        return row.speedup.median

    def range(self, rows: dict[Key, Merged], allocator: str) -> str:
        """The lowest and the highest of the runs, where runs differ."""
        row = rows.get((self.loss, self.case, TRAINING, self.variant, allocator))
        if row is None or row.runs < 2 or self.figure not in ("speedup", "time"):
            return ""
        ends = (row.speedup.low, row.speedup.high)
        if self.figure == "time":
            ends = (1 / row.speedup.high, 1 / row.speedup.low)
        return f" ({ends[0]:.3g}-{ends[1]:.3g})"

    def is_met(self, value: float) -> bool:
        """Speed-ups are lower bounds, the others upper ones."""
        return value >= self.bound if self.figure in ("speedup", "against") else value <= self.bound


def _head(rows: int, length: int, vocabulary: int, percent: str) -> str:
    return f"B={rows} S={length} V={vocabulary} H=768 {percent}"


_HEAD = "splade_head"
_BERT = 30522
_LARGE = _head(2, 64, 250002, "0.5%")
_MEMORY = _head(16, 256, _BERT, "0.5%")
_END = _head(16, 128, _BERT, "2%")
_SPARSE = f"B=1024 V={_BERT} 0.5%"
_SQUARE = "B=1024 C=1024"
AIMS: tuple[Aim, ...] = (
    *[
        Aim("head", _HEAD, _head(8, 128, _BERT, share), "ours", "speedup", bound)
        for share, bound in (("50%", 3.5), ("5%", 7.0), ("0.5%", 8.5))
    ],
    Aim("head, large vocabulary", _HEAD, _LARGE, "ours", "speedup", 4.5),
    Aim("the same, sparse_grad", _HEAD, _LARGE, "ours, sparse_grad", "speedup", 7.0),
    *[
        Aim(
            "head, ahead of torch.compile",
            _HEAD,
            case,
            "ours",
            "against",
            1.0,
            other="torch.compile",
        )
        for case in (
            *[_head(8, 128, _BERT, share) for share in ("50%", "5%", "0.5%")],
            _LARGE,
            _MEMORY,
        )
    ],
    Aim("head, peak extra memory", _HEAD, _MEMORY, "ours", "MiB", 100),
    Aim("the same, sparse_grad", _HEAD, _MEMORY, "ours, sparse_grad", "MiB", 61),
    Aim("end to end, unscreened", "end_to_end", _END, "ours, unscreened", "speedup", 5.0),
    Aim("end to end, screened", "end_to_end", _END, "ours, screened", "speedup", 9.0),
    *[
        Aim(
            "pooling of given logits",
            "splade_pool",
            f"B=8 S=128 V={_BERT} {share}",
            "ours",
            "speedup",
            5.0,
        )
        for share in ("50%", "5%", "0.5%")
    ],
    Aim("InfoNCE, time of eager's", "info_nce", "B=4096 D=768", "ours", "time", 0.85),
    Aim("InfoNCE, memory of eager's", "info_nce", "B=4096 D=768", "ours", "memory", 1 / 3),
    Aim(
        "the same, chunk_size=256", "info_nce", "B=4096 D=768", "ours, chunk_size=256", "time", 0.95
    ),
    Aim(
        "the same, chunk_size=256",
        "info_nce",
        "B=4096 D=768",
        "ours, chunk_size=256",
        "memory",
        0.2,
    ),
    Aim("InfoNCE, sparse, dense gradient", "info_nce", _SPARSE, "ours", "speedup", 15.0),
    Aim("InfoNCE, sparse representation", "info_nce", _SPARSE, "ours, CSR input", "speedup", 35.0),
    Aim("NWS, 128 labels", "nws", "B=256 K=256 Q=8192 F=128 L=128", "ours", "speedup", 75.0),
    Aim("NWS, 128 labels", "nws", "B=256 K=256 Q=8192 F=128 L=128", "ours", "memory", 0.01),
    Aim("NWS, 512 labels", "nws", "B=64 K=64 Q=8192 F=128 L=512", "ours", "speedup", 65.0),
    Aim("KL", "distillation", f"{_SQUARE} KL", "ours", "speedup", 2.0),
    Aim("z-score MSE", "distillation", f"{_SQUARE} z-MSE", "ours", "speedup", 5.0),
    Aim("FLOPS, warm", "flops", f"B=256 V={_BERT} 5%", "ours", "speedup", 3.0, ("warm",)),
    Aim("top-k", "min_activation", f"B=256 V={_BERT} 5%", "ours", "speedup", 1.5),
    Aim(
        "self-reconstruction",
        "self_reconstruction",
        f"B=64 S=128 V={_BERT}",
        "ours",
        "speedup",
        1.3,
    ),
    Aim(
        "self-reconstruction",
        "self_reconstruction",
        f"B=64 S=128 V={_BERT}",
        "ours",
        "memory",
        1 / 3,
    ),
)


@dataclass(frozen=True)
class Verdict:
    """One line of the table of aims."""

    aim: str
    case: str
    allocator: str
    wanted: str
    measured: str
    verdict: str


def judge(merged: Sequence[Merged], aims: Sequence[Aim] = AIMS) -> list[Verdict]:
    """Every aim under every setting of the allocator that was run, then the rule for all losses."""
    rows = {row.key: row for row in merged}
    settings = list(dict.fromkeys(row.key[4] for row in merged))
    lines = []
    for aim in aims:
        for allocator in settings:
            if allocator not in aim.allocators:
                continue
            value = aim.measured(rows, allocator)
            unknown = math.isnan(value)
            verdict = "not measured" if unknown else "met" if aim.is_met(value) else "missed"
            lines.append(
                Verdict(
                    f"{aim.text} ({aim.variant})",
                    f"{aim.loss}, {aim.case}",
                    allocator,
                    _wanted(aim),
                    "-" if unknown else f"{value:.3g}{aim.range(rows, allocator)}",
                    verdict,
                )
            )
    return lines + one_rule_for_all(merged) + _switch(rows, settings)


def _wanted(aim: Aim) -> str:
    kinds = {
        "speedup": f">= {aim.bound:g}x eager",
        "against": f">= {aim.bound:g}x {aim.other}",
        "time": f"<= {aim.bound:.3g} of eager's time",
        "memory": f"<= {aim.bound:.3g} of eager's memory",
    }
    return kinds.get(aim.figure, f"<= {aim.bound:g} {aim.figure}")


def one_rule_for_all(merged: Sequence[Merged], above: int = 100_000) -> list[Verdict]:
    """No loss slower than eager at any listed size above 1e5 elements; none needs more memory."""
    lines = []
    tests: tuple[tuple[str, Callable[[Merged], float], Callable[[float], bool]], ...] = (
        (">= 1x eager", lambda row: row.speedup.median, lambda value: value < 1),
        ("<= 1 of eager's memory", lambda row: row.memory_ratio, lambda value: value > 1.001),
    )
    for wanted, figure, is_worse in tests:
        for allocator in dict.fromkeys(row.key[4] for row in merged):
            ours = [
                row
                for row in merged
                if row.key[3] == "ours"
                and row.key[4] == allocator
                and row.elements > above
                and not math.isnan(figure(row))
            ]
            worse = [row for row in ours if is_worse(figure(row))]
            lines += [
                Verdict(
                    "every loss, above 1e5 elements",
                    ", ".join(row.key[:3]),
                    allocator,
                    wanted,
                    f"{figure(row):.3g}",
                    "missed",
                )
                for row in worse
            ]
            count = len(ours) - len(worse)
            verdict = "met" if ours and not worse else "missed" if worse else "not measured"
            whole = f"{len(ours)} cases and passes"
            lines.append(
                Verdict(
                    "every loss, above 1e5 elements",
                    whole,
                    allocator,
                    wanted,
                    f"{count} of {len(ours)}",
                    verdict,
                )
            )
    return lines


def _switch(rows: dict[Key, Merged], settings: Sequence[str]) -> list[Verdict]:
    """Where ``sparse=True`` stops being faster than ``sparse=False``: aimed at near 12%."""
    lines = []
    for allocator in settings:
        for size in (256, 1024):
            found = []
            for share in (0.5, 5.0, 10.0, 12.0, 15.0):
                case = f"B={size} V={_BERT} {share:g}%"
                yes = rows.get(("info_nce", case, TRAINING, "ours, sparse=True", allocator))
                no = rows.get(("info_nce", case, TRAINING, "ours, sparse=False", allocator))
                if yes and no and yes.runs and no.runs:
                    found.append(f"{share:g}%: {no.seconds.median / yes.seconds.median:.2f}")
            if found:
                lines.append(
                    Verdict(
                        "InfoNCE, sparse=True over sparse=False",
                        f"info_nce, B={size} V={_BERT}",
                        allocator,
                        "1 near 12%",
                        ", ".join(found),
                        "see figures",
                    )
                )
    return lines


# Output.


def markdown(heading: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def table(merged: Sequence[Merged]) -> str:
    """All rows as Markdown."""
    heading = (
        "loss",
        "case",
        "pass",
        "allocator",
        "variant",
        "time, ms",
        "x eager",
        "memory, MiB",
        "without gradients",
        "of eager's memory",
        "% of ceiling",
    )
    lines = []
    for row in merged:
        loss, case, pass_, variant, allocator = row.key
        if row.runs == 0:
            lines.append((loss, case, pass_, allocator, variant, row.status, *[""] * 5))
            continue
        scaled = Spread(*(1e3 * x for x in (row.seconds.median, row.seconds.low, row.seconds.high)))
        lines.append(
            (
                loss,
                case,
                pass_,
                allocator,
                variant,
                scaled,
                row.speedup,
                f"{row.peak_bytes / MIB:.1f}",
                f"{row.peak_bytes_without_gradients / MIB:.1f}",
                "-" if math.isnan(row.memory_ratio) else f"{row.memory_ratio:.3f}",
                f"{100 * row.share_of_ceiling.median:.0f}",
            )
        )
    return markdown(heading, lines)


def aims_table(verdicts: Sequence[Verdict]) -> str:
    """The aims as Markdown."""
    heading = ("aim", "case", "allocator", "wanted", "measured", "")
    return markdown(
        heading, [(v.aim, v.case, v.allocator, v.wanted, v.measured, v.verdict) for v in verdicts]
    )


def write(path: Path, merged: Sequence[Merged]) -> None:
    """The merged rows as CSV."""
    names = ("loss", "case", "pass", "variant", "allocator")
    spreads = ("seconds", "speedup", "share_of_ceiling")
    plain = ("peak_bytes", "peak_bytes_without_gradients", "memory_ratio")
    columns = [f"{name}_{part}" for name in spreads for part in ("median", "low", "high")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow([*names, "elements", "kind", "runs", *columns, *plain, "status"])
        for row in merged:
            values = [
                getattr(getattr(row, n), p) for n in spreads for p in ("median", "low", "high")
            ]
            values += [getattr(row, name) for name in plain]
            spelt = ["" if math.isnan(value) else f"{value:.6g}" for value in values]
            writer.writerow([*row.key, row.elements, row.kind, row.runs, *spelt, row.status])


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes NAME.csv and NAME.md and prints the aims."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    options.add_argument("runs", nargs="+", type=Path, help="CSVs of `python -m benchmarks`")
    options.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parent / "results" / "summary.csv",
        help="the CSV; the same as Markdown goes beside it (default: %(default)s)",
    )
    args = options.parse_args(arguments)
    tables = [read(path) for path in args.runs]
    for path, rows in zip(args.runs, tables, strict=True):
        if not rows:
            raise SystemExit(f"{path} " + ("holds no rows" if path.exists() else "does not exist"))
    machines = {(row["device"], row["git_commit"], row["torch"]) for rows in tables for row in rows}
    merged = merge(tables)
    verdicts = judge(merged)
    about = [
        f"- {device}, commit {commit}, torch {torch}" for device, commit, torch in sorted(machines)
    ]
    text = "\n".join(
        [
            f"{len(tables)} files; of every row the median of those that hold it, the lowest and "
            "the highest in brackets.",
            "",
            *about,
            "",
            "## Aims",
            "",
            aims_table(verdicts),
            "",
            "## All figures",
            "",
            table(merged),
            "",
        ]
    )
    write(args.output, merged)
    args.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(aims_table(verdicts))
    print(f"{args.output}, {args.output.with_suffix('.md')}")
    if len(machines) > 1:
        print("these runs are of different machines, commits or versions", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
