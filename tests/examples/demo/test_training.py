import dataclasses

import pytest
import torch

from examples.demo.retriever import Retriever
from examples.demo.training import Run


def finished(corpus, settings):
    run = Run(corpus, settings)
    run.start()
    run.train()
    run.prune()
    return run


def test_a_run_depends_on_its_seed_alone(corpus, settings):
    first = finished(corpus, settings)
    torch.manual_seed(99)  # whatever else the process has drawn must not matter
    second = finished(corpus, settings)
    assert first.losses == second.losses
    assert len(first.losses) == settings.steps
    assert first.model.thresholds == second.model.thresholds
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    other = Run(corpus, dataclasses.replace(settings, seed=1))
    assert not torch.equal(other.order, first.order)


def test_the_start_is_sparse_the_loss_falls_and_both_sides_are_pruned(corpus, settings):
    longer = {"steps": 60, "batch_size": 16, "learning_rate": 5e-3}
    run = Run(corpus, dataclasses.replace(settings, **longer))
    started = run.start()
    assert started.before.document_active > 200
    assert started.after.document_active == pytest.approx(settings.start_active, rel=0.02)
    run.train()
    first, last = (sum(part) for part in (run.losses[:5], run.losses[-5:]))
    assert 0 < last < 0.8 * first
    pruned = run.prune().after
    assert pruned.document_active == pytest.approx(settings.document_active, rel=0.02)
    assert pruned.query_active == pytest.approx(settings.query_active, rel=0.05)


def test_search_ranks_by_dot_products_and_a_saved_retriever_gives_the_same(
    corpus, settings, tmp_path
):
    retriever = finished(corpus, settings).retriever()
    retriever.index(corpus.rows)
    text = corpus.train[3].text
    documents = retriever.encode([row.text for row in corpus.rows], "document")
    dots = documents @ retriever.encode([text], "query")[0]
    best, row = retriever.search(text)[0], corpus.rows[dots.argmax()]
    assert best["score"] == pytest.approx(dots.max().item(), rel=1e-4)
    assert (best["title"], best["text"]) == (row.title, row.text)
    assert len(retriever.search("graph", count=3)) == 3
    (tokens,) = retriever.top_tokens(["shortest path"], count=4)
    assert 0 < len(tokens) <= 4
    assert tokens[0][1] >= tokens[-1][1] > 0
    retriever.save(tmp_path)
    again = Retriever.load(tmp_path)
    assert again.search(text) == retriever.search(text)
    assert torch.equal(again.encode([text]), retriever.encode([text]))
