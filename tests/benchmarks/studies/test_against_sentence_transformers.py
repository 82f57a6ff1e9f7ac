"""The study beside sentence-transformers: their losses as they are, the figures, and the tables."""

import csv
import json

import pytest

from benchmarks.studies import against_sentence_transformers as study
from benchmarks.studies import recipe
from sparse_losses import COSINE, RECOMMENDED
from sparse_losses.functional import info_nce_loss

pytest.importorskip("sentence_transformers")


@pytest.fixture(autouse=True)
def _small(small):
    small(study)
    small(recipe)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_their_step_is_their_formula_with_the_weight_of_their_callback(corpus, similarity):
    run = study.start(study.settings_of(f"theirs, {similarity}, weight 0.1", 0, 9), corpus)
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
