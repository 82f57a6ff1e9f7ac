"""The study beside sentence-transformers: their losses as they are, the figures, and the tables."""

import csv
import dataclasses
import json
import math
import types

import pytest
import torch

from benchmarks.studies import against_sentence_transformers as study
from benchmarks.studies import recipe, runs
from sparse_losses import COSINE, RECOMMENDED
from sparse_losses.demo.corpus import split
from sparse_losses.functional import distillation_loss, info_nce_loss
from tests.demo.artificial import make_rows

pytest.importorskip("sentence_transformers")

TINY = {"batch_size": 8, "vocab_size": 400, "probe_rows": 20}


@pytest.fixture(scope="module")
def corpus():
    return split(make_rows(), ("name → document", "summary → rest"), {"artificial": "1"}, 40)


@pytest.fixture
def small(inline, monkeypatch, corpus):
    """Settings with which a model trains in a second."""
    whole = study.Arm.training

    def training(arm):
        settings = whole(arm)
        size = dataclasses.replace(settings.size, hidden=32, layers=1, heads=2)
        return dataclasses.replace(settings, size=size, **TINY)

    monkeypatch.setattr(study.Arm, "training", training)
    small = types.SimpleNamespace(load=lambda: corpus)
    monkeypatch.setattr(runs, "LOADERS", dict.fromkeys(runs.LOADERS, small))
    return corpus


def _arm(similarity, teacher=False, steps=9):
    return study.Arm(study.THEIRS, similarity, 0.5, teacher, steps, seed=0)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_their_step_is_their_formula_with_the_weight_of_their_callback(small, similarity):
    run = study.start(_arm(similarity), small)
    scale = study.SCALES[similarity]
    for step, share in ((0, 0.0), (2, 4 / 9), (3, 1.0)):  # a third of the steps, quadratically
        run.step = step
        batch = run.batch(step)
        total, terms = run.loss(batch)
        query, document = batch.anchor.activations, batch.positive.activations
        main = info_nce_loss(query, document, temperature=1 / scale, similarity=similarity)
        assert terms["base_loss"] == pytest.approx(main.item(), rel=1e-4)
        for name, x in (("query", query), ("document", document)):
            flops = x.mean(0).square().sum().item()
            regulariser = terms[f"{name}_regularizer_loss"]
            assert regulariser == pytest.approx(0.5 * share * flops, rel=1e-5)
        assert total.item() == pytest.approx(sum(terms.values()), rel=1e-6)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_their_distillation_is_ours_of_all_documents_of_the_batch(small, similarity):
    run = study.start(_arm(similarity, teacher=True), small)
    batch = run.batch(0)
    _, terms = run.loss(batch)
    query, document = batch.anchor.activations, batch.positive.activations
    if similarity == "cosine":
        query, document = (torch.nn.functional.normalize(x) for x in (query, document))
    ours = distillation_loss(
        study.SCALES[similarity] * query @ document.T,
        study.TEACHER_SCALE * batch.teacher_scores,
        temperature=1.0,
        alpha_kl=1.0,
        alpha_mse=0.0,
    )
    assert terms["distillation_loss"] == pytest.approx(ours.item(), rel=1e-4)


def test_ours_and_theirs_start_alike_and_see_the_same_batches(small):
    variants = ("ours, target 64", "theirs, dot, weight 0.1")
    ours, theirs = (study.start(study.settings_of(name, 3, 9), small) for name in variants)
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, theirs.model.state_dict()[name]), name
    assert torch.equal(ours.order, theirs.order)
    assert ours.controllers["document"].target_active == 64
    assert not ours.distils
    two = study.start(study.settings_of("ours, target 64, queries 24", 3, 9), small).controllers
    assert [two[side].target_active for side in ("document", "query")] == [64, 24]
    assert study.start(study.settings_of("ours, target 64, BM25 as teacher", 3, 9), small).distils


def test_figures_of_ranks():
    scores = torch.zeros(2, 30)
    scores[0, 0] = 1.0  # first
    scores[1] = torch.arange(30, 0, -1)  # second
    figures = study._ranked(scores)
    assert figures["mrr_10"] == pytest.approx((1 + 1 / 2) / 2)
    assert figures["ndcg_10"] == pytest.approx((1 + 1 / math.log2(3)) / 2)
    assert figures["recall_100"] == 1.0
    last = torch.arange(300.0).expand(1, -1)
    assert not any(study._ranked(last).values())


def test_held_out_documents_are_all_ranked_and_counted(small):
    run = study.start(_arm("cosine", steps=1), small)
    figures = study.evaluate(run, small, small.test, "cosine")
    assert figures["products"] <= min(figures["active_query"], figures["active_document"])
    queries, documents = study._texts(small, small.test, 0)
    assert (len(queries), len(documents)) == (40, 80)
    assert documents[:40] == [row.pairs[0].document for row in small.test]
    shared = (run.encode(queries) > 0).double() @ (run.encode(documents) > 0).double().T
    (other,) = [
        (run.encode(q) > 0).double() @ (run.encode(d) > 0).double().T
        for q, d in [study._texts(small, small.test, 1)]
    ]
    expected = (shared.mean() + other.mean()).item() / 2
    assert figures["products"] == pytest.approx(expected)


def test_the_study_writes_its_tables_and_goes_on_where_it_stopped(
    small, tmp_path, monkeypatch, capsys
):
    arguments = ["--output", str(tmp_path), "--corpora", "docstrings", "--steps", "2", "--only"]
    arguments += ["ours, target 64", "theirs, cosine, weight 0.03", "--seeds", "0", "1"]
    assert study.main(arguments) == 0
    table = (tmp_path / "against_sentence_transformers.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    with open(tmp_path / "against_sentence_transformers.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows[:2]] == list(study.BASELINES)
    assert [(row["system"], row["seed"]) for row in rows[2:]] == [
        (system, seed) for system in (study.OURS, study.THEIRS) for seed in "01"
    ]
    path = tmp_path / "docstrings" / "runs" / "ours,-target-64-1.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    assert float(rows[3]["ndcg_10"]) == pytest.approx(result["test"]["ndcg_10"], abs=1e-4)
    monkeypatch.setattr(study, "run_one", lambda *job: pytest.fail(f"ran {job} again"))
    assert study.main(arguments) == 0


def test_quick_is_one_seed_and_three_weights(small, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        study, "run_each_corpus", lambda options, *_: asked.append(options) or pytest.skip("asked")
    )
    with pytest.raises(pytest.skip.Exception):
        study.main(["--quick", "--output", str(tmp_path)])
    (options,) = asked
    assert options.seeds == [0]
    assert len(options.only) == 25
    assert set(options.only) < set(study.VARIANTS)


def test_the_recipe_changes_one_part_at_a_time(small, tmp_path, capsys):
    arguments = ["--output", str(tmp_path), "--corpora", "docstrings", "--steps", "2", "--seeds"]
    arguments += ["0", "--only", "as recommended, target 32", "without the teacher, target 32"]
    assert recipe.main(arguments) == 0
    table = (tmp_path / "recipe.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    assert "| docstrings | without the teacher | 32 |" in table
    preset = recipe.settings_of("without the teacher, target 32", 0, 2).preset
    assert "distillation" not in preset.weights
    plain = recipe.settings_of("cosine, without the token terms, target 32", 0, 2).preset
    assert set(plain.weights) == set(RECOMMENDED.weights)
    lists = recipe.settings_of("with the token terms, target 32", 0, 2).preset
    assert set(lists.weights) == set(COSINE.weights)


def test_changes_that_no_preset_can_hold(small):
    def run_of(change):
        trial = recipe.settings_of(f"{change}, target 32", 0, 4)
        return recipe.RUNS.get(trial.change, recipe.Run)(small, trial.training())

    targets = run_of("without the teacher, query target 24").controllers
    assert {side: one.target_active for side, one in targets.items()} == {
        "document": 32,
        "query": 24,
    }
    assert run_of("a sparse start").model.bias.eq(-2).all()
    weight = run_of("positives weighted by IDF").objective.positive_activation.token_weight
    assert weight.min() < weight.max()

    between = run_of("FLOPS between the sides")
    between.step = 2  # its weight has risen
    batch = between.batch(0)
    query, document = batch.anchor.activations, batch.positive.activations
    without, _ = between.objective(batch)
    total, _ = between.loss(batch)
    products = (query.mean(0) * document.mean(0)).sum()
    assert (total - without).item() == pytest.approx(0.2 * products.item(), rel=1e-3)
