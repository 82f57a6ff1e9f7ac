"""Folders: what is saved is loaded again, also by others; what is damaged is refused by name."""

import copy
import json
import warnings

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, FunnelConfig, FunnelForMaskedLM

from sparse_losses import ContextGate, SpladeEncoder, StaticQueryEncoder, calibrate_threshold
from tests.representation.tiny_models import (
    ISSUE,
    TEXTS,
    VARIANTS,
    dense,
    load_theirs,
    make,
    pair,
    reloaded,
    saved,
    tokenizer,
)

LONG = [*(text for text in TEXTS if text), "dog " * 500]


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [*(("bert", name) for name in VARIANTS), *((name, "all") for name in ISSUE[1:])],
)
def test_loaded_encoder_equals_the_saved_one(architecture, variant, tmp_path):
    encoder = make(architecture, max_length=17, **VARIANTS[variant])
    if variant == "gate":
        sizes = {"gate_hidden": 24, "num_heads": 2, "dropout": 0.3}
        encoder.gate = ContextGate(16, encoder.vocab_size, **sizes).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = reloaded(encoder, tmp_path)
    assert not loaded.training
    assert loaded.max_length == 17
    assert repr(loaded.gate) == repr(encoder.gate)
    torch.testing.assert_close(loaded.state_dict(), encoder.state_dict(), rtol=0, atol=0)
    ours = dense(encoder)
    assert torch.equal(ours, dense(loaded))
    assert ours.any()
    # Twice into the same folder, into one inside another, and as a copy that keeps its ties.
    loaded.save_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "best")
    inside = SpladeEncoder.from_pretrained(tmp_path, subfolder="best")
    again = copy.deepcopy(SpladeEncoder.from_pretrained(str(tmp_path)))
    for other in (inside, again):
        assert torch.equal(dense(other), ours)
        if other.expansion:
            assert other.head.weight is other.model.get_output_embeddings().weight


def check_both_sides(model, encoder, texts=LONG):
    """Compare the vectors of a ``SparseEncoder`` with ours."""
    for side in ("query", "document"):
        expected = getattr(model, f"encode_{side}")(texts, convert_to_sparse_tensor=False)
        ours = getattr(encoder, f"encode_{side}")(texts, output="dense")
        torch.testing.assert_close(ours, expected.cpu().float(), msg=side)


def test_the_model_card_says_how_to_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoder, path = make(), tmp_path / "a" / "README.md"
    encoder.model.name_or_path = "someone/base"
    encoder.save_pretrained("a")
    card = path.read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "someone/base"
    for line in ('SpladeEncoder.from_pretrained("a")', 'SparseEncoder("a")'):
        assert line in card
    path.write_bytes(b"mine \xff")
    encoder.save_pretrained("a")
    assert path.read_bytes() == b"mine \xff"


@pytest.mark.parametrize(
    ("options", "most", "kept"),
    [
        ({"budgets": {2.5: (9.0, None), 3.4: (0.5, 0.25)}}, 3, "thresholds, and keeps the 3 larg"),
        ({"budgets": {7: (0.5, None)}, "max_active_dims": 3}, 3, "thresholds, and keeps the 3"),
        ({"budgets": {7: (None, 0.5)}}, None, "thresholds, and keeps all active dimensions"),
        ({"prune_ratio": 0.5}, None, "prune_ratio, and keeps all active dimensions"),
    ],
)
def test_pruning_is_said_and_saved_as_far_as_there_is_a_place(options, most, kept, tmp_path):
    encoder = make(**options)
    with pytest.warns(UserWarning, match=f"not apply {kept}"):
        again = reloaded(encoder, tmp_path)
    assert kept in (tmp_path / "README.md").read_text("utf-8")
    for name, value in options.items():
        assert getattr(again, name) == value or name == "budgets"
    assert torch.equal(dense(again), dense(encoder))
    model = load_theirs(tmp_path)
    assert getattr(model, "max_active_dims", None) == most
    active = (model.encode(TEXTS[:2], convert_to_sparse_tensor=False) > 0).sum(1)
    assert (active <= 3).all() == (most == 3)


@pytest.mark.parametrize("expansion", [True, False])
def test_half_precision_is_kept(expansion, tmp_path):
    encoder = make(gate=True, idf_weights=True, expansion=expansion)
    half = reloaded(encoder, tmp_path, dtype=torch.bfloat16)
    again = reloaded(half, tmp_path)
    vectors = dense(again)
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, dense(encoder), atol=0.1, rtol=0.1)
    for each in (half, again):
        assert {p.dtype for p in each.parameters()} == {torch.bfloat16}
        assert torch.equal(dense(each), vectors)


def test_arguments_replace_or_drop_saved_parts(tmp_path):
    encoder = make(gate=True, idf_weights=True)
    none = reloaded(encoder, tmp_path, gate=False, idf_weights=False)
    assert none.gate is none.idf_weights is None
    own = {"gate": ContextGate(16, encoder.vocab_size), "idf_weights": encoder.idf_weights * 2}
    other = SpladeEncoder.from_pretrained(tmp_path, **own)
    assert other.gate is own["gate"]
    assert torch.equal(other.idf_weights, own["idf_weights"])
    kept = SpladeEncoder.from_pretrained(tmp_path, gate=True)
    assert torch.equal(kept.gate.query, encoder.gate.query)
    words = SpladeEncoder.from_pretrained(tmp_path, expansion=False, max_length=9)
    assert (words.expansion, words.max_length) == (False, 9)


def test_missing_weights_are_a_warning(tmp_path):
    model, words = pair("bert")
    saved(tmp_path, model.base_model, words)
    with pytest.warns(UserWarning, match=r"has no weights for cls.*they are random"):
        SpladeEncoder.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpladeEncoder.from_pretrained(tmp_path, expansion=False)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["embeddings.word_embeddings.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="has no weights for bert.embeddings.word_embeddings"):
        SpladeEncoder.from_pretrained(tmp_path, expansion=False)


BERT, ENCODER = "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING = "1_SpladePooling/config.json"
TEXT = {"text": {"method": "forward", "method_output_name": "logits"}}
# What is the same for both: file, what it says.
HONOURED = [
    (BERT, {"max_seq_length": 7}),
    (BERT, {"max_seq_length": 7, "do_lower_case": True}),
    (BERT, {"document_length": 6, "query_length": 6}),
    (BERT, {"tokenizer_args": {"model_max_length": 8}}),
    (BERT, {"processor_kwargs": {"model_max_length": 8}, "unpad_inputs": False}),
    (BERT, {"model_args": {"attn_implementation": "eager", "dtype": "float64"}}),
    (BERT, {"config_args": {"layer_norm_eps": 0.5}}),
    (BERT, {"transformer_task": "fill-mask", "modality_config": TEXT}),
    (ENCODER, {"prompts": {"query": "ask: ", "document": "about: "}}),
    (ENCODER, {"prompts": {"query": "ask: ", "passage": "of: ", "corpus": "in: "}}),
    (ENCODER, {"max_active_dims": 3}),
    (POOLING, {"activation_function": "log1p_relu"}),
]
REFUSED = [
    (BERT, {"query_length": 5}, "one query_length and document_length"),
    (BERT, {"transformer_task": "feature-extraction"}, "transformer_task = 'fill-mask', got 'fea"),
    (BERT, {"module_output_name": "scores"}, "module_output_name = 'token_embeddings', got"),
    (BERT, {"processing_kwargs": {"text": {"padding": "max_length"}}}, "processing_kwargs"),
    (BERT, {"query_expansion": {"length": 9}}, "query_expansion = None, got"),
    (BERT, {"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path = None, got 'other'"),
    (BERT, {"modality_config": {"message": {}}}, "modality_config"),
    (BERT, {"pool_the_moon": 1}, "pool_the_moon = no such key, got 1"),
    (POOLING, {"pooling_strategy": "sum"}, "pooling_strategy = 'max', got 'sum'"),
]


def written(tmp_path, file, said):
    """A folder of sentence-transformers, after one of its files was made to say more."""
    load_theirs(saved(tmp_path / "plain", *pair("bert"))).save_pretrained(str(tmp_path / "theirs"))
    path = tmp_path / "theirs" / file
    before = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(before | said), encoding="utf-8")
    return tmp_path / "theirs"


@pytest.mark.parametrize(("file", "said"), HONOURED, ids=str)
def test_what_a_folder_says_is_done(file, said, tmp_path):
    folder = written(tmp_path, file, said)
    encoder, texts = SpladeEncoder.from_pretrained(folder), [*LONG, "The Quick BROWN fox"]
    check_both_sides(load_theirs(folder), encoder, texts)
    again = reloaded(encoder, tmp_path / "ours")
    for side in ("query", "document"):
        expected = dense(encoder, texts, side=side)
        torch.testing.assert_close(dense(again, texts, side=side), expected)
    if "dtype" not in str(said):  # which they read there again
        check_both_sides(load_theirs(tmp_path / "ours"), encoder, texts)


@pytest.mark.parametrize(("file", "said", "message"), REFUSED, ids=str)
def test_what_cannot_be_done_is_refused_by_name(file, said, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        SpladeEncoder.from_pretrained(written(tmp_path, file, said))


def test_what_is_done_elsewhere_alone_is_a_warning(tmp_path):
    said = {"prompts": {"p": "ask: "}, "default_prompt_name": "p"}
    folder = written(tmp_path, ENCODER, said)
    with pytest.warns(UserWarning, match="default prompt p, for texts without a side"):
        SpladeEncoder.from_pretrained(folder)


def test_model_without_a_limit_reads_whole_texts(tmp_path):
    words = tokenizer()
    sizes = {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "block_sizes": [1, 1]}
    model = FunnelForMaskedLM(FunnelConfig(vocab_size=len(words), **sizes)).eval()
    encoder = SpladeEncoder(model, words)
    assert encoder.max_length is None
    assert encoder.tokenize(["dog " * 300])["input_ids"].shape[1] > 300
    assert reloaded(encoder, tmp_path).max_length is None
    check_both_sides(load_theirs(tmp_path), encoder, ["dog " * 300])


def test_both_sides_of_a_router_of_two_models_are_not_one(tmp_path):
    make().save_pretrained(tmp_path / "a")
    make(activation="log1p_relu").save_pretrained(tmp_path / "b")
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    sides = [load_theirs(tmp_path / name) for name in "ab"]
    router = modules.Router.for_query_document(*map(list, sides))
    type(sides[0])(modules=[router], device="cpu").save_pretrained(str(tmp_path / "r"))
    with pytest.warns(UserWarning, match="encodes queries by another MLMTransformer"):
        encoder = SpladeEncoder.from_pretrained(tmp_path / "r")
    assert encoder.activation == "log1p_relu"


@pytest.mark.parametrize("options", [{}, {"logit_scale": 1 / 30}], ids=str)
@pytest.mark.parametrize("architecture", ISSUE)
def test_sentence_transformers_gives_the_same_vectors(architecture, options, tmp_path):
    encoder = make(architecture, **options)
    encoder.save_pretrained(tmp_path)
    model = load_theirs(tmp_path)
    assert model.max_seq_length == encoder.max_length
    check_both_sides(model, encoder)
    model.save_pretrained(str(tmp_path / "theirs"))  # what they save again, we both read again
    again = SpladeEncoder.from_pretrained(tmp_path / "theirs")
    check_both_sides(load_theirs(tmp_path / "theirs"), again)
    torch.testing.assert_close(dense(again), dense(encoder))
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path)
    batch = encoder.tokenize(["a"])
    assert torch.equal(plain(**batch).logits, encoder.model(**batch).logits)


LACKS = [{"expansion": False}, {"pool_special_tokens": False}, {"gate": True}]


@pytest.mark.parametrize("options", [*LACKS, {"idf_weights": True}], ids=str)
def test_sentence_transformers_refuses_what_its_modules_lack(options, tmp_path):
    make().save_pretrained(tmp_path)
    make(**options).save_pretrained(tmp_path)
    for trust in (False, True):
        with pytest.raises((ValueError, AttributeError), match="SpladeEncoder"):
            load_theirs(tmp_path, trust_remote_code=trust)


OURS, TENSORS, MODULES = "sparse_losses.json", "sparse_losses.safetensors", "modules.json"


def test_files_of_others_stay_and_stale_ones_go(tmp_path):
    encoder, mine = make(), ["model_ema.safetensors", "adapter_notes.txt", "model.safetensors.bak"]
    encoder.model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    for name in (*mine, "adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    encoder.save_pretrained(tmp_path)
    left = {file.name for each in ("model", "adapt") for file in tmp_path.glob(f"*{each}*")}
    assert left == {*mine, "model.safetensors"}
    assert torch.equal(dense(SpladeEncoder.from_pretrained(tmp_path)), dense(encoder))


def test_damaged_file_is_an_error_that_names_the_folder(tmp_path):
    make(idf_weights=True, gate=True).save_pretrained(tmp_path)
    for file, change in [
        (OURS, "{"),
        (OURS, {"format": 2}),
        (OURS, {"gate": {"depth": 2}}),
        (MODULES, {"idx": 0}),
        (MODULES, [{"type": 1, "path": ""}]),
        (MODULES, [{"type": "a.Router", "path": "/other"}]),
        *((MODULES, [{"type": "a.MLMTransformer", "path": x}]) for x in ("../other", "C:other")),
        (ENCODER, ["prompt"]),
        *((file, None) for file in (MODULES, ENCODER, "model.safetensors", TENSORS)),
    ]:
        whole = (tmp_path / file).read_bytes()
        if isinstance(change, dict) and file == OURS:
            change = json.loads(whole) | change
        damaged = whole[:9] if change is None else json.dumps(change).encode()
        (tmp_path / file).write_bytes(damaged)
        with pytest.raises(OSError, match=f"{tmp_path.name} is damaged"):
            SpladeEncoder.from_pretrained(tmp_path)
        (tmp_path / file).write_bytes(whole)


def test_folder_without_its_files_is_incomplete(tmp_path):
    for expansion, files, message in [
        (True, [OURS], f"it has no {OURS}"),  # the last that is written
        (True, [TENSORS], f"it has no {TENSORS}"),
        (False, [OURS, TENSORS], f"it has no {OURS}"),
        (True, ["config.json"], "it has no config.json"),
        (True, ["tokenizer.json", "tokenizer_config.json"], "its tokenizer has no vocabulary"),
    ]:
        folder = tmp_path / f"{expansion}-{files[0]}"
        make(expansion=expansion).save_pretrained(folder)
        for file in files:
            (folder / file).unlink()
        with pytest.raises(OSError, match=f"{folder.name} is incomplete: {message}"):
            SpladeEncoder.from_pretrained(folder)


def test_encoder_works_under_other_defaults_of_torch(tmp_path):
    encoder = make(gate=True, idf_weights=True)
    encoder.save_pretrained(tmp_path)
    expected = dense(encoder)
    threshold = calibrate_threshold(expected, 2.0)
    with torch.device("meta"):  # stands for a GPU; the model is on the CPU
        model, words = encoder.model, encoder.tokenizer
        for options in ({}, {"expansion": False, "gate": True}):
            made = SpladeEncoder(model, words, **options).eval()
            assert dense(made).shape == expected.shape
            assert len(made.token_weights(TEXTS)) == len(TEXTS)
        assert torch.equal(dense(encoder), expected)
        queries = StaticQueryEncoder(words, encoder.idf_weights)
        for vectors in (queries(**queries.tokenize(TEXTS)), queries.encode_query(TEXTS)):
            assert vectors.device.type == "cpu"
        assert calibrate_threshold(expected, 2.0) == threshold
        for method in ("shift", "prune"):
            found = made.calibrate(TEXTS[:2], 3, method=method, verbose=False)
            assert found.after.document_active == pytest.approx(3)
    try:
        torch.set_default_dtype(torch.bfloat16)
        for each in (encoder, SpladeEncoder.from_pretrained(tmp_path)):
            assert torch.equal(dense(each), expected)
        assert calibrate_threshold(expected, 2.0) == threshold
    finally:
        torch.set_default_dtype(torch.float32)
