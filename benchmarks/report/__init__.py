"""Reports of results: the aims and the tables of the documentation."""

from collections.abc import Iterable, Sequence

__all__ = ["markdown"]


def markdown(heading: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)
