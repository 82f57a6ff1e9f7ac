"""Every loss has its sizes and inputs, and every variant computes the plain formula."""

from dataclasses import replace

import pytest
import torch

import sparse_losses
from benchmarks.losses import NAMES, benchmark, cases
from benchmarks.run import available
from benchmarks.run.check import check
from benchmarks.schema import DTYPES, Case, Maker, implementations
from tests.test_house import STEMS

CPU = torch.device("cpu")
BESIDE = {"splade_pool", "splade_head", "end_to_end", "objective"}


@pytest.mark.parametrize("suite", ["tiny", "quick", "full", "gpu"])
def test_every_loss_has_cases_in_every_suite(suite: str):
    names = [(case.loss, case.name) for case in cases(suite)]
    assert {(case.loss, case.name) for case in cases("aims")} <= set(names) or suite != "full"
    assert {loss for loss, _ in names} == {*STEMS} | BESIDE == set(NAMES)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("loss", NAMES)
def test_every_loss_is_measured_by_default_and_compiled(loss: str):
    each = benchmark(loss)
    assert each.loss == loss
    variants = {variant.name: variant for variant in Case(each, each.tiny[0]).variants()}
    assert [*variants][:4] == ["eager", "torch.compile", "ours", "ours, compiled"]
    assert variants["torch.compile"].compiled
    assert variants["ours, compiled"].compiled
    assert len({case.elements for case in cases("full", [loss])}) >= 3


def test_every_implementation_is_a_variant():
    for stem in (*STEMS, "splade_head", "splade_pool"):
        function = getattr(sparse_losses, stem if stem in BESIDE else f"{stem}_loss")
        names = {v.name for case in cases("full", [stem]) for v in case.variants()}
        assert {f"ours, {name}" for name in implementations(function)} <= names, stem
    assert implementations(sparse_losses.info_nce_loss)
    assert implementations(sparse_losses.n_pair_loss) == ()


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
@pytest.mark.parametrize("dtype", ["fp64", *DTYPES])
@pytest.mark.parametrize("case", cases("tiny"), ids=lambda case: f"{case.loss} {case.name}")
def test_every_variant_computes_the_plain_formula(case: Case, dtype: str):
    """In fp64; in another dtype none is less accurate."""
    maker = Maker(CPU, torch.float64)
    if dtype != "fp64":
        case, maker = replace(case, sizes={**case.sizes, "dtype": dtype}), Maker(CPU)
    check(case, [v for v in available.variants(case) if v.kind != "peer"], maker)
