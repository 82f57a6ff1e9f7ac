"""SpladeObjective(gather=True), every term active: one process with all ranks' texts, to 1e-9.

For 2 and 3 ranks, every form of negatives and of teacher's scores, both paths, in fp64.
"""

import functools

import pytest
import torch
import torch.distributed as dist

from sparse_losses import (
    IdfFlopsLoss,
    InfoNCELoss,
    LanguagePenaltyLoss,
    MarginMSELoss,
    SelfReconstructionLoss,
    SpladeBatch,
    SpladeObjective,
    Texts,
)
from sparse_losses.objective.objective import NEEDS
from tests.distributed.ranks import run_ranks

B, V, S, N = 4, 30, 6, 3  # of each rank
SPECIAL, STOPWORDS = [0, 1], [7, 8, 9]

# What the objective is made with, beside the terms' weights.
OBJECTIVES = {
    "defaults": lambda: {},
    "stopwords": lambda: {"stopword_ids": STOPWORDS, "special_token_ids": SPECIAL},
    "options": lambda: {
        "special_token_ids": SPECIAL,
        "info_nce": InfoNCELoss(similarity="dot", symmetric=True),
        "flops": IdfFlopsLoss(torch.linspace(0.1, 2.0, V).double(), beta=0.4),
        "self_reconstruction": SelfReconstructionLoss(ignore_token_ids=SPECIAL, balanced=True),
        "score_scale": 3.0,
        "teacher_scale": 0.5,
    },
    "sums": lambda: {
        "info_nce": InfoNCELoss(decoupled=True, reduction="sum"),
        "margin_mse": MarginMSELoss(reduction="sum"),
    },
    "ring": lambda: {"info_nce": InfoNCELoss(impl="ring")},
}
# Negatives, and the teacher's scores that may stand beside them.
FORMS = [
    ("none", "all"),
    ("none", "ranks"),
    ("shared", "all"),
    ("shared", "ranks"),
    ("one", "all"),
    ("one", "ranks"),
    ("one", "own"),
    ("own", "all"),
    ("own", "ranks"),
    ("own", "own"),
]
OPTIONS = {2: tuple(OBJECTIVES), 3: ("stopwords", "options")}  # by the number of ranks


def cases(world: int):
    for negative, teacher in FORMS:
        for options in OPTIONS[world]:
            for impl in ("auto",) if options == "ring" else ("definition", "auto"):
                yield negative, teacher, options, impl


def objective(options: str, negative: str, *, gather: bool, impl: str) -> SpladeObjective:
    """Every term that these negatives allow, each with another weight; one weight is learned."""
    weights = {name: 0.3 + 0.1 * number for number, name in enumerate(NEEDS)}
    if negative in ("none", "shared"):
        del weights["triplet_margin"], weights["margin_mse"]
    weights["distillation"] = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    made = SpladeObjective(
        weights,
        language_penalty=LanguagePenaltyLoss(torch.linspace(0.0, 1.0, V).double()),
        gather=gather,
        impl=impl,
        **OBJECTIVES[options](),
    )
    if not gather:
        made.info_nce.impl = "auto"
    made.info_nce.temperature = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    return made


def texts(*shape: int) -> Texts:
    x = (torch.rand(*shape, V, dtype=torch.float64) - 0.4).relu()
    mask = torch.ones(*shape, S, dtype=torch.int64)
    mask[..., -1] = 0
    logits = torch.randn(*shape, V, dtype=torch.float64)
    return Texts(x, torch.randint(0, V, (*shape, S)), mask, logits)


def whole(world: int, negative: str, teacher: str) -> SpladeBatch:
    """The batch of all ranks."""
    rows, size = world * B, {"none": 0, "shared": world * N, "one": world * B, "own": N}[negative]
    anchor, positive = texts(rows), texts(rows)
    shape = (rows, N) if negative == "own" else (size,)
    negatives = None if negative == "none" else texts(*shape)
    scores = torch.randn(rows, rows + size, dtype=torch.float64)
    scores[0, 0] = scores[-1, -1] = -torch.inf  # one positive and one negative less
    own = torch.randn(rows, rows, dtype=torch.float64)
    if teacher == "own":
        scores = torch.randn(rows, 2 if negative == "one" else 1 + N, dtype=torch.float64)
        scores[0, 1] = scores[-1, 0] = -torch.inf
    elif teacher == "ranks":  # the candidates of the other ranks are none
        from_rank = torch.arange(rows) // B
        alike = from_rank[:, None] == from_rank
        own = own.masked_fill(~alike, -torch.inf)
        columns = [alike]
        if negative == "own":
            columns.append(torch.ones(rows, N, dtype=torch.bool))
        elif size:
            columns.append(from_rank[:, None] == torch.arange(size) // (size // world))
        scores = scores.masked_fill(~torch.cat(columns, 1), -torch.inf)
    ids = torch.arange(rows) % (rows - 2)  # two documents stand there twice
    return SpladeBatch(anchor, positive, negatives, ids, scores, own)


def part(batch: SpladeBatch, rank: int, world: int, negative: str, teacher: str) -> SpladeBatch:
    def mine(x):
        return x[rank * len(x) // world : (rank + 1) * len(x) // world]

    anchor, positive, negatives = (
        None if t is None else Texts(*(mine(x) for x in t)) for t in batch[:3]
    )
    scores, own = mine(batch.teacher_scores), mine(batch.teacher_anchor_scores)
    if teacher == "ranks":
        first = rank * B
        own = own[:, first : first + B]
        others = scores[:, world * B :]
        if negative in ("shared", "one"):
            others = others[:, rank * others.shape[1] // world :]
            others = others[:, : len(negatives.activations)]
        scores = torch.cat([scores[:, first : first + B], others], 1)
    return SpladeBatch(anchor, positive, negatives, mine(batch.positive_ids), scores, own)


def leaves(batch: SpladeBatch) -> tuple[SpladeBatch, list[torch.Tensor]]:
    """The batch with leaves of its own as activations and logits."""
    found = []
    sides = []
    for side in batch[:3]:
        if side is not None:
            x = side.activations.detach().clone().requires_grad_()
            logits = side.logits.detach().clone().requires_grad_()
            side = side._replace(activations=x, logits=logits)
            found += [x, logits]
        sides.append(side)
    return batch._replace(
        **dict(zip(("anchor", "positive", "negative"), sides, strict=True))
    ), found


def gradients(loss: SpladeObjective, batch: SpladeBatch, *, create_graph: bool = False):
    batch, inputs = leaves(batch)
    total, terms = loss(batch)
    held = [loss.info_nce.temperature, loss.weights["distillation"]]
    found = torch.autograd.grad(total, inputs + held, create_graph=create_graph)
    return total, terms, inputs, list(found[:-2]), list(found[-2:])


def share_of(x: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    return x[rank * len(x) // world : (rank + 1) * len(x) // world]


def compare(rank: int, world: int) -> dict[tuple[str, ...], str]:
    """What went wrong, by case."""
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    wrong = {}
    for case in cases(world):
        negative, teacher, options, impl = case
        torch.manual_seed(5)
        batch = whole(world, negative, teacher)
        total, terms, _, by_texts, by_held = gradients(
            objective(options, negative, gather=False, impl=impl), batch
        )
        mine = part(batch, rank, world, negative, teacher)
        own_total, own_terms, _, own_by_texts, own_by_held = gradients(
            objective(options, negative, gather=True, impl=impl), mine
        )
        wrong[case] = ""
        try:
            assert own_terms.keys() == terms.keys()
            for name in terms:
                close(own_terms[name], terms[name], msg=lambda m, name=name: f"{name}: {m}")
            close(own_total, total)
            for number, (found, expected) in enumerate(zip(own_by_texts, by_texts, strict=True)):
                expected = share_of(expected, rank, world)
                close(found / world, expected, msg=lambda m, i=number: f"gradient {i}: {m}")
                assert expected.any()
        except AssertionError as error:
            wrong[case] = str(error)
        for found, expected in zip(own_by_held, by_held, strict=True):
            average = found.clone()
            dist.all_reduce(average)
            if not torch.allclose(average / world, expected, rtol=1e-9, atol=1e-9):
                wrong[case] += f" learned: {average / world} instead of {expected}"
    return wrong


@functools.cache
def results(world: int):
    return run_ranks(world, compare, world)


@pytest.mark.parametrize(
    ("world", "case"),
    [pytest.param(w, case, id="-".join([str(w), *case])) for w in OPTIONS for case in cases(w)],
)
def test_values_and_averaged_gradients_are_those_of_one_process(world, case):
    assert [found[case] for found in results(world)] == [""] * world


def second_order(rank: int, world: int) -> list[float]:
    """By how much a derivative of the gradients differs from one process's, relative."""
    worst = []
    for impl in ("definition", "auto"):
        torch.manual_seed(5)
        batch = whole(world, "own", "all")
        mine = part(batch, rank, world, "own", "all")
        _, _, inputs, by_texts, _ = gradients(
            objective("options", "own", gather=False, impl=impl), batch, create_graph=True
        )
        along = [torch.randn_like(x) for x in inputs]
        dots = sum((g * v).sum() for g, v in zip(by_texts, along, strict=True))
        expected = torch.autograd.grad(dots, inputs)
        _, _, own_inputs, own_by_texts, _ = gradients(
            objective("options", "own", gather=True, impl=impl), mine, create_graph=True
        )
        own_along = [share_of(v, rank, world) for v in along]
        own_dots = sum((g * v).sum() for g, v in zip(own_by_texts, own_along, strict=True))
        found = torch.autograd.grad(own_dots, own_inputs)
        for x, y in zip(found, expected, strict=True):
            y = share_of(y, rank, world)
            worst.append(((x / world - y).norm() / y.norm()).item())
    return worst


def test_second_derivatives_are_those_of_one_process():
    for found in run_ranks(2, second_order, 2):
        assert max(found) < 1e-9
