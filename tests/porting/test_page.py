"""docs/porting.md names every file of tests that holds its lines."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_names_every_file_of_its_tests_and_no_other():
    named = re.findall(r"`(tests/\w+/\w+\.py)`", (ROOT / "docs" / "porting.md").read_text("utf-8"))
    files = {*Path(__file__).parent.glob("test_*.py")} - {Path(__file__)}
    assert sorted(named) == sorted(file.relative_to(ROOT).as_posix() for file in files)
