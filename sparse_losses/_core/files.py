"""Atomic replacement of files, and of folders of files."""

import os
import shutil
import stat
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = ["replaced_file", "replaced_files"]


@contextmanager
def replaced_file(path: str | os.PathLike[str], *, text: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path`` that replaces it once it is written to disk.

    After an error, such as a full disk, the old file is unchanged and the temporary one is removed.
    A killed process leaves it behind as ``.NAME.`` and 32 digits. With two writers the last one
    wins. If ``path`` is a symbolic link, its target is replaced. Text is UTF-8; line ends are
    written as given.

    Raises:
        ValueError: if ``path`` exists and is not a regular file.
    """
    target = Path(os.path.realpath(path))  # the target of a symbolic link
    exists = os.path.lexists(target)
    if exists and not stat.S_ISREG(os.lstat(target).st_mode):
        kind = "a folder" if target.is_dir() else "a device, a pipe or the like"
        raise ValueError(f"expected {path} to be a regular file or a new one, got {kind}")
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    how: dict[str, Any] = {"encoding": "utf-8", "newline": ""} if text else {}
    try:
        with open(unfinished, "x" if text else "xb", **how) as file:
            yield file
            file.flush()
            os.fsync(file)  # or a power cut could leave an empty file under the name
        if exists:
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def replaced_files(folder: str | os.PathLike[str], *, last: str, instead_of: str) -> Iterator[Path]:
    """Open a temporary folder whose files replace those of ``folder`` once all are written.

    After an error, such as a full disk, ``folder`` is unchanged and the temporary folder is
    removed; a killed process leaves it behind as ``.NAME.`` and 32 digits. The files are replaced
    one by one, by one writer at a time (on Windows, writers are not kept apart). ``last`` is
    removed before the others and written after them. A reader that finds the same ``last`` before
    and after it read the others has no mixture. Old files that match ``instead_of`` are deleted;
    all other files stay. A file keeps its permissions; a link among them becomes a file, because
    a cache of downloaded models links to files that others share.
    """
    target = Path(os.path.realpath(folder))
    target.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    unfinished.mkdir()
    try:
        yield unfinished
        written = [path for path in unfinished.rglob("*") if path.is_file()]
        for path in written:
            with open(path, "rb+") as file:
                os.fsync(file)
            place = target / path.relative_to(unfinished)
            if place.is_file() and not place.is_symlink():
                shutil.copymode(place, path)
        with _only_writer(target):
            (target / last).unlink(missing_ok=True)
            for stale in target.glob(instead_of):
                stale.unlink()
            for path in sorted(written, key=lambda path: path == unfinished / last):
                place = target / path.relative_to(unfinished)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Wait for other processes that replace files of ``folder``; a killed one is not waited for."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    place = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)
