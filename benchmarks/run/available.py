"""The variants of a case that can be measured here, given the installed packages."""

import functools
import importlib
import importlib.metadata
import warnings

from benchmarks.schema import Case, Variant

# Name on the package index, and name of the module.
PACKAGES = {
    "sentence-transformers": "sentence_transformers",
    "pytorch-metric-learning": "pytorch_metric_learning",
    "info-nce-pytorch": "info_nce",
}


@functools.cache
def missing_reason(package: str) -> str | None:
    """Return why a package cannot be measured, or ``None`` if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(PACKAGES[package])
    except ImportError as error:
        is_absent = getattr(error, "name", None) == PACKAGES[package]
        return "not installed" if is_absent else f"broken: {error}"
    return None


def versions() -> str:
    """Return name and version of every peer that can be measured."""
    names = [name for name in PACKAGES if missing_reason(name) is None]
    return " ".join(f"{name}=={importlib.metadata.version(name)}" for name in names)


def variants(case: Case, *, compiled: bool = False) -> list[Variant]:
    """Return the variants of a case that can be measured here, the plain formula first."""
    return [
        variant
        for variant in case.variants()
        if (compiled or not variant.compiled)
        and not (variant.package and missing_reason(variant.package))
    ]
