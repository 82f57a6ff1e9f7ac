import dataclasses

import pytest
import torch

from examples.demo.evaluation import Index, top_tokens
from examples.demo.training import Run
from sparse_losses import COSINE, RECOMMENDED


def test_a_run_depends_on_its_seed_alone(corpus, settings):
    runs = [Run(corpus, settings)]
    torch.manual_seed(99)  # whatever else the process has drawn must not matter
    runs.append(Run(corpus, settings))
    for run in runs:
        run.train()
    first, second = runs
    assert first.history == second.history
    assert len(first.history) == settings.steps
    assert first.probes == second.probes
    assert [probe["step"] for probe in first.probes] == [0, 5, 10, 12]
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    other = Run(corpus, dataclasses.replace(settings, seed=1))
    assert not torch.equal(other.order, first.order)
    assert not torch.equal(other.untrained().embedding, first.untrained().embedding)


def test_loss_and_active_dimensions_fall(corpus, settings):
    preset = COSINE.replace(weights={"query_flops": 1.5, "document_flops": 1.5})
    longer = {"steps": 60, "batch_size": 16, "learning_rate": 5e-3, "preset": preset}
    run = Run(corpus, dataclasses.replace(settings, **longer))
    run.train()
    for read, share in (
        (lambda step: step.terms["info_nce"], 0.8),
        (lambda step: step.active_document, 0.9),
        (lambda step: step.active_query, 0.9),
    ):
        first, last = (sum(map(read, part)) for part in (run.history[:5], run.history[-5:]))
        assert 0 < last < share * first


def test_search_ranks_by_dot_products_and_top_tokens_are_named(corpus, settings):
    run = Run(corpus, settings)
    run.train()
    index = Index(run, corpus)
    text = corpus.train[3].text
    dots = run.encode([row.text for row in corpus.rows]) @ run.encode([text])[0]
    best, row = index.search(text)[0], corpus.rows[dots.argmax()]
    assert best["score"] == pytest.approx(dots.max().item(), rel=1e-4)
    assert (best["title"], best["text"]) == (row.title, row.text)
    assert len(index.search("graph", count=3)) == 3
    (tokens,) = top_tokens(run, ["shortest path"], count=4)
    assert len(tokens) == 4
    assert tokens[0][1] >= tokens[-1][1] > 0


def test_the_teacher_scores_all_pairs_of_the_batch(corpus, settings):
    run = Run(corpus, settings)
    scores = run.batch(0).teacher_scores
    assert scores.shape == (8, 8)
    assert (scores.diagonal() > 0).all()
    untaught = dataclasses.replace(settings, preset=RECOMMENDED.without("distillation"))
    assert Run(corpus, untaught).batch(0).teacher_scores is None
