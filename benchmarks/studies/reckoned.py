"""``python -m benchmarks.studies.reckoned``: launches, waits, bytes and products of every case.

Operations are counted on the simulated device, without a GPU, forward and backward with default
options: for the losses, and for a training step of a model of XLM-RoBERTa's shape. Compiled code
cannot be counted: PyTorch's compiler does not support the simulated device, and what it fuses for
the CPU differs from what it fuses for a GPU.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks.losses import cases
from benchmarks.report.reckoned import table
from benchmarks.run.reckoned import Row, count, counted, read, row, write
from benchmarks.run.table import RESULTS
from benchmarks.studies.training_step import Shape, Step, heads
from tools import simulated_device

__all__ = ["main", "training_steps"]


# Here transformers tests whether nothing is masked: one wait per forward pass, with any head.
ENCODERS_QUESTION = "transformers.masking_utils._ignore_bidirectional_mask_sdpa"


def training_steps(shape: Shape) -> list[Row]:
    """Count a step of every timed batch size and head, without the encoder's own waits."""
    simulated_device.start()
    device = torch.device("sim")
    step = Step(shape, device)  # reads values of the model
    rows = []
    is_unmasked = mock.patch(ENCODERS_QUESTION, return_value=False)
    with is_unmasked, simulated_device.shape_only():
        for pairs in shape.pairs:
            case = f"pairs={pairs} S={shape.length} V={shape.vocabulary} bf16"
            for name, head in heads(device, tiny=False).items():
                run = step.run(name, head, pairs)
                rows.append(row(("training_step", case, name), counted(partial(run, 0))))
                step.forget()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Count everything and write the CSV."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.studies.reckoned")
    options.add_argument("--suite", choices=["tiny", "quick", "reckoned"], default="reckoned")
    options.add_argument("--only", default="", help="losses, separated by commas")
    options.add_argument("--output", type=Path, default=RESULTS / "reckoned.csv")
    args = options.parse_args(arguments)
    if reason := simulated_device.unsupported_reason():
        print(reason, file=sys.stderr)
        return 2
    rows: list[Row] = []
    for case in cases(args.suite, [name for name in args.only.split(",") if name]):
        rows += count(case).values()
    if not args.only and importlib.util.find_spec("transformers"):
        rows += training_steps(Shape())
    write(args.output, rows)
    print(table(read(args.output)))
    for each in rows:
        if each.status != "ok":
            print(f"{each.loss}, {each.case}, {each.variant}: {each.status}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
