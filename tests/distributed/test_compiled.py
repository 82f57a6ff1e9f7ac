"""Losses under torch.compile on two ranks, as eager: with gather in one graph, and DTensors."""

import functools

import pytest
import torch

import sparse_losses.functional as F
from sparse_losses import InfoNCELoss, SpladeBatch, SpladeHead, SpladeObjective, Texts
from sparse_losses._core.dtensors import full
from sparse_losses.objective import terms
from tests.cases import BASE_CASES, FIRST, LAYER_CASES, OBJECTIVE_CASES, to_tensors
from tests.distributed.ranks import needs_dtensors, run_ranks
from tests.distributed.test_dtensors import distributed, mesh_of
from tests.distributed.test_gather import part, whole

# A loss for each way to communicate, and InfoNCE with each kind of tensor that its options gather.
# The contract table compiles every loss and option on one rank.
LOSSES = "info_nce", "nws", "flops", "distillation", "margin_mse"
GATHERED = ("info_nce-shared", "info_nce-per_row", "info_nce-positives_ids_symmetric_decoupled")
BY_ID = {case.id: case for case in (*BASE_CASES, *LAYER_CASES, *OBJECTIVE_CASES)}
COMPILED = [*(FIRST[stem] for stem in LOSSES), *(BY_ID[name] for name in GATHERED)]
# The compiler would fail at the operators of min_activation.
PLACED = [FIRST[stem] for stem in ("info_nce", "flops", "min_activation")]
PLACED += [BY_ID["splade_head-plain"], BY_ID["objective-pairs"]]


def value_and_gradients(function, tensors: dict, names) -> list[torch.Tensor]:
    leaves = {n: tensors[n].detach().clone().requires_grad_() for n in names}
    value = full(function(**{**tensors, **leaves})).sum()
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return [value.detach(), *map(full, gradients)]


def compare(rank: int, layout: str | None) -> dict[str, str]:
    """What differs from eager mode, by case: with gather, or of DTensors in a layout."""
    wrong = {}
    for case in PLACED if layout else COMPILED:
        torch._dynamo.reset()
        if layout:
            function = case.loss.call or getattr(F, case.loss.function)
            tensors = distributed(case, case.arrays(5, seed=3), layout, mesh_of(layout))
        else:
            function = functools.partial(case.function(), gather=True)
            tensors = to_tensors(part(case, whole(case, 2, seed=3), rank, 2))
        # By PyTorch's own operations: code for them takes minutes.
        compiled = torch.compile(function, fullgraph=layout is None, backend="aot_eager")
        try:
            expected = value_and_gradients(function, tensors, case.differentiable)
            found = value_and_gradients(compiled, tensors, case.differentiable)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        except Exception as error:  # the other rank is told by its own
            wrong[case.id] = f"{type(error).__name__}: {error}"[:2000]
    return wrong


@pytest.mark.works_with("PyTorch", "compile", "devices")
def test_a_loss_over_two_ranks_is_one_graph_and_the_same():
    assert run_ranks(2, compare, None) == [{}, {}]


@needs_dtensors
def test_compiled_code_leaves_dtensors_to_eager_mode():
    assert run_ranks(2, compare, "columns") == [{}, {}]


def head_and_objective(rank: int) -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(2, 8, 3, 6, dtype=torch.float64)[:, 4 * rank : 4 * rank + 4]
    head = SpladeHead(torch.nn.Parameter(torch.randn(20, 6, dtype=torch.float64)))
    ranking = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.1)))
    objective = SpladeObjective(
        {
            "info_nce": (1.0, terms.info_nce(ranking)),
            "query_flops": (0.1, terms.flops("query")),
            "document_min_activation": (0.1, terms.min_activation("document")),
        },
        gather=True,
    )

    def train(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        sides = [Texts(head(x)) for x in (queries, documents)]
        return objective(SpladeBatch(*sides)).total

    results = []
    for called in (train, torch.compile(train, fullgraph=True, backend="aot_eager")):
        total = called(queries, documents)
        leaves = [*head.parameters(), *objective.parameters()]
        results.append([total.detach(), *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


@pytest.mark.works_with("PyTorch", "compile", "devices")
def test_head_and_objective_compile_together_over_two_ranks():
    run_ranks(2, head_and_objective)
