"""A file is replaced whole or not at all: full disks, killed processes, two writers, links."""

import errno
import io
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from sparse_losses._core.files import replaced_file, replaced_files

OLD, NEW = "old\n" * 1000, "new\r\nline\n" * 1000


def write(path, content=NEW):
    with replaced_file(path, text=True) as file:
        file.write(content)


def half(path, error):
    with replaced_file(path, text=True) as file:
        file.write("half")
        if error:
            raise error


def read(path):
    return path.read_bytes().decode()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file.txt"
    path.write_bytes(OLD.encode())
    return path


def test_a_file_is_written_and_replaced_under_exactly_its_name(tmp_path):
    path = tmp_path / "file"
    for content in (OLD, NEW, ""):
        write(path, content)
        assert read(path) == content
    with replaced_file(path) as file:
        file.write(b"\0\r\n")
    assert path.read_bytes() == b"\0\r\n"
    assert os.listdir(tmp_path) == ["file"]


def test_readers_see_the_old_file_until_all_of_the_new_one_is_there(path):
    with replaced_file(path, text=True) as file:
        file.write(NEW)
        file.flush()
        assert read(path) == OLD
    assert read(path) == NEW


def test_text_is_utf_8_with_its_own_line_ends_on_every_system(path, monkeypatch):
    opened, options = io.open, []

    def spy(*arguments, **how):
        options.append(how)
        return opened(*arguments, **how)

    monkeypatch.setattr("sparse_losses._core.files.open", spy, raising=False)
    write(path)
    assert options == [{"encoding": "utf-8", "newline": ""}]


def test_all_of_a_file_is_on_the_disk_before_it_gets_its_name(path, monkeypatch):
    sync, sizes = os.fsync, []

    def spy(file):
        sizes.append(os.stat(file.fileno()).st_size)
        sync(file)

    monkeypatch.setattr(os, "fsync", spy)
    for content in ("few", NEW):
        write(path, content)
    assert sizes == [3, len(NEW)]


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_other(path, monkeypatch, fails):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_):
        raise full

    if fails != "write":
        monkeypatch.setattr(os, fails, fail)
    with pytest.raises(OSError, match="No space left"):
        half(path, full if fails == "write" else None)
    assert read(path) == OLD
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux alone has a full device")
def test_a_full_device_is_an_error_by_flushing_and_not_a_short_file(path, monkeypatch):
    opened = io.open
    monkeypatch.setattr(
        "sparse_losses._core.files.open",
        lambda _, mode, **how: opened("/dev/full", "w", **how),
        raising=False,
    )
    with pytest.raises(OSError, match="No space left"):
        write(path)
    assert read(path) == OLD


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows ends processes in another way")
def test_a_killed_process_leaves_the_old_file(path):
    script = (
        "import sys, time\n"
        "from sparse_losses._core.files import replaced_file\n"
        "with replaced_file(sys.argv[1], text=True) as file:\n"
        "    file.write('half'), file.flush(), print('.', flush=True), time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == ".\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert read(path) == OLD
    (left,) = {entry.name for entry in path.parent.iterdir()} - {path.name}
    assert left.startswith(f".{path.name}.")
    write(path)  # and nobody is in the way of the next
    assert read(path) == NEW


def test_of_two_writers_the_last_one_wins_and_both_are_whole(path):
    contents = [letter * 200_000 for letter in "abcd"]
    stop = threading.Event()
    seen = set()

    def look():
        while not stop.is_set():
            seen.add(read(path))
            time.sleep(0.001)

    reader = threading.Thread(target=look)
    reader.start()
    writers = [
        threading.Thread(target=lambda c=c: [write(path, c) for _ in range(10)]) for c in contents
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stop.set()
    reader.join()
    assert seen <= {OLD, *contents}
    assert read(path) in contents
    assert os.listdir(path.parent) == [path.name]


def test_a_link_is_followed_and_the_mode_of_a_file_stays(path):
    link = path.with_name("link")
    link.symlink_to(path.name)
    path.chmod(0o640)
    write(link)
    assert link.is_symlink()
    assert read(path) == NEW
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("kind", ["folder", "device"])
def test_only_a_regular_file_is_replaced(tmp_path, kind):
    path = tmp_path / "there"
    if kind == "folder":
        path.mkdir()
    else:  # a terminal: were it wrong, a test run by root would replace /dev/null for all
        path.symlink_to(os.ttyname(os.openpty()[1]))
    with pytest.raises(ValueError, match=f"expected .*there to be a regular file .*, got a {kind}"):
        write(path)
    assert os.path.lexists(path)
    assert kind == "folder" or stat.S_ISCHR(os.stat(path).st_mode)
    assert os.listdir(tmp_path) == ["there"]


def make_folder(folder, content="old", also=(), last="last"):
    with replaced_files(folder, last=last, instead_of="shard*") as new:
        for name in ("first", "inner/most/second", "last", *also):
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_text(content)


def contents(folder):
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_text() for file in files}


def test_the_files_of_a_folder_are_replaced_and_others_stay(tmp_path):
    folder = tmp_path / "made" / "here"
    make_folder(folder, also=("shard-1", "shard-2"))
    (folder / "mine").write_text("mine")
    make_folder(folder, "new", also=("shard-1",))
    files = {"first", "inner/most/second", "last", "shard-1"}
    assert contents(folder) == {**dict.fromkeys(files, "new"), "mine": "mine"}
    assert os.listdir(folder.parent) == ["here"]


def test_a_folder_behind_a_link_is_the_one_that_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    make_folder(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "first").read_text() == "old"


def test_files_of_a_folder_keep_their_mode_and_a_link_leaves_what_others_share(tmp_path):
    """A cache of downloaded models links to files that other snapshots share."""
    folder, shared = tmp_path / "folder", tmp_path / "shared"
    make_folder(folder)
    (folder / "inner/most/second").chmod(0o640)
    shared.write_text("of others")
    (folder / "first").unlink()
    (folder / "first").symlink_to(shared)
    make_folder(folder, "new")
    assert stat.S_IMODE((folder / "inner/most/second").stat().st_mode) == 0o640
    assert not (folder / "first").is_symlink()
    assert contents(folder) == dict.fromkeys(("first", "inner/most/second", "last"), "new")
    assert shared.read_text() == "of others"


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_folder_and_no_other(tmp_path, monkeypatch, fails):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    make_folder(tmp_path / "there")

    def fail(*_):
        raise full

    def write_half():
        with replaced_files(tmp_path / "there", last="last", instead_of="shard*") as new:
            (new / "first").write_text("half")
            if fails == "write":
                raise full

    if fails == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_half()
    assert set(contents(tmp_path / "there").values()) == {"old"}
    assert os.listdir(tmp_path) == ["there"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows ends processes in another way")
def test_a_killed_process_leaves_the_old_folder(tmp_path):
    make_folder(tmp_path / "there")
    script = (
        "import sys, time\n"
        "from sparse_losses._core.files import replaced_files\n"
        "with replaced_files(sys.argv[1], last='last', instead_of='shard*') as new:\n"
        "    (new / 'first').write_text('half'), print('.', flush=True), time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "there")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == ".\n"
    process.kill()
    process.communicate()
    assert set(contents(tmp_path / "there").values()) == {"old"}
    (left,) = set(os.listdir(tmp_path)) - {"there"}
    assert left.startswith(".there.")
    make_folder(tmp_path / "there", "new")  # and nobody is in the way of the next
    assert set(contents(tmp_path / "there").values()) == {"new"}


def test_a_temporary_folder_that_cannot_be_removed_is_no_error(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise PermissionError

    monkeypatch.setattr(os, "rmdir", fail)
    make_folder(tmp_path / "there")
    assert set(contents(tmp_path / "there").values()) == {"old"}


@pytest.mark.parametrize("last", ["first", "inner/most/second", "last"])  # in any order of listing
@pytest.mark.parametrize("after", range(3))
def test_stopped_among_the_replaced_files_the_last_one_is_away(tmp_path, monkeypatch, after, last):
    make_folder(tmp_path)
    replace, done = os.replace, []

    def stops(*paths):
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(paths)
        replace(*paths)

    monkeypatch.setattr(os, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        make_folder(tmp_path, "new", last=last)
    assert last not in contents(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no lock of a folder")
def test_of_two_writers_of_a_folder_one_waits_for_the_other(tmp_path, monkeypatch):
    replace, first_is_busy, go_on = os.replace, threading.Event(), threading.Event()

    def slow(*paths):
        if threading.current_thread().name == "first":
            first_is_busy.set()
            assert go_on.wait(60)
        replace(*paths)

    monkeypatch.setattr(os, "replace", slow)
    first = threading.Thread(target=make_folder, args=(tmp_path, "first"), name="first")
    second = threading.Thread(target=make_folder, args=(tmp_path, "second"))
    first.start()
    assert first_is_busy.wait(60)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go_on.set()
    first.join()
    second.join()
    assert set(contents(tmp_path).values()) == {"second"}
