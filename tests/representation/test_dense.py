"""``SpladeEncoder.from_dense``: dot products of states and word embeddings, from a sparse start."""

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from sparse_losses import SpladeEncoder
from tests.representation import tiny_models as tiny

LONG = [text for text in tiny.TEXTS if text] * 3


def dense_folder(architecture, path):
    """The body of a model and its tokenizer, as a dense encoder is saved."""
    model, words = tiny.pair(architecture)
    return tiny.saved(path, model.base_model, words)


def products(folder, batch):
    """Largest products of word embeddings and states, which keep their mean deviation."""
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model(**batch)[0].double()
    embeddings = model.get_input_embeddings().weight.double()
    size = states[batch["attention_mask"].bool()].std(1).mean()
    rows = []
    for own, mask in zip(states, batch["attention_mask"], strict=True):
        each = [(h - h.mean()) / h.std(correction=0) * size @ embeddings.T for h in own[mask == 1]]
        rows.append(torch.stack(each).amax(0))
    return torch.stack(rows)


@pytest.mark.filterwarnings("ignore:expected")
@pytest.mark.parametrize("architecture", sorted({*tiny.ARCHITECTURES} - {"albert"}))
def test_logits_are_products_with_word_embeddings_and_all_load_them(architecture, tmp_path):
    folder = dense_folder(architecture, tmp_path / "dense")
    encoder = SpladeEncoder.from_dense(folder, LONG, start_active=12)
    batch = encoder.tokenize(LONG)
    with torch.no_grad():
        vectors, logits = encoder(**batch, return_logits=True)
        expected = products(folder, batch)
        shifts, size = expected - logits, expected.abs().max()
    assert (shifts - shifts.mean(0)).abs().max() < 0.02 * size, "nearly the identity"
    assert (shifts - expected.mean(0)).std() < 0.02 * size, "every token's mean is taken off"
    assert (vectors > 0).sum(1).double().mean() == pytest.approx(12, abs=0.3)
    assert not encoder.training
    words = encoder.model.get_input_embeddings().weight
    assert encoder.head.weight is words
    dense = encoder.encode(LONG, output="dense")
    again = tiny.reloaded(encoder, tmp_path / "saved")
    torch.testing.assert_close(again.encode(LONG, output="dense"), dense)
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(theirs(**batch).logits, encoder.model(**batch).logits)
    served = tiny.load_theirs(tmp_path / "saved")
    torch.testing.assert_close(served.encode(LONG, convert_to_sparse_tensor=False), dense)


@pytest.mark.parametrize("texts", [LONG[:1], LONG[:1] * 3, LONG[:2]], ids=len)
@pytest.mark.parametrize("number", [12, 100])
def test_few_texts_have_the_number_too(texts, number, tmp_path):
    """The mean of one text is the text: without it all logits would be 0."""
    folder = dense_folder("bert", tmp_path)
    encoder = SpladeEncoder.from_dense(folder, texts, start_active=number)
    assert len(encoder.encode(texts).values()) / len(texts) == pytest.approx(number, abs=0.5)


def test_folder_of_sentence_transformers_says_lengths_and_prompts(tmp_path):
    package = pytest.importorskip("sentence_transformers")
    folder = dense_folder("bert", tmp_path / "body")
    theirs = package.SentenceTransformer(str(folder), device="cpu")
    theirs.max_seq_length, theirs.prompts = 7, {"query": "ask: ", "document": "of: "}
    theirs.save_pretrained(str(tmp_path / "theirs"))
    encoder = SpladeEncoder.from_dense(tmp_path / "theirs", LONG, start_active=9)
    assert encoder.max_length == 7
    assert encoder.prompts == {"query": "ask: ", "document": "of: "}
    assert SpladeEncoder.from_dense(folder, LONG, start_active=9).prompts is None
    own = {"max_length": 7, "prompts": encoder.prompts}
    plain = SpladeEncoder.from_dense(folder, LONG, start_active=9, **own)
    torch.testing.assert_close(plain.head.bias, encoder.head.bias)
    with pytest.raises(ValueError, match="known modules only, got Transformer, Pooling"):
        SpladeEncoder.from_pretrained(tmp_path / "theirs")


def test_options_are_the_encoders_and_the_loaders(tmp_path):
    folder = dense_folder("bert", tmp_path)
    options = {"dtype": torch.bfloat16, "activation": "log1p_relu"}
    encoder = SpladeEncoder.from_dense(folder, LONG, start_active=9, **options)
    assert (encoder.head.weight.dtype, encoder.activation) == (torch.bfloat16, "log1p_relu")
    assert len(encoder.encode(LONG).values()) / len(LONG) == pytest.approx(9, rel=0.2)
    with pytest.raises(ValueError, match=r"expected some `texts` .*, got none"):
        SpladeEncoder.from_dense(folder, [])
    for name in ("expansion", "logit_scale"):
        with pytest.raises(TypeError, match=f"expected no {name} for a dense encoder"):
            SpladeEncoder.from_dense(folder, LONG, **{name: 0.5})


def test_trained_heads_and_other_architectures_are_refused(tmp_path):
    tiny.saved(tmp_path / "bert", *tiny.pair("bert"))
    for name in ("albert", "qwen3"):
        dense_folder(name, tmp_path / name)
    for name, error, message in [
        ("bert", ValueError, "no trained head, got cls.*SpladeEncoder.from_pretrained loads it"),
        ("albert", TypeError, r"a head of one Linear \[8, 8\], as wide as the word embeddings"),
        ("qwen3", TypeError, "got no layers in Qwen3ForCausalLM"),
    ]:
        with pytest.raises(error, match=message):
            SpladeEncoder.from_dense(tmp_path / name, LONG, bidirectional=tiny.BOTH_WAYS)
