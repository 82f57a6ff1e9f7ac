import re

import pytest

from sparse_losses.demo.corpus import Pair, Row, pair_texts, read_pairs, split
from sparse_losses.demo.options import UserError
from tests.demo.artificial import make_rows, write_pairs


def test_split_depends_on_names_only_and_is_three_way():
    rows = make_rows(100)
    one = split(rows, ("a", "b"), {}, held_out=10)
    two = split(reversed(rows), ("a", "b"), {}, held_out=10)
    assert [len(part) for part in (one.train, one.validation, one.test)] == [80, 10, 10]
    assert one == two
    assert {row.title for row in one.rows} == {row.title for row in rows}


def test_a_row_without_every_task_is_trained_on_but_never_tested():
    rows = [Row(f"r{i}", f"r{i}", (Pair(0, "q", "d"),), "d") for i in range(5)]
    corpus = split(rows, ("a", "b"), {}, held_out=2)
    assert len(corpus.train) == 5
    assert not corpus.test


def test_the_texts_of_a_task():
    rows = [
        Row("one", "one", (Pair(0, "q0", "d0"), Pair(1, "q1", "d1")), "d"),
        Row("two", "two", (Pair(1, "q2", "d2"),), "d"),
    ]
    assert pair_texts(rows, 0) == (["q0"], ["d0"])
    assert pair_texts(rows, 1) == (["q1", "q2"], ["d1", "d2"])


def test_pairs_are_read_and_split(tmp_path):
    path = tmp_path / "pairs.tsv"
    write_pairs(path, 300)
    path.write_text("\ufeff\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    corpus = read_pairs(path)
    assert [len(part) for part in (corpus.train, corpus.validation, corpus.test)] == [240, 30, 30]
    assert all(len(row.pairs) == 1 for row in corpus.rows)
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
            ([*GOOD[:41], line, *GOOD[42:]], f"line 42: .* one tab .*got {re.escape(repr(line))}")
            for line in ("no tab in here", "one\ttwo\tthree", "  \ta document", "a query\t ?! ")
        ),
        (["good\tline", "bad \udcff\tline"], "line 2: expected UTF-8"),
        (GOOD[:99], "at least 100 different pairs .* got 99"),
        ([f"query {i}\tthe same" for i in range(200)], "share a query or a document"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_does_not_serve_is_named_with_its_line(tmp_path, lines, message):
    path = tmp_path / "pairs.tsv"
    if lines is None:
        path.mkdir()
    else:
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=message) as info:
        read_pairs(path)
    assert len(str(info.value).splitlines()) == 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read.*absent.tsv"):
        read_pairs(tmp_path / "absent.tsv")
