"""Texts to vectors: against loops over a model's own logits, every output, saved and loaded."""

import copy
import errno
import json
import math
import os
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging

from sparse_losses import ContextGate, SpladeEncoder
from sparse_losses.fast.sparse import csr
from tests.representation.tiny_models import ISSUE, TEXTS, masked_lm, pair, tokenizer

VARIANTS = {
    "plain": {},
    "gate": {"gate": True},
    "idf": {"idf_weights": True},
    "input tokens": {"expansion": False},
    "all": {"expansion": False, "gate": True, "idf_weights": True},
}

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make(architecture="bert", **options):
    torch.manual_seed(0)
    model, words = pair(architecture)
    if options.get("idf_weights"):
        weights = torch.rand(len(words))
        weights[7] = 0.0
        options["idf_weights"] = weights
    return SpladeEncoder(model, words, **options).eval()


@pytest.fixture(params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


@pytest.mark.parametrize("architecture", ISSUE)
@pytest.mark.parametrize(("gated", "weighted"), [(False, False), (True, True)])
def test_equals_the_formula(architecture, gated, weighted):
    encoder = make(architecture, gate=gated, idf_weights=weighted or None)
    batch = encoder.tokenize(TEXTS)
    with torch.no_grad():
        ours, pooled = encoder(**batch, return_logits=True)
        logits = encoder.model(**batch).logits
        gate = None
        if gated:
            hidden = encoder.model.base_model(**batch)[0]
            gate = encoder.gate(hidden, batch["attention_mask"]).tolist()
    assert torch.equal(ours, encoder(**batch))
    for i, row in enumerate(logits.double().tolist()):
        for j in range(encoder.vocab_size):
            # Every position is gated here, before the maximum: the two commute.
            factor = 1.0 if gate is None else gate[i][j]
            mask = batch["attention_mask"][i].tolist()
            seen = [factor * scores[j] for scores, m in zip(row, mask, strict=True) if m]
            assert math.isclose(pooled[i, j], max(seen), rel_tol=1e-4, abs_tol=1e-5)
            value = math.log1p(max(0.0, *seen))
            if weighted:
                value *= float(encoder.idf_weights[j])
            assert math.isclose(ours[i, j], value, rel_tol=1e-4, abs_tol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [1.0, -0.5])
def test_input_tokens_only_equals_the_formula(gated, bias):
    encoder = make("xlm-roberta", expansion=False, gate=gated)
    texts = ["the the dog the", "서울 맛집", "", "dog"]
    batch = encoder.tokenize(texts)
    with torch.no_grad():
        encoder.importance[-1].bias.fill_(bias)  # logits of both signs
        ours, pooled = encoder(**batch, return_logits=True)
        hidden = encoder.model(**batch)[0]
        logit = encoder.importance(hidden)[:, :, 0]
        gate = encoder.gate(hidden, batch["attention_mask"]) if gated else torch.ones_like(ours)
    assert (pooled < 0).any() == (bias < 0)
    special = encoder.tokenizer.all_special_ids
    for i in range(len(texts)):
        for j in range(encoder.vocab_size):
            seen = [
                float(value * gate[i, j])
                for value, token, m in zip(
                    logit[i], batch["input_ids"][i], batch["attention_mask"][i], strict=True
                )
                if m and token == j and j not in special
            ]
            assert math.isclose(pooled[i, j], max(seen, default=0.0), abs_tol=1e-6)
            assert math.isclose(ours[i, j], math.log1p(max(0.0, *seen, 0.0)), abs_tol=1e-6)
    assert (ours[2] == 0).all()
    assert (ours[[0, 1, 3]] > 0).any(1).all() or bias < 0


def test_input_tokens_all_start_active_and_learn_as_does_their_gate():
    encoder = make(expansion=False, gate=True).double()
    batch = encoder.tokenize(["quick brown fox"])
    activations = encoder(**batch)
    assert activations.dtype == torch.float64
    assert int((activations > 0).sum()) == len(set(batch["input_ids"][0].tolist())) - 2
    activations.sum().backward()
    learning = [*encoder.importance.parameters(), *encoder.gate.parameters()]
    assert all(p.grad is not None for p in learning)
    assert all(p.grad.any() for p in encoder.importance.parameters())
    assert any(p.grad.any() for p in encoder.gate.parameters())


def test_a_mask_may_be_missing_and_padding_does_not_matter():
    encoder = make("modernbert")
    ids = encoder.tokenize(["서울 맛집 추천"])["input_ids"]
    alone = encoder(ids)
    assert torch.equal(alone, encoder(ids, torch.ones_like(ids)))
    together = encoder(**encoder.tokenize(["서울 맛집 추천", TEXTS[3]]))
    torch.testing.assert_close(together[:1], alone)


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_encode_keeps_the_order_of_the_texts(batch_size, variant):
    encoder = make(**variant)
    with torch.no_grad():
        expected = torch.cat([encoder(**encoder.tokenize([text])) for text in TEXTS])
    dense = encoder.encode(TEXTS, output="dense", batch_size=batch_size)
    torch.testing.assert_close(dense, expected)
    sparse = encoder.encode(TEXTS, batch_size=batch_size)
    assert sparse.layout == torch.sparse_csr
    assert torch.equal(sparse.to_dense(), dense)
    assert (sparse.values() > 0).all()
    torch._validate_sparse_csr_tensor_args(
        sparse.crow_indices(), sparse.col_indices(), sparse.values(), sparse.shape
    )


def test_encode_evaluates_and_leaves_every_mode_as_it_was():
    encoder = make(gate=True)
    encoder.train()
    encoder.model.base_model.eval()
    modes = [module.training for module in encoder.modules()]
    first, second = (encoder.encode(TEXTS, output="dense") for _ in range(2))
    assert torch.equal(first, second)  # no dropout
    assert [module.training for module in encoder.modules()] == modes
    assert not first.requires_grad


def test_the_formats_of_search_engines():
    encoder = make("xlm-roberta")
    dense = encoder.encode(TEXTS, output="dense")
    names = encoder.tokenizer.convert_ids_to_tokens(list(range(encoder.vocab_size)))
    tokens = encoder.encode(TEXTS, output="tokens")
    for row, weights in zip(dense, tokens, strict=True):
        assert weights == {names[j]: float(row[j]) for j in range(len(names)) if row[j] > 0}
        assert list(weights.values()) == sorted(weights.values(), reverse=True)
    for row, vector in zip(dense, encoder.encode(TEXTS, output="qdrant"), strict=True):
        assert vector["indices"] == row.nonzero()[:, 0].tolist()
        assert vector["values"] == row[row > 0].tolist()
    vespa = encoder.encode(TEXTS, output="vespa")
    assert vespa == [{"cells": weights} for weights in tokens]
    assert json.loads(json.dumps([tokens, vespa])) == [tokens, vespa]


def test_elasticsearch_takes_no_dots():
    encoder = make("bert")
    names = ["a.b", "a__b", ".", "c", "..."]
    others = {i: f"t{i}" for i in range(len(names), encoder.vocab_size)}
    encoder._names = {**dict(enumerate(names)), **others}
    tokens = encoder.encode(TEXTS, output="tokens")
    for plain, weights in zip(tokens, encoder.encode(TEXTS, output="elasticsearch"), strict=True):
        assert not any("." in token for token in weights)
        expected = {}
        for token, weight in plain.items():
            key = token.replace(".", "__")
            expected[key] = max(weight, expected.get(key, 0.0))
        assert weights == expected
        assert list(weights.values()) == sorted(weights.values(), reverse=True)
    assert {"a.b", "a__b"} & set(tokens[1])


def test_no_more_than_so_many_active_dimensions():
    encoder = make()
    full = encoder.encode(TEXTS, output="dense")
    few = encoder.encode(TEXTS, output="dense", max_active_dims=3)
    for row, kept in zip(full, few, strict=True):
        assert sorted(kept[kept > 0].tolist()) == sorted(row.topk(3).values.tolist())
    top = encoder.top_tokens(TEXTS, 3)
    assert top == encoder.encode(TEXTS, output="tokens", max_active_dims=3)
    assert [len(weights) for weights in top] == [3] * len(TEXTS)
    assert torch.equal(encoder.encode(TEXTS, max_active_dims=10_000).to_dense(), full)


@pytest.mark.parametrize("kept", [None, 3])
def test_vectors_may_have_unit_length(kept):
    encoder = make()
    plain = encoder.encode(TEXTS, output="dense", max_active_dims=kept)
    unit = encoder.encode(TEXTS, output="dense", max_active_dims=kept, normalize=True)
    lengths = plain.norm(dim=1, keepdim=True)
    assert lengths.max() > 1.01
    torch.testing.assert_close(unit * lengths, plain)
    torch.testing.assert_close(unit.norm(dim=1), (lengths[:, 0] > 0).float())
    (first, *_) = encoder.encode(TEXTS, output="tokens", max_active_dims=kept, normalize=True)
    torch.testing.assert_close(max(first.values()), unit[0].max().item())
    with pytest.raises(TypeError, match="`normalize` to be True or False"):
        encoder.encode(TEXTS, normalize=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr, torch.sparse_coo])
def test_the_top_tokens_of_vectors_are_those_of_their_texts(layout, dtype):
    encoder = make()
    vectors = encoder.encode(TEXTS, output="dense").to(dtype).requires_grad_()
    given = vectors
    if layout == torch.sparse_csr:
        given = csr(*vectors.detach().nonzero().T, vectors[vectors > 0].detach(), vectors.shape)
    elif layout == torch.sparse_coo:
        given = vectors.to_sparse()
    names = encoder.tokenizer.convert_ids_to_tokens(list(range(encoder.vocab_size)))
    for row, found in zip(vectors.tolist(), encoder.top_tokens(given, 3), strict=True):
        largest = sorted(range(len(row)), key=lambda j: (-row[j], j))[:3]
        assert list(found.items()) == [(names[j], row[j]) for j in largest]
    if dtype == torch.float32:
        assert encoder.top_tokens(given, 3) == encoder.top_tokens(TEXTS, 3)
        assert [len(found) for found in encoder.top_tokens(given, 10_000)] == [
            int((row > 0).sum()) for row in vectors
        ]


def test_the_top_tokens_of_odd_vectors():
    encoder = make()
    size = encoder.vocab_size
    signed = torch.zeros(2, size)
    signed[0, 3], signed[0, 5] = -2.0, 0.5
    name = encoder.tokenizer.convert_ids_to_tokens(5)
    assert encoder.top_tokens(signed) == [{name: 0.5}, {}]
    assert encoder.top_tokens(torch.zeros(0, size)) == []
    assert encoder.top_tokens([]) == []
    for wrong, options, error, match in [
        (torch.zeros(2, size + 1), {}, ValueError, rf"V = {size}, got \[2, {size + 1}\]"),
        (torch.zeros(size), {}, ValueError, rf"\[N, V\] with V = {size}, got \[{size}\]"),
        (torch.zeros(1, size, dtype=torch.int64), {}, TypeError, "floating point, got torch.int64"),
        (torch.full((2, size), math.nan), {}, ValueError, "expected finite vectors, .* row 0"),
        (torch.zeros(1, size), {"k": 0}, ValueError, "`k` to be an integer >= 1, got 0"),
        (torch.zeros(1, size), {"batch_size": 2}, TypeError, "no options .*, got batch_size"),
    ]:
        with pytest.raises(error, match=match):
            encoder.top_tokens(wrong, **options)


@pytest.mark.parametrize("cells", [1, 1000, 1 << 24])
def test_token_weights_are_the_strongest_activation_of_each_position(variant, cells, monkeypatch):
    monkeypatch.setattr("sparse_losses.representation.encoder.CELLS", cells)
    encoder = make("xlm-roberta", **variant)
    texts = [*TEXTS, "dog dog"]
    batch = encoder.tokenize(texts)
    factor = torch.ones(encoder.vocab_size) if encoder.idf_weights is None else encoder.idf_weights
    ids, special = batch["input_ids"].tolist(), encoder.tokenizer.all_special_ids
    with torch.no_grad():
        backbone = encoder.model.base_model if encoder.expansion else encoder.model
        hidden = backbone(**batch)[0]
        gate = None
        if encoder.gate is not None:
            gate = encoder.gate(hidden, batch["attention_mask"])
        scores = encoder.importance(hidden) if not encoder.expansion else encoder.model(**batch)[0]
    found = encoder.token_weights(texts, batch_size=2)
    for i, weights in enumerate(found):
        count = int(batch["attention_mask"][i].sum())
        names = encoder.tokenizer.convert_ids_to_tokens(ids[i][:count])
        assert [name for name, _ in weights] == names
        for s, (_, weight) in enumerate(weights):
            tokens = range(encoder.vocab_size) if encoder.expansion else [ids[i][s]]
            best = 0.0
            for j in tokens:
                if not encoder.expansion and j in special:
                    continue
                logit = float(scores[i, s, j if encoder.expansion else 0])
                logit *= 1.0 if gate is None else float(gate[i, j])
                best = max(best, float(factor[j]) * math.log1p(max(0.0, logit)))
            assert weight == pytest.approx(best, rel=1e-4, abs=1e-5)
    largest = encoder.encode(texts, output="dense").amax(1).tolist()
    assert [max(w for _, w in weights) for weights in found] == pytest.approx(largest, rel=1e-5)


def test_token_weights_of_odd_texts():
    encoder = make().train()
    assert encoder.token_weights([]) == []
    (empty,) = encoder.token_weights([""])
    assert [name for name, _ in empty] == encoder.tokenizer.convert_ids_to_tokens(
        encoder.tokenize([""])["input_ids"][0].tolist()
    )
    assert encoder.token_weights(TEXTS) == encoder.token_weights(TEXTS)  # no dropout
    assert encoder.training
    few = encoder.token_weights(["vectors over the vocabulary " * 30])[0]
    assert len(few) == encoder.max_length
    with pytest.raises(TypeError, match="list of strings, got str"):
        encoder.token_weights("서울")
    with pytest.raises(ValueError, match="`batch_size` to be an integer >= 1, got 0"):
        encoder.token_weights(TEXTS, batch_size=0)
    half = make(gate=True).to(torch.bfloat16)
    largest = half.encode(TEXTS, output="dense").amax(1).tolist()
    found = [max(weight for _, weight in text) for text in half.token_weights(TEXTS)]
    assert found == pytest.approx(largest, rel=0.02)
    with torch.no_grad():
        encoder.head.bias.fill_(math.nan)
    with pytest.raises(ValueError, match="expected finite activations, got others in text"):
        encoder.token_weights(TEXTS)


@pytest.mark.parametrize("expansion", [True, False])
def test_idf_weights_on_or_off_for_one_call(expansion):
    plain, weighted = make(expansion=expansion), make(expansion=expansion, idf_weights=True)
    weighted.load_state_dict(plain.state_dict(), strict=False)
    batch = plain.tokenize(TEXTS)
    without = plain(**batch)
    torch.testing.assert_close(weighted(**batch, apply_idf=False), without, rtol=0, atol=0)
    for options in ({}, {"apply_idf": None}, {"apply_idf": True}):
        expected = without * weighted.idf_weights
        torch.testing.assert_close(weighted(**batch, **options), expected, rtol=0, atol=0)
    activations, logits = weighted(**batch, apply_idf=False, return_logits=True)
    torch.testing.assert_close(activations, without)
    torch.testing.assert_close(logits, plain(**batch, return_logits=True)[1], rtol=0, atol=0)
    torch.testing.assert_close(plain(**batch, apply_idf=False), without, rtol=0, atol=0)
    with pytest.raises(ValueError, match="expected idf weights for `apply_idf=True`, got None"):
        plain(**batch, apply_idf=True)
    with pytest.raises(TypeError, match="`apply_idf` to be True or False"):
        weighted(**batch, apply_idf=0.5)


@pytest.mark.parametrize("output", ["csr", "dense", "tokens", "elasticsearch", "qdrant", "vespa"])
def test_no_texts(output):
    encoder = make()
    vectors = encoder.encode([], output=output)
    assert len(vectors) == 0
    if output in ("csr", "dense"):
        assert vectors.shape == (0, encoder.vocab_size)


def test_a_progress_bar_if_wanted(capsys):
    encoder = make()
    encoder.encode(TEXTS)
    assert capsys.readouterr().err == ""  # no terminal
    encoder.encode(TEXTS, show_progress=True, batch_size=2)
    assert f"{len(TEXTS)}/{len(TEXTS)}" in capsys.readouterr().err


def test_wrong_arguments():
    encoder = make()
    with pytest.raises(TypeError, match="expected `texts` to be a list of strings, got str"):
        encoder.encode("서울")
    with pytest.raises(TypeError, match="expected `texts` to be strings, got NoneType at 1"):
        encoder.encode(["a", None])
    with pytest.raises(TypeError, match="list of strings, got str"):
        encoder.tokenize("서울")
    with pytest.raises(TypeError, match=r"`input_ids` to be a torch.Tensor, got dict: encoder\(\*"):
        encoder(encoder.tokenize(["서울"]))
    with pytest.raises(ValueError, match="expected `output` to be one of 'csr', 'dense'"):
        encoder.encode(["a"], output="json")
    with pytest.raises(ValueError, match="`batch_size` to be an integer >= 1, got 0"):
        encoder.encode(["a"], batch_size=0)
    with pytest.raises(ValueError, match="`max_active_dims` to be an integer >= 1, got 0"):
        encoder.encode(["a"], max_active_dims=0)
    with pytest.raises(ValueError, match="`k` to be an integer >= 1, got 0"):
        encoder.top_tokens(["a"], 0)
    model, words = pair("bert")
    size = len(words)
    for options, error, match in [
        ({"gate": "yes"}, TypeError, "expected `gate` to be a ContextGate, True, False or None"),
        ({"gate": ContextGate(16, size + 1)}, ValueError, f"vocab_size {size}, got 16 and"),
        ({"idf_weights": torch.ones(3)}, ValueError, f"vocabulary's size {size}, got 3"),
        ({"idf_weights": -torch.ones(size)}, ValueError, "`idf_weights` to be finite and >= 0"),
        ({"idf_weights": torch.full((size,), math.inf)}, ValueError, "finite and >= 0"),
        ({"expansion": 1}, TypeError, "expected `expansion` to be True or False"),
        ({"max_length": 2}, ValueError, "`max_length` to be an integer >= 3, got 2"),
        ({"max_length": 41}, ValueError, "at most the model's 40 positions, got 41"),
        ({"gate": torch.ones(3)}, TypeError, "expected `gate` to be a ContextGate"),
        ({"gate": 0}, TypeError, "expected `gate` to be a ContextGate"),
    ]:
        with pytest.raises(error, match=match):
            SpladeEncoder(model, words, **options)
    small = masked_lm("bert", size - 1)
    with pytest.raises(ValueError, match=f"ids below the model's vocabulary size {size - 1}, got"):
        SpladeEncoder(small, words)
    with pytest.raises(TypeError, match="expected `model` to be a model of transformers, got Lin"):
        SpladeEncoder(torch.nn.Linear(2, 2), words, expansion=False)
    with torch.no_grad():
        encoder.head.bias[4] = math.nan
    with pytest.raises(ValueError, match="expected finite activations, got others in text"):
        encoder.encode(["a"])


def test_texts_are_cut_where_the_model_ends():
    long = "dog " * 500
    bert, roberta = make("bert"), make("xlm-roberta")
    assert bert.max_length == 40
    assert roberta.max_length == 39  # positions begin behind the padding index
    for encoder in (bert, roberta):
        assert encoder.tokenize([long])["input_ids"].shape == (1, encoder.max_length)
        encoder.encode([long])
    model, words = pair("bert")
    assert SpladeEncoder(model, words, max_length=5).tokenize([long])["input_ids"].shape == (1, 5)
    words.model_max_length = 7
    assert SpladeEncoder(model, words).max_length == 7


@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_model_is_an_error(tied):
    model, words = pair("bert", tie_word_embeddings=tied)
    encoder = SpladeEncoder(model, words)
    model.resize_token_embeddings(len(words) + 8)
    with pytest.raises(RuntimeError, match="create it after resize_token_embeddings"):
        encoder.encode(["dog"])
    assert SpladeEncoder(model, words).encode(["dog"]).shape == (1, len(words) + 8)


@pytest.mark.parametrize("architecture", ISSUE)
def test_the_side_of_padding_does_not_matter(architecture):
    encoder = make(architecture)
    expected = encoder.encode(TEXTS, output="dense")
    encoder.tokenizer.padding_side = "left"
    assert torch.equal(encoder.encode(TEXTS, output="dense"), expected)


def test_the_callers_tensors_stay_theirs(tmp_path):
    model, words = pair("bert")
    weights = torch.rand(len(words), 2)[:, 0]  # of every second place
    encoder = SpladeEncoder(model, words, idf_weights=weights)
    kept = weights.clone()
    weights.zero_()
    assert torch.equal(encoder.idf_weights, kept)
    encoder.save_pretrained(tmp_path)
    assert torch.equal(SpladeEncoder.from_pretrained(tmp_path).idf_weights, kept)


def test_a_model_with_more_rows_than_tokens():
    words = tokenizer("bytes")
    size = len(words)
    encoder = SpladeEncoder(masked_lm("modernbert", size + 4), words)
    with torch.no_grad():
        encoder.head.bias.fill_(0.0)
        encoder.head.bias[size:] = 50.0
    assert set(encoder.top_tokens(["a"], 4)[0]) == {f"[{size + i}]" for i in range(4)}


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [*(("bert", name) for name in VARIANTS), *((name, "all") for name in ISSUE[1:])],
)
def test_what_is_saved_comes_back(architecture, variant, tmp_path):
    encoder = make(architecture, max_length=17, **VARIANTS[variant])
    if variant == "gate":
        sizes = {"gate_hidden": 24, "num_heads": 2, "dropout": 0.3}
        encoder.gate = ContextGate(16, encoder.vocab_size, **sizes).eval()
    encoder.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = SpladeEncoder.from_pretrained(tmp_path)
    assert not loaded.training
    assert loaded.max_length == 17
    assert repr(loaded.gate) == repr(encoder.gate)
    assert loaded.state_dict().keys() == encoder.state_dict().keys()
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    ours, theirs = (e.encode(TEXTS, output="dense") for e in (encoder, loaded))
    assert torch.equal(ours, theirs)
    assert ours.any()
    # Twice into the same folder, into one inside another, and as a copy that keeps its ties.
    loaded.save_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "best")
    inside = SpladeEncoder.from_pretrained(tmp_path, subfolder="best")
    again = copy.deepcopy(SpladeEncoder.from_pretrained(str(tmp_path)))
    for other in (inside, again):
        assert torch.equal(other.encode(TEXTS, output="dense"), ours)
        if other.expansion:
            assert other.head.weight is other.model.get_output_embeddings().weight


def test_a_damaged_folder_does_not_load(tmp_path):
    encoder = make(idf_weights=True, gate=True)
    encoder.save_pretrained(tmp_path)
    file = tmp_path / "sparse_losses.json"
    settings = json.loads(file.read_text())
    for broken, match in [
        ("{", "is damaged"),
        ('{"format": 1}', "is damaged: wrong expansion, idf_weights, gate, max_length"),
        (json.dumps({**settings, "format": "1"}), "is damaged: wrong format"),
        (json.dumps({**settings, "gate": True}), "is damaged: wrong gate"),
        (json.dumps({**settings, "gate": {"depth": 2}}), "is damaged: its gate does not load"),
        (json.dumps({**settings, "gate": {"gate_hidden": 5}}), "is damaged: its gate does not"),
        (json.dumps({**settings, "format": 2}), "in format 1, got 2: a newer version"),
        ("[]", "is damaged"),
        (json.dumps({**settings, "idf_weights": False}), "do not belong together"),
        (json.dumps({**settings, "expansion": False}), "do not belong together"),
    ]:
        file.write_text(broken)
        with pytest.raises(OSError, match=match):
            SpladeEncoder.from_pretrained(tmp_path)
    for missing in ("sparse_losses.json", "sparse_losses.safetensors"):
        encoder.save_pretrained(tmp_path)
        (tmp_path / missing).unlink()
        with pytest.raises(OSError, match=f"is incomplete: it has .*, but not {missing}"):
            SpladeEncoder.from_pretrained(tmp_path)
    for cut in ("modules.json", "config_sentence_transformers.json", "model.safetensors"):
        encoder.save_pretrained(tmp_path)
        (tmp_path / cut).write_bytes((tmp_path / cut).read_bytes()[:9])
        with pytest.raises(OSError, match=f"{tmp_path.name} is damaged"):
            SpladeEncoder.from_pretrained(tmp_path)


def test_a_full_disk_leaves_the_folder_that_was_there_whole(tmp_path, monkeypatch):
    """All files are written together, the settings last: tests/_core/test_files.py."""
    folder = tmp_path / "encoder"
    old, new = make(gate=True), make(idf_weights=True)
    old.save_pretrained(folder)
    (folder / "notes.txt").write_text("mine")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    def full(*_, **__):
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr("sparse_losses.representation.encoder.json.dumps", full)
        with pytest.raises(OSError, match="No space left"):
            new.save_pretrained(folder)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert os.listdir(tmp_path) == ["encoder"]
    new.save_pretrained(folder)
    assert SpladeEncoder.from_pretrained(folder).gate is None
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("after", [0, 1, 3])
def test_stopped_among_the_replaced_files_nothing_mixed_is_loaded(tmp_path, monkeypatch, after):
    old, new = make(gate=True), make(gate=True)
    old.save_pretrained(tmp_path)
    replace, done = os.replace, []

    def stops(*paths):
        if len(done) == after:
            raise FULL
        done.append(paths)
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr("sparse_losses._core.files.os.replace", stops)
        with pytest.raises(OSError, match="No space left"):
            new.save_pretrained(tmp_path)
    with pytest.raises(OSError, match="is incomplete"):
        SpladeEncoder.from_pretrained(tmp_path)


def test_a_folder_that_is_overwritten_while_it_is_read_is_no_mixture(tmp_path, monkeypatch):
    make(gate=True).save_pretrained(tmp_path)

    def read_after_another_save(folder, find):
        make(gate=True).save_pretrained(tmp_path)

    monkeypatch.setattr(
        "sparse_losses.representation.encoder.read_modules", read_after_another_save
    )
    with pytest.raises(OSError, match="was overwritten while it was read"):
        SpladeEncoder.from_pretrained(tmp_path)


def test_weights_in_several_files_give_way_to_one(tmp_path):
    encoder = make()
    encoder.model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    encoder.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    SpladeEncoder.from_pretrained(tmp_path)


def test_parts_can_be_taken_off_and_put_on_while_loading(tmp_path):
    encoder = make(gate=True, idf_weights=True)
    encoder.save_pretrained(tmp_path)
    assert SpladeEncoder.from_pretrained(tmp_path, gate=False).gate is None
    assert SpladeEncoder.from_pretrained(tmp_path, idf_weights=False).idf_weights is None
    own = ContextGate(16, encoder.vocab_size)
    other = SpladeEncoder.from_pretrained(
        tmp_path, gate=own, idf_weights=torch.ones(own.vocab_size)
    )
    assert other.gate is own
    assert (other.idf_weights == 1).all()
    kept = SpladeEncoder.from_pretrained(tmp_path, gate=True)
    assert torch.equal(kept.gate.query, encoder.gate.query)
    words = SpladeEncoder.from_pretrained(tmp_path, expansion=False, max_length=9)
    assert not words.expansion
    assert words.max_length == 9


@pytest.mark.parametrize("architecture", ISSUE)
def test_a_plain_masked_language_model_loads(architecture, tmp_path):
    model, words = pair(architecture)
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    encoder = SpladeEncoder.from_pretrained(tmp_path)
    expected = SpladeEncoder(model, words).encode(TEXTS, output="dense")
    assert torch.equal(encoder.encode(TEXTS, output="dense"), expected)
    # And ours is one.
    encoder.save_pretrained(tmp_path / "ours")
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    batch = AutoTokenizer.from_pretrained(tmp_path / "ours")(["a"], return_tensors="pt")
    assert torch.equal(theirs(**batch).logits, model(**batch).logits)


def test_a_model_without_such_layers_is_a_warning(tmp_path):
    model, words = pair("bert")
    model.base_model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"has no weights for cls.*they are random"):
        SpladeEncoder.from_pretrained(tmp_path)
    verbosity = logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpladeEncoder.from_pretrained(tmp_path, expansion=False)
    assert logging.get_verbosity() == verbosity
    weights = load_file(tmp_path / "model.safetensors")
    del weights["embeddings.word_embeddings.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="has no weights for bert.embeddings.word_embeddings"):
        SpladeEncoder.from_pretrained(tmp_path, expansion=False)


@pytest.mark.parametrize("expansion", [True, False])
def test_half_precision_is_kept(expansion, tmp_path):
    encoder = make(gate=True, idf_weights=True, expansion=expansion)
    encoder.save_pretrained(tmp_path)
    half = SpladeEncoder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    vectors = half.encode(TEXTS, output="dense")
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, encoder.encode(TEXTS, output="dense"), atol=0.1, rtol=0.1)
    half.save_pretrained(tmp_path)
    again = SpladeEncoder.from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert torch.equal(again.encode(TEXTS, output="dense"), vectors)


@pytest.mark.parametrize("architecture", ISSUE)
@pytest.mark.parametrize("weighted", [False, True])
def test_sentence_transformers_gives_the_same_vectors(architecture, weighted, tmp_path):
    SparseEncoder = pytest.importorskip("sentence_transformers").SparseEncoder

    encoder = make(architecture, idf_weights=weighted or None)
    encoder.save_pretrained(tmp_path)
    # Idf weights are a module of ours, which they run only if told to.
    theirs = SparseEncoder(str(tmp_path), trust_remote_code=weighted, device="cpu")
    assert theirs.max_seq_length == encoder.max_length
    texts = [text for text in TEXTS if text] + ["dog " * 500]
    vectors = theirs.encode(texts, convert_to_sparse_tensor=False).cpu()
    torch.testing.assert_close(vectors, encoder.encode(texts, output="dense"))
    # What they save again, we read again.
    theirs.save_pretrained(str(tmp_path / "theirs"))
    back = SpladeEncoder.from_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(vectors, back.encode(texts, output="dense"))
    if weighted:
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            SparseEncoder(str(tmp_path), device="cpu")
        reloaded = SparseEncoder(str(tmp_path / "theirs"), trust_remote_code=True, device="cpu")
        again = reloaded.encode(texts, convert_to_sparse_tensor=False).cpu()
        torch.testing.assert_close(again, vectors)


def test_without_a_vocabulary_projection_sentence_transformers_refuses(tmp_path):
    SparseEncoder = pytest.importorskip("sentence_transformers").SparseEncoder

    make().save_pretrained(tmp_path)
    make(expansion=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"references the module class 'sparse_losses"):
        SparseEncoder(str(tmp_path), device="cpu")
    with pytest.raises(ValueError, match=r"load it with SpladeEncoder.from_pretrained"):
        SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)


@pytest.mark.parametrize(
    ("setting", "value"), [("pooling_strategy", "sum"), ("activation_function", "log1p_relu")]
)
def test_another_splade_of_theirs_is_not_taken_for_ours(setting, value, tmp_path):
    SparseEncoder = pytest.importorskip("sentence_transformers").SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    make().save_pretrained(tmp_path)
    theirs = SparseEncoder(str(tmp_path), device="cpu")
    theirs[1] = SpladePooling(**{setting: value})
    theirs.save_pretrained(str(tmp_path / "theirs"))
    with pytest.raises(ValueError, match=f"{setting} '.*', got '{value}'"):
        SpladeEncoder.from_pretrained(tmp_path / "theirs")


def test_their_prompts_stay_and_are_spoken_of(tmp_path):
    SparseEncoder = pytest.importorskip("sentence_transformers").SparseEncoder

    encoder = make()
    encoder.save_pretrained(tmp_path)
    theirs = SparseEncoder(str(tmp_path), device="cpu", prompts={"q": "ask: "})
    theirs.default_prompt_name = "q"
    theirs.save_pretrained(str(tmp_path / "theirs"))
    with pytest.warns(UserWarning, match="default prompt 'q'"):
        back = SpladeEncoder.from_pretrained(tmp_path / "theirs")
    back.save_pretrained(tmp_path / "theirs")
    again = SparseEncoder(str(tmp_path / "theirs"), device="cpu")
    assert again.prompts["q"] == "ask: "
    expected = again.encode(["dog"], convert_to_sparse_tensor=False).cpu()
    torch.testing.assert_close(expected, encoder.encode(["ask: dog"], output="dense"))


IS_OLD = torch.__version__.startswith("2.6.")


@pytest.mark.skipif(IS_OLD, reason="PyTorch 2.6 does not compile transformers 5")
@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_compiles_as_one_graph(architecture):
    encoder = make(architecture, gate=True, idf_weights=True)
    batch = encoder.tokenize(TEXTS)
    torch._dynamo.reset()
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch), encoder(**batch))
