"""The variants of a case that can be measured here, given the installed packages and the device.

A missing package is skipped, and its absence is printed.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import warnings

from benchmarks.schema import Case, Variant

__all__ = ["PACKAGES", "runs_triton", "variants", "versions", "why_missing"]

# Name on the package index: name of the module, whether it needs a GPU.
PACKAGES = {
    "sentence-transformers": ("sentence_transformers", False),
    "pytorch-metric-learning": ("pytorch_metric_learning", False),
    "info-nce-pytorch": ("info_nce", False),
    "liger-kernel": ("liger_kernel", True),
    "sparton": ("sparton", True),
}


@functools.cache
def why_missing(package: str, device_type: str) -> str | None:
    """Return why a package cannot be measured on a device, or ``None`` if it can."""
    module, needs_gpu = PACKAGES[package]
    if needs_gpu and device_type != "cuda":
        return "needs a GPU"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except ImportError as error:
        return "not installed" if getattr(error, "name", None) == module else f"broken: {error}"
    return None


def versions(device_type: str) -> dict[str, str]:
    """Return the version of every peer that can be measured."""
    found = {}
    for package in PACKAGES:
        if why_missing(package, device_type) is None:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = "unknown"
    return found


def runs_triton(device_type: str, suite: str) -> bool:
    """Whether Triton kernels run: on a GPU, or interpreted on a CPU for the tiny suite."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device_type == "cuda" or (suite == "tiny" and os.environ.get("TRITON_INTERPRET") == "1")


def variants(case: Case, device_type: str, *, compiled: bool = False) -> list[Variant]:
    """Return the variants of a case that can be measured on a device, the plain formula first."""
    return [
        variant
        for variant in case.variants()
        if (compiled or not variant.compiled)
        and not (variant.is_triton and not runs_triton(device_type, case.suite))
        and not (variant.package and why_missing(variant.package, device_type))
    ]
