"""``python -m benchmarks.studies.growth``: growth of time and memory, and an extrapolation.

Every axis is doubled a few times around a base size. The slope of a line fitted in logarithms is
compared with the one from counting operations. The last table is an extrapolation.
"""

import argparse
import csv
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.losses import benchmark
from benchmarks.report import markdown
from benchmarks.run import ceilings
from benchmarks.run.ceilings import Ceilings
from benchmarks.run.measure import TRAINING, Limits, measure
from benchmarks.run.table import RESULTS, circumstances
from benchmarks.schema import Case
from sparse_losses._core.files import replaced_file

__all__ = ["AXES", "Axis", "Device", "Point", "exponent", "main", "predict"]


@dataclass(frozen=True)
class Axis:
    """One size of one loss, varied while the others are fixed."""

    loss: str
    name: str
    base: Mapping[str, float]
    values: Sequence[float]
    time_exponent: str  # from counting, for the largest sizes
    memory_exponent: str
    variants: tuple[str, ...] = ("eager", "ours")


_HEAD = {"B": 4, "S": 64, "V": 16_384, "H": 256, "density": 0.02}
_DENSE = {"B": 512, "D": 256}
_SPARSE = {"B": 256, "V": 16_384, "density": 0.01}
_ROWS = {"B": 128, "V": 32_768, "density": 0.02}
AXES: tuple[Axis, ...] = (
    Axis("splade_head", "V", _HEAD, [8192, 16_384, 32_768, 65_536], "1", "1"),
    Axis("splade_head", "B", _HEAD, [2, 4, 8, 16], "1", "0 to 1: [V, H] is constant"),
    Axis("splade_head", "S", _HEAD, [32, 64, 128, 256], "1", "0 (eager: 1)"),
    Axis(
        "splade_head",
        "density",
        _HEAD,
        [0.005, 0.02, 0.08, 0.32],
        "0 to 1: forward 0, backward 1",
        "0 to 1 (eager: 0)",
    ),
    Axis("info_nce", "B", _DENSE, [512, 1024, 2048, 4096], "2", "2"),
    Axis("info_nce", "D", _DENSE, [256, 512, 1024, 2048], "1", "1 beside [B, B]"),
    Axis("info_nce", "V", _SPARSE, [8192, 16_384, 32_768, 65_536], "1", "1"),
    Axis("info_nce", "density", _SPARSE, [0.005, 0.01, 0.02, 0.04], "0 to 2 (eager: 0)", "0 to 1"),
    Axis("flops", "B", _ROWS, [64, 128, 256, 512], "1", "1: the gradient"),
    Axis("flops", "V", _ROWS, [16_384, 32_768, 65_536, 131_072], "1", "1: the gradient"),
)


@dataclass(frozen=True)
class Point:
    """One measurement."""

    loss: str
    axis: str
    value: float
    variant: str
    seconds: float
    peak_bytes: float
    share: float  # relative to the ceiling


def exponent(values: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """Return the slope of a least-squares line through the logarithms, and its R^2."""
    x, y = np.log(np.asarray(values, float)), np.log(np.asarray(costs, float))
    slope, intercept = np.polyfit(x, y, 1)
    left = y - (slope * x + intercept)
    total = ((y - y.mean()) ** 2).sum()
    return float(slope), float(1 - (left**2).sum() / total) if total > 1e-12 else 1.0


@dataclass(frozen=True)
class Device:
    """The rates of a machine, and the ``share`` of them that an implementation reaches."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    link_bytes_per_second: float = math.inf
    share: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """One line of the extrapolation."""

    part: str
    device: str
    devices: int
    flops: float
    bytes: float
    seconds: float
    memory_gib: float
    eager_gib: float


def predict(
    device: Device,
    devices: int,
    *,
    batch: int = 4096,
    length: int = 512,
    vocabulary: int = 250_002,
    width: int = 768,
    density: float = 0.005,
    attended: float = 0.75,
) -> list[Prediction]:
    """Predict one training step of the head, and of dot-product InfoNCE plus FLOPS on its output.

    Rows are divided among the devices. Each has a copy of the weight; the weight's gradient is
    summed and the vectors are gathered over the link. The time is the floor divided by the measured
    share of the rates; nothing is run.
    """
    rows = batch / devices
    tokens = rows * length * attended
    active = rows * vocabulary * density
    weight = 4.0 * vocabulary * width
    vectors = 4.0 * rows * vocabulary

    head_flops = 2.0 * width * (tokens * vocabulary + 2 * active)
    head_bytes = 2 * weight + 2 * 4.0 * tokens * width + 2 * vectors
    # A ring all-reduce sends a gradient twice, except one part.
    summing = 2 * weight * (devices - 1) / devices / device.link_bytes_per_second
    # Vectors, their gradient, arg-max as int32; the weight's gradient; hidden states and gradient.
    head_memory = 3 * vectors + weight + 2 * 4.0 * rows * length * width
    eager_memory = 3 * 4.0 * rows * length * vocabulary + weight

    # Products of all rows with this device's rows: stored entries multiply where columns agree.
    # With equally likely columns that is V * density^2 per pair; with Zipf-like ones it is more.
    pairs = rows * batch * vocabulary * density**2
    loss_flops = 3 * 2.0 * pairs
    loss_bytes = 3 * vectors + 3 * 4.0 * rows * batch
    stored = 8.0 * batch * vocabulary * density
    gathering = stored * (devices - 1) / devices / device.link_bytes_per_second
    loss_memory = vectors + 4.0 * rows * batch + stored
    loss_eager = vectors * (1 + devices) + 3 * 4.0 * rows * batch

    def seconds(num_flops: float, num_bytes: float) -> float:
        floor = max(num_flops / device.flops_per_second, num_bytes / device.bytes_per_second)
        return floor / device.share

    gib = 2.0**30
    return [
        Prediction(
            "head",
            device.name,
            devices,
            head_flops,
            head_bytes,
            seconds(head_flops, head_bytes) + summing,
            head_memory / gib,
            eager_memory / gib,
        ),
        Prediction(
            "InfoNCE + FLOPS",
            device.name,
            devices,
            loss_flops,
            loss_bytes,
            seconds(loss_flops, loss_bytes) + gathering,
            loss_memory / gib,
            loss_eager / gib,
        ),
    ]


def run_axis(
    axis: Axis, device: torch.device, rates: Ceilings, budget: float, say: Callable[[str], None]
) -> list[Point]:
    """Measure one axis, interleaved as in the suite."""
    base = benchmark(axis.loss)
    kept = tuple(variant for variant in base.variants if variant.name in axis.variants)
    # The suite and the tests check small copies in fp64; here every size is checked in fp32.
    base = replace(base, variants=kept, tiny=[])
    points = []
    for value in axis.values:
        case = Case(base, {**axis.base, axis.name: value})
        say(f"{axis.loss} {case.name}")
        for result in measure(case, device, rates, Limits(budget, 3, 7), compiled=False):
            if result.status != "ok":
                raise SystemExit(f"{case.loss}, {case.name}, {result.variant}: {result.status}")
            if result.pass_ == TRAINING:
                cost = result.seconds, result.peak_bytes, result.share_of_ceiling
                points.append(Point(axis.loss, axis.name, value, result.variant, *cost))
    return points


def _lines(points: Sequence[Point]) -> dict[tuple[str, str, str], list[Point]]:
    lines: dict[tuple[str, str, str], list[Point]] = defaultdict(list)
    for point in points:
        lines[point.loss, point.axis, point.variant].append(point)
    return lines


def exponents_table(points: Sequence[Point]) -> str:
    """Return fitted and counted exponents as Markdown."""
    rows = []
    for (loss, name, variant), line in _lines(points).items():
        axis = next(axis for axis in AXES if (axis.loss, axis.name) == (loss, name))
        values = [point.value for point in line]
        if len(values) < 2:
            continue
        seconds, seconds_fit = exponent(values, [point.seconds for point in line])
        memory, memory_fit = exponent(values, [max(point.peak_bytes, 1.0) for point in line])
        rows.append(
            (
                loss,
                name,
                f"{values[0]:g} to {values[-1]:g}",
                variant,
                f"{seconds:.2f} ({seconds_fit:.3f})",
                axis.time_exponent,
                f"{memory:.2f} ({memory_fit:.3f})",
                axis.memory_exponent,
            )
        )
    heading = (
        "loss",
        "axis",
        "range",
        "variant",
        "time ~ (R^2)",
        "counted",
        "memory ~ (R^2)",
        "counted",
    )
    return markdown(heading, rows)


def predictions_table(predictions: Sequence[Prediction]) -> str:
    """Return the extrapolation as Markdown."""
    heading = (
        "part",
        "device",
        "devices",
        "TFLOP a device",
        "GB moved",
        "seconds",
        "GiB a device",
        "GiB, eager formula",
    )
    rows = [
        (
            p.part,
            p.device,
            p.devices,
            f"{p.flops / 1e12:.3g}",
            f"{p.bytes / 1e9:.3g}",
            f"{p.seconds:.3g}",
            f"{p.memory_gib:.3g}",
            f"{p.eager_gib:.3g}",
        )
        for p in predictions
    ]
    return markdown(heading, rows)


_DEVICE = "NAME,TFLOPS,GBPS[,LINK[,SHARE]]"


def _parse_device(text: str) -> Device:
    """Parse the rates of a device that was measured elsewhere."""
    name, *numbers = text.split(",")
    try:
        matrix, copy, *rest = (float(number) for number in numbers)
        link = rest[0] * 1e9 if rest else math.inf
        return Device(name, matrix * 1e12, copy * 1e9, link, rest[1] if len(rest) > 1 else 1.0)
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(f"expected {_DEVICE}, got {text!r}") from None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.growth", description=__doc__
    )
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--output", type=Path, default=RESULTS / "growth.csv")
    options.add_argument("--budget", type=float, default=0.5, help="seconds per point and pass")
    options.add_argument("--points", type=int, default=4, help="points per axis, smallest first")
    options.add_argument(
        "--predict",
        type=_parse_device,
        action="append",
        default=[],
        metavar=_DEVICE,
        help="also predict for a device with these measured rates",
    )
    options.add_argument(
        "--link", type=float, default=10.0, help="GB/s between machines like this one"
    )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, fit, predict; write NAME.csv and NAME.md."""
    args = parser().parse_args(arguments)
    start = time.perf_counter()
    device = torch.device(args.device)
    rates = ceilings.measure(device)
    points: list[Point] = []
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=len(AXES))
        for axis in AXES:
            axis = replace(axis, values=axis.values[: args.points])
            points += run_axis(
                axis,
                device,
                rates,
                args.budget,
                lambda text: progress.update(bar, description=text),
            )
            progress.advance(bar)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    common = circumstances(device, "growth", rates)
    with replaced_file(args.output, text=True) as lines:
        rows = [{**asdict(point), **common} for point in points]
        writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

    largest = [p for p in points if (p.loss, p.axis, p.variant) == ("splade_head", "V", "ours")]
    here = Device(
        "this machine",
        rates.flops_per_second,
        rates.bytes_per_second,
        args.link * 1e9,
        largest[-1].share if largest else 1.0,
    )
    predictions = [
        p for n in (1, 8, 64) for each in (here, *args.predict) for p in predict(each, n)
    ]
    text = "\n".join(
        [
            f"Measured on {common['device']} ({common['capability']}), "
            f"{common['threads']} threads, commit {common['git_commit']}, torch "
            f"{common['torch']}, fp32: copies {common['copy_gb_per_s']} GB/s, multiplies "
            f"{common['matmul_gflop_per_s']} GFLOP/s.",
            "",
            "### Exponents",
            "",
            exponents_table(points),
            "",
            "### B=4096, S=512, V=250,002, H=768, 0.5% active: extrapolated, not run",
            "",
            f"The head reaches {100 * here.share:.0f}% of the ceiling at the largest size "
            "measured; the prediction for this machine takes that share, one for another device "
            "the share given with it (1: the floor itself).",
            "",
            predictions_table(predictions),
            "",
        ]
    )
    with replaced_file(args.output.with_suffix(".md"), text=True) as page:
        page.write(text)
    print(text)
    print(f"{args.output}: {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
