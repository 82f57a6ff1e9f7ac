"""The command: train a sparse retriever on your Python's documentation, then search it."""

import argparse
import sys
from collections.abc import Sequence

from sparse_losses.demo.options import guarded, make_parser, require_extra


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 for success, 1 for a user's mistake, 130 for Ctrl-C."""
    return guarded(_run, make_parser(), arguments)


def _run(options: argparse.Namespace) -> None:
    require_extra()
    from sparse_losses.demo import command  # needs the extra's packages

    command.execute(options)


if __name__ == "__main__":
    sys.exit(main())
