"""Products in bf16 that tell the packed head where to look; what it returns is of fp32."""

import numpy as np
import pytest
import torch

from benchmarks.run.launches import Launches
from sparse_losses.fast import head_packed
from sparse_losses.functional import splade_head

BATCH, LENGTH, WIDTH, VOCAB = 3, 70, 24, 700


@pytest.fixture(autouse=True)
def halves(monkeypatch):
    """On every CPU and for short states, for which products in bf16 would not be used."""
    monkeypatch.setattr(head_packed, "bf16_pays", lambda width: True)


def formula(tensors: dict) -> torch.Tensor:
    """The definition in fp64."""
    exact = {name: None if x is None else x.double() for name, x in tensors.items()}
    return splade_head(**exact, impl="definition")


def texts(kind: str, seed: int = 0) -> dict:
    """Hidden states in bf16, and a head with about one entry in fifty active."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, LENGTH, WIDTH, generator=rng)
    weight = torch.randn(VOCAB, WIDTH, generator=rng)
    if kind == "near ties":  # the positions of a text differ by less than bf16 tells in a score
        hidden = hidden[:, :1] + 2**-7 * hidden.sign()
    if kind == "misleading":  # equal scores but for what bf16 rounds off, by position another sum
        hidden, weight = hidden - hidden.mean(-1, True) + 1 / 48, 1 + weight / 256
    if kind == "long and short states":
        hidden = hidden * torch.logspace(-3, 0, LENGTH)[:, None]
    hidden = (hidden * {"huge": 1e16, "tiny": 1e-30}.get(kind, 1.0)).bfloat16()
    weight = weight * {"huge": 1e16, "tiny": 1e-6}.get(kind, 1.0)
    mask = torch.ones(BATCH, LENGTH)
    mask[1, 66:] = 0
    highest = (hidden.double() @ weight.double().T).where(mask[..., None] > 0, -torch.inf).amax(1)
    bias = -highest.amax(0).quantile(0.5 if kind == "misleading" else 0.97)
    bias = bias.float().repeat(VOCAB)
    if kind == "misleading":
        bias[torch.arange(VOCAB) % 200 != 100] = -1e3
    gate = torch.rand(BATCH, VOCAB, generator=rng) if kind == "gate" else None
    return {"hidden": hidden, "weight": weight, "bias": bias, "attention_mask": mask, "gate": gate}


KINDS = ["plain", "near ties", "misleading", "long and short states", "huge", "tiny", "gate"]


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_those_of_fp32_though_products_are_in_bf16(kind, layout):
    tensors = texts(kind)
    with Launches("cpu") as seen:
        actual = splade_head(**tensors, layout=layout, impl="packed")
    if layout == torch.sparse_csr:
        assert (actual.values() > 0).all()
        # Where they are dense, an operator of its own hides its products.
        assert torch.bfloat16 in seen.flops
        assert kind in ("tiny", "near ties") or torch.float32 not in seen.flops
    tensors["gate"] = torch.ones(BATCH, VOCAB) if tensors["gate"] is None else tensors["gate"]
    hidden, weight, bias, mask, gate = (x.double().numpy() for x in tensors.values())
    expected, size = np.zeros((2, BATCH, VOCAB))
    for i, j in np.ndindex(BATCH, VOCAB):
        terms = hidden[i][mask[i] > 0] * weight[j]
        expected[i, j] = gate[i, j] * max(terms.sum(1).max() + bias[j], 0.0)
        size[i, j] = np.abs(terms).sum(1).max() + abs(bias[j])
    assert 0.001 < (expected > 0).mean() < 0.05
    actual = actual.to_dense().double().numpy()
    error = 2**-22 * size / (1 + expected) + 1e-6 * np.log1p(expected)
    assert (np.abs(actual - np.log1p(expected)) <= error).all()


@pytest.mark.parametrize("kind", KINDS[:4])
def test_gradient_goes_to_the_position_of_the_maximum(kind):
    tensors = texts(kind)
    hidden = tensors["hidden"].requires_grad_()
    upstream = torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(1))
    (splade_head(**tensors, impl="packed") * upstream).sum().backward()
    exact = hidden.detach().double().requires_grad_()
    (formula(tensors | {"hidden": exact}) * upstream).sum().backward()
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=2**-8, atol=1e-4)


def test_no_entry_is_lost_where_all_roundings_add_up():
    weight, bias = torch.full((2000, 257), 1 + 2**-8), torch.full((2000,), -1e3)
    hidden, bias[7] = torch.ones(1, 64, 257, dtype=torch.bfloat16), -257.8
    value = splade_head(hidden, weight, bias, impl="packed")[0, 7].item()
    assert value == pytest.approx(np.log1p(257 + 257 / 256 - 257.8), rel=1e-3)


def test_many_active_entries_short_texts_and_fp32_are_multiplied_in_fp32():
    tensors = texts("plain")
    for arguments, dtypes in (
        (tensors | {"bias": torch.zeros(VOCAB)}, {torch.bfloat16, torch.float32}),  # many active
        (tensors | {"hidden": tensors["hidden"][:, :40], "attention_mask": None}, {torch.float32}),
        (tensors | {"hidden": tensors["hidden"].float()}, {torch.float32}),
    ):
        with Launches("cpu") as seen:
            actual = splade_head(**arguments, layout=torch.sparse_csr, impl="packed")
        assert {*seen.flops} == dtypes
        expected = formula(arguments).float()
        torch.testing.assert_close(actual.to_dense(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_show_where_they_belong(name, value):
    tensors = texts("plain")
    tensors[name].view(-1)[5] = value
    actual = splade_head(**tensors, impl="packed")
    expected = formula(tensors).float()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
