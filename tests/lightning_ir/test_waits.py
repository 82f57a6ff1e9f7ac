"""The adapters on a device that is not the CPU."""

import pytest
import torch

from sparse_losses import (
    DistillationLoss,
    FlopsLoss,
    InfoNCELoss,
    MarginMSELoss,
    MinActivationLoss,
    NPairLoss,
    TripletMarginLoss,
)
from sparse_losses.integrations.lightning_ir import Contrastive, Distillation, Regularization
from tests.lightning_ir.test_adapters import D, Q, V, batch, output, vectors
from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)
simulated_device.start()


@pytest.mark.parametrize(
    "adapter",
    [
        Contrastive(InfoNCELoss()),
        Contrastive(NPairLoss(), shared_negatives=True),
        Contrastive(TripletMarginLoss()),
        Distillation(DistillationLoss()),
        Distillation(MarginMSELoss()),
        Regularization(FlopsLoss()),
        Regularization(MinActivationLoss()),
    ],
    ids=lambda adapter: type(adapter.loss).__name__,
)
def test_nothing_waits_for_the_device(adapter):
    out = output(vectors(Q, V, device="sim"), vectors(Q, D, V, device="sim"))
    targets = torch.rand(Q, D, device="sim")
    with simulated_device.counting() as counts:
        adapter.compute_loss(
            *((out,) if isinstance(adapter, Regularization) else (out, batch(targets)))
        ).backward()
    assert counts.launches > 20
    assert counts.waits == 0
