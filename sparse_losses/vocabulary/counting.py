"""Counting the document frequencies of files and datasets: in shards, processes and resumable."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparse_losses.vocabulary.document_frequency import (
    DocumentFrequency,
    tokenizer_sha256,
    write_archive,
)

__all__ = ["Count", "Encoder", "Source", "UserError", "find_sources"]

SHARD_BYTES = 4 * 2**20  # a few seconds of work: what an interrupted worker loses
SHARD_ROWS = 10_000
BATCH_CHARACTERS = 2**20  # bounds the memory of a batch of long documents
SAVE_SECONDS = 5.0
TEXT, JSONL, DATASET = "text", "jsonl", "dataset"

Tick = Callable[[int, int], None]  # bytes and documents, added since the last call
Counts = tuple[np.ndarray[Any, np.dtype[np.int64]], int, int, int]


class UserError(Exception):
    """A mistake in the command, the files or the installation, told in one clear sentence."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A file, or a split of a dataset, as it was when the count began."""

    name: str  # as the user wrote it
    path: str
    kind: str
    compressed: bool
    length: int  # bytes of a file, rows of a dataset
    size: int  # bytes
    identity: str  # changes when the content does

    def shards(self) -> list[Shard]:
        """Ranges of bytes or rows, the same on every call; a compressed file is one."""
        step = SHARD_ROWS if self.kind == DATASET else SHARD_BYTES
        if self.compressed:
            step = max(self.length, 1)
        return [
            Shard(self, start, min(start + step, self.length))
            for start in range(0, self.length, step)
        ]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The lines that start, or the rows that lie, in ``[start, stop)`` of a source."""

    source: Source
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Its bytes: those of a dataset's rows on average."""
        source = self.source
        return source.size * self.stop // source.length - source.size * self.start // source.length

    def place(self, index: int) -> str:
        """Where the line or row of this index in the shard is, for an error."""
        if self.source.kind == DATASET:
            return f"{self.source.name}, row {self.start + index}"
        before = 0
        if self.start:
            with open(self.source.path, "rb") as file:
                left = _seek_line(file, self.start)
                file.seek(0)
                while left and (piece := file.read(min(left, 2**20))):
                    before += piece.count(b"\n")
                    left -= len(piece)
        return f"{self.source.name}:{before + index + 1}"


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Texts to ids without special tokens, which stand in every text and would say nothing."""

    name: str
    tokenizer: Any
    max_length: int | None

    @classmethod
    def load(cls, name: str, max_length: int | None = None) -> Encoder:
        """Load a ``tokenizer.json``, or what ``transformers.AutoTokenizer`` takes.

        Raises:
            UserError: It cannot be loaded.
        """
        file = name.endswith(".json") or Path(name).is_file()
        package = "tokenizers" if file else "transformers"
        tokenizer: Any
        try:
            if file:
                from tokenizers import Tokenizer

                if not Path(name).is_file():
                    raise UserError(f"there is no tokenizer {name}")
                tokenizer = Tokenizer.from_file(name)
                # The file may say how the model's inputs are padded and cut.
                tokenizer.no_padding()
                tokenizer.no_truncation()
                if max_length is not None:
                    tokenizer.enable_truncation(max_length)
            else:
                from transformers import AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(name)
        except ImportError as error:
            hint = "pip install 'sparse-losses[vocabulary]'" if file else "pip install transformers"
            alternative = "" if file else ", or give a tokenizer.json file"
            raise UserError(
                f"the tokenizer {name!r} needs {package}; install with: {hint}{alternative}"
            ) from error
        except UserError:
            raise
        except Exception as error:  # each kind of tokenizer has its own
            here = "" if Path(name).exists() else f"no file or folder {name} is here, and "
            raise UserError(
                f"cannot load the tokenizer {name!r}: {here}{_one_line(error)}"
            ) from error
        return cls(name, tokenizer, max_length)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that turns a text into ids, so far as it can be read."""
        backend = getattr(self.tokenizer, "backend_tokenizer", self.tokenizer)
        if not hasattr(backend, "to_str"):
            return tokenizer_sha256(self.tokenizer)
        settings = json.loads(backend.to_str())
        settings = [settings[name] for name in sorted(settings.keys() - {"truncation", "padding"})]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """The largest id and one."""
        return int(max(self.tokenizer.get_vocab().values())) + 1

    def ids(self, texts: list[str]) -> list[list[int]]:
        """The ids of every text."""
        if hasattr(self.tokenizer, "encode_batch_fast"):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        ids: list[list[int]] = self.tokenizer(
            texts,
            add_special_tokens=False,
            padding=False,
            truncation=self.max_length is not None,
            max_length=self.max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return ids


def find_sources(
    inputs: Sequence[str], fields: Sequence[str], splits: Sequence[str]
) -> list[Source]:
    """Look at the inputs before any work; in an order that does not depend on theirs.

    Raises:
        UserError: One is missing, given twice or of no kind we read.
    """
    sources: list[Source] = []
    for name in inputs:
        path = Path(name)
        if name == "-":
            raise UserError("standard input cannot be counted (or resumed): write it to a file")
        if path.is_dir():
            sources += _splits(name, fields, splits)
        elif not path.exists():
            raise UserError(f"there is no {name}")
        elif not path.is_file():
            raise UserError(
                f"expected {name} to be a file or a dataset's folder, which a pipe or "
                "a device is not"
            )
        else:
            sources.append(_file(name))
    if splits and not any(source.kind == DATASET for source in sources):
        raise UserError("expected a dataset's folder with --split, got files only")
    sources.sort(key=lambda source: source.path)
    for one, other in itertools.pairwise(sources):
        if one.path == other.path:
            raise UserError(f"expected every input once, got {one.name} and {other.name}")
    return sources


def _file(name: str) -> Source:
    path = Path(name).resolve()
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from error
    # Of the name that was given: what a link leads to may be called anything.
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    compressed = suffixes[-1:] == [".gz"]
    inner = (suffixes[:-1] if compressed else suffixes)[-1:]
    size = path.stat().st_size
    return Source(
        name=name,
        path=str(path),
        kind=JSONL if inner in ([".jsonl"], [".ndjson"], [".json"]) else TEXT,
        compressed=compressed,
        length=size,
        size=size,
        identity=_identity(str(path)),
    )


def _identity(path: str) -> str:
    """What changes when the file changes, or the dataset in the folder."""
    if os.path.isdir(path):
        return hashlib.sha256((Path(path) / "state.json").read_bytes()).hexdigest()
    state = os.stat(path)
    return f"{state.st_size} bytes of {state.st_mtime_ns}"


def _splits(name: str, fields: Sequence[str], splits: Sequence[str]) -> list[Source]:
    """The dataset in a folder, or the chosen splits of a DatasetDict."""
    folder = Path(name).resolve()
    if (folder / "dataset_dict.json").is_file():
        found = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        for split in splits:
            if split not in found:
                raise UserError(f"{name} has no split {split!r}: it has {', '.join(found)}")
        return [
            _dataset(f"{name}, split {split!r}", folder / split, fields)
            for split in found
            if not splits or split in splits
        ]
    if not (folder / "state.json").is_file():
        raise UserError(
            f"expected {name} to be a file or a folder written by Dataset.save_to_disk; "
            f"of a folder of files give the files: {Path(name) / '*.txt'}"
        )
    if splits:
        raise UserError(f"expected a DatasetDict with --split, got the single dataset {name}")
    return [_dataset(name, folder, fields)]


def _dataset(name: str, folder: Path, fields: Sequence[str]) -> Source:
    data = _load_dataset(name, str(folder))
    for field in fields:
        if field not in data.column_names:
            raise UserError(
                f"{name}: expected a column {field!r} (--field), got {_names(data.column_names)}"
            )
        feature = data.features[field]
        if getattr(feature, "dtype", None) not in ("string", "large_string"):
            raise UserError(f"{name}: expected column {field!r} to hold strings, got {feature}")
    return Source(
        name=name,
        path=str(folder),
        kind=DATASET,
        compressed=False,
        length=len(data),
        size=data.data.nbytes,
        identity=_identity(str(folder)),
    )


def _load_dataset(name: str, folder: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{name} needs datasets; install with: pip install 'sparse-losses[vocabulary]'"
        ) from error
    datasets.disable_progress_bars()
    try:
        state = json.loads((Path(folder) / "state.json").read_text(encoding="utf-8"))
        if state["_data_files"]:  # without, datasets writes what it cannot read
            return datasets.load_from_disk(folder).with_format(None)
    except Exception as error:  # a damaged folder fails in many ways
        raise UserError(f"cannot read the dataset {name}: {_one_line(error)}") from error
    raise UserError(f"expected {name} to have rows, got none")


@functools.lru_cache(maxsize=16)
def _rows(source: Source, fields: tuple[str, ...]) -> Any:
    return _load_dataset(source.name, source.path).select_columns(list(fields))


def _seek_line(file: Any, start: int) -> int:
    """Go to where the first line at or after ``start`` begins."""
    if start:
        file.seek(start - 1)
        while (piece := file.readline(2**20)) and not piece.endswith(b"\n"):
            pass
    return int(file.tell())


def _lines(shard: Shard) -> Iterator[tuple[int, bytes]]:
    """Every line, and how far into the file reading has come."""
    with open(shard.source.path, "rb") as file:
        if shard.source.compressed:
            with gzip.GzipFile(fileobj=file) as unpacked:
                for line in unpacked:
                    yield file.tell(), line
        else:
            position = _seek_line(file, shard.start)
            while position < shard.stop and (line := file.readline()):
                position += len(line)
                yield position, line


def _documents(shard: Shard, fields: tuple[str, ...]) -> Iterator[tuple[int, int, str | None]]:
    """Every document's index and text, and how far reading has come; no text on a blank line."""
    if shard.source.kind == DATASET:
        rows = _rows(shard.source, fields)
        for first in range(shard.start, shard.stop, 1000):
            columns = rows[first : min(first + 1000, shard.stop)]
            for row, values in enumerate(zip(*(columns[name] for name in fields), strict=True)):
                index = first - shard.start + row
                texts = zip(fields, values, strict=True)
                yield index, first + row + 1, _joined(texts, shard, index)
        return
    index = -1
    try:
        for index, (position, line) in enumerate(_lines(shard)):
            if index == shard.start == 0:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                yield index, position, None
                continue
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{shard.place(index)}: expected UTF-8, got byte 0x{line[error.start]:02x} "
                    f"at position {error.start} of the line"
                ) from error
            if shard.source.kind == TEXT:
                yield index, position, text.rstrip("\r\n")
            else:
                yield index, position, _json_text(text, fields, shard, index)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{shard.place(index + 1)}: expected gzip data, got {_one_line(error)}"
        ) from error


def _json_text(line: str, fields: tuple[str, ...], shard: Shard, index: int) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = _one_line(error)
        if isinstance(error, json.JSONDecodeError):  # whose own text counts lines from this one
            reason = f"{error.msg} at column {error.colno}"
        raise UserError(
            f"{shard.place(index)}: expected one JSON object a line, got no JSON: {reason}"
        ) from error
    if not isinstance(row, dict):
        raise UserError(
            f"{shard.place(index)}: expected one JSON object a line, got {_json_type(row)}"
        )
    for name in fields:
        if name not in row:
            raise UserError(
                f"{shard.place(index)}: expected a field {name!r} (--field), got {_names(row)}"
            )
    return _joined(((name, row[name]) for name in fields), shard, index)


def _joined(values: Any, shard: Shard, index: int) -> str:
    texts = []
    for name, value in values:
        if not isinstance(value, str):
            raise UserError(
                f"{shard.place(index)}: expected {name!r} to be a string, got {_json_type(value)}"
            )
        texts.append(value)
    return " ".join(texts)


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", bool: "a Boolean", str: "a string"}
    return names.get(type(value), "a number")


def _names(names: Any) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:8]) + (", …" if len(listed) > 8 else "") if listed else "none"


def _one_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


@dataclasses.dataclass(frozen=True)
class Job:
    """All that a worker needs to know beside the shard; small, for it goes through a pipe."""

    tokenizer: str
    fingerprint: str
    tokenizer_sha256: str
    vocab_size: int
    max_length: int | None
    fields: tuple[str, ...]
    batch_size: int


def _count_shard(shard: Shard, job: Job, encoder: Encoder, tick: Tick) -> Counts:
    """Document frequencies, documents, documents without a token and blank lines of a shard."""
    counter = DocumentFrequency(job.vocab_size)
    empty = blank = 0
    reached, size = shard.start, shard.size
    per_unit = size / (shard.stop - shard.start)

    def flush(batch: list[tuple[int, str]], position: int) -> None:
        nonlocal empty, reached
        ids = _encode(shard, encoder, batch)
        counter._update_ragged(ids)
        empty += sum(not document for document in ids)
        position = min(position, shard.stop)
        done = round((position - shard.start) * per_unit)
        tick(done - round((reached - shard.start) * per_unit), len(batch))
        reached = position

    batch: list[tuple[int, str]] = []
    characters = 0
    for index, position, text in _documents(shard, job.fields):
        if text is None:
            blank += 1
            continue
        batch.append((index, text))
        characters += len(text)
        if len(batch) == job.batch_size or characters >= BATCH_CHARACTERS:
            flush(batch, position)
            batch, characters = [], 0
    flush(batch, shard.stop)
    return counter.df.numpy(), counter.num_documents, empty, blank


def _encode(shard: Shard, encoder: Encoder, batch: list[tuple[int, str]]) -> list[list[int]]:
    if not batch:
        return []
    try:
        return encoder.ids([text for _, text in batch])
    except Exception:
        for index, text in batch:
            try:
                text.encode("utf-8")
                encoder.ids([text])
            except Exception as error:
                raise UserError(
                    f"{shard.place(index)}: cannot be tokenized: {_one_line(error)}"
                ) from error
        raise


class Count:
    """A count of sources that can be interrupted anywhere and goes on from its partial file.

    Args:
        sources: From ``find_sources``.
        encoder: The tokenizer.
        fields: Fields of JSONL lines and datasets, joined by a space.
        vocab_size: V, or ``None`` for the tokenizer's.
        batch_size: Documents that are tokenized at once.
        output: Where the result will be; the partial file lies beside it.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        encoder: Encoder,
        output: Path,
        *,
        fields: Sequence[str] = ("text",),
        vocab_size: int | None = None,
        batch_size: int = 1000,
    ) -> None:
        smallest = encoder.vocab_size
        if vocab_size is not None and vocab_size < smallest:
            raise UserError(
                f"expected --vocab-size of at least {smallest}, the largest id of "
                f"{encoder.name} and one, got {vocab_size}"
            )
        self.sources, self.encoder, self.output = sources, encoder, output
        self.partial = output.with_name(f"{output.name}.partial")
        self.job = Job(
            encoder.name,
            encoder.fingerprint,
            tokenizer_sha256(encoder.tokenizer),
            vocab_size or smallest,
            encoder.max_length,
            tuple(fields),
            batch_size,
        )
        self.shards = [shard for source in sources for shard in source.shards()]
        self.finished = np.zeros(len(self.shards), dtype=np.bool_)
        self.counter = DocumentFrequency(
            self.job.vocab_size, tokenizer_sha256=self.job.tokenizer_sha256
        )
        self.empty = self.blank = 0
        self._saved = time.monotonic()

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def finished_size(self) -> int:
        """Bytes of the finished shards."""
        return sum(self.shards[index].size for index in np.flatnonzero(self.finished))

    def resume(self) -> bool:
        """Take over the partial file, if there is one.

        Raises:
            UserError: It is damaged, or of a count with other inputs or settings.
        """
        if not self.partial.exists():
            return False
        again = "start over with --restart, or choose another --output"
        try:
            with np.load(self.partial, allow_pickle=False) as archive:
                settings = json.loads(str(archive["settings"]))
                finished, counts = archive["finished"], archive["counts"]
                documents, self.empty, self.blank = archive["numbers"].tolist()
            differences = _differences(settings, self._settings)
        except Exception as error:  # a damaged archive fails in a dozen ways
            raise UserError(f"{self.partial} is damaged: {again}") from error
        if differences:
            raise UserError(
                f"{self.partial} holds an unfinished count with other settings: "
                f"{'; '.join(differences)}. Go on with the former, {again}"
            )
        self.finished = finished
        self.counter.df, self.counter.num_documents = torch.from_numpy(counts), documents
        return True

    @property
    def _settings(self) -> dict[str, Any]:
        """What must not change between the parts of a count; jobs and batches may."""
        return {
            "tokenizer": [self.job.tokenizer, self.job.fingerprint],
            "--vocab-size": self.job.vocab_size,
            "--max-length": self.job.max_length,
            "--field": list(self.job.fields),
            "shards": [SHARD_BYTES, SHARD_ROWS],
            "inputs": {source.path: source.identity for source in self.sources},
        }

    def save(self) -> None:
        """Write the partial file: counts and finished shards together, all or nothing."""
        write_archive(
            self.partial,
            counts=self.counter.df.numpy(),
            numbers=np.array([self.counter.num_documents, self.empty, self.blank]),
            finished=self.finished,
            settings=np.str_(json.dumps(self._settings)),
        )
        self._saved = time.monotonic()

    def discard(self) -> None:
        """Remove the partial file, and what a killed process left of one."""
        self.partial.unlink(missing_ok=True)
        for name in os.listdir(self.partial.parent):
            if name.startswith(f".{self.partial.name}."):
                (self.partial.parent / name).unlink(missing_ok=True)

    def run(self, jobs: int, tick: Tick, *, overwrite: bool = False) -> None:
        """Count what is unfinished, save the result and remove the partial file.

        ``tick`` is called where nothing is half done, so it may raise ``KeyboardInterrupt``; the
        partial file then holds all finished shards.

        Raises:
            UserError: A document cannot be read, none was found, a worker died, an input changed or
                the output appeared meanwhile.
        """
        todo = [int(index) for index in np.flatnonzero(~self.finished)]
        jobs = min(jobs, len(todo))
        try:
            if jobs > 1:
                self._run_processes(todo, jobs, tick)
            else:
                for index in todo:
                    self._take(
                        index, _count_shard(self.shards[index], self.job, self.encoder, tick)
                    )
        except KeyboardInterrupt:
            self.save()
            raise
        except BrokenProcessPool as error:
            self.save()
            raise UserError(
                "a worker process ended abruptly (killed, or out of memory?): repeat the command "
                "to go on, perhaps with fewer --jobs"
            ) from error
        if self.counter.num_documents == 0:
            self.discard()
            names = ", ".join(source.name for source in self.sources)
            raise UserError(f"expected at least one document, got none in {names}")
        for source in self.sources:
            if _identity(source.path) != source.identity:
                raise UserError(f"{source.name} changed while it was counted: use --restart")
        if self.output.exists() and not overwrite:
            self.save()
            raise UserError(
                f"{self.output} has appeared meanwhile: the counts are kept in {self.partial}; "
                "repeat the command with --overwrite to take them"
            )
        self.counter.save(self.output)
        self.discard()

    def _take(self, index: int, counts: Counts) -> None:
        df, documents, empty, blank = counts
        self.counter.df += torch.from_numpy(df)
        self.counter.num_documents += documents
        self.empty += empty
        self.blank += blank
        self.finished[index] = True
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self.save()

    def _run_processes(self, todo: Sequence[int], jobs: int, tick: Tick) -> None:
        context = multiprocessing.get_context("spawn")
        progress: Any = context.Array("q", 2)
        stop = context.RawValue("b", 0)  # a worker that dies must not hold a lock we wait for
        pool = ProcessPoolExecutor(jobs, context, _start_worker, (self.job, progress, stop))
        waiting = iter(todo)
        running: dict[Future[Counts], int] = {}
        seen = [0, 0]
        try:
            while True:
                with _workers_ignore_interrupts():
                    for index in itertools.islice(waiting, 2 * jobs - len(running)):
                        running[pool.submit(_count_in_worker, self.shards[index])] = index
                if not running:
                    break
                done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    self._take(running.pop(future), future.result())
                now = progress.get_obj()[:]
                tick(now[0] - seen[0], now[1] - seen[1])
                seen = now
        finally:
            stop.value = 1
            pool.shutdown(cancel_futures=True)


def _differences(former: dict[str, Any], now: dict[str, Any]) -> list[str]:
    (name, fingerprint), (new_name, new_fingerprint) = former["tokenizer"], now["tokenizer"]
    found = []
    if fingerprint != new_fingerprint:
        found.append(f"the tokenizer was {name}, is {new_name} (another vocabulary or settings)")
    found += [
        f"{name} was {former[name]}, is {now[name]}"
        for name in ("--vocab-size", "--max-length", "--field", "shards")
        if former[name] != now[name]
    ]
    before, after = former["inputs"], now["inputs"]
    found += [f"{path} is no longer an input" for path in before if path not in after]
    found += [f"{path} is a new input" for path in after if path not in before]
    found += [
        f"{path} has changed" for path in after if path in before and before[path] != after[path]
    ]
    return found


@contextmanager
def _workers_ignore_interrupts() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: the parent tells them when to stop."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@dataclasses.dataclass
class _Worker:
    job: Job
    progress: Any
    stop: Any

    @functools.cached_property
    def encoder(self) -> Encoder:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        os.environ["HF_HUB_OFFLINE"] = "1"  # the parent has just fetched it
        encoder = Encoder.load(self.job.tokenizer, self.job.max_length)
        if encoder.fingerprint != self.job.fingerprint:
            raise UserError(f"the tokenizer {self.job.tokenizer} changed while it was read")
        return encoder

    def tick(self, size: int, documents: int) -> None:
        if self.stop.value:
            raise UserError("stopped")  # nobody waits for this result
        with self.progress.get_lock():
            self.progress[0] += size
            self.progress[1] += documents


_worker: _Worker


def _start_worker(job: Job, progress: Any, stop: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker = _Worker(job, progress, stop)


def _exit_with_parent() -> None:
    """A killed parent cannot end its workers, and they would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _count_in_worker(shard: Shard) -> Counts:
    return _count_shard(shard, _worker.job, _worker.encoder, _worker.tick)
