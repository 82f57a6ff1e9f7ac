"""Language tokens of tokenizers trained on names in ten scripts, against what they decode."""

import functools

import pytest
import torch

from sparse_losses import language_token_ids
from tests.vocabulary.test_languages import ALPHABET, CHARACTER

regex = pytest.importorskip("regex")
tk = pytest.importorskip("tokenizers")
babel = pytest.importorskip("babel")
transformers = pytest.importorskip("transformers")

LANGUAGES = ("ko", "en", "zh", "ja", "ru", "ar", "th", "hi", "el", "he")


@functools.cache
def everything():
    """Names of languages, territories, scripts and currencies."""
    values = []
    for code in LANGUAGES:
        locale = babel.Locale.parse(code)
        for names in (locale.languages, locale.territories, locale.scripts, locale.currencies):
            values += names.values()
    return list(dict.fromkeys(values))


def wordpiece():
    tokenizer = tk.Tokenizer(tk.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tk.normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = tk.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tk.decoders.WordPiece(cleanup=False)
    trainer = tk.trainers.WordPieceTrainer(
        vocab_size=4000, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(everything(), trainer)
    return tokenizer


def byte_level_bpe():
    tokenizer = tk.Tokenizer(tk.models.BPE())
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tk.decoders.ByteLevel()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(everything(), trainer)
    return tokenizer


def t5():
    made = transformers.T5Tokenizer(extra_ids=3)
    return made.train_new_from_iterator([everything()], 3000, show_progress=False)


BUILDERS = {"t5": t5, "wordpiece": wordpiece, "byte-level": byte_level_bpe}


@functools.cache
def built(kind):
    return BUILDERS[kind]()


def special_ids(tokenizer):
    if hasattr(tokenizer, "all_special_ids"):
        return set(tokenizer.all_special_ids)
    return {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def encode(tokenizer, text):
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return getattr(encoded, "ids", encoded)


@functools.cache
def decoded_texts(kind):
    """For every token: its whole characters, and whether it has parts of characters beside them."""
    tokenizer = built(kind)
    anchor = encode(tokenizer, "a")  # a first token is decoded differently from the others
    special = special_ids(tokenizer)
    before = tokenizer.decode(anchor)
    result = {}
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if index in special:
            continue
        decoded = tokenizer.decode([*anchor, index])
        assert decoded.startswith(before)
        text, parts = decoded.removeprefix(before), False
        if "\N{REPLACEMENT CHARACTER}" in text:
            data = bytes(map(ALPHABET.index, token))
            whole = b"".join(CHARACTER.findall(data))
            assert len(whole) < len(data)
            text, parts = whole.decode(), True
        elif kind == "byte-level":
            assert text == tokenizer.decode([index])
        text = text.removeprefix(" ") or ("" if parts else " ")
        result[index] = text, parts
    return result


def expected(kind, scripts, allow_common=True):
    chosen = [*scripts, "Common", "Inherited"] if allow_common else scripts
    pattern = regex.compile("(" + "|".join(rf"\p{{Script={name}}}" for name in chosen) + ")*")
    return [
        index
        for index, (text, parts) in decoded_texts(kind).items()
        if pattern.fullmatch(text) and (allow_common or not parts)
    ]


CHOICES = [["Hangul", "Latin"], ["Han", "Hiragana", "Katakana"], ["Thai"], []]


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("allow_common", [True, False])
@pytest.mark.parametrize("scripts", CHOICES, ids=lambda scripts: "+".join(scripts) or "none")
def test_kept_tokens_are_those_that_decode_to_the_scripts(kind, scripts, allow_common):
    ids = language_token_ids(built(kind), scripts, allow_common=allow_common).tolist()
    assert ids == expected(kind, scripts, allow_common)
    assert len(ids) < len(decoded_texts(kind)) / 2
    assert bool(ids) == bool(scripts or allow_common)


def test_added_tokens_are_kept_by_their_text_and_special_ones_are_not():
    tokenizer = byte_level_bpe()
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["여의도", "Невский", "한강 공원"])
    tokenizer.add_special_tokens(["<한국>"])
    ids = language_token_ids(tokenizer)
    assert ids[ids >= size].tolist() == [size, size + 2]

    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert torch.equal(language_token_ids(fast), ids)
