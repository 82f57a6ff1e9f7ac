"""The studies on toys: figures that follow their formulas, and sound rows that are kept."""

import dataclasses
import json
import math
import random

import pytest
import torch
from torch import nn

pytest.importorskip("rich")
pytest.importorskip("peft")

from benchmarks.run.table import RESULTS, read
from benchmarks.studies import (
    battery,
    beir,
    calculated,
    collection,
    from_dense,
    gathered,
    learn,
    teachers,
    trainer_step,
    training_step,
)
from sparse_losses import SpladeEncoder
from tests.examples.demo.artificial import TOPICS
from tests.representation import tiny_models

# What the studies share.


def vectors(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.manual_seed(seed)).relu().log1p()


def test_pruned_vectors_keep_their_number_and_every_largest_entry():
    x = vectors(40, 60)
    fewer = learn.pruned(x, 7)
    assert learn.active(fewer) == pytest.approx(7, rel=0.01)
    assert torch.equal(fewer.amax(1), x.amax(1))
    lowest = fewer[(fewer > 0) & (fewer < x.amax(1, keepdim=True))].min()
    assert (x[fewer == 0] < lowest).all()
    assert torch.equal(learn.pruned(x, 60), x)  # there are fewer
    assert learn.active(learn.pruned(x[:5], 7, of=x)) == learn.active(fewer[:5])


def test_figures_of_vectors_follow_their_formulas():
    q, d = vectors(9, 50), vectors(20, 50, seed=1)
    d[3] = 0
    whole, fewer = learn.figures_at(q, d, [(3, 5)], lambda a, b: {"sum": (a @ b.T).sum().item()})
    for row, (a, b) in ((whole, (q, d)), (fewer, (learn.pruned(q, 3), learn.pruned(d, 5)))):
        shared = [sum(bool(x and y) for x, y in zip(u, v, strict=True)) for u in a for v in b]
        assert row["products"] == pytest.approx(sum(shared) / len(shared), abs=1e-3)
        lists = [sum(bool(v[j]) for v in b) / 20 for j in range(50)]
        assert row["longest_list"] == pytest.approx(max(lists), abs=1e-4)
        assert (row["empty"], row["sum"]) == (1, round((a @ b.T).sum().item(), 4))
    assert fewer["held_out"] == pytest.approx(5, abs=2)
    dead, _ = learn.figures_at(torch.zeros(4, 6), torch.zeros(4, 6), [(2, 3)], lambda q, d: {})
    assert (dead["document"], dead["products"], dead["empty"]) == (0, 0, 4)


def test_figures_of_rankings_follow_their_formulas():
    rng = random.Random(1)
    scores = [[rng.random() * rng.randint(0, 1) for _ in range(300)] for _ in range(7)]
    scores.append([0.0] * 300)  # nothing is found
    relevant = [{rng.randrange(300): rng.randint(1, 3) for _ in range(15)} for _ in scores]
    figures = beir.ranked(torch.tensor(scores, dtype=torch.float64), relevant)
    for query, (own, grades) in enumerate(zip(scores, relevant, strict=True)):
        order = sorted((n for n in range(300) if own[n] > 0), key=lambda n: -own[n])[:100]
        best = sorted(grades.values(), reverse=True)[:10]
        gained = sum(grades.get(n, 0) / math.log2(2 + at) for at, n in enumerate(order[:10]))
        ideal = sum(grade / math.log2(2 + at) for at, grade in enumerate(best))
        reciprocal = [1 / (1 + at) for at, n in enumerate(order[:10]) if n in grades]
        recalled = sum(n in grades for n in order) / len(grades)
        expected = (gained / ideal, (reciprocal or [0.0])[0], recalled)
        assert [one[query] for one in figures.values()] == pytest.approx(expected)


# The battery of small models.


@pytest.fixture(scope="module")
def texts():
    made = battery.Texts()
    made.queries, made.documents = made.queries[:40], made.documents[:40]
    return made


@pytest.mark.parametrize(
    ("model", "arm"),
    [("bag", "shift"), ("static", "shift"), ("decoder", "gain"), ("bag", "topk")],
)
def test_every_model_and_arm_starts_sparse_and_is_pruned_to_its_number(model, arm, texts):
    row = dataclasses.replace(battery.Row(model), steps=2, batch=4)
    rows = list(battery.run(row, battery.ARMS[arm], texts))
    assert [one["asked_document"] for one in rows] == ["", 32, 16]
    assert rows[0]["first_active"] == pytest.approx(battery.V / 4, rel=0.2)
    assert all(one["document"] <= 1.1 * one["asked_document"] for one in rows[1:])


# A collection on disk, and the models that are trained on it.


@pytest.fixture
def folder(tmp_path):
    """Sixty documents of three sentences on four topics, and a query for each topic."""
    rng, names = random.Random(3), sorted(TOPICS)
    words = [[rng.sample(TOPICS[name].split(), 7) for _ in "abc"] for name in names * 15]
    texts = [". ".join(" ".join(sentence) for sentence in sentences) for sentences in words]
    grades = [f"{names[n % 4]}\td{n}\t{(n < 4) + (n < 20)}" for n in range(24)]
    lines = {
        "corpus.jsonl": [json.dumps({"_id": f"d{n}", "text": t}) for n, t in enumerate(texts)],
        "queries.jsonl": [json.dumps({"_id": n, "text": f"{n} zebra"}) for n in (*names, "other")],
        "qrels/test.tsv": ["query-id\tcorpus-id\tscore", *grades],
    }
    (tmp_path / "toy/qrels").mkdir(parents=True)
    for name, own in lines.items():
        (tmp_path / "toy" / name).write_text("\n".join(own) + "\n", encoding="utf-8")
    return tmp_path / "toy"


def test_training_reads_documents_alone_and_only_judged_queries_count(folder):
    found = beir.load(folder)
    assert found.queries == [f"{name} zebra" for name in sorted(TOPICS)]
    assert found.relevant[1] == {1: 2, 5: 1, 9: 1, 13: 1, 17: 1}  # grade 0 is not relevant
    assert len(found.pairs) == 3 * 45  # every fourth document gives none


def saved(folder, has_head=True, **settings):
    """The folder of a tiny model with its tokenizer, and both of them."""
    model, words = tiny_models.pair("bert", **settings)
    model = model if has_head else model.base_model
    for part in (model, words):
        part.save_pretrained(folder.parent / "tiny" / "model")
    return folder.parent / "tiny" / "model", model, words


@pytest.fixture
def letters(monkeypatch):
    """A tiny model's tokens are letters: texts of more tokens, and a model with their places."""
    monkeypatch.setattr(collection, "LENGTHS", (32, 200))
    return {"max_position_embeddings": 200}


def test_the_cut_model_gives_the_vectors_of_the_whole(folder, letters):
    path, model, tokenizer = saved(folder, **letters)
    found = beir.load(folder)
    task = collection.Task([found], str(path))
    assert len(task.kept) < len(tokenizer)
    ((_, _, documents),) = task.tests
    cut = learn.vectors(collection.Tower(task.make(), task.kept).eval(), documents)
    whole = SpladeEncoder(model, tokenizer).encode(found.documents, output="dense")
    torch.testing.assert_close(cut, whole[:, task.kept])


@pytest.mark.parametrize(("has_head", "start"), [(True, ""), (False, "start 20, ")])
def test_pretrained_models_and_one_from_scratch_are_trained(
    folder, letters, has_head, start, monkeypatch
):
    path, output = saved(folder, has_head, **letters)[0], folder.parent / "study.csv"
    monkeypatch.setattr(collection, "START", 20)
    monkeypatch.setattr(collection, "POINTS", [(4, 8)])
    options = ["--data", str(folder), "--steps", "2", "--seeds", "0", "--output", str(output)]
    for model in ([], ["--model", str(path)]):
        collection.main([*options, "--arms", "prune", *model])
    assert [(row["model"], row["arm"], row["asked_document"]) for row in read(output)] == [
        (model, f"{start}nothing", asked)
        for model, start in (("scratch", "start 1/4, "), ("tiny", start))
        for asked in ("", "8")
    ]


def test_every_way_of_a_dense_encoder_has_a_row_and_one_is_the_packages(folder, monkeypatch):
    path, output = saved(folder, False)[0], folder.parent / "study.csv"
    monkeypatch.setenv("MINILM", str(path))
    monkeypatch.setattr(from_dense, "STARTS", (8, 20))
    monkeypatch.setattr(from_dense, "LENGTH", 40)
    from_dense.main(["--data", str(folder), "--output", str(output)])
    rows = read(output)
    assert len(rows) == 1 + 2 * 7
    one = beir.load(folder)
    for row in rows:
        if row["way"] != "dense":
            assert float(row["document"]) == pytest.approx(float(row["start"]), abs=0.6)
        if row["way"] == "bias by token: its mean":
            options = {"start_active": int(row["start"]), "max_length": from_dense.LENGTH}
            encoder = SpladeEncoder.from_dense(path, one.documents, **options)
            x, y = (encoder.encode(texts).to_dense() for texts in (one.queries, one.documents))
            own = beir.ranked(x @ y.T, one.relevant)["ndcg_10"]
            assert sum(own) / len(own) == pytest.approx(float(row["ndcg_10"]), abs=0.02)


def test_every_form_of_a_teacher_is_trained_once(folder, letters, monkeypatch):
    package = pytest.importorskip("sentence_transformers")

    class BiEncoder:
        def __init__(self, *_, **options): ...

        def encode(self, texts, **options):
            return nn.functional.normalize(torch.eye(8)[[len(text) % 8 for text in texts]])

    monkeypatch.setattr(package, "SentenceTransformer", BiEncoder)
    monkeypatch.setattr(teachers, "POINTS", [(4, 8)])
    output = folder.parent / "teachers.csv"
    options = ["--data", str(folder), "--model", str(saved(folder, **letters)[0])]
    options += ["--teacher", "any", "--steps", "2", "--seeds", "0", "--output", str(output)]
    for _ in range(2):  # what is there is not trained again
        assert teachers.main(options) == 0
    rows = read(output)
    forms = ["none", *(f"{form}{mixed}" for form in teachers.FORMS for mixed in ("", ", mixed"))]
    assert [row["teacher"] for row in rows] == [form for form in forms for _ in range(2)]
    ranked = {row["teacher"]: row["ndcg_10"] for row in rows}
    # Mixed scores have neither shift nor scale.
    assert ranked["cosines, mixed"] == ranked["logits, mixed"]


# Steps, counted and measured.


def test_cases_and_a_training_step_are_counted(tmp_path):
    path = tmp_path / "calculated.csv"
    options = ["--suite", "tiny", "--only", "flops,info_nce", "--output", str(path)]
    assert calculated.main(options) == 0
    rows = read(path)
    assert {("flops", "eager"), ("info_nce", "ours")} <= {(x["loss"], x["variant"]) for x in rows}
    assert all(int(row["launches"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)
    assert read(RESULTS / "calculated.csv")[0].keys() == rows[0].keys()
    plain, ours = calculated.training_steps(training_step.TINY)
    assert (plain["variant"], ours["variant"]) == ("eager", "ours")
    assert ours["launches"] > 100


def test_a_training_step_is_measured(tmp_path):
    output = tmp_path / "step.csv"
    options = ["--device", "cpu", "--tiny", "--budget", "0.01", "--output", str(output)]
    assert training_step.main(options) == 0
    rows = read(output)
    assert [(row["pairs"], row["variant"]) for row in rows] == [("2", "eager"), ("2", "ours")]
    for row in rows:
        assert row["status"] == "ok"
        assert all(float(row[key]) > 0 for key in ("seconds", "tokens_per_second", "peak_bytes"))
        assert float(row["gradient_difference"]) < training_step.ALLOWED_GRADIENT


def test_every_variant_takes_a_trainers_steps_with_either_kind_of_model(folder, monkeypatch):
    models = [str(saved(folder / name / "x", name == "masked")[0]) for name in ("masked", "dense")]
    monkeypatch.setattr(trainer_step, "START", 20)  # of a tiny vocabulary
    output = folder.parent / "trainer-step.csv"
    sizes = ("--batches", "2x8", "--budget", "0", "--output", str(output))
    assert trainer_step.main(["--models", *models, *sizes]) == 0
    rows = read(output)
    assert [row["variant"] for row in rows] == list(trainer_step.VARIANTS) * 4  # in two dtypes
    assert all(float(row["seconds"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)


def test_of_sparse_vectors_ranks_send_entries(tmp_path):
    output = tmp_path / "gathered.csv"
    sizes = ("--ranks", "2", "--pairs", "3", "--vocabulary", "400", "--active", "0.02")
    assert gathered.main([*sizes, "--output", str(output)]) == 0
    dense, entries = read(output)
    # Rows of documents in one direction, their gradients in the other.
    assert float(dense["mib_sent"]) >= 2 * (2 * 3 * 400 * 4) / 2**20
    assert 0 < float(entries["mib_sent"]) < float(dense["mib_sent"]) / 10
    for row in (dense, entries):
        assert float(row["value_difference"]) < 1e-9
        assert float(row["gradient_difference"]) < 1e-9
