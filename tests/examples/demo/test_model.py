import pytest
import torch

from examples.demo.model import ModelSize, SparseEncoder
from examples.demo.tokens import pad

SIZE = ModelSize(hidden=16, layers=2, heads=2)
WORDS = [f"w{number:03d}" for number in range(500)]
ROWS = [[2, 5, 9, 30, 3], [2, 7, 3], [2, 11, 11, 12, 13, 14, 3]]


def _model(words=50) -> SparseEncoder:
    torch.manual_seed(3)
    return SparseEncoder(WORDS[:words], torch.rand(words) * 4, SIZE)


def test_padding_changes_nothing():
    model = _model()
    alone, beside = model(**pad(ROWS[1:2])), model(**pad(ROWS))[1:2]
    torch.testing.assert_close(alone, beside)


def test_nearly_every_token_is_active_at_the_start():
    assert (_model(500)(**pad(ROWS)) > 0).double().mean() > 0.9


def test_the_untrained_vector_holds_its_own_tokens():
    torch.manual_seed(0)
    idf = torch.ones(500)  # equal: all embeddings are equally long
    model = SparseEncoder(WORDS, idf, ModelSize())
    top = model(**pad(ROWS)).topk(3).indices
    assert {5, 9, 30} & set(top[0].tolist())
    assert 7 in top[1].tolist()


def test_the_text_length_is_a_parameter_of_the_model():
    row = [2, *range(4, 100), 3]
    model = SparseEncoder(WORDS, torch.ones(500), ModelSize(max_length=len(row)))
    assert model(**pad([row])).shape == (1, 500)
    with pytest.raises(RuntimeError, match="size"):
        SparseEncoder(WORDS, torch.ones(500), ModelSize())(**pad([row]))


def test_tokens_of_similar_spelling_start_alike():
    words = [*WORDS[:40], "neighbor", "neighbors", "##neighbor", "eigenvalue"]
    torch.manual_seed(0)
    embedding = SparseEncoder(words, torch.ones(len(words)), ModelSize(hidden=256)).embedding
    unit = torch.nn.functional.normalize(embedding.detach(), dim=1)
    one, plural, ending, other = (unit @ unit.T)[40, 40:].tolist()
    assert one == pytest.approx(1.0)
    assert min(plural, ending) > 0.25 > abs(other)
