"""What a rank sends in a step: the table of docs/past_one_device.md.

A process group that sends nothing, and tensors without values, count a step of any size.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_losses.functional as F
from sparse_losses import (
    ActivationFrequency,
    Diagnostics,
    LabelQueue,
    SparsityController,
    SpladeBatch,
    SpladeObjective,
    Texts,
)
from sparse_losses._core.dtensors import OLDEST
from sparse_losses.distributed import skip_size_check

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST,
    reason="DTensors need a newer PyTorch",
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "past_one_device.md"
V, B = 250_002, 64
RANKS = 8, 64
LAYOUTS = {"gather=True": None, "Shard(0)": 0, "Shard(1)": 1}


class Sent(TorchDispatchMode):
    """Adds up the larger side of every collective, in bytes."""

    NAMES = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|alltoall")

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # first, what it consists of
        out = func(*args, **(kwargs or {}))
        if self.NAMES.search(str(func)) and "wait" not in str(func):
            sides = [x[0] if isinstance(x, list) else x for x in (*args[:2], out)]
            self.total += max(x.nbytes for x in sides if isinstance(x, torch.Tensor))
        return out


def vectors(mesh: DeviceMesh, dim: int | None) -> torch.Tensor:
    ranks = mesh.size()
    own = (ranks * B, -(-V // ranks)) if dim == 1 else (B, V)
    x = torch.rand(own)
    if dim is not None:
        shape = torch.Size((ranks * B, V))
        where = {"run_check": False, "shape": shape, "stride": (V, 1)}
        x = DTensor.from_local(x, mesh, [Shard(dim)], **where)
    return x.requires_grad_()


@contextmanager
def mesh_of(ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def mebibytes(ranks: int, dim: int | None) -> int:
    """Of InfoNCE and the documents' FLOPS, forwards and back, in fp32."""
    gather = dim is None
    with mesh_of(ranks) as mesh, FakeTensorMode(), skip_size_check(), Sent() as sent:
        query, document = vectors(mesh, dim), vectors(mesh, dim)
        loss = F.info_nce_loss(query, document, gather=gather, impl="definition")
        (loss + F.flops_loss(document, gather=gather)).backward()
    return round(sent.total / (1 << 20))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_page_says_what_is_sent(layout):
    numbers = [mebibytes(ranks, LAYOUTS[layout]) for ranks in RANKS]
    (row,) = [line for line in PAGE.read_text("utf-8").splitlines() if f"| `{layout}`" in line]
    assert [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) MiB", row)] == numbers


@pytest.mark.parametrize("dim", [0, 1])
def test_no_step_waits_for_a_value(dim):
    """A tensor without values cannot give it. (Of indices a CPU checks the range.)"""
    weights = {"info_nce": 1.0, "document_flops": 0.1}
    with mesh_of(4) as mesh, FakeTensorMode():
        objective, queue = SpladeObjective(weights), LabelQueue(2 * B, V, 3)
        controller = SparsityController(weight=0.1, target_posting=0.3)
        diagnostics, frequency = Diagnostics(V), ActivationFrequency(V)
        query, document = vectors(mesh, dim), vectors(mesh, dim)
        objective(SpladeBatch(Texts(query), Texts(document))).total.backward()
        for observe in (controller.observe, frequency.update, diagnostics.update):
            observe(document.detach())
        queue.enqueue(document.detach(), torch.ones(len(query), 3))
