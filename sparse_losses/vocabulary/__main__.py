"""The command: count document frequencies of files and datasets, merge them, look at them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_losses.vocabulary.counting import Count, Encoder, UserError, find_sources
from sparse_losses.vocabulary.document_frequency import DocumentFrequency

if TYPE_CHECKING:
    from rich.console import Console

    from sparse_losses.vocabulary.counting import Tick

LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all went well, 2 for a mistake of the user, 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a file that went away
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"\n{interrupt or 'Interrupted.'}", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_losses.vocabulary",
        description="In how many documents each token occurs, for idf_penalty: counted once over "
        "the training texts, saved, and loaded with DocumentFrequency.load.",
        epilog="example: %(prog)s count corpus.jsonl --tokenizer tokenizer.json --output df.npz",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    count = commands.add_parser(
        "count",
        help="count the documents of files and datasets",
        description="Count in how many documents each token occurs. Ctrl-C or a crash loses "
        "seconds: the same command again goes on, and the counts are those of an uninterrupted "
        "run. No special tokens are added (they would be in every document), and texts are not "
        "cut.",
    )
    count.set_defaults(run=_count)
    add = count.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="a text file (a line is a document; blank lines are skipped), a JSONL file (.jsonl, "
        ".ndjson, .json), either of them with .gz, or a folder written by Dataset.save_to_disk",
    )
    add(
        "--tokenizer",
        required=True,
        metavar="T",
        help="a tokenizer.json, or what transformers' AutoTokenizer takes: a folder or a hub name",
    )
    _add_output(count)
    add(
        "--field",
        action="append",
        metavar="NAME",
        help="field of a JSONL line or column of a dataset that holds the text (default: text); "
        "repeatable, the texts are then joined by a space",
    )
    add(
        "--split",
        action="append",
        default=[],
        metavar="NAME",
        help="split of a DatasetDict, repeatable (default: all)",
    )
    add(
        "--max-length",
        type=_positive_number,
        metavar="L",
        help="cut each document after L tokens, as your model does (less its special tokens)",
    )
    add(
        "--vocab-size",
        type=_positive_number,
        metavar="V",
        help="the model's, if its output is larger than the tokenizer's vocabulary",
    )
    add(
        "--jobs",
        type=_positive_number,
        default=_cores(),
        metavar="N",
        help="processes (default: the CPU cores, here %(default)s)",
    )
    add(
        "--batch-size",
        type=_positive_number,
        default=1000,
        metavar="N",
        help="documents tokenized at once (default: %(default)s)",
    )
    add(
        "--restart",
        action="store_true",
        help="drop what an unfinished run has counted and start over",
    )

    merge = commands.add_parser(
        "merge",
        help="add up counts of different documents, from several machines for instance",
        description="Add up counts of different documents, made with the same tokenizer.",
    )
    merge.set_defaults(run=_merge)
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE.npz")
    _add_output(merge)

    show = commands.add_parser(
        "show",
        help="the most frequent tokens: stopwords, or a mistake",
        description="Sizes and the most frequent tokens, with document frequency and idf.",
    )
    show.set_defaults(run=_show)
    show.add_argument("file", type=Path, metavar="FILE.npz")
    show.add_argument(
        "--tokenizer", metavar="T", help="the tokenizer of the counts, to name the tokens"
    )
    show.add_argument(
        "--top",
        type=_positive_number,
        default=20,
        metavar="N",
        help="how many tokens (default: %(default)s)",
    )
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE.npz", help="where the counts go"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")


def _positive_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_output(options: argparse.Namespace, inputs: Sequence[str | Path]) -> None:
    """Try the output before any work is done."""
    output: Path = options.output
    if output.is_dir():
        raise UserError(f"expected --output to be a file, got the folder {output}")
    if output.exists() and not output.is_file():
        raise UserError(f"expected --output to be a regular file, got the device {output}")
    if output.resolve() in [Path(name).resolve() for name in inputs]:
        raise UserError(f"expected --output to be no input, got {output} for both")
    if output.exists() and not options.overwrite:
        raise UserError(f"{output} exists: add --overwrite, or choose another --output")
    probe = output.with_name(f".{output.name}.write-test")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write to the output folder {output.parent}: {error.strerror}"
        ) from error


def _console(*, stderr: bool = False) -> Console:
    if importlib.util.find_spec("rich") is None:
        raise UserError("this needs rich; install with: pip install 'sparse-losses[vocabulary]'")
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def _count(options: argparse.Namespace) -> None:
    # The processes share the cores; and a tokenizer that has forked threads of its own warns.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    console = _console(stderr=True)
    _check_output(options, options.inputs)
    fields = options.field or ["text"]
    sources = find_sources(options.inputs, fields, options.split)
    if options.field and all(source.kind == "text" for source in sources):
        raise UserError("expected JSONL files or a dataset with --field, got text files only")
    encoder = Encoder.load(options.tokenizer, options.max_length)
    count = Count(
        sources,
        encoder,
        options.output,
        fields=fields,
        vocab_size=options.vocab_size,
        batch_size=options.batch_size,
    )
    if options.restart:
        count.discard()
    elif count.resume():
        console.print(
            f"Going on: {count.counter.num_documents:,} documents of {_share(count)} were counted "
            "before.",
            markup=False,
        )
    started = time.perf_counter()
    with _progress(console, count) as tick:
        count.run(options.jobs, tick, overwrite=options.overwrite)
    counter = count.counter
    console.print(
        f"{counter.num_documents:,} documents, {int((counter.df > 0).sum()):,} of "
        f"{counter.vocab_size:,} tokens seen, in {time.perf_counter() - started:.0f} s. "
        f"Wrote {options.output}.",
        markup=False,
    )
    if count.blank:
        console.print(f"Skipped {count.blank:,} blank {_plural('line', count.blank)}.")
    if count.empty:
        console.print(
            f"{count.empty:,} {_plural('document', count.empty)} without a token, counted as "
            "documents."
        )


def _plural(word: str, number: int) -> str:
    return word if number == 1 else f"{word}s"


def _share(count: Count) -> str:
    return f"{100 * count.finished_size / max(count.size, 1):.0f}% of the input"


@contextmanager
def _progress(console: Console, count: Count) -> Iterator[Tick]:
    """A bar on a terminal, a line now and then elsewhere; Ctrl-C stops between two batches."""
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    size, start = max(count.size, 1), count.finished_size
    done = documents = 0
    started = said = time.monotonic()

    def line() -> str:
        speed = documents / max(time.monotonic() - started, 1e-9)
        return f"{before + documents:,} documents · {speed:,.0f} a second"

    before = count.counter.num_documents
    bar = Progress(
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% · {task.description}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with _remember_interrupt() as interrupted, bar:
        task = bar.add_task(line(), total=size, completed=start)

        def tick(added: int, more: int) -> None:
            nonlocal done, documents, said
            done, documents = done + added, documents + more
            bar.update(task, completed=start + done, description=line())
            if not console.is_terminal and time.monotonic() - said >= LINE_SECONDS:
                said = time.monotonic()
                console.print(f"{100 * (start + done) / size:.0f}% · {line()}", markup=False)
            if interrupted:
                raise KeyboardInterrupt

        try:
            yield tick
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(
                f"Stopped; {count.counter.num_documents:,} documents are kept in {count.partial}. "
                "Repeat the command (without --restart) to go on."
            ) from interrupt


@contextmanager
def _remember_interrupt() -> Iterator[list[int]]:
    """Let Ctrl-C wait for the end of a batch: anywhere else, counts could be half added."""
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


def _merge(options: argparse.Namespace) -> None:
    files: list[Path] = options.files
    _check_output(options, files)
    if len({path.resolve() for path in files}) < len(files):
        raise UserError("expected every file once, got one twice: its documents would count twice")
    first, *others = [_load(path) for path in files]
    for path, other in zip(files[1:], others, strict=True):
        try:
            first.merge(other)
        except ValueError as error:
            raise UserError(f"cannot merge {files[0]} and {path}: {error}") from error
    first.save(options.output)
    print(
        f"{first.num_documents:,} documents of {len(files)} {_plural('file', len(files))}. "
        f"Wrote {options.output}."
    )


def _load(path: Path, encoder: Encoder | None = None) -> DocumentFrequency:
    try:
        return DocumentFrequency.load(path, tokenizer=encoder.tokenizer if encoder else None)
    except ValueError as error:
        raise UserError(str(error)) from error


def _show(options: argparse.Namespace) -> None:
    console = _console()
    _load(options.file)  # before a tokenizer is loaded, which may take long
    encoder = Encoder.load(options.tokenizer) if options.tokenizer else None
    counter = _load(options.file, encoder)
    names: dict[int, str] = {}
    if encoder is not None:
        names = {index: token for token, index in encoder.tokenizer.get_vocab().items()}
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    seen = int((counter.df > 0).sum())
    fingerprint = counter.tokenizer_sha256 or "not known"
    console.print(
        f"{counter.num_documents:,} documents, {seen:,} of {counter.vocab_size:,} tokens seen, "
        f"tokenizer {fingerprint[:16]}",
        markup=False,
    )
    if counter.num_documents == 0:
        return
    table = Table(box=SIMPLE)
    for heading in ("id", *(("token",) if encoder else ()), "df", "of documents", "idf"):
        table.add_column(heading, justify="left" if heading == "token" else "right")
    idf = counter.idf()
    order = counter.df.argsort(descending=True, stable=True)
    for index in order[: min(options.top, seen)].tolist():
        token = names.get(index, "")
        df = int(counter.df[index])
        table.add_row(
            str(index),
            *([Text(token if token.isprintable() else ascii(token))] if encoder else []),
            f"{df:,}",
            f"{df / counter.num_documents:.1%}",
            f"{idf[index]:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
