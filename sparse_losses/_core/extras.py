"""Packages that only an extra brings: without them an error says what to install."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["from_extra"]


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """A region of imports.

    Raises:
        ModuleNotFoundError: For a package that is not there, with the extra that brings it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "of this import").partition(".")[0]
        raise ModuleNotFoundError(
            f"expected the package {package}: pip install 'sparse-losses[{extra}]'",
            name=error.name,
        ) from error
