"""Launches of the default implementations, forward and backward, counted on meta tensors.

A meta tensor has no values: whatever would wait for an accelerator to read one raises here.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import sparse_losses as sl
from benchmarks.losses import NAMES, benchmark, cases
from benchmarks.run.launches import Launches, training_launches
from benchmarks.schema import Maker
from sparse_losses._core.host_copy import HostCopy
from sparse_losses.fast import head, head_tiles
from tests.cases import LAYER_CASES
from tests.objective import making

LAYERS = ("splade_head", "end_to_end", "objective")  # they have bounds of their own
NO_MORE_THAN_PLAIN = ("info_nce", "nws", "flops", "idf_flops")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
B, S, V, H = 4, 12, making.V, 8


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.empty(*shape, device="meta", dtype=dtype)
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def on_meta(tensors: Any, dtype: torch.dtype | None = None) -> Any:
    """Return tensors without values, in ``dtype`` what has a gradient."""

    def moved(x):
        to = x.detach().to("meta", dtype if x.requires_grad else None)
        return to.requires_grad_(x.requires_grad)

    return tree_map_only(torch.Tensor, moved, tensors)


def text(*leading: int, length: int = S) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(meta(*leading, length, dtype=torch.int64) for _ in range(2))


# Losses and layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", [name for name in NAMES if name not in LAYERS])
def test_loss_launches_few_more_than_the_plain_formula(loss, dtype):
    for case in cases("tiny", [loss]):
        calls = {variant.name: variant.call for variant in case.variants()}
        inputs = on_meta(case.inputs(Maker(torch.device("cpu"))), dtype)
        inputs.pop("upstream", None)
        plain, ours = (training_launches(calls[name], **inputs).count for name in ("eager", "ours"))
        bound = plain if loss in NO_MORE_THAN_PLAIN else max(1.25 * plain, 20)
        assert 0 < ours <= bound, case.name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [sl.info_nce_loss, sl.n_pair_loss])
def test_without_a_gradient_none_is_computed(function, dtype):
    anchor, positive = (meta(8, 16, dtype=dtype) for _ in range(2))
    training = training_launches(function, anchor, positive)
    with torch.no_grad(), Launches() as counted:
        function(anchor, positive)
    assert sum(each.name == "mm" for each in training.operations) == 3
    assert sum(each.name == "mm" for each in counted.operations) == 1
    assert not counted.names.keys() & {"sigmoid", "_softmax"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [30_522, 250_002])
@pytest.mark.parametrize("options", [{}, {"return_logits": True}, {"attention_mask": None}])
def test_head_launches_at_most_16_a_tile_and_24_besides(options, vocab, dtype):
    inputs = {
        "hidden": meta(64, 256, 768, dtype=dtype),
        "weight": meta(vocab, 768, dtype=dtype),
        "bias": meta(vocab, dtype=dtype),
        "attention_mask": meta(64, 256, dtype=torch.bool),
    }
    counted = training_launches(sl.splade_head, **(inputs | options))
    tiles = math.ceil(64 * 256 * 4 * vocab / head_tiles.BYTES)
    assert counted.names["max"] - 2 * ("attention_mask" not in options) == tiles
    assert counted.count <= 16 * tiles + 24
    assert set(counted.flops) == {dtype}
    assert counted.peak_bytes < 64 * 256 * vocab * dtype.itemsize  # the plain formula's logits


@pytest.mark.parametrize("share", [0.001, 0.01])
def test_gradient_of_the_head_follows_the_entries_in_34_launches(share):
    """It reads a tenth of the bytes of the dense one, and multiplies no matrices."""
    rows, length, vocab, width, half = 32, 256, 250_002, 768, torch.bfloat16
    states, weight = meta(rows, length, width, dtype=half), meta(vocab, width, dtype=half)
    inputs = meta(rows, vocab), meta(rows, vocab, dtype=torch.uint8), states, weight, None
    counts = []
    for size in (-1, int(share * rows * vocab)):
        with torch.no_grad(), Launches() as counted:
            head._spread(*inputs, half, [True, True], size)
        counts.append((counted.count, sum(each.bytes for each in counted.operations)))
    assert not counted.flops
    assert counts[1][0] <= 34 < counts[0][0]
    assert counts[1][1] < counts[0][1] / 10
    assert counted.peak_bytes < 1.3 * weight.nbytes


HEAD = next(case for case in LAYER_CASES if case.id == "splade_head-all")


@pytest.mark.parametrize("options", [{}, {"threshold": 0.3}, {"return_logits": True}], ids=str)
def test_number_of_active_entries_is_copied_in_the_forward_pass(monkeypatch, options):
    """As on an accelerator, here on a CPU: all active entries, but not those of all logits."""
    monkeypatch.setattr(head, "SCORES_OF_AN_ENTRY", {})
    monkeypatch.setattr(head, "SCORES_OF_AN_ENTRY_ELSEWHERE", 1)
    copies, sizes, entries_of = [], [], head.entries_of
    monkeypatch.setattr(head, "HostCopy", lambda *x: copies.append(HostCopy(*x)) or copies[-1])
    monkeypatch.setattr(head, "entries_of", lambda *x: sizes.append(x[-1]) or entries_of(*x))
    tensors = HEAD.tensors()
    leaves = [tensors[name].requires_grad_() for name in HEAD.differentiable]
    values = [HEAD.function()(**tensors, **options, impl=impl) for impl in ("tiles", "definition")]
    is_counted = "return_logits" not in options
    assert len(copies) == is_counted
    torch.testing.assert_close(*(torch.autograd.grad(value, leaves) for value in values))
    assert len(sizes) == is_counted
    assert not sizes or sizes[0] >= sl.splade_head(**tensors, **options).count_nonzero()


def test_head_for_inference_takes_the_maximum_without_its_position():
    with torch.no_grad(), Launches() as counted:
        sl.splade_head(meta(B, S, H), meta(V, H), gate=meta(B, V))
    assert (counted.names["amax"], counted.names["max"]) == (1, 0)


def test_frozen_hidden_states_take_no_memory_for_a_gradient():
    hidden, weight = meta(64, 256, 768), meta(30_522, 768)
    both = hidden, hidden.detach()
    peaks = [training_launches(sl.splade_head, x, weight).peak_bytes for x in both]
    assert peaks[0] - peaks[1] >= 1.5 * hidden.nbytes  # the sum over tiles, a tile's product


# The objective, and all that a training step adds -------------------------------------------------


def plain_recommended(query, document, teacher, query_ids, document_ids, penalty):
    return benchmark("info_nce").plain(query, document, temperature=1.0, similarity="dot")


def plain_v26(query, document, teacher, query_ids, document_ids, penalty):
    unit = [nn.functional.normalize(x, dim=-1) for x in (query, document)]
    tensors = {"info_nce": (query, document), "distillation": (unit[0] @ unit[1].T, teacher)}
    tensors |= {"min_activation": (query,), "idf_flops": (query, penalty)}
    tensors["self_reconstruction"] = query, *query_ids
    tensors["positive_activation"] = query, *document_ids
    return sum(benchmark(loss).plain(*inputs) for loss, inputs in tensors.items())


@pytest.mark.parametrize(
    ("preset", "plain"),
    [(sl.RECOMMENDED, plain_recommended), (sl.V26, plain_v26)],
    ids=["RECOMMENDED", "V26"],
)
def test_objective_launches_at_most_1_4_times_its_plain_formulas(preset, plain):
    objective = preset.objective(idf=torch.linspace(0.5, 5, V)).to("meta")

    def total(query, document, teacher, query_ids, document_ids, penalty):
        texts = sl.Texts(query, *query_ids), sl.Texts(document, *document_ids)
        return objective(sl.SpladeBatch(*texts, teacher_scores=teacher)).total

    inputs = meta(B, V), meta(B, V), meta(B, B).detach(), text(B), text(B), meta(V).detach()
    bound = 1.4 * training_launches(plain, *inputs).count
    # InfoNCE of dot products makes 16 launches by itself, to cross-entropy's 11.
    assert 0 < training_launches(total, *inputs).count <= max(bound, 18)


def test_training_step_reads_no_value():
    """With every term, NWS with a queue, and diagnostics."""
    every = making.objective(dict.fromkeys(making.CALLS, 1.0), stopword_ids=[2]).to("meta")
    filtered = sl.InfoNCELoss(false_negative_margin=0.1, false_negative_ratio=0.9)
    filtered = making.objective({"info_nce": 1.0}, {"info_nce": filtered})
    diagnostics = sl.Diagnostics(V, stopword_ids=[2])
    nws, queue = sl.NWSLoss(torch.eye(5)).to("meta"), sl.LabelQueue(8, V, 5).to("meta")
    batch = on_meta(making.batch("one", grad=True))
    query, labels = batch.anchor.activations, torch.ones(making.B, 5, device="meta")

    def step(prototype):
        queued = {"queue": queue.features.clone(), "queue_labels": queue.labels.clone()}
        total = nws(query, labels, prototype, queue_mask=queue.mask, **queued)
        queue.enqueue(query, labels)
        diagnostics.update(batch.positive, other_side=batch.anchor, training=True)
        return total + every(batch).total + filtered(batch).total

    assert training_launches(step, meta(5, V)).count > 200


def test_bm25_scores_read_no_value():
    query, document = text(B), text(B, 3)
    scores = sl.bm25_scores(*query, *document, meta(V).detach(), mean_length=11.0)
    assert scores.shape == (B, 3)


# The counter --------------------------------------------------------------------------------------


def test_counter_raises_where_a_value_is_read():
    with Launches():
        for read in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, bool):
            with pytest.raises((RuntimeError, NotImplementedError)):
                read(meta(1).sum())
