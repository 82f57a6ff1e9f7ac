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


def kept(vocabulary, *scripts, **options):
    """The tokens kept of a plain list."""
    ids = language_token_ids(vocabulary, scripts, **options).tolist()
    return [vocabulary[index] for index in ids]


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


@pytest.mark.parametrize("mark", ["▁", "##", "Ġ"])
def test_a_mark_alone_is_whitespace_and_counts_as_common(mark):
    vocabulary = [mark, mark + "a", mark + "b", "", "c"]
    assert language_token_ids(vocabulary).tolist() == [0, 1, 2, 3, 4]
    assert language_token_ids(vocabulary, allow_common=False).tolist() == [1, 2, 4]


def test_unassigned_and_private_characters_have_no_script():
    assert kept(["a\ue000", "\U0010ffff", "\u0378", "a"], "Latin") == ["a"]
    assert kept(["\ud800", "a"], "Latin") == ["a"]


def test_mark_of_another_kind_is_a_letter():
    # Maltese writes Ġ, and a hash is a character where no token is marked with two.
    assert kept(["▁Ġenn", "▁a", "Ġ", "##x"], "Latin") == ["▁Ġenn", "▁a", "Ġ", "##x"]
    assert kept(["▁a", "▁b", "##x"], "Latin", allow_common=False) == ["▁a", "▁b"]


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


def test_byte_fallback_counts_as_its_byte():
    for byte, allowed in (("<0x61>", True), ("<0x37>", False), ("<0xEC>", False)):
        assert (byte in kept(["▁a", byte], "Latin", allow_common=False)) == allowed


def test_ids_may_have_holes_and_repeat():
    assert language_token_ids({"▁b": 9, "▁가": 4, "▁я": 7, "b": 9}).tolist() == [4, 9]
    assert language_token_ids([]).dtype == language_token_ids({}).dtype == torch.int64


def test_byte_level_is_known_by_its_alphabet_where_nothing_is_marked():
    alphabet = [spell_bytes([byte]) for byte in range(256) if byte != 0x20]
    assert spell_bytes(b" ") == "Ġ"
    vocabulary = [*alphabet, "Ġ", "##", "###", spell_bytes("서울".encode())]
    assert kept(vocabulary, "Hangul", allow_common=False)[-1] == vocabulary[-1]


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
