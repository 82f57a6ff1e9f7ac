"""ActivationFrequency: the shares are those of a loop, however the texts come; DF-FLOPS' weight."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import ActivationFrequency
from tests.strategies import seeds

V = 6
sizes = st.lists(st.integers(0, 4), min_size=1, max_size=5)


def batches(seed: int, rows: list[int]) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.normal(size=(n, V)) * (rng.random((n, V)) < 0.7)) for n in rows]


def loop(texts: list[torch.Tensor], decay: float = 1.0) -> list[float]:
    """The share of active texts, each batch weighing less than the next."""
    weights = [decay**age for age in reversed(range(len(texts)))]
    total = math.fsum(w * len(x) for w, x in zip(weights, texts, strict=True))
    shares = []
    for j in range(V):
        active = [sum(1 for row in x.tolist() if row[j] > 0) for x in texts]
        count = math.fsum(w * n for w, n in zip(weights, active, strict=True))
        shares.append(count / total if total else 0.0)
    return shares


def counted(*texts: torch.Tensor, **options: float) -> ActivationFrequency:
    counter = ActivationFrequency(V, **options)
    for batch in texts:
        counter.update(batch)
    return counter


@given(seeds, sizes, st.none() | st.floats(0.05, 0.999))
def test_frequencies_equal_a_loop_over_texts(seed, rows, decay):
    texts = batches(seed, rows)
    frequency = counted(*texts, decay=decay).frequency()
    sparse = [x.to_sparse_csr() for x in texts if len(x)]
    again = counted(*sparse, decay=decay).frequency()
    assert len(sparse) < len(texts) or torch.equal(again, frequency)
    assert frequency.dtype == torch.float32
    np.testing.assert_allclose(frequency, loop(texts, decay or 1.0), rtol=1e-5)
    assert (frequency <= 1).all()


@pytest.mark.parametrize("decay", [None, 0.5])
def test_a_text_with_a_nan_does_not_count(decay):
    """It would make the lists look short, and the penalty weak, after a step that overflowed."""
    first, text = batches(3, [3, 4])
    broken = torch.cat([text, text[:2]])
    broken[4:, 1] = torch.nan
    expected = counted(first, text, decay=decay).frequency()
    for x in (broken, broken.to_sparse_csr()):
        assert torch.equal(counted(first, x, decay=decay).frequency(), expected)


@given(seeds, sizes)
def test_exact_counts_do_not_depend_on_batches_and_counters(seed, rows):
    texts = batches(seed, rows)
    once = counted(torch.cat(texts)).frequency()
    assert torch.equal(counted(*texts).frequency(), once)
    merged = counted(*texts[:1]).merge(counted(*texts[1:]))
    assert torch.equal(merged.frequency(), once)
    assert torch.equal(counted(*texts).all_reduce().frequency(), once), "no process group"


@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 10.0), (0.3, 2.5), (0.01, 1.0)])
def test_the_penalty_is_the_formula_of_df_flops(alpha, beta):
    counter, texts = ActivationFrequency(V), torch.zeros(1000, V)
    shares = [0, 1, 20, 100, 640, 1000]
    for j, share in enumerate(shares):
        texts[:share, j] = 1.0
    counter.update(texts)
    expected = [
        1 / (1 + ((n / 1000) ** (math.log(2) / math.log(alpha)) - 1) ** beta) if n else 0.0
        for n in shares
    ]
    penalty = counter.penalty(alpha=alpha, beta=beta)
    np.testing.assert_allclose(penalty, expected, rtol=2e-4, atol=1e-30)
    assert (penalty.diff() >= 0).all()
    assert alpha != 0.1 or penalty[3].item() == pytest.approx(0.5)


@pytest.mark.parametrize("decay", [None, 0.9])
def test_it_resumes_from_its_state(decay):
    first, second = batches(0, [3, 4])
    counter = counted(first, decay=decay)
    resumed = ActivationFrequency(V, decay=decay)
    resumed.load_state_dict(counter.state_dict())
    for each in (counter, resumed):
        each.update(second)
    assert torch.equal(counter.frequency(), resumed.frequency())
    assert repr(counter) == f"ActivationFrequency(vocab_size=6, decay={decay})"


def test_counting_waits_for_no_device_and_keeps_no_graph():
    counter = ActivationFrequency(V).to("meta")
    x = torch.empty(3, V, device="meta", requires_grad=True)
    counter.update(x)  # a read of a value would raise
    assert counter.all_reduce().penalty().shape == (V,)
    leaf = torch.rand(3, V, requires_grad=True)
    assert not counted(leaf).frequency().requires_grad
