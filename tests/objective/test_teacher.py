"""Teachers that score the texts of a batch."""

import copy

import pytest
import torch

from sparse_losses import BM25Teacher, DocumentFrequency
from sparse_losses.functional import bm25_scores

V, CLS, SEP, PAD = 40, 0, 1, 2
SPECIAL = [CLS, SEP, PAD]
MARK = {"input_ids": torch.tensor([[CLS]]), "attention_mask": torch.ones(1, 1)}


def column(*rows, length=7):
    """Texts of different lengths between two marks."""
    ids = torch.randint(3, V, (*rows, length))
    ends = torch.randint(2, length, (*rows, 1))
    places = torch.arange(length).expand_as(ids)
    ids = torch.where(places < ends, ids, PAD)
    ids = torch.where(places == ends, SEP, ids)
    ids[..., 0] = CLS
    return {"input_ids": ids, "attention_mask": (places <= ends).long()}


def counted(*columns):
    counts = DocumentFrequency(V)
    for one in columns:
        counts.update(**{name: x.flatten(0, -2) for name, x in one.items()})
    return counts


@pytest.mark.parametrize(
    ("special", "options"), [(torch.tensor(SPECIAL), {}), ((2, 0, 1, 0), {"k1": 2.0, "b": 0.3})]
)
def test_bm25_teacher_is_bm25_of_the_token_ids_without_special_tokens(special, options):
    query, document = column(4), column(6)
    counts = counted(document)
    teacher = BM25Teacher(counts, special_token_ids=special, **options)
    mask, ids = document["attention_mask"], document["input_ids"]
    words = mask.bool() & (ids > PAD)
    assert teacher.mean_length == pytest.approx(words.sum().item() / 6)
    expected = bm25_scores(
        *query.values(),
        ids,
        words,  # as if the marks were padding
        counts.idf(),
        mean_length=words.sum().item() / 6,
        ignore_token_ids=SPECIAL,
        **options,
    )
    torch.testing.assert_close(teacher(query, document), expected)
    assert (expected > 0).any()
    bare = BM25Teacher(counts, **options)
    assert bare.mean_length == pytest.approx(mask.sum().item() / 6)
    assert not torch.allclose(bare(query, document), expected)


def test_bm25_teacher_is_no_part_of_what_is_saved_or_learned():
    teacher = BM25Teacher(counted(column(5)), special_token_ids=SPECIAL)
    assert list(teacher.state_dict()) == list(teacher.parameters()) == []
    query, document = column(2), column(3)
    assert torch.equal(copy.deepcopy(teacher)(query, document), teacher(query, document))


def test_wrong_settings_and_texts_without_tokens_are_errors():
    known = {"document_frequency": counted(column(3)), "special_token_ids": SPECIAL}
    for options, message in (
        ({"special_token_ids": [V]}, rf"in \[0, V\) with V = {V}, got {V}"),
        ({"b": 1.5}, r"`b` in \[0, 1\], got 1.5"),
        ({"document_frequency": DocumentFrequency(V)}, "at least one document"),
        ({"document_frequency": counted(MARK)}, "`mean_length` .* > 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            BM25Teacher(**{**known, **options})
    with pytest.raises(TypeError, match="`document` as a dict of the tensors"):
        BM25Teacher(**known)(column(2), {"input_ids": None})
