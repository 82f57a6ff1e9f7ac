"""Texts to vectors: against loops over a model's own logits, and every output."""

import json
import math

import pytest
import torch

from sparse_losses import ContextGate, SpladeEncoder
from sparse_losses.fast.sparse import csr
from tests.representation.tiny_models import (
    ISSUE,
    TEXTS,
    VARIANTS,
    make,
    masked_lm,
    pair,
    tokenizer,
)


@pytest.fixture(params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


@pytest.mark.parametrize("architecture", ISSUE)
@pytest.mark.parametrize("all_parts", [False, True])
def test_equals_the_formula(architecture, all_parts):
    encoder = make(architecture, gate=all_parts, idf_weights=all_parts or None)
    batch = encoder.tokenize(TEXTS)
    gate = factor = torch.ones(len(TEXTS), encoder.vocab_size)
    with torch.no_grad():
        ours, pooled = encoder(**batch, return_logits=True)
        logits = encoder.model(**batch).logits
        if all_parts:
            hidden = encoder.model.base_model(**batch)[0]
            gate, factor = (
                encoder.gate(hidden, batch["attention_mask"]),
                factor * encoder.idf_weights,
            )
    assert torch.equal(ours, encoder(**batch))
    for i, j in torch.cartesian_prod(torch.arange(len(ours)), torch.arange(encoder.vocab_size)):
        # Every position is gated here, before the maximum: the two commute.
        seen = (gate[i, j] * logits[i, batch["attention_mask"][i] == 1, j]).tolist()
        assert math.isclose(pooled[i, j], max(seen), rel_tol=1e-4, abs_tol=1e-5)
        value = factor[i, j] * math.log1p(max(0.0, *seen))
        assert math.isclose(ours[i, j], value, rel_tol=1e-4, abs_tol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [1.0, -0.5])
def test_without_expansion_equals_the_formula(gated, bias):
    encoder = make("xlm-roberta", expansion=False, gate=gated)
    batch = encoder.tokenize(["the the dog the", "서울 맛집", "", "dog"])
    with torch.no_grad():
        encoder.importance[-1].bias.fill_(bias)  # logits of both signs
        ours, pooled = encoder(**batch, return_logits=True)
        hidden = encoder.model(**batch)[0]
        logit = encoder.importance(hidden)[:, :, 0]
        gate = encoder.gate(hidden, batch["attention_mask"]) if gated else torch.ones_like(ours)
    assert (pooled < 0).any() == (bias < 0)
    tokens = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -1)
    for i, j in torch.cartesian_prod(torch.arange(len(ours)), torch.arange(encoder.vocab_size)):
        seen = (logit[i] * gate[i, j])[tokens[i] == j].tolist()
        seen = [] if j in encoder.tokenizer.all_special_ids else seen
        assert math.isclose(pooled[i, j], max(seen, default=0.0), abs_tol=1e-6)
        assert math.isclose(ours[i, j], math.log1p(max(0.0, *seen, 0.0)), abs_tol=1e-6)
    assert (ours[[0, 1, 3]] > 0).any(1).all() or bias < 0


def test_without_expansion_all_tokens_start_active_and_learn():
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


@pytest.mark.parametrize("architecture", ISSUE)
def test_padding_side_has_no_effect(architecture):
    encoder = make(architecture)
    expected = encoder.encode(TEXTS, output="dense")
    encoder.tokenizer.padding_side = "left"
    assert torch.equal(encoder.encode(TEXTS, output="dense"), expected)
    ids = encoder.tokenize(TEXTS[:1])["input_ids"]
    torch.testing.assert_close(encoder(ids), expected[:1])  # the mask is optional


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


def test_encode_uses_evaluation_mode_and_restores_all_modes():
    encoder = make(gate=True)
    encoder.train()
    encoder.model.base_model.eval()
    modes = [module.training for module in encoder.modules()]
    first, second = (encoder.encode(TEXTS, output="dense") for _ in range(2))
    assert torch.equal(first, second)  # no dropout
    assert [module.training for module in encoder.modules()] == modes
    assert not first.requires_grad


def test_tokens_are_weights_by_token_and_the_largest_comes_first():
    encoder = make("xlm-roberta")
    dense = encoder.encode(TEXTS, output="dense")
    names = encoder.tokenizer.convert_ids_to_tokens(list(range(encoder.vocab_size)))
    tokens = encoder.encode(TEXTS, output="tokens")
    for row, weights in zip(dense, tokens, strict=True):
        assert weights == {names[j]: float(row[j]) for j in range(len(names)) if row[j] > 0}
        assert list(weights.values()) == sorted(weights.values(), reverse=True)
    assert json.loads(json.dumps(tokens)) == tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr, torch.sparse_coo])
def test_top_tokens_of_vectors_equal_those_of_their_texts(layout, dtype):
    encoder = make()
    vectors = encoder.encode(TEXTS, output="dense").to(dtype)
    inputs = {
        torch.strided: vectors.clone().requires_grad_(),
        torch.sparse_csr: csr(*vectors.nonzero().T, vectors[vectors > 0], vectors.shape),
        torch.sparse_coo: vectors.to_sparse(),
    }[layout]
    names = encoder.tokenizer.convert_ids_to_tokens(list(range(encoder.vocab_size)))
    for row, top in zip(vectors.tolist(), encoder.top_tokens(inputs, 3), strict=True):
        largest = sorted(range(len(row)), key=lambda j: (-row[j], j))[:3]
        assert list(top.items()) == [(names[j], row[j]) for j in largest]
    if dtype == torch.float32:
        assert encoder.top_tokens(inputs, 3) == encoder.top_tokens(TEXTS, 3)
        lengths = [len(top) for top in encoder.top_tokens(inputs, 10_000)]
        assert lengths == (vectors > 0).sum(1).tolist()


def test_top_tokens_of_odd_vectors():
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
        (torch.zeros(1, size, dtype=torch.int64), {}, TypeError, "floating point, got torch.int64"),
        (torch.zeros(1, size), {"k": 0}, ValueError, "`k`"),
        (torch.zeros(1, size), {"batch_size": 2}, TypeError, "batch_size"),
    ]:
        with pytest.raises(error, match=match):
            encoder.top_tokens(wrong, **options)


def test_token_weights_equal_the_formula(variant):
    encoder = make("xlm-roberta", **variant)
    texts = [*TEXTS, "dog dog"]
    batch = encoder.tokenize(texts)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    factor = torch.ones(encoder.vocab_size) if encoder.idf_weights is None else encoder.idf_weights
    with torch.no_grad():
        hidden = (encoder.model.base_model if encoder.expansion else encoder.model)(**batch)[0]
        gate = torch.ones(len(texts), encoder.vocab_size)
        if encoder.gate is not None:
            gate = encoder.gate(hidden, mask)
        if encoder.expansion:
            scores = encoder.model(**batch)[0]
        else:  # of a position's own token, unless that is special
            own = torch.zeros(*ids.shape, encoder.vocab_size).scatter(2, ids[..., None], 1.0)
            own[..., encoder.tokenizer.all_special_ids] = 0.0
            scores = own * encoder.importance(hidden)
        expected = (factor * (scores * gate[:, None]).relu().log1p()).amax(2)
    outputs = encoder.token_weights(texts, batch_size=2)
    for i, weights in enumerate(outputs):
        count = int(mask[i].sum())
        names = encoder.tokenizer.convert_ids_to_tokens(ids[i][:count].tolist())
        assert [name for name, _ in weights] == names
        values = expected[i, :count].tolist()
        assert [weight for _, weight in weights] == pytest.approx(values, rel=1e-4, abs=1e-5)
    largest = encoder.encode(texts, output="dense").amax(1).tolist()
    assert [max(w for _, w in weights) for weights in outputs] == pytest.approx(largest, rel=1e-5)


def test_token_weights_of_odd_texts():
    encoder = make().train()
    assert encoder.token_weights([]) == []
    assert len(encoder.token_weights([""])[0]) == encoder.tokenize([""])["input_ids"].shape[1]
    assert encoder.token_weights(TEXTS) == encoder.token_weights(TEXTS)  # no dropout
    assert encoder.training
    few = encoder.token_weights(["vectors over the vocabulary " * 30])[0]
    assert len(few) == encoder.max_length
    half = make(gate=True).to(torch.bfloat16)
    largest = half.encode(TEXTS, output="dense").amax(1).tolist()
    weights = [max(weight for _, weight in text) for text in half.token_weights(TEXTS)]
    assert weights == pytest.approx(largest, rel=0.02)


@pytest.mark.parametrize("expansion", [True, False])
def test_apply_idf_switches_idf_weights_for_one_call(expansion):
    plain, weighted = make(expansion=expansion), make(expansion=expansion, idf_weights=True)
    weighted.load_state_dict(plain.state_dict(), strict=False)
    batch = plain.tokenize(TEXTS)
    without = plain(**batch)
    torch.testing.assert_close(weighted(**batch, apply_idf=False), without, rtol=0, atol=0)
    for options in ({}, {"apply_idf": True}):
        expected = without * weighted.idf_weights
        torch.testing.assert_close(weighted(**batch, **options), expected, rtol=0, atol=0)
    _, logits = weighted(**batch, apply_idf=False, return_logits=True)
    torch.testing.assert_close(logits, plain(**batch, return_logits=True)[1], rtol=0, atol=0)
    torch.testing.assert_close(plain(**batch, apply_idf=False), without, rtol=0, atol=0)
    with pytest.raises(ValueError, match="expected idf weights for `apply_idf=True`, got None"):
        plain(**batch, apply_idf=True)


@pytest.mark.parametrize("output", ["csr", "dense", "tokens"])
def test_encode_of_no_texts_and_progress_on_request(output, capsys):
    encoder = make()
    vectors = encoder.encode([], output=output)
    assert len(vectors) == 0
    if output != "tokens":
        assert vectors.shape == (0, encoder.vocab_size)
    encoder.encode(TEXTS, output=output)
    assert capsys.readouterr().err == ""  # no terminal
    encoder.encode(TEXTS, output=output, show_progress=True, batch_size=2)
    assert f"{len(TEXTS)}/{len(TEXTS)}" in capsys.readouterr().err


def test_texts_are_truncated_at_the_limit_of_the_model():
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


def test_model_may_have_more_rows_than_tokens():
    words = tokenizer("bytes")
    size = len(words)
    encoder = SpladeEncoder(masked_lm("modernbert", size + 4), words)
    with torch.no_grad():
        encoder.head.bias.fill_(0.0)
        encoder.head.bias[size:] = 50.0
    assert set(encoder.top_tokens(["a"], 4)[0]) == {f"[{size + i}]" for i in range(4)}


def test_wrong_inputs_are_named():
    encoder = make()
    for call, inputs, options, error, match in [
        (encoder.encode, "서울", {}, TypeError, "`texts` to be a list of strings, got str"),
        (encoder.encode, ["a", None], {}, TypeError, "strings, got NoneType at 1"),
        (
            encoder,
            torch.ones(3).long(),
            {},
            ValueError,
            r"`input_ids` of shape \[B, S\], got \[3\]",
        ),
        (encoder, torch.tensor([[1, 999]]), {}, ValueError, r"`input_ids` in \[0, V\) .* got 999"),
        (encoder, encoder.tokenize(["서울"]), {}, TypeError, "to be a torch.Tensor, got dict"),
        (encoder.encode, ["a"], {"output": "json"}, ValueError, "`output` .* 'csr', 'dense'"),
        (encoder.encode, ["a"], {"batch_size": 0}, ValueError, "`batch_size`"),
        (encoder.encode, ["a"], {"side": "both"}, ValueError, "`side`"),
        (encoder, torch.ones(1, 1).long(), {"side": "both"}, ValueError, "`side`"),
    ]:
        with pytest.raises(error, match=match):
            call(inputs, **options)
    with torch.no_grad():
        encoder.head.bias[4] = math.nan
    for call in (encoder.encode, encoder.token_weights):
        with pytest.raises(ValueError, match=r"expected finite .*, got others in (row|text) 0"):
            call(["a"])


def test_wrong_parts_and_settings_are_named():
    model, words = pair("bert")
    size = len(words)
    for options, error, match in [
        ({"gate": "yes"}, TypeError, "expected `gate` to be a ContextGate, True, False or None"),
        ({"gate": ContextGate(16, size + 1)}, ValueError, rf"\(16, {size}\), got \(16, "),
        ({"idf_weights": torch.ones(3)}, ValueError, f"V = {size} finite numbers"),
        ({"idf_weights": -torch.ones(size)}, ValueError, "finite numbers >= 0"),
        ({"expansion": 1}, TypeError, "expected `expansion` to be True or False"),
        ({"max_length": 2}, ValueError, "`max_length` to be an integer >= 3, got 2"),
        ({"max_length": 41}, ValueError, "at most the model's 40 positions, got 41"),
        ({"activation": "identity"}, ValueError, "expected `activation` to be one of"),
        ({"importance": "linear"}, ValueError, "expected `importance` to be one of"),
        ({"expansion": False, "softcap": 2.0}, ValueError, "no `softcap` with expansion=False"),
        ({"logit_scale": 0.0}, ValueError, "expected `logit_scale` to be a finite number > 0"),
        ({"prune_ratio": 1.0}, ValueError, r"expected `prune_ratio` in \[0, 1\), got 1.0"),
        ({"max_active_dims": 0}, ValueError, "expected `max_active_dims` to be an integer >= 1"),
        ({"query_threshold": -1.0}, ValueError, "expected `query_threshold` to be a finite"),
    ]:
        with pytest.raises(error, match=match):
            SpladeEncoder(model, words, **options)
    with pytest.raises(ValueError, match=f"ids below the model's vocabulary size {size - 1}, got"):
        SpladeEncoder(masked_lm("bert", size - 1), words)
    with pytest.raises(TypeError, match=r"expected `model` to be a model .*got Lin"):
        SpladeEncoder(torch.nn.Linear(2, 2), words, expansion=False)


IS_OLD = torch.__version__.startswith("2.6.")


@pytest.mark.skipif(IS_OLD, reason="PyTorch 2.6 does not compile transformers 5")
@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_compiles_as_one_graph(architecture):
    encoder = make(architecture, gate=True, idf_weights=True)
    batch = encoder.tokenize(TEXTS)
    torch._dynamo.reset()
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch), encoder(**batch))


@pytest.mark.parametrize("name", ["encode", "encode_document", "encode_query"])
def test_encoding_prunes_by_ratio_and_by_number(name):
    encoder = make()
    encode = getattr(encoder, name)
    whole = encode(TEXTS, output="tokens")
    for text, by_ratio, both in zip(
        whole,
        encode(TEXTS, output="tokens", prune_ratio=0.5),
        encode(TEXTS, output="tokens", prune_ratio=0.5, max_active_dims=2),
        strict=True,
    ):
        kept = {token: w for token, w in text.items() if w >= 0.5 * max(text.values())}
        assert 0 < len(kept) < len(text)
        assert by_ratio == kept
        assert both == dict(list(kept.items())[:2])


def test_pruning_is_a_saved_setting(tmp_path):
    with pytest.warns(UserWarning, match="does not apply prune_ratio, and keeps the 2 largest"):
        make(prune_ratio=0.5, max_active_dims=2).save_pretrained(tmp_path)
    encoder = SpladeEncoder.from_pretrained(tmp_path)
    assert (encoder.prune_ratio, encoder.max_active_dims) == (0.5, 2)
    same = make().encode(TEXTS, output="tokens", prune_ratio=0.5, max_active_dims=2)
    assert encoder.encode(TEXTS, output="tokens") == same
    # A call's own numbers take their place.
    assert len(encoder.encode(TEXTS[1:2], output="tokens", max_active_dims=3)[0]) == 3
