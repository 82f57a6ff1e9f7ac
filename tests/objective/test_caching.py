"""Gradient caching gives the plain gradient, of every encoder and loss."""

import functools
import weakref
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparse_losses import (
    FlopsLoss,
    InfoNCELoss,
    NWSLoss,
    SparsityController,
    SpladeBatch,
    SpladeObjective,
    Texts,
)
from sparse_losses.functional import cached_backward, info_nce_loss
from tests.objective.cached import (
    OBJECTIVE,
    Encoder,
    V,
    close,
    full_objective,
    gradients,
    plain,
    tokens,
    twins,
)

X = torch.ones(5, 4)


@given(
    rows=st.integers(0, 9),
    size=st.integers(1, 12),
    dropout=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_value_gradient_and_generator_are_those_of_a_plain_pass(rows, size, dropout, seed):
    torch.manual_seed(seed)
    (ours,), (theirs,) = twins(Encoder(dropout).double())
    columns = [tokens(rows)["input_ids"] for _ in range(2)]

    def loss(anchor, positive):  # draws too
        return InfoNCELoss()(anchor, positive) * (1 + torch.rand(()))

    torch.manual_seed(seed)
    value = cached_backward(ours, columns, loss, mini_batch_size=size)
    drawn = torch.rand(3)
    torch.manual_seed(seed)
    expected = plain(theirs, columns, loss, size)
    assert torch.equal(drawn, torch.rand(3))
    assert not value.requires_grad
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    if rows > 1:  # else InfoNCE is 0
        close(gradients(ours), gradients(theirs))


@pytest.mark.works_with("PyTorch", "cached", "fp32")
def test_an_objective_of_all_regularisers_with_triplets():
    (ours,), (theirs,) = twins(Encoder(texts=True).double())
    columns = [tokens(8), tokens(8), tokens(8)]
    objective = full_objective()

    def loss(*texts):
        return objective(SpladeBatch(*texts))

    total, terms = cached_backward(ours, columns, loss, mini_batch_size=3)
    expected = plain(theirs, columns, loss)
    assert set(terms) == set(OBJECTIVE)
    assert not any(value.requires_grad for value in (total, *terms.values()))
    torch.testing.assert_close(total, expected.total.detach())
    torch.testing.assert_close(terms, expected.terms)
    close(gradients(ours), gradients(theirs))


NWS = NWSLoss(torch.eye(4))
LABELS = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]] * 3)[:7]


@pytest.mark.parametrize(
    ("columns", "start", "loss"),
    [
        (2, torch.tensor(-2.0), lambda a, b, p: info_nce_loss(a, b, temperature=p.exp())),
        (1, torch.linspace(-1, 1, 4 * V).view(4, V), lambda x, p: NWS(x, LABELS, p)),
    ],
    ids=["temperature", "prototypes"],
)
def test_parameters_of_the_loss_get_their_gradients(columns, start, loss):
    held = nn.ParameterList([nn.Parameter(start.double())])
    (ours, our_p), (theirs, their_p) = twins(Encoder().double(), held)
    columns = [tokens(7)["input_ids"] for _ in range(columns)]
    cached_backward(ours, columns, lambda *x: loss(*x, our_p[0]), mini_batch_size=2)
    plain(theirs, columns, lambda *x: loss(*x, their_p[0]))
    close(gradients(ours, our_p), gradients(theirs, their_p))


def test_mini_batches_padded_to_their_own_lengths():
    ours, theirs = twins(Encoder(texts=True).double())
    lists = [[tokens(3, width) for width in (2, 5, 4)] for _ in range(2)]
    objective = SpladeObjective({"info_nce": 1.0, "query_self_reconstruction": 1.0})

    def loss(anchor, positive):
        assert anchor.input_ids.shape == (9, 5)
        assert anchor.attention_mask[:3, 2:].sum() == 0
        return objective(SpladeBatch(anchor, positive))

    total, _ = cached_backward(ours[0], lists, loss)
    texts = [[theirs[0](**x) for x in column] for column in lists]
    joined = [functools.reduce(Texts.join, column) for column in texts]
    expected = loss(*joined)
    expected.total.backward()
    torch.testing.assert_close(total, expected.total.detach())
    close(gradients(ours[0]), gradients(theirs[0]))


def test_outputs_in_dicts_and_values_that_are_no_tensors():
    (ours,), (theirs,) = twins(nn.Linear(4, V).double())
    x = torch.randn(5, 4).double()

    def encode(x, scale):
        return {"embedding": scale * ours(x), "unused": None}

    column = UserDict(x=x, scale=2.0)  # as a tokenizer's output is
    cached_backward(encode, [column], lambda r: r["embedding"].square().mean(), mini_batch_size=2)
    (2.0 * theirs(x)).square().mean().backward()
    close(gradients(ours), gradients(theirs))


def test_a_column_that_the_loss_ignores_is_not_encoded_again():
    called, layer = [], nn.Linear(4, V)

    def encode(name, x):
        called.append((name, torch.is_grad_enabled()))
        return layer(x)

    encoders = [functools.partial(encode, name) for name in "ab"]
    columns = [torch.randn(5, 4), torch.randn(7, 4)]
    cached_backward(encoders, columns, lambda a, b: FlopsLoss()(a), mini_batch_size=3)
    assert called == [("a", False)] * 2 + [("b", False)] * 3 + [("a", True)] * 2
    assert not columns[0].requires_grad


def test_representations_are_freed_before_the_second_pass():
    gone, references, layer = [], [], nn.Linear(4, V)

    def loss(*representations):
        references.extend(weakref.ref(x) for x in representations)
        return sum(x.square().sum() for x in representations)

    def encode(x):
        if torch.is_grad_enabled():
            gone.append([reference() is None for reference in references])
        return layer(x)

    cached_backward(encode, [torch.randn(4, 4), torch.randn(4, 4)], loss, mini_batch_size=2)
    assert gone == [[True, True]] * 4


@pytest.mark.works_with("PyTorch", "cached", "accumulation")
def test_gradients_add_up_over_calls_and_with_what_was_there():
    (ours,), (theirs,) = twins(Encoder().double())
    batches = [[tokens(5)["input_ids"] for _ in range(2)] for _ in range(3)]
    for columns in batches:
        value = cached_backward(
            ours,
            columns,
            InfoNCELoss(),
            mini_batch_size=2,
            backward=lambda total: (total / 3).backward(),
        )
        expected = plain(theirs, columns, lambda a, b: InfoNCELoss()(a, b) / 3)
        torch.testing.assert_close(value, 3 * expected.detach())
    close(gradients(ours), gradients(theirs))


@pytest.mark.works_with("PyTorch", "cached", "bf16")
def test_autocast_around_the_call():
    (ours,), (theirs,) = twins(Encoder(0.3))
    columns = [tokens(12)["input_ids"] for _ in range(2)]
    autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    torch.manual_seed(5)
    with autocast():
        value = cached_backward(ours, columns, InfoNCELoss(), mini_batch_size=5)
    torch.manual_seed(5)
    expected = plain(theirs, columns, InfoNCELoss(), 5, autocast)
    assert value == expected
    # Plain, the mini-batches' gradients of the cast weights are added in bf16; here in fp32.
    close(gradients(ours), gradients(theirs), 2e-2)


@pytest.mark.cpu_only
def test_the_backward_pass_is_outside_of_autocast():
    layer = nn.Linear(4, V)
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    def encode(x):
        assert torch.is_autocast_enabled("cpu")
        return Spy.apply(layer(x))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        cached_backward(
            encode, [torch.randn(4, 4)], lambda x: Spy.apply(x).sum(), mini_batch_size=2
        )
    assert seen == [False] * 3


@pytest.mark.works_with("PyTorch", "cached", "fp16")
def test_a_scaler_scales_the_gradient_and_leaves_the_value():
    (ours,), (theirs,) = twins(Encoder())
    columns = [tokens(6)["input_ids"] for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, theirs)]
    with torch.autocast("cpu", dtype=torch.float16):
        value = cached_backward(
            ours,
            columns,
            InfoNCELoss(),
            mini_batch_size=4,
            backward=lambda total: scaler.scale(total).backward(),
        )
    expected = plain(theirs, columns, InfoNCELoss(), 4, lambda: torch.autocast("cpu", torch.half))
    assert value == expected
    scaler.unscale_(optimizers[0])
    close(gradients(ours), gradients(theirs), 1e-2)
    scaler.step(optimizers[0])
    optimizers[1].step()
    torch.testing.assert_close(ours.layer.weight, theirs.layer.weight, atol=1e-3, rtol=1e-2)


@pytest.mark.works_with("PyTorch", "cached", "compile")
def test_a_compiled_encoder_with_dropout():
    (ours,), (theirs,) = twins(Encoder(0.5))
    columns = [tokens(7)["input_ids"] for _ in range(2)]
    compiled = [torch.compile(module, backend="aot_eager") for module in (ours, theirs)]
    torch.manual_seed(3)
    value = cached_backward(compiled[0], columns, InfoNCELoss(), mini_batch_size=4)
    torch.manual_seed(3)
    expected = plain(compiled[1], columns, InfoNCELoss(), 4)
    torch.testing.assert_close(value, expected.detach())
    close(gradients(ours), gradients(theirs), 1e-5)


def test_an_encoder_with_gradient_checkpointing_and_dropout():
    (ours,), (theirs,) = twins(nn.Sequential(nn.Linear(4, V), nn.Dropout(0.5)).double())
    columns = [torch.randn(7, 4).double() for _ in range(2)]

    def encode(x):
        return checkpoint(ours, x, use_reentrant=False)

    torch.manual_seed(3)
    cached_backward(encode, columns, InfoNCELoss(), mini_batch_size=3)
    torch.manual_seed(3)
    plain(theirs, columns, InfoNCELoss(), 3)
    close(gradients(ours), gradients(theirs))


def test_generators_of_an_accelerator_are_replayed(monkeypatch):
    """The accelerator is simulated, because most machines have none."""
    states, started = [10, 20], [True]  # of a device with two generators
    module = SimpleNamespace(
        is_initialized=lambda: started[0],
        get_rng_state_all=lambda: list(states),
        set_rng_state_all=lambda new: states.__setitem__(slice(None), new),
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    layer, drawn = nn.Linear(4, V), []

    def encode(x):
        drawn.append(states[1])
        states[1] += 1
        return layer(x)

    cached_backward(encode, [X, X], lambda a, b: (a * b).sum(), mini_batch_size=3)
    assert drawn == [20, 21, 22, 23] * 2
    assert states == [10, 24]
    started[0] = False
    cached_backward(encode, [X], FlopsLoss(), mini_batch_size=9)
    assert drawn[-2:] == [24, 25]


def test_a_controller_sees_the_whole_batch_once():
    encoder = Encoder(texts=True)
    objective = SpladeObjective({"info_nce": 1.0, "document_flops": 0.01})
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    controller = SparsityController(objective, "document_flops", target_active=5)
    controller.attach(optimizer)
    seen = []
    objective.register_forward_hook(lambda module, args, out: seen.append(len(args[0].positive[0])))
    columns = [tokens(8), tokens(8)]
    cached_backward(encoder, columns, lambda *x: objective(SpladeBatch(*x)), mini_batch_size=3)
    optimizer.step()
    assert seen == [8]
    assert controller.report()["step"] == 1


def call(encoder=None, columns=(X,), loss=FlopsLoss, **settings):
    columns = list(columns) if isinstance(columns, tuple) else columns
    settings = {"mini_batch_size": 2} | settings
    loss = loss() if loss is FlopsLoss else loss
    return cached_backward(encoder or nn.Linear(4, V), columns, loss, **settings)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"columns": X}, TypeError, r"expected `columns` to be a list .* got a Tensor"),
        ({"columns": [["a text"]]}, TypeError, r"column 0 to be a tensor, .* got str"),
        (
            {"columns": [X, {"input_ids": X, "mask": X[:4]}]},
            ValueError,
            r"in all of column 1, got input_ids of shape \[5, 4\], mask of shape \[4, 4\]",
        ),
        ({"columns": [{"a": [1]}]}, ValueError, r"one number of rows .* got no tensor"),
        ({"mini_batch_size": None}, ValueError, r"expected `mini_batch_size`, or a list"),
        ({"encoder": [nn.Identity()] * 2}, ValueError, r"one for each of 1 columns, got 2"),
        ({"encoder": lambda x: x[:1]}, ValueError, r"each of 2 rows of column 0, .* \[1, 4\]"),
        ({"encoder": lambda x: (x, "?")}, TypeError, r"tensors and None for column 0, got str"),
        (
            {"encoder": lambda x: (x, None) if len(x) > 1 else (x, x)},
            ValueError,
            r"a tensor for all mini-batches, got None too",
        ),
        ({"loss": lambda x: x}, TypeError, r"one number .* got tensor"),
        ({"loss": lambda x: x.detach().sum()}, TypeError, r"one number with a gradient"),
        ({"loss": lambda x: {"total": x.sum()}}, TypeError, r"an ObjectiveOutput, got {"),
        ({"backward": lambda total: None}, ValueError, r"depend on a representation"),
        ({"encoder": nn.Linear(4, V).requires_grad_(False)}, ValueError, r"parameters frozen\?"),
    ],
)
def test_wrong_inputs_are_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        call(**arguments)
