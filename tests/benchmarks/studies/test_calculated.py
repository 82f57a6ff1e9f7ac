"""The calculated figures: what is counted on meta tensors, and the time that follows from it."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")

from benchmarks.run.launches import Launches
from benchmarks.run.table import RESULTS, read
from benchmarks.studies import calculated, training_step


def test_small_operations_take_the_time_of_their_launches():
    x = torch.empty(64, 32, device="meta")
    with Launches() as counted:
        (x.bfloat16() @ x.bfloat16().T).relu_()
    assert [each.name for each in counted.operations] == ["_to_copy", "_to_copy", "mm", "relu_"]
    assert counted.flops == {torch.bfloat16: 2 * 64 * 64 * 32}
    copy, _, product, _ = (each.bytes for each in counted.operations)
    assert (copy, product) == (64 * 32 * (4 + 2), 2 * (64 * 32 * 2) + 64 * 64 * 2)
    assert calculated.seconds(counted, "h100") == pytest.approx(4 * calculated.LAUNCH)


def test_every_case_is_counted(tmp_path: Path):
    path = tmp_path / "calculated.csv"
    assert (
        calculated.main(["--suite", "tiny", "--only", "flops,info_nce", "--output", str(path)]) == 0
    )
    rows = {(row["loss"], row["variant"]): row for row in read(path)}
    assert {("flops", "eager"), ("flops", "ours"), ("info_nce", "ours")} <= set(rows)
    assert all(int(row["launches"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows.values())
    assert read(RESULTS / "calculated.csv")[0].keys() == read(path)[0].keys()


def test_a_training_step_is_counted():
    plain, ours = calculated.training_steps(training_step.TINY)
    assert (plain["variant"], ours["variant"]) == ("eager", "ours")
    assert plain["flops_half"] > 0
    assert ours["launches"] > 100
