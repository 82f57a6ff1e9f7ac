"""Atomic replacement of files, and the refusal of damaged ones."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replaced_file(path: str | os.PathLike[str], *, text: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path`` that replaces it once it is written to disk.

    After an error the old file is unchanged and the temporary one removed; a killed process leaves
    it behind. Of a symbolic link the target is replaced. Text is UTF-8, its line ends unchanged.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # root would replace /dev/null for everybody
        kind = "folder" if target.is_dir() else "device, a pipe or the like"
        raise ValueError(f"expected {path} to be a regular file or a new one, got a {kind}")
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    options: dict[str, Any] = {"encoding": "utf-8", "newline": ""} if text else {}
    try:
        with open(unfinished, "x" if text else "xb", **options) as file:
            yield file
            file.flush()
            os.fsync(file)  # or a power cut could leave an empty file under the name
        if target.exists():
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def refused_if_damaged(what: str) -> Iterator[None]:
    """Turn every error of the block into a ``ValueError``: a damaged archive fails in many ways."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {error}") from error
