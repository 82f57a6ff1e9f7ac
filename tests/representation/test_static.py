"""Queries by one weight per token: oracle, edges, folders of both sides, training."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from sparse_losses import SpladeEncoder, StaticQueryEncoder
from tests.representation.tiny_models import TEXTS, load_theirs, make, pair, tokenizer
from tests.representation.tiny_models import dense as documents_of

QUERIES = [*TEXTS, "dog dog dog", "<s></s>", "lazy <mask> dog", "☃ dog"]


def random_weight(size):
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def static(words=None, weight=None):
    words = words or tokenizer("wordpiece")
    return StaticQueryEncoder(words, random_weight(len(words)) if weight is None else weight)


def dense(encoder, texts=QUERIES):
    return encoder.encode_query(texts, output="dense")


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "bytes"])
def test_a_token_that_occurs_has_its_weight_once_and_special_tokens_have_none(kind):
    words = tokenizer(kind)
    encoder = static(words)
    expected = np.zeros((len(QUERIES), len(words)))
    for row, text in zip(expected, QUERIES, strict=True):
        for token in words.backend_tokenizer.encode(text, add_special_tokens=False).ids:
            if token not in words.all_special_ids:
                row[token] = encoder.weight[token].item()
    assert (expected.any(1) == ["<s>" not in text and text != "" for text in QUERIES]).all()
    sparse = encoder.encode_query(QUERIES)
    assert sparse.layout == torch.sparse_csr
    for vectors in (dense(encoder), encoder(**encoder.tokenize(QUERIES)), sparse.to_dense()):
        assert np.array_equal(vectors, expected)
    for named, row in zip(encoder.encode_query(QUERIES, output="tokens"), expected, strict=True):
        ids = words.convert_tokens_to_ids(list(named))
        assert list(named.values()) == sorted(named.values(), reverse=True)
        assert dict(zip(ids, named.values(), strict=True)) == {i: row[i] for i in row.nonzero()[0]}


def test_nothing_gives_nothing():
    encoder = static()
    size = encoder.vocab_size
    for output in ("csr", "dense"):
        assert encoder.encode_query([], output=output).shape == (0, size)
    assert encoder.encode_query([], output="tokens") == []
    for shape in ((0, 3), (2, 0)):
        vectors = encoder(torch.zeros(shape, dtype=torch.int64))
        assert vectors.shape == (shape[0], size)
        assert not vectors.any()
    encoder.weight.zero_()
    assert encoder.encode_query(["dog"]).values().numel() == 0
    encoder.weight[encoder.tokenizer.convert_tokens_to_ids("dog")] = torch.nan
    assert dense(encoder, ["lazy", "dog"]).isnan().any(1).tolist() == [0, 1]


def test_masked_positions_do_not_count_whatever_their_ids():
    encoder = static()
    ids, mask = torch.tensor([[9, 20, 9, -100], [30, 0, 10**6, 9]]), [[1, 1, 1, 0], [1, 1, 0, 0]]
    expected = torch.zeros(2, encoder.vocab_size)
    expected[0, [9, 20]], expected[1, 30] = encoder.weight[[9, 20]], encoder.weight[30]
    for dtype in (torch.bool, torch.int64, torch.float32):
        assert torch.equal(encoder(ids, torch.tensor(mask).to(dtype)), expected)
    assert torch.equal(encoder(ids[:1, :3]), expected[:1])


def test_wrong_inputs_are_named():
    for call, error, message in [
        (lambda x: x(torch.tensor([[150]])), ValueError, r"`input_ids` in \[0, V\) with V = 150"),
        (lambda x: x(torch.ones(2, 3).long(), torch.ones(2, 2)), ValueError, "`attention_mask`"),
        (lambda x: x.encode_query("dog"), TypeError, "list of strings, got str"),
        (lambda x: static(None, torch.ones(149)), ValueError, "`weight` of at least 150 tokens"),
        (lambda x: static(None, torch.ones(150, 1)), ValueError, r"`weight` of shape \[V\]"),
        (lambda x: static(None, torch.ones(150).long()), TypeError, "`weight` to be floating"),
    ]:
        with pytest.raises(error, match=message):
            call(static())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_weights_give_vectors_in_fp32(dtype):
    encoder = static(weight=random_weight(150).to(dtype))
    vectors = encoder(**encoder.tokenize(QUERIES))
    assert vectors.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert dense(encoder).dtype == torch.float32
    assert torch.equal(dense(encoder), vectors.float())


def test_parameter_is_used_as_it_is_and_its_gradient_is_where_tokens_occur():
    words = tokenizer("wordpiece")
    frozen, weight = static(words), nn.Parameter(random_weight(len(words)))
    assert dict(frozen.named_parameters()) == {}
    assert frozen.state_dict().keys() == {"weight"}
    learned = static(words, weight)
    assert next(iter(learned.parameters())) is weight
    texts = ["dog dog", "<s> lazy dog", ""]
    factors = torch.randn(len(texts), len(words))
    (learned(**learned.tokenize(texts)) * factors).sum().backward()
    dog, lazy = words.convert_tokens_to_ids(["dog", "lazy"])
    expected = torch.zeros(len(words))
    expected[dog], expected[lazy] = factors[0, dog] + factors[1, dog], factors[1, lazy]
    torch.testing.assert_close(weight.grad, expected)


def test_sentence_transformers_alone_gives_the_vectors_of_both_sides(tmp_path):
    document = make()
    encoder = static(document.tokenizer)
    encoder.save_pretrained(tmp_path, document=document)
    files = ("modules.json", "router_config.json")
    assert not [name for name in files if "sparse_losses" in (tmp_path / name).read_text()]
    model, texts = load_theirs(tmp_path), [text for text in QUERIES if text]
    queries = model.encode_query(texts).to_dense()
    torch.testing.assert_close(queries, dense(encoder, texts))
    assert (queries < 0).any()
    documents = model.encode_document(texts).to_dense()
    torch.testing.assert_close(documents, documents_of(document, texts))


@pytest.mark.parametrize(("learned", "subfolder"), [(True, ""), (False, "best")])
def test_both_sides_of_a_saved_folder_are_loaded_again(learned, subfolder, tmp_path):
    document = make("xlm-roberta", max_length=17, idf_weights=True, gate=True)
    encoder = static(document.tokenizer)
    if learned:
        encoder = StaticQueryEncoder(encoder.tokenizer, nn.Parameter(encoder.weight))
    encoder.save_pretrained(tmp_path / subfolder, document=document)
    again = StaticQueryEncoder.from_pretrained(tmp_path, subfolder=subfolder)
    assert isinstance(again.weight, nn.Parameter) == learned
    assert torch.equal(dense(again), dense(encoder))
    documents = SpladeEncoder.from_pretrained(tmp_path, subfolder=subfolder)
    assert documents.max_length == 17
    assert torch.equal(documents_of(documents), documents_of(document))
    # Twice into the same folder; and documents alone make it a plain folder again.
    again.save_pretrained(tmp_path / subfolder, document=documents)
    twice = StaticQueryEncoder.from_pretrained(tmp_path / subfolder)
    assert torch.equal(dense(twice), dense(again))
    documents.save_pretrained(tmp_path / subfolder)
    with pytest.raises(ValueError, match="for queries, got SpladeEncoder"):
        StaticQueryEncoder.from_pretrained(tmp_path / subfolder)


@pytest.mark.parametrize("frozen", [True, False])
def test_folders_that_sentence_transformers_wrote_are_read(frozen, tmp_path):
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    document = make()
    document.save_pretrained(tmp_path)
    plain, words = load_theirs(tmp_path), document.tokenizer
    weight = random_weight(len(words)).index_fill(0, torch.tensor(words.all_special_ids), 0.0)
    query = modules.SparseStaticEmbedding(words, weight.clone(), frozen=frozen)
    router = modules.Router.for_query_document([query], list(plain))
    model = type(plain)(modules=[router], device="cpu")
    for prompts in ({}, {"query": "lazy ", "document": "quick "}):
        model.prompts |= prompts
        model.save_pretrained(str(tmp_path / "both"))
        encoder = StaticQueryEncoder.from_pretrained(tmp_path / "both")
        assert isinstance(encoder.weight, nn.Parameter) != frozen
        expected = model.encode_query(QUERIES).to_dense()
        for vectors in (dense(encoder), encoder(**encoder.tokenize(QUERIES))):
            torch.testing.assert_close(vectors, expected)
        again = SpladeEncoder.from_pretrained(tmp_path / "both")
        expected = model.encode_document(QUERIES).to_dense()
        torch.testing.assert_close(documents_of(again, QUERIES), expected)
    # Their model of a query side alone is read too.
    type(plain)(modules=[query], device="cpu").save_pretrained(str(tmp_path / "alone"))
    alone = StaticQueryEncoder.from_pretrained(tmp_path / "alone")
    assert torch.equal(dense(alone), dense(StaticQueryEncoder(words, weight)))


def test_encoders_of_other_tokens_are_refused(tmp_path):
    encoder = static()
    with pytest.raises(ValueError, match="expected `document` to have the tokens of the queries"):
        encoder.save_pretrained(tmp_path, document=make("xlm-roberta"))
    # A model may have more rows than its tokenizer has tokens.
    model, words = pair("bert")
    model.resize_token_embeddings(160, mean_resizing=False)
    document = SpladeEncoder(model, words)
    wide = StaticQueryEncoder(words, torch.ones(160))
    for queries in (encoder, wide):
        with pytest.raises(ValueError, match=r"V = 150, the .* and 160: model.resize"):
            queries.save_pretrained(tmp_path, document=document)
    assert list(tmp_path.iterdir()) == []
    model.resize_token_embeddings(150)  # what the error says
    encoder.save_pretrained(tmp_path, document=SpladeEncoder(model, words))
    torch.testing.assert_close(
        load_theirs(tmp_path).encode_query("dog").to_dense()[None], dense(encoder, ["dog"])
    )


def test_incomplete_and_other_folders_are_refused_by_name(tmp_path):
    document = make()
    static(document.tokenizer).save_pretrained(tmp_path, document=document)
    path = tmp_path / "router_config.json"
    config = json.loads(text := path.read_text())
    (query,), documents = (config["structure"][side] for side in ("query", "document"))
    config["structure"] = {"query": documents, "document": [query]}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="to have a SparseStaticEmbedding for queries"):
        StaticQueryEncoder.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="known modules only, got SparseStaticEmbedding"):
        SpladeEncoder.from_pretrained(tmp_path)
    path.write_text(text)
    (tmp_path / query / "model.safetensors").unlink()
    with pytest.raises(OSError, match="incomplete"):
        StaticQueryEncoder.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(OSError, match=r"it has no router_config.json"):
        SpladeEncoder.from_pretrained(tmp_path)
