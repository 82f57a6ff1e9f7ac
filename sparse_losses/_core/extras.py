"""Imports of optional packages, with an error that names the extra to install."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Context manager for imports of packages that belong to the extra ``extra``."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "of this import").partition(".")[0]
        raise ModuleNotFoundError(
            f"expected the package {package}: pip install 'sparse-losses[{extra}]'", name=error.name
        ) from error
