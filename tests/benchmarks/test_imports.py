"""The benchmarks have no circle: every room imports only the rooms before it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
ROOMS = ("schema", "losses", "run", "report", "studies", "__main__")
FILES = sorted(path for path in BENCHMARKS.rglob("*.py") if "__pycache__" not in path.parts)
# What puts losses together may import them, each only what it is made of.
COMPOSED = {
    "splade_head": {"splade_pool"},
    "end_to_end": {"flops", "info_nce", "splade_head", "splade_pool"},
    "objective": {
        "distillation",
        "idf_flops",
        "info_nce",
        "min_activation",
        "positive_activation",
        "self_reconstruction",
    },
}


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(path: Path) -> set[str]:
    """Return the modules of the benchmarks that a file imports, at any depth."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports of the benchmarks are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name for name in names if name in MODULES} or {node.module}
    return modules & MODULES


MODULES = {module(path) for path in FILES}


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_imports_run_one_way(path: Path):
    here = room(module(path))
    if not here:
        assert not imported(path)
        return
    for there in {room(name) for name in imported(path)} - {here}:
        assert ROOMS.index(there) < ROOMS.index(here), (here, there)


def test_the_import_rule_sees_imports():
    rooms = {room(name) for name in imported(BENCHMARKS / "studies" / "training_step.py")}
    assert rooms == {"losses", "run"}
    assert imported(BENCHMARKS / "losses" / "flops.py") == {"benchmarks.schema"}


@pytest.mark.parametrize(
    "path", sorted((BENCHMARKS / "losses").glob("[a-z]*.py")), ids=lambda p: p.stem
)
def test_a_loss_imports_no_loss_that_it_is_not_made_of(path: Path):
    siblings = {name.rpartition(".")[2] for name in imported(path) if room(name) == "losses"}
    assert siblings == COMPOSED.get(path.stem, set())


def test_no_module_imports_itself_in_a_circle():
    graph = {module(path): imported(path) for path in FILES}
    while ready := [name for name, needs in graph.items() if not needs & set(graph)]:
        for name in ready:
            del graph[name]
    assert not graph
