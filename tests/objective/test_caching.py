"""Gradient caching gives the plain gradient: of every encoder, loss and way to train."""

import copy
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


# The same gradient.


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
@pytest.mark.parametrize("size", [1, 3, 8, 100])
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


def test_dropout_replayed_differs_from_dropout_drawn_anew():
    """The comparison above could tell: without the replay the gradient is another."""
    (ours,), (theirs,) = twins(Encoder(0.5).double())
    columns = [tokens(8)["input_ids"] for _ in range(2)]

    class Unreplayed(nn.Module):
        def forward(self, ids):
            if torch.is_grad_enabled():
                torch.manual_seed(1234)
            return ours(ids)

    torch.manual_seed(0)
    cached_backward(Unreplayed(), columns, InfoNCELoss(), mini_batch_size=3)
    torch.manual_seed(0)
    plain(theirs, columns, InfoNCELoss(), 3)
    with pytest.raises(AssertionError):
        close(gradients(ours), gradients(theirs))


def test_parameters_of_the_loss_get_their_gradients():
    (ours, our_t), (theirs, their_t) = twins(
        Encoder().double(), nn.ParameterList([nn.Parameter(torch.tensor(-2.0).double())])
    )
    columns = [tokens(7)["input_ids"] for _ in range(2)]

    def loss(t):
        return lambda a, b: info_nce_loss(a, b, temperature=t[0].exp())

    cached_backward(ours, columns, loss(our_t), mini_batch_size=2)
    plain(theirs, columns, loss(their_t))
    close(gradients(ours, our_t), gradients(theirs, their_t))


def test_prototypes_of_nws_get_their_gradients():
    labels = (torch.rand(7, 4) > 0.5).long()
    similarity = torch.eye(4)
    prototypes = nn.ParameterList([nn.Parameter(torch.randn(4, V).double())])
    (ours, our_p), (theirs, their_p) = twins(Encoder().double(), prototypes)
    nws = NWSLoss(similarity)

    def loss(p):
        return lambda x: nws(x, labels, p[0])

    columns = [tokens(7)["input_ids"]]
    cached_backward(ours, columns, loss(our_p), mini_batch_size=3)
    plain(theirs, columns, loss(their_p))
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
    seen = []
    cached_backward(
        [nn.Identity(), layer],
        [x.clone().requires_grad_(), x],
        lambda a, b: seen.append(a.requires_grad) or (a.sum() * b.sum()),
        mini_batch_size=9,
    )
    assert seen == [True]
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


# Ways to train.


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
    compiled = [torch.compile(module) for module in (ours, theirs)]
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
    states, started = [10, 20], [True]  # of a device with two generators
    module = SimpleNamespace(
        is_initialized=lambda: started[0],
        get_rng_state_all=lambda: list(states),
        set_rng_state_all=lambda new: states.__setitem__(slice(None), new),
    )
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
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


@pytest.mark.works_with("accelerate", "cached", "accumulation", "fp32")
def test_accelerate_goes_backward():
    from accelerate import Accelerator

    (ours,), (theirs,) = twins(Encoder().double())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(ours, optimizer)
    batches = [[tokens(5)["input_ids"] for _ in range(2)] for _ in range(2)]
    for columns in batches:
        with accelerator.accumulate(wrapped):
            cached_backward(
                wrapped, columns, InfoNCELoss(), mini_batch_size=2, backward=accelerator.backward
            )
            optimizer.step()
        plain(theirs, columns, lambda a, b: InfoNCELoss()(a, b) / 2)
    close(gradients(ours), gradients(theirs))
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    torch.testing.assert_close(ours.layer.weight, theirs.layer.weight)


@pytest.mark.works_with("Lightning", "cached", "fp32")
@pytest.mark.filterwarnings("ignore")  # Lightning's, about workers and loggers
def test_lightning_goes_backward(tmp_path):
    import lightning

    (ours,), (theirs,) = twins(Encoder().double())
    batches = [[tokens(5)["input_ids"] for _ in range(2)] for _ in range(3)]

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.encoder, self.automatic_optimization = ours, False

        def training_step(self, columns, index):
            optimizer = self.optimizers()
            value = cached_backward(
                self.encoder,
                columns,
                InfoNCELoss(),
                mini_batch_size=2,
                backward=self.manual_backward,
            )
            optimizer.step()
            optimizer.zero_grad()
            self.log("loss", value)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for columns in batches:
        optimizer.zero_grad()
        value = plain(theirs, columns, InfoNCELoss())
        optimizer.step()
    torch.testing.assert_close(trainer.callback_metrics["loss"].double(), value.detach())
    close([p.detach() for p in ours.parameters()], [p.detach() for p in theirs.parameters()])


def test_training_falls_as_a_plain_run_does():
    (ours,), (theirs,) = twins(Encoder(0.1).double())
    columns = [tokens(16), tokens(16)]
    losses = []
    for module, step in ((ours, "cached"), (theirs, "plain")):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
        torch.manual_seed(1)
        history = []
        for _ in range(20):
            if step == "cached":
                value = cached_backward(module, columns, InfoNCELoss(), mini_batch_size=6)
            else:
                value = plain(module, columns, InfoNCELoss(), 6)
            history.append(value.item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(history)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][-1] < 0.7 * losses[0][0]
    close([p.detach() for p in ours.parameters()], [p.detach() for p in theirs.parameters()])


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
@pytest.mark.parametrize("expansion", [True, False])
def test_the_real_encoder_with_signed_logits(expansion):
    from tests.representation import tiny_models  # not in the processes below

    model, words = tiny_models.pair("bert", hidden_dropout_prob=0.2)
    ours = SpladeEncoder(model, words, expansion=expansion).train()
    theirs = copy.deepcopy(ours)
    queries, documents = (ours.tokenize(tiny_models.TEXTS[:2] * n) for n in (2, 2))
    objective = SpladeObjective(
        {"info_nce": 1.0, "document_flops": 0.1, "query_self_reconstruction": 0.5},
        special_token_ids=words.all_special_ids,
    )

    def loss(anchor, positive):
        return objective(
            SpladeBatch(
                Texts(anchor[0], **queries, logits=anchor[1]),
                Texts(positive[0], **documents, logits=positive[1]),
            )
        )

    torch.manual_seed(1)
    columns = [{**column, "return_logits": True} for column in (queries, documents)]
    total, terms = cached_backward(ours, columns, loss, mini_batch_size=3)
    torch.manual_seed(1)
    pooled = []
    for column in (queries, documents):
        parts = [
            theirs(*xs, return_logits=True)
            for xs in zip(*(x.split(3) for x in column.values()), strict=True)
        ]
        pooled.append(tuple(torch.cat(xs) for xs in zip(*parts, strict=True)))
    expected = loss(*pooled)
    expected.total.backward()
    assert set(terms) == {"info_nce", "document_flops", "query_self_reconstruction"}
    torch.testing.assert_close(total, expected.total.detach())
    close(gradients(ours), gradients(theirs), 1e-4)


# Errors.


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
        ({"columns": {"x": X}}, TypeError, r"expected `columns` to be a list .* got dict"),
        ({"columns": []}, TypeError, r"at least one column, got none"),
        ({"columns": [[]]}, ValueError, r"a mini-batch in column 0, got an empty list"),
        ({"columns": [["a text"]]}, TypeError, r"column 0 to be a tensor, .* got str"),
        ({"columns": ["a text"]}, TypeError, r"column 0 to be a tensor, .* got str"),
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
        ({"mini_batch_size": 2.0}, TypeError, r"`mini_batch_size` to be an integer, got float"),
        ({"encoder": [nn.Identity()] * 2}, ValueError, r"one for each of 1 columns, got 2"),
        ({"encoder": lambda x: x[:1]}, ValueError, r"each of 2 rows of column 0, .* \[1, 4\]"),
        ({"encoder": lambda x: x.sum()}, ValueError, r"each of 2 rows .* tensor of shape \[\]"),
        ({"encoder": lambda x: (x, "?")}, TypeError, r"tensors and None for column 0, got str"),
        (
            {"encoder": lambda x: x[:, : len(x)]},
            ValueError,
            r"one shape but for their rows .* \[2, 2\] and \[1, 1\]",
        ),
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
def test_errors_say_what_was_expected_and_what_came(arguments, error, message):
    with pytest.raises(error, match=message):
        call(**arguments)
