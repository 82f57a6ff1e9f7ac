"""``logit_scale="auto"``: the first batch in training mode sets the self dot product, once."""

import copy

import pytest
import torch
from torch import nn

from sparse_losses import SpladeEncoder, SpladeHead, calibrate
from sparse_losses.functional import info_nce_loss
from tests.distributed.threads import run_threads
from tests.representation.tiny_models import BOTH_WAYS, TEXTS, dense, load_theirs, make, reloaded

TWO_WORDS = [f"{x} {y}" for x in ("quick", "dog", "fox") for y in ("brown", "over", "sparse")]


def calm(encoder):
    for module in encoder.modules():
        if isinstance(module, (nn.Dropout, nn.MultiheadAttention)):
            setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
    return encoder


def self_dot(x):
    """The mean over texts with any active dimension, by loops."""
    own = [sum(value**2 for value in row) for row in x.tolist()]
    return sum(own) / sum(value > 0 for value in own)


OPTIONS = [{}, {"activation": "log1p_relu"}, {"softcap": 30.0}, {"gate": True}]


@pytest.mark.parametrize("options", [*OPTIONS, {"idf_weights": True}], ids=str)
def test_first_batch_in_training_sets_the_scale_and_others_follow_it(options):
    encoder = calm(make(logit_scale="auto", **options))
    plain = calm(make(**options))
    batch, other = encoder.tokenize(TEXTS), encoder.tokenize(TWO_WORDS)
    with torch.no_grad():
        assert torch.equal(encoder(**batch), plain(**batch)), "evaluation measures nothing"
        assert encoder.logit_scale == encoder._settings()["logit_scale"] == "auto"
        encoder.train()
        assert self_dot(encoder(**batch, apply_idf=False)) == pytest.approx(64, rel=1e-3)
        x = encoder(**other)
        assert torch.equal(encoder.eval()(**other), x)
    assert encoder._settings()["logit_scale"] is None, "it is in the weights"
    factor = encoder.head.bias[0] / plain.head.bias[0]
    torch.testing.assert_close(encoder.head.bias, factor * plain.head.bias)
    assert encoder.head.weight is encoder.model.get_input_embeddings().weight


def test_texts_without_active_dimensions_do_not_count():
    hidden = torch.tensor([[[1.0, 2.0, 0.5]], [[-1.0, -1.0, -1.0]]])
    head = SpladeHead(torch.eye(3), logit_scale="auto")
    assert not head(hidden[1:]).any()
    assert head.awaits_scale  # still
    assert self_dot(head(hidden)) == pytest.approx(64, rel=1e-3)


def test_a_size_out_of_reach_keeps_the_scale_at_1_and_says_so():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(50, 8))
    head = SpladeHead(weight, logit_scale="auto", softcap=0.5).train()
    with pytest.warns(UserWarning, match="a dot product of 64 with themselves, got none"):
        found = head(states := torch.randn(2, 3, 8))
    torch.testing.assert_close(found, SpladeHead(weight, softcap=0.5)(states))


@pytest.mark.parametrize("kind", ["head", "encoder"])
def test_compiled_and_resumed_it_is_the_same(kind):
    if kind == "head":
        weights = nn.Parameter(torch.randn(50, 8)), nn.Parameter(torch.randn(50))
        module, data = SpladeHead(*weights, logit_scale="auto"), (torch.randn(4, 3, 8),)
    elif BOTH_WAYS:
        module = calm(make(logit_scale="auto")).train()
        data = tuple(module.tokenize(TEXTS).values())
    else:
        pytest.skip("Dynamo of PyTorch 2.6 cannot trace this older transformers")
    other, resumed = copy.deepcopy(module), copy.deepcopy(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(*data), other(*data))
    assert self_dot(other(*data)) == pytest.approx(64, rel=1e-3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    resumed.load_state_dict(other.state_dict())
    assert torch.equal(resumed(*data), other(*data)), "a loaded scale is not measured again"


def test_all_ranks_take_the_scale_of_the_first():
    torch.manual_seed(0)
    hidden = torch.randn(2, 4, 3, 8) * torch.tensor([1.0, 9.0])[:, None, None, None]
    heads = [SpladeHead(torch.eye(8), logit_scale="auto") for _ in range(3)]
    run_threads(2, lambda rank: heads[rank](hidden[rank]))
    heads[2](hidden[0])
    assert heads[0].measured_scale == heads[1].measured_scale == heads[2].measured_scale


def test_a_shifted_start_comes_before_it():
    """``calibrate`` reads in evaluation mode, logits without the scale."""
    encoder = calm(make(logit_scale="auto"))
    for _ in range(2):
        calibrate(encoder, TEXTS, 12, method="shift", verbose=False)
        x = encoder.encode(TEXTS)
        assert len(x.values()) / len(TEXTS) == pytest.approx(12, abs=0.2)
        encoder.train()(**encoder.tokenize(TEXTS))
    torch.manual_seed(0)
    head = SpladeHead(torch.randn(99, 8), nn.Parameter(torch.zeros(99)), logit_scale="auto")
    data = [(torch.randn(4, 5, 8), torch.ones(4, 5))]
    head(*data[0])
    calibrate(head, data, 12, method="shift", verbose=False)
    assert (head(*data[0]) > 0).sum() == 48


@pytest.mark.parametrize(("kind", "norm"), [("modernbert", "head.norm"), ("qwen3", "model.norm")])
def test_models_with_a_large_norm_learn_and_load_elsewhere(kind, norm, tmp_path):
    """The logits are 16 times larger than usual."""
    plain = make(kind)
    plain.model.get_submodule(norm).weight.data *= 16
    options = {"bidirectional": plain.bidirectional, "logit_scale": "auto"}
    encoder = SpladeEncoder(plain.model, plain.tokenizer, **options).train()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    queries = [text[::-1] for text in TWO_WORDS]
    losses = []
    for _ in range(100):
        x, y = (encoder(**encoder.tokenize(texts)) for texts in (queries, TWO_WORDS))
        losses.append(info_nce_loss(x, y, similarity="dot", temperature=1.0))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    chance = torch.tensor(len(queries)).log()
    assert losses[-1] < chance / 4, "9 texts are told apart"
    again, expected = reloaded(encoder.eval(), tmp_path), dense(encoder)
    torch.testing.assert_close(dense(again), expected)
    assert again.logit_scale != "auto"
    assert (again.logit_scale is None) == (kind != "qwen3"), "Qwen3 has no layer to fold it into"
    if kind == "modernbert":
        found = load_theirs(tmp_path).encode(TEXTS, convert_to_sparse_tensor=False)
        torch.testing.assert_close(found, expected)


def test_saved_before_it_was_measured_it_is_measured_later(tmp_path):
    again = calm(reloaded(make(logit_scale="auto"), tmp_path))
    assert again.logit_scale == "auto"
    assert self_dot(again.train()(**again.tokenize(TEXTS))) == pytest.approx(64, rel=1e-3)
    with pytest.raises(ValueError, match="expected no `softcap` and `logit_scale`"):
        make(expansion=False, logit_scale="auto")
