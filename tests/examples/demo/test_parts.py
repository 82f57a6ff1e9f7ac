import torch

from examples.demo.corpus import split
from examples.demo.model import ModelSize, SparseEncoder
from examples.demo.tokens import pad
from tests.examples.demo.artificial import make_rows

WORDS = [f"w{number:03d}" for number in range(500)]
ROWS = [[2, 5, 9, 30, 3], [2, 7, 3], [2, 11, 11, 12, 13, 14, 3]]


def test_padding_changes_nothing():
    model = SparseEncoder(WORDS[:50], torch.rand(50) * 4, ModelSize(hidden=16, layers=2, heads=2))
    alone, beside = model(**pad(ROWS[1:2])), model(**pad(ROWS))[1:2]
    torch.testing.assert_close(alone, beside)


def test_split_depends_on_names_only_and_is_three_way():
    rows = make_rows(100)
    one = split(rows, ("a", "b"), {}, held_out=10)
    two = split(reversed(rows), ("a", "b"), {}, held_out=10)
    assert [len(part) for part in (one.train, one.validation, one.test)] == [80, 10, 10]
    assert one == two
    assert {row.title for row in one.rows} == {row.title for row in rows}
