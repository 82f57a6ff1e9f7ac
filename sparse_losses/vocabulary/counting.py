"""Document frequencies of files and datasets, in a count that continues after whole inputs."""

import codecs
import gzip
import hashlib
import json
import reprlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sparse_losses._core.checks import check_integer
from sparse_losses._core.extras import from_extra
from sparse_losses._core.files import replaced_file
from sparse_losses.vocabulary.document_frequency import DocumentFrequency, tokenizer_sha256

__all__ = ["Count", "find_inputs", "load_tokenizer"]

BATCH = 512  # documents that are tokenized together


def find_inputs(names: Sequence[str]) -> dict[str, list[int]]:
    """Return size and time of change of every file and dataset, in the order of their paths."""
    inputs: dict[Path, list[int]] = {}  # an input that is named twice is counted once
    for name in map(Path, names):
        splits = [state.parent for state in name.glob("*/state.json")]  # of a DatasetDict
        for path in (each.absolute() for each in splits or [name]):
            if not path.is_file() and not (path / "state.json").is_file():
                raise ValueError(f"expected a file or a folder of Dataset.save_to_disk, got {path}")
            files = [file.stat() for file in ([path] if path.is_file() else path.iterdir())]
            inputs[path] = [sum(f.st_size for f in files), max(f.st_mtime_ns for f in files)]
    return {str(path): inputs[path] for path in sorted(inputs)}


def _rows(name: str, fields: Sequence[str], size: int) -> Iterator[tuple[Any, int]]:
    """Yield lines or rows, and how many bytes of the input are read."""
    if Path(name).is_dir():
        with from_extra("vocabulary"):
            import datasets
        data = datasets.load_from_disk(name).with_format(None).select_columns(list(fields))
        yield from ((row, size * number // len(data)) for number, row in enumerate(data, 1))
        return
    with open(name, "rb") as file:
        lines: Any = gzip.GzipFile(fileobj=file) if name.lower().endswith(".gz") else file
        for line in lines:
            yield line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n"), file.tell()


def _text(name: str, row: Any, fields: Sequence[str]) -> str:
    if isinstance(row, bytes):
        line = row.decode("utf-8")
        if not name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson", ".json")):
            return line
        row = json.loads(line)
    for field in fields:
        if not (isinstance(row, dict) and isinstance(row.get(field), str)):
            raise ValueError(f"expected a text in {field!r} (--field), got {reprlib.repr(row)}")
    text = " ".join(row[field] for field in fields)
    text.encode("utf-8")  # JSON may contain lone surrogates
    return text


def load_tokenizer(name: str) -> Any:
    """Load a ``tokenizer.json``, or whatever ``transformers.AutoTokenizer`` accepts."""
    is_json = name.endswith(".json")
    with from_extra("vocabulary" if is_json else "transformers"):
        if is_json:
            from tokenizers import Tokenizer
        else:
            from transformers import AutoTokenizer
    try:
        tokenizer = Tokenizer.from_file(name) if is_json else AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the type depends on the tokenizer
        raise ValueError(f"cannot load the tokenizer {name!r}: {error}") from error
    # A fast tokenizer of transformers wraps one of tokenizers, which uses all cores.
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(tokenizer, "encode_batch_fast"):
        tokenizer.no_padding()  # the file may enable them
        tokenizer.no_truncation()
    return tokenizer


class Count:
    """The counts of the inputs that are done, kept in a JSON file until all of them are."""

    def __init__(
        self, tokenizer: Any, fields: list[str], vocab_size: int | None, max_length: int | None
    ) -> None:
        if max_length is not None:
            check_integer("--max-length", max_length, minimum=1)
        smallest = int(max(tokenizer.get_vocab().values())) + 1
        if vocab_size is not None and vocab_size < smallest:
            raise ValueError(f"expected --vocab-size of at least {smallest}, got {vocab_size}")
        fingerprint = tokenizer_sha256(tokenizer)
        self.counter = DocumentFrequency(vocab_size or smallest, tokenizer_sha256=fingerprint)
        self.tokenizer, self.fields, self.max_length = tokenizer, fields, max_length
        self.done: dict[str, list[int]] = {}
        code = tokenizer.to_str() if hasattr(tokenizer, "to_str") else fingerprint
        code_sha256 = hashlib.sha256(code.encode()).hexdigest()  # also of how a text is split
        self.settings = [code_sha256, fields, self.counter.vocab_size, max_length]

    def add(self, name: str, size: int, report: Callable[[int], object]) -> None:
        """Count a whole input; ``report`` is called with the bytes read for each batch."""
        texts, before = self._texts(name, size), 0
        while batch := list(islice(texts, BATCH)):
            documents = [text for text, _ in batch]
            if hasattr(self.tokenizer, "encode_batch_fast"):
                encodings = self.tokenizer.encode_batch_fast(documents, add_special_tokens=False)
                ids = [encoding.ids for encoding in encodings]
            else:
                ids = self.tokenizer(documents, add_special_tokens=False, verbose=False).input_ids
            self.counter._update_ragged([document[: self.max_length] for document in ids])
            report(batch[-1][1] - before)
            before = batch[-1][1]

    def _texts(self, name: str, size: int) -> Iterator[tuple[str, int]]:
        """Yield the documents of an input, and the bytes read so far; blank lines are skipped."""
        number = 0
        try:
            for row, read in _rows(name, self.fields, size):
                number += 1
                if not isinstance(row, bytes) or row.strip():
                    yield _text(name, row, self.fields), read
        except (ValueError, LookupError, RecursionError, EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{name}:{number}: {error}") from error

    def save(self, path: Path) -> None:
        """Write the state between two inputs."""
        numbers = [self.counter.num_documents, self.counter.num_tokens]
        with replaced_file(path, text=True) as file:
            json.dump([self.settings, self.done, numbers, self.counter.df.tolist()], file)

    def load(self, path: Path, inputs: dict[str, list[int]]) -> None:
        """Continue from a state, which must be of the same inputs, tokenizer and options."""
        try:
            settings, done, (documents, tokens), df = json.loads(path.read_text(encoding="utf-8"))
            if settings != self.settings or not done.items() <= inputs.items():
                raise ValueError("it was made with other inputs or options")
            self.counter._set_counts(df, documents, tokens)
        except (ValueError, TypeError, AttributeError) as error:
            unfinished = f"cannot continue the unfinished count {path}"
            raise ValueError(f"{unfinished}, start over with --restart: {error}") from error
        self.done = done
