"""A vocabulary that is sharded over four ranks: training, and checkpoints for another number."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from sparse_losses import SpladeEncoder, SpladeHead
from sparse_losses._core.dtensors import full
from tests.distributed.ranks import needs_dtensors, run_ranks
from tests.distributed.recipe import example

pytestmark = needs_dtensors


def whole(encoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p).detach() for name, p in encoder.named_parameters()}


def made(script: Any) -> SpladeEncoder:
    """The example's encoder with one more token: 25 on four ranks are 7, 7, 7 and 4."""
    encoder = script.tiny.encoder(0.0)
    encoder.model.resize_token_embeddings(25, mean_resizing=False)
    return SpladeEncoder(encoder.model, encoder.tokenizer).double().train()


def head_of_its_own(mesh: DeviceMesh) -> None:
    """An output projection that is not tied."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 25)
    linear, hidden = copy.deepcopy(plain), torch.randn(2, 3, 4)
    parallelize_module(linear, mesh, ColwiseParallel())
    found, expected = (SpladeHead(x.weight, x.bias)(hidden) for x in (linear, plain))
    assert found.to_local().shape[1] < 25
    torch.testing.assert_close(found.full_tensor(), expected)


def train(rank: int, folder: Path) -> dict[str, Any]:
    script = example("train_with_sharded_vocabulary")
    torch.manual_seed(0)
    sharded = made(script)
    plain = copy.deepcopy(sharded)
    expected = script.train(plain, None)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    head_of_its_own(mesh)
    found = script.train(sharded, mesh)
    assert found == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0]
    weight = sharded.head.weight
    assert weight is sharded.model.get_input_embeddings().weight
    assert weight.to_local().shape[0] <= -(-len(weight) // dist.get_world_size())
    parts, wholes = whole(sharded), whole(plain)
    assert parts.keys() == wholes.keys()
    for name, parameter in parts.items():
        torch.testing.assert_close(parameter, wholes[name], rtol=1e-6, atol=1e-7)
    vectors = [x.encode(script.tiny.DOCUMENTS, output="dense") for x in (sharded, plain)]
    torch.testing.assert_close(*vectors)
    for method in ("prune", "shift"):
        shifts = [x.calibrate(script.tiny.DOCUMENTS, 5, method=method) for x in (sharded, plain)]
        assert shifts[0] == pytest.approx(shifts[1])
        assert script.tiny.active_dimensions(sharded) == script.tiny.active_dimensions(plain)
    torch.testing.assert_close(whole(sharded)["head.bias"], plain.head.bias, rtol=1e-6, atol=1e-7)
    with pytest.raises(TypeError, match="got DTensors: save by"):
        sharded.save_pretrained(folder)
    checkpoint.save({"encoder": sharded.state_dict()}, checkpoint_id=folder)
    return whole(sharded)


def resume(rank: int, folder: Path) -> dict[str, Any]:
    script = example("train_with_sharded_vocabulary")
    encoder = made(script)
    script.shard(encoder, init_device_mesh("cpu", (dist.get_world_size(),)))
    state = {"encoder": encoder.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    encoder.load_state_dict(state["encoder"])
    return whole(encoder)


def test_a_sharded_vocabulary_trains_as_one_process_and_resumes_on_fewer_ranks(tmp_path):
    saved, *_ = run_ranks(4, train, tmp_path)
    first, second = run_ranks(2, resume, tmp_path)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, saved, rtol=0, atol=0)
