"""The loop of docs/distributed.md, as it stands there, on one rank and on two."""

import contextlib
import re
import runpy
from pathlib import Path

import pytest

from tests.distributed.ranks import as_torchrun_would

ROOT = Path(__file__).resolve().parents[2]


def run(rank: int, script: Path, printed: Path) -> None:
    with printed.open("a") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.works_with("PyTorch", "fp32", "devices")
def test_the_loop_of_the_page_prints_the_same_on_one_rank_and_on_two(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = [block for block in blocks if "init_process_group" in block]
    script = tmp_path / "loop.py"
    script.write_text(block, encoding="utf-8")
    numbers = []
    for ranks in (1, 2):
        printed = tmp_path / f"{ranks}.txt"
        as_torchrun_would(run, script, printed, processes=ranks)
        numbers.append([float(line) for line in printed.read_text().split()])
    one, two = numbers
    assert len(one) == 3
    assert two == pytest.approx(one, abs=2e-4)
    assert one[0] != one[1]
