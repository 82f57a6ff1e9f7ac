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
    SpladeEncoder,
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
    rows=st.integers(1, 9),
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
    if rows > 1:  # of one row, InfoNCE is 0
        close(gradients(ours), gradients(theirs))


@pytest.mark.works_with("PyTorch", "cached", "fp32")
@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_objective_of_all_regularisers_with_triplets(size):
    (ours,), (theirs,) = twins(Encoder(texts=True).double())
    columns = [tokens(8), tokens(8), tokens(8)]
    objective = full_objective()

    def loss(*texts):
        return objective(SpladeBatch(*texts))

    total, terms = cached_backward(ours, columns, loss, mini_batch_size=size)
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


def test_each_column_may_have_its_encoder_and_columns_their_lengths():
    ours, theirs = twins(Encoder().double(), Encoder().double())
    columns = [tokens(6)["input_ids"], tokens(6)["input_ids"], tokens(11)["input_ids"]]
    cached_backward([ours[0], ours[1], ours[1]], columns, InfoNCELoss(), mini_batch_size=4)
    plain([theirs[0], theirs[1], theirs[1]], columns, InfoNCELoss())
    close(gradients(*ours), gradients(*theirs))


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


def test_one_row_and_no_row():
    for rows in (1, 0):
        (ours,), (theirs,) = twins(Encoder().double())
        columns = [tokens(rows)["input_ids"]]
        value = cached_backward(ours, columns, FlopsLoss(), mini_batch_size=4)
        assert value == plain(theirs, columns, FlopsLoss())
        for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
            torch.testing.assert_close(mine, other)


def test_outputs_in_dicts_and_values_that_are_no_tensors():
    (ours,), (theirs,) = twins(nn.Linear(4, V).double())
    x = torch.randn(5, 4).double()

    def encode(x, scale):
        return {"embedding": scale * ours(x), "unused": None}

    column = UserDict(x=x, scale=2.0)  # as a tokenizer's output is
    cached_backward(encode, [column], lambda r: r["embedding"].square().mean(), mini_batch_size=2)
    (2.0 * theirs(x)).square().mean().backward()
    close(gradients(ours), gradients(theirs))


def test_a_column_that_the_loss_ignores_is_not_encoded_twice():
    called = []
    ours, theirs = twins(Encoder().double(), Encoder().double())

    def counting(ids):
        called.append(len(ids))
        return ours[1](ids)

    columns = [tokens(4)["input_ids"], tokens(4)["input_ids"]]
    cached_backward([ours[0], counting], columns, lambda a, b: FlopsLoss()(a), mini_batch_size=2)
    plain(theirs[0], columns[:1], FlopsLoss())
    close(gradients(ours[0]), gradients(theirs[0]))
    assert called == [2, 2]
    assert gradients(ours[1]) == [None] * 3


def test_representations_are_encoded_without_a_graph_and_the_inputs_left_alone():
    layer, x = nn.Linear(4, V), torch.randn(5, 4)
    states = []

    def encode(x):
        states.append(torch.is_grad_enabled())
        return layer(x)

    cached_backward(encode, [x], FlopsLoss(), mini_batch_size=3)
    assert states == [False, False, True, True]
    assert not x.requires_grad


def test_gradients_are_freed_column_by_column():
    gone = []
    references = []
    layer = nn.Linear(4, V)

    def loss(*representations):
        for x in representations:
            references.append(weakref.ref(x))
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
    assert value.dtype == torch.float32
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
    before = ours.layer.weight.detach().clone()
    scaler.step(optimizers[0])
    scaler.update()
    assert (ours.layer.weight - before).norm() > 0
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_encoder_with_gradient_checkpointing_and_dropout(reentrant):
    (ours,), (theirs,) = twins(nn.Sequential(nn.Linear(4, V), nn.Dropout(0.5)).double())
    columns = [torch.randn(7, 4).double().requires_grad_(reentrant) for _ in range(2)]

    def encode(x):
        return checkpoint(ours, x, use_reentrant=reentrant)

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


def test_hooks_of_the_objective_see_the_whole_batch_once():
    encoder = Encoder(texts=True)
    objective = SpladeObjective({"info_nce": 1.0, "document_flops": 0.01})
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    controller = SparsityController(objective, "document_flops", target_active=5)
    controller.attach(optimizer)
    seen = []
    objective.register_forward_hook(lambda module, args, out: seen.append(len(args[0].positive[0])))

    def loss(anchor, positive):
        return objective(SpladeBatch(anchor, positive))

    for _ in range(3):
        cached_backward(encoder, [tokens(8), tokens(8)], loss, mini_batch_size=3)
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [8, 8, 8]
    assert controller.report()["step"] == 3


@pytest.mark.works_with("PyTorch", "cached", "fp32")
def test_the_real_encoder_with_signed_logits():
    from tests.representation import tiny_models  # not in the processes of tests/distributed

    model, words = tiny_models.pair("bert", hidden_dropout_prob=0.2)
    (ours,), (theirs,) = twins(SpladeEncoder(model, words).train())
    columns = [ours.tokenize(tiny_models.TEXTS[:2] * 2) for _ in range(2)]
    objective = SpladeObjective(
        {"info_nce": 1.0, "document_flops": 0.1, "query_self_reconstruction": 0.5},
        special_token_ids=words.all_special_ids,
    )

    def loss(*pairs):
        texts = [
            Texts(activations, **column, logits=logits)
            for (activations, logits), column in zip(pairs, columns, strict=True)
        ]
        return objective(SpladeBatch(*texts))

    torch.manual_seed(1)
    inputs = [{**column, "return_logits": True} for column in columns]
    total, terms = cached_backward(ours, inputs, loss, mini_batch_size=3)
    torch.manual_seed(1)
    pooled = []
    for column in columns:
        mini_batches = zip(*(x.split(3) for x in column.values()), strict=True)
        parts = [theirs(*xs, return_logits=True) for xs in mini_batches]
        pooled.append([torch.cat(xs) for xs in zip(*parts, strict=True)])
    expected = loss(*pooled)
    expected.total.backward()
    torch.testing.assert_close(total, expected.total.detach())
    torch.testing.assert_close(terms, expected.terms)
    close(gradients(ours), gradients(theirs), 1e-4)


def call(encoder=None, columns=None, loss=None, **settings):
    encoder = encoder or nn.Linear(4, V)
    columns = [torch.randn(5, 4)] if columns is None else columns
    return cached_backward(
        encoder, columns, loss or FlopsLoss(), **{"mini_batch_size": 2} | settings
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"columns": X}, TypeError, r"expected `columns` to be a list .* got Tensor"),
        ({"columns": []}, TypeError, r"at least one column, got none"),
        ({"columns": [["a text"]]}, TypeError, r"column 0 to be a tensor, .* got str"),
        (
            {"columns": [X, {"input_ids": X, "mask": X[:4]}]},
            ValueError,
            r"one number of rows in all of column 1, got input_ids of shape \[5, 4\], "
            r"mask of shape \[4, 4\]",
        ),
        ({"columns": [{"a": torch.tensor(1), "b": X}]}, ValueError, r"a of shape \[\], b of"),
        ({"columns": [torch.tensor(1.0)]}, ValueError, r"got a tensor of shape \[\]"),
        ({"columns": [{"a": [1]}]}, ValueError, r"one number of rows .* got no tensor"),
        ({"mini_batch_size": None}, ValueError, r"expected `mini_batch_size`, or a list"),
        ({"mini_batch_size": 0}, ValueError, r"`mini_batch_size` to be an integer >= 1, got 0"),
        ({"encoder": [nn.Identity()] * 2}, ValueError, r"one for each of 1 columns, got 2"),
        ({"encoder": lambda x: x[:1]}, ValueError, r"each of 2 rows of column 0, .* \[1, 4\]"),
        ({"encoder": lambda x: (x, "?")}, TypeError, r"tensors and None for column 0, got str"),
        (
            {"encoder": lambda x: (x, None) if len(x) > 1 else (x, x)},
            ValueError,
            r"same structure for all mini-batches of column 0",
        ),
        ({"loss": lambda x: x}, ValueError, r"one number .* got shape \[5, 24\]"),
        ({"loss": lambda x: x.detach().sum()}, ValueError, r"got one without a gradient"),
        ({"loss": lambda x: {"total": x.sum()}}, TypeError, r"an ObjectiveOutput, got dict"),
        ({"backward": lambda total: None}, ValueError, r"depend on a representation"),
        ({"encoder": nn.Linear(4, V).requires_grad_(False)}, ValueError, r"parameters frozen\?"),
        ({"encoder": torch.no_grad()(nn.Linear(4, V))}, ValueError, r"under torch.no_grad"),
    ],
)
def test_wrong_inputs_are_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        call(**arguments)
