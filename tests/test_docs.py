"""The written pages: every local link leads somewhere, every public loss is on the losses page."""

import re
from pathlib import Path

import pytest

import sparse_losses

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *ROOT.glob("docs/**/*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_and_pictures_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.split("#")[0] for target in targets if "://" not in target]
    missing = [target for target in local if target and not (page.parent / target).exists()]
    assert not missing


def test_every_loss_has_a_row_where_one_chooses() -> None:
    text = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    losses = [name for name in sparse_losses.__all__ if name.endswith("_loss")]
    assert len(losses) == 13
    rows = [line for line in text.splitlines() if line.startswith("| [") and "$" in line]
    assert [name for name in losses if f"[API][sparse_losses.{name}]" not in "".join(rows)] == []
