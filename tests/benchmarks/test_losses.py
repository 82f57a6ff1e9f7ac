"""Every loss has its sizes, inputs and aims, and every variant computes the plain formula."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sparse_losses
from benchmarks.losses import NAMES, benchmark, cases
from benchmarks.run import available
from benchmarks.run.check import check, check_rounded
from benchmarks.schema import DTYPES, Case, Maker, Variant, case_name, ours, ways

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
STEMS = {p.stem for p in (ROOT / "sparse_losses/losses").glob("*.py") if not p.stem.startswith("_")}
BESIDE = {"splade_pool", "splade_head", "end_to_end", "objective"}
TINY = cases("tiny")


def label(case: Case) -> str:
    return f"{case.loss} {case.name}"


def with_dtype(case: Case, dtype: str) -> Case:
    return replace(case, sizes={**case.sizes, "dtype": dtype})


def of_the_package(case: Case) -> list[Variant]:
    """Return the plain formula and ours, but for Triton's, which has no fp64."""
    found = available.variants(case, "cpu")
    return [variant for variant in found if variant.kind != "peer" and not variant.is_triton]


@pytest.mark.parametrize("suite", ["tiny", "quick", "full", "gpu"])
def test_every_loss_has_cases_in_every_suite(suite: str):
    found = [(case.loss, case.name) for case in cases(suite)]
    assert {loss for loss, _ in found} == STEMS | BESIDE == set(NAMES)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("loss", NAMES)
def test_every_loss_is_measured_by_default_and_compiled(loss: str):
    each = benchmark(loss)
    assert each.loss == loss
    found = {variant.name: variant for variant in Case(each, each.tiny[0]).variants()}
    assert [*found][:4] == ["eager", "torch.compile", "ours", "ours, compiled"]
    assert found["torch.compile"].compiled
    assert found["ours, compiled"].compiled
    assert len({case.elements for case in cases("full", [loss])}) >= 3


def test_every_way_of_the_package_is_a_variant():
    found = {
        loss: {variant.name for case in cases("full", [loss]) for variant in case.variants()}
        for loss in ("info_nce", "splade_head")
    }
    wanted = {"definition", "direct", "blocks", "nonzeros", "CSR input"}
    assert {f"ours, {way}" for way in wanted} <= found["info_nce"]
    wanted = {"definition", "packed", "tiles", "triton", "sparse_grad"}
    assert {f"ours, {way}" for way in wanted} <= found["splade_head"]
    for stem in STEMS:
        function = getattr(sparse_losses, f"{stem}_loss")
        names = {v.name for case in cases("full", [stem]) for v in case.variants()}
        named = {f"ours, {way}" for way in ways(function) if way != "ring"}
        assert named <= names, stem


IMPLEMENTATIONS = (SimpleNamespace(name="blocks"), SimpleNamespace(name="triton"))


def _loss(x: torch.Tensor, impl: str = "auto") -> torch.Tensor:
    return torch.tensor({"auto": 0, "definition": 1, "blocks": 2, "triton": 3}[impl])


def test_ways_are_read_from_the_table_of_the_module():
    assert ways(_loss) == ("blocks", "triton")
    assert ways(torch.relu) == ()
    found = {v.name: v for v in ours(_loss, {"blocks": lambda sizes: sizes["B"] > 2})}
    names = ["ours", "ours, compiled", "ours, definition", "ours, blocks", "ours, triton"]
    assert [*found] == names
    x = torch.ones(1)
    assert [int(variant.call(x)) for variant in found.values()] == [0, 0, 1, 2, 3]
    assert not found["ours, blocks"].when({"B": 2})
    assert [name for name, variant in found.items() if variant.is_triton] == ["ours, triton"]


def test_every_aim_names_a_variant_and_a_case_of_the_full_suite():
    count = 0
    for loss in NAMES:
        full = {case.name: case for case in cases("full", [loss])}
        for aim in benchmark(loss).aims:
            names = {variant.name for variant in full[case_name(aim.sizes)].variants()}
            assert {aim.variant, aim.other} <= names, aim
            count += 1
        for sizes in benchmark(loss).crossover:
            assert case_name(sizes) in full
    assert count > 20
    assert {case.loss for case in cases("aims")} < set(NAMES)


def test_the_suite_for_a_gpu_begins_with_what_has_most_to_show():
    found = cases("gpu")
    assert {case.loss for case in found[:12]} <= {"splade_head", "info_nce", "nws", "distillation"}
    sizes = {(case.loss, case.name) for case in found}
    assert ("info_nce", "B=65536 D=768 bf16") in sizes
    assert ("splade_head", "B=32 S=256 V=250002 H=768 1% mask=67% bf16") in sizes
    assert all(case.sizes["dtype"] in DTYPES for case in found)


def test_a_loss_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match=r"no such loss: flop; there are .*flops"):
        cases("quick", ["flop", "flops"])


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
@pytest.mark.parametrize("case", TINY, ids=label)
def test_every_variant_computes_the_plain_formula(case: Case):
    check(case, of_the_package(case), Maker(CPU, torch.float64))


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("case", TINY, ids=label)
def test_no_variant_is_further_from_fp64_than_the_formula(case: Case, dtype: str):
    case = with_dtype(case, dtype)
    check_rounded(case, of_the_package(case), Maker(CPU))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_nor_is_the_kernel_of_the_head(dtype: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter was not chosen when the kernel was defined")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (case,) = cases("tiny", ["splade_head"])
    case = with_dtype(case, dtype)
    plain, *others = available.variants(case, "cpu")
    (kernel,) = [variant for variant in others if variant.is_triton]
    check_rounded(case, [plain, kernel], Maker(CPU))


def test_without_a_gpu_only_the_interpreter_runs_the_kernel_and_tiny_cases_only(
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = [v for case in cases("tiny", ["splade_head"]) for v in available.variants(case, "cpu")]
    assert found
    assert not [variant for variant in found if variant.is_triton]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert [available.runs_triton("cpu", suite) for suite in ("tiny", "quick")] == [True, False]
    assert available.runs_triton("cuda", "gpu")


# Inputs.


def test_zipf_vectors_have_the_wanted_density():
    for density in (0.5, 0.05, 0.005):
        x = Maker(CPU).zipf(64, 5000, density)
        assert (x != 0).double().mean().item() == pytest.approx(density, rel=0.1)
        assert x.min() == 0
        columns = (x != 0).double().mean(0)
        assert columns.max() > 1.5 * density


def test_masks_have_the_wanted_share():
    mask = Maker(CPU).mask(4000, 256, 0.67)
    assert mask.double().mean().item() == pytest.approx(0.67, abs=0.01)
    assert mask.sum(1).min() >= 1


def test_the_bias_leaves_the_wanted_share_active():
    sizes = {"B": 4, "S": 16, "V": 3000, "H": 32, "density": 0.05}
    inputs = benchmark("splade_head").inputs(sizes, Maker(CPU))
    inputs.pop("upstream")
    x = benchmark("splade_head").plain(**inputs)
    assert (x > 0).double().mean().item() == pytest.approx(0.05, rel=0.1)


def test_half_precision_is_rounded_from_single():
    sizes = {"B": 64, "V": 5000, "density": 0.005, "dtype": "bf16"}
    case = Case(benchmark("flops"), sizes)
    x = case.inputs(Maker(CPU))["activations"]
    assert x.dtype == torch.bfloat16
    assert x.requires_grad
    assert (x != 0).double().mean().item() == pytest.approx(0.005, rel=0.1)
    double = case.inputs(Maker(CPU, torch.float64))["activations"]
    assert double.dtype == torch.float64


# Floors.


def test_the_floor_reads_inputs_and_writes_gradients_once():
    case = Case(benchmark("flops"), {"B": 4, "V": 50, "density": 0.4})
    inputs = case.inputs(Maker(CPU))
    assert case.floor(inputs, backward=False) == (4 * 4 * 50, 0)
    assert case.floor(inputs, backward=True) == (2 * 4 * 4 * 50, 0)
    case = Case(benchmark("splade_pool"), {"B": 3, "S": 5, "V": 20, "density": 0.3})
    inputs = case.inputs(Maker(CPU))
    logits, mask, pooled = 4 * 3 * 5 * 20, 8 * 3 * 5, 4 * 3 * 20
    assert case.floor(inputs, backward=False)[0] == logits + mask + pooled
    assert case.floor(inputs, backward=True)[0] == 2 * logits + mask + 2 * pooled


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
def test_products_are_counted_where_both_entries_are_there():
    dense = Case(benchmark("info_nce"), {"B": 5, "D": 8})
    assert dense.floor(dense.inputs(Maker(CPU)), backward=False)[1] == 2 * 5 * 5 * 8
    assert dense.floor(dense.inputs(Maker(CPU)), backward=True)[1] == 3 * 2 * 5 * 5 * 8
    sparse = Case(benchmark("info_nce"), {"B": 6, "V": 60, "density": 0.2})
    inputs = sparse.inputs(Maker(CPU))
    pairs = ((inputs["anchor"] != 0).double() @ (inputs["positive"] != 0).double().T).sum()
    assert sparse.floor(inputs, backward=False)[1] == 2 * pairs
    (csr,) = [v for v in sparse.variants() if v.name == "ours, CSR input"]
    assert sparse.floor(csr.prepare(inputs), backward=False)[1] == 2 * pairs
