import pytest
import torch

from examples.demo.corpus import split
from examples.demo.model import ModelSize, SparseEncoder
from examples.demo.texts import cut, unique, without_name
from examples.demo.tokens import CLS, SEP, Tokens, pad
from tests.examples.demo.artificial import make_rows

TEXTS = ["Reads the configuration file.", "from_edgelist: a graph, from a list of edges"] * 4
WORDS = [f"w{number:03d}" for number in range(500)]
ROWS = [[2, 5, 9, 30, 3], [2, 7, 3], [2, 11, 11, 12, 13, 14, 3]]


def test_learning_is_repeatable():
    vocabularies = [Tokens.learn(TEXTS, 60).vocabulary() for _ in range(5)]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)
    assert len(vocabularies[0]) == 60


def test_marks_truncation_and_padding():
    tokens = Tokens.learn(TEXTS, 120, max_length=10)
    (short,), (cut,) = tokens.ids(["graph"]), tokens.ids([TEXTS[1] * 9])
    assert (short[0], short[-1]) == (CLS, SEP)
    assert len(cut) == 10
    assert cut[-1] == SEP
    batch = pad([short, cut])
    assert batch["attention_mask"].sum(1).tolist() == [len(short), 10]
    assert batch["input_ids"][0, len(short) :].eq(0).all()
    assert batch["input_ids"][1].tolist() == cut


def test_words_and_pieces_see_the_same_part_of_a_text():
    tokens = Tokens.learn(TEXTS, 120)
    assert " ".join(tokens.words(TEXTS[1:2])[0]) == "from edgelist a graph from a list of edges"
    tokens.max_length = 6
    (pieces,), (words,) = tokens.pieces([TEXTS[1]]), tokens.words([TEXTS[1]])
    assert len(pieces) == 4
    assert "".join(pieces).replace("##", "") == "".join(words)


def test_padding_changes_nothing():
    model = SparseEncoder(WORDS[:50], torch.rand(50) * 4, ModelSize(hidden=16, layers=2, heads=2))
    alone, beside = model(**pad(ROWS[1:2])), model(**pad(ROWS))[1:2]
    torch.testing.assert_close(alone, beside)


def test_the_untrained_vector_holds_its_own_tokens():
    torch.manual_seed(0)
    idf = torch.ones(500)  # equal: all embeddings are equally long
    model = SparseEncoder(WORDS, idf, ModelSize())
    top = model(**pad(ROWS)).topk(3).indices
    assert {5, 9, 30} & set(top[0].tolist())
    assert 7 in top[1].tolist()


def test_tokens_of_similar_spelling_start_alike():
    words = [*WORDS[:40], "neighbor", "neighbors", "##neighbor", "eigenvalue"]
    torch.manual_seed(0)
    embedding = SparseEncoder(words, torch.ones(len(words)), ModelSize(hidden=256)).embedding
    unit = torch.nn.functional.normalize(embedding.detach(), dim=1)
    one, plural, ending, other = (unit @ unit.T)[40, 40:].tolist()
    assert one == pytest.approx(1.0)
    assert min(plural, ending) > 0.25 > abs(other)


def test_split_depends_on_names_only_and_is_three_way():
    rows = make_rows(100)
    one = split(rows, ("a", "b"), {}, held_out=10)
    two = split(reversed(rows), ("a", "b"), {}, held_out=10)
    assert [len(part) for part in (one.train, one.validation, one.test)] == [80, 10, 10]
    assert one == two
    assert {row.title for row in one.rows} == {row.title for row in rows}


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
