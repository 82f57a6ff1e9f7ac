"""The command line: count document frequencies of files and datasets, merge and show them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparse_losses.vocabulary.counting import Count, UserError, find_sources, load_tokenizer, need
from sparse_losses.vocabulary.document_frequency import DocumentFrequency

LINE_SECONDS = 10.0  # between two lines of progress if stderr is not a terminal


def _say(text: str) -> None:  # stdout is for results
    print(text, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 for success, 2 for a user error, 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (UserError, OSError) as error:  # such as a full disk or a removed file
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt as interrupt:
        _say(f"\n{interrupt or 'Interrupted.'}")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_losses.vocabulary",
        description="Count the documents that contain each token, for idf_penalty. Count the "
        "training texts once and load the file with DocumentFrequency.load. To continue an "
        "interrupted count, repeat the command; the result is the same.",
        epilog="example: %(prog)s count corpus.jsonl --tokenizer tokenizer.json --output df.npz",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[..., None], name: str, short: str) -> Any:
        made = commands.add_parser(name, help=short, description=f"{short.capitalize()}.")
        made.set_defaults(run=run)
        if run is not _show:
            result = "the .npz file to write the counts to"
            made.add_argument("--output", required=True, type=Path, metavar="FILE", help=result)
            made.add_argument("--overwrite", action="store_true", help="replace the output")
        return made.add_argument

    add = command(_count, "count", "count the documents that contain each token")
    kinds = "a text file (one document per line, blank lines are skipped), a JSONL file (.jsonl, "
    kinds += ".ndjson, .json), either also as .gz, or a folder written by Dataset.save_to_disk"
    add("inputs", nargs="+", metavar="INPUT", help=kinds)
    known = (
        "a tokenizer.json, or a folder or hub name for transformers; no special tokens are added"
    )
    add("--tokenizer", required=True, metavar="T", help=known)
    texts = "JSON field or column with the text (default: text); may be repeated"
    add("--field", action="append", default=[], metavar="NAME", help=texts)
    cut = "truncate documents to L tokens, as your model does (default: no truncation)"
    add("--max-length", type=_positive, metavar="L", help=cut)
    wider = "the model's vocabulary size, if larger than the tokenizer's"
    add("--vocab-size", type=_positive, metavar="V", help=wider)
    add("--restart", action="store_true", help="start over instead of continuing")

    add = command(_merge, "merge", "add up counts of different documents")
    add("files", nargs="+", type=Path, metavar="FILE", help="counts made with the same tokenizer")

    add = command(_show, "show", "show the most frequent tokens, such as stopwords")
    add("file", type=Path, metavar="FILE", help="the counts")
    add("--tokenizer", metavar="T", help="the tokenizer of the counts, to name the tokens")
    add("--top", type=_positive, default=20, metavar="N", help="how many (default: %(default)s)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _check_output(options: argparse.Namespace, inputs: Sequence[str | Path]) -> None:
    """Check before any work that the output can be written."""
    output: Path = options.output
    if output.exists() and not output.is_file():
        kind = "folder" if output.is_dir() else "device"
        raise UserError(f"expected --output to be a regular file, got the {kind} {output}")
    if output.resolve() in [Path(name).resolve() for name in inputs]:
        raise UserError(f"expected --output to differ from the inputs, got {output} for both")
    if output.exists() and not options.overwrite:
        raise UserError(f"{output} exists: add --overwrite, or choose another --output")
    probe = output.with_name(f".{output.name}.write-test")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to the folder {output.parent}: {error.strerror}") from error


def _count(options: argparse.Namespace) -> None:
    need("rich")
    _check_output(options, options.inputs)
    sources = find_sources(options.inputs, options.field)
    sizes = options.vocab_size, options.max_length
    count = Count(sources, load_tokenizer(options.tokenizer), options.output, *sizes)
    if options.restart:
        count.discard()
    elif count.resume():
        share = f"{100 * count.read / max(count.size, 1):.0f}% of the input"
        _say(f"Continuing after {count.kept:,} documents, {share}.")
    started, counter = time.monotonic(), count.counter
    try:
        with _progress(count) as report:
            count.run(report)
    except KeyboardInterrupt as interrupt:
        kept = f"{count.kept:,} documents are kept in {count.partial}"
        kept = kept if count.kept else "nothing was saved yet"
        raise KeyboardInterrupt(f"Stopped; {kept}. Repeat the command to continue.") from interrupt
    _check_output(options, options.inputs)  # another process may have written it
    counter.save(options.output)
    count.discard()
    seen = f"{int((counter.df > 0).sum()):,} of {counter.vocab_size:,} tokens seen"
    duration = f"in {time.monotonic() - started:.0f} s"
    _say(f"{counter.num_documents:,} documents, {seen}, {duration}. Wrote {options.output}.")
    if count.blank:
        _say(f"Blank lines skipped: {count.blank:,}.")
    if count.empty:
        _say(f"Documents without tokens (included in the count): {count.empty:,}.")


@contextmanager
def _progress(count: Count) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal; elsewhere print a line every ten seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = BarColumn(), TextColumn("{task.description} · left"), TimeRemainingColumn()
    started = said = time.monotonic()
    before, hidden = count.kept, not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=max(count.size, 1))

        def report() -> None:
            nonlocal said
            documents, now = count.counter.num_documents, time.monotonic()
            share = f"{100 * count.read / max(count.size, 1):.0f}%"
            speed = f"{(documents - before) / max(now - started, 1e-9):,.0f} per second"
            line = f"{share} · {documents:,} documents · {speed}"
            bar.update(task, completed=count.read, description=line)
            if hidden and now - said >= LINE_SECONDS:
                said = now
                _say(line)

        yield report


def _merge(options: argparse.Namespace) -> None:
    files: list[Path] = options.files
    _check_output(options, files)
    if len({path.resolve() for path in files}) < len(files):
        raise UserError("expected every file once, got one twice: its documents would count twice")
    first, *others = map(_load, files)
    for path, other in zip(files[1:], others, strict=True):
        try:
            first.merge(other)
        except ValueError as error:
            raise UserError(f"cannot merge {files[0]} and {path}: {error}") from error
    first.save(options.output)
    print(f"{first.num_documents:,} documents of {len(files)} files. Wrote {options.output}.")


def _load(path: Path, tokenizer: Any = None) -> DocumentFrequency:
    try:
        return DocumentFrequency.load(path, tokenizer=tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from error


def _show(options: argparse.Namespace) -> None:
    _load(options.file)  # fail early, as loading a tokenizer may take long
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    counter = _load(options.file, tokenizer)
    vocabulary = tokenizer.get_vocab() if tokenizer else {}
    names = {index: token for token, index in vocabulary.items()}
    seen = int((counter.df > 0).sum())
    head = f"{counter.num_documents:,} documents, {seen:,} of {counter.vocab_size:,} tokens seen"
    print(f"{head}, tokenizer {(counter.tokenizer_sha256 or 'not known')[:16]}")
    if not counter.num_documents:
        return
    if counter.num_tokens is not None:
        print(f"{counter.mean_length:.1f} tokens per document")
    idf = counter.idf()
    print(f"\n{'id':>8} {'df':>15} {'of documents':>12} {'idf':>6}  {'token' if names else ''}")
    order = counter.df.argsort(descending=True, stable=True)
    for index in order[: min(options.top, seen)].tolist():
        df, token = int(counter.df[index]), names.get(index, "")
        token = token if token.isprintable() else ascii(token)
        share = df / counter.num_documents
        print(f"{index:>8} {df:>15,} {share:>12.1%} {idf[index]:>6.2f}  {token}")


if __name__ == "__main__":
    sys.exit(main())
