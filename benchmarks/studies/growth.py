"""``python -m benchmarks.studies.growth``: growth of time and memory with every size.

Every axis is doubled a few times around a base size. The slope of a line fitted in logarithms is
compared with the one from counting operations.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.losses import benchmark
from benchmarks.run.measure import measure
from benchmarks.run.table import RESULTS, circumstances, markdown, write
from benchmarks.schema import Case
from benchmarks.studies.runs import publish


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


def exponent(values: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """Return the slope of a least-squares line through the logarithms, and its R^2."""
    x, y = np.log(np.asarray(values, float)), np.log(np.asarray(costs, float))
    slope, intercept = np.polyfit(x, y, 1)
    left = y - (slope * x + intercept)
    total = ((y - y.mean()) ** 2).sum()
    return float(slope), float(1 - (left**2).sum() / total) if total > 1e-12 else 1.0


def run_axis(axis: Axis, device: torch.device, budget: float) -> list[dict[str, Any]]:
    """Measure one axis, interleaved as in the suite; return a row per size and variant."""
    base = benchmark(axis.loss)
    kept = tuple(variant for variant in base.variants if variant.name in axis.variants)
    base = replace(base, variants=kept)
    points = []
    for value in axis.values:
        case = Case(base, {**axis.base, axis.name: value})
        for result in measure(case, device, budget, compiled=False, max_rounds=7):
            if result["status"] != "ok":
                raise SystemExit(
                    f"{case.loss}, {case.name}, {result['variant']}: {result['status']}"
                )
            point = {"loss": axis.loss, "axis": axis.name, "value": value}
            points.append(point | {x: result[x] for x in ("variant", "seconds", "peak_bytes")})
    return points


def exponents_table(points: Sequence[Mapping[str, Any]]) -> str:
    """Return fitted and counted exponents as Markdown, of rows as measured or from the CSV."""
    lines: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for point in points:
        lines[point["loss"], point["axis"], point["variant"]].append(point)
    axes = {(axis.loss, axis.name): axis for axis in AXES}
    rows = []
    for (loss, name, variant), line in lines.items():
        if len(line) < 2:
            continue
        values, *costs = (
            [float(point[key]) or 1.0 for point in line]  # no logarithm of 0 bytes
            for key in ("value", "seconds", "peak_bytes")
        )
        axis = axes[loss, name]
        time, memory = ("{:.2f} ({:.3f})".format(*exponent(values, each)) for each in costs)
        about = (loss, name, f"{values[0]:g} to {values[-1]:g}", variant)
        rows.append((*about, time, axis.time_exponent, memory, axis.memory_exponent))
    sizes = ("loss", "axis", "range", "variant")
    costs = ("time ~ (R^2)", "counted", "memory ~ (R^2)", "counted")
    return markdown((*sizes, *costs), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and fit; write NAME.csv and NAME.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.growth")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS / "growth.csv")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per point and pass")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    points: list[dict[str, Any]] = []
    for axis in AXES:
        points += run_axis(axis, device, args.budget)
    common = circumstances(device, "growth")
    write(args.output, [point | common for point in points])
    text = (
        f"Measured on {common['device']} ({common['capability']}), {common['threads']} threads, "
        f"commit {common['git_commit']}, torch {common['torch']}, fp32."
        f"\n\n### Exponents\n\n{exponents_table(points)}\n\n"
    )
    publish(args.output.with_suffix(".md"), text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
