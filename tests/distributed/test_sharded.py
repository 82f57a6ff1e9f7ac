"""FSDP2 on two gloo ranks: sharded parameters, plain activations, one process's updates."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import sparse_losses as sl
import sparse_losses.functional as F
from tests.distributed.ranks import run_ranks
from tests.representation import tiny_models

ROWS, STEPS, V = 3, 6, 24
EVERYTHING = slice(None)
needs_sharding_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="PyTorch 2.6 cannot shard on a CPU"
)


def encoder() -> sl.SpladeEncoder:
    """Its head's matrix is that of the embedding."""
    torch.manual_seed(1)
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, tokenizer = tiny_models.pair("bert", **settings)
    return sl.SpladeEncoder(model.double(), tokenizer).train()


def shard(model: sl.SpladeEncoder) -> None:
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


class Training(torch.nn.Module):
    """An encoder and three losses, one of which learns its temperature."""

    def __init__(self, model: sl.SpladeEncoder, rows: slice) -> None:
        super().__init__()
        self.model, self.rows = model, rows
        self.gather = rows != EVERYTHING
        learned = torch.nn.Parameter(torch.tensor(0.5))
        self.info_nce = sl.InfoNCELoss(temperature=learned, gather=self.gather)
        # The sharded parameters and the temperature are of two types, of which `foreach` takes one.
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)

    def step(self, number: int) -> float:
        first, second = (side(number, which, self.rows) for which in range(2))
        query, document = self.model(**first), self.model(**second)
        total = self.info_nce(query, document)
        total = total + 0.1 * F.flops_loss(document, gather=self.gather)
        total = total + 0.5 * F.self_reconstruction_loss(query, **first, gather=self.gather)
        total.backward()
        if self.gather:
            for parameter in self.info_nce.parameters():  # as docs/distributed.md says
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()

    def checkpoint(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self, self.optimizer)
        return {"weights": weights, "optimizer": optimizer}


def assert_same(sharded: Training, plain: Training) -> None:
    whole = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(found, whole[name], rtol=1e-6, atol=1e-7, msg=name.__add__)


def compare(rank: int, folder: Path) -> float:
    model = encoder()
    plain = Training(copy.deepcopy(model), EVERYTHING)
    shard(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    weight = model.head.weight  # still sharded
    for call in (lambda: F.splade_head(torch.randn(2, 3, 8), weight), lambda: F.flops_loss(weight)):
        with pytest.raises(TypeError, match=r"a plain tensor, got a DTensor: .* `fully_shard` has"):
            call()
    sharded = Training(model, slice(rank * ROWS, (rank + 1) * ROWS))
    totals = [(sharded.step(number), plain.step(number)) for number in range(STEPS)]
    assert [x for x, _ in totals] == pytest.approx([x for _, x in totals], rel=1e-9)
    assert totals[-1][1] < totals[0][1]
    assert_same(sharded, plain)

    # Between two steps, all ranks encode the same texts.
    texts = tiny_models.TEXTS
    vectors = [x.model.encode(texts, output="dense") for x in (sharded, plain)]
    torch.testing.assert_close(*vectors)
    assert sharded.step(STEPS) == pytest.approx(plain.step(STEPS), rel=1e-6)
    assert_same(sharded, plain)
    checkpoint.save(sharded.checkpoint(), checkpoint_id=folder)
    return plain.step(STEPS + 1)


@needs_sharding_on_cpu
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.works_with("PyTorch", "fp32", "devices", "sharded", "resume")
def test_sharded_parameters_are_trained_as_those_of_one_process_which_resumes(tmp_path):
    first, second = run_ranks(2, compare, tmp_path)
    assert first == second
    resumed = Training(encoder(), EVERYTHING)
    state = resumed.checkpoint()
    checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    saved = {"model_state_dict": state["weights"], "optim_state_dict": state["optimizer"]}
    set_state_dict(resumed, resumed.optimizer, **saved)
    assert resumed.step(STEPS + 1) == pytest.approx(first, rel=1e-6)
