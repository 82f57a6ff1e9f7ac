"""The loop of docs/distributed.md, as it stands there, on one rank and on two."""

import re
from pathlib import Path

import pytest

from tests.distributed import recipe
from tests.distributed.test_recipe import torchrun


@pytest.mark.works_with("PyTorch", "fp32", "devices")
def test_the_loop_of_the_page_prints_the_same_on_one_rank_and_on_two(tmp_path):
    page = recipe.SCRIPT.parents[1] / "docs" / "distributed.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "init_process_group" in block]
    file = tmp_path / "loop.py"
    file.write_text(block, encoding="utf-8")
    runs = [torchrun(ranks, Path(recipe.__file__), file) for ranks in (1, 2)]
    assert [run.returncode for run in runs] == [0, 0], runs[-1].stderr
    one, two = ([float(line) for line in run.stdout.split()] for run in runs)
    assert len(one) == 3
    assert two == pytest.approx(one, abs=2e-4)
    assert one[0] != one[1]
