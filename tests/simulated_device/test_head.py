"""The head on the simulated accelerator: no wait, few launches, halves multiplied as halves."""

import math

import pytest
import torch

from benchmarks.losses.splade_head import plain
from sparse_losses import SpladeEncoder
from sparse_losses._core import products
from sparse_losses.fast import head_tiles
from sparse_losses.functional import splade_head
from tests.representation import tiny_models
from tests.representation.test_head import EXACT, close, example, gradients, watch, weigh, with_gate
from tools import simulated_device
from tools.simulated_device import counting, shape_only

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)
simulated_device.start()


def there(tensors: dict) -> dict:
    return {name: None if x is None else x.detach().to("sim") for name, x in tensors.items()}


def step(function, tensors: dict, **options):
    """Count one forward and backward pass of tensors that are on the device."""
    leaves = watch(tensors)
    with counting() as counts:
        out = function(**tensors, **options)
        outputs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        del out, outputs
    return counts, leaves


# Launches and waits

OPTIONS = {
    "defaults": {},
    "no mask": {"attention_mask": None},
    "no bias": {"bias": None},
    "logits": {"return_logits": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiles", [1, 3])
def test_at_most_16_launches_a_tile_and_24_besides_and_no_wait(options, dtype, tiles, monkeypatch):
    monkeypatch.setattr(head_tiles, "BYTES", 15 * 4 * 8)  # of 15 positions, fp32 scores
    tensors = there(example(dtype, vocab=8 * tiles))
    changed = {name: options[name] for name in options if name in tensors}
    flags = {name: value for name, value in options.items() if name not in tensors}
    products.returns_fp32(tensors["hidden"].device, dtype)  # asks the device once a process
    counts, _ = step(splade_head, tensors | changed, **flags)
    of_the_mask = int("attention_mask" not in changed)
    assert counts.names["max"] == tiles + of_the_mask
    assert counts.launches <= 16 * tiles + 24
    assert counts.waits == 0


def test_a_tile_makes_11_launches(monkeypatch):
    monkeypatch.setattr(head_tiles, "BYTES", 15 * 4 * 8)
    launches = [
        step(splade_head, there(example(torch.float32, vocab=vocab)))[0].launches
        for vocab in (8, 40)
    ]
    assert launches[1] - launches[0] == 4 * 11


def test_a_gate_adds_19_launches():
    tensors = there(with_gate(example(torch.float32)))
    gated, _ = step(splade_head, dict(tensors))
    alone, _ = step(splade_head, {name: x for name, x in tensors.items() if name != "gate"})
    assert gated.launches - alone.launches == 19


def test_gate_logits_autocast_and_inference_do_not_wait_either():
    tensors = there(with_gate(example(torch.float32)))
    for autocast in (False, True):
        with torch.autocast("sim", dtype=torch.bfloat16, enabled=autocast):
            counts, _ = step(splade_head, dict(tensors), return_logits=True)
            assert counts.waits == 0
            with torch.no_grad(), counting() as counts:
                splade_head(**tensors)
            assert counts.waits == 0
            assert counts.names["amax"] == 1  # a maximum alone, without its place


# Precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_halves_are_multiplied_as_halves_and_their_scores_are_fp32(dtype, autocast):
    tensors = with_gate(example(dtype))
    exact_tensors = {
        name: x.double() if x.is_floating_point() else x for name, x in tensors.items()
    }
    exact_leaves = watch(exact_tensors)
    exact = EXACT(**exact_tensors)[0]
    expected = gradients(weigh(exact), exact_leaves)
    if autocast:
        tensors = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
    tensors = there(tensors)
    leaves = watch(tensors)
    with counting() as counts:
        with torch.autocast("sim", dtype=dtype, enabled=autocast):
            out = splade_head(**tensors)
        found = gradients(weigh(out.cpu()), leaves)
    assert set(counts.flops) == {dtype}
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-6, atol=1e-7)
    eps = torch.finfo(dtype).eps
    for name, gradient in found.items():
        assert gradient.dtype == leaves[name].dtype
        largest = expected[name].abs().max().item()
        error = (gradient.cpu().double() - expected[name]).abs().max().item()
        assert error <= eps * largest


def test_a_device_that_returns_halves_alone_still_multiplies_halves(monkeypatch):
    tensors = there(example(torch.bfloat16))
    monkeypatch.setattr(head_tiles, "returns_fp32", lambda device, dtype: False)
    counts, leaves = step(splade_head, dict(tensors))
    assert set(counts.flops) == {torch.bfloat16}
    rounded = splade_head(**tensors).cpu()
    exact = splade_head(**{name: x.cpu() for name, x in tensors.items()})
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=1e-2)
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values() if leaf.grad is not None)


# Ties, masks


@pytest.mark.parametrize("impl", ["auto", "definition"])
def test_a_masked_position_has_no_gradient_whatever_stands_there(impl):
    tensors = example(torch.float32)
    mask = tensors["attention_mask"] = tensors["attention_mask"] * torch.tensor([[1], [1], [0]])
    reference = dict(tensors)
    expected_leaves = watch(reference)
    expected = gradients(weigh(splade_head(**reference)), expected_leaves)
    tensors["hidden"] = tensors["hidden"].masked_fill(mask[..., None] == 0, torch.nan)
    moved = there(tensors)
    leaves = watch(moved)
    out = splade_head(**moved, impl=impl).cpu()
    found = {name: x.cpu() for name, x in gradients(weigh(out), leaves).items()}
    assert not out[2].any()
    assert not found["hidden"][mask == 0].any()
    close(found, expected, 1e-5, 1e-5)


def test_copies_of_an_attended_state_hand_their_gradient_to_it():
    """A device may take any of equal maxima: here the original is the last position of its text."""
    hidden = torch.randn(2, 6, 3)
    mask = torch.tensor([[0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0]])
    tensors = {"hidden": hidden, "weight": torch.randn(7, 3), "attention_mask": mask}
    moved = there(tensors)
    leaves = watch(moved)
    gradient = gradients(splade_head(**moved, return_logits=True)[1].sum(), leaves)["hidden"].cpu()
    expected = tensors["weight"].sum(0)
    torch.testing.assert_close(gradient[0, 5], expected)
    torch.testing.assert_close(gradient[1, 3], expected)
    assert gradient.any(-1).sum() == 2


# The sizes of a training run, by their shapes


def large(batch: int, length: int, vocab: int, width: int = 768) -> dict:
    half = {"dtype": torch.bfloat16, "device": "sim"}
    return {
        "hidden": torch.empty(batch, length, width, **half),
        "weight": torch.empty(vocab, width, **half),
        "bias": torch.empty(vocab, **half),
        "attention_mask": torch.empty(batch, length, dtype=torch.int64, device="sim"),
    }


def reckoned(counts) -> float:
    """Add up seconds on an H100: 5 us a launch, and bytes or products at 0.8 of their rates."""
    return sum(
        5e-6
        + max(
            each.bytes / (0.8 * 3.35e12),
            each.flops / (0.8 * (989e12 if each.dtype != torch.float32 else 67e12)),
        )
        for each in counts.operations
        if each.launches
    )


@pytest.mark.parametrize("vocab", [30522, 250002])
def test_twice_as_fast_as_the_plain_formula_in_a_third_of_its_memory(vocab):
    """By reckoning; [64, 256] positions, 768 wide, bf16."""
    with shape_only():
        ours, _ = step(splade_head, large(64, 256, vocab))
        theirs, _ = step(plain, large(64, 256, vocab))
    assert ours.waits == theirs.waits == 0
    assert set(ours.flops) == {torch.bfloat16}
    assert ours.flops[torch.bfloat16] <= theirs.flops[torch.bfloat16] * 1.001
    assert ours.peak_bytes <= theirs.peak_bytes / 3
    assert reckoned(ours) <= reckoned(theirs) / 2


def test_one_tile_is_held_at_a_time():
    with shape_only():
        ours, _ = step(splade_head, large(64, 256, 30522))
    assert head_tiles.BYTES <= ours.peak_bytes < 2 * head_tiles.BYTES
    of_the_mask = 1
    tiles = math.ceil(4 * 64 * 256 * 30522 / head_tiles.BYTES)  # as few as hold the fp32 scores
    assert ours.names["max"] == tiles + of_the_mask


def test_the_gradient_of_frozen_states_takes_no_memory():
    peaks = []
    for learned in (["hidden", "weight"], ["weight"]):
        with shape_only():
            tensors = large(64, 256, 30522)
            watch(tensors, *learned)
            with counting() as counts:
                splade_head(**tensors).sum().backward()
        peaks.append(counts.peak_bytes)
    of_a_number = 4 + 4 + 2  # a tile's product and the sum in fp32, and the result in bf16
    assert peaks[0] - peaks[1] >= 64 * 256 * 768 * of_a_number


# The encoder


@pytest.mark.parametrize("architecture", ["xlm-roberta", "bert"])
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_a_training_step_of_the_encoder_adds_no_wait_and_multiplies_halves(architecture, precision):
    """The transformer itself waits once, to see whether any text is padded."""
    model, words = tiny_models.pair(architecture)
    model.set_attn_implementation("eager")  # that of PyTorch is fp32 where there is no kernel
    if precision == "bf16":
        model = model.bfloat16()
    encoder = SpladeEncoder(model.to("sim"), words).train()
    batch = encoder.tokenize(tiny_models.TEXTS)
    products.returns_fp32(encoder.device, torch.bfloat16)
    with counting() as transformer:
        model.base_model(**batch)
    with counting() as counts:
        with torch.autocast("sim", dtype=torch.bfloat16, enabled=precision == "autocast"):
            activations, logits = encoder(**batch, return_logits=True)
        (activations.sum() + logits.square().mean()).backward()
    assert activations.dtype == torch.float32
    assert counts.waits == transformer.waits <= 1
    assert set(counts.flops) == {torch.bfloat16}
    wanted = torch.bfloat16 if precision == "bf16" else torch.float32
    weight = encoder.head.weight
    assert weight.grad.dtype == wanted
    assert weight.grad.cpu().isfinite().all()
    assert weight.grad.cpu().any()
