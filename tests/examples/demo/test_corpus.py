import re

import pytest

from examples.demo.corpus import Pair, Row, read_pairs, split
from examples.demo.texts import cut, unique, without_name
from tests.examples.demo.artificial import make_rows, write_pairs


def test_split_depends_on_names_only_and_is_three_way():
    rows = make_rows(100)
    one = split(rows, ("a", "b"), {}, held_out=10)
    two = split(reversed(rows), ("a", "b"), {}, held_out=10)
    assert [len(part) for part in (one.train, one.validation, one.test)] == [80, 10, 10]
    assert one == two
    assert {row.title for row in one.rows} == {row.title for row in rows}


def test_a_row_without_every_task_is_only_trained_on():
    rows = [Row(f"r{i}", f"r{i}", (Pair(0, "q", "d"),), "d") for i in range(5)]
    corpus = split(rows, ("a", "b"), {}, held_out=2)
    assert len(corpus.train) == 5
    assert not corpus.test


def test_pairs_are_read_and_split(tmp_path):
    path = tmp_path / "pairs.tsv"
    write_pairs(path, 300)
    path.write_text("\ufeff\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    corpus = read_pairs(path)
    assert [len(part) for part in (corpus.train, corpus.validation, corpus.test)] == [240, 30, 30]
    assert not corpus.test[0].title.startswith("\ufeff")


def test_lines_that_share_a_query_or_a_document_stay_together(tmp_path):
    path = tmp_path / "pairs.tsv"
    lines = []
    for number in range(60):
        lines += [
            f"Question {number}\tdocument {number} one",
            f"question {number}\tdocument {number} two",
            f"another way {number}\tdocument {number} Two",
        ]
    path.write_text("\n".join(lines), encoding="utf-8")
    corpus = read_pairs(path)
    held_out = {row.title.split()[-1] for row in corpus.test + corpus.validation}
    trained = {row.title.split()[-1] for row in corpus.train}
    assert len(held_out) == 36
    assert not held_out & trained


GOOD = [f"{row.pairs[0].query}\t{row.text}" for row in make_rows(150)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        *(
            ([*GOOD[:41], line, *GOOD[42:]], f"one tab .* line 42 .*got {re.escape(repr(line))}")
            for line in ("no tab in here", "one\ttwo\tthree", "  \ta document", "a query\t ?! ")
        ),
        (["good\tline", "bad \udcff\tline"], "as UTF-8 text"),
        (GOOD[:99], "at least 100 different pairs .* got 99"),
        ([f"query {i}\tthe same" for i in range(200)], "share neither query nor document"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_does_not_serve_is_named(tmp_path, lines, message):
    path = tmp_path / "pairs.tsv"
    if lines is None:
        path.mkdir()
    else:
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(SystemExit, match=message) as info:
        read_pairs(path)
    assert str(path) in str(info.value)


def test_a_name_is_removed_in_any_case_and_only_as_a_word():
    text = "Sum of array elements, see Sum and sum_all."
    assert without_name(text, "sum") == "of array elements, see and sum_all."
    assert len(cut("word " * 500).split()) == 160


def test_near_duplicates_and_equal_openings_are_one():
    words = [f"w{n}" for n in range(60)]
    entries = [
        ("first", "", " ".join(words)),
        ("same opening", "", " ".join([*words[:12], *"abcdefghijklmnopqrstuvwxyz"])),
        ("reworded", "", " ".join(["new", *words[1:]])),
        ("other", "", " ".join(reversed(words))),
    ]
    assert [name for name, *_ in unique(entries)] == ["first", "other"]
