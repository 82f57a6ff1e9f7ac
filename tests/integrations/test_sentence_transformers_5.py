"""What also works with sentence-transformers 5.1: ``make test-sentence-transformers-5``."""

import copy
import json

import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
    __version__,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from sparse_losses import InfoNCELoss, SpladeEncoder, calibrate
from sparse_losses.integrations.sentence_transformers import (
    SentenceTransformersLoss,
    remove_splade_head,
    use_splade_head,
)

TEXTS = ["sparse vectors rank", "documents share words", "words rank", "by they"]


@pytest.fixture
def folder(tmp_path):
    """A folder that ``SpladeEncoder`` wrote."""
    words = ["[PAD]", "[UNK]", *dict.fromkeys(" ".join(TEXTS).split())]
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **special)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(vocab_size=len(words), **sizes))
    SpladeEncoder(model, tokenizer).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def dense(model):
    return model.encode(TEXTS, save_to_cpu=True).to_dense()


def test_vectors_are_those_of_the_encoder(folder):
    ours = SpladeEncoder.from_pretrained(folder).encode(TEXTS, output="dense")
    torch.testing.assert_close(dense(SparseEncoder(folder, device="cpu")), ours)


def test_head_gives_their_vectors_and_gradients(folder):
    theirs = SparseEncoder(folder, device="cpu")
    model = use_splade_head(copy.deepcopy(theirs))
    torch.testing.assert_close(dense(model), dense(theirs))
    gradients = []
    for each in (model, theirs):
        batch = each.train().tokenize(TEXTS)
        each(dict(batch))["sentence_embedding"].square().sum().backward()
        gradients.append([p.grad for p in each.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(dense(remove_splade_head(model)), dense(theirs))


@pytest.mark.parametrize("with_head", [False, True])
def test_trainer_trains_with_a_loss_of_this_package(with_head, folder, tmp_path):
    model = SparseEncoder(folder, device="cpu")
    before = dense(model)
    if with_head:
        use_splade_head(model)
    data = Dataset.from_dict({"anchor": TEXTS * 2, "positive": TEXTS[1:] * 2 + TEXTS[:2]})
    arguments = SparseEncoderTrainingArguments(
        output_dir=str(tmp_path), max_steps=3, report_to="none", use_cpu=True, learning_rate=0.01
    )
    loss = SentenceTransformersLoss(model, InfoNCELoss(temperature=1.0, similarity="dot"))
    SparseEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=loss).train()
    assert not torch.allclose(dense(model), before, atol=1e-3)
    model.save_pretrained(str(tmp_path / "trained"))
    again = SparseEncoder(str(tmp_path / "trained"), device="cpu")
    torch.testing.assert_close(dense(again), dense(model))


def test_calibration_keeps_the_target(folder):
    model = SparseEncoder(folder, device="cpu")
    active = (dense(model) > 0).sum().item()
    calibrate(model, TEXTS, 2)
    assert (dense(model) > 0).sum().item() == 8 < active


@pytest.mark.skipif(not __version__.startswith("5."), reason="6 caches the gradient of any loss")
def test_gradient_caching_is_refused(folder):
    model = SparseEncoder(folder, device="cpu")
    with pytest.raises(ValueError, match="expected sentence-transformers 6"):
        SentenceTransformersLoss(model, InfoNCELoss(), mini_batch_size=2)


def test_onnx_backend_reads_the_folder(folder):
    """Their exporter, of optimum, needs transformers 4."""
    pytest.importorskip("optimum.onnxruntime", exc_type=ImportError)
    theirs = SparseEncoder(folder, device="cpu", backend="onnx")
    torch.testing.assert_close(
        dense(theirs), dense(SparseEncoder(folder, device="cpu")), atol=1e-4, rtol=1e-4
    )
    with open(f"{folder}/sparse_losses.json", encoding="utf-8") as file:
        assert json.load(file)["expansion"]
