"""The troubleshooting page has a section for every symptom that ``advise`` may name."""

import inspect
import re
from pathlib import Path

from sparse_losses.objective import advice

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/troubleshooting.md"


def test_every_symptom_has_its_section() -> None:
    code = inspect.getsource(advice)
    symptoms = re.findall(r'yield Finding\(\s*"([^"]+)"', code)
    assert len(symptoms) > 10
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {symptom.lower() for symptom in symptoms} <= {each.lower() for each in headings}
