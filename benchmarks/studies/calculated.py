"""``python -m benchmarks.studies.calculated``: a GPU's work on every case, counted, not measured.

Launches, bytes and products are counted on meta tensors in eager mode, forward and backward, with
default options: for the losses, and for a training step of a model of XLM-RoBERTa's shape in bf16.
The time is calculated. An operation takes the longest of its launches, its bytes and its products
at a share of the nominal rates; operations run one after the other.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.losses import cases
from benchmarks.run.available import variants
from benchmarks.run.check import ready
from benchmarks.run.launches import Launches
from benchmarks.run.table import RESULTS, read, write
from benchmarks.schema import Case, Maker
from benchmarks.studies.training_step import HEADS, Shape, Step

Row = dict[str, Any]  # one variant of one case, forward and backward
META = torch.device("meta")
LAUNCH = 5e-6  # seconds
SHARE = 0.8  # of the nominal rates, which no kernel reaches
COUNTED, MEASURED = RESULTS / "calculated.csv", RESULTS / "cuda-gpu.csv"
VARIANTS = ("eager", "ours", "sentence-transformers")
# Nominal bytes per second, and operations per second in half precision and in fp32 without TF32.
GPUS = {"h100": (3.35e12, 989e12, 67e12), "a10g": (0.6e12, 70e12, 31e12)}


def seconds(counted: Launches, gpu: str) -> float:
    """Return the time of consecutive operations on a GPU."""
    bandwidth, half, single = (SHARE * rate for rate in GPUS[gpu])
    return sum(
        max(
            LAUNCH * each.launches,
            each.bytes / bandwidth,
            each.flops / (half if each.dtype.itemsize == 2 else single),
        )
        for each in counted.operations
    )


def _row(loss: str, case: str, variant: str, run: Callable[[], object]) -> Row:
    """Count the second call, without what the first call caches."""
    with torch.autograd.set_multithreading_enabled(False):
        run()
        with Launches() as counted:
            run()
    half = sum(n for dtype, n in counted.flops.items() if dtype.itemsize == 2)
    return {
        "loss": loss,
        "case": case,
        "variant": variant,
        "launches": counted.count,
        "bytes": sum(each.bytes for each in counted.operations),
        "flops_half": half,
        "flops_single": counted.flops.total() - half,
        "peak_bytes": counted.peak_bytes,
        **{f"{gpu}_seconds": f"{seconds(counted, gpu):.4g}" for gpu in GPUS},
    }


def case_rows(case: Case) -> Iterator[Row]:
    """Count the plain formula, ours and sentence-transformers; a peer that reads values has no row.

    Ours never reads a value, so that an error is an error there.
    """
    for variant in variants(case):
        if variant.name in VARIANTS:
            run = ready(case, variant, [case.inputs(Maker(META))]).train
            try:
                yield _row(case.loss, case.name, variant.name, run)
            except RuntimeError as error:
                if variant.kind != "peer" or "meta tensors" not in str(error):
                    raise


class _StepOnMeta(Step):
    """A training step with weights in bf16, without autocast, which meta tensors do not have."""

    def _silence(self) -> None:
        self.device = META
        self.model.to(META, torch.bfloat16)
        output = self.model.get_output_embeddings()
        self.weight, self.bias = output.weight, output.bias
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)


def training_steps(shape: Shape) -> Iterator[Row]:
    """Count a step of every batch size and head."""
    step = _StepOnMeta(shape, torch.device("cpu"))
    with (
        # transformers reads the mask, with any head.
        mock.patch(
            "transformers.masking_utils._ignore_bidirectional_mask_sdpa", return_value=False
        ),
        mock.patch("torch.autocast", return_value=nullcontext()),
        mock.patch("torch.optim.adam._device_dtype_check_for_fused"),
    ):
        for pairs in shape.pairs:
            case = f"pairs={pairs} S={shape.length} V={shape.vocabulary} bf16"
            for name, head in HEADS.items():
                run = partial(step.run(name, head, pairs), 0)
                yield _row("training_step", case, name, run)
                step.forget()


def compared() -> tuple[list[str], list[list[str]]]:
    """Compare the plain formula with ours: a table's head, and a row for each case of the GPU."""
    counted = {(row["loss"], row["case"], row["variant"]): row for row in read(COUNTED)}
    measured = {(row["loss"], row["case"], row["variant"]): row for row in read(MEASURED)}
    about, rows = next(iter(measured.values())), []
    for loss, case, variant in counted:
        if variant == "ours" and (loss, case, variant) in measured:
            plain, ours = (counted[loss, case, x] for x in ("eager", "ours"))
            times = [float(row["h100_seconds"]) for row in (plain, ours)]
            runs = [measured[loss, case, x] for x in ("eager", "ours")]
            cells = [loss, case, plain["launches"], ours["launches"]]
            cells += [f"{float(row['bytes']) / 2**20:,.0f}" for row in (plain, ours)]
            cells.append(f"{times[0] / times[1]:.2f}")
            known = runs[1]["speedup"]
            cells.append(f"{float(known):.2f}" if known else "plain does not fit")
            peaks = [row["peak_bytes"] for row in runs]
            rows.append([*cells, *(f"{float(x) / 2**20:,.0f}" if x else "-" for x in peaks)])
    head = ["loss", "case", "launches, plain", "ours", "MiB read and written, plain", "ours"]
    head.append("time, plain / ours: today, H100, calculated")
    head.append(f"commit {about['git_commit'][:8]}, {about['device']}, measured")
    return [*head, "peak MiB there, plain", "ours"], rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Count everything and write the CSV."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.studies.calculated")
    options.add_argument("--suite", choices=["tiny", "quick", "calculated"], default="calculated")
    options.add_argument("--only", default="", help="losses, separated by commas")
    options.add_argument("--output", type=Path, default=COUNTED)
    args = options.parse_args(arguments)
    only = [name for name in args.only.split(",") if name]
    rows = [row for case in cases(args.suite, only) for row in case_rows(case)]
    if not only and args.suite == "calculated":
        rows += training_steps(Shape())
    write(args.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
