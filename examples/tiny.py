"""A tiny encoder and pairs of texts, made on the spot; put yours in their place."""

import itertools

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from sparse_losses import SpladeEncoder

COLOURS = ["red", "green", "blue", "white", "black"]
OTHERS = COLOURS[1:] + COLOURS[:1]
THINGS = ["car", "film", "shop", "boat", "road", "coat", "dish", "lamp"]
CITIES = ["Seoul", "Lyon", "Osaka", "Milan", "Cairo", "Lima"]
ROWS = [
    {"anchor": f"{thing} {city}", "positive": f"a {colour} {thing} seen in {city}"}
    for (thing, city), colour in zip(itertools.product(THINGS, CITIES), itertools.cycle(COLOURS))
]
HELD_OUT = ROWS[::6]
TRAIN = [row for row in ROWS if row not in HELD_OUT]
# Yours: a sample of the documents that will be indexed, on which the model was not trained.
DOCUMENTS = [
    f"a {colour} {thing} seen in {city}"
    for (thing, city), colour in zip(itertools.product(THINGS, CITIES), itertools.cycle(OTHERS))
]


def encoder(dropout: float = 0.1) -> SpladeEncoder:
    """The same untrained model whenever it is called."""
    words = ["[PAD]", "[UNK]", "a", "seen", "in", *COLOURS, *THINGS, *CITIES]
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = BertConfig(vocab_size=len(words), intermediate_size=64, **sizes, **dropouts)
    torch.manual_seed(0)
    return SpladeEncoder(BertForMaskedLM(config), tokenizer)


def active_dimensions(encoder: SpladeEncoder) -> float:
    """The mean number of active dimensions of the held-out documents."""
    encoder.eval()
    vectors = encoder.encode([row["positive"] for row in HELD_OUT], output="dense")
    return (vectors > 0).sum(1).double().mean().item()
