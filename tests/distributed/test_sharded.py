"""FSDP2 on two gloo ranks: sharded parameters, plain activations, one process's updates."""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparse_losses import SpladeBatch, SpladeEncoder, SpladeObjective, Texts
from tests.distributed.ranks import run_ranks
from tests.representation import tiny_models

ROWS, STEPS, V = 3, 3, 24
needs_sharding_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="PyTorch 2.6 cannot shard on a CPU"
)


def encoder() -> SpladeEncoder:
    """Its head's matrix is that of the embedding."""
    torch.manual_seed(1)
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, tokenizer = tiny_models.pair("bert", **settings)
    return SpladeEncoder(model.double(), tokenizer).train()


def shard(model: SpladeEncoder) -> None:
    """Layer by layer, then what is left."""
    for layer in model.model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(model)


def side(step: int, number: int, rows: slice) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 * step + number)
    ids = torch.randint(4, V, (2 * ROWS, 5))
    mask = torch.ones_like(ids)
    mask[1::2, 3:] = 0
    return {"input_ids": ids[rows], "attention_mask": mask[rows]}


def objective(gather: bool) -> SpladeObjective:
    weights = {"info_nce": 1.0, "document_flops": 0.1, "query_self_reconstruction": 0.5}
    return SpladeObjective(weights, gather=gather)


def train(model: torch.nn.Module, loss: SpladeObjective, rows: slice) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    totals = []
    for step in range(STEPS):
        sides = [side(step, number, rows) for number in range(2)]
        total, _ = loss(SpladeBatch(*(Texts(model(**each), **each) for each in sides)))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        totals.append(total.item())
    return totals


def compare(rank: int) -> None:
    sharded = encoder()
    plain = copy.deepcopy(sharded)
    expected = train(plain, objective(gather=False), slice(None))
    shard(sharded)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    found = train(sharded, objective(gather=True), slice(rank * ROWS, (rank + 1) * ROWS))
    assert found == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0]
    whole = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(
            parameter.full_tensor(), whole[name], rtol=1e-6, atol=1e-7, msg=lambda m, n=name: n + m
        )


@needs_sharding_on_cpu
@pytest.mark.works_with("PyTorch", "fp32", "devices", "sharded")
def test_sharded_parameters_are_trained_as_those_of_one_process():
    run_ranks(2, compare)
