"""The table of docs/compatibility.md says what the marked tests found, and nothing else."""

import ast
import json
import re
from pathlib import Path

from tools import compatibility

ROOT = Path(__file__).resolve().parents[1]


def marked() -> dict[str, set[str]]:
    """The features that each test is marked with, its parameters' marks too."""
    found = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                marks = " ".join(ast.unparse(x) for x in node.decorator_list)
                calls = re.findall(r"works_with\((.*?)\)", marks)
                words = {word for call in calls for word in re.findall(r"'(.+?)'", call)}
                name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                found |= {name: words - {*compatibility.TRAINERS}} if words else {}
    return found


def test_named_tests_exist_and_named_errors_are_raised():
    page = (compatibility.DOCS / "compatibility.md").read_text(encoding="utf-8")
    lines = page.partition("{ #models }")[2].splitlines()
    rows = [line[1:-1].split("|") for line in lines if line.startswith("| ")]
    literals = "\n".join(
        node.value
        for path in (ROOT / "sparse_losses").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    files, errors = [], []
    for name, _, refused in rows[1:]:
        files += re.findall(r"`([\w/]+\.py)`", name)
        errors += [error for _, error in re.findall(r"(?:\(|^ )(``?) ?(.+?) ?\1", refused)]
    assert len(files) >= 10
    assert [file for file in files if not (ROOT / "tests" / file).is_file()] == []
    assert len(errors) >= 8
    assert [error for error in errors if error not in literals] == []


def test_the_record_holds_the_marked_tests_with_what_they_are_marked_with():
    """Whether they passed is the run's to say; the page leaves out what did not."""
    record = json.loads(compatibility.RECORD.read_text(encoding="utf-8"))
    recorded = {
        name: {feature for _, *features in found["works_with"] for feature in features}
        for name, found in record["tests"].items()
    }
    assert recorded == marked()


def test_a_test_that_failed_backs_nothing():
    tests = {
        name: {"outcome": outcome, "works_with": [["Lightning", feature]]}
        for name, feature, outcome in (("one", "fp32", "failed"), ("two", "bf16", "passed"))
    }
    rows = compatibility.render({"versions": {}, "tests": tests}).splitlines()
    (row,) = [line for line in rows if "✓" in line]
    assert row.startswith("| bf16 |")
    assert row.split("|")[2:-1].index(" ✓ ") == list(compatibility.TRAINERS).index("Lightning")
