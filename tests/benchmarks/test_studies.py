"""The studies on toys: figures that follow their formulas, and sound rows that are kept."""

import dataclasses
import json
import math
import random

import pytest
import torch

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
from tools.tables import RESULTS as STUDIES

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


# The studies, with few texts and tiny models.


@pytest.mark.parametrize(
    ("model", "arm"), [("bag", "shift"), ("static", "shift"), ("decoder", "gain"), ("bag", "topk")]
)
def test_every_model_and_arm_starts_sparse_and_is_pruned_to_its_number(model, arm):
    texts = battery.Texts()
    texts.queries, texts.documents = texts.queries[:40], texts.documents[:40]
    row = dataclasses.replace(battery.Row(model), steps=2, batch=4)
    rows = list(battery.run(row, battery.ARMS[arm], texts))
    assert [one["asked_document"] for one in rows] == ["", 32, 16]
    assert rows[0]["first_active"] == pytest.approx(battery.V / 4, rel=0.2)
    assert all(one["document"] <= 1.1 * one["asked_document"] for one in rows[1:])


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


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The folders of a tiny masked language model and of its body, and what fits their size."""
    model, words = tiny_models.pair("bert", max_position_embeddings=200)
    for name, own in (("masked", model), ("dense", model.base_model)):
        tiny_models.saved(tmp_path / name, own, words)
    monkeypatch.setattr(collection, "LENGTHS", (32, 200))  # its tokens are letters
    monkeypatch.setattr(from_dense, "LENGTH", 40)
    monkeypatch.setattr(from_dense, "STARTS", (8, 20))
    for module in (collection, trainer_step):
        monkeypatch.setattr(module, "START", 20)
    for module in (collection, teachers):
        monkeypatch.setattr(module, "POINTS", [(4, 8)])
    monkeypatch.setenv("MINILM", str(tmp_path / "dense"))
    return tmp_path


def test_the_cut_model_gives_the_vectors_of_the_whole(folder, tiny):
    found, whole = beir.load(folder), SpladeEncoder.from_pretrained(tiny / "masked")
    task = collection.Task([found], str(tiny / "masked"))
    assert len(task.kept) < whole.vocab_size
    ((_, _, documents),) = task.tests
    cut = learn.vectors(collection.Tower(task.make(), task.kept).eval(), documents)
    expected = whole.encode(found.documents, output="dense")[:, task.kept]
    torch.testing.assert_close(cut, expected)


class BiEncoder:
    """A teacher."""

    def __init__(self, *_, **options): ...

    def encode(self, texts, **options):
        return torch.eye(8)[[len(text) % 8 for text in texts]]


SHORT = "--data toy --steps 2 --seeds 0"
RUNS = {  # the study, its options, a column, and what stands there
    "scratch": (collection, f"{SHORT} --arms prune topk16", "arm", {"start 1/4, topk 16 from 75%"}),
    "masked": (collection, f"{SHORT} --arms prune --model masked", "arm", {"nothing"}),
    "dense": (collection, f"{SHORT} --arms prune --model dense", "arm", {"start 20, nothing"}),
    "from_dense": (from_dense, "--data toy", "start", {"", "8", "20"}),
    "teachers": (teachers, f"{SHORT} --model masked --teacher any", "teacher", {"none"}),
    "calculated": (calculated, "--suite tiny --only flops,info_nce", "loss", {"flops", "info_nce"}),
    "training": (training_step, "--device cpu --tiny --budget 0.01", "status", {"ok"}),
    "trainer": (trainer_step, "--models masked dense --batches 2x8 --budget 0", "model", {"dense"}),
    "gathered": (gathered, "--ranks 2 --pairs 3 --vocabulary 400 --active 0.02", "layout", {"CSR"}),
}
COMMITTED = {training_step: "cuda-training", trainer_step: "trainer-step"}


@pytest.mark.parametrize("name", RUNS)
def test_a_study_of_toys_has_the_columns_of_its_results(name, folder, tiny, monkeypatch):
    module, options, column, expected = RUNS[name]
    package = pytest.importorskip("sentence_transformers")
    if module is teachers:
        monkeypatch.setattr(package, "SentenceTransformer", BiEncoder)
    monkeypatch.chdir(folder.parent)
    words = [*options.split(), "--output", "study.csv"]
    assert module.main(words) == 0
    rows = read(tiny / "study.csv")
    file = COMMITTED.get(module, module.__name__.rpartition(".")[2])
    (committed,) = (x for x in (RESULTS, STUDIES) for x in [x / f"{file}.csv"] if x.exists())
    if committed.parent == STUDIES:  # what is there is not trained again
        assert module.main(words) == 0
        assert read(tiny / "study.csv") == rows
    assert rows[0].keys() == read(committed)[0].keys() - {"cuda"}  # the driver, where there is one
    assert {row[column] for row in rows} >= expected
    most = training_step.ALLOWED_GRADIENT if module is training_step else 1e-9
    if module is gathered:  # rows of documents in one direction, their gradients in the other
        dense, entries = (float(row["mib_sent"]) * 2**20 for row in rows)
        assert dense >= 2 * (2 * 3 * 400 * 4) > 10 * entries > 0
    for row in rows:
        assert all(0 <= float(row[key]) <= 1 for key in row if key in ("ndcg_10", "recall_10"))
        assert all(float(row[key]) < most for key in row if key.endswith("_difference"))
        assert all(float(row[key]) > 0 for key in row if key in ("seconds", "peak_bytes"))
