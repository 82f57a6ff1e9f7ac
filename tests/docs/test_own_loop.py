"""The diff that brings a controller into a loop of losses runs, before and after."""

import re
from pathlib import Path

import pytest
import torch

from sparse_losses import FlopsLoss, InfoNCELoss, SparsityController

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
@pytest.mark.parametrize("dropped", ["+", "-"], ids=["before", "after"])
def test_diff_of_an_own_loop_runs(page, dropped, capsys):
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    lines = [line[1:] for line in diff.splitlines() if line[0] != dropped]
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 200)
    names = {
        "SparsityController": SparsityController,
        "encoder": lambda x: head(x).relu(),
        "optimizer": torch.optim.SGD(head.parameters(), lr=1e-3),
        "loader": [({"x": torch.randn(4, 8)}, {"x": torch.randn(4, 8)}) for _ in range(41)],
        "info_nce": InfoNCELoss(),
        "flops": FlopsLoss(),
    }
    exec("\n".join(lines), names)
    if dropped == "-":
        assert names["controller"].weight > 0.01  # about 100 of 200 are active
        assert "of 64 wanted" in capsys.readouterr().out
