"""README's and the tutorial's own code, with tiny models of the real architectures and few rows."""

import re
import warnings
from pathlib import Path

import datasets
import pytest
import torch

from sparse_losses import SpladeEncoder
from tests.representation.tiny_models import KINDS, language_model, saved, tokenizer
from tools.markdown import DOCS, split_code

PAGE = DOCS / "guides" / "real_model.md"
ENGLISH = [
    ("what is a learned sparse retriever", "a learned sparse retriever weighs a vocabulary"),
    ("which dog is lazy", "the quick brown fox jumps over the lazy dog"),
]
KOREAN = [("서울 맛집", "서울 맛집 추천"), ("점심 메뉴", "점심 메뉴 추천해 주세요")]
# The data set with its subset, and the name of its first column.
MSMARCO = ("sentence-transformers/msmarco-msmarco-distilbert-base-tas-b", "triplet"), "query"
TYDI = ("sentence-transformers/mr-tydi", "ko-triplet"), "anchor"
CASES = {  # by architecture: the model, the data set, its first column
    "distilbert": ("distilbert-base-uncased", *MSMARCO),
    "modernbert": ("answerdotai/ModernBERT-base", *MSMARCO),
    "xlm-roberta": ("FacebookAI/xlm-roberta-base", *TYDI),
}
COLUMNS = 1000  # of the models here


def triplets(pairs, first, count=400):
    """Rows with the column names of the data set: every text is another."""
    queries, documents = zip(*pairs, strict=True)
    columns = {first: queries, "positive": documents, "negative": documents[::-1]}
    return datasets.Dataset.from_dict(
        {
            name: [f"{texts[n % len(texts)]} {name} {n}" for n in range(count)]
            for name, texts in columns.items()
        }
    )


def nano_beir(subset):
    if subset == "qrels":
        return datasets.Dataset.from_dict({"query-id": ["0", "1"], "corpus-id": ["0", "1"]})
    texts = [pair[subset == "corpus"] for pair in ENGLISH][: 2 if subset == "queries" else None]
    return datasets.Dataset.from_dict({"_id": [str(n) for n in range(len(texts))], "text": texts})


@pytest.mark.filterwarnings("ignore:the thresholds of")
@pytest.mark.filterwarnings("ignore:sentence-transformers does not apply")
@pytest.mark.parametrize("architecture", list(CASES))
def test_the_page_trains_saves_and_evaluates(architecture, tmp_path, monkeypatch):
    model, data, first_column = CASES[architecture]
    pairs = KOREAN if architecture == "xlm-roberta" else ENGLISH
    asked = []

    def load_dataset(name, subset, *, split):
        asked.append((name, subset, split))
        if name == "sentence-transformers/NanoBEIR-en":
            return nano_beir(subset)
        assert ((name, subset), split) == (data, "train")
        return triplets(pairs, first_column)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)  # a folder of the model's name comes before the hub
    words = tokenizer(KINDS.get(architecture, "unigram"))
    torch.manual_seed(0)
    saved(model, language_model(architecture, COLUMNS, max_position_embeddings=64), words)

    _, found = split_code(PAGE.read_text(encoding="utf-8"))
    first, *rest = (code for language, code in found if language == "python")
    page = {"__name__": "__main__"}
    exec(compile(first, PAGE.name, "exec"), page)
    assert (page["MODEL"], page["DATA"]) == CASES["distilbert"][:2]
    page |= {"MODEL": model, "DATA": data, "STEPS": 2, "BATCH": 2, "TOKENS": 32}
    for code in rest:
        exec(compile(code, PAGE.name, "exec"), page)

    assert asked[0] == (*data, "train")
    splits = {split for name, _, split in asked[1:]}
    assert splits == {"NanoMSMARCO", "NanoNFCorpus", "NanoNQ"}
    before = SpladeEncoder.from_pretrained(model)
    for trainer in ("sentence-transformers-splade", "splade"):
        trained = SpladeEncoder.from_pretrained(f"{trainer}/final")
        assert trained.vocab_size == COLUMNS
        moved = zip(trained.parameters(), before.parameters(), strict=True)
        assert max((now - was).abs().max() for now, was in moved) > 0
        assert [path.name for path in Path(trainer).glob("checkpoint-*")] == ["checkpoint-2"]
    log = page["trainer"].state.log_history[0]
    assert {"loss", "document/active_dimensions"} <= log.keys()


def test_the_readmes_loop_trains_prunes_and_saves(tmp_path, monkeypatch, capsys):
    _, found = split_code((DOCS.parent / "README.md").read_text(encoding="utf-8"))
    (code,) = [code for _, code in found if "for queries, documents in loader" in code]
    monkeypatch.chdir(tmp_path)
    name = re.search(r'from_pretrained\("(.+)"\)', code)[1]
    model = language_model("distilbert", COLUMNS, max_position_embeddings=64)
    saved(name, model, tokenizer("wordpiece"))
    queries, documents = map(list, zip(*ENGLISH, strict=True))
    held_out = {"documents_held_out": documents, "queries_held_out": queries}
    with warnings.catch_warnings(action="ignore"):  # the model starts dense
        exec(code, {"loader": [(queries, documents)] * 2, **held_out})
    assert "-> 64 dimensions" in capsys.readouterr().out
    assert 64 in SpladeEncoder.from_pretrained("my-retriever").budgets
