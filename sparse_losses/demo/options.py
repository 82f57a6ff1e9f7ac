"""What the command can be told, and the exception for what the user can put right.

The packages of the extra are not needed here, so that their absence can be told in one sentence.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from sparse_losses import COSINE

TERMS = (
    "info_nce",
    "distillation",
    "flops",
    "min_activation",
    "self_reconstruction",
    "positive_activation",
)
INGREDIENTS = ("special_penalty", "stopword_penalty", "idf", "warmup", "spelling")
SWITCHES = (*TERMS, *INGREDIENTS)
CORPORA = ("docstrings", "debian")
STEPS = 500
MAX_LENGTH = 64
EXTRA = ("bm25s", "matplotlib", "rich", "tokenizers")


class UserError(Exception):
    """A mistake in the command, the files or the installation, told in one clear sentence."""


def make_parser() -> argparse.ArgumentParser:
    """All options with their help."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_losses.demo",
        description="Search your own Python's documentation with a sparse retriever that you "
        "trained yourself. Pairs are made of the docstrings of the installed Python, torch, numpy, "
        "sympy and networkx; nothing is downloaded. Takes three to four minutes on one core.",
    )

    add = parser.add_argument
    add("--steps", type=whole(1), default=STEPS, help="training steps (default: %(default)s)")
    add("--seed", type=whole(0), default=0, help="decides weights and batches (default: 0)")
    add(
        "--max-length",
        type=whole(3),
        default=MAX_LENGTH,
        help="subwords of a text that are read, begin and end marks included (default: "
        "%(default)s)",
    )
    add(
        "--without",
        action="append",
        choices=SWITCHES,
        default=[],
        metavar="NAME",
        help=f"switch a loss or an ingredient off, repeatable: {', '.join(SWITCHES)}",
    )
    add(
        "--target-active",
        type=whole(0),
        default=int(COSINE.target_active["document_flops"]),
        metavar="N",
        help="steer the documents' FLOPS weight so that a document keeps N active dimensions; 0 "
        "leaves the weight as it is (default: %(default)s)",
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
        help="the docstrings, or the titles and descriptions of Debian's packages as apt lists "
        "them on a Debian or Ubuntu machine (default: %(default)s)",
    )
    source.add_argument(
        "--pairs",
        type=Path,
        metavar="FILE.tsv",
        help="train on your own pairs instead, one 'query<TAB>document' a line, UTF-8",
    )
    add(
        "--query",
        action="append",
        default=[],
        metavar="TEXT",
        help="a question to answer with the trained model, repeatable; without, a few examples, "
        "and a prompt where stdin is a terminal",
    )
    add(
        "--output",
        type=Path,
        default=Path("sparse-losses-demo"),
        metavar="FOLDER",
        help="where figures and picture go (default: %(default)s)",
    )
    return parser


def whole(minimum: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers from ``minimum`` to the largest that torch holds."""

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
    """Parse, run, and turn mistakes and Ctrl-C into one sentence and an exit code."""
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
    """Make the folder if need be, and try to write in it before any work is done.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"cannot write to the output folder {folder}: {error.strerror}") from error
    return folder
