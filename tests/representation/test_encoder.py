"""Texts to vectors: against loops over a model's own logits, and every output."""

import json
import math

import pytest
import torch

from sparse_losses import ContextGate, SpladeEncoder
from tests.representation.tiny_models import ISSUE, TEXTS, VARIANTS, make, pair, reloaded

over_variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


@pytest.mark.parametrize("architecture", ISSUE)
@pytest.mark.parametrize("pooled", ["all", "some"])
@pytest.mark.parametrize("kind", ["plain", "gate and idf", "tokens", "negative tokens"])
def test_equals_the_formula(architecture, kind, pooled):
    """A position that is not pooled is seen by the others and by the gate."""
    expands, has_all = "tokens" not in kind, kind != "plain"
    encoder = make(architecture, expansion=expands, gate=has_all, idf_weights=has_all or None)
    batch = encoder.tokenize([*TEXTS, "dog the dog"])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    pool_mask = torch.ones_like(mask)
    if pooled == "some":
        pool_mask[:, ::3] = pool_mask[1] = 0
    with torch.no_grad():
        if not expands:
            encoder.importance[-1].bias.fill_(-0.5 if kind == "negative tokens" else 1.0)
        options = {"pool_mask": pool_mask} if pooled == "some" else {}
        ours, ours_pooled = encoder(**batch, **options, return_logits=True)
        hidden = (encoder.model.base_model if expands else encoder.model)(**batch)[0]
        logits = encoder.model(**batch).logits if expands else encoder.importance(hidden)
        gate = encoder.gate(hidden, mask) if has_all else torch.ones_like(ours)
    factor = encoder.idf_weights if has_all else torch.ones(encoder.vocab_size)
    special = encoder.tokenizer.all_special_ids
    for i, j in torch.cartesian_prod(torch.arange(len(ours)), torch.arange(encoder.vocab_size)):
        where = (mask * pool_mask)[i] == 1
        if not expands:  # the positions of the token itself
            where = where & (ids[i] == j) & (j not in special)
        # Every position is gated here, before the maximum: the two commute.
        seen = (gate[i, j] * logits[i, where, j if expands else 0]).tolist()
        assert math.isclose(ours_pooled[i, j], max(seen, default=0.0), rel_tol=1e-4, abs_tol=1e-5)
        value = factor[j] * math.log1p(max(0.0, *seen, 0.0))
        assert math.isclose(ours[i, j], value, rel_tol=1e-4, abs_tol=1e-5)


def test_without_expansion_all_tokens_start_active_and_learn():
    encoder = make(expansion=False, gate=True).double()
    batch = encoder.tokenize(["quick brown fox"])
    activations = encoder(**batch)
    assert activations.dtype == torch.float64
    assert int((activations > 0).sum()) == len(set(batch["input_ids"][0].tolist())) - 2
    activations.sum().backward()
    for part in (encoder.importance, encoder.gate):
        assert any(p.grad.any() for p in part.parameters())


@over_variants
@pytest.mark.parametrize("batch_size", [2, 100])
def test_encode_keeps_the_order_of_the_texts(batch_size, variant):
    encoder = make(**variant).train()  # it encodes in evaluation mode
    encoder.model.base_model.eval()
    modes = [module.training for module in encoder.modules()]
    dense = encoder.encode(TEXTS, output="dense", batch_size=batch_size)
    assert [module.training for module in encoder.modules()] == modes
    with torch.no_grad():
        encoder.eval()
        expected = torch.cat([encoder(**encoder.tokenize([text])) for text in TEXTS])
    torch.testing.assert_close(dense, expected)
    encoder.tokenizer.padding_side = "left"  # has no effect
    sparse = encoder.encode(TEXTS, batch_size=batch_size)
    parts = sparse.crow_indices(), sparse.col_indices(), sparse.values()
    torch._validate_sparse_csr_tensor_args(*parts, sparse.shape)
    assert torch.equal(sparse.to_dense(), dense)
    assert (sparse.values() > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_have_weights_and_the_largest_comes_first(dtype):
    encoder = make()
    names = encoder.tokenizer.convert_ids_to_tokens(list(range(encoder.vocab_size)))
    vectors = encoder.encode(TEXTS, output="dense").to(dtype)
    vectors[2, 3] = -2.0  # does not count
    for inputs in (vectors.clone().requires_grad_(), vectors.to_sparse_csr(), vectors.to_sparse()):
        for row, top in zip(vectors.tolist(), encoder.top_tokens(inputs, 3), strict=True):
            largest = sorted(range(len(row)), key=lambda j: (-row[j], j))[:3]
            assert list(top.items()) == [(names[j], row[j]) for j in largest if row[j] > 0]
    assert encoder.top_tokens(vectors[:0]) == encoder.top_tokens([]) == []
    if dtype == torch.float32:
        tokens = encoder.encode(TEXTS, output="tokens")[:2]
        assert encoder.top_tokens(vectors[:2], 999) == tokens == json.loads(json.dumps(tokens))
        assert encoder.top_tokens(vectors[:2], 3) == encoder.top_tokens(TEXTS, 3)[:2]
    for wrong, options, error, match in [
        (torch.zeros(2, 3), {}, ValueError, rf"V = {encoder.vocab_size}, got \[2, 3\]"),
        (vectors, {"k": 0}, ValueError, "`k`"),
        (vectors, {"batch_size": 2}, TypeError, "batch_size"),
    ]:
        with pytest.raises(error, match=match):
            encoder.top_tokens(wrong, **options)


@over_variants
def test_token_weights_are_the_largest_of_each_position_alone(variant):
    encoder = make("xlm-roberta", **variant)
    texts = [*TEXTS, "dog dog"]
    outputs = encoder.train().token_weights(texts)
    assert encoder.training
    encoder.eval()
    for text, weights in zip(texts, outputs, strict=True):
        batch = encoder.tokenize([text])
        ids = batch["input_ids"]
        assert [name for name, _ in weights] == encoder.tokenizer.convert_ids_to_tokens(ids[0])
        for s, (_, weight) in enumerate(weights):
            only = torch.zeros_like(ids).index_fill(1, torch.tensor([s]), 1)
            with torch.no_grad():
                alone = encoder(**batch, pool_mask=only).max().item()
            assert weight == pytest.approx(alone, rel=1e-4, abs=1e-5)
    assert encoder.token_weights([]) == []


@pytest.mark.parametrize("expansion", [True, False])
def test_apply_idf_switches_idf_weights_for_one_call(expansion):
    plain, weighted = make(expansion=expansion), make(expansion=expansion, idf_weights=True)
    weighted.load_state_dict(plain.state_dict(), strict=False)
    batch = plain.tokenize(TEXTS)
    without = plain(**batch, apply_idf=False)
    assert torch.equal(weighted(**batch, apply_idf=False), without)
    for options in ({}, {"apply_idf": True}):
        assert torch.equal(weighted(**batch, **options), without * weighted.idf_weights)
    with pytest.raises(ValueError, match="expected idf weights for `apply_idf=True`, got None"):
        plain(**batch, apply_idf=True)


@pytest.mark.parametrize("output", ["csr", "dense", "tokens"])
def test_encode_of_no_texts_and_progress_on_request(output, capsys):
    encoder = make()
    vectors = encoder.encode([], output=output)
    assert len(vectors) == 0
    assert output == "tokens" or vectors.shape == (0, encoder.vocab_size)
    encoder.encode(TEXTS, output=output)
    assert capsys.readouterr().err == ""  # no terminal
    encoder.encode(TEXTS, output=output, show_progress=True, batch_size=2)
    assert f"{len(TEXTS)}/{len(TEXTS)}" in capsys.readouterr().err


def test_texts_are_truncated_at_the_limit_of_the_model():
    long = "dog " * 500
    bert, roberta = make("bert"), make("xlm-roberta")
    assert (bert.max_length, roberta.max_length) == (40, 39)  # it counts from the padding index
    for encoder in (bert, roberta):
        assert encoder.tokenize([long])["input_ids"].shape == (1, encoder.max_length)
        encoder.encode([long])
    model, words = pair("bert")
    assert SpladeEncoder(model, words, max_length=5).tokenize([long])["input_ids"].shape == (1, 5)
    words.model_max_length = 7
    assert SpladeEncoder(model, words).max_length == 7


@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_model_is_an_error_and_one_with_more_rows_than_tokens_is_none(tied):
    model, words = pair("bert", tie_word_embeddings=tied)
    encoder, size = SpladeEncoder(model, words), len(words)
    model.resize_token_embeddings(size + 4)
    with pytest.raises(RuntimeError, match="create the encoder after resizing"):
        encoder.encode(["dog"])
    encoder = SpladeEncoder(model, words)
    with torch.no_grad():
        encoder.head.bias[size:] = 50.0
    assert set(encoder.top_tokens(["a"], 4)[0]) == {f"[{size + i}]" for i in range(4)}


def test_wrong_inputs_are_named():
    encoder, ids = make(), torch.ones(1, 1).long()
    for call, inputs, options, error, match in [
        (encoder.encode, "서울", {}, TypeError, "`texts` to be a list of strings, got str"),
        (encoder.encode, ["a", None], {}, TypeError, "strings, got NoneType at 1"),
        (encoder, ids[0], {}, ValueError, r"`input_ids` of shape \[B, S\], got \[1\]"),
        (encoder, ids * 999, {}, ValueError, r"`input_ids` in \[0, V\) .* got 999"),
        (encoder, encoder.tokenize(["서울"]), {}, TypeError, "to be a torch.Tensor, got dict"),
        (encoder.encode, ["a"], {"output": "json"}, ValueError, "`output` .* 'csr', 'dense'"),
        (encoder.encode, ["a"], {"batch_size": 0}, ValueError, "`batch_size`"),
        (encoder.encode, ["a"], {"side": "both"}, ValueError, "`side`"),
    ]:
        with pytest.raises(error, match=match):
            call(inputs, **options)
    sparse = encoder(ids, layout=torch.sparse_csr)
    torch.testing.assert_close(sparse.to_dense(), encoder(ids))
    with pytest.raises(ValueError, match="no idf weights and no threshold for torch"):
        make(idf_weights=True)(ids, layout=torch.sparse_csr)
    with torch.no_grad():
        encoder.head.bias[4] = math.nan
    with pytest.raises(ValueError, match="expected finite vectors, got NaN"):
        encoder.encode(["a"])


def test_wrong_parts_and_settings_are_named():
    model, words = pair("bert")
    size = len(words)
    for options, error, match in [
        ({"gate": "yes"}, TypeError, "expected `gate` to be a ContextGate or a flag"),
        ({"gate": ContextGate(16, size + 1)}, ValueError, rf"\(16, {size}\), got \(16, "),
        ({"idf_weights": torch.ones(3)}, ValueError, f"V = {size} finite numbers"),
        ({"idf_weights": -torch.ones(size)}, ValueError, "finite numbers >= 0"),
        ({"max_length": 2}, ValueError, "`max_length` to be an integer >= 3, got 2"),
        ({"max_length": 41}, ValueError, "<= 40, the model's positions, got 41"),
        ({"activation": "identity"}, ValueError, "expected `activation` to be one of"),
        ({"importance": "linear"}, ValueError, "expected `importance` to be one of"),
        ({"expansion": False, "softcap": 2.0}, ValueError, "no `softcap` and .* with expansion=F"),
        ({"logit_scale": 0.0}, ValueError, "expected `logit_scale` to be a finite number > 0"),
        ({"prune_ratio": 1.0}, ValueError, r"expected `prune_ratio` in \[0, 1\), got 1.0"),
        ({"max_active_dims": 0}, ValueError, "expected `max_active_dims` to be an integer >= 1"),
        ({"budgets": {5: (-1.0, None)}}, ValueError, r"expected `budgets\[5\]` to be a finite"),
        ({"budgets": {5: (0.1,)}}, ValueError, "expected `budgets` as pairs of thresholds"),
        ({"budgets": [5]}, ValueError, "expected `budgets` as pairs of thresholds"),
        ({"keep_at_least": -1}, ValueError, "expected `keep_at_least` to be an integer >= 0"),
    ]:
        with pytest.raises(error, match=match):
            SpladeEncoder(model, words, **options)
    model.resize_token_embeddings(size - 1)
    with pytest.raises(ValueError, match=f"ids below the model's vocabulary size {size - 1}, got"):
        SpladeEncoder(model, words)
    with pytest.raises(TypeError, match=r"expected `model` to be a model .*got Lin"):
        SpladeEncoder(torch.nn.Linear(2, 2), words, expansion=False)


IS_OLD = torch.__version__.startswith("2.6.")


@pytest.mark.skipif(IS_OLD, reason="PyTorch 2.6 does not compile transformers 5")
def test_compiles_as_one_graph():
    encoder = make(gate=True, idf_weights=True, budgets={9: (1.0, None)})
    batch = encoder.tokenize(TEXTS)
    torch._dynamo.reset()
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    for side in (None, "document"):
        torch.testing.assert_close(compiled(**batch, side=side), encoder(**batch, side=side))


@pytest.mark.filterwarnings("ignore:sentence-transformers")
def test_encoding_prunes_by_ratio_and_by_number(tmp_path):
    encoder, whole = make(), make().encode(TEXTS, output="tokens")
    options = {"prune_ratio": 0.5, "max_active_dims": 2}
    by_ratio = encoder.encode_query(TEXTS, output="tokens", prune_ratio=0.5)
    by_both = encoder.encode_document(TEXTS, output="tokens", **options)
    for text, ratio, both in zip(whole, by_ratio, by_both, strict=True):
        kept = {token: w for token, w in text.items() if w >= 0.5 * max(text.values())}
        assert 0 < len(kept) < len(text)
        assert ratio == kept
        assert both == dict(list(kept.items())[:2])
    again = reloaded(make(**options), tmp_path)
    assert again.encode(TEXTS, output="tokens") == by_both
    assert len(again.encode(TEXTS[1:2], output="tokens", max_active_dims=3)[0]) == 3
