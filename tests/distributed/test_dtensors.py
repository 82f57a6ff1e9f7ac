"""DTensors: rows of the contract on two and four gloo ranks, and what the ranks send each other.

Tensors are placed by rows, by columns (the vocabulary) or by both on a
mesh of two dimensions. Five rows and odd widths leave uneven parts, some of them empty.
"""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_losses.functional as F
from benchmarks.run.memory import peak_bytes
from sparse_losses import (
    ActivationFrequency,
    Diagnostics,
    DocumentFrequency,
    LabelQueue,
    SparsityController,
    SpladeBatch,
    SpladeObjective,
    Texts,
)
from sparse_losses._core.dtensors import OLDEST
from tests.cases import BASE_CASES, FIRST, LAYER_CASES, OBJECTIVE_CASES, Case, to_tensors
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST,
    reason="DTensors need a newer PyTorch",
)
ROWS = 5
CASES = BASE_CASES + LAYER_CASES + OBJECTIVE_CASES
LAYOUTS = {"rows": 2, "columns": 2, "both": 4}  # and on how many ranks
ON_FOUR = (
    *FIRST.values(),
    *(case for case in CASES if case.id in ("splade_pool-capped", "splade_head-all_logits")),
    *(case for case in CASES if case.id in ("token_weights-plain", "objective-pairs")),
)
COMPARED = [
    *((layout, case, None) for layout in ("rows", "columns") for case in CASES),
    *(("rows", c, r) for r in ("none", "sum") for c in FIRST.values() if c.loss.reduces),
    *(("both", case, None) for case in ON_FOUR),
]
TOLERANCE = 1e-9


def mesh_of(layout: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2) if layout == "both" else (2,))


def placements(case: Case, name: str, layout: str) -> list[Placement]:
    """Where a tensor has neither rows nor columns it is replicated."""
    dims = case.dims[name]
    rows = Shard(0) if dims[0] in "BNK" else Replicate()
    widths = "V" if case.stem == "splade_head" else "VD"
    column = next((Shard(i) for i, dim in enumerate(dims) if dim in widths), Replicate())
    return {
        "rows": [rows],
        "columns": [column],
        "both": [rows, column],
    }[layout]


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def evaluate(case: Case, tensors: dict[str, Any], reduction: str | None) -> list[torch.Tensor]:
    """Value and gradients."""
    leaves = [tensors[name].requires_grad_() for name in case.differentiable]
    options = {} if reduction is None else {"reduction": reduction}
    value = case.function()(**tensors, **options)
    assert not isinstance(value, DTensor) or value.ndim
    value = whole(value)
    weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    gradients = torch.autograd.grad((weights * value).sum(), leaves, allow_unused=True)
    return [value.detach(), *(None if x is None else whole(x) for x in gradients)]


def error_of(case: Case, layout: str, reduction: str | None, mesh: DeviceMesh) -> float:
    arrays = case.arrays(ROWS, seed=3)
    expected = evaluate(case, to_tensors(arrays), reduction)
    tensors = to_tensors(arrays)
    for name in case.dims:
        where = placements(case, name, layout)
        # A plain tensor stays what it is: it counts as replicated.
        if any(placement.is_shard() for placement in where):
            tensors[name] = distribute_tensor(tensors[name], mesh, where)
    errors = [0.0]
    for x, y in zip(evaluate(case, tensors, reduction), expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            errors.append(((x - y).abs() / y.abs().clamp(min=1)).max().item())
    return max(errors)


def errors_of(rank: int, world: int) -> dict[tuple[str, str, str | None], float]:
    meshes = {layout: mesh_of(layout) for layout, ranks in LAYOUTS.items() if ranks == world}
    return {
        (layout, case.id, reduction): error_of(case, layout, reduction, meshes[layout])
        for layout, case, reduction in COMPARED
        if layout in meshes
    }


@functools.cache
def results(world: int) -> list[dict[tuple[str, str, str | None], float]]:
    return run_ranks(world, errors_of, world)


@pytest.mark.parametrize(
    ("layout", "case", "reduction"), COMPARED, ids=lambda x: getattr(x, "id", str(x))
)
def test_value_and_gradients_are_those_of_one_process(layout, case, reduction):
    for errors in results(LAYOUTS[layout]):
        assert errors[layout, case.id, reduction] < TOLERANCE


# What is sent ------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Records each collective and the size of what it hands this rank."""

    NAMES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # first, what it consists of
        out = func(*args, **(kwargs or {}))
        for name in self.NAMES:
            if name in str(func) and "wait" not in str(func):
                handed = args[0] if name == "alltoall" else out
                self.calls.append((name, handed.numel()))
        return out


B, V = 6, 1000
GATHERED, SUMMED, OWN = "all_gather", "all_reduce", "reduce_scatter"
ROWS_OF_ALL = ("alltoall", B * V // 2)  # half of the columns of all rows, for half of the rows
# By loss and layout: what is sent forwards, and back.
SENT: dict[tuple[str, str], tuple[list[tuple[str, int]], list[tuple[str, int]]]] = {
    # Norms of both sides, then the scores; in the backward pass, projections on the rows.
    ("info_nce", "columns"): ([(SUMMED, B)] * 2 + [(SUMMED, B * B)], [(SUMMED, B)] * 2),
    ("info_nce", "rows"): (
        [ROWS_OF_ALL] * 2 + [(OWN, B * B // 2), (SUMMED, 1)],
        [(GATHERED, B * B)] + [ROWS_OF_ALL] * 2,
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
    # The gradient of the hidden states, [6, 3, 4], and of the weight, [1000, 4], each once.
    ("splade_head", "columns"): ([], [(SUMMED, B * 3 * 4)]),
    ("splade_head", "rows"): ([], [(SUMMED, V * 4)]),
}


def sent_by(rank: int) -> dict[tuple[str, str], Any]:
    torch.manual_seed(0)
    mesh = mesh_of("rows")
    x, y, z = torch.rand(3, B, V)
    logits, hidden, weight = torch.randn(B, 3, V), torch.randn(B, 3, 4), torch.randn(V, 4)
    ids, mask, token = torch.randint(V, (B, 8)), torch.ones(B, 8), torch.rand(V)

    def by(layout: str, tensor: torch.Tensor, columns: int = 1) -> torch.Tensor:
        where = Shard(0 if layout == "rows" else columns)
        return distribute_tensor(tensor, mesh, [where]).requires_grad_()

    def head(layout: str) -> torch.Tensor:
        states = by("rows", hidden) if layout == "rows" else hidden.clone().requires_grad_()
        matrix = weight.clone().requires_grad_() if layout == "rows" else by("rows", weight)
        return F.splade_head(states, matrix, attention_mask=torch.ones(B, 3))

    dot = {"similarity": "dot"}
    calls = {
        "info_nce": lambda to: F.info_nce_loss(by(to, x), by(to, y)),
        "n_pair": lambda to: F.n_pair_loss(by(to, x), by(to, y)),
        "triplet_margin": lambda to: F.triplet_margin_loss(by(to, x), by(to, y), by(to, z), **dot),
        "flops": lambda to: F.flops_loss(by(to, x)),
        "idf_flops": lambda to: F.idf_flops_loss(by(to, x), token),
        "language_penalty": lambda to: F.language_penalty_loss(by(to, x), token),
        "min_activation": lambda to: F.min_activation_loss(by(to, x)),
        "self_reconstruction": lambda to: F.self_reconstruction_loss(by(to, x), ids, mask),
        "positive_activation": lambda to: F.positive_activation_loss(by(to, x), ids, mask),
        "splade_pool": lambda to: F.splade_pool(by(to, logits, 2), mask[:, :3]),
        "token_weights": lambda to: F.token_weights(by(to, logits, 2), mask[:, :3]),
        "splade_head": head,
    }
    sent = {}
    for name, layout in SENT:
        with Collectives() as forwards:
            value = calls[name](layout)
        gradient = torch.ones_like(value)
        with Collectives() as back:
            value.backward(gradient)
        sent[name, layout] = forwards.calls, back.calls
    return sent


def test_nothing_of_all_rows_and_columns_is_gathered():
    for sent in run_ranks(2, sent_by):
        assert sent == SENT


# What a rank holds -------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "past_one_device.md"
WORLDS = 1, 2, 4


def peak_of(rank: int, world: int) -> int:
    """Bytes of a rank's part of the weight, and of the head's both passes."""
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    tokens, hidden_size = 250_002, 64
    own = len(torch.empty(tokens, device="meta").chunk(world)[rank])
    torch.manual_seed(rank)
    weight, hidden = torch.randn(own, hidden_size), torch.randn(2, 8, hidden_size)
    if mesh is not None:
        shape = {"shape": torch.Size((tokens, hidden_size)), "stride": (hidden_size, 1)}
        weight = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False, **shape)
    weight.requires_grad_()

    def run() -> list[torch.Tensor]:
        value = F.splade_head(hidden, weight, impl="tiles")
        (gradient,) = torch.autograd.grad(value, weight, torch.ones_like(value))
        return [gradient.to_local() if mesh else gradient]

    return 4 * own * hidden_size + peak_bytes(run, torch.device("cpu"))[0]


def test_the_page_says_what_a_rank_of_the_head_holds():
    peaks = [peak_of(0, 1), *(max(run_ranks(world, peak_of, world)) for world in WORLDS[1:])]
    (row,) = [x for x in PAGE.read_text("utf-8").splitlines() if x.startswith("| peak of a rank")]
    assert [int(n) for n in re.findall(r"(\d+) MiB", row)] == [round(x / 2**20) for x in peaks]


# Errors ------------------------------------------------------------------------------------------


def messages(rank: int) -> dict[str, str]:
    mesh, other = mesh_of("rows"), init_device_mesh("cpu", (2, 1))
    x, ids = torch.rand(4, 6), torch.tensor([[0, 9]] * 4)
    rows, columns = (distribute_tensor(x, mesh, [Shard(dim)]) for dim in range(2))
    states, weight = torch.rand(4, 2, 3), torch.rand(6, 3)
    by_position = distribute_tensor(states, mesh, [Shard(1)])
    by_token = distribute_tensor(weight, mesh, [Shard(0)])
    by_text = distribute_tensor(states, mesh, [Shard(0)])
    calls = {
        "gather": lambda: F.flops_loss(rows, gather=True),
        "objective": lambda: SpladeObjective({"query_flops": 1.0}, gather=True)(
            SpladeBatch(Texts(rows), Texts(rows))
        ),
        "mesh": lambda: F.info_nce_loss(rows, distribute_tensor(x, other, [Shard(0), Replicate()])),
        "positions": lambda: F.splade_pool(by_position, torch.ones(4, 2)),
        "candidates": lambda: F.distillation_loss(columns, x),
        "id": lambda: F.self_reconstruction_loss(columns, ids, torch.ones(4, 2)),
        "ids": lambda: F.positive_activation_loss(
            columns, distribute_tensor(ids, mesh, [Replicate()]), torch.ones(4, 2)
        ),
        "sparse": lambda: F.splade_head(states, by_token, sparse_grad=True),
        "both": lambda: F.splade_head(by_text, by_token),
        "tokens": lambda: F.splade_head(states, distribute_tensor(weight[:1], mesh, [Shard(0)])),
        "impl": lambda: F.info_nce_loss(rows, rows, positive_mask=torch.eye(4), impl="direct"),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        found[name] = str(error.value)
    return found


def test_errors_name_what_is_possible():
    expected = {
        "gather": "gather=False with a DTensor, whose placement says what is global",
        "objective": "gather=False with a DTensor",
        "mesh": "`positive` on the mesh",
        "positions": r"`logits` placed as Shard\(0\) or Shard\(2\) or Replicate\(\), got Sh",
        "candidates": r"`student_scores` placed as Shard\(0\) or Replicate\(\), got Shard\(dim=1",
        "id": r"`input_ids` in \[0, V\) with V = 6, got 9",
        "ids": r"token ids in \[0, V\) with V = 6, got 0 to 9",
        "sparse": "sparse_grad=False with a DTensor",
        "both": "`weight` sharded along B, as `hidden` is, or along another dimension of the mesh",
        "tokens": "V = 1 to leave a part for each of the 2 ranks",
        "impl": 'with impl="direct"',
    }
    for found in run_ranks(2, messages):
        assert found.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.search(pattern, found[name]), found[name]


# States ------------------------------------------------------------------------------------------


def statistics(layout: str | None, mesh: DeviceMesh) -> dict[str, Any]:
    """Two steps of everything that counts, from DTensors, or from plain tensors without a layout.

    Without a layout rank 0 counts alone.
    """
    torch.manual_seed(0)
    diagnostics = Diagnostics(V, special_token_ids=[1], stopword_ids=[2], top_k=3)
    frequency, queue = ActivationFrequency(V), LabelQueue(4, V, 2)
    documents = DocumentFrequency(V)
    controller = SparsityController(weight=0.1, target_active=20)
    postings = SparsityController(weight=0.1, target_posting=0.3)
    for _ in range(2):
        x, ids = torch.randn(B, V).relu(), torch.randint(V, (B, 8))
        x[0] = 0.0
        mask = torch.ones(B, 8)
        own, rest = (ids[:-1], mask[:-1]), (ids[-1:], mask[-1:])
        if layout:
            x = distribute_tensor(x, mesh, [Shard(0 if layout == "rows" else 1)])
            own = distribute_tensor(own[0], mesh, [Shard(0)]), own[1]
            rest = tuple(distribute_tensor(each, mesh, [Replicate()]) for each in rest)
        documents.update(*own)
        documents.update(*rest)
        diagnostics.update(x, ids, mask, Texts(x, ids.flip(0), mask))
        frequency.update(x)
        queue.enqueue(x, torch.eye(2).repeat(B // 2, 1))
        for each in (controller, postings):
            each.observe(x)
            if layout:
                each.step()
    report = dict(diagnostics.report())
    if layout:  # a text counts once, though every rank knows of it
        assert dict(diagnostics.all_reduce().report()) == pytest.approx(report, nan_ok=True)
        frequency.all_reduce()
        documents.all_reduce()
    return {
        "documents": [documents.df, documents.num_documents, documents.num_tokens],
        "threshold": F.calibrate_threshold(x, 40),
        "report": report,
        "frequency": frequency.frequency(),
        "postings": postings.frequency.frequency(),
        "queue": queue.state_dict(),
        "states": [controller.state_dict(), postings.state_dict()],
    }


def compare_states(rank: int) -> dict[str, Any]:
    mesh = mesh_of("rows")
    expected = statistics(None, mesh)
    for layout in ("rows", "columns"):
        found = statistics(layout, mesh)
        assert found["report"] == pytest.approx(expected["report"])
        torch.testing.assert_close(found["frequency"], expected["frequency"])
        torch.testing.assert_close(found["postings"], expected["postings"])
        torch.testing.assert_close(found["queue"], expected["queue"])
        torch.testing.assert_close(found["documents"], expected["documents"])
        assert found["threshold"] == expected["threshold"]
    return found["states"]


def test_states_are_those_of_one_process_on_every_rank():
    first, second = run_ranks(2, compare_states)
    assert first == second
