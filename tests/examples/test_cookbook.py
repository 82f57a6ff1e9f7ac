"""Every script of the cookbook, with tiny untrained models; with real ones where they are given.

`SPLADE_TINY` names the folder of a trained SPLADE model, `MINILM` that of a dense encoder.
"""

import importlib
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from sparse_losses import SpladeEncoder, StaticQueryEncoder
from tests.representation.tiny_models import language_model, saved, tokenizer, word_level

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def script(monkeypatch):
    """Import a script as Python does that runs it: beside `data.py`."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def words(script):
    """A tokenizer of the words of the pairs that are trained on."""
    texts = " ".join(f"{name} {text}" for name, text, _ in script("data").documented())
    return word_level(sorted(set(re.findall(r"\w+", texts.lower())))[:2000], model_max_length=128)


@pytest.fixture
def given(words, tmp_path):
    """Return the folder of a tiny model by its kind, or of a real one by its variable."""

    def folder(name):
        if name.isupper():
            return os.environ.get(name) or pytest.skip(f"{name} is not set")
        kind = "qwen3" if name == "decoder" else "bert"
        model = language_model(kind, len(words), max_position_embeddings=128)
        if name == "tiny":  # sparse already, as a trained SPLADE model is
            model.get_output_embeddings().bias.data -= 2.0
        return saved(tmp_path / name, model.base_model if name == "dense" else model, words)

    return folder


@pytest.fixture(params=["tiny", "SPLADE_TINY"])
def splade(request, given):
    return given(request.param)


pytestmark = pytest.mark.filterwarnings("ignore:sentence-transformers does not apply")


def test_fine_tune(script, splade, tmp_path):
    folder = tmp_path / "trained"
    found = script("fine_tune").main(splade, steps=2, folder=str(folder))
    assert abs(found.after.document_active - 64) < 2
    assert abs(found.after.query_active - 8) < 1
    loaded = SpladeEncoder.from_pretrained(folder)
    assert loaded.budgets == found.budgets


@pytest.mark.parametrize("model", ["dense", "MINILM"])
def test_from_dense(script, given, model, tmp_path):
    folder = tmp_path / "trained"
    found = script("from_dense").main(given(model), steps=2, folder=str(folder))
    assert abs(found.after.document_active - 64) < 2
    assert SpladeEncoder.from_pretrained(folder).budgets == found.budgets


@pytest.mark.parametrize("model", ["tiny", "decoder", "SPLADE_TINY"])
def test_lora(script, given, model, tmp_path):
    path = given(model)
    loaded = script("lora").main(path, steps=2, folder=str(tmp_path / "adapters"))
    adapters = [x for name, x in loaded.named_parameters() if "lora_B" in name]
    assert adapters
    assert all(x.any() for x in adapters)  # they are 0 before the training
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    before = SpladeEncoder.from_pretrained(path).model.get_input_embeddings().weight
    assert torch.equal(loaded.model.get_input_embeddings().weight, before)


@pytest.mark.parametrize(("model", "teacher"), [("tiny", "tiny"), ("SPLADE_TINY", "MINILM")])
def test_teachers(script, given, model, teacher):
    loss = script("teachers").main(given(model), given(teacher), steps=2)
    assert 0 < loss < 1000


def test_large_batch(script, splade):
    assert script("large_batch").main(splade, steps=1, batch=64, size=16) > 0


def test_mined_negatives(script, splade, capsys):
    assert script("mined_negatives").main(splade, steps=2) > 0
    assert re.search(r"[1-9]\d* negatives of \d+ queries", capsys.readouterr().out)


def test_a_mined_negative_is_neither_the_answer_nor_as_good(script, given):
    encoder = SpladeEncoder.from_pretrained(given("tiny"))
    pairs = [
        ("copy file", "copy data of a file"),
        ("copy tree", "copy data of a tree"),
        ("copy file", "copy data of a file"),  # the first one's answer, too
        ("random number", "return a random number"),
    ]
    found = [negatives for *_, negatives in script("mined_negatives").mine(encoder, pairs)]
    assert found[0] == found[2] == ["copy data of a tree"]
    assert found[3] == []


def test_ndcg_by_hand(script):
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    grades = torch.tensor([[0.0, 2.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    first = 2 / math.log2(3) / (2 + 1 / math.log2(3))  # the right ones at 2 and 4, cut at 3
    assert script("data").ndcg(scores, grades, k=3) == pytest.approx((first + 0) / 2)


def test_korean(script, tmp_path):
    model = language_model("xlm-roberta", 400, max_position_embeddings=140)
    path, folder = saved(tmp_path / "model", model, tokenizer()), str(tmp_path / "trained")
    before, after = script("korean").main(path, steps=2, folder=folder)
    assert 0 <= after <= 1
    assert 0 < before <= 1
    assert SpladeEncoder.from_pretrained(folder).budgets


def test_inference_free(script, splade, tmp_path):
    folder = str(tmp_path / "router")
    weights = script("inference_free").main(splade, steps=2, folder=folder)
    assert all(0 < len(one) <= 8 for one in weights)
    queries = StaticQueryEncoder.from_pretrained(folder)
    assert queries.encode_query(["parse a date", "copy a file"], output="tokens") == weights


def test_multi_label(script, splade):
    before, after = script("multi_label").main(splade, steps=20)
    assert 0 < min(before, after) < max(before, after) < 1


def test_the_labels_that_a_neighbour_shares_are_counted(script):
    class Given(torch.nn.Module):
        def forward(self, texts):
            return torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])

    labels = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    share = script("multi_label").shared(Given(), ["a", "b", "c"], labels)
    assert share == pytest.approx((1 / 2 + 1 + 0) / 3)


def test_a_large_batch_has_its_own_gradient(script, given):
    """Of one pass over the whole batch, where dropout is off."""
    encoder = SpladeEncoder.from_pretrained(given("tiny")).double()
    columns = [["copy a file", "parse a date", "sort"], ["copy", "read a date", "order"]]
    loss = script("large_batch").InfoNCELoss(similarity="dot", temperature=1.0)
    cached = script("large_batch").cached_backward(encoder, columns, loss, size=2)
    gradients = [parameter.grad for parameter in encoder.parameters()]
    encoder.zero_grad()
    whole = loss(*(encoder(**encoder.tokenize(column)) for column in columns))
    whole.backward()
    torch.testing.assert_close(cached, whole.detach())
    torch.testing.assert_close(gradients, [parameter.grad for parameter in encoder.parameters()])


def test_to_an_index(script, splade, tmp_path):
    folder = tmp_path / "index"
    vectors = script("to_an_index").main(splade, products=1.0, folder=str(folder))
    rows = list(zip(*vectors.values(), strict=True))
    assert len(rows) > 100
    for weights, elastic, qdrant, vespa, solr in rows:
        assert weights == vespa["cells"]
        assert sorted(weights.values()) == pytest.approx(sorted(qdrant["values"]))
        assert set(elastic) == {token.replace(".", "__") for token in weights}
        assert solr.count("|") >= len(weights)
    program = torch.export.load(folder / "document.pt2").module()
    encoder = SpladeEncoder.from_pretrained(splade)
    batch = encoder.tokenize(["copy a file", "the largest of three numbers"])
    assert program(*batch.values(), side="document").shape == (2, encoder.vocab_size)
