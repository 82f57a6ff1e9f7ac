"""The benchmarks have no circle: every room imports only the rooms before it."""

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROOMS = ("schema", "losses", "run", "studies", "__main__")
FILES = [path for path in sorted(BENCHMARKS.rglob("*.py")) if path.parent != BENCHMARKS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_imports_run_one_way(path: Path):
    here = path.relative_to(BENCHMARKS).parts[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("benchmarks."):
            there = node.module.split(".")[1]
            assert ROOMS.index(there) <= ROOMS.index(here), (here, there)
