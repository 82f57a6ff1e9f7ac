"""Pretrained weights, where ``SPLADE_TINY`` (a SPLADE of BERT) and ``MINILM`` name folders."""

import functools
import os

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from sparse_losses import SpladeEncoder
from sparse_losses.functional import splade_pool
from tests.representation.tiny_models import dense, load_theirs


def folder(variable):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no folder of pretrained weights")
    return os.environ[variable]


LATIN = ("", " ", "\n\t", "the", "The quick brown fox", "?!...,;:", "----", "[MASK] [SEP]")
CODE = ("<s>html</s>", "e = mc²", "def f(x): return x | y", "SELECT * FROM t;", "\x00\x07")
MARKS = ("ﬁnance", "naïve café", "Ünïcödé", "a\u0301", "\u200b", "0.1 + 0.2 = 0.30000000000000004")
SCRIPTS = ("서울에서 점심 메뉴 추천해 주세요", "日本語の文", "مرحبا بالعالم", "שלום", "👩‍👩‍👧 🎉🎉")
LONG = ("x" * 300, "rain in spain " * 40, "토큰 " * 300, "word " * 600, "http://a.b/c?d=e#f")
PARTS = (*LATIN, *CODE, *MARKS, *SCRIPTS, "🙂", *LONG)
TEXTS = [f"{a} {b}".strip(" ") if b else a for b in ("", *PARTS[3:9]) for a in PARTS][:200]


@pytest.fixture(scope="module")
def encoder():
    return SpladeEncoder.from_pretrained(folder("SPLADE_TINY"))


@pytest.fixture(scope="module")
def expected(encoder):
    """log1p(relu(max)) of the logits of transformers' model, text by text."""
    model = AutoModelForMaskedLM.from_pretrained(folder("SPLADE_TINY")).eval()
    words = AutoTokenizer.from_pretrained(folder("SPLADE_TINY"))
    rows = []
    for text in TEXTS:
        batch = words(text, truncation=True, max_length=512, return_tensors="pt")
        with torch.no_grad():
            rows.append(splade_pool(model(**batch).logits, batch["attention_mask"])[0])
    assert len(rows) == 200
    return torch.stack(rows)


near = functools.partial(torch.testing.assert_close, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_vectors_are_those_of_transformers(encoder, expected, batch_size, padding_side):
    encoder.tokenizer.padding_side = padding_side
    vectors = dense(encoder, TEXTS, batch_size=batch_size)
    near(vectors, expected)
    assert (vectors > 0).any(1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_stay_near(expected, dtype):
    encoder = SpladeEncoder.from_pretrained(folder("SPLADE_TINY"), dtype=dtype)
    vectors = dense(encoder, TEXTS)
    rounding = {torch.float64: 2e-5, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]
    assert (vectors - expected).abs().max() < rounding


def test_sentence_transformers_agrees_before_and_after_saving(encoder, expected, tmp_path):
    encoder.save_pretrained(tmp_path / "ours")
    load_theirs(folder("SPLADE_TINY")).save_pretrained(str(tmp_path / "theirs"))
    for name in ("ours", "theirs"):
        near(load_theirs(tmp_path / name).encode(TEXTS, convert_to_sparse_tensor=False), expected)
        near(dense(SpladeEncoder.from_pretrained(tmp_path / name), TEXTS), expected)


def test_dense_model_becomes_a_sparse_one(tmp_path):
    encoder = SpladeEncoder.from_dense(folder("MINILM"), TEXTS[:100], start_active=128)
    assert len(encoder.encode(TEXTS[:100]).values()) / 100 == pytest.approx(128, rel=0.02)
    pairs = ("a doctor treats patients", "physicians in hospitals"), ("bake bread", "an oven")
    x, y = (dense(encoder, side) for side in zip(*pairs, strict=True))
    assert ((x @ y.T).argmax(1) == torch.arange(2)).all(), "it ranks without training"
    encoder.save_pretrained(tmp_path)
    found = load_theirs(tmp_path).encode(TEXTS[:50], convert_to_sparse_tensor=False)
    near(found, dense(encoder, TEXTS[:50]))


def test_pruned_both_sides_keep_what_was_asked_for():
    encoder = SpladeEncoder.from_pretrained(folder("SPLADE_TINY"), max_length=60)
    texts, queries = TEXTS[10:], TEXTS[:40]
    encoder.calibrate(texts, 16, queries=queries, query_target=8, verbose=False)
    for side, own, number in (("document", texts, 16), ("query", queries, 8)):
        count = len(encoder.encode(own, side=side).values()) / len(own)
        assert count == pytest.approx(number, rel=0.02)
