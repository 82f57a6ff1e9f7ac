"""The scripts in which the tokens of a vocabulary are written."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Byte-level BPE writes a printable byte as the character with that code, and the other bytes, in
# order, as the characters from U+0100 on: "Ġ" is the space.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_BYTES = {0x100 + n: b for n, b in enumerate(b for b in range(0x100) if b not in _PRINTABLE)}
_BYTE_ALPHABET = {chr(code) for code in _PRINTABLE | _BYTES.keys()}

_BYTE_LEVEL, _SENTENCEPIECE, _WORDPIECE = "Ġ", "▁", "##"
_BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def language_token_ids(
    tokenizer: Any, scripts: Sequence[str] = ("Hangul", "Latin"), *, allow_common: bool = True
) -> Tensor:
    """Return the ids of the tokens whose text uses no Unicode script other than ``scripts``.

    Text is read as SentencePiece (``▁`` before a word), WordPiece (``##`` inside a word) or
    byte-level BPE (``Ġ`` before a word) spells it, whichever marker most words have. Special
    tokens are excluded; a plain dict or list does not mark them: ``<s>`` has a Latin letter.

    Args:
        tokenizer: a tokenizer of ``transformers`` or ``tokenizers``, a dict from tokens to ids, or
            a list of tokens in the order of their ids.
        scripts: long names of Unicode scripts, such as ``"Hangul"``, ``"Latin"`` or ``"Han"``.
        allow_common: whether the scripts Common (digits, punctuation, whitespace, emoji, incomplete
            characters of byte tokens) and Inherited (combining marks) are allowed as well.

    Returns:
        Ids in increasing order, int64, on the CPU.

    Raises:
        ValueError: for an unknown script.
        TypeError: for a tokenizer without a vocabulary, or a string as ``scripts``.

    Examples:
        >>> from sparse_losses import language_token_ids
        >>> vocabulary = ["<s>", "▁서울", "▁Seoul", "▁Сеул", "▁2024", "서울city", "ソウル"]
        >>> language_token_ids(vocabulary)
        tensor([0, 1, 2, 4, 5])

    References:
        Unicode Standard Annex #24: Unicode Script Property.
    """
    allowed = _characters(scripts, allow_common)
    vocabulary, special = _vocabulary(tokenizer)
    marker = _word_marker([token for token, _ in vocabulary])
    ordinary = [(token_id, token) for token, token_id in vocabulary if token_id not in special]
    texts = [_decode(token, marker) for _, token in ordinary]
    characters = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    owner = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    strange = np.bincount(owner, weights=~allowed[characters], minlength=len(texts))
    kept = np.array([token_id for token_id, _ in ordinary], dtype=np.int64)[strange == 0]
    return torch.from_numpy(np.unique(kept))


@functools.cache
def _scripts() -> dict[str, list[int]]:
    data = files(__package__).joinpath("unicode_scripts.json").read_text(encoding="utf-8")
    scripts: dict[str, list[int]] = json.loads(data)["scripts"]
    return scripts


def _characters(names: Sequence[str], allow_common: bool) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of the allowed code points; unassigned ones are not allowed."""
    if isinstance(names, str):
        raise TypeError(f"expected `scripts` to be a sequence of names, got the string {names!r}")
    known = _scripts()
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"expected `scripts` to be names such as 'Latin', got {unknown[0]!r}")
    allowed = np.zeros(0x110000, dtype=np.bool_)
    for name in {*names, "Common", "Inherited"} if allow_common else {*names}:
        ends = known[name]
        for first, last in zip(ends[::2], ends[1::2], strict=True):
            allowed[first : last + 1] = True
    return allowed


def _vocabulary(tokenizer: Any) -> tuple[list[tuple[str, int]], set[int]]:
    if isinstance(tokenizer, Mapping):
        return list(tokenizer.items()), set()
    if isinstance(tokenizer, list):
        return [(token, index) for index, token in enumerate(tokenizer)], set()
    if not hasattr(tokenizer, "get_vocab"):
        raise TypeError(
            "expected `tokenizer` to have `get_vocab()`, or to be a dict or a list of tokens, "
            f"got {type(tokenizer).__name__}"
        )
    # It is a property in `transformers` and a method in `tokenizers`.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    if hasattr(tokenizer, "get_added_tokens_decoder"):
        added = tokenizer.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    special.update(getattr(tokenizer, "all_special_ids", ()))
    return list(tokenizer.get_vocab().items()), special


def _word_marker(tokens: list[str]) -> str:
    """Return the marker that most tokens start with; it tells how the vocabulary spells text."""
    # Only before a letter, as any vocabulary may contain "###", a Markdown heading.
    marked = {
        marker: sum(t.startswith(marker) and t[len(marker) :][:1].isalnum() for t in tokens)
        for marker in (_BYTE_LEVEL, _SENTENCEPIECE, _WORDPIECE)
    }
    if not any(marked.values()):
        # Text without spaces gives no markers, but byte-level BPE has a token for every byte.
        return _BYTE_LEVEL if _BYTE_ALPHABET.issubset(tokens) else _SENTENCEPIECE
    return max(marked, key=marked.__getitem__)


def _decode(token: str, marker: str) -> str:
    """Return the text of a token; U+FFFD, which is Common, replaces incomplete characters."""
    if marker == _BYTE_LEVEL:
        try:
            text = token.translate(_BYTES).encode("latin-1").decode("utf-8", "replace")
        except UnicodeEncodeError:  # an added token is spelled as plain text
            text = token
    elif marker == _SENTENCEPIECE and (byte := _BYTE_FALLBACK.fullmatch(token)):
        text = bytes.fromhex(byte[1]).decode("utf-8", "replace")
    elif marker == _SENTENCEPIECE:
        text = token.replace(marker, " ")
    else:
        text = token.removeprefix(marker)
    # The marker is not text, unless the token is nothing else: then it is whitespace.
    return text.removeprefix(" ") or " "
