"""Trainings on a collection on disk, of the demo's model and of a pretrained one."""

import csv
import json
import math
import statistics

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from benchmarks.studies import beir, collection
from sparse_losses import SpladeEncoder
from tests.examples.demo.artificial import TINY, TOPICS


def _run(folder, *options):
    output = folder.parent / "output"
    collection.main(["--data", str(folder), "--steps", "2", "--output", str(output), *options])
    with (output / "collection.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_rows_are_kept_and_other_texts_refused(small, folder, monkeypatch, capsys):
    pytest.importorskip("sentence_transformers")
    small(collection)
    options = ["--target", "64", "--calibrate", "9", "--weights", "0.1", "--seeds", "0", "1"]
    rows = _run(folder, *options)
    names = ["RECOMMENDED, target 64", "sentence-transformers, weight 0.1, BM25 as teacher"]
    names += ["sentence-transformers, weight 0.1"]
    endings = ["", *(f", {method} to 9" for method in ("pruned", "cut", "shifted"))]
    expected = [names[0] + end for _ in "01" for end in endings]
    expected += [n + end for n in names[1:] for _ in "01" for end in endings[:2]]
    assert [row["row"] for row in rows] == [*collection.BASELINES, *expected]
    active = [float(row["active_document"]) for row in rows if row["row"].endswith(" to 9")]
    assert active == pytest.approx([9] * 10, rel=0.1)
    assert all(row[name] for row in rows for name in ("git_commit", "torch", "bm25s", "device"))
    stored = json.loads(next(folder.parent.glob("output/*/*-64-1.json")).read_text("utf-8"))
    assert stored["settings"]["preset"]["target_active"] == {"document_flops": 64}
    assert list(stored["controllers"]) == ["document"]
    assert [row["seed"] for row in rows[:7]] == ["", "", *"00001"]
    ndcg = stored["rows"][""]["ndcg_10"]
    assert float(rows[6]["ndcg_10"]) == pytest.approx(statistics.mean(ndcg), abs=1e-4)
    monkeypatch.setattr(collection, "run_one", lambda *job: pytest.fail("ran again"))
    assert _run(folder, *options, "--reference", names[1]) == rows
    assert f"| nDCG@10 less that of {names[1]} |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--reference BM26 is none of BM25, words, "):
        _run(folder, *options, "--reference", "BM26")
    path = next(folder.parent.glob("output/*/*-64-0.json"))
    text = path.read_text("utf-8")
    path.write_text(text[:99], encoding="utf-8")
    with pytest.raises(SystemExit, match=r"64-0\.json is damaged; delete it"):
        _run(folder, *options)
    path.write_text(text, encoding="utf-8")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(corpus.read_text("utf-8").replace("node", "dot"), encoding="utf-8")
    with pytest.raises(SystemExit, match="of other texts named toy"):
        _run(folder, *options)


def test_pruned_weights_stay_and_shifted_weights_shrink():
    queries, documents = torch.rand(2, 6, 40, generator=torch.manual_seed(0))
    fewer = collection.fewer(queries, documents, 8)
    kept = fewer["pruned"][1] > 0
    torch.testing.assert_close(fewer["pruned"][1], documents * kept)
    torch.testing.assert_close(fewer["shifted"][1] > 0, kept)
    lower = documents.expm1() - fewer["shifted"][1].expm1()
    threshold = lower[kept].mean().item()
    torch.testing.assert_close(lower[kept], torch.full_like(lower[kept], threshold))
    torch.testing.assert_close(fewer["shifted"][0], (queries.expm1() - threshold).relu().log1p())
    for row, cut in zip(documents, fewer["cut"][1], strict=True):
        assert sorted(cut[cut > 0].tolist()) == sorted(row.tolist())[-8:]
    assert all(torch.equal(fewer[method][0], queries) for method in ("pruned", "cut"))


def test_df_flops_is_the_documents_alone(folder):
    read = beir.load(folder)
    run = collection.PostingRun(read, collection.PostingTraining(steps=9, **TINY))
    run.objective.weights.update(document_flops=3.0, query_flops=2.0)
    batch = run.batch(0)
    total, terms = run.loss(batch)
    queries, documents = (x.activations.detach().double() for x in (batch.anchor, batch.positive))
    share = (documents > 0).double().mean(0)
    inside = 1 / (1 + (share.pow(math.log(2) / math.log(0.1)) - 1) ** 10)
    expected = (inside * documents.mean(0)).square().sum().item()
    assert 0 < expected < documents.mean(0).square().sum().item()
    assert terms["document_flops"] == pytest.approx(3 * expected, rel=1e-5)
    plain = queries.mean(0).square().sum().item()
    assert terms["query_flops"] == pytest.approx(2 * plain, rel=1e-5)
    assert total.item() == pytest.approx(sum(terms.values()), rel=1e-5)


@pytest.fixture
def bert(tmp_path):
    """Returns the folder of a tiny model with its tokenizer, and both of them."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[CLS]", "[UNK]", "[SEP]", *sorted(set(" ".join(TOPICS.values()).split()))]
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 1))
    marks = {f"{name.lower()[1:-1]}_token": name for name in words[:4]}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **marks)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(words) + 3, intermediate_size=32, **sizes)
    model = transformers.BertForMaskedLM(config)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert", SpladeEncoder(model.eval(), tokenizer, max_length=64)


def test_a_pretrained_model_reads_its_own_tokens(folder, bert, monkeypatch):
    monkeypatch.setattr(collection, "QUERY_LENGTH", 6)
    path, encoder = bert
    read = beir.load(folder)
    read.documents[0] += f" {read.documents[1]}" * 5  # longer than the model reads
    run = collection.CollectionRun(read, collection.Training(steps=1, model=str(path)))
    assert max(map(len, run.queries)) == 6
    vectors = collection.vectors(run, run.tokens.ids(read.documents))
    expected = encoder.encode(read.documents, output="dense")
    torch.testing.assert_close(vectors, expected)
    run.train()
    assert not torch.equal(collection.vectors(run, run.tokens.ids(read.documents)), vectors)
