"""WordPiece tokens learned from the training texts, and the sets of special and stop words."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

VOCAB_SIZE = 8_000
MAX_LENGTH = 64
PAD, UNK, CLS, SEP = range(4)
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_FUNCTION_WORDS = """
a about after all also am an and any are as at be because been before being between both but
by can cannot could did do does doing done down during each either else etc ever for from
further had has have having he her here hers him his how however i if in into is it its
itself just may me might more most must my neither no nor not now of off on once only or
other otherwise our out over own per same shall she should since so some such than that the
their them then there therefore these they this those through thus to too under until up
upon us very via was we were what when where whether which while who whom whose why will
with within without would yet you your s t d e g
"""
_LETTER = r"[^\W_]"


def pad(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return token ids padded to the longest row, and a mask that is 1 at tokens."""
    longest = max(map(len, rows))
    input_ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    return {"input_ids": input_ids, "attention_mask": mask.long()}


class Tokens:
    """A tokenizer and the sets of tokens that losses and figures treat separately.

    Attributes:
        tokenizer: a tokenizer of the package `tokenizers`.
        max_length: largest number of tokens per text, begin and end marks included.
        vocab_size: number of tokens.
        special_ids: padding, unknown, begin and end of text.
        stopword_ids: function words, which do not tell the topic of a text.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int = MAX_LENGTH) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.special_ids = tuple(range(len(SPECIAL_TOKENS)))
        known = map(tokenizer.token_to_id, sorted(set(_FUNCTION_WORDS.split())))
        self.stopword_ids = tuple(token for token in known if token is not None)

    @classmethod
    def learn(
        cls, texts: Sequence[str], vocab_size: int = VOCAB_SIZE, max_length: int = MAX_LENGTH
    ) -> Tokens:
        """Learn a WordPiece vocabulary; the same texts give the same tokens.

        Text is lower-cased and punctuation is dropped, so that ``from_edgelist`` is two words.
        """
        tokenizer = _tokenizer({token: number for number, token in enumerate(SPECIAL_TOKENS)})
        normalized = (tokenizer.normalizer.normalize_str(text) for text in texts)
        letters = sorted({letter for text in normalized for letter in re.findall(_LETTER, text)})
        # The trainer numbers continuation letters in the order of a hash table, and breaks ties
        # between merges by number. Naming them first gives them the same number every time.
        named = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)]
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size, special_tokens=named, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(_tokenizer(tokenizer.get_vocab(with_added_tokens=False)), max_length)

    def name(self, token: int) -> str:
        """Return the spelling of a token; ``##`` marks the continuation of a word."""
        return str(self.tokenizer.id_to_token(token))

    def vocabulary(self) -> list[str]:
        """Return all tokens in the order of their ids."""
        return [self.name(token) for token in range(self.vocab_size)]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return begin mark, tokens and end mark of each text."""
        encoded = self.tokenizer.encode_batch_fast(list(texts))
        return [[CLS, *encoding.ids[: self.max_length - 2], SEP] for encoding in encoded]

    def pieces(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the subwords that the model sees, without the marks."""
        return [[self.name(token) for token in row[1:-1]] for row in self.ids(texts)]

    def words(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the whole words of the part of each text that the model sees."""
        words = []
        for text, encoding in zip(texts, self.tokenizer.encode_batch(list(texts)), strict=True):
            offsets = encoding.offsets[: self.max_length - 2]
            seen = text[: offsets[-1][1]] if offsets else ""
            words.append(re.findall(f"{_LETTER}+", seen.lower()))
        return words


def _tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\W_]+"), "removed")
    return tokenizer
