"""What is measured is right, exact and kept; no assertion here is on a time."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")

from benchmarks.losses import benchmark
from benchmarks.run import memory, timing
from benchmarks.run.launches import Launches
from benchmarks.run.measure import Row, measure
from benchmarks.run.table import Table, read
from benchmarks.schema import Case, Variant

CPU = torch.device("cpu")
FLOPS = Case(benchmark("flops"), benchmark("flops").tiny[0])
PLAIN = FLOPS.variants()[0]


def measured(case: Case) -> dict[str, Row]:
    results = measure(case, CPU, 0.0, compiled=False, min_rounds=2, max_rounds=2)
    return {result["variant"]: result for result in results}


def flops_with(*variants: Variant, **sizes: object) -> Case:
    return Case(replace(FLOPS.benchmark, variants=variants), {**FLOPS.sizes, **sizes})


def test_wrong_variant_is_not_timed():
    wrong = Variant("wrong", lambda activations: 1.01 * activations.mean(0).square().sum())
    rows = measured(flops_with(wrong))
    assert (rows["eager"]["status"], rows["eager"]["rounds"]) == ("ok", 2)
    assert rows["wrong"]["status"].startswith("MISMATCH")
    assert "rounds" not in rows["wrong"]


def test_variants_are_compared_with_each_other_where_the_formula_does_not_fit(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10)
    both = [Variant(name, PLAIN.call) for name in ("ours", "ours, blocks")]
    odd = Variant("ours, wrong", lambda activations: activations.float().abs().sum())
    rows = measured(flops_with(*both, odd, dtype="bf16"))
    assert rows["eager"]["status"].startswith("skipped: needs about")
    assert rows["ours"]["status"] == rows["ours, blocks"]["status"] == "ok"
    assert rows["ours, wrong"]["status"].startswith("MISMATCH")


def test_the_memory_meter_is_exact():
    x = torch.ones(1000, requires_grad=True)

    def run() -> tuple[torch.Tensor, ...]:
        torch.empty(5000)
        gradient = torch.empty(1000)
        torch.empty(2000)
        return (gradient,)

    assert memory.peak_bytes(run, CPU) == (20_000, 20_000)
    both = memory.peak_bytes(lambda: (torch.empty(3000), torch.empty(10)), CPU)
    assert both == (12_040, 0)
    peak, without = memory.peak_bytes(lambda: torch.autograd.grad(2 * x.exp().sum(), x), CPU)
    assert peak >= 8000
    assert without <= peak - 3000


def test_rounds_are_interleaved_and_rotated():
    order: list[str] = []
    runs = {name: (lambda call, name=name: order.append(name)) for name in "abc"}
    first = dict.fromkeys("abc", 1.0)
    seconds = timing.interleave(runs, CPU, budget=10.0, first=first, max_rounds=3)
    assert "".join(order) == "abcbcacab"
    assert {len(times) for times in seconds.values()} == {3}
    fixed = {"eager": [4.0, 2.0, 9.0], "ours": [2.0, 2.0, 3.0]}
    ratios = timing.speedup(fixed, "ours")
    assert ratios == {"speedup_q1": 1.5, "speedup": 2.0, "speedup_q3": 2.5}
    assert timing.columns("seconds", [3.0])["seconds_q1"] == 3.0


COMMON = dict.fromkeys(("device", "capability", "threads", "torch", "git_commit", "suite"), "x")


def row_of(variant: str) -> Row:
    return {"loss": "flops", "case": "B=2", "variant": variant, "status": "ok", "seconds": 1.0}


def test_rows_are_written_once_and_for_one_machine(tmp_path: Path):
    path = tmp_path / "a.csv"
    Table(path, COMMON).add([row_of("eager"), row_of("ours")])
    table = Table(path, COMMON)
    assert table.present("flops", "B=2") == {"eager", "ours"}
    Table(path, COMMON).add([row_of("ours, compiled")])  # another run
    assert table.add([row_of("ours")]) == []
    table.add([row_of("torch.compile")])
    variants = ["eager", "ours", "ours, compiled", "torch.compile"]
    assert [row["variant"] for row in read(path)] == variants
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.csv"]
    with pytest.raises(ValueError, match="device is 'x' there"):
        Table(path, {**COMMON, "device": "another"})
    assert Table(path, {**COMMON, "device": "another"}, fresh=True).rows == []


def test_a_product_of_halves_with_an_fp32_sum_counts_as_one_of_halves():
    a, b = torch.ones(2, 64, 32, device="meta", dtype=torch.bfloat16).unbind()
    total = torch.ones(64, 64, device="meta")
    with Launches("meta") as seen:
        torch.addmm(total, a, b.T, out_dtype=total.dtype, out=total)
    assert seen.flops == {torch.bfloat16: 2 * 64 * 64 * 32}
