"""DTensors: rows of the contract on two and four gloo ranks, errors and states.

Tensors are placed by rows, by columns (the vocabulary) or by both on a mesh of two dimensions. Five
rows and odd widths leave uneven parts; a single row leaves a rank without any.
"""

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import sparse_losses as sl
import sparse_losses.functional as F
from sparse_losses._core.dtensors import full
from tests.cases import BASE_CASES, FIRST, LAYER_CASES, OBJECTIVE_CASES, Case, to_tensors
from tests.distributed.ranks import needs_dtensors, run_ranks

pytestmark = needs_dtensors
B, V = 10, 1000
CASES = BASE_CASES + LAYER_CASES + OBJECTIVE_CASES
LAYOUTS = {"rows": 2, "row": 2, "columns": 2, "both": 4}  # and on how many ranks
ALSO = "splade_pool-capped", "splade_head-all_logits", "token_weights-plain", "objective-pairs"
ON_FOUR = (*FIRST.values(), *(case for case in CASES if case.id in ALSO))
TOLERANCE = 1e-9
close = functools.partial(torch.testing.assert_close, rtol=TOLERANCE, atol=TOLERANCE)


def mesh_of(layout: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2) if layout == "both" else (2,))


def placements(case: Case, name: str, layout: str) -> list[Placement]:
    """Where a tensor has neither rows nor columns it is replicated."""
    dims = case.dims[name]
    rows: Placement = Shard(0) if dims[0] in "BNK" else Replicate()
    widths = "V" if case.stem == "splade_head" else "VD"
    column = next((Shard(i) for i, dim in enumerate(dims) if dim in widths), Replicate())
    return {"rows": [rows], "row": [rows], "columns": [column], "both": [rows, column]}[layout]


def distributed(
    case: Case, arrays: dict[str, Any], layout: str, mesh: DeviceMesh
) -> dict[str, torch.Tensor]:
    """The tensors of a case; one without a sharded dimension stays plain: it is replicated."""
    tensors = to_tensors(arrays)
    for name in case.dims:
        where = placements(case, name, layout)
        if any(placement.is_shard() for placement in where):
            tensors[name] = distribute_tensor(tensors[name], mesh, where)
    return tensors


def is_sharded(case: Case, layout: str) -> bool:
    """A case without such a tensor has nothing to say of DTensors."""
    places = (place for name in case.dims for place in placements(case, name, layout))
    return any(place.is_shard() for place in places)


COMPARED = [
    *((x, c, None) for x in ("rows", "columns") for c in CASES if is_sharded(c, x)),
    *(("rows", c, r) for r in ("none", "sum") for c in FIRST.values() if c.loss.reduces),
    *(("row", case, None) for case in FIRST.values()),
    *(("both", case, None) for case in ON_FOUR),
]


def evaluate(case: Case, tensors: dict[str, Any], reduction: str | None) -> list[torch.Tensor]:
    """Value and gradients."""
    leaves = [tensors[name].requires_grad_() for name in case.differentiable]
    options = {} if reduction is None else {"reduction": reduction}
    value = case.function()(**tensors, **options)
    assert not isinstance(value, DTensor) or value.ndim
    value = full(value)
    weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    gradients = torch.autograd.grad((weights * value).sum(), leaves, allow_unused=True)
    return [value.detach(), *(None if x is None else full(x) for x in gradients)]


def error_of(case: Case, layout: str, reduction: str | None, mesh: DeviceMesh) -> float:
    arrays = case.arrays(1 if layout == "row" else 5, seed=3)
    expected = evaluate(case, to_tensors(arrays), reduction)
    tensors = distributed(case, arrays, layout, mesh)
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


# What the table lacks ----------------------------------------------------------------------------

ROWS, COLUMNS, TWICE = (0,), (-1,), (0, 0)  # the dimensions that are sharded over the mesh


def forbidden(x: torch.Tensor) -> torch.Tensor:
    """Some logits are ``-inf``, and a rank has fewer columns than are asked for."""
    x = x.masked_fill(x < 0.3, -torch.inf)
    return F.min_activation_loss(x, torch.tensor([1, 2, 1, 2, 2]), top_k=7, threshold=3.0)


def total(*activations: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    objective = sl.SpladeObjective({"info_nce": weight, "document_flops": weight})
    return objective(sl.SpladeBatch(*map(sl.Texts, activations))).total


# A call, the shapes of its tensors, and where these are placed.
OTHERS: dict[str, tuple[Any, list[tuple[int, ...]], list[list[Any]]]] = {
    "sides": (F.info_nce_loss, [(5, 7)] * 2, [[ROWS, None], [None, COLUMNS], [COLUMNS, ROWS]]),
    "forbidden": (forbidden, [(5, 7)], [[ROWS], [COLUMNS]]),
    "kinks": (lambda x: F.idf_flops_loss(x, torch.ones(7)), [(5, 7)], [[ROWS], [COLUMNS]]),
    "uneven": (total, [(5, 7), (5, 7), (5, 2, 7)], [[ROWS] * 3]),
    "even, then uneven": (total, [(6, 7), (6, 7), (6, 2, 7)], [[TWICE] * 3]),
    "no term": (lambda x: total(x, x, weight=0.0), [(5, 7)], [[ROWS], [COLUMNS]]),
}


def derivatives(call: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The value, its gradients, and those of their square."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    value = call(*leaves)
    first = torch.autograd.grad(value, leaves, create_graph=True)
    square = sum(full(x).square().sum() for x in first)
    found = value, *first
    if square.requires_grad:
        found += torch.autograd.grad(square, leaves, allow_unused=True)
    return [None if x is None else full(x).detach() for x in found]


def compare_others(rank: int, world: int) -> None:
    mesh = mesh_of("both" if world == 4 else "rows")
    for name, (call, shapes, placed) in OTHERS.items():
        torch.manual_seed(0)
        tensors = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
        expected = derivatives(call, tensors)
        for places in placed:
            if len(next(filter(None, places))) == mesh.ndim:
                sides = [
                    distribute_tensor(x, mesh, [Shard(d % x.ndim) for d in dims]) if dims else x
                    for x, dims in zip(tensors, places, strict=True)
                ]
                close(derivatives(call, sides), expected, msg=name.__add__)


@pytest.mark.parametrize("world", [2, 4])
def test_second_derivatives_and_what_the_table_lacks(world):
    run_ranks(world, compare_others, world)


# Errors ------------------------------------------------------------------------------------------


def message(call: Any) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        call()
    return str(error.value)


def messages(rank: int) -> dict[str, str]:
    mesh, other = mesh_of("rows"), init_device_mesh("cpu", (2, 1))
    torch.manual_seed(0)
    x, ids = torch.rand(4, 6), torch.tensor([[0, 9]] * 4)
    rows, columns = (distribute_tensor(x, mesh, [Shard(dim)]) for dim in range(2))
    states, weight = torch.rand(4, 2, 3), torch.rand(6, 3)
    by_position = distribute_tensor(states, mesh, [Shard(1)])
    by_token = distribute_tensor(weight, mesh, [Shard(0)])
    by_text = distribute_tensor(states, mesh, [Shard(0)])

    def own(dim: int, rows: int, **shape: Any) -> DTensor:
        return DTensor.from_local(torch.rand(rows, 6), mesh, [Shard(dim)], run_check=False, **shape)

    def objective(x: DTensor, gather: bool = False) -> Any:
        return sl.SpladeObjective({"document_flops": 1.0}, gather=gather)(
            sl.SpladeBatch(*[sl.Texts(x)] * 2)
        )

    controller = sl.SparsityController(weight=0.1, target_active=2)
    counts, queue = sl.DocumentFrequency(9), sl.LabelQueue(4, 6, 1)
    five = {"shape": torch.Size((5, 6)), "stride": (6, 1)}
    calls = {
        "gather": lambda: F.flops_loss(rows, gather=True),
        "temperature": lambda: F.info_nce_loss(x, x, temperature=by_text.sum(), gather=True),
        "objective": lambda: objective(rows, gather=True),
        "mesh": lambda: F.info_nce_loss(rows, distribute_tensor(x, other, [Shard(0), Replicate()])),
        "positions": lambda: F.splade_pool(by_position, torch.ones(4, 2)),
        "candidates": lambda: F.distillation_loss(columns, x),
        "id": lambda: F.self_reconstruction_loss(columns, ids, torch.ones(4, 2)),
        "ids": lambda: F.positive_activation_loss(
            columns, distribute_tensor(ids, mesh, [Replicate()]), torch.ones(4, 2)
        ),
        "sparse": lambda: F.splade_head(states, by_token, sparse_grad=True),
        "both": lambda: F.splade_head(by_text, by_token),
        "hidden": lambda: F.splade_head(states + rank, by_token),
        "tokens": lambda: F.splade_head(states, distribute_tensor(weight[:1], mesh, [Shard(0)])),
        "impl": lambda: F.info_nce_loss(rows, rows, positive_mask=torch.eye(4), impl="direct"),
        # What the ranks do not agree on: nobody may wait, and no rank gets a value.
        "rows": lambda: F.flops_loss(own(1, 4 + rank)),
        "uneven": lambda: F.flops_loss(own(0, 2 + rank, **five)),
        "alike": lambda: F.flops_loss(own(0, 3, shape=torch.Size((4, 6)), stride=(6, 1))),
        "placement": lambda: F.flops_loss(columns if rank else rows),
        "number": lambda: F.idf_flops_loss(columns, torch.ones(6), beta=0.1 + rank),
        "plain": lambda: F.positive_activation_loss(
            columns, ids[:, rank:], torch.ones(4, 2)[:, rank:]
        ),
        "texts": lambda: objective(own(1, 4 + rank)),
        "several": lambda: sl.Diagnostics(3).update(sl.Texts(by_position)),
        "splade_head": lambda: F.splade_head(states[rank:], by_token),
        "splade_pool": lambda: F.splade_pool(own(1, 4 + rank)[:, None], torch.ones(4 + rank, 1)),
        "Diagnostics.update": lambda: sl.Diagnostics(12).update(own(1, 4 + rank)),
        "ActivationFrequency.update": lambda: sl.ActivationFrequency(12).update(own(1, 4 + rank)),
        "DocumentFrequency.update": lambda: counts.update(
            own(0, 2 + rank).long(), torch.ones(4, 6)
        ),
        "LabelQueue.enqueue": lambda: queue.enqueue(columns if rank else rows, torch.ones(4, 1)),
        "SparsityController.observe": lambda: controller.observe(columns if rank else rows),
        "calibrate_threshold": lambda: F.calibrate_threshold(own(1, 4 + rank), 2),
        # What one rank refuses.
        "refused": lambda: F.idf_flops_loss(columns, torch.ones(6), beta=0.5 - rank),
        "in terms": lambda: objective(columns[0] if rank else columns),
    }
    found = {name: message(call) for name, call in calls.items()}
    assert F.flops_loss(own(0, 3 - rank, **five)).isfinite(), "nothing is left in the pipes"
    return found


def test_errors_name_what_is_possible():
    expected = {
        "gather": "gather=False with a DTensor, whose placement says what is global",
        "objective": "gather=False with a DTensor",
        "temperature": "gather=False with a DTensor",
        "mesh": "`positive` on the mesh",
        "positions": r"`logits` placed as Shard\(0\) or Shard\(2\) or Replicate\(\), got Sh",
        "candidates": r"`student_scores` placed as Shard\(0\) or Replicate\(\), got Shard\(dim=1",
        "id": r"`input_ids` in \[0, V\) with V = 6, got 9",
        "ids": r"token ids in \[0, V\) with V = 6",
        "sparse": "sparse_grad=False with a DTensor",
        "both": "`weight` sharded along B, as `hidden` is, or along another dimension of the mesh",
        "hidden": "the same `hidden` on every rank beside DTensors",
        "tokens": r"`weight` to have a part for each of 2 ranks along V = 1: use Replicate\(\)",
        "impl": 'with impl="direct"',
        "rows": "same B on every rank for flops_loss, got 4 on rank 0, 5 on rank 1; the last batch",
        "uneven": r"same `activations` .*rank 0 has \[2, 6\] instead of \[3, 6\]",
        "alike": r"same `activations` .*rank 1 has \[3, 6\] instead of \[2, 6\]",
        "placement": r"same `activations` .*Shard\(dim=0\)\] on rank 0, .*\(dim=1\)\] on rank 1",
        "number": "same `beta` on every rank for idf_flops_loss, got 0.1 on rank 0, 1.1 on rank 1",
        "plain": r"same `positive_input_ids` .* \[4, 2\] on rank 0, \[4, 1\] on rank 1",
        "texts": "same B on every rank for SpladeObjective of document_flops, got 4 on rank 0, 5",
        "several": r"placed as Shard\(0\) or Shard\(2\) or Replicate\(\), got Shard\(dim=1",
        "refused": "(idf_flops_loss, got on rank 1 ValueError: |^)expected `beta` .*, got -0.5",
        "in terms": "(flops, got on rank 1 ValueError: |^)expected `anchor.* of shape .*, got .6",
    }
    for found in run_ranks(2, messages):
        assert found.keys() > expected.keys()
        for name, said in found.items():
            pattern = expected.get(name, f"expected the same .* on every rank for {name}, got")
            assert re.search(pattern, said), (name, said)


# States ------------------------------------------------------------------------------------------


def placed(x: torch.Tensor, layout: str | None, mesh: DeviceMesh) -> torch.Tensor:
    if layout is None:
        return x
    return distribute_tensor(x, mesh, [Shard(0 if layout == "rows" else x.ndim - 1)])


def statistics(layout: str | None, mesh: DeviceMesh) -> dict[str, Any]:
    """Two steps of everything that counts, from DTensors, or from plain tensors without a layout.

    Each mesh has its part of the texts. Without a layout this rank counts all texts alone.
    """
    torch.manual_seed(0)
    diagnostics = sl.Diagnostics(V, special_token_ids=[1], stopword_ids=[2], top_k=3)
    frequency, queue = sl.ActivationFrequency(V), sl.LabelQueue(4, V, 2)
    documents = sl.DocumentFrequency(V)
    controller = sl.SparsityController(weight=0.1, target_active=20)
    postings = sl.SparsityController(weight=0.1, target_posting=0.3)
    meshes, own = dist.get_world_size() // mesh.size(), dist.get_rank() // mesh.size()
    for step in range(2):
        x, ids = torch.randn(B * meshes, V).relu(), torch.randint(V, (B * meshes, 8))
        x[0] = 0.0
        if layout:
            x, ids = x.chunk(meshes)[own], ids.chunk(meshes)[own]
        mask = torch.ones(len(x), 8)
        several = [each.unflatten(0, (-1, 2)) for each in (x, ids, mask)]
        several = sl.Texts(placed(several[0], layout, mesh), *several[1:])
        numbers = placed(ids, layout and "rows", mesh)
        x, other = placed(x, layout, mesh), sl.Texts(x, (7 * ids) % V, mask)
        documents.update(numbers, mask)
        diagnostics.update(several if step else sl.Texts(x, numbers, mask), other_side=other)
        frequency.update(x)
        for each in (controller, postings):
            each.observe(several.activations if step else x)
            if layout:
                each.step()
        x = x if layout else x.chunk(meshes)[own]
        queue.enqueue(x, torch.eye(2).repeat(B // 2, 1))
    counted = [(diagnostics.report(), frequency.frequency())]
    if layout:  # a text counts once, though every rank of its mesh knows of it
        for each in (diagnostics, frequency, documents):
            each.all_reduce()
        counted.append((diagnostics.report(), frequency.frequency()))
    return {
        "counted": counted[meshes - 1 :] if layout else counted,
        "documents": [documents.df, documents.num_documents, documents.num_tokens],
        "threshold": F.calibrate_threshold(x, 40),
        "postings": postings.frequency.frequency(),
        "queue": queue.state_dict(),
        "states": [controller.state_dict(), postings.state_dict()],
    }


def compare_states(rank: int, world: int) -> dict[str, Any]:
    """Every rank's mesh has two ranks, and two meshes share the texts of four."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("texts", "own"))["own"]
    expected = statistics(None, mesh)
    for layout in ("rows", "columns"):
        found = statistics(layout, mesh)
        for report, frequency in found["counted"]:
            assert report == pytest.approx(expected["counted"][0][0])
            torch.testing.assert_close(frequency, expected["counted"][0][1])
        torch.testing.assert_close(found["postings"], expected["postings"])
        torch.testing.assert_close(found["queue"], expected["queue"])
        torch.testing.assert_close(found["documents"], expected["documents"])
        assert found["threshold"] == expected["threshold"]
    return found["states"]


@pytest.mark.parametrize("world", [2, 4])
def test_states_are_those_of_one_process_on_every_rank(world):
    first, *others = run_ranks(world, compare_states, world)
    assert others == [first] * (world - 1)
