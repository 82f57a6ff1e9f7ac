"""Names of places, languages, currencies and scripts in twelve languages, from Babel's data."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

import torch
from babel import Locale
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from sparse_losses.demo.tokens import SPECIAL_TOKENS, UNK, Tokens

KOREAN, ENGLISH = "ko", "en"
OTHERS = ("ja", "zh", "ru", "ar", "th", "hi", "el", "he", "ka", "hy")
KINDS = ("territories", "languages", "scripts", "currencies", "variants")
VOCAB_SIZE = 8_000
HELD_OUT = 400
_HANGUL = re.compile("[가-힣]")


@dataclasses.dataclass(frozen=True)
class Item:
    """A query, the Korean name of a thing, and its document of names in eleven languages."""

    query: str
    document: str


@dataclasses.dataclass(frozen=True)
class Names:
    """Items for training and test; no two share a Korean or an English name."""

    train: list[Item]
    held_out: list[Item]


def load(held_out: int = HELD_OUT) -> Names:
    """Load all items that have a Korean name; the split is deterministic."""
    korean, english, *others = (_table(language) for language in (KOREAN, ENGLISH, *OTHERS))
    items: list[Item] = []
    seen: set[str] = set()
    for key, query in sorted(korean.items()):
        kind, code = key
        # If the table lacks a city's English name, its identifier contains it.
        name = english.get(key, code.split("/")[-1].replace("_", " ") if kind == "cities" else "")
        if name and _HANGUL.search(query) and not {query, name} & seen:
            seen |= {query, name}
            items.append(Item(query, " ".join([name, *(t[key] for t in others if key in t)])))
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = [items[index] for index in order]
    return Names(shuffled[held_out:], shuffled[:held_out])


def _table(language: str) -> dict[tuple[str, str], str]:
    locale = Locale.parse(language)
    found = {
        (kind, str(code)): name for kind in KINDS for code, name in getattr(locale, kind).items()
    }
    for zone, about in locale.time_zones.items():
        if "city" in about:
            found["cities", zone] = about["city"]
    return found


def learn_tokens(texts: Sequence[str], vocab_size: int = VOCAB_SIZE) -> Tokens:
    """Learn a SentencePiece-like Unigram vocabulary, as in XLM-RoBERTa."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        unk_token=SPECIAL_TOKENS[UNK],
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    # The trainer sums in the order of a hash table, so the last digits of scores, and with them the
    # order of pieces, vary between runs. Rounding and sorting remove this.
    learned = json.loads(trained.to_str())["model"]["vocab"][len(SPECIAL_TOKENS) :]
    vocabulary = [(token, 0.0) for token in SPECIAL_TOKENS]
    vocabulary += [(piece, round(score, 3)) for piece, score in sorted(learned)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=UNK))
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokens(tokenizer)
