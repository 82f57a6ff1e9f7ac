import subprocess

from benchmarks.studies import debian


def _description(title: str, topic: str, *more: str) -> str:
    words = [f"{topic}{chr(97 + i % 26)}{chr(97 + i * 7 % 26)}" for i in range(30)]
    lines = [f" {' '.join(words[start : start + 10])}" for start in (0, 10, 20)]
    return "\n".join([title, *lines, *more])


def test_a_row_holds_title_and_description_without_the_title():
    text = _description("Sorts all the lines", "line", " It sorts all the lines, quickly.")
    (row,) = debian.to_rows([("sorter", "sorter", text)])
    (pair,) = row.pairs
    assert (row.title, row.group, pair.query) == ("sorter", "sorter", "Sorts all the lines")
    assert pair.document.startswith("lineaa linebh")
    assert pair.document.endswith("It , quickly.")
    assert row.text == f"Sorts all the lines. {pair.document}"


def _apt(outputs):
    """Stands for the commands of apt, by their last words."""

    def run(command, **_):
        for end, output in outputs.items():
            if command[-1].endswith(end):
                return subprocess.CompletedProcess(command, 0, output.encode(), b"")
        raise FileNotFoundError

    return run


AVAILABLE = """\
Package: sed
Version: 4
Description: stream editor

Package: libx1
Source: x (1.2)
"""
LISTED = """\
Package: sed
Description-md5: 1
Description-en: stream editor
 Edits streams.
 .
 And files.

Package: libx1
Description-en: an X

Package: removed
Description-en: no longer available
"""


def test_packages_are_read_from_apts_lists(monkeypatch):
    outputs = {"dumpavail": AVAILABLE, "Translations": "/list\n", "/list": LISTED}
    monkeypatch.setattr(subprocess, "run", _apt(outputs))
    assert list(debian.read_packages()) == [
        ("sed", "sed", "stream editor\n Edits streams.\n .\n And files."),
        ("libx1", "x", "an X"),
    ]
