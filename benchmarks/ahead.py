"""``python -m benchmarks.ahead RESULTS.csv ...``: from which size on a kernel is ahead of PyTorch.

Prints the lines of ``AHEAD`` in ``sparse_losses/kernels/__init__.py``. A kernel is ahead at a size
if three quarters of the rounds say so in every case and pass of that size, and nothing of it
failed. It has a line if it is ahead at the largest measured size of every dtype; the line names the
smallest size from which on it always is, in all of them, as the table does not tell them apart.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.table import Row, read

__all__ = ["Ahead", "lines", "main", "unbacked", "where_ahead"]

Ahead = Mapping[str, Mapping[tuple[int, int], int]]


def where_ahead(rows: Iterable[Row]) -> dict[str, dict[tuple[int, int], int]]:
    """The table that these rows back."""
    verdicts: dict[tuple[str, tuple[int, int]], dict[str, dict[int, bool]]] = {}
    for row in rows:
        if row.get("variant") != "ours, triton" or not row.get("operation"):
            continue
        capability = _capability(row["capability"])
        said = _is_ahead(row)
        if capability is None or said is None:
            continue
        by_dtype = verdicts.setdefault((row["operation"], capability), defaultdict(dict))
        sizes, size = by_dtype[row["dtype"]], int(row["operation_elements"])
        sizes[size] = sizes.get(size, True) and said
    found: dict[str, dict[tuple[int, int], int]] = {}
    for (operation, capability), by_dtype in sorted(verdicts.items()):
        fewest = [_fewest(sizes) for sizes in by_dtype.values()]
        known = [size for size in fewest if size is not None]
        if len(known) == len(fewest):
            found.setdefault(operation, {})[capability] = max(known)
    return found


def _fewest(sizes: Mapping[int, bool]) -> int | None:
    """The smallest size from which on all are ahead, if the largest is."""
    fewest = None
    for size in sorted(sizes, reverse=True):
        if not sizes[size]:
            break
        fewest = size
    return fewest


def unbacked(table: Ahead, rows: Sequence[Row]) -> list[str]:
    """What a table claims and these rows do not say."""
    backed = where_ahead(rows)
    return [
        f"{operation} on {capability} from {fewest:,} elements on: "
        + ("nothing measured" if known is None else f"measured from {known:,} on")
        for operation, entries in table.items()
        for capability, fewest in entries.items()
        if (known := backed.get(operation, {}).get(capability)) is None or fewest < known
    ]


def lines(table: Ahead) -> list[str]:
    """To paste."""
    return [
        f'    "{operation}": {{'
        + ", ".join(f"{capability}: {fewest:_}" for capability, fewest in entries.items())
        + "},"
        for operation, entries in table.items()
    ]


def _is_ahead(row: Row) -> bool | None:
    """``None`` where there is nothing to compare with, which is not the kernel's fault."""
    if row["status"].startswith("skipped"):
        return None
    if not row["status"].startswith("ok"):
        return False
    return float(row["over_torch_q1"]) > 1 if row["over_torch_q1"] else None


def _capability(text: str) -> tuple[int, int] | None:
    """``sm_90`` to ``(9, 0)``."""
    number = text.removeprefix("sm_")
    return (int(number[:-1]), int(number[-1])) if number.isdigit() and number != text else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the lines, and for every operation what they come from."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.ahead", description=__doc__)
    options.add_argument("results", nargs="+", type=Path, metavar="RESULTS.csv")
    args = options.parse_args(arguments)
    rows = []
    for path in args.results:
        if not path.exists():
            options.error(f"no such file: {path}")
        some = read(path)
        if not some or "variant" not in some[0]:
            options.error(f"no results of `python -m benchmarks`: {path}")
        rows += some
    own = [row for row in rows if row.get("variant") == "ours, triton" and row.get("operation")]
    for row in sorted(own, key=lambda row: (row["operation"], int(row["operation_elements"]))):
        verdict = {True: "ahead", False: "not ahead", None: "nothing to compare with"}
        size = f"{int(row['operation_elements']):,} elements"
        ratio = row["status"]
        if row["over_torch"]:
            low, high = row["over_torch_q1"], row["over_torch_q3"]
            ratio = f"{row['over_torch']} ({low} to {high}) times as fast"
        print(
            f"# {row['operation']}, {size} ({row['case']}, {row['pass']}): "
            f"{ratio}, {verdict[_is_ahead(row)]}"
        )
    if not own:
        print("# no kernel was measured in these files")
        return 1
    found = where_ahead(rows)
    print(*lines(found), sep="\n") if found else print("# no kernel is ahead: an empty table")
    return 0


if __name__ == "__main__":
    sys.exit(main())
