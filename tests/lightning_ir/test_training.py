"""Trained in lightning-ir's own module and trainer, and compared with a loop in plain torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as nnf
from lightning import Callback
from lightning_ir import BiEncoderModule, CrossEncoderModule
from lightning_ir.models import ColConfig, MonoConfig
from lightning_ir.schedulers import GenericConstantSchedulerWithQuadraticWarmup

from sparse_losses import (
    DistillationLoss,
    FlopsLoss,
    IdfFlopsLoss,
    InfoNCELoss,
    LanguagePenaltyLoss,
    MarginMSELoss,
    MinActivationLoss,
    NPairLoss,
    TripletMarginLoss,
)
from sparse_losses.integrations.lightning_ir import Contrastive, Distillation, Regularization
from tests.lightning_ir.tiny import (
    Plain,
    V,
    batches,
    copies,
    joined,
    loader,
    module,
    trainer,
)

PENALTY = torch.linspace(0.0, 2.0, V)


def everything():
    """Every loss that fits, with lightning-ir's weights."""
    return [
        Contrastive(InfoNCELoss(temperature=1.0, similarity="dot"), shared_negatives=True),
        (Contrastive(TripletMarginLoss(margin=0.4)), 0.5),
        (Contrastive(NPairLoss()), 0.25),
        (Distillation(DistillationLoss(temperature=2.0, alpha_kl=1.0, alpha_mse=0.5)), 0.3),
        (Distillation(MarginMSELoss()), 0.02),
        Regularization(FlopsLoss(), query_weight=0.03, doc_weight=0.02),
        (Regularization(IdfFlopsLoss(PENALTY, beta=0.3), 0.01, 0.02), 0.5),
        Regularization(LanguagePenaltyLoss(PENALTY), query_weight=0.0, doc_weight=0.01),
        Regularization(MinActivationLoss(top_k=3, threshold=4.0), 0.1, 0.2),
    ]


def plain_losses(queries, documents, targets, scores=None):
    """The same by PyTorch's own functions."""
    if scores is None:
        scores = torch.einsum("qv,qdv->qd", queries, documents)
    rows = torch.arange(len(queries))
    right = targets.argmax(1)
    positive = documents[rows, right]
    others = torch.ones_like(targets, dtype=torch.bool)
    others[rows, right] = False
    negatives = documents[others].unflatten(0, (len(queries), -1))
    candidates = torch.cat([positive, negatives.flatten(0, 1)])
    info_nce = nnf.cross_entropy(queries @ candidates.T, rows)

    def cosine(one, other):
        return nnf.cosine_similarity(one, other, dim=-1)

    gap = cosine(queries[:, None], negatives) - cosine(queries, positive)[:, None]
    triplet = torch.relu(0.4 + gap).mean()
    own = torch.cat([positive[:, None], negatives], 1)
    n_pair = nnf.cross_entropy(torch.einsum("qv,qdv->qd", queries, own), torch.zeros_like(right))

    kl = nnf.kl_div((scores / 2).log_softmax(1), (targets / 2).softmax(1), reduction="batchmean")
    z = [(x - x.mean()) / x.std() for x in (scores, targets)]
    distillation = 4 * kl + 0.5 * (z[0] - z[1]).square().mean()
    margins = [
        ((scores[q, i] - scores[q, j]) - (targets[q, i] - targets[q, j])) ** 2
        for q in range(len(queries))
        for i in range(targets.shape[1])
        for j in range(targets.shape[1])
        if targets[q, i] > targets[q, j]
    ]
    every = documents.flatten(0, 1)

    def idf(x):
        return (PENALTY * (x.mean(0) + 0.3 * x.mean(0) ** 2)).sum()

    def minimum(x):
        return torch.relu(4.0 - x.topk(3, 1).values.mean(1)).mean()

    return [
        info_nce,
        0.5 * triplet,
        0.25 * n_pair,
        0.3 * distillation,
        0.02 * torch.stack(margins).mean(),
        0.03 * (queries.mean(0) ** 2).sum() + 0.02 * (every.mean(0) ** 2).sum(),
        0.5 * (0.01 * idf(queries) + 0.02 * idf(every)),
        0.01 * (every @ PENALTY).mean(),
        0.1 * minimum(queries) + 0.2 * minimum(every),
    ]


def plain_loop(folder, made, *, bf16=False, losses=plain_losses):
    model = Plain(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    values = []
    for batch in made:
        with torch.autocast("cpu", enabled=bf16):
            queries, documents = model(batch)
            scores = torch.einsum("qv,qdv->qd", queries, documents)
        total = sum(losses(queries.float(), documents.float(), batch.targets, scores.float()))
        total.backward()
        values.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return model.weights(), values


class Values(Callback):
    """The loss of every batch."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.values.append(outputs["loss"].item())


def assert_same(made, expected, **tolerance):
    found = {name: value.detach() for name, value in made.named_parameters()}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


@pytest.mark.works_with("lightning-ir", "fp32")
def test_every_loss_that_fits_trains_as_in_a_plain_loop(backbone, tmp_path):
    made = batches(1) * 20
    ours = module(backbone, everything())
    start = {name: value.detach().clone() for name, value in ours.named_parameters()}
    seen = Values()
    trainer(tmp_path, 20, callbacks=[seen]).fit(ours, loader(made))
    expected, values = plain_loop(backbone, made)
    torch.testing.assert_close(seen.values, values, rtol=1e-3, atol=1e-4)
    assert_same(ours, expected, rtol=1e-3, atol=1e-4)
    assert values[-1] < 0.8 * values[0]
    queries, documents = Plain(backbone)(made[0])
    assert all(term > 0 for term in plain_losses(queries, documents, made[0].targets))
    assert all((value != start[name]).any() for name, value in ours.named_parameters())


@pytest.mark.works_with("lightning-ir", "bf16")
def test_under_autocast_as_in_a_plain_loop(backbone, tmp_path):
    """To the digits of a single precision loss at first; the model's own rounding then adds up."""
    made = batches(1) * 20
    seen = Values()
    one = module(backbone, everything())
    trainer(tmp_path, 1, precision="bf16-mixed").fit(one, loader(made))
    expected, _ = plain_loop(backbone, made[:1], bf16=True)
    assert_same(one, expected, rtol=1e-2, atol=1e-3)

    ours = module(backbone, everything())
    trainer(tmp_path, 20, precision="bf16-mixed", callbacks=[seen]).fit(ours, loader(made))
    _, values = plain_loop(backbone, made, bf16=True)
    assert seen.values[0] == pytest.approx(values[0], rel=1e-6)
    assert seen.values[0] != pytest.approx(plain_loop(backbone, made[:1])[1][0], rel=1e-3)
    assert seen.values[-1] < 0.8 * seen.values[0]
    assert seen.values[-1] == pytest.approx(values[-1], rel=0.1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's
@pytest.mark.works_with("lightning-ir", "compile")
def test_compiled_as_in_a_plain_loop(backbone, tmp_path):
    """The model's forward pass and each loss; a whole `BiEncoderModule` cannot be compiled."""
    made = batches(3)
    ours = module(backbone, everything())
    start = {name: value.detach().clone() for name, value in ours.named_parameters()}
    ours.model.forward = torch.compile(ours.model.forward, backend="aot_eager")
    for adapter, _ in ours.loss_functions:
        adapter.loss.compile(backend="aot_eager")
    trainer(tmp_path, 3).fit(ours, loader(made))
    expected, _ = plain_loop(backbone, made)
    assert_same(ours, expected, rtol=1e-3, atol=1e-5)
    assert all((value != start[name]).any() for name, value in ours.named_parameters())


def row_by_row():
    """Losses that are means over the queries, whatever else is in the batch."""
    info_nce = InfoNCELoss(temperature=1.0, similarity="dot", in_batch=False)
    kl = DistillationLoss(temperature=2.0, alpha_kl=1.0, alpha_mse=0.0)
    return [
        Contrastive(info_nce),
        Distillation(kl),
        (Distillation(MarginMSELoss()), 0.02),
        Regularization(LanguagePenaltyLoss(PENALTY), 0.01, 0.01),
    ]


@pytest.mark.works_with("lightning-ir", "accumulation")
def test_two_accumulated_batches_update_as_one_of_both(backbone, tmp_path):
    made = batches(4)
    two = module(backbone, row_by_row())
    trainer(tmp_path, 2, accumulate_grad_batches=2).fit(two, loader(made))
    one = module(backbone, row_by_row())
    trainer(tmp_path, 2).fit(one, loader([joined(made[:2]), joined(made[2:])]))
    assert_same(two, {n: p.detach() for n, p in one.named_parameters()}, rtol=1e-3, atol=1e-5)


class Weights(Callback):
    """The query weight of every step, as the loss saw it."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(module.loss_functions[1][0].query_weight)


def scheduled(callbacks=()):
    """Their scheduler sets our weight by its path."""
    losses = [
        Contrastive(InfoNCELoss(temperature=1.0, similarity="dot")),
        (Regularization(FlopsLoss(), query_weight=0.8, doc_weight=0.1), 1.0),
    ]
    warmup = GenericConstantSchedulerWithQuadraticWarmup(
        num_warmup_steps=4, keys=["loss_functions.1.0.query_weight"]
    )
    return losses, [warmup, *callbacks]


def test_their_schedulers_set_our_weights(backbone, tmp_path):
    """The step that is about to be taken counts, from 1."""
    weights = Weights()
    losses, callbacks = scheduled([weights])
    ours = module(backbone, losses)
    made = batches(6)
    trainer(tmp_path, 6, callbacks=callbacks).fit(ours, loader(made))
    assert weights.seen == pytest.approx([0.05, 0.2, 0.45, 0.8, 0.8, 0.8])
    assert losses[1][0].query_weight == 0.8, "restored by them at the end"

    def plain(queries, documents, targets, scores):
        candidates = documents[torch.arange(len(queries)), targets.argmax(1)]
        wrong = torch.ones_like(targets, dtype=torch.bool)
        wrong[torch.arange(len(queries)), targets.argmax(1)] = False
        own = torch.einsum("qv,qdv->qd", queries, documents)[wrong].unflatten(0, (len(queries), -1))
        logits = torch.cat([queries @ candidates.T, own], 1)
        weight = 0.8 * min(1, (len(steps) + 1) / 4) ** 2
        steps.append(weight)
        flops = [(x.mean(0) ** 2).sum() for x in (queries, documents.flatten(0, 1))]
        cross_entropy = nnf.cross_entropy(logits, torch.arange(len(queries)))
        return [cross_entropy, weight * flops[0], 0.1 * flops[1]]

    steps = []
    expected, _ = plain_loop(backbone, made, losses=plain)
    assert_same(ours, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.works_with("lightning-ir", "resume")
def test_a_resumed_run_is_the_run_that_was_not_stopped(backbone, tmp_path):
    made = batches(4)

    def run(epochs, **options):
        losses, callbacks = scheduled([seen := Weights()])
        ours = module(backbone, [*losses, (Distillation(MarginMSELoss()), 0.01)])
        ran = trainer(tmp_path, -1, max_epochs=epochs, callbacks=callbacks)
        ran.fit(ours, loader(made), **options)
        return ours, ran, seen.seen

    through, _, weights = run(2)
    _, stopped, before = run(1)
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _, after = run(2, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert before + after == weights
    for name, value in through.named_parameters():
        torch.testing.assert_close(dict(resumed.named_parameters())[name], value, rtol=0, atol=0)


class Documents(Regularization):
    """Its name is what lightning-ir logs."""


@pytest.mark.parametrize("kind", [Regularization, Documents], ids=["one name", "a subclass"])
def test_the_log_tells_losses_of_a_subclass_apart(backbone, tmp_path, kind):
    losses = [
        Contrastive(InfoNCELoss(temperature=1.0, similarity="dot")),
        Regularization(FlopsLoss(), 0.1, 0.0),
        kind(FlopsLoss(), 0.0, 0.1),
    ]
    ran = trainer(tmp_path, 1)
    ran.fit(module(backbone, losses), loader(batches(1)))
    logged = ran.logged_metrics
    names = {type(loss).__name__ for loss in losses}
    missing = logged["loss"] - sum(logged[name] for name in names)
    assert all(logged[name] > 0 for name in names)
    assert (abs(missing) < 1e-5) == (kind is Documents)


def across_queries(gather: bool = False):
    """Losses of all queries of the batch together."""
    info_nce = InfoNCELoss(temperature=1.0, similarity="dot", gather=gather)
    kl = DistillationLoss(temperature=2.0, alpha_kl=1.0, alpha_mse=0.5, gather=gather)
    return [
        Contrastive(info_nce, shared_negatives=True),
        Distillation(kl),
        Regularization(FlopsLoss(gather=gather), 0.03, 0.02),
        Regularization(IdfFlopsLoss(PENALTY, gather=gather), 0.01, 0.02),
    ]


@pytest.mark.works_with("lightning-ir", "devices")
def test_two_processes_update_as_one_with_both_batches(backbone, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).with_name("two_processes.py")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(script), str(backbone), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    made = batches(6)
    both = [joined(made[i : i + 2]) for i in range(0, 6, 2)]
    for kind, losses in (("rows", row_by_row()), ("gather", across_queries())):
        one = module(backbone, losses)
        trainer(tmp_path, 3).fit(one, loader(both))
        for rank in range(2):
            found = torch.load(tmp_path / f"{kind}-{rank}.pt")
            for name, value in one.named_parameters():
                torch.testing.assert_close(found[name], value.detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("theirs", "config"),
    [
        (BiEncoderModule, ColConfig(query_length=8, doc_length=8, embedding_dim=8)),
        (CrossEncoderModule, MonoConfig(query_length=8, doc_length=8)),
    ],
    ids=["several vectors a text", "cross-encoder"],
)
def test_models_without_one_vector_a_text_are_distilled(backbone, tmp_path, theirs, config):
    made = batches(1)
    seen = Values()
    model = theirs(str(backbone), config, loss_functions=[Distillation(DistillationLoss())])
    output = model.forward(copies(made)[0])
    expected = DistillationLoss()(output.scores.view_as(made[0].targets), made[0].targets)
    model.set_optimizer(torch.optim.SGD, lr=0.05)
    trainer(tmp_path, 10, callbacks=[seen]).fit(model, loader(made * 10))
    assert seen.values[0] == pytest.approx(expected.item(), rel=1e-5)
    assert seen.values[-1] < 0.8 * seen.values[0]
