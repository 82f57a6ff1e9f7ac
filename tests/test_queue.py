"""LabelQueue: the last ``size`` rows, whatever the batches, also after a restart and compiled."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import LabelQueue

D, L = 3, 2


def batches(sizes, start=1):
    """Rows 1, 2, 3, ... as features, with labels that say the same number modulo 4."""
    for size in sizes:
        numbers = torch.arange(start, start + size)
        start += size
        labels = torch.stack([numbers % 2, numbers // 2 % 2], dim=1)
        yield numbers[:, None].expand(size, D).float(), labels


def fill(queue, sizes, start=1):
    for features, labels in batches(sizes, start):
        queue.enqueue(features, labels)
    return queue


def rows(queue):
    """The filled rows in no order: what they say, features and labels."""
    kept = [(f.tolist(), y.tolist()) for f, y in zip(queue.features, queue.labels, strict=True)]
    return sorted(row for row, filled in zip(kept, queue.mask.tolist(), strict=True) if filled)


def model(size, sizes):
    """A Python list that forgets its oldest rows."""
    numbers = list(range(1, sum(sizes) + 1))[-size:]
    return sorted(([float(n)] * D, [float(n % 2), float(n // 2 % 2)]) for n in numbers)


@given(st.integers(1, 7), st.lists(st.integers(0, 17), max_size=5), st.lists(st.integers(0, 9)))
def test_the_queue_holds_the_last_rows_of_all_batches_and_resumes_in_the_middle(
    size, before, after
):
    """Slots that were never filled are zeros and come last."""
    queue, filled = fill(LabelQueue(size, D, L), before), min(size, sum(before))
    assert rows(queue) == model(size, before)
    assert queue.fill == filled
    assert queue.pointer == sum(before) % size  # the slot of the oldest row, once the queue is full
    assert queue.mask.tolist() == [True] * filled + [False] * (size - filled)
    assert not queue.features[filled:].any()
    assert not queue.labels[filled:].any()
    file = io.BytesIO()
    torch.save(queue.state_dict(), file)
    file.seek(0)
    resumed = LabelQueue(size, D, L)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for each in (queue, resumed):
        fill(each, after, start=sum(before) + 1)
    assert rows(resumed) == rows(queue) == model(size, [*before, *after])
    assert torch.equal(resumed.features, queue.features)


@pytest.mark.parametrize(
    ("dtype", "labels"), [(torch.float16, torch.bool), (torch.float64, torch.int64)]
)
def test_features_and_labels_are_cast_to_the_dtype_of_the_queue(dtype, labels):
    queue = fill(LabelQueue(3, D, L), [2]).to(dtype)
    queue.enqueue(torch.full((1, D), 3.0), torch.tensor([[1, 1]], dtype=labels))
    assert list(queue.parameters()) == []
    assert queue.features.dtype == queue.labels.dtype == dtype
    assert queue.pointer.dtype == queue.fill.dtype == torch.int64
    assert rows(queue) == model(3, [3])


def test_features_are_stored_without_their_graph_and_as_copies():
    passed = torch.ones(2, D, requires_grad=True)
    queue = LabelQueue(2, D, L)
    queue.enqueue(passed, torch.ones(2, L))
    passed.data.fill_(7)
    assert not queue.features.requires_grad
    assert (queue.features == 1).all()


@pytest.mark.parametrize(
    ("features", "labels", "error", "message"),
    [
        (torch.ones(2, D + 1), torch.ones(2, L), ValueError, r"`features`.*D = 3.*got \[2, 4\]"),
        (torch.ones(2, D), torch.ones(3, L), ValueError, r"`labels`.*B = 2.*got \[3, 2\]"),
        (torch.ones(2, D, device="meta"), torch.ones(2, L), ValueError, "`features` on cpu"),
        (torch.ones(2, D).long(), torch.ones(2, L), TypeError, "`features` to be floating"),
        (torch.ones(2, D), torch.tensor([[0, 1], [2, 0]]), ValueError, "`labels` to be 0 or 1"),
    ],
)
def test_wrong_rows_are_named_and_leave_the_queue(features, labels, error, message):
    queue = fill(LabelQueue(4, D, L), [3])
    with pytest.raises(error, match=message):
        queue.enqueue(features, labels)
    assert rows(queue) == model(4, [3])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break_and_keeps_the_same_rows(dynamic):
    torch.compiler.reset()
    queue = LabelQueue(5, D, L)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def step(features, labels):
        queue.enqueue(features, labels)
        return queue.mask, queue.features.sum()

    sizes = [3, 3, 3, 5, 4]
    for features, labels in batches(sizes):
        mask, total = step(features, labels)
        assert total == queue.features.sum()
        assert torch.equal(mask, queue.mask)
    assert rows(queue) == model(5, sizes)


def test_a_queue_from_inference_mode_is_filled_outside():
    with torch.inference_mode():
        queue = fill(LabelQueue(4, D, L), [3])
    fill(queue, [2], start=4)
    assert rows(queue) == model(4, [5])
