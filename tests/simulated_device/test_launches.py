"""With default options no loss launches more than its formula typed out plainly, and none waits."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.losses import NAMES, benchmark, cases
from benchmarks.report.reckoned import table
from benchmarks.run import reckoned
from benchmarks.schema import Case
from benchmarks.studies.reckoned import training_steps
from benchmarks.studies.training_step import TINY
from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)

FEW = 24  # launches that are always allowed
WIDEST_TILE = 8192  # of the head's, in tokens of the vocabulary


def allowed(case: Case, plain: int) -> int:
    """The head's tiles have a bound of their own; a training step's end has two heads."""
    if case.loss in ("splade_head", "end_to_end"):
        tiles = math.ceil(case.sizes["V"] / WIDEST_TILE)
        heads = 1 if case.loss == "splade_head" else 2
        return heads * (16 * tiles + FEW) + (plain if heads == 2 else 0)
    return max(plain, FEW)


@pytest.mark.parametrize("loss", NAMES)
def test_ours_launches_no_more_than_the_plain_formula_and_never_waits(loss: str):
    for case in cases("quick", [loss]):
        found = reckoned.count(case, ("eager", "ours"))
        ours, plain = found["ours"], found["eager"]
        assert (ours.status, ours.waits) == ("ok", 0), case.name
        assert 0 < ours.launches <= allowed(case, plain.launches), case.name


def test_self_reconstruction_processes_all_rows_at_once():
    """Blocks of rows fit the caches of a CPU; on an accelerator they would only add launches."""
    sizes = [{"B": rows, "S": 128, "V": 250_002} for rows in (1, 512)]
    each = [Case(benchmark("self_reconstruction"), size) for size in sizes]
    one, many = (reckoned.count(case, ("ours",))["ours"] for case in each)
    assert one.status == many.status == "ok"
    assert one.launches == many.launches


def test_counting_by_shapes_is_counting_what_is_computed():
    for case in cases("tiny"):
        by_shapes, computed = (reckoned.count(case, is_computed=x) for x in (False, True))
        assert {"eager", "ours"} <= set(computed)
        for name, row in computed.items():
            # The result of `mse_loss` keeps the memory of all its terms, but not that of its meta.
            peak = by_shapes[name].peak_bytes
            assert by_shapes[name] == replace(row, peak_bytes=peak), case.name
            assert peak <= row.peak_bytes


def test_seconds_are_reckoned_operation_by_operation():
    def operation(**figures) -> simulated_device.Operation:
        kinds = {"bytes": 0, "flops": 0, "dtype": torch.float32, "launches": True, "waits": False}
        return simulated_device.Operation("x", **{**kinds, **figures})

    def seconds(*operations) -> tuple[float, ...]:
        return tuple(reckoned.reckon(operations, gpu) for gpu in reckoned.GPUS.values())

    assert seconds(operation(), operation()) == (1e-5, 1e-5)
    assert seconds(operation(waits=True)) == pytest.approx((25e-6, 25e-6))
    assert seconds(operation(launches=False, waits=True)) == (20e-6, 20e-6)
    by_bytes = operation(bytes=8 * 10**9)
    assert seconds(by_bytes) == pytest.approx((1e-2 / 3.35, 1e-2 / 0.6))
    half = operation(bytes=8, flops=8 * 10**12, dtype=torch.bfloat16)
    assert seconds(half) == pytest.approx((10 / 989, 10 / 70))
    single = operation(flops=8 * 10**12)
    assert seconds(single, by_bytes) == pytest.approx((10 / 67 + 1e-2 / 3.35, 10 / 31 + 1e-2 / 0.6))


def test_rows_are_read_as_they_were_written_and_the_table_has_them(tmp_path):
    rows = [*reckoned.count(cases("tiny", ["n_pair"])[0]).values()]
    rows.append(reckoned.Row("n_pair", "B=9 D=9", "ours", status="reads a value"))
    reckoned.write(tmp_path / "reckoned.csv", rows)
    back = reckoned.read(tmp_path / "reckoned.csv")
    assert [replace(r, h100_seconds=0, a10g_seconds=0) for r in back] == [
        replace(r, h100_seconds=0, a10g_seconds=0) for r in rows
    ]
    assert [r.h100_seconds for r in back] == pytest.approx([r.h100_seconds for r in rows], 1e-3)
    lines = table(back).splitlines()
    ours, plain = (next(r for r in rows if r.variant == name) for name in ("ours", "eager"))
    assert lines[2].startswith(f"| n_pair | B=5 D=8 | {plain.launches}; {ours.launches}; ")
    assert f"{plain.h100_seconds / ours.h100_seconds:.2f}" in lines[2]
    assert len(lines) == 3, "a row without figures is none of the table's"


def test_a_training_step_is_counted_by_shapes():
    pytest.importorskip("transformers")
    found = {row.variant: row for row in training_steps(TINY)}
    assert found["ours"].status == found["eager"].status == "ok"
    assert found["ours"].waits == 0
    assert found["ours"].launches > 100
    assert found["ours"].flops_half > 0
