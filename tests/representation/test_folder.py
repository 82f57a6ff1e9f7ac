"""Folders: what is saved is loaded again, also by others; what is damaged is refused by name."""

import copy
import errno
import json
import os
import re
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging

from sparse_losses import ContextGate, SpladeEncoder
from tests.representation.tiny_models import ISSUE, TEXTS, VARIANTS, make, pair

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def dense(encoder, texts=TEXTS):
    return encoder.encode(texts, output="dense")


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [*(("bert", name) for name in VARIANTS), *((name, "all") for name in ISSUE[1:])],
)
def test_loaded_encoder_equals_the_saved_one(architecture, variant, tmp_path):
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
    ours, theirs = (dense(e) for e in (encoder, loaded))
    assert torch.equal(ours, theirs)
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


def test_the_model_card_says_how_to_load(tmp_path, monkeypatch):
    encoder = make(idf_weights=True)
    encoder.model.name_or_path = "someone/base"
    encoder.calibrate(TEXTS, np.int64(5))
    encoder.save_pretrained(tmp_path / "a")
    card = (tmp_path / "a" / "README.md").read_text(encoding="utf-8")
    said = yaml.safe_load(card.split("---\n")[1])
    assert {"sparse-encoder", "splade"} < set(said["tags"])
    assert said["base_model"] == "someone/base"
    assert "does not prune" in card
    monkeypatch.chdir(tmp_path)  # where the folder's name leads to it
    for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        if "import SparseEncoder" in block and find_spec("sentence_transformers") is None:
            continue
        exec(block, names := {})
        assert names["vectors"].shape == (1, encoder.vocab_size)

    loaded = SpladeEncoder.from_pretrained("a")
    loaded.document_threshold = None
    loaded.save_pretrained("b")
    assert "does not prune" not in (tmp_path / "b/README.md").read_text(encoding="utf-8")
    (tmp_path / "b/README.md").write_bytes(b"mine \xff")
    loaded.save_pretrained("b")
    assert (tmp_path / "b/README.md").read_bytes() == b"mine \xff"
    encoder.model.name_or_path = "/gone/checkpoint"
    encoder.save_pretrained("c")
    assert "gone" not in (tmp_path / "c/README.md").read_text(encoding="utf-8")


def test_the_model_card_offers_no_reader_that_refuses_the_folder(tmp_path):
    make(expansion=False).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "SpladeEncoder.from_pretrained" in card
    assert "SparseEncoder(" not in card


@pytest.mark.parametrize("expansion", [True, False])
def test_half_precision_is_kept(expansion, tmp_path):
    encoder = make(gate=True, idf_weights=True, expansion=expansion)
    encoder.save_pretrained(tmp_path)
    half = SpladeEncoder.from_pretrained(tmp_path, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    again = SpladeEncoder.from_pretrained(tmp_path)
    vectors = dense(again)
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, dense(encoder), atol=0.1, rtol=0.1)
    for each in (half, again):
        assert {p.dtype for p in each.parameters()} == {torch.bfloat16}
        assert torch.equal(dense(each), vectors)


def test_arguments_replace_or_drop_saved_parts(tmp_path):
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
    expected = dense(SpladeEncoder(model, words))
    assert torch.equal(dense(encoder), expected)
    # And ours is one.
    encoder.save_pretrained(tmp_path / "ours")
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    batch = AutoTokenizer.from_pretrained(tmp_path / "ours")(["a"], return_tensors="pt")
    assert torch.equal(theirs(**batch).logits, model(**batch).logits)


def test_missing_weights_are_a_warning(tmp_path):
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


GATE = {"gate_hidden": 256, "num_heads": 4, "dropout": 0.1}
SETTINGS = {"format": 1, "expansion": True, "max_length": 40, "idf_weights": True, "gate": GATE}
OURS, PROMPTS = "sparse_losses.json", "config_sentence_transformers.json"
MODULES, WEIGHTS = "modules.json", "2_IdfWeights/model.safetensors"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (OURS, "{"),
        (OURS, {**SETTINGS, "format": 2}),
        (OURS, {**SETTINGS, "gate": {"depth": 2}}),
        (OURS, {**SETTINGS, "gate": None}),  # its tensors are there
        (OURS, {**SETTINGS, "max_length": -1}),
        (OURS, {**SETTINGS, "softcap": "12"}),
        (MODULES, {"idx": 0}),
        (MODULES, [{"type": 1, "path": ""}]),
        (PROMPTS, ["prompt"]),
    ],
)
def test_damaged_json_is_an_error_that_names_the_folder(file, content, tmp_path):
    make(idf_weights=True, gate=True).save_pretrained(tmp_path)
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / file).write_text(text)
    with pytest.raises(OSError, match=f"{tmp_path.name} is damaged"):
        SpladeEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "file", [MODULES, PROMPTS, "model.safetensors", "sparse_losses.safetensors", WEIGHTS]
)
def test_truncated_file_is_an_error_that_names_the_folder(file, tmp_path):
    make(idf_weights=True, gate=True).save_pretrained(tmp_path)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:9])
    with pytest.raises(OSError, match=f"{tmp_path.name} is damaged"):
        SpladeEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("expansion", "files", "message"),
    [
        (True, [OURS], f"it has no {OURS}"),
        (True, ["sparse_losses.safetensors"], "it has no sparse_losses.safetensors"),
        (True, [WEIGHTS], f"it has no {WEIGHTS}"),
        (False, [OURS, "sparse_losses.safetensors"], f"it has no {OURS}"),
        (True, ["config.json"], "it has no config.json"),
        (True, ["tokenizer.json", "tokenizer_config.json"], "its tokenizer has no vocabulary"),
    ],
)
def test_folder_without_its_files_is_incomplete(expansion, files, message, tmp_path):
    with pytest.raises(OSError, match=f"{tmp_path.name} is incomplete: it has no config.json"):
        SpladeEncoder.from_pretrained(tmp_path)
    make(idf_weights=True, expansion=expansion).save_pretrained(tmp_path)
    for file in files:
        (tmp_path / file).unlink()
    with pytest.raises(OSError, match=f"{tmp_path.name} is incomplete: {message}"):
        SpladeEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("path", ["../other", "/other", "inner/../../other", "C:other"])
def test_modules_outside_the_folder_are_refused(path, tmp_path):
    """What is there is not read, even where it would do."""
    make(idf_weights=True).save_pretrained(tmp_path / "other")
    folder, others = tmp_path / "folder", tmp_path / "other" / "2_IdfWeights"
    make().save_pretrained(folder)
    others.rename(tmp_path / "other" / "weights")
    entry = {"type": "some.IdfWeights", "path": f"{path}/weights"}
    (folder / "modules.json").write_text(json.dumps([entry]))
    with pytest.raises(OSError, match=r"folder is damaged: .*expected paths inside it in modules"):
        SpladeEncoder.from_pretrained(folder)


def test_full_disk_leaves_the_old_folder(tmp_path, monkeypatch):
    folder = tmp_path / "encoder"
    old, new = make(gate=True), make(idf_weights=True)
    old.save_pretrained(folder)
    (folder / "notes.txt").write_text("mine")

    def content():
        return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    def full(*_, **__):
        raise FULL

    before = content()
    with monkeypatch.context() as patch:
        patch.setattr("sparse_losses.representation.folder.json.dumps", full)
        with pytest.raises(OSError, match="No space left"):
            new.save_pretrained(folder)
    assert content() == before
    assert os.listdir(tmp_path) == ["encoder"]
    new.save_pretrained(folder)
    assert SpladeEncoder.from_pretrained(folder).gate is None
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("after", [0, 3])
def test_partly_replaced_folder_does_not_load(tmp_path, monkeypatch, after):
    old, new = make(gate=True), make(gate=True)
    old.save_pretrained(tmp_path)
    replace, done = os.replace, []

    def stops(*paths):
        if len(done) == after:
            raise FULL
        done.append(paths)
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr("sparse_losses.representation.folder.os.replace", stops)
        with pytest.raises(OSError, match="No space left"):
            new.save_pretrained(tmp_path)
    with pytest.raises(OSError, match="is incomplete"):
        SpladeEncoder.from_pretrained(tmp_path)


def test_stale_shards_are_deleted(tmp_path):
    encoder = make()
    encoder.model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    encoder.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    SpladeEncoder.from_pretrained(tmp_path)


@pytest.fixture
def theirs():
    """Loads a folder as sentence-transformers does."""
    SparseEncoder = pytest.importorskip("sentence_transformers").SparseEncoder
    return lambda folder, **options: SparseEncoder(str(folder), device="cpu", **options)


def encode(model, texts):
    return model.encode(texts, convert_to_sparse_tensor=False).cpu()


OPTIONS = [{"idf_weights": True}, {"activation": "log1p_relu"}]


@pytest.mark.parametrize(
    ("architecture", "options"), [*(("bert", x) for x in OPTIONS), *((name, {}) for name in ISSUE)]
)
def test_sentence_transformers_gives_the_same_vectors(architecture, options, theirs, tmp_path):
    encoder, weighted = make(architecture, **options), "idf_weights" in options
    encoder.save_pretrained(tmp_path)
    # Idf weights are a module of ours, which they run only if told to.
    model = theirs(tmp_path, trust_remote_code=weighted)
    assert model.max_seq_length == encoder.max_length
    texts = [text for text in TEXTS if text] + ["dog " * 500]
    vectors = encode(model, texts)
    torch.testing.assert_close(vectors, dense(encoder, texts))
    # What they save again, we both read again.
    saved = tmp_path / "theirs"
    model.save_pretrained(str(saved))
    again = SpladeEncoder.from_pretrained(saved)
    assert again.activation == encoder.activation
    torch.testing.assert_close(dense(again, texts), vectors)
    torch.testing.assert_close(encode(theirs(saved, trust_remote_code=weighted), texts), vectors)
    if weighted:
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            theirs(tmp_path)


@pytest.mark.parametrize(
    "options", [{"expansion": False}, {"pool_special_tokens": False}, {"logit_scale": 0.5}], ids=str
)
def test_sentence_transformers_refuses_what_its_modules_lack(options, theirs, tmp_path):
    make().save_pretrained(tmp_path)
    make(**options).save_pretrained(tmp_path)
    for trust, message in (
        (False, r"references the module class 'sparse_losses"),
        (True, r"load it with SpladeEncoder.from_pretrained"),
    ):
        with pytest.raises(ValueError, match=message):
            theirs(tmp_path, trust_remote_code=trust)


def test_sum_pooling_of_sentence_transformers_is_refused(theirs, tmp_path):
    make().save_pretrained(tmp_path)
    model = theirs(tmp_path)
    model[1] = type(model[1])(pooling_strategy="sum")
    model.save_pretrained(str(tmp_path / "theirs"))
    with pytest.raises(ValueError, match=r"pooling_strategy 'max' .* got 'sum' and"):
        SpladeEncoder.from_pretrained(tmp_path / "theirs")


def test_prompts_of_sentence_transformers_stay_and_are_a_warning(theirs, tmp_path):
    encoder, saved = make(), tmp_path / "theirs"
    encoder.save_pretrained(tmp_path)
    model = theirs(tmp_path, prompts={"q": "ask: "})
    model.default_prompt_name = "q"
    model.save_pretrained(str(saved))
    with pytest.warns(UserWarning, match="default prompt 'q'"):
        SpladeEncoder.from_pretrained(saved).save_pretrained(saved)
    again = theirs(saved)
    assert again.prompts["q"] == "ask: "
    torch.testing.assert_close(encode(again, ["dog"]), dense(encoder, ["ask: dog"]))


def test_idf_weights_are_a_module_in_a_model_of_sentence_transformers(theirs, tmp_path):
    """Their trainer loads the checkpoints of their own modules only without further ado."""
    encoder = make(idf_weights=True)
    SpladeEncoder(encoder.model, encoder.tokenizer).save_pretrained(tmp_path)
    model = theirs(tmp_path)
    from sentence_transformers.base.modules import Module

    from sparse_losses.integrations.sentence_transformers import IdfWeights

    module = IdfWeights(encoder.vocab_size)
    module.weight.copy_(encoder.idf_weights)
    assert isinstance(module, Module)
    vectors = encode(type(model)(modules=[*model, module]), ["dog"])
    torch.testing.assert_close(vectors, dense(encoder, ["dog"]))
    module.save(tmp_path / "alone")
    assert torch.equal(IdfWeights.load(str(tmp_path / "alone")).weight, encoder.idf_weights)
