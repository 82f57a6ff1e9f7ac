import dataclasses
import statistics

import pytest
import torch

from sparse_losses import COSINE
from sparse_losses.demo.evaluation import MODEL, Index, measure, top_tokens
from sparse_losses.demo.options import TERMS
from sparse_losses.demo.training import Run


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
    assert [probe.step for probe in first.probes] == [0, 5, 10, 12]
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    other = Run(corpus, dataclasses.replace(settings, seed=1))
    assert not torch.equal(other.order, first.order)
    assert not torch.equal(other.untrained().embedding, first.untrained().embedding)


def test_loss_and_active_dimensions_fall(corpus, settings):
    preset = COSINE.replace(weights={"query_flops": 1.5, "document_flops": 1.5})
    settings = dataclasses.replace(
        settings, steps=60, batch_size=16, learning_rate=5e-3, preset=preset
    )
    run = Run(corpus, settings)
    run.train()

    def mean(steps, read):
        return statistics.mean(read(step) for step in steps)

    start, end = run.history[:5], run.history[-5:]
    for read, share in (
        (lambda step: step.terms["info_nce"], 0.8),
        (lambda step: step.active_document, 0.9),
        (lambda step: step.active_query, 0.9),
    ):
        assert mean(end, read) < share * mean(start, read)
    assert mean(end, lambda step: step.active_document) > 1


def test_a_run_without_any_term_is_left_as_it_was(corpus, settings):
    run = Run(corpus, dataclasses.replace(settings, steps=2, without=tuple(TERMS)))
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train()
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())


def test_search_finds_the_text_itself_and_top_tokens_are_named(corpus, settings):
    run = Run(corpus, dataclasses.replace(settings, preset=COSINE))
    run.train()
    index = Index(run, corpus)
    row = corpus.train[3]
    score, title, text = index.search(row.text)[0]
    assert (title, text) == (row.title, row.text)
    assert score == pytest.approx(1.0, abs=1e-4)
    run.settings = settings
    best, *_ = Index(run, corpus).search(row.text)
    dots = run.encode([other.text for other in corpus.rows]) @ run.encode([row.text])[0]
    assert best[0] == pytest.approx(dots.max().item(), rel=1e-4)
    assert len(index.search("graph", count=3)) == 3
    (tokens,) = top_tokens(run, ["shortest path"], count=4)
    assert len(tokens) == 4
    assert tokens[0][1] >= tokens[-1][1] > 0


def test_measured_systems_and_their_order(corpus, settings):
    run = Run(corpus, settings)
    figures = measure(run, corpus)
    assert [figure.task for figure in figures] == list(corpus.tasks)
    assert figures[0].queries == len(corpus.test) == 40
    assert list(figures[0].rankings)[-1] == MODEL
    # nothing is trained yet: the model is the untrained model
    assert figures[0].rankings[MODEL] == figures[0].rankings["untrained model"]
    assert figures[0].document_before == figures[0].document_after


def test_without_spelling_reaches_the_model(corpus, settings):
    spelt = Run(corpus, settings)
    plain = Run(corpus, dataclasses.replace(settings, without=("spelling",)))
    assert not torch.equal(spelt.model.embedding, plain.model.embedding)
    assert torch.equal(plain.model.embedding, plain.untrained().embedding)


def test_the_teacher_is_bm25_of_the_texts_without_their_marks(corpus, settings):
    run = Run(corpus, settings)
    batch = run.batch(0)
    queries, documents = (
        [[token for token in row if token not in run.tokens.special_ids] for row in texts]
        for texts in (batch.anchor.input_ids.tolist(), batch.positive.input_ids.tolist())
    )
    lengths = [len(row) - 2 for row in run.documents]
    mean = sum(lengths) / len(lengths)
    for query, scores in zip(queries, batch.teacher_scores.tolist(), strict=True):
        for document, score in zip(documents, scores, strict=True):
            expected = sum(
                run.idf[token].item() * 2.2 * f / (f + 1.2 * (0.25 + 0.75 * len(document) / mean))
                for token in query
                if (f := document.count(token))
            )
            assert score == pytest.approx(expected, rel=1e-4)
    assert batch.teacher_scores.count_nonzero() > len(queries)
    off = Run(corpus, dataclasses.replace(settings, without=("distillation",)))
    assert off.batch(0).teacher_scores is None
