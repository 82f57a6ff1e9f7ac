"""docs/porting.md names tests that there are, and all of them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *sorted((ROOT / "tests" / "porting").glob("test_*.py")),
    ROOT / "tests" / "lightning_ir" / "test_porting.py",
]


def test_the_page_names_every_test_and_no_other():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "porting.md").read_text("utf-8")))
    written = {
        node.name
        for path in FILES
        if path != Path(__file__)
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert named == written
