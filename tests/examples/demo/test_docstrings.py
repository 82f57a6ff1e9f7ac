import re

from examples.demo import docstrings
from examples.demo.corpus import split


def _docstring(summary: str, topic: str) -> str:
    words = " ".join(f"{topic}{chr(97 + i % 26)}{chr(97 + i * 7 % 26)}" for i in range(30))
    return f"{summary}\n\nThe rest is about {words}."


def test_a_name_leaks_into_neither_query_nor_document():
    text = _docstring("Sort the list with sorted, see Sorted and sorted_list.", "order")
    (row,) = docstrings.to_rows([("builtins.sorted", text)])
    name, summary = row.pairs
    assert name.query == "sorted"
    for leaking in (name.document, summary.query, summary.document):
        assert not re.search(r"\bsorted\b", leaking, re.IGNORECASE)
    assert "sorted_list" in name.document  # another object's name stays
    assert "Sort the list" not in summary.document


def test_a_leaf_name_is_never_on_both_sides_of_the_split():
    entries = [
        (f"pkg.{owner}.{leaf}", _docstring(f"Do the thing {owner} to {leaf}.", f"{owner}{leaf}"))
        for leaf in (f"leaf_{letter}" for letter in "abcdefghijklmnop")
        for owner in ("first", "second", "third")
    ]
    rows = docstrings.to_rows(entries)
    corpus = split(rows, docstrings.TASKS, {}, held_out=4)
    assert corpus == split(reversed(rows), docstrings.TASKS, {}, held_out=4), "by names alone"
    sides = [{row.group for row in side} for side in (corpus.train, corpus.validation, corpus.test)]
    assert [len(side) for side in sides] == [8, 4, 4]
    assert len(set.union(*sides)) == 16
    assert len(corpus.test) == 4  # one of the three namesakes: a query has one right answer


def test_sources_are_parsed_not_imported(tmp_path):
    (tmp_path / "_impl.py").write_text(
        'raise RuntimeError("imported")\n'
        'def seen():\n    "Public."\n'
        'def _hidden():\n    "Private."\n'
        'class Box:\n    "A box."\n    def open(self):\n        "Opens."\n'
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "escape.py").write_text('def odd():\n    "A \\d."\n')
    for folder in ("tests", "_private"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text('def never():\n    "No."\n')
    assert dict(docstrings.parse_folder(tmp_path, "pkg")) == {
        "pkg.seen": "Public.",
        "pkg.Box": "A box.",
        "pkg.Box.open": "Opens.",
        "pkg.escape.odd": "A \\d.",
    }
