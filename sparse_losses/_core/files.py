"""Files, and folders of files, that are replaced whole or not at all."""

import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = ["replaced_file", "replaced_files"]


@contextmanager
def replaced_file(path: str | os.PathLike[str], *, text: bool = False) -> Iterator[IO[Any]]:
    """An open file beside ``path``, which takes its place once all of it is on the disk.

    On an error, such as a full disk, what was there stays and the new file is removed; a killed
    process leaves it, as ``.NAME.`` and 32 digits. Of two writers the last one wins. Where ``path``
    is a symbolic link, the file that it leads to is replaced. Text is UTF-8 and gets no line ends
    but those that are written.

    Raises:
        ValueError: If ``path`` is a folder, a device or anything else but a regular file.
    """
    target = Path(os.path.realpath(path))  # of a symbolic link, what it leads to
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
            os.fsync(file.fileno())  # else a power cut may leave the new name without the content
        if exists:
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def replaced_files(folder: str | os.PathLike[str], *, last: str, instead_of: str) -> Iterator[Path]:
    """A new folder beside ``folder``, whose files take their places in it once all are written.

    On an error, such as a full disk, what was there stays and the new folder is removed; a process
    that is killed while it writes leaves it, as ``.NAME.`` and 32 digits. Then file by file is
    replaced: ``last`` is taken away first and comes back last, so that a reader that asks for it
    never takes half of one for the other. Files of other names stay, but for those of the pattern
    ``instead_of``.
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
                os.fsync(file.fileno())
        (target / last).unlink(missing_ok=True)
        for stale in target.glob(instead_of):
            stale.unlink()
        for path in sorted(written, key=lambda path: path == unfinished / last):
            place = target / path.relative_to(unfinished)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
