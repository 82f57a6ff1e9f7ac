"""The suite measures what it says: every loss, checked variants, exact memory, sound merging."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import caching, memory, summary, timing
from benchmarks.cases import FAMILIES, Case, Maker, Variant, cases, family
from benchmarks.ceilings import Ceilings
from benchmarks.growth import AXES, Device, exponent, predict
from benchmarks.measure import TRAINING, Limits, Mismatch, Result, check, measure
from benchmarks.plots import draw
from benchmarks.table import Table, read

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
RATES = Ceilings(1e10, 1e11)
STEMS = sorted(
    p.stem for p in (ROOT / "sparse_losses/losses").glob("*.py") if not p.stem.startswith("_")
)


def test_every_loss_has_cases_in_every_suite():
    beside = {"splade_pool", "splade_head", "end_to_end", "objective", "regularisers"}
    for suite in ("tiny", "quick", "full"):
        assert {case.loss for case in cases(suite)} == {*STEMS, *beside}
    for each in FAMILIES:
        assert any(variant.kind == "ours" for variant in each.variants), each.loss


def test_names_of_cases_are_unique():
    names = [(case.loss, case.name) for case in cases("full")]
    assert len(names) == len(set(names))


def test_every_plot_of_the_full_suite_has_three_points():
    for each in FAMILIES:
        groups: dict[str, set[int]] = {}
        for case in cases("full", [each.loss]):
            groups.setdefault(case.group, set()).add(case.elements)
        assert max(map(len, groups.values())) >= 3, each.loss


def test_every_aim_names_a_case_of_the_full_suite():
    names = {(case.loss, case.name) for case in cases("full")}
    for aim in summary.AIMS:
        assert (aim.loss, aim.case) in names, aim
        variants = Case(family(aim.loss), {}).family.variants
        assert aim.variant in {variant.name for variant in variants}, aim


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
@pytest.mark.parametrize("case", cases("tiny"), ids=lambda case: f"{case.loss} {case.name}")
@pytest.mark.parametrize("seed", [0, 1])
def test_every_variant_computes_the_eager_formula(case: Case, seed: int):
    # The kernels have no fp64: they are in test_gpu.py.
    variants = [v for v in case.variants("cpu") if v.kind != "peer" and not v.impl]
    check(case, variants, Maker(CPU, torch.float64, seed))


def test_a_wrong_variant_is_found_and_not_timed():
    flops = family("flops")
    wrong = Variant("wrong", lambda activations: 1.01 * activations.mean(0).square().sum())
    case = Case(flops, flops.tiny[0])
    with pytest.raises(Mismatch, match="value"):
        check(case, [case.variants("cpu")[0], wrong], Maker(CPU, torch.float64))
    broken = Case(
        type(flops)("flops", flops.inputs, flops.wrt, flops.eager, (wrong,), *[flops.tiny] * 3),
        flops.tiny[0],
    )
    results = measure(broken, CPU, RATES, Limits(0.0, 1, 1), compiled=False)
    statuses = {result.variant: (result.status, result.rounds) for result in results}
    assert statuses["eager"] == ("ok", 1)
    assert statuses["wrong"][0].startswith("MISMATCH")
    assert statuses["wrong"][1] == 0


def test_a_case_that_does_not_fit_is_skipped_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10)
    flops = family("flops")
    results = measure(Case(flops, flops.tiny[0]), CPU, RATES, Limits(0.0, 1, 1), compiled=False)
    status = {result.variant: result.status for result in results}
    assert status["eager"].startswith("skipped: needs about")
    assert status["ours"] == "ok"


def test_the_memory_meter_is_exact():
    x = torch.ones(1000, requires_grad=True)

    def run() -> tuple[torch.Tensor, ...]:
        scratch = torch.empty(5000)
        del scratch
        gradient = torch.empty(1000)
        other = torch.empty(2000)
        del other
        return (gradient,)

    peak, without = memory.peak_bytes(run, CPU)
    assert peak == 20_000
    assert without == 20_000
    peak, without = memory.peak_bytes(lambda: (torch.empty(3000), torch.empty(10)), CPU)
    assert (peak, without) == (12_040, 0)
    peak, without = memory.peak_bytes(lambda: torch.autograd.grad(2 * x.exp().sum(), x), CPU)
    assert peak >= 8000
    assert without <= peak - 3000


def test_the_memory_meter_forgets_what_was_there_before():
    kept = [torch.empty(10_000)]

    def run() -> tuple[torch.Tensor, ...]:
        kept.clear()
        small = torch.empty(250)
        del small
        return ()

    assert memory.peak_bytes(run, CPU) == (1000, 1000)


def test_zipf_vectors_have_the_wanted_density():
    for density in (0.5, 0.05, 0.005):
        x = Maker(CPU).zipf(64, 5000, density)
        assert (x != 0).double().mean().item() == pytest.approx(density, rel=0.1)
        assert x.min() == 0
        columns = (x != 0).double().mean(0)
        assert columns.max() > 1.5 * density


def test_the_bias_leaves_the_wanted_share_active():
    sizes = {"B": 4, "S": 16, "V": 3000, "H": 32, "density": 0.05}
    inputs = family("splade_head").inputs(sizes, Maker(CPU))
    inputs.pop("upstream")
    x = family("splade_head").eager(**inputs)
    assert (x > 0).double().mean().item() == pytest.approx(0.05, rel=0.1)


def test_rounds_are_interleaved_and_rotated():
    order: list[str] = []
    runs = {name: (lambda call, name=name: order.append(name)) for name in "abc"}
    samples = timing.interleave(
        runs, CPU, budget=10.0, first=dict.fromkeys("abc", 1.0), max_rounds=3
    )
    assert "".join(order) == "abcbcacab"
    assert {len(times) for times in samples.seconds.values()} == {3}
    fixed = timing.Samples({"eager": [4.0, 2.0, 9.0], "ours": [2.0, 2.0, 3.0]})
    assert fixed.ratios("ours", "eager") == timing.Quartiles(1.5, 2.0, 2.5)


def _result(variant: str, speedup: float, peak: float) -> Result:
    kind = "eager" if variant == "eager" else "ours"
    about = ("flops", "B=256 V=30522 5%", "5%", 256 * 30522, TRAINING, variant, kind, "ok")
    times = (3, 1.0 / speedup, 1.0, 1.0, speedup, speedup, speedup)
    return Result(*about, *times, peak, peak, 1.0, 1.0, 0.5)


COMMON = {
    **dict.fromkeys(("device", "capability", "threads", "torch"), "x"),
    "suite": "full",
    "git_commit": "abc",
    "allocator": "warm",
}


def _table(path: Path, speedup: float) -> Path:
    Table(path, COMMON).add([_result("eager", 1.0, 100.0), _result("ours", speedup, 80.0)])
    return path


def test_the_summary_merges_runs(tmp_path: Path):
    paths = [_table(tmp_path / f"{s}.csv", s) for s in (2.0, 3.5, 5.0)]
    merged = {row.key[3]: row for row in summary.merge([read(path) for path in paths])}
    ours = merged["ours"]
    assert (ours.speedup.median, ours.speedup.low, ours.speedup.high) == (3.5, 2.0, 5.0)
    assert (ours.runs, ours.memory_ratio) == (3, 0.8)
    verdicts = summary.judge(list(merged.values()))
    found = {(v.aim, v.wanted): v.verdict for v in verdicts}
    assert found["FLOPS, warm (ours)", ">= 3x eager"] == "met"
    assert found["top-k (ours)", ">= 1.5x eager"] == "not measured"
    assert found["every loss, above 1e5 elements", ">= 1x eager"] == "met"
    target = tmp_path / "out.csv"
    assert summary.main([*map(str, paths), "--output", str(target)]) == 0
    assert "3.5 (2-5)" in target.with_suffix(".md").read_text()
    with target.open() as lines:
        assert len(list(csv.DictReader(lines))) == 2


def test_a_slower_loss_breaks_the_rule_for_all(tmp_path: Path):
    merged = summary.merge([read(_table(tmp_path / "slow.csv", 0.9))])
    verdicts = [v for v in summary.one_rule_for_all(merged) if v.wanted == ">= 1x eager"]
    assert [v.verdict for v in verdicts] == ["missed", "missed"]


def test_a_file_of_another_machine_is_refused(tmp_path: Path):
    path = _table(tmp_path / "a.csv", 2.0)
    with pytest.raises(ValueError, match=r"device is '.*' there and 'another' now; .*--fresh"):
        Table(path, {**COMMON, "device": "another"})
    assert Table(path, {**COMMON, "device": "another"}, fresh=True).rows == []


def test_rows_that_are_there_are_not_written_twice(tmp_path: Path):
    path = _table(tmp_path / "a.csv", 2.0)
    table = Table(path, COMMON)
    assert table.present("flops", "B=256 V=30522 5%") == {"eager", "ours"}
    assert table.add([_result("ours", 2.0, 80.0)]) == []
    assert len(read(path)) == 2
    other = Table(path, {**COMMON, "allocator": "default"})
    assert other.present("flops", "B=256 V=30522 5%") == set()


def test_exponents_are_slopes():
    slope, fit = exponent([1, 2, 4, 8], [3, 12, 48, 192])
    assert slope == pytest.approx(2)
    assert fit == pytest.approx(1)


def test_axes_contain_their_base():
    for axis in AXES:
        assert axis.name in axis.base
        assert len(axis.values) >= 3
        assert family(axis.loss)


def test_a_prediction_scales_with_the_devices():
    device = Device("d", 1e12, 1e11)
    one, eight = predict(device, 1), predict(device, 8)
    assert one[0].flops / eight[0].flops == pytest.approx(8)
    assert one[0].seconds > eight[0].seconds
    # 2 * 768 * (4096 * 512 * 0.75 * 250002 + 2 * active)
    assert one[0].flops == pytest.approx(6.04e14, rel=0.02)


def test_gradient_caching_holds_less_and_has_the_plain_gradient():
    pairs = [caching.Case(8, None), caching.Case(8, 2)]
    plain, cached = caching.measure(pairs, rounds=1, vocab_size=300)
    assert cached.peak_bytes < plain.peak_bytes
    assert plain.gradient_difference == 0
    assert 0 < cached.gradient_difference < 1e-5


def test_the_command_measures_resumes_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted kernels take their time
    output = tmp_path / "run.csv"
    command = [sys.executable, "-m", "benchmarks", "--suite", "tiny", "--only", "margin_mse,flops"]
    command += ["--no-compile", "--allocator", "default", "--no-plots", "--output", str(output)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = read(output)
    assert {row["loss"] for row in rows} == {"margin_mse", "flops"}
    assert {row["status"] for row in rows} == {"ok"}
    assert all(float(row["copy_gb_per_s"]) > 0 for row in rows)
    pictures = draw(output)
    assert {picture.name for picture in pictures} == {"run-margin_mse.svg", "run-flops.svg"}
    assert "ours" in pictures[0].read_text()
    before = output.read_text()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert output.read_text() == before
