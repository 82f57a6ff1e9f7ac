"""The command's options, and the exception for mistakes that the user can correct.

This module needs no package of the extra, so that it can report a missing one.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from sparse_losses import RECOMMENDED

TERMS = ("info_nce", "distillation", "flops")
SWITCHES = (*TERMS, "warmup", "spelling")
CORPORA = ("docstrings", "debian")
STEPS = 500
MAX_LENGTH = 64
EXTRA = ("bm25s", "matplotlib", "rich", "tokenizers")


class UserError(Exception):
    """A mistake in the command, the files or the installation, described in one sentence."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all options, with their help."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_losses.demo",
        description="Train a sparse retriever on your own Python's documentation and search it. "
        "The pairs come from the docstrings of the installed Python, torch, numpy, sympy and "
        "networkx; nothing is downloaded. It takes about five minutes on one core.",
    )

    add = parser.add_argument
    add("--steps", type=whole(1), default=STEPS, help="training steps (default: %(default)s)")
    add("--seed", type=whole(0), default=0, help="seed of initial weights and batches (default: 0)")
    add(
        "--max-length",
        type=whole(3),
        default=MAX_LENGTH,
        help="largest number of subwords per text, begin and end marks included (default: "
        "%(default)s)",
    )
    add(
        "--without",
        action="append",
        choices=SWITCHES,
        default=[],
        metavar="NAME",
        help=f"switch off a loss or an ingredient; repeatable; one of {', '.join(SWITCHES)}",
    )
    add(
        "--target-active",
        type=whole(0),
        default=int(RECOMMENDED.target_active["document_flops"]),
        metavar="N",
        help="adjust the documents' FLOPS weight so that a document keeps N active dimensions; 0 "
        "keeps the weight fixed (default: %(default)s)",
    )
    add(
        "--target-active-query",
        type=whole(0),
        default=0,
        metavar="N",
        help="the same for the queries (default: %(default)s)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--corpus",
        choices=CORPORA,
        default=CORPORA[0],
        help="the docstrings, or the titles and descriptions of Debian's packages from apt's lists "
        "on a Debian or Ubuntu machine (default: %(default)s)",
    )
    source.add_argument(
        "--pairs",
        type=Path,
        metavar="FILE.tsv",
        help="train on your own pairs instead: one 'query<TAB>document' per line, in UTF-8",
    )
    add(
        "--query",
        action="append",
        default=[],
        metavar="TEXT",
        help="a question to answer with the trained model; repeatable (default: a few examples, "
        "and a prompt if stdin is a terminal)",
    )
    add(
        "--output",
        type=Path,
        default=Path("sparse-losses-demo"),
        metavar="FOLDER",
        help="the folder for figures and picture (default: %(default)s)",
    )
    return parser


def whole(minimum: int) -> Callable[[str], int]:
    """Return a type for argparse: whole numbers from ``minimum`` to torch's largest integer."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {minimum}, got {text!r}"
            )
        return int(text)

    return parse


def guarded(
    run: Callable[[argparse.Namespace], None],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
) -> int:
    """Parse and run; turn mistakes and Ctrl-C into a message and an exit code."""
    try:
        run(parser.parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    return 0


def require_extra() -> None:
    """Check for the optional packages.

    Raises:
        UserError: one is missing.
    """
    if missing := [name for name in EXTRA if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"the demo needs {', '.join(missing)}; install with: pip install 'sparse-losses[demo]'"
        )


def writable_folder(folder: Path) -> Path:
    """Create the folder if it does not exist, and check that it is writable.

    Raises:
        UserError: it cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"cannot write to the output folder {folder}: {error.strerror}") from error
    return folder
