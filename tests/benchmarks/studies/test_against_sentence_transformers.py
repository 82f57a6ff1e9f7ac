"""The study beside sentence-transformers: their losses as they are, the figures, and the tables."""

import csv
import json
import math

import pytest
import torch

from benchmarks.studies import against_sentence_transformers as study
from benchmarks.studies import recipe
from sparse_losses import COSINE, RECOMMENDED
from sparse_losses.functional import distillation_loss, info_nce_loss

pytest.importorskip("sentence_transformers")


@pytest.fixture(autouse=True)
def _small(small):
    small(study)
    small(recipe)


def _theirs(corpus, similarity, number=0.1, ending="", steps=9):
    variant = f"theirs, {similarity}, weight {number}{ending}"
    return study.start(study.settings_of(variant, 0, steps), corpus)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_their_step_is_their_formula_with_the_weight_of_their_callback(corpus, similarity):
    run = _theirs(corpus, similarity)
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
            assert regulariser == pytest.approx(0.1 * share * flops, rel=1e-5)
        assert total.item() == pytest.approx(sum(terms.values()), rel=1e-6)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_their_distillation_is_ours_of_all_documents_of_the_batch(corpus, similarity):
    run = _theirs(corpus, similarity, ending=study.TEACHER)
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


def test_ours_and_theirs_start_alike_and_see_the_same_batches(corpus):
    variants = ("ours, target 64", "theirs, dot, weight 0.1")
    ours, theirs = (study.start(study.settings_of(name, 3, 9), corpus) for name in variants)
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, theirs.model.state_dict()[name]), name
    assert torch.equal(ours.order, theirs.order)
    assert ours.controllers["document"].target_active == 64
    assert not ours.distils
    two = study.start(study.settings_of("ours, target 64, queries 24", 3, 9), corpus).controllers
    assert [two[side].target_active for side in ("document", "query")] == [64, 24]
    assert study.start(study.settings_of("ours, target 64, BM25 as teacher", 3, 9), corpus).distils


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


def test_held_out_documents_are_all_ranked_and_counted(corpus):
    run = _theirs(corpus, "cosine", steps=1)
    figures = study.evaluate(run, corpus, corpus.test)
    assert figures["products"] <= min(figures["active_query"], figures["active_document"])
    queries, documents = study._texts(corpus, corpus.test, 0)
    assert (len(queries), len(documents)) == (40, 80)
    assert documents[:40] == [row.pairs[0].document for row in corpus.test]
    shared = (run.encode(queries) > 0).double() @ (run.encode(documents) > 0).double().T
    queries, documents = study._texts(corpus, corpus.test, 1)
    other = (run.encode(queries) > 0).double() @ (run.encode(documents) > 0).double().T
    expected = (shared.mean() + other.mean()).item() / 2
    assert figures["products"] == pytest.approx(expected)


def test_the_study_writes_its_tables(tmp_path, capsys):
    arguments = ["--output", str(tmp_path), "--corpora", "docstrings", "--steps", "2", "--only"]
    arguments += ["ours, target 64", "theirs, cosine, weight 0.03", "--seeds", "0", "1"]
    study.main(arguments)
    table = (tmp_path / "against_sentence_transformers.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    with open(tmp_path / "against_sentence_transformers.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows[:2]] == list(study.BASELINES)
    assert [(row["system"], row["seed"]) for row in rows[2:]] == [
        (system, seed) for system in (study.OURS, study.THEIRS) for seed in "01"
    ]
    path = tmp_path / "docstrings-2" / "ours,-target-64-1.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    assert float(rows[3]["ndcg_10"]) == pytest.approx(result["test"]["ndcg_10"], abs=1e-4)


def test_the_recipe_changes_one_part_at_a_time(tmp_path, capsys):
    arguments = ["--output", str(tmp_path), "--corpora", "docstrings", "--steps", "2", "--seeds"]
    arguments += ["0", "--only", "as recommended, target 32", "without the teacher, target 32"]
    recipe.main(arguments)
    table = (tmp_path / "recipe.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    assert "| docstrings | without the teacher | 32 |" in table
    preset = recipe.settings_of("without the teacher, target 32", 0, 2).preset
    assert "distillation" not in preset.weights
    plain = recipe.settings_of("cosine, without the token terms, target 32", 0, 2).preset
    assert set(plain.weights) == set(RECOMMENDED.weights)
    lists = recipe.settings_of("with the token terms, target 32", 0, 2).preset
    assert set(lists.weights) == set(COSINE.weights)


def test_changes_that_no_preset_can_hold(corpus):
    def run_of(change):
        trial = recipe.settings_of(f"{change}, target 32", 0, 4)
        return recipe.RUNS.get(trial.change, recipe.Run)(corpus, trial)

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
