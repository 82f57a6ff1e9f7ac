"""A NaN that nothing looks at stays out of gradients; arguments that are not what they seem."""

import pytest
import torch

import sparse_losses.functional as F
from sparse_losses import InfoNCELoss, LabelQueue, SelfReconstructionLoss

NAN = float("nan")


@pytest.mark.parametrize("decoupled", [True, False])
def test_nws_without_a_labelled_row_sends_no_nan_into_the_prototypes(decoupled):
    prototype = torch.tensor([[1.0, 0.0], [0.0, NAN]], requires_grad=True)
    loss = F.nws_loss(torch.eye(2), torch.zeros(2, 2), prototype, None, decoupled=decoupled)
    loss.backward()
    assert loss == 0
    assert (prototype.grad == 0).all()


def test_nws_a_weight_of_zero_is_no_mask_so_a_nan_key_shows():
    loss = F.nws_loss(
        torch.eye(2),
        torch.eye(2),
        torch.eye(2),
        torch.eye(2),
        key=torch.tensor([[NAN, 1.0]]),
        key_labels=torch.zeros(1, 2),
        beta=0.0,
        eps=0.0,
    )
    assert loss.isnan()


@pytest.mark.parametrize("options", [{}, {"similarity": "dot"}])
def test_info_nce_a_nan_column_hidden_by_its_id_leaves_value_and_gradient_alone(options):
    ids, mask = torch.zeros(3).long(), torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 0]])
    results = []
    for hidden in (NAN, 0.5):
        anchor = torch.tensor([[1.0, 0.2], [0.3, 1.0], [0.5, 0.5]], requires_grad=True)
        positive = torch.tensor([[1.0, 0.5], [0.2, 1.0], [hidden, 1.0]])
        negative = torch.tensor([[0.4, 0.9]])
        loss = F.info_nce_loss(
            anchor, positive, negative, positive_ids=ids, positive_mask=mask, **options
        )
        loss.backward()
        results.append((loss.detach(), anchor.grad))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][0] > 0
    assert results[0][1].any()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: F.info_nce_loss(None, x), "anchor"),
        (lambda x: F.min_activation_loss(None), "activations"),
        (lambda x: F.idf_flops_loss(x, None), "token_penalty"),
        (lambda x: F.splade_pool(x[None], None), "attention_mask"),
        (lambda x: LabelQueue(4, 2, 3).enqueue(None, x), "features"),
        (lambda x: F.info_nce_loss(x, x, symmetric="False"), "symmetric"),
        (lambda x: InfoNCELoss(decoupled=None), "decoupled"),
        (lambda x: SelfReconstructionLoss(balanced=1), "balanced"),
        (lambda x: SelfReconstructionLoss(ignore_token_ids=1), "ignore_token_ids"),
        (lambda x: SelfReconstructionLoss(ignore_token_ids=[[1]]), "ignore_token_ids"),
        (lambda x: SelfReconstructionLoss(ignore_token_ids="1"), "ignore_token_ids"),
    ],
)
def test_a_wrong_argument_is_a_type_error_that_names_it(call, name):
    with pytest.raises(TypeError, match=f"expected `{name}`"):
        call(torch.rand(2, 3))


@pytest.mark.parametrize("value", [-10_000.0, 0.5, 2.0, NAN])
def test_a_mask_that_is_not_zero_or_one_is_refused(value):
    mask = torch.tensor([[1.0, value]])
    with pytest.raises(ValueError, match="expected `attention_mask` to be 0 or 1"):
        F.self_reconstruction_loss(torch.rand(1, 3), torch.tensor([[0, 1]]), mask)


def test_a_temperature_beyond_floating_point_is_refused():
    with pytest.raises(ValueError, match="expected `temperature` to be a finite number > 0"):
        F.info_nce_loss(torch.eye(2), torch.eye(2), temperature=10**400)
