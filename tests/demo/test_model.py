import pytest
import torch

from sparse_losses import splade_pool
from sparse_losses.demo.model import ModelSize, SparseEncoder
from sparse_losses.demo.tokens import pad

SIZE = ModelSize(hidden=16, layers=2, heads=2)
WORDS = [f"w{number:03d}" for number in range(500)]
ROWS = [[2, 5, 9, 30, 3], [2, 7, 3], [2, 11, 11, 12, 13, 14, 3]]


def _model(start) -> SparseEncoder:
    torch.manual_seed(3)
    return SparseEncoder(WORDS[:50], torch.rand(50) * 4, start, SIZE).double()


def _dense(model, batch):
    logits = model.hidden(batch) @ model.embedding.T + model.bias
    return splade_pool(logits, batch.attention_mask)


@pytest.mark.parametrize("start", ["dense", "sparse"])
def test_live_pairs_have_the_gradient_of_the_plain_dense_computation(start):
    model, batch = _model(start), pad(ROWS)
    cotangent = torch.randn(3, 50, dtype=torch.float64)
    results = []
    for forward in (model, lambda texts: _dense(model, texts)):
        model.zero_grad()
        activations = forward(batch)
        (activations * cotangent).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append((activations.detach(), gradients))
    (live, live_gradients), (plain, plain_gradients) = results
    assert (plain > 0).any()
    torch.testing.assert_close(live, plain, rtol=1e-12, atol=1e-12)
    assert any(gradient.abs().sum() > 0 for gradient in plain_gradients.values())
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(
            live_gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_padding_changes_nothing():
    model = _model("dense")
    alone, beside = model(pad(ROWS[1:2])), model(pad(ROWS))[1:2]
    torch.testing.assert_close(alone, beside)


def test_dense_start_fires_everywhere_and_sparse_start_hardly():
    batch = pad(ROWS)
    dense, sparse = (
        SparseEncoder(WORDS, torch.rand(500), start)(batch) for start in ("dense", "sparse")
    )
    assert (dense > 0).double().mean() > 0.9
    assert 0 < (sparse > 0).double().mean() < 0.1


def test_the_untrained_vector_holds_its_own_tokens():
    torch.manual_seed(0)
    model = SparseEncoder(WORDS, torch.ones(500), "dense")  # equal idf: all embeddings equally long
    top = model(pad(ROWS)).topk(3).indices
    assert {5, 9, 30} & set(top[0].tolist())
    assert 7 in top[1].tolist()


def test_tokens_spelt_alike_start_alike_unless_spelling_is_off():
    words = [*WORDS[:40], "neighbor", "neighbors", "##neighbor", "eigenvalue"]

    def likeness(spelling):
        torch.manual_seed(0)
        size = ModelSize(hidden=256, spelling=spelling)
        embedding = SparseEncoder(words, torch.ones(len(words)), size=size).embedding
        unit = torch.nn.functional.normalize(embedding.detach(), dim=1)
        return (unit @ unit.T)[40].tolist()

    one, plural, ending, other = likeness(0.5)[40:]
    assert one == pytest.approx(1.0)
    assert min(plural, ending) > 0.25 > abs(other)
    assert max(map(abs, likeness(0.0)[41:])) < 0.25
