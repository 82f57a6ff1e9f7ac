"""The benchmarks, one file per loss: to add a loss, add its file here."""

import importlib
import pkgutil
from collections.abc import Sequence

from benchmarks.schema import Benchmark, Case, Sizes

NAMES = tuple(module.name for module in pkgutil.iter_modules(__path__))
# The most important losses come first, in case a suite ends early.
FIRST_ON_A_GPU = ("splade_head", "info_nce", "nws", "distillation")


def benchmark(loss: str) -> Benchmark:
    """Return the benchmark of a loss."""
    module = importlib.import_module(f"benchmarks.losses.{loss}")
    described: Benchmark = module.BENCHMARK
    return described


def cases(suite: str, only: Sequence[str] = (), part: str = "") -> list[Case]:
    """Return the cases of a suite.

    Args:
        suite: ``tiny``, ``quick``, ``full`` (includes quick), ``aims`` (the larger sizes that the
            pages show), ``gpu``, or ``calculated`` (quick, gpu, and some that are only counted).
        only: names of losses; by default all.
        part: what the names of the cases contain.
    """
    if unknown := set(only) - set(NAMES):
        raise SystemExit(f"no such loss: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    names = [name for name in NAMES if name in only or not only]
    if suite == "gpu":
        names.sort(key=lambda name: name not in FIRST_ON_A_GPU)
    found = [Case(each, sizes) for each in map(benchmark, names) for sizes in _sizes(each, suite)]
    return [case for case in found if part in case.name]


def _sizes(each: Benchmark, suite: str) -> Sequence[Sizes]:
    of_suites = {
        "tiny": each.tiny,
        "quick": each.quick,
        "full": [*each.quick, *each.full],
        "aims": each.aims,
        "gpu": each.gpu,
        "calculated": [*each.quick, *each.gpu, *each.calculated],
    }
    return of_suites[suite]
