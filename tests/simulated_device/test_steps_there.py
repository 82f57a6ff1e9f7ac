"""One whole training step there: head, objective, controller, diagnostics and optimizer."""

import pytest
import torch
from torch import nn

import sparse_losses
from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)
simulated_device.start()
V, H, B, S = 60, 16, 4, 7


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.layer = nn.TransformerEncoderLayer(H, 2, 32, dropout=0.0, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(V))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(ids))
        return sparse_losses.splade_head(hidden, self.embedding.weight, self.bias, mask)


class Training:
    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.model = device, Encoder().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)
        weights = {"info_nce": 1.0, "query_flops": 0.01, "document_flops": 0.01}
        weights |= {"query_self_reconstruction": 0.5, "query_positive_activation": 0.1}
        self.objective = sparse_losses.SpladeObjective(weights | {"query_min_activation": 1.0})
        self.controller = sparse_losses.SparsityController(
            self.objective, target_active=10, every=1000
        )
        self.diagnostics = sparse_losses.Diagnostics(V, stopword_ids=[3, 4])

    def step(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        texts = []
        for _ in range(2):
            ids = torch.randint(5, V, (B, S), generator=generator)
            mask = (torch.arange(S) < torch.randint(2, S + 1, (B, 1), generator=generator)).long()
            if self.device == "sim":
                ids, mask = (x.pin_memory().to("sim", non_blocking=True) for x in (ids, mask))
            texts.append(sparse_losses.Texts(self.model(ids, mask), ids, mask))
        loss = self.objective(sparse_losses.SpladeBatch(*texts)).total
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.controller.observe(texts[1].activations)
        self.controller.step()
        self.diagnostics.update(texts[0])
        return loss.detach()


def test_steps_there_are_steps_here():
    here, there = Training("cpu"), Training("sim")
    for number in range(3):
        wanted, found = here.step(number), there.step(number)
        assert found.device.type == "sim"
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(here.model.parameters(), there.model.parameters(), strict=True):
        torch.testing.assert_close(other.detach().cpu(), one.detach(), rtol=1e-3, atol=1e-4)
    assert there.diagnostics.report() == pytest.approx(here.diagnostics.report(), rel=1e-4)


def test_under_autocast_a_step_never_waits_and_multiplies_halves():
    training = Training("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        training.step(0)
        with simulated_device.counting() as counts:
            loss = training.step(1)
    assert [operation.name for operation in counts.operations if operation.waits] == []
    assert loss.isfinite()
    assert counts.flops[torch.bfloat16] > 0
