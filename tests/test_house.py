"""The house rules: imports run one way, every loss has its test, exports, docs and news."""

import ast
import functools
import inspect
import re
import sys
from pathlib import Path

import pytest

import sparse_losses
import sparse_losses.functional as F
from tests import oracles
from tests.cases import CASES, LOSSES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sparse_losses"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
STEMS = sorted(p.stem for p in (PACKAGE / "losses").glob("*.py") if not p.stem.startswith("_"))

FLOORS = {
    "distributed": 0,
    "_core": 1,
    "fast": 2,
    **dict.fromkeys(("losses", "vocabulary", "representation", "queue", "metrics"), 3),
    "sparsity": 4,
    "objective": 5,
    "presets": 6,
    "functional": 7,
    "": 7,  # the package itself
    "integrations": 8,
}
# Two rooms may import one another: an encoder's method `calibrate` is the function, imported late.
NEIGHBOURS = [{"", "functional"}, {"representation", "sparsity"}]
GROUND = ["_core", "distributed", "fast"]


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """Return the absolute names of what a file imports: modules, and names from them."""
    found = set()
    package = ("sparse_losses", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def rooms_of(names: set[str]) -> set[str]:
    """Return which rooms the names lie in; a bare `sparse_losses` is the room of all exports."""
    rooms = set()
    for name in names:
        parts = name.split(".")
        if len(parts) == 1:
            if not any(other.startswith("sparse_losses.") for other in names):
                rooms.add("")
        elif (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists():
            rooms.add(parts[1])
        else:
            rooms.add("")  # a name that the package exports
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    here = room(path)
    assert here in FLOORS, f"say in tests/test_house.py on which floor {here} lies"
    names = imports(path)
    for there in rooms_of({n for n in names if n.split(".")[0] == "sparse_losses"}) - {here}:
        assert FLOORS[there] < FLOORS[here] or {here, there} in NEIGHBOURS, (here, there)
        if here == "losses":
            assert there in GROUND
    if here == "losses":
        assert not [n for n in names if n.startswith("sparse_losses.losses")], "a loss imports none"


@pytest.mark.parametrize("name", ["__init__.py", "functional.py"])
def test_tables_of_contents_only_re_export(name):
    docstring, *body = parsed(PACKAGE / name).body
    assert isinstance(docstring, ast.Expr)
    for node in body:
        if isinstance(node, ast.Assign):
            assert ast.unparse(node.targets[0]) in ("__all__", "__version__")
        else:
            assert isinstance(node, (ast.Import, ast.ImportFrom)), ast.unparse(node)


@pytest.mark.parametrize("module", [sparse_losses, F], ids=["package", "functional"])
def test_all_is_complete(module):
    public = {n for n, x in vars(module).items() if n[0] != "_" and not inspect.ismodule(x)}
    exported = [name for name in module.__all__ if name not in ("__version__", "functional")]
    assert sorted(exported) == sorted(public)


def test_functions_are_exported_twice():
    functions = {n for n in sparse_losses.__all__ if inspect.isfunction(getattr(sparse_losses, n))}
    assert functions <= set(F.__all__) <= set(sparse_losses.__all__)
    assert all(getattr(F, name) is getattr(sparse_losses, name) for name in F.__all__)
    assert not [n for n in F.__all__ if n.endswith("Loss")], "modules come from the package"


def test_every_loss_is_in_the_table_of_cases():
    assert sorted({case.stem for case in CASES}) == sorted(LOSSES)
    assert set(LOSSES) - {"info_nce_from_scores"} == set(STEMS), "which is in InfoNCE's file"
    assert len({case.id for case in CASES}) == len(CASES)


def read(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


@pytest.mark.parametrize("stem", STEMS)
def test_a_loss_has_its_nine_places(stem):
    """Besides its file; all that are missing are named at once."""
    function = f"{stem}_loss"
    source = getattr(getattr(F, function, None), "__module__", "")
    names = {function, module := getattr(LOSSES.get(stem), "module", "a row's `module`")}
    page = ROOT / "docs" / "losses" / f"{stem}.md"
    lines = set(page.read_text(encoding="utf-8").splitlines()) if page.exists() else set()
    places = {
        f"`{stem}` in tests/oracles.py": hasattr(oracles, stem),
        "a row in tests/cases.py": stem in LOSSES,
        f"tests/losses/test_{stem}.py": (ROOT / f"tests/losses/test_{stem}.py").exists(),
        f"benchmarks/losses/{stem}.py": (ROOT / f"benchmarks/losses/{stem}.py").exists(),
        f"`::: sparse_losses.{function}` and `{module}` on docs/losses/{stem}.md": (
            {f"::: sparse_losses.{name}" for name in names} <= lines
        ),
        "its function in functional.py": source == f"sparse_losses.losses.{stem}",
        "both in sparse_losses/__init__.py": names <= set(sparse_losses.__all__),
        "a line in mkdocs.yml": f"\n          - losses/{stem}.md\n" in read("mkdocs.yml"),
        f"`{function}` in CHANGELOG.md": f"`{function}`" in read("CHANGELOG.md"),
    }
    missing = [place for place, is_there in places.items() if not is_there]
    assert not missing, f"{stem} lacks {'; '.join(missing)}"


@pytest.mark.parametrize("stem", STEMS)
def test_a_loss_says_its_formula_arguments_errors_and_source(stem):
    doc = inspect.getdoc(getattr(F, f"{stem}_loss"))
    assert re.search(r"\$\$.+?\$\$|\.\. math::|\\\[", doc, re.DOTALL)
    headings = re.findall(r"^(Args|Returns|Raises|Examples?|References):", doc, re.MULTILINE)
    assert headings[:3] == ["Args", "Returns", "Raises"]
    assert "References" in headings
    for name in inspect.signature(getattr(F, f"{stem}_loss")).parameters:
        assert re.search(rf"^    .*\b{name}\b.*:", doc, re.MULTILINE), name
    module = getattr(sparse_losses, LOSSES[stem].module)
    assert "$$" not in inspect.getdoc(module), "the formula is written once"


PUBLIC = sorted({*sparse_losses.__all__, *F.__all__} - {"__version__", "functional"})


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_with_an_example(name):
    doc = inspect.getdoc(getattr(sparse_losses, name, None) or getattr(F, name))
    assert doc
    assert re.search(r"^\s*>>> ", doc, re.MULTILINE)


LAZY = {  # what an extra brings, not imported at once: tests/_core/test_extras.py
    "representation/encoding.py": {"tqdm"},
    "representation/folder.py": {"peft", "safetensors", "tokenizers", "transformers"},
    "representation/static.py": {"safetensors", "transformers"},
    "sparsity/calibration.py": {"tqdm"},
}


def test_the_runtime_needs_torch_and_numpy_only():
    allowed = {*sys.stdlib_module_names, "sparse_losses", "torch", "numpy"}
    for path in FILES:
        if room(path) == "integrations":
            continue
        names = {name.split(".")[0] for name in imports(path)}
        assert names <= allowed | LAZY.get(path.relative_to(PACKAGE).as_posix(), set()), path


def test_nothing_is_unpickled():
    """PyTorch's default, but a checkpoint may be read by a version that has another."""
    calls = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for folder in ("sparse_losses", "benchmarks", "examples", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls
    assert [call for call in calls if "weights_only=True" not in call] == []
