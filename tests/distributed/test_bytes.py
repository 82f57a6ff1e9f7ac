"""What ranks send each other, and what they hold: counted in one process, for any number of ranks.

A process group that sends nothing, and tensors without values. The numbers are those of
docs/past_one_device.md.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, placement_types
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_losses as sl
import sparse_losses.functional as F
from benchmarks.run.memory import peak_bytes
from sparse_losses.distributed import skip_size_check
from tests.distributed.ranks import needs_dtensors

pytestmark = needs_dtensors
PAGE = Path(__file__).resolve().parents[2] / "docs" / "past_one_device.md"
TOKENS, TEXTS = 250_002, 64
RANKS = 8, 64
LAYOUTS = {"gather=True": None, "Shard(0)": 0, "Shard(1)": 1}


@pytest.fixture(autouse=True)
def _as_on_accelerators(monkeypatch):
    """On a CPU PyTorch gathers where elsewhere it exchanges."""

    def exchange(x, gather_dim, shard_dim, mesh, mesh_dim):
        name = mesh.get_group(mesh_dim).group_name
        return torch.ops._dtensor.shard_dim_alltoall(x, gather_dim, shard_dim, name)

    monkeypatch.setattr(placement_types, "shard_dim_alltoall", exchange)


class Collectives(TorchDispatchMode):
    """Records each collective, and the size of its larger side in numbers and in bytes."""

    NAMES = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|alltoall")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # first, what it consists of
        out = func(*args, **(kwargs or {}))
        if (name := self.NAMES.search(str(func))) and "wait" not in str(func):
            sides = [x[0] if isinstance(x, list | tuple) else x for x in (*args[:2], out)]
            larger = max((x for x in sides if isinstance(x, torch.Tensor)), key=torch.numel)
            self.calls.append((name[0].replace("_", ""), larger.numel()))
            self.bytes += larger.nbytes
        return out


@contextmanager
def mesh_of(ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh, dim: int | None, *shape: int) -> torch.Tensor:
    """The tensor of all ranks, or a rank's own rows, with a gradient."""
    if dim is None:
        return torch.rand(shape[0] // mesh.size(), *shape[1:]).requires_grad_()
    own = [-(-n // mesh.size()) if i == dim else n for i, n in enumerate(shape)]
    stride = torch.empty(shape, device="meta").stride()
    where = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
    return DTensor.from_local(torch.rand(own), mesh, [Shard(dim)], **where).requires_grad_()


def row_of(start: str) -> list[int]:
    """The numbers of the row of the page that starts so."""
    (row,) = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(start)]
    return [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) MiB", row)]


def mebibytes(ranks: int, dim: int | None) -> int:
    """Of InfoNCE and the documents' FLOPS, forwards and back, in fp32."""
    gather = dim is None
    with mesh_of(ranks) as mesh, FakeTensorMode(), skip_size_check(), Collectives() as sent:
        query, document = (sharded(mesh, dim, ranks * TEXTS, TOKENS) for _ in range(2))
        loss = F.info_nce_loss(query, document, gather=gather, impl="definition")
        (loss + F.flops_loss(document, gather=gather)).backward()
    return round(sent.bytes / (1 << 20))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_page_says_what_is_sent(layout):
    assert row_of(f"| `{layout}`") == [mebibytes(ranks, LAYOUTS[layout]) for ranks in RANKS]


@pytest.mark.parametrize("dim", [0, 1])
def test_no_step_waits_for_a_value(dim):
    """A tensor without values cannot give it. (Of indices a CPU checks the range.)"""
    weights = {"info_nce": 1.0, "document_flops": 0.1}
    with mesh_of(4) as mesh, FakeTensorMode():
        objective, queue = sl.SpladeObjective(weights), sl.LabelQueue(2 * TEXTS, TOKENS, 3)
        controller = sl.SparsityController(weight=0.1, target_posting=0.3)
        diagnostics, frequency = sl.Diagnostics(TOKENS), sl.ActivationFrequency(TOKENS)
        query, document = (sharded(mesh, dim, 4 * TEXTS, TOKENS) for _ in range(2))
        with Collectives() as sent:
            total = objective(sl.SpladeBatch(sl.Texts(query), sl.Texts(document))).total
        assert sent.calls.count(COMPARED) == 1, "once for all terms"
        total.backward()
        for observe in (controller.observe, frequency.update, diagnostics.update):
            observe(document.detach())
        queue.enqueue(document.detach(), torch.ones(len(query), 3))


# What is sent by each loss, of 6 texts and 1000 tokens on two ranks ------------------------------

B, V = 6, 1000
GATHERED, SUMMED, SCATTERED, EXCHANGED = "allgather", "allreduce", "reducescatter", "alltoall"
COMPARED = SUMMED, 2  # a hash of sizes and settings, and its negative
ROWS = EXCHANGED, B * V // 2  # half of the columns of all rows, for half of the rows
# By loss and layout: what is sent forwards after the comparison, and back.
SENT: dict[tuple[str, str], tuple[list[tuple[str, int]], list[tuple[str, int]]]] = {
    # Norms of both sides, then the scores; in the backward pass, projections on the rows.
    ("info_nce", "columns"): ([(SUMMED, B)] * 2 + [(SUMMED, B * B)], [(SUMMED, B)] * 2),
    ("info_nce", "rows"): (
        [ROWS] * 2 + [(SCATTERED, B * B), (SUMMED, 1)],
        [(GATHERED, B * B)] + [ROWS] * 2,
    ),
    ("n_pair", "columns"): ([(SUMMED, B * B)], []),
    ("triplet_margin", "columns"): ([(SUMMED, B)] * 2, []),
    ("triplet_margin", "rows"): ([(SUMMED, 1)], []),
    ("flops", "columns"): ([(SUMMED, 1)], []),
    ("flops", "rows"): ([(SUMMED, V)], []),
    ("idf_flops", "columns"): ([(SUMMED, 1)], []),
    ("idf_flops", "rows"): ([(SUMMED, V)], []),
    ("language_penalty", "columns"): ([(SUMMED, B)], []),
    ("language_penalty", "rows"): ([(SUMMED, 1)], []),
    # The five largest of every rank: values and columns, then the values again, with a gradient.
    ("min_activation", "columns"): ([(GATHERED, 2 * B * 5)] * 2 + [(SUMMED, B * 5)], []),
    ("min_activation", "rows"): ([(SUMMED, 1)], []),
    ("self_reconstruction", "columns"): ([(SUMMED, B)], []),
    ("self_reconstruction", "rows"): ([(SUMMED, 1)], []),
    ("positive_activation", "columns"): ([(SUMMED, B * 8)], []),
    ("positive_activation", "rows"): ([(SUMMED, 1)], []),
    ("splade_pool", "columns"): ([], []),
    ("splade_pool", "rows"): ([], []),
    ("token_weights", "columns"): ([(GATHERED, 2 * B * 3)] * 2, []),
    # A comparison of hidden states [6, 3, 4]: norm and sums. Their gradient and that of the weight,
    # [1000, 4], each once.
    ("splade_head", "columns"): ([(SUMMED, 2 * (4 + 1))], [(SUMMED, B * 3 * 4)]),
    ("splade_head", "rows"): ([], [(SUMMED, V * 4)]),
}


def call(name: str, layout: str, mesh: DeviceMesh) -> torch.Tensor:
    def by(*shape: int) -> torch.Tensor:
        return sharded(mesh, 0 if layout == "rows" else len(shape) - 1, *shape)

    ids, mask, token = torch.randint(V, (B, 8)), torch.ones(B, 8), torch.rand(V)
    dot = {"similarity": "dot"} if name == "triplet_margin" else {}
    if name == "splade_head":
        states, weight = torch.rand(B, 3, 4).requires_grad_(), torch.rand(V, 4).requires_grad_()
        if layout == "rows":
            states = by(B, 3, 4)
        else:
            weight = sharded(mesh, 0, V, 4)
        return F.splade_head(states, weight, attention_mask=torch.ones(B, 3))
    if name in ("splade_pool", "token_weights"):
        return getattr(F, name)(by(B, 3, V), mask[:, :3])
    others: dict[str, Any] = {
        "info_nce": [by(B, V)],
        "n_pair": [by(B, V)],
        "triplet_margin": [by(B, V), by(B, V)],
        "idf_flops": [token],
        "language_penalty": [token],
        "self_reconstruction": [ids, mask],
        "positive_activation": [ids, mask],
    }
    return getattr(F, f"{name}_loss")(by(B, V), *others.get(name, []), **dot)


@pytest.mark.parametrize(("name", "layout"), SENT)
def test_nothing_of_all_rows_and_columns_is_gathered(name, layout):
    with mesh_of(2) as mesh, FakeTensorMode():
        with Collectives() as forwards:
            value = call(name, layout, mesh)
        with Collectives() as back:
            value.backward(torch.ones_like(value))
    sent, sent_back = SENT[name, layout]
    assert (forwards.calls, back.calls) == ([COMPARED, *sent], sent_back)


# What a rank of the head holds -------------------------------------------------------------------


def peak_of(ranks: int) -> int:
    """Bytes of a rank's part of the weight, and of the head's both passes."""
    hidden_size = 64
    with mesh_of(ranks) if ranks > 1 else nullcontext() as mesh:
        hidden, weight = torch.randn(2, 8, hidden_size), torch.randn(TOKENS, hidden_size)
        if mesh is not None:
            weight = sharded(mesh, 0, TOKENS, hidden_size)
        weight.requires_grad_()

        def run() -> list[torch.Tensor]:
            value = F.splade_head(hidden, weight, impl="tiles")
            (gradient,) = torch.autograd.grad(value, weight, torch.ones_like(value))
            return [gradient.to_local() if mesh else gradient]

        part = weight.to_local() if mesh else weight
        return part.nbytes + peak_bytes(run, torch.device("cpu"))[0]


def test_the_page_says_what_a_rank_of_the_head_holds():
    assert row_of("| peak of a rank") == [round(peak_of(ranks) / 2**20) for ranks in (1, 2, 4)]
