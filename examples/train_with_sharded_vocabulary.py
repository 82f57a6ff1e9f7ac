"""Train a SPLADE encoder whose vocabulary is sharded over several devices.

torchrun --nproc-per-node 4 examples/train_with_sharded_vocabulary.py
"""

import os

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from sparse_losses import SparsityController, SpladeBatch, SpladeEncoder, SpladeObjective


def shard(encoder: SpladeEncoder, mesh: DeviceMesh) -> None:
    """Give every rank some rows of the embeddings and of the head, which stay tied."""
    embedding, linear = (
        encoder.model.get_input_embeddings(),
        encoder.model.get_output_embeddings(),
    )
    weight, bias = embedding.weight, linear.bias
    whole = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    parallelize_module(embedding, mesh, RowwiseParallel(**whole))
    replace(encoder, weight, embedding.weight)
    replace(encoder, bias, nn.Parameter(distribute_tensor(bias.detach(), mesh, [Shard(0)])))


def replace(root: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, name, new)


def train(encoder: SpladeEncoder, mesh: DeviceMesh | None, steps: int = 3) -> list[float]:
    """Return the losses; without a mesh, of one process that has all of the vocabulary."""
    if mesh is not None:
        shard(encoder, mesh)
    weights = {"info_nce": 1.0, "document_flops": 0.01, "query_min_activation": 0.1}
    objective = SpladeObjective(weights)
    controller = SparsityController(objective, "document_flops", target_active=8)
    # The sharded parameters and the others are of two types, of which `foreach` takes one.
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-3, foreach=False)
    controller.attach(optimizer)
    totals = []
    for step in range(steps):  # every rank reads the same batch
        rows = tiny.TRAIN[step * 8 : step * 8 + 8]
        columns = {side: [row[side] for row in rows] for side in rows[0]}
        total, _ = objective(SpladeBatch.from_columns(encoder, columns))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        totals.append(total.item())
    return totals


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    totals = train(tiny.encoder().to(device), mesh)
    expected = train(tiny.encoder().to(device), None)  # for comparison only
    torch.testing.assert_close(totals, expected, rtol=1e-4, atol=0.0)
    if dist.get_rank() == 0:
        print(f"on {mesh.size()} ranks: {totals}, in one process: {expected}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
