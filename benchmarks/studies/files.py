"""How the studies write results: an incomplete file never replaces the old one."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console


def replace_text(path: Path, text: str) -> None:
    """Write a file."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows; the first one has all columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def publish(path: Path, table: str) -> None:
    """Write a table as Markdown and print it."""
    replace_text(path, table)
    Console().print(table, markup=False, highlight=False, soft_wrap=True)
