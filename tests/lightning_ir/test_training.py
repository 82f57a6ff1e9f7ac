"""Trained in lightning-ir's own module and trainer, and compared with a loop in plain torch."""

import pytest
import torch
import torch.nn.functional as nnf
from lightning import Callback

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

pytestmark = [  # what Lightning says of short runs, and of PyTorch about itself
    pytest.mark.filterwarnings(
        "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    ),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]
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
        Regularization(MinActivationLoss(top_k=3, threshold=1.0), 0.1, 0.2),
    ]


def plain_losses(queries, documents, targets):
    """The same by PyTorch's own functions, each without its outer weight."""
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

    scores = torch.einsum("qv,qdv->qd", queries, documents)
    kl = nnf.kl_div(
        (scores / 2).log_softmax(1), (targets / 2).softmax(1), reduction="batchmean"
    )
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
        return torch.relu(1.0 - x.topk(3, 1).values.mean(1)).mean()

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


def plain_loop(folder, made, *, lr=0.02, accumulate=1, context=None, losses=plain_losses):
    model = Plain(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    values = []
    for step, batch in enumerate(made):
        if context is None:
            total = sum(losses(*model(batch), batch.targets))
        else:
            with context():
                queries, documents = model(batch)
            total = sum(losses(queries.float(), documents.float(), batch.targets))
        (total / accumulate).backward()
        values.append(total.item())
        if step % accumulate == accumulate - 1:
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
        torch.testing.assert_close(value, expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


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
    assert all((value != start[name]).any() for name, value in ours.named_parameters())
