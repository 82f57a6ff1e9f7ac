"""docs/porting.md, from pytorch-metric-learning and info-nce-pytorch, where they are installed."""

import pytest
import torch

from sparse_losses import InfoNCELoss
from tests.porting.compare import N, Q, V, activations, assert_equal

T = 0.2
LOSS = InfoNCELoss(temperature=T)


@pytest.fixture
def columns():
    return [activations(Q, V, seed=seed) for seed in range(2)]


def both_views(q, p):
    """SimCLR's call: every row of either side is an anchor; equal ids hide a row from itself."""
    return LOSS(torch.cat([q, p]), torch.cat([p, q]), positive_ids=torch.arange(Q).repeat(2))


@pytest.mark.parametrize(
    ("loss", "labels"), [("NTXentLoss", range(Q)), ("SupConLoss", [0, 1, 0, 2])]
)
def test_pytorch_metric_learning(columns, loss, labels):
    """Labels that are one tensor mean to them that the rows are the same: hence a clone."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    labels, theirs = torch.tensor([*labels]), getattr(losses, loss)(temperature=T)
    value = theirs(columns[0], labels, ref_emb=columns[1], ref_labels=labels.clone())
    assert_equal(value, LOSS(*columns, positive_mask=labels[:, None] == labels), *columns)
    if loss == "NTXentLoss":
        value = theirs(torch.cat(columns), torch.arange(Q).repeat(2))
        assert_equal(value, both_views(*columns), *columns)


def test_simclr_has_the_own_side_as_negatives(columns):
    """Over all rows but the own, of both sides."""
    x = torch.nn.functional.normalize(torch.cat(columns))
    scores = (x @ x.T / T).masked_fill(torch.eye(2 * Q, dtype=torch.bool), -torch.inf)
    theirs = torch.nn.functional.cross_entropy(scores, torch.arange(2 * Q).roll(Q))
    assert_equal(theirs, both_views(*columns), *columns)


NEGATIVES = [(None, ()), ("unpaired", (N, V)), ("paired", (Q, N, V))]


@pytest.mark.parametrize(("mode", "shape"), NEGATIVES)
def test_info_nce_pytorch(columns, mode, shape):
    """With explicit negatives the other rows' positives are no candidates."""
    package = pytest.importorskip("info_nce")
    options = {"negative_mode": mode} if mode else {}
    tensors = [*columns, activations(*shape, seed=7)] if mode else columns
    ours = InfoNCELoss(temperature=T, in_batch=mode is None)
    assert_equal(package.InfoNCE(temperature=T, **options)(*tensors), ours(*tensors), *tensors)
