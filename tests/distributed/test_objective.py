"""SpladeObjective(gather=True), every term active: one process with all ranks' texts, to 1e-9.

Every form of negatives and of teacher's scores, in fp64.
"""

import functools

import torch
import torch.distributed as dist

import sparse_losses as sl
from tests.distributed.ranks import run_ranks
from tests.objective import making

B, V, S, N = 4, 30, 6, 3  # of each rank
SPECIAL, STOPWORDS = [0, 1], [7, 8, 9]

# What the objective is made with, beside the terms' weights: losses and settings.
OBJECTIVES = {
    "defaults": lambda: ({}, {}),
    "masked": lambda: ({}, {}),  # by `candidate_mask`
    "stopwords": lambda: ({}, {"stopword_ids": STOPWORDS, "special_token_ids": SPECIAL}),
    "options": lambda: (
        {
            "info_nce": sl.InfoNCELoss(similarity="dot", symmetric=True),
            "flops": sl.IdfFlopsLoss(torch.linspace(0.1, 2.0, V).double(), beta=0.4),
        },
        {
            "special_token_ids": SPECIAL,
            "similarity": "dot",
            "score_scale": 3.0,
            "teacher_scale": 0.5,
        },
    ),
    "sums": lambda: (
        {
            "info_nce": sl.InfoNCELoss(decoupled=True, reduction="sum"),
            "margin_mse": sl.MarginMSELoss(reduction="sum"),
        },
        {},
    ),
}
# Negatives, and what the teacher scores: all candidates of the rank, or each anchor's own.
FORMS = [("none", "ranks"), ("shared", "ranks"), ("one", "ranks"), ("own", "ranks")]
FORMS += [("one", "own"), ("own", "own")]
WORLD = 2
CASES = [(*form, options) for form in FORMS for options in OBJECTIVES]


def objective(options: str, negative: str, *, gather: bool) -> sl.SpladeObjective:
    """Every term that these negatives allow, each with another weight; one weight is learned."""
    weights = {name: 0.3 + 0.1 * number for number, name in enumerate(making.BUILDERS)}
    if negative in ("none", "shared"):
        del weights["triplet_margin"], weights["margin_mse"]
    weights["distillation"] = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    losses, settings = OBJECTIVES[options]()
    made = making.objective(weights, losses, vocab=V, gather=gather, **settings)
    learned = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    made.terms["info_nce"].loss.temperature = learned
    return made


def texts(*shape: int) -> sl.Texts:
    x = (torch.rand(*shape, V, dtype=torch.float64) - 0.4).relu()
    mask = torch.ones(*shape, S, dtype=torch.int64)
    mask[..., -1] = 0
    logits = torch.randn(*shape, V, dtype=torch.float64)
    return sl.Texts(x, torch.randint(0, V, (*shape, S)), mask, logits)


def whole(negative: str, teacher: str, options: str) -> sl.SpladeBatch:
    """The batch of all ranks."""
    rows, size = WORLD * B, {"none": 0, "shared": WORLD * N, "one": WORLD * B, "own": N}[negative]
    anchor, positive = texts(rows), texts(rows)
    shape = (rows, N) if negative == "own" else (size,)
    negatives = None if negative == "none" else texts(*shape)
    from_rank = torch.arange(rows) // B
    alike = from_rank[:, None] == from_rank
    anchors = torch.randn(rows, rows, dtype=torch.float64).masked_fill(~alike, -torch.inf)
    if teacher == "own":
        scores = torch.randn(rows, 2 if negative == "one" else 1 + N, dtype=torch.float64)
        scores[0, 1] = scores[-1, 0] = -torch.inf  # one negative and one positive less
    else:  # the candidates of the other ranks are none
        columns = [alike]
        if negative == "own":
            columns.append(torch.ones(rows, N, dtype=torch.bool))
        elif size:
            columns.append(from_rank[:, None] == torch.arange(size) // (size // WORLD))
        scores = torch.randn(rows, rows + size, dtype=torch.float64)
        scores[0, 0] = scores[-1, -1] = -torch.inf
        scores = scores.masked_fill(~torch.cat(columns, 1), -torch.inf)
    ids = torch.arange(rows) % (rows - 2)  # two documents stand there twice
    theirs = "own" if teacher == "own" else None  # four by four is also the positives of a rank
    mask = torch.rand(rows, rows + size) < 0.8 if options == "masked" else None
    return sl.SpladeBatch(anchor, positive, negatives, ids, scores, anchors, theirs, mask)


def share_of(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x[rank * len(x) // WORLD : (rank + 1) * len(x) // WORLD]


def part(batch: sl.SpladeBatch, rank: int, negative: str, teacher: str) -> sl.SpladeBatch:
    mine = functools.partial(share_of, rank=rank)
    anchor, positive, negatives = (
        None if t is None else sl.Texts(*(mine(x) for x in t)) for t in batch[:3]
    )
    scores, first = mine(batch.teacher_scores), rank * B
    anchors = mine(batch.teacher_anchor_scores)[:, first : first + B]
    if teacher == "ranks":
        others = scores[:, WORLD * B :]
        if negative in ("shared", "one"):
            others = others[:, rank * others.shape[1] // WORLD :]
            others = others[:, : len(negatives.activations)]
        scores = torch.cat([scores[:, first : first + B], others], 1)
    ids, theirs = mine(batch.positive_ids), batch.teacher_candidates
    mask = None if batch.candidate_mask is None else mine(batch.candidate_mask)
    return sl.SpladeBatch(anchor, positive, negatives, ids, scores, anchors, theirs, mask)


def gradients(loss: sl.SpladeObjective, batch: sl.SpladeBatch):
    """Total, terms, and gradients by activations and logits, and by what is learned."""
    leaves, sides = [], []
    for side in batch[:3]:
        if side is not None:
            pair = [x.detach().clone().requires_grad_() for x in (side.activations, side.logits)]
            leaves += pair
            side = side._replace(activations=pair[0], logits=pair[1])
        sides.append(side)
    total, terms = loss(sl.SpladeBatch(*sides, *batch[3:]))
    held = [loss.terms["info_nce"].loss.temperature, loss.weights["distillation"]]
    grads = torch.autograd.grad(total, leaves + held)
    return total, terms, list(grads[:-2]), list(grads[-2:])


def compare(rank: int) -> dict[tuple[str, ...], str]:
    """What differs, by case."""
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    wrong = {}
    for case in CASES:
        negative, teacher, options = case
        torch.manual_seed(5)
        batch = whole(negative, teacher, options)
        total, terms, by_texts, by_held = gradients(
            objective(options, negative, gather=False), batch
        )
        own_total, own_terms, own_by_texts, own_by_held = gradients(
            objective(options, negative, gather=True),
            part(batch, rank, negative, teacher),
        )
        own_by_held = [x.clone() for x in own_by_held]
        for gradient in own_by_held:
            dist.all_reduce(gradient)
        try:
            close(own_terms, terms)
            close(own_total, total)
            by_texts = [share_of(x, rank) for x in by_texts]
            close([x / WORLD for x in own_by_texts], by_texts)
            close([x / WORLD for x in own_by_held], by_held)
            assert all(x.any() for x in by_texts)
        except AssertionError as error:
            wrong[case] = repr(error)
    return wrong


def test_values_and_averaged_gradients_are_those_of_one_process():
    assert run_ranks(WORLD, compare) == [{}] * WORLD
