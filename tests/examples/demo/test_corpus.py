from examples.demo.corpus import Pair, Row, split
from examples.demo.texts import cut, unique, without_name
from tests.examples.demo.artificial import make_rows


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
