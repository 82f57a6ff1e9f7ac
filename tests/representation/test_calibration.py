import pytest
import torch

from sparse_losses import SparsityController, SpladeObjective
from sparse_losses.functional import calibrate_threshold, splade_pool


def _texts(rows, vocab, generator):
    logits = torch.randn(rows, vocab, generator=generator) * torch.rand(vocab, generator=generator)
    return logits.relu().log1p()


@pytest.mark.parametrize("target", [1, 7.5, 32, 64, 100.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_keeps_the_target(target, dtype):
    x = _texts(40, 500, torch.Generator().manual_seed(0)).to(dtype)
    t = calibrate_threshold(x, target)
    assert (x.expm1() > t).sum().item() == round(target * 40)
    assert calibrate_threshold(x.reshape(8, 5, 500), target) == t


def test_other_texts_keep_the_target_within_a_tenth():
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(2000, generator=generator)
    seen, others = (
        (torch.randn(200, 2000, generator=generator) * spread).relu().log1p() for _ in range(2)
    )
    t = calibrate_threshold(seen, 32)
    assert (others.expm1() > t).sum(1).double().mean().item() == pytest.approx(32, rel=0.1)


def test_threshold_is_in_the_middle_of_the_gap():
    logits = torch.tensor([[8.0, 5.0, 3.0, -1.0]], dtype=torch.float64)
    assert calibrate_threshold(logits.relu().log1p(), 1) == pytest.approx(6.5)
    assert calibrate_threshold(logits.relu().log1p(), 2) == pytest.approx(4.0)
    assert calibrate_threshold(logits.relu().log1p(), 3) == 0.0


@pytest.mark.parametrize(("target", "kept"), [(1, 1), (2, 1), (3, 4), (4, 4), (5, 5)])
def test_equal_entries_are_kept_or_dropped_together(target, kept):
    logits = torch.tensor([[8.0, 3.0, 3.0, 3.0, 1.0]], dtype=torch.float64)
    assert calibrate_threshold(torch.full((2, 4), 2.0).log1p(), 1) == 0.0
    t = calibrate_threshold(logits.log1p(), target)
    assert (logits > t + 1e-12).sum().item() == kept


@pytest.mark.parametrize(
    ("x", "target", "message"),
    [
        (torch.ones(2, 4), 4.5, r"`target_active` of at most 4, the mean that are active, got 4.5"),
        (torch.ones(2, 4), 0, "`target_active`"),
        (torch.ones(4), 1, r"shape \[..., V\], got \[4\]"),
        (torch.full((2, 4), torch.nan), 1, "finite logits, got nan"),
        (torch.ones(0, 4), 1, "expected enough texts to keep at least one dimension, got 0"),
    ],
)
def test_wrong_input_is_an_error(x, target, message):
    with pytest.raises(ValueError, match=message):
        calibrate_threshold(x, target)


@pytest.mark.parametrize("layout", ["list", "csr"])
def test_only_dense_tensors_are_calibrated_and_observed(layout):
    x = torch.ones(2, 4)
    x = x.tolist() if layout == "list" else x.to_sparse_csr()
    controller = SparsityController(SpladeObjective({"document_flops": 1.0}), target_active=2)
    for call in (lambda: calibrate_threshold(x, 1), lambda: controller.observe(x)):
        with pytest.raises(TypeError, match=r"expected `activations` to be .*, got .*(list|csr)"):
            call()


def test_an_activation_whose_logit_overflows_is_an_error():
    with pytest.raises(ValueError, match=r"`activations` .*finite logits, got 900"):
        calibrate_threshold(torch.tensor([[800.0, 900.0, 1.0]]), 1)
    x = torch.tensor([[709.7, 709.5, 1.0]], dtype=torch.float64)
    t = calibrate_threshold(x, 1)
    assert (x.expm1() > t).sum() == 1


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_threshold_is_in_units_of_the_logits(activation):
    logits = torch.tensor([[1.0, 2.0, 0.0], [4.0, 6.0, 8.0]], dtype=torch.float64)
    weights = splade_pool(logits[:, None], torch.ones(2, 1), activation=activation)
    t = calibrate_threshold(weights, 1.5, activation=activation)
    assert t == pytest.approx(3.0, rel=1e-12)
    kept = splade_pool(logits[:, None], torch.ones(2, 1), activation=activation, threshold=t)
    assert torch.equal(kept, weights.where(logits > 3, 0.0))
    with pytest.raises(ValueError, match="`activation`"):
        calibrate_threshold(weights, 1.5, activation="identity")


def test_more_equal_entries_than_are_held_are_kept_together():
    x = torch.cat([torch.full((2, 10), 1.0), torch.full((2, 100), 0.5)], 1).double()
    assert calibrate_threshold(x.log1p(), 1) == pytest.approx(0.75)
    assert calibrate_threshold(x[:, :10].log1p(), 1) == 0.0
