import dataclasses
import statistics

import pytest
import torch

from sparse_losses.demo.errors import UserError
from sparse_losses.demo.objective import Weights
from sparse_losses.demo.report import MODEL, Index, measure, top_tokens
from sparse_losses.demo.training import Run


class _Stop(Exception):
    pass


def _stop_after(step):
    def report(taken):
        if taken.step == step:
            raise _Stop

    return report


def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(corpus, settings, tmp_path):
    whole = Run(corpus, settings)
    whole.train()

    first = Run(corpus, settings)
    with pytest.raises(_Stop):
        first.train(_stop_after(7))
    first.save(tmp_path / "checkpoint.pt")
    torch.manual_seed(99)  # whatever else the process has drawn must not matter
    second = Run(corpus, settings)
    second.load(tmp_path / "checkpoint.pt")
    assert second.step == 7
    second.train()

    assert len(whole.history) == settings.steps
    assert whole.history == second.history
    assert whole.probes == second.probes
    assert [probe.step for probe in whole.probes] == [0, 5, 10, 12]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert measure(whole, corpus) == measure(second, corpus)
    other = Run(corpus, dataclasses.replace(settings, seed=1))
    assert other.probes != whole.probes[:1] or not torch.equal(other.order, whole.order)
    assert not list(tmp_path.glob("*.partial"))


def test_resume_with_other_settings_data_or_file_is_refused(corpus, settings, tmp_path):
    path = tmp_path / "checkpoint.pt"
    run = Run(corpus, settings)
    run.save(path)
    with pytest.raises(UserError, match="seed was 0, now 4"):
        Run(corpus, dataclasses.replace(settings, seed=4)).load(path)
    with pytest.raises(UserError, match=r"without was \(\), now \('flops',\)"):
        Run(corpus, dataclasses.replace(settings, without=("flops",))).load(path)
    fewer = dataclasses.replace(corpus, train=corpus.train[:-1])
    with pytest.raises(UserError, match="trained on other texts"):
        Run(fewer, settings).load(path)
    with pytest.raises(UserError, match="nothing to resume"):
        run.load(tmp_path / "absent.pt")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="not a checkpoint that can be read"):
        run.load(path)
    torch.save({"weights": torch.ones(2)}, path)
    with pytest.raises(UserError, match="not a checkpoint of this demo"):
        run.load(path)


def test_loss_and_active_dimensions_fall(corpus, settings):
    settings = dataclasses.replace(
        settings, steps=60, batch_size=16, learning_rate=5e-3, weights=Weights(flops=3.0)
    )
    run = Run(corpus, settings)
    run.train()

    def mean(steps, read):
        return statistics.mean(read(step) for step in steps)

    start, end = run.history[:5], run.history[-5:]
    assert mean(end, lambda s: s.terms["info_nce"]) < 0.8 * mean(
        start, lambda s: s.terms["info_nce"]
    )
    assert mean(end, lambda s: s.active_document) < 0.9 * mean(start, lambda s: s.active_document)
    assert mean(end, lambda s: s.active_query) < 0.9 * mean(start, lambda s: s.active_query)
    assert mean(end, lambda s: s.active_document) > 1
    assert end[0].loss == pytest.approx(sum(end[0].terms.values()))


def test_a_run_without_any_term_is_left_as_it_was(corpus, settings):
    everything = (
        "info_nce",
        "flops",
        "min_activation",
        "self_reconstruction",
        "positive_activation",
    )
    run = Run(corpus, dataclasses.replace(settings, steps=2, without=everything))
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train()
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())


def test_search_finds_the_text_itself_and_top_tokens_are_named(corpus, settings):
    run = Run(corpus, settings)
    run.train()
    index = Index(run, corpus)
    row = corpus.train[3]
    score, title, excerpt = index.search(row.text)[0]
    assert (title, excerpt) == (row.title, row.excerpt)
    assert score == pytest.approx(1.0, abs=1e-4)
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
