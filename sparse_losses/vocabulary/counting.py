"""Document frequencies of files and datasets, counted such that an interruption can be resumed."""

from __future__ import annotations

import codecs
import dataclasses
import datetime
import gzip
import hashlib
import importlib.util
import json
import os
import reprlib
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from sparse_losses.vocabulary.document_frequency import (
    DocumentFrequency,
    read_array,
    tokenizer_sha256,
    write_archive,
)

__all__ = ["Count", "UserError", "find_sources", "load_tokenizer", "need"]

BATCH_ROWS = 1000
BATCH_CHARACTERS = 2**20  # bounds the memory of a batch of long documents
SAVE_SECONDS = 5.0

Row = tuple[str | None, int]  # text (None for a blank line), bytes of the source read so far


class UserError(Exception):
    """An error in the command, the files or the installation; its message is one sentence."""


def need(package: str, install: str = "'sparse-losses[vocabulary]'") -> None:
    """Raise an error that says what to install if a package is missing."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"this needs {package}; install with: pip install {install}")


@dataclasses.dataclass(frozen=True)
class Source:
    """A file or a dataset."""

    name: str  # as the user wrote it
    path: str
    fields: tuple[str, ...]  # empty if lines are plain text instead of JSON objects
    size: int
    data: Any = None  # the dataset, or None for a file

    def identity(self) -> str:
        """Return a string that changes when the file or the dataset is rewritten."""
        state = os.stat(self.path if self.data is None else f"{self.path}/state.json")
        written = datetime.datetime.fromtimestamp(state.st_mtime, datetime.UTC)
        return f"{state.st_size} bytes written at {written}"

    def rows(self, start: int) -> Iterator[Row]:
        """Yield all lines or rows from index ``start`` on."""
        if self.data is None:
            yield from self._lines(start)
        elif start < len(self.data):  # `select` cannot take an empty range
            for columns in self.data.select(range(start, len(self.data))).iter(BATCH_ROWS):
                for values in zip(*columns.values(), strict=True):
                    row = dict(zip(columns, values, strict=True))
                    text = self._text(f"{self.name}, row {start}", row)
                    start += 1
                    yield text, self.size * start // len(self.data)

    def _lines(self, start: int) -> Iterator[Row]:
        number = 0
        with open(self.path, "rb") as file:
            compressed = self.name.lower().endswith(".gz")
            lines = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if compressed else file
            try:
                for number, line in enumerate(lines, 1):
                    if number > start:
                        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                        place = f"{self.name}:{number}"
                        yield self._text(place, content) if content.strip() else None, file.tell()
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                place = f"{self.name}:{number + 1}"
                raise UserError(f"{place}: expected gzip data, got {error}") from error

    def _text(self, place: str, row: bytes | dict[str, object]) -> str:
        try:
            if isinstance(row, bytes):
                line = row.decode("utf-8")
                if not self.fields:
                    return line.rstrip("\r\n")
                row = json.loads(line)
            text = self._joined(row)
            text.encode("utf-8")  # JSON may contain lone surrogates
            return text
        except UnicodeError as error:
            reason = f"expected UTF-8, got: {error}"
        except json.JSONDecodeError as error:  # str(error) would say line 1
            reason = f"expected one JSON object per line, got: {error.msg} at column {error.colno}"
        except (ValueError, RecursionError) as error:
            reason = str(error)
        raise UserError(f"{place}: {reason}")

    def _joined(self, row: object) -> str:
        if not isinstance(row, dict):
            raise ValueError(f"expected one JSON object per line, got {reprlib.repr(row)}")
        for name in self.fields:
            if name not in row:
                raise ValueError(f"expected a field {name!r} (--field), got {reprlib.repr([*row])}")
            if not isinstance(row[name], str):
                raise ValueError(f"expected {name!r} to be a string, got {reprlib.repr(row[name])}")
        return " ".join(row[name] for name in self.fields)


def find_sources(inputs: Sequence[str], fields: Sequence[str]) -> list[Source]:
    """Check the inputs before any work and return them sorted by path."""
    sources: dict[str, Source] = {}
    for given in inputs:
        splits = sorted(Path(given).glob("*/state.json"))  # of a DatasetDict
        for name in [str(split.parent) for split in splits] or [given]:
            source = _source(name, tuple(fields) or ("text",))
            if (other := sources.setdefault(source.path, source)) is not source:
                raise UserError(f"expected every input once, got {other.name} and {name}")
    if fields and not any(source.fields for source in sources.values()):
        raise UserError("expected JSONL files or a dataset with --field, got text files only")
    return [sources[path] for path in sorted(sources)]


def _source(name: str, fields: tuple[str, ...]) -> Source:
    path = Path(name).resolve()
    if not path.exists():
        raise UserError(f"there is no file or folder {name}")
    if path.is_file():  # the suffix is that of `name`, as a link's target may have another
        is_json = name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson", ".json"))
        return Source(name, str(path), fields if is_json else (), path.stat().st_size)
    if not (path / "state.json").is_file():
        expected = f"expected {name} to be a file or a folder written by Dataset.save_to_disk"
        raise UserError(f"{expected}; for a folder of files give the files: {Path(name) / '*.txt'}")
    need("datasets")
    import datasets

    datasets.disable_progress_bars()
    try:
        data = datasets.load_from_disk(str(path)).with_format(None)
    except Exception as error:  # empty and damaged datasets fail in many ways
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot read the dataset {name} (empty or damaged?): {reason}") from error
    if missing := set(fields) - set(data.column_names):
        came = reprlib.repr(data.column_names)
        raise UserError(f"{name}: expected a column {min(missing)!r} (--field), got {came}")
    data = data.select_columns(sorted({*fields}))
    return Source(name, str(path), fields, data.data.nbytes, data)


def load_tokenizer(name: str) -> Any:
    """Load a ``tokenizer.json``, or whatever ``transformers.AutoTokenizer`` accepts."""
    if name.endswith(".json") and not Path(name).exists():
        raise UserError(f"there is no tokenizer {name}")
    is_file = Path(name).is_file()
    need(*["tokenizers"] if is_file else ["transformers", "transformers"])
    tokenizer: Any
    try:
        if is_file:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(name)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the type depends on the tokenizer
        here = "" if Path(name).exists() else f"no file or folder {name} is here, and "
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"cannot load the tokenizer {name!r}: {here}{reason}") from error
    # A fast tokenizer of transformers wraps one of tokenizers, which uses all cores.
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(tokenizer, "encode_batch_fast"):
        tokenizer.no_padding()  # the file may enable them
        tokenizer.no_truncation()
    return tokenizer


class Count:
    """A count that can be interrupted and resumed from the partial file beside its output."""

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Any,
        output: Path,
        vocab_size: int | None = None,
        max_length: int | None = None,
    ) -> None:
        smallest = int(max(tokenizer.get_vocab().values())) + 1
        if vocab_size is not None and vocab_size < smallest:
            least = f"{smallest}, the tokenizer's largest id plus one"
            raise UserError(f"expected --vocab-size of at least {least}, got {vocab_size}")
        fingerprint = code = tokenizer_sha256(tokenizer)
        if hasattr(tokenizer, "to_str"):  # includes how a text is split
            settings = json.dumps(json.loads(tokenizer.to_str()), sort_keys=True)
            code = hashlib.sha256(settings.encode()).hexdigest()
        self.sources, self.tokenizer, self.max_length = sources, tokenizer, max_length
        self.partial = output.with_name(f"{output.name}.partial")
        size = vocab_size or smallest
        try:
            self.counter = DocumentFrequency(size, tokenizer_sha256=fingerprint)
        except (RuntimeError, TypeError) as error:  # TypeError: more than 64 bits
            raise UserError(f"cannot allocate memory for the counts of {size} tokens") from error
        self.size = sum(source.size for source in sources)
        self.source = self.row = 0  # position: finished sources, and rows of the next
        self.read = self.empty = self.blank = 0  # bytes, documents without a token, blank lines
        self.kept = 0  # documents in the partial file
        self.settings = {  # must be the same when a count is resumed
            "the tokenizer's SHA-256": code,
            "--vocab-size": str(self.counter.vocab_size),
            "--max-length": str(max_length),
            "--field": ", ".join(max(source.fields for source in sources)),
            **{source.path: source.identity() for source in sources},
        }

    def resume(self) -> bool:
        """Load the partial file; return whether there is one, raise if it is of another count."""
        if not self.partial.exists():
            return False
        again = "start over with --restart, or choose another --output"
        try:
            with zipfile.ZipFile(self.partial) as archive:
                former = dict(json.loads(str(read_array(archive, "settings", "U", ()))))
                if former == self.settings:
                    numbers = read_array(archive, "numbers", "i", (7,)).tolist()
                    df = read_array(archive, "df", "i", (self.counter.vocab_size,))
                    is_whole = df.min() >= 0 and df.max() <= numbers[0] and min(numbers) >= 0
                    if not is_whole or numbers[2] > len(self.sources):
                        raise ValueError("its numbers are inconsistent")
        except Exception as error:  # a damaged archive fails in many ways
            raise UserError(f"{self.partial} is damaged: {again}") from error
        if former != (now := self.settings):
            changed = "; ".join(
                f"{key} was {former.get(key, 'no input')}, is {now.get(key, 'no input')}"
                for key in {**former, **now}
                if former.get(key) != now.get(key)
            )
            other = f"{self.partial} holds an unfinished count with other settings: {changed}"
            raise UserError(f"{other}. Continue with the former settings, {again}")
        self.counter.df = torch.from_numpy(df.astype(np.int64))
        self.kept, self.counter.num_tokens, *place = numbers
        self.counter.num_documents = self.kept
        self.source, self.row, self.read, self.empty, self.blank = place
        return True

    def save(self) -> None:
        """Write the partial file atomically: the counts and the position in the sources."""
        counter, place = self.counter, [self.source, self.row, self.read, self.empty, self.blank]
        write_archive(
            self.partial,
            df=counter.df.numpy(),
            numbers=np.array([counter.num_documents, counter.num_tokens, *place], dtype=np.int64),
            settings=np.str_(json.dumps(self.settings)),
        )
        self.kept = counter.num_documents

    def discard(self) -> None:
        """Remove the partial file, and temporary files of killed processes."""
        for path in self.partial.parent.iterdir():
            if path == self.partial or path.name.startswith(f".{self.partial.name}."):
                path.unlink()

    def run(self, report: Callable[[], None]) -> None:
        """Count the remaining rows, call ``report`` after every batch, save the partial file."""
        saved = time.monotonic()
        while self.source < len(self.sources):
            before = sum(source.size for source in self.sources[: self.source])
            for batch in _batches(self.sources[self.source].rows(self.row)):
                texts = [text for text, _ in batch if text is not None]
                ids = [ids[: self.max_length] for ids in self._ids(texts)]
                self.counter._update_ragged(ids)
                self.empty += ids.count([])
                self.blank += len(batch) - len(texts)
                self.row += len(batch)
                self.read = before + batch[-1][1]
                report()
                if time.monotonic() - saved >= SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
            self.source, self.row = self.source + 1, 0
        if self.counter.num_documents == 0:
            self.discard()
            names = ", ".join(source.name for source in self.sources)
            raise UserError(f"expected at least one document, got none in {names}")
        for source in self.sources:
            if source.identity() != self.settings[source.path]:
                raise UserError(f"{source.name} changed while it was counted: use --restart")
        self.save()

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Tokenize without special tokens, which are the same in every document."""
        if hasattr(self.tokenizer, "encode_batch_fast"):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        options = {"add_special_tokens": False, "verbose": False}
        return list(self.tokenizer(texts, **options)["input_ids"]) if texts else []


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row[0] or "")
        if len(batch) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
