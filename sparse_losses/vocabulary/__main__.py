"""The command line: count document frequencies of files and datasets, and show them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sparse_losses.vocabulary.counting import Count, find_inputs, load_tokenizer
from sparse_losses.vocabulary.document_frequency import DocumentFrequency


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 for success, 2 for a user error, 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError, ModuleNotFoundError) as error:  # such as a full disk
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped: repeat the command to continue after whole inputs.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    about = "Count the documents that contain each token, for idf_penalty."
    parser = argparse.ArgumentParser(prog="sparse-losses-vocabulary", description=about)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    count = commands.add_parser("count", help="count; repeat the command to continue a stopped one")
    count.set_defaults(run=_count)
    add = count.add_argument
    kinds = "text (a document per line), JSONL (.jsonl, .ndjson, .json), both also as .gz, "
    add("inputs", nargs="+", help=kinds + "or a folder of Dataset.save_to_disk")
    add("--tokenizer", required=True, metavar="T", help="tokenizer.json, or a transformers name")
    add("--field", action="append", metavar="F", help="JSON field or column with text, repeatable")
    add("--max-length", type=int, metavar="L", help="truncate documents to L tokens")
    add("--vocab-size", type=int, metavar="V", help="the model's, if larger than the tokenizer's")
    add("--output", required=True, type=Path, metavar="FILE", help="the .npz file to write")
    add("--overwrite", action="store_true", help="replace the output")
    add("--restart", action="store_true", help="start over instead of continuing")
    show = commands.add_parser("show", help="show the most frequent tokens, such as stopwords")
    show.set_defaults(run=_show)
    show.add_argument("file", type=Path, help="the counts")
    show.add_argument("--tokenizer", metavar="T", help="their tokenizer, to name the tokens")
    show.add_argument("--top", type=int, default=20, help="how many (default: %(default)s)")
    return parser


def _count(options: argparse.Namespace) -> None:
    from tqdm.auto import tqdm

    output: Path = options.output
    if output.resolve() in [Path(name).resolve() for name in options.inputs]:
        raise ValueError(f"expected --output to differ from the inputs, got {output} for both")
    if output.exists() and not (output.is_file() and options.overwrite):
        raise ValueError(f"{output} exists: add --overwrite, or choose another --output")
    inputs, tokenizer = find_inputs(options.inputs), load_tokenizer(options.tokenizer)
    count = Count(tokenizer, options.field or ["text"], options.vocab_size, options.max_length)
    output.parent.mkdir(parents=True, exist_ok=True)
    state = output.with_name(f"{output.name}.partial")
    if state.exists() and not options.restart:
        count.load(state, inputs)
        print(f"Continuing after {count.counter.num_documents:,} documents.", file=sys.stderr)
    left = {name: size for name, (size, _) in inputs.items() if name not in count.done}
    sizes = {"total": sum(left.values()), "unit": "B", "unit_scale": True}
    with tqdm(**sizes, desc="Counting", mininterval=1 if sys.stderr.isatty() else 10) as progress:
        for name, size in left.items():
            count.add(name, size, progress.update)
            count.done[name] = inputs[name]
            count.save(state)
    if count.counter.num_documents == 0:
        state.unlink()
        raise ValueError(f"expected at least one document, got none in {', '.join(options.inputs)}")
    count.counter.save(output)
    state.unlink()
    print(f"{_summary(count.counter)}. Wrote {output}.", file=sys.stderr)


def _summary(counter: DocumentFrequency) -> str:
    seen = f"{int((counter.df > 0).sum()):,} of {counter.vocab_size:,} tokens seen"
    return f"{counter.num_documents:,} documents, {seen}"


def _show(options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    counter = DocumentFrequency.load(options.file, tokenizer=tokenizer)
    names = {index: token for token, index in tokenizer.get_vocab().items()} if tokenizer else {}
    print(f"{_summary(counter)}, tokenizer {(counter.tokenizer_sha256 or 'not known')[:16]}")
    if counter.num_documents and counter.num_tokens is not None:
        print(f"{counter.mean_length:.1f} tokens per document")
    print(f"\n{'id':>8} {'df':>15} {'of documents':>12} {'idf':>6}  {'token' if names else ''}")
    order = counter.df.argsort(descending=True, stable=True)[: options.top]
    for index in order[counter.df[order] > 0].tolist():
        df, token = int(counter.df[index]), names.get(index, "")
        share, idf = df / counter.num_documents, counter.idf()[index]
        token = token if token.isprintable() else ascii(token)
        print(f"{index:>8} {df:>15,} {share:>12.1%} {idf:>6.2f}  {token}")


if __name__ == "__main__":
    sys.exit(main())
