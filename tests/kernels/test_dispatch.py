"""Which implementation runs, what is said where none can, and what all operators share."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from sparse_losses import kernels
from sparse_losses.kernels._operators import only, scale_, with_gradients

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_measurement_auto_is_torch():
    x = torch.zeros(4)
    assert not kernels.uses_triton("info_nce", "auto", x, elements=1 << 60)
    assert not kernels.uses_triton("info_nce", "torch", x, elements=1 << 60)


def test_every_entry_of_the_table_names_an_operation():
    stems = {path.stem for path in (ROOT / "sparse_losses" / "kernels").glob("[a-z]*.py")}
    assert set(kernels.AHEAD) <= stems


def test_an_entry_of_the_table_is_what_auto_goes_by(monkeypatch):
    monkeypatch.setattr(kernels, "AHEAD", {"head": {(9, 0): 100}})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda")
    assert kernels.is_ahead("head", device, 100)
    assert not kernels.is_ahead("head", device, 99)
    assert not kernels.is_ahead("nws", device, 100)
    assert not kernels.is_ahead("head", torch.device("cpu"), 100)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not kernels.is_ahead("head", device, 100)


@pytest.mark.parametrize("impl", ["cuda", "Triton", True, None])
def test_an_unknown_implementation_is_an_error(impl):
    with pytest.raises(
        ValueError, match=r"'auto', 'torch' or 'triton', got " + re.escape(repr(impl))
    ):
        kernels.check_impl(impl)


def test_what_is_missing_is_said(monkeypatch):
    x = torch.zeros(4)

    def choose(*tensors, **options):
        return kernels.uses_triton("head", "triton", *tensors, elements=1, **options)

    assert choose(x)
    with pytest.raises(ValueError, match=r"fp32, fp16 or bf16 tensors, got torch\.float64"):
        choose(x, None, x.double())
    with pytest.raises(ValueError, match=r"expected dense tensors, got torch\.sparse_csr"):
        choose(torch.eye(3).to_sparse_csr())
    with pytest.raises(ValueError, match='expected a warm day with impl="triton"'):
        choose(x, needs={"a cold day": True, "a warm day": False})
    with pytest.raises(ValueError, match=r"expected no torch\.func transform"):
        torch.func.vmap(lambda row: row * choose(row))(torch.zeros(2, 2))
    monkeypatch.setattr(kernels, "_IS_INTERPRETED", False)
    with pytest.raises(ValueError, match=r"compute capability 8\.0 or newer, got cpu"):
        choose(x.cpu())
    monkeypatch.setattr(kernels, "_IS_INSTALLED", False)
    with pytest.raises(ValueError, match=r"pip install 'sparse-losses\[kernels\]'"):
        choose(x)


def test_the_extra_that_the_error_names_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["kernels"][0].startswith("triton")


def test_auto_falls_back_where_the_kernel_cannot_run(monkeypatch):
    monkeypatch.setattr(kernels, "is_ahead", lambda *_: True)
    assert kernels.uses_triton("head", "auto", torch.zeros(4), elements=1)
    assert not kernels.uses_triton("head", "auto", torch.zeros(4).double(), elements=1)
    no = {"a warm day": False}
    assert not kernels.uses_triton("head", "auto", torch.zeros(4), elements=1, needs=no)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 700)], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.0, -2.5, torch.nan])
def test_scaling_in_place(dtype, shape, factor):
    x = torch.randn(shape).to(dtype)
    wanted = (x.float() * factor).to(dtype)
    found = scale_(x, torch.tensor(factor))
    assert found is x
    # The interpreter cuts bits off where a GPU rounds to bf16.
    rtol = 2.0**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(x, wanted, rtol=rtol, atol=0, equal_nan=True)


def test_scaling_by_one_leaves_even_a_nan_alone():
    x = torch.tensor([torch.nan, torch.inf, 1.0])
    assert scale_(x, torch.ones(())).isnan().tolist() == [True, False, False]
    assert scale_(None, torch.ones(())) is None
    strided = torch.ones(4, 4)[:, ::2]
    assert scale_(strided, torch.tensor(3.0)).eq(3).all()


@torch.library.custom_op("sparse_losses_tests::twice_the_sum", mutates_args=())
def _twice(x: torch.Tensor, y: torch.Tensor, needs: list[bool], power: int) -> list[torch.Tensor]:
    gradients = [
        torch.full_like(t, 2.0) if n else t.new_empty(0) for t, n in zip((x, y), needs, strict=True)
    ]
    return [2 * (x.sum() + y.sum()) * power, *gradients]


@_twice.register_fake
def _(x, y, needs, power):
    sized = [
        torch.empty_like(t) if n else t.new_empty(0) for t, n in zip((x, y), needs, strict=True)
    ]
    return [x.new_empty(()), *sized]


with_gradients(_twice, 2)


def test_an_operator_brings_its_gradients_into_a_compiled_graph():
    def value(x, y):
        found, *gradients = _twice(x, y, [x.requires_grad, y.requires_grad], 1)
        assert len(only([True, False], gradients)) == 2
        return 3 * found

    x, y = torch.randn(3, requires_grad=True), torch.randn(2)
    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")
    compiled(x, y).backward()
    assert x.grad.eq(6).all()
    torch.library.opcheck(_twice, (x, y, [True, False], 1))
