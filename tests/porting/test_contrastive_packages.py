"""docs/porting.md, from pytorch-metric-learning and info-nce-pytorch, where they are installed."""

import numpy as np
import pytest
import torch

from sparse_losses import InfoNCELoss
from tests.porting.compare import N, Q, V, activations, assert_equal, assert_follows

T = 0.2


@pytest.fixture
def columns():
    return [activations(Q, V, seed=seed) for seed in range(2)]


@pytest.fixture
def metric_learning():
    # Named here, not at the top: without it the other tests of the file still run.
    return pytest.importorskip("pytorch_metric_learning.losses")


@pytest.fixture
def info_nce_package():
    return pytest.importorskip("info_nce")


def test_ntxent_of_pairs(metric_learning, columns):
    """With `ref_emb`; labels that are one tensor mean to them that the rows are the same."""
    labels = torch.arange(Q)
    theirs = metric_learning.NTXentLoss(temperature=T)
    value = theirs(columns[0], labels, ref_emb=columns[1], ref_labels=labels.clone())
    assert_equal(value, InfoNCELoss(temperature=T)(*columns), *columns)


def both_views(columns):
    """SimCLR's call: every row of either side is an anchor; equal ids hide a row from itself."""
    ids = torch.arange(Q).repeat(2)
    loss = InfoNCELoss(temperature=T)
    return loss(torch.cat(columns), torch.cat(columns[::-1]), positive_ids=ids)


def test_ntxent_of_both_views(metric_learning, columns):
    labels = torch.arange(Q).repeat(2)
    theirs = metric_learning.NTXentLoss(temperature=T)(torch.cat(columns), labels)
    assert_equal(theirs, both_views(columns), *columns)


def test_simclr_has_the_own_side_as_negatives(columns):
    """Over all rows but the own, of both sides, in double precision."""

    def formula(q, p):
        x = np.concatenate([q, p])
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        terms = np.exp(x @ x.T / T)
        np.fill_diagonal(terms, 0.0)
        right = terms[np.arange(2 * Q), (np.arange(2 * Q) + Q) % (2 * Q)]
        return -np.log(right / terms.sum(1)).mean()

    assert_follows(formula, both_views(columns), *columns)


def test_supcon_of_labels(metric_learning, columns):
    """Every denominator holds all candidates, in both."""
    labels = torch.tensor([0, 1, 0, 2])
    theirs = metric_learning.SupConLoss(temperature=T)
    value = theirs(columns[0], labels, ref_emb=columns[1], ref_labels=labels.clone())
    same = labels[:, None] == labels
    assert_equal(value, InfoNCELoss(temperature=T)(*columns, positive_mask=same), *columns)


def test_info_nce_of_the_batch(info_nce_package, columns):
    theirs = info_nce_package.InfoNCE(temperature=T)
    assert_equal(theirs(*columns), InfoNCELoss(temperature=T)(*columns), *columns)


@pytest.mark.parametrize(("mode", "shape"), [("unpaired", (N, V)), ("paired", (Q, N, V))])
def test_info_nce_of_explicit_negatives(info_nce_package, columns, mode, shape):
    """Then the other rows' positives are no candidates."""
    negatives = activations(*shape, seed=7)
    theirs = info_nce_package.InfoNCE(temperature=T, negative_mode=mode)
    ours = InfoNCELoss(temperature=T, in_batch=False)
    assert_equal(theirs(*columns, negatives), ours(*columns, negatives), *columns, negatives)
