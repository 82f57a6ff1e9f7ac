"""Encoders, models and tokenizers of the real architectures, small and untrained."""

import random
import re

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sparse_losses import SpladeEncoder

TEXTS = [
    "서울 맛집 추천",
    "a learned sparse retriever",
    "",
    "vectors over the vocabulary, one weight a token. U.S.A.",
    "서울",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog", "점심 메뉴 추천해 주세요"] * 3
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
ARCHITECTURES = {
    "bert": ("Bert", {**SIZES, "pad_token_id": 0}),
    "distilbert": ("DistilBert", {**SIZES, "hidden_dim": 32}),
    "xlm-roberta": ("XLMRoberta", {**SIZES, **IDS}),
    "modernbert": ("ModernBert", {**SIZES, **IDS, "cls_token_id": 2, "sep_token_id": 3}),
    "albert": ("Albert", {**SIZES, **IDS, "embedding_size": 8}),
    "electra": ("Electra", {**SIZES, "embedding_size": 16}),
    "deberta-v2": ("DebertaV2", SIZES),
    "mpnet": ("MPNet", SIZES),
}
ISSUE = ("bert", "distilbert", "xlm-roberta", "modernbert")
BOTH_WAYS = Version(transformers.__version__) >= Version("5.2")  # an older one attends one way


def tokenizer(kind: str = "unigram") -> PreTrainedTokenizerFast:
    """A tokenizer of one of three kinds, the same in every process.

    The trainers of word pieces and of unigrams break ties at random: they are not used.
    """
    if kind == "unigram":
        words = {f"▁{word}" for text in CORPUS for word in text.split()}
        pieces = sorted({letter for word in words for letter in word} | {w[:4] for w in words})
        unigrams = [(piece, 0.0) for piece in SPECIAL] + [(piece, -1.0) for piece in pieces]
        tokens = Tokenizer(models.Unigram(unigrams, unk_id=SPECIAL.index("<unk>")))
        tokens.pre_tokenizer = pre_tokenizers.Metaspace()
        tokens.decoder = decoders.Metaspace()
    elif kind == "wordpiece":
        words = {word for text in CORPUS for word in re.findall(r"\w+|[^\w\s]", text)}
        letters = {letter for word in words for letter in word}
        pieces = {*letters, *(word[:5] for word in words)}
        pieces |= {f"##{letter}" for letter in letters} | {f"##{word[5:]}" for word in words}
        vocabulary = [*SPECIAL, *sorted(pieces - {"##"})]
        vocabulary += [f"[unused{i}]" for i in range(150 - len(vocabulary))]
        ids = {piece: i for i, piece in enumerate(vocabulary)}
        tokens = Tokenizer(models.WordPiece(ids, unk_token="<unk>"))
        tokens.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        tokens = Tokenizer(models.BPE())
        tokens.pre_tokenizer = pre_tokenizers.ByteLevel()
        letters = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
        options = {"vocab_size": 300, "special_tokens": SPECIAL, "show_progress": False} | letters
        tokens.train_from_iterator(CORPUS, trainers.BpeTrainer(**options))
    tokens.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    special = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
    names = {f"{name}_token": token for name, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **names)


def word_level(words, special="pad unk cls sep mask", **options) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, with BERT's special tokens before them."""
    special = {f"{name}_token": f"[{name.upper()}]" for name in special.split()}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *words])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **special, **options)


CAUSAL = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"head_dim": 8}),
    "cohere": ("Cohere", {}),
    "granite": ("Granite", {"logits_scaling": 8.0}),
    "gpt2": ("GPT2", {}),
}
KINDS = {"bert": "wordpiece", "distilbert": "wordpiece", "modernbert": "bytes"}
KINDS |= dict.fromkeys(CAUSAL, "bytes")


def language_model(architecture: str, vocab_size: int, **settings):
    """A model in evaluation mode, whose logits are far from constant and of both signs."""
    (name, sizes), kind = (ARCHITECTURES | CAUSAL)[architecture], "ForMaskedLM"
    if architecture in CAUSAL:
        kind = "LMHeadModel" if architecture == "gpt2" else "ForCausalLM"
        sizes = {**SIZES, "num_key_value_heads": 1, **IDS, **sizes}
    configuration = getattr(transformers, f"{name}{'Text' * (architecture == 'gemma3')}Config")
    torch.manual_seed(random.Random(architecture).randrange(1000))
    model_class = getattr(transformers, f"{name}{kind}")
    return scattered(model_class(configuration(vocab_size=vocab_size, **{**sizes, **settings})))


def scattered(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
        if (bias := getattr(model.get_output_embeddings(), "bias", None)) is not None:
            bias.normal_(std=0.3)
    return model.eval()


def pair(architecture: str, **settings):
    """A model and its tokenizer."""
    words = tokenizer(KINDS.get(architecture, "unigram"))
    return language_model(architecture, len(words), **settings), words


def saved(folder, *parts) -> str:
    """Save models and tokenizers in one folder, as others do; return its name."""
    for part in parts:
        part.save_pretrained(folder)
    return str(folder)


def with_lora(model, targets, **options):
    """Return a PeftModel whose adapters change the outputs."""
    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, **options))
    return trained(model)


def trained(model):
    """Change the outputs by the adapters that a model has."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.5)
    return model


VARIANTS = {
    "plain": {},
    "gate": {"gate": True},
    "idf": {"idf_weights": True},
    "input tokens": {"expansion": False},
    "all": {"expansion": False, "gate": True, "idf_weights": True},
}


def make(architecture="bert", **options):
    """An encoder; with ``idf_weights=True`` of random ones, one of them 0."""
    torch.manual_seed(0)
    model, words = pair(architecture)
    if architecture in CAUSAL:
        options = {"bidirectional": BOTH_WAYS} | options
    if options.get("idf_weights"):
        weights = torch.rand(len(words))
        weights[7] = 0.0
        options["idf_weights"] = weights
    return SpladeEncoder(model, words, **options).eval()


def dense(encoder, texts=TEXTS, **options):
    return encoder.encode(texts, output="dense", **options)


def assert_same(one, other):
    """Two encoders give the same vectors."""
    torch.testing.assert_close(dense(one), dense(other))


def reloaded(encoder, folder, **options):
    encoder.save_pretrained(folder)
    return SpladeEncoder.from_pretrained(folder, **options)


def load_theirs(folder, **options):
    """Load a folder as sentence-transformers does."""
    SparseEncoder = pytest.importorskip("sentence_transformers").SparseEncoder
    return SparseEncoder(str(folder), device="cpu", **options)
