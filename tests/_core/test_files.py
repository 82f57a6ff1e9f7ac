"""A file is replaced whole or not at all: full disks, killed processes, two writers, links."""

import errno
import os
import stat

import pytest

from sparse_losses._core.files import replaced_file

OLD, NEW = "old\n" * 1000, "new\r\nline ü\n" * 1000
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write(path, content=NEW, error=None):
    with replaced_file(path, text=True) as file:
        file.write(content)
        if error is not None:
            raise error


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file.txt"
    path.write_bytes(OLD.encode())
    return path


def test_file_is_replaced_under_exactly_its_name(tmp_path):
    path = tmp_path / "file"
    for content in (OLD, NEW, ""):
        write(path, content)
        assert path.read_bytes() == content.encode()
    with replaced_file(path) as file:
        file.write(b"\0\r\n")
    assert path.read_bytes() == b"\0\r\n"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_full_disk_leaves_the_old_file_and_no_other(path, monkeypatch, fails):
    def fail(*_):
        raise FULL

    if fails != "write":
        monkeypatch.setattr(os, fails, fail)
    with pytest.raises(OSError, match="No space left"):
        write(path, error=FULL if fails == "write" else None)
    assert path.read_bytes() == OLD.encode()
    assert os.listdir(path.parent) == [path.name]


def test_link_is_followed_and_mode_is_kept(path):
    link = path.with_name("link")
    link.symlink_to(path.name)
    path.chmod(0o640)
    write(link)
    assert link.is_symlink()
    assert path.read_bytes() == NEW.encode()
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_only_regular_files_are_replaced(tmp_path):
    path = tmp_path / "there"
    path.mkdir()
    with pytest.raises(ValueError, match=r"expected .*there to be a regular file .*, got a folder"):
        write(path)
    assert os.listdir(tmp_path) == ["there"]
