"""docs/porting.md, from lightning-ir: its losses, called, and ours, on one input."""

import pytest
import torch
from lightning_ir import (
    ConstantMarginMSE,
    FLOPSRegularization,
    InBatchCrossEntropy,
    InfoNCE,
    KLDivergence,
    L1Regularization,
    LightningIROutput,
    SupervisedMarginMSE,
)
from lightning_ir.schedulers import (
    GenericConstantSchedulerWithLinearWarmup,
    GenericConstantSchedulerWithQuadraticWarmup,
)

from sparse_losses import (
    DistillationLoss,
    FlopsLoss,
    InfoNCELoss,
    LanguagePenaltyLoss,
    MarginMSELoss,
    Warmup,
)
from sparse_losses.functional import margin_mse_loss
from sparse_losses.integrations.lightning_ir import Contrastive, Distillation, Regularization
from tests.lightning_ir.test_adapters import DOT, D, Q, V, batch, output, vectors
from tests.porting.compare import assert_equal

TARGETS = torch.tensor([[0.5, 2.0, 1.0, 0.1], [3.0, 0.2, 0.1, 0.4], [0.3, 0.1, 0.2, 4.0]]).double()
FIRST = TARGETS.sort(descending=True).values  # lightning-ir's in-batch losses take the first


def in_batch(loss, queries, documents):
    """As their module computes an in-batch loss, on dot products."""
    out = output(queries, documents)
    positives, negatives = loss.get_ib_idcs(out, batch(FIRST))
    every = documents.flatten(0, 1)
    candidates = torch.cat([every[positives].view(Q, -1, V), every[negatives].view(Q, -1, V)], 1)
    scores = torch.einsum("qv,qcv->qc", queries, candidates)
    return loss.compute_loss(LightningIROutput(scores))


def test_flops():
    """The same weights, as activations are not negative: theirs takes their absolute values."""
    queries, documents = vectors(Q, V), vectors(Q, D, V)
    theirs = FLOPSRegularization(0.3, 0.1).compute_loss(output(queries, documents))
    ours = Regularization(FlopsLoss(), 0.3, 0.1).compute_loss(output(queries, documents))
    assert_equal(theirs, ours, queries, documents)


def test_l1():
    """A language penalty of 1 a token, where activations are not negative."""
    queries, documents = vectors(Q, V), vectors(Q, D, V)
    theirs = L1Regularization(0.3, 0.1).compute_loss(output(queries, documents))
    ours = Regularization(LanguagePenaltyLoss(torch.ones(V)), 0.3, 0.1)
    assert_equal(theirs, ours.compute_loss(output(queries, documents)), queries, documents)


def test_in_batch_cross_entropy_with_every_other_document():
    queries, documents = vectors(Q, V), vectors(Q, D, V)
    theirs = InBatchCrossEntropy("first", "all_and_non_first")
    ours = Contrastive(InfoNCELoss(**DOT), shared_negatives=True)
    value = ours.compute_loss(output(queries, documents), batch(FIRST))
    assert_equal(in_batch(theirs, queries, documents), value, queries, documents)


def test_in_batch_cross_entropy_with_the_other_queries_positives():
    queries, documents = vectors(Q, V), vectors(Q, D, V)
    theirs = InBatchCrossEntropy("first", "first")
    value = InfoNCELoss(**DOT)(queries, documents[:, 0])
    assert_equal(in_batch(theirs, queries, documents), value, queries, documents)


def test_info_nce_of_the_own_list():
    queries, documents = vectors(Q, V), vectors(Q, D, V)
    theirs = InfoNCE().compute_loss(output(queries, documents), batch(TARGETS))
    ours = Contrastive(InfoNCELoss(**DOT, in_batch=False))
    value = ours.compute_loss(output(queries, documents), batch(TARGETS))
    assert_equal(theirs, value, queries, documents)


def test_kl_divergence():
    """At temperature 1, where T^2 is 1; a mean over the queries."""
    scores = vectors(Q, D)
    theirs = KLDivergence().compute_loss(LightningIROutput(scores), batch(TARGETS))
    ours = Distillation(DistillationLoss(temperature=1.0, alpha_kl=1.0, alpha_mse=0.0))
    assert_equal(theirs, ours.compute_loss(LightningIROutput(scores), batch(TARGETS)), scores)


def test_supervised_margin_mse():
    scores = vectors(Q, D)
    theirs = SupervisedMarginMSE().compute_loss(LightningIROutput(scores), batch(TARGETS))
    ours = Distillation(MarginMSELoss()).compute_loss(LightningIROutput(scores), batch(TARGETS))
    assert_equal(theirs, ours, scores)
    nothing = SupervisedMarginMSE().compute_loss(
        LightningIROutput(scores), batch(torch.ones(Q, D, dtype=torch.float64))
    )
    assert nothing.isnan(), "ours is 0: test_adapters.py"


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")  # theirs, of its scalar
def test_constant_margin_mse():
    scores = vectors(Q, D)
    theirs = ConstantMarginMSE(1.5).compute_loss(LightningIROutput(scores), batch(TARGETS))
    query, better, worse = torch.nonzero(TARGETS[..., None] > TARGETS[:, None], as_tuple=True)
    margin = torch.full_like(scores[query, better], 1.5)
    ours = margin_mse_loss(
        scores[query, better], scores[query, worse], margin, torch.zeros_like(margin)
    )
    assert_equal(theirs, ours, scores)


@pytest.mark.parametrize("shape", ["linear", "quadratic"])
def test_warm_up_is_a_step_ahead_of_ours(shape):
    """Theirs counts the step to be taken, from 1; ours the steps taken, from 0."""
    made = {
        "linear": GenericConstantSchedulerWithLinearWarmup,
        "quadratic": GenericConstantSchedulerWithQuadraticWarmup,
    }[shape](num_warmup_steps=5, keys=[])
    theirs = [made.value_lambda(step + 1) for step in range(8)]
    assert theirs == pytest.approx([Warmup(5, shape)(step + 1) for step in range(8)])
