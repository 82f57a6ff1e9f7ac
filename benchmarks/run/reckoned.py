"""The GPU operations of a case, counted on the simulated device, and the time calculated from them.

Nothing is measured. Launches, waits, bytes and floating-point operations are exact for eager mode.
The time of an operation is the longest of its launch, its bytes and its products at the rates
below. Operations run one after the other, and every wait of the host is added.
"""

import contextlib
import csv
import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.run.available import variants
from benchmarks.run.check import ready
from benchmarks.schema import Case, Maker, Variant
from sparse_losses._core.files import replaced_file
from tools import simulated_device

__all__ = [
    "GPUS",
    "LAUNCH",
    "SHARE",
    "WAIT",
    "Gpu",
    "Row",
    "count",
    "counted",
    "read",
    "reckon",
    "row",
    "write",
]

LAUNCH, WAIT = 5e-6, 20e-6  # seconds
SHARE = 0.8  # of the nominal rates, which no kernel reaches
SMALL = 2**28  # bytes of the plain formula up to which values are computed
VARIANTS = ("eager", "ours", "sentence-transformers")


@dataclass(frozen=True)
class Gpu:
    """Nominal rates: bytes and floating-point operations per second."""

    name: str
    bandwidth: float
    half: float
    single: float  # without TF32
    double: float

    def rate(self, dtype: torch.dtype) -> float:
        """Return the rate of matrix products of this dtype."""
        if dtype.itemsize == 2:
            return self.half
        return self.double if dtype == torch.float64 else self.single


GPUS = {
    "h100": Gpu("H100", 3.35e12, 989e12, 67e12, 67e12),
    "a10g": Gpu("A10G", 0.6e12, 70e12, 31e12, 0.49e12),
}


@dataclass(frozen=True)
class Row:
    """One variant of one case, forward and backward."""

    loss: str
    case: str
    variant: str
    status: str = "ok"
    launches: int = 0
    waits: int = 0
    bytes: int = 0
    flops_half: int = 0
    flops_single: int = 0
    flops_double: int = 0
    peak_bytes: int = 0
    h100_seconds: float = 0.0
    a10g_seconds: float = 0.0


def reckon(operations: Sequence[simulated_device.Operation], gpu: Gpu) -> float:
    """Return the seconds of consecutive operations."""
    total = 0.0
    for each in operations:
        if each.launches:
            by_bytes = each.bytes / (SHARE * gpu.bandwidth)
            by_flops = each.flops / (SHARE * gpu.rate(each.dtype))
            total += max(LAUNCH, by_bytes, by_flops)
        total += WAIT * each.waits
    return total


def row(about: tuple[str, str, str], counts: simulated_device.Counts) -> Row:
    """Return the row of these counts."""
    flops = counts.flops
    half = sum(n for dtype, n in flops.items() if dtype.itemsize == 2)
    return Row(
        *about,
        launches=counts.launches,
        waits=counts.waits,
        bytes=counts.bytes,
        flops_half=half,
        flops_single=flops.get(torch.float32, 0),
        flops_double=flops.get(torch.float64, 0),
        peak_bytes=counts.peak_bytes,
        h100_seconds=reckon(counts.operations, GPUS["h100"]),
        a10g_seconds=reckon(counts.operations, GPUS["a10g"]),
    )


def count(
    case: Case, names: Sequence[str] = VARIANTS, *, is_computed: bool = False
) -> dict[str, Row]:
    """Count the operations of a case's variants, forward and backward.

    Only shapes are processed, so that no size is too large, unless ``is_computed``. A variant that
    reads a value is computed if it is small; otherwise its status says why it has no figures.
    """
    simulated_device.start()
    found = {}
    for variant in variants(case, "cpu"):
        if variant.name in names:
            about = case.loss, case.name, variant.name
            try:
                found[variant.name] = row(about, _of_variant(case, variant, is_computed))
            except RuntimeError as error:
                if "shape-only mode" not in str(error):
                    raise
                found[variant.name] = Row(*about, status=str(error).splitlines()[0])
    return found


def _of_variant(case: Case, variant: Variant, is_computed: bool) -> simulated_device.Counts:
    mode = contextlib.nullcontext if is_computed else simulated_device.shape_only
    try:
        with mode():
            return counted(ready(case, variant, [case.inputs(Maker(torch.device("sim")))]).train)
    except RuntimeError as error:
        if is_computed or "shape-only mode" not in str(error) or case.plain_bytes() > SMALL:
            raise
    return _of_variant(case, variant, is_computed=True)


def counted(run: Callable[[], object]) -> simulated_device.Counts:
    """Count the second call, without what the first call caches.

    It runs in one thread, so that memory is freed in the same order every time.
    """
    with torch.autograd.set_multithreading_enabled(False):
        run()
        gc.collect()
        with simulated_device.counting() as counts:
            run()
    return counts


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the CSV."""
    with replaced_file(path, text=True) as target:
        writer = csv.DictWriter(target, list(asdict(Row("", "", ""))), lineterminator="\n")
        writer.writeheader()
        for each in rows:
            seconds = {k: f"{v:.4g}" for k, v in asdict(each).items() if k.endswith("_seconds")}
            writer.writerow({**asdict(each), **seconds})


def read(path: Path) -> list[Row]:
    """Read the rows of a CSV."""
    kinds: dict[str, Callable[[str], Any]] = {"loss": str, "case": str, "variant": str}
    kinds |= {"status": str, "h100_seconds": float, "a10g_seconds": float}
    with path.open(encoding="utf-8") as lines:
        return [
            replace(
                Row("", "", ""),
                **{name: kinds.get(name, int)(value) for name, value in each.items()},
            )
            for each in csv.DictReader(lines)
        ]
