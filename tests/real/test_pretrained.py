"""Pretrained weights, where ``SPLADE_TINY`` (a SPLADE of BERT) and ``MINILM`` name folders."""

import functools
import os
import time

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from sparse_losses import SpladeEncoder
from sparse_losses.functional import info_nce_loss, splade_pool
from tests.representation.tiny_models import dense, load_theirs, reloaded, with_lora


def folder(variable):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no folder of pretrained weights")
    return os.environ[variable]


LATIN = ("", " ", "\n\t", "the", "The quick brown fox", "?!...,;:", "----", "[MASK] [SEP]")
CODE = ("<s>html</s>", "e = mc²", "def f(x): return x | y", "SELECT * FROM t;", "\x00\x07")
MARKS = ("ﬁnance", "naïve café", "Ünïcödé", "a\u0301", "\u200b", "0.1 + 0.2 = 0.30000000000000004")
SCRIPTS = (
    "서울에서 점심 메뉴 추천해 주세요",
    "日本語の文",
    "مرحبا بالعالم",
    "שלום",
    "👩‍👩‍👧 🎉🎉",
    "🙂",
)
LONG = ("x" * 300, "rain in spain " * 40, "토큰 " * 300, "word " * 600, "http://a.b/c?d=e#f")
PARTS = (*LATIN, *CODE, *MARKS, *SCRIPTS, *LONG)
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
def test_vectors_are_those_of_transformers(
    encoder, expected, batch_size, padding_side, monkeypatch
):
    monkeypatch.setattr(encoder.tokenizer, "padding_side", padding_side)
    vectors = dense(encoder, TEXTS, batch_size=batch_size)
    near(vectors, expected)
    assert (vectors > 0).any(1).all()


def test_outputs_agree(encoder, expected):
    assert torch.equal(encoder.encode(TEXTS).to_dense(), dense(encoder, TEXTS))
    for row, tokens in zip(expected, encoder.encode(TEXTS, output="tokens"), strict=True):
        ids = encoder.tokenizer.convert_tokens_to_ids(list(tokens))
        assert len(ids) == (row > 0).sum()
        near(torch.tensor(list(tokens.values())), row[ids])


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


def test_gradients_are_those_of_the_models_logits(encoder):
    model = AutoModelForMaskedLM.from_pretrained(folder("SPLADE_TINY")).eval()
    batch = encoder.tokenize(TEXTS[3:20])
    splade_pool(model(**batch).logits, batch["attention_mask"]).square().sum().backward()
    encoder.zero_grad()
    encoder(**batch).square().sum().backward()
    ours, size = dict(encoder.model.named_parameters()), 0.0
    for name, parameter in model.named_parameters():
        size = max(size, float(parameter.grad.abs().max()))
        torch.testing.assert_close(ours[name].grad, parameter.grad, atol=1e-4 * size, rtol=1e-3)


def test_dense_model_is_refused_and_encodes_without_expansion():
    with pytest.raises(ValueError, match="known modules only, got Transformer, Pooling, Normalize"):
        SpladeEncoder.from_pretrained(folder("MINILM"))
    words = AutoTokenizer.from_pretrained(folder("MINILM"))
    encoder = SpladeEncoder(AutoModel.from_pretrained(folder("MINILM")), words, expansion=False)
    for row, text in zip(dense(encoder.eval(), TEXTS), TEXTS, strict=True):
        ids = words(text, truncation=True, max_length=encoder.max_length)["input_ids"]
        assert set(row.nonzero()[:, 0].tolist()) <= set(ids) - set(words.all_special_ids)


def test_dense_model_becomes_a_sparse_one(tmp_path):
    encoder = SpladeEncoder.from_dense(folder("MINILM"), TEXTS[:100], start_active=128)
    assert len(encoder.encode(TEXTS[:100]).values()) / 100 == pytest.approx(128, rel=0.02)
    pairs = ("a doctor treats patients", "physicians in hospitals"), ("bake bread", "an oven")
    x, y = (dense(encoder, side) for side in zip(*pairs, strict=True))
    assert ((x @ y.T).argmax(1) == torch.arange(2)).all(), "it ranks without training"
    encoder.save_pretrained(tmp_path)
    found = load_theirs(tmp_path).encode(TEXTS[:50], convert_to_sparse_tensor=False)
    near(found, dense(encoder, TEXTS[:50]))


def calm(**options):
    """Without dropout, also after saving and loading."""
    encoder = SpladeEncoder.from_pretrained(folder("SPLADE_TINY"), **options)
    for module in encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    config = encoder.model.config
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return encoder


@pytest.mark.parametrize(
    "trainer", ["accelerate", "lightning", "hugging_face", "sentence_transformers"]
)
@pytest.mark.filterwarnings("ignore")  # of the trainers
def test_trainers_take_the_steps_of_a_bare_loop(trainer, tmp_path, monkeypatch):
    trainers = pytest.importorskip("tests.integrations.trainers")
    setting, size = trainers.setting, calm().vocab_size
    setting.forget_accelerator()
    words = functools.partial(AutoTokenizer.from_pretrained, folder("SPLADE_TINY"))
    for name, value in (("encoder", calm), ("tokenizer", words), ("VOCAB_SIZE", size)):
        monkeypatch.setattr(setting, name, value)
    run = getattr(trainers, f"by_{trainer}")(tmp_path, setting.objective(), epochs=1)
    trainers.compare(run, setting.objective(), epochs=1)


def test_adapters_learn_and_load_and_merge(tmp_path):
    plain = calm()
    encoder = SpladeEncoder(with_lora(plain.model, ["query", "value"]), plain.tokenizer)
    learned = [p for p in encoder.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(learned, lr=1e-2), []
    for _ in range(10):
        x, y = (encoder(**encoder.tokenize(texts)) for texts in (TEXTS[3:11], TEXTS[33:41]))
        losses.append(info_nce_loss(x, y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    again, expected = reloaded(encoder.eval(), tmp_path), dense(encoder, TEXTS)
    torch.testing.assert_close(dense(again, TEXTS), expected)
    merged = SpladeEncoder(again.model.merge_and_unload(), plain.tokenizer).eval()
    torch.testing.assert_close(dense(merged, TEXTS), expected, atol=1e-4, rtol=1e-3)


def test_pruned_and_exported_it_keeps_what_was_asked_for():
    encoder = calm(max_length=60)
    texts, queries = TEXTS[10:], TEXTS[:40]
    options = {"queries": queries, "query_target": 8, "verbose": False}
    encoder.calibrate(texts, 16, **options)
    for side, own, number in (("document", texts, 16), ("query", queries, 8)):
        count = len(encoder.encode(own, side=side).values()) / len(own)
        assert count == pytest.approx(number, rel=0.02)
    batch = {name: x[:4, :20].contiguous() for name, x in encoder.tokenize(TEXTS).items()}
    length = torch.export.Dim("length", min=2, max=60)
    sizes = {0: torch.export.Dim("batch", min=1, max=512), 1: length}
    shapes = dict.fromkeys(batch, sizes) | {"side": None}
    program = torch.export.export(
        encoder, tuple(batch.values()), {"side": "document"}, dynamic_shapes=shapes, strict=False
    )
    batch = encoder.tokenize(texts)
    found = program.module()(*batch.values(), side="document")
    torch.testing.assert_close(found, dense(encoder, texts), atol=1e-4, rtol=1e-3)


def test_encoding_is_not_slower_than_sentence_transformers(encoder):
    theirs = load_theirs(folder("SPLADE_TINY"))

    def seconds(encode):
        before = time.process_time()
        encode(TEXTS, batch_size=32)
        return time.process_time() - before

    rounds = [(seconds(encoder.encode), seconds(theirs.encode)) for _ in range(3)]
    ours, others = (min(times) for times in zip(*rounds, strict=True))
    assert ours < 1.1 * others
