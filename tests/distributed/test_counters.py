"""What counts or keeps the rows of all ranks is what one process has that sees them all."""

import pytest
import torch

from sparse_losses import ActivationFrequency, Diagnostics, DocumentFrequency, LabelQueue
from tests.distributed.ranks import run_ranks

V, WORLD = 12, 2


def batch(rank, step):
    """Not equally many rows on the ranks, and on the last one none for two steps."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.rand(0 if rank and step < 2 else 4 + rank, V, generator=generator)
    return torch.where(x > 0.6, x, 0.0)


def count_tokens(counter, x):
    values, ids = x.sort(1, descending=True)
    counter.update(ids, values > 0)


# How each is made, counts a batch, and what is read of it.
COUNTERS = {
    "diagnostics": (
        lambda: Diagnostics(V, special_token_ids=[0], stopword_ids=[1, 2], top_k=3),
        lambda counter, x: counter.update(x) if len(x) else None,
        lambda counter: dict(counter.report()) | counter.top_tokens(4),
    ),
    "documents": (
        lambda: DocumentFrequency(V, tokenizer_sha256="abc"),
        count_tokens,
        lambda counter: [*counter.df.tolist(), counter.num_documents, counter.num_tokens],
    ),
    **{
        f"activations, {decay}": (
            lambda decay=decay: ActivationFrequency(V, decay=decay),
            lambda counter, x: counter.update(x),
            lambda counter: counter.frequency().tolist(),
        )
        for decay in (None, 0.8)
    },
}


def windows(rank, name, ranks=None):
    """Before any batch, after two, and after four: activations go on, the others begin again."""
    make, update, read = COUNTERS[name]
    counter = make()
    found = [read(counter.all_reduce())] if name == "diagnostics" else []
    for step in range(4):
        update(counter, torch.cat([batch(each, step) for each in ranks or [rank]]))
        if step % 2:
            assert counter.all_reduce() is counter
            found.append(read(counter))
            counter = counter if name.startswith("activations") else make()
    return found


@pytest.mark.parametrize("name", COUNTERS)
def test_ranks_count_as_one_process(name):
    expected = [pytest.approx(x) for x in windows(0, name, ranks=[*range(WORLD)])]
    assert run_ranks(WORLD, windows, name) == [expected] * WORLD


SIZE, DIM, LABELS, ROWS = 10, 3, 4, 2


def fill(rank, gather, steps, resume_at):
    queue = LabelQueue(SIZE, DIM, LABELS, gather=gather)
    for step in range(steps):
        if step == resume_at:
            state = queue.state_dict()
            queue = LabelQueue(SIZE, DIM, LABELS, gather=gather)
            queue.load_state_dict(state)
        torch.manual_seed(step)
        rows = torch.randn(WORLD * ROWS, DIM), torch.randint(0, 2, (WORLD * ROWS, LABELS))
        queue.enqueue(*(x.chunk(WORLD)[rank] if gather else x for x in rows))
    return {**queue.state_dict(), "mask": queue.mask}


@pytest.mark.parametrize(("steps", "resume_at"), [(1, -1), (5, -1), (5, 3)])
def test_all_ranks_have_the_queue_of_one_process(steps, resume_at):
    """Partly filled, gone round, resumed."""
    expected = fill(0, False, steps, resume_at=-1)
    for found in run_ranks(WORLD, fill, True, steps, resume_at):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
