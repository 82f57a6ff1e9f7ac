"""Language tokens of three kinds of vocabulary agree; parts of characters are Common."""

import pytest
import torch

from sparse_losses import language_token_ids

# What each text is written in, besides Common and Inherited.
WORDS = {
    "서울": {"Hangul"},
    "ㅋㅋ": {"Hangul"},
    "Seoul": {"Latin"},
    "café": {"Latin"},
    "cafe\N{COMBINING ACUTE ACCENT}": {"Latin"},
    "Ｋ": {"Latin"},
    "서울city": {"Hangul", "Latin"},
    "Сеул": {"Cyrillic"},
    "漢城": {"Han"},
    "漢字の": {"Han", "Hiragana"},
    "ソウル": {"Katakana"},
    "Σ": {"Greek"},
    "2024": set(),
    "don't": {"Latin"},
    "—!": set(),
    "🙂": set(),
}


# The byte-level alphabet: printable bytes are themselves, the others follow from U+0100 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
ALPHABET = [chr(b) if b in PRINTABLE else chr(256 + OTHERS.index(b)) for b in range(256)]


def spell_bytes(data):
    return "".join(ALPHABET[byte] for byte in data)


MARKS = {
    "plain": lambda text, starts: text,
    "sentencepiece": lambda text, starts: ("▁" if starts else "") + text,
    "wordpiece": lambda text, starts: ("" if starts else "##") + text,
    "byte-level": lambda text, starts: spell_bytes(((" " if starts else "") + text).encode()),
}


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("scripts", [("Hangul", "Latin"), ("Han", "Hiragana"), ("Cyrillic",), ()])
def test_a_token_is_kept_iff_its_text_uses_no_other_script(kind, scripts):
    vocabulary, expected = [], []
    for starts in (True, False):
        for text, used in WORDS.items():
            if used <= set(scripts):
                expected.append(len(vocabulary))
            vocabulary.append(MARKS[kind](text, starts))
    ids = language_token_ids(vocabulary, scripts)
    assert ids.tolist() == expected
    assert ids.dtype == torch.int64


@pytest.mark.parametrize("kind", MARKS)
def test_without_common_all_characters_must_be_of_a_named_script(kind):
    texts = ["서울", "Seoul", "don't", "2024", "café", "cafe\N{COMBINING ACUTE ACCENT}", "🙂", "—"]
    vocabulary = [MARKS[kind](text, starts) for text in texts for starts in (True, False)]
    ids = language_token_ids(vocabulary, ["Latin"], allow_common=False)
    assert ids.tolist() == [2, 3, 8, 9]
    ids = language_token_ids(vocabulary, ["Latin", "Inherited"], allow_common=False)
    assert ids.tolist() == [2, 3, 8, 9, 10, 11]
    ids = language_token_ids(vocabulary, ["Common"], allow_common=False)
    assert ids.tolist() == [6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("data", "by_default", "without_common"),
    [
        (b"\xec\x84", True, False),  # a part of a Hangul syllable
        (b"\xed\xa0\x80", True, False),  # a surrogate is no UTF-8
        (b"\x9c\xec", True, False),
        ("서".encode() + b"\xec", True, False),
        (b" a", True, True),
        ("я".encode() + b"\x80", False, False),
        ("서a".encode(), True, True),
        (b"7", True, False),
    ],
)
def test_bytes_count_by_their_whole_characters_and_parts_are_common(
    data, by_default, without_common
):
    vocabulary = ["Ġa", "Ġb", spell_bytes(data)]
    assert (2 in language_token_ids(vocabulary)) == by_default
    assert (2 in language_token_ids(vocabulary, allow_common=False)) == without_common


KEPT = {  # the scripts, a vocabulary, and what is kept of it, also where Common is not allowed
    "a mark alone is whitespace: ▁": ("Latin", ["▁", "▁a", "", "c"], [0, 1, 2, 3], [1, 3]),
    "a mark alone is whitespace: ##": ("Latin", ["##", "##a", "", "c"], [0, 1, 2, 3], [1, 3]),
    "a mark alone is whitespace: Ġ": ("Latin", ["Ġ", "Ġa", "", "c"], [0, 1, 2, 3], [1, 3]),
    "Maltese writes Ġ": ("Latin", ["▁Ġenn", "▁a", "Ġ"], [0, 1, 2], [0, 1, 2]),
    "a hash where few are marked with two": ("Latin", ["▁a", "▁b", "##x"], [0, 1, 2], [0, 1]),
    "private and unassigned": ("Latin", ["a\ue000", "\U0010ffff", "\u0378", "a"], [3], [3]),
    "a surrogate": ("Latin", ["\ud800", "a"], [1], [1]),
    "fallback bytes": ("Latin", ["▁a", "<0x61>", "<0x37>", "<0xEC>"], [0, 1, 2, 3], [0, 1]),
    "ids with holes": (("Hangul", "Latin"), {"▁b": 9, "▁가": 4, "▁я": 7, "b": 9}, [4, 9], [4, 9]),
    "nothing": ("Latin", [], [], []),
}


@pytest.mark.parametrize(("scripts", "tokens", "kept", "without_common"), KEPT.values(), ids=KEPT)
def test_marks_and_characters_without_a_script(scripts, tokens, kept, without_common):
    scripts = [scripts] if isinstance(scripts, str) else scripts
    assert language_token_ids(tokens, scripts).tolist() == kept
    found = language_token_ids(tokens, scripts, allow_common=False)
    assert found.tolist() == without_common
    assert found.dtype == torch.int64


def test_byte_level_is_known_by_its_alphabet_where_nothing_is_marked():
    alphabet = [spell_bytes([byte]) for byte in range(256) if byte != 0x20]
    assert spell_bytes(b" ") == "Ġ"
    vocabulary = [*alphabet, "Ġ", "##", "###", spell_bytes("서울".encode())]
    assert language_token_ids(vocabulary, ["Hangul"], allow_common=False)[-1] == 258


def test_added_tokens_are_kept_by_their_text_and_special_ones_are_not():
    tk, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    tokenizer = tk.Tokenizer(tk.models.BPE({c: i for i, c in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["여의도", "Невский", "한강 공원"])
    tokenizer.add_special_tokens(["<한국>"])
    ids = language_token_ids(tokenizer)
    assert ids[ids >= size].tolist() == [size, size + 2]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert torch.equal(language_token_ids(fast), ids)
