"""What the adapters hand to the losses, and what they refuse."""

import pytest
import torch
from lightning_ir import BiEncoderOutput, LightningIROutput, TrainBatch
from lightning_ir.bi_encoder import BiEncoderEmbedding

from sparse_losses import (
    DistillationLoss,
    FlopsLoss,
    IdfFlopsLoss,
    InfoNCELoss,
    MarginMSELoss,
    NPairLoss,
    TripletMarginLoss,
)
from sparse_losses.functional import flops_loss, info_nce_loss, triplet_margin_loss
from sparse_losses.integrations.lightning_ir import Contrastive, Distillation, Regularization

Q, D, V = 3, 4, 7
DOT = {"temperature": 1.0, "similarity": "dot"}


def vectors(*shape, **options):
    return torch.rand(*shape, dtype=torch.float64, **options).requires_grad_()


def output(queries, documents):
    """What their model returns for ``[Q, V]`` and ``[Q, D, V]``."""
    return BiEncoderOutput(
        torch.einsum("qv,qdv->qd", queries, documents),
        BiEncoderEmbedding(queries[:, None]),
        BiEncoderEmbedding(documents.flatten(0, 1)[:, None]),
    )


def batch(targets):
    return TrainBatch(
        ["q"] * len(targets), [["d"] * targets.shape[1]] * len(targets), None, None, None, targets
    )


@pytest.mark.parametrize("shared", [False, True])
def test_the_positive_is_the_document_with_the_largest_target(shared):
    queries, documents = vectors(Q, V), vectors(Q, D, V)
    targets = torch.tensor([[0, 2, 1, 0], [3, 0, 0, 0], [0, 1, 1, 4]])
    loss = Contrastive(InfoNCELoss(**DOT), shared_negatives=shared)
    value = loss.compute_loss(output(queries, documents), batch(targets))
    positive = torch.stack([documents[0, 1], documents[1, 0], documents[2, 3]])
    others = ((0, 2, 3), (1, 2, 3), (0, 1, 2))
    negative = torch.stack([documents[q, list(d)] for q, d in enumerate(others)])
    if shared:
        negative = negative.reshape(-1, V)
    expected = info_nce_loss(queries, positive, negative, **DOT)
    torch.testing.assert_close(value, expected, rtol=0, atol=0)
    found = torch.autograd.grad(value, (queries, documents))
    torch.testing.assert_close(found, torch.autograd.grad(expected, (queries, documents)))


def test_of_several_largest_targets_the_first_is_the_positive():
    queries, documents = vectors(1, V), vectors(1, 3, V)
    loss = Contrastive(TripletMarginLoss(margin=2.0))
    value = loss.compute_loss(output(queries, documents), batch(torch.tensor([[0.0, 1.0, 1.0]])))
    expected = triplet_margin_loss(queries, documents[:, 1], documents[:, [0, 2]], margin=2.0)
    torch.testing.assert_close(value, expected)


def test_targets_of_several_columns_count_by_their_largest():
    """As their module has them: ``[Q, D, n]``."""
    queries, documents = vectors(1, V), vectors(1, 2, V)
    targets = torch.tensor([[[0.0, 5.0], [1.0, 1.0]]])
    loss = Contrastive(InfoNCELoss(**DOT))
    value = loss.compute_loss(output(queries, documents), batch(targets))
    expected = info_nce_loss(queries, documents[:, 0], documents[:, 1:], **DOT)
    torch.testing.assert_close(value, expected)


def test_one_document_a_query_leaves_the_other_queries_documents():
    queries, documents = vectors(Q, V), vectors(Q, 1, V)
    pairs = output(queries, documents), batch(torch.ones(Q, 1))
    value = Contrastive(InfoNCELoss(**DOT)).compute_loss(*pairs)
    torch.testing.assert_close(value, info_nce_loss(queries, documents[:, 0], **DOT))
    with pytest.raises(TypeError, match="expected `negative` to be a"):
        Contrastive(TripletMarginLoss()).compute_loss(*pairs)


def test_one_query_with_one_document_is_0():
    pair = output(vectors(1, V), vectors(1, 1, V)), batch(torch.ones(1, 1))
    assert Contrastive(NPairLoss()).compute_loss(*pair) == 0


def test_margin_mse_without_an_ordered_pair_is_0_and_part_of_the_graph():
    """Where theirs is NaN."""
    scores = vectors(Q, D)
    value = Distillation(MarginMSELoss()).compute_loss(
        LightningIROutput(scores), batch(torch.ones(Q, D))
    )
    value.backward()
    assert value == 0
    assert (scores.grad == 0).all()


def test_graded_labels_are_teacher_scores():
    scores, grades = vectors(Q, D), torch.randint(0, 4, (Q, D))
    loss = Distillation(DistillationLoss())
    value = loss.compute_loss(LightningIROutput(scores), batch(grades))
    torch.testing.assert_close(value, DistillationLoss()(scores, grades.float()))


def test_the_teacher_keeps_its_digits_beside_half_precision_scores():
    scores = torch.rand(Q, D).bfloat16()
    teacher = 1000 + torch.rand(Q, D)
    loss = Distillation(DistillationLoss())
    value = loss.compute_loss(LightningIROutput(scores), batch(teacher))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, DistillationLoss()(scores.float(), teacher))


def test_a_side_without_a_weight_is_not_computed():
    queries, documents = vectors(Q, V), vectors(Q, D, V)
    out = output(torch.full_like(queries, torch.nan), documents)
    value = Regularization(FlopsLoss(), 0.0, 2.0).compute_loss(out)
    torch.testing.assert_close(value, 2 * flops_loss(documents.flatten(0, 1)))
    assert Regularization(FlopsLoss(), 0.0, 0.0).compute_loss(out) == 0


def test_what_a_loss_holds_follows_the_vectors_to_their_device():
    out = output(torch.empty(Q, V, device="meta"), torch.empty(Q, D, V, device="meta"))
    value = Regularization(IdfFlopsLoss(torch.ones(V)), 1.0, 1.0).compute_loss(out)
    assert value.device.type == "meta"


@pytest.mark.parametrize("side", ["query_embeddings", "doc_embeddings"])
def test_several_vectors_a_text_are_an_error(side):
    out = output(vectors(Q, V), vectors(Q, D, V))
    setattr(out, side, BiEncoderEmbedding(torch.rand(12, 5, V)))
    message = rf"one vector per text, `{side}` of shape \[N, 1, V\], got \[12, 5, 7\]"
    with pytest.raises(ValueError, match=message):
        Regularization(FlopsLoss()).compute_loss(out)
    with pytest.raises(ValueError, match=message):
        Contrastive(InfoNCELoss()).compute_loss(out, batch(torch.rand(Q, D)))


def test_a_missing_side_is_an_error():
    out = BiEncoderOutput(None, BiEncoderEmbedding(torch.rand(2, 1, V)), None)
    with pytest.raises(ValueError, match="expected `doc_embeddings` in the output, got None"):
        Regularization(FlopsLoss()).compute_loss(out)


@pytest.mark.parametrize(
    "temperature",
    [torch.nn.Parameter(torch.tensor(0.1)), torch.tensor(0.1, requires_grad=True)],
    ids=["parameter", "tensor"],
)
def test_a_learned_temperature_is_refused(temperature):
    """lightning-ir would never update it, and never save it."""
    message = "expected a loss without parameters, got InfoNCELoss with 'temperature'"
    with pytest.raises(ValueError, match=message):
        Contrastive(InfoNCELoss(temperature=temperature))
    with pytest.raises(ValueError, match="got DistillationLoss with 'temperature'"):
        Distillation(DistillationLoss(temperature=temperature))
    Contrastive(InfoNCELoss(temperature=torch.tensor(0.1)))  # a constant


def test_losses_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="reduce to one number, got reduction='none'"):
        Contrastive(InfoNCELoss(reduction="none"))
    with pytest.raises(TypeError, match="a DistillationLoss or a MarginMSELoss, got FlopsLoss"):
        Distillation(FlopsLoss())


def test_targets_that_are_not_the_scores_own_are_an_error():
    targets = batch(torch.ones(Q, D))
    targets.targets = targets.targets.flatten()
    found = output(vectors(Q, V), vectors(Q, D, V))
    with pytest.raises(ValueError, match=r"\[Q, D\] = \[3, 4\], got \[12\]"):
        Contrastive(InfoNCELoss()).compute_loss(found, targets)
