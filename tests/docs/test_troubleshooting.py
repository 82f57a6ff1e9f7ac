"""Every symptom that ``advise`` may name has a section of troubleshooting and a row elsewhere."""

import inspect
import re
from pathlib import Path

import pytest

from sparse_losses.objective import advice

DOCS = Path(__file__).resolve().parents[2] / "docs"
SYMPTOMS = [
    *re.findall(r'yield Finding\(\s*"([^"]+)"', inspect.getsource(advice)),
    *(symptom for _, (symptom, _), _ in advice.TOKEN_RULES),
]


def test_every_symptom_has_its_section() -> None:
    assert len(SYMPTOMS) > 10
    page = (DOCS / "guides/troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert {symptom.lower() for symptom in SYMPTOMS} <= {each.lower() for each in headings}


@pytest.mark.parametrize("page", ["choose.md", "ko/choose.md", "diagnostics.md"])
def test_every_symptom_stands_in_a_table(page: str) -> None:
    rows = [row for row in (DOCS / page).read_text(encoding="utf-8").splitlines() if row[:1] == "|"]
    assert [symptom for symptom in SYMPTOMS if not any(symptom in row for row in rows)] == []
