import pytest
import torch

from examples.demo.model import ModelSize, SparseEncoder
from examples.demo.tokens import pad

WORDS = [f"w{number:03d}" for number in range(500)]
ROWS = [[2, 5, 9, 30, 3], [2, 7, 3], [2, 11, 11, 12, 13, 14, 3]]


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
