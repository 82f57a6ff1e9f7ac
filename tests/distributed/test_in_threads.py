"""``gather=True`` on ranks that are threads: every case of the table, and every collective.

tests/distributed/test_gather.py has the plainest cases on ranks that are processes.
"""

import numpy as np
import pytest
import torch

import sparse_losses as sl
import sparse_losses.functional as F
from sparse_losses import distributed as d
from sparse_losses.functional import info_nce_loss
from sparse_losses.objective import terms
from tests.cases import CASES, FIRST, to_tensors
from tests.distributed.test_gather import PLAINEST, check, evaluate, whole
from tests.distributed.threads import run_threads


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_value_and_averaged_gradients_are_those_of_one_process(case):
    for world in (2, 3) if case in PLAINEST else (2,):
        for reduction in case.loss.reductions:
            run_threads(world, lambda own, w=world, r=reduction: check(case, own, w, r))


def test_the_value_may_be_changed_in_place():
    def changed(own):
        x = torch.eye(4, requires_grad=True)
        value = info_nce_loss(x, torch.eye(4), gather=True)
        value /= 2
        value.backward()
        assert x.grad.any()

    run_threads(2, changed)


VOIDABLE = [case for case in CASES if case.invalidate and not case.square]


@pytest.mark.parametrize("case", VOIDABLE, ids=lambda case: case.id)
def test_the_mean_is_over_the_valid_rows_of_all_ranks(case):
    name, value = case.invalidate
    arrays = whole(case, 2, seed=5)
    arrays[name][0] = value
    arrays[name][-len(arrays[name]) // 2 :] = value  # all rows of the last rank
    for reduction in ("mean", "sum") if case.loss.reduces else (None,):
        run_threads(2, lambda own, r=reduction: check(case, own, 2, r, arrays))


SPARSE = [
    case
    for case in CASES
    if case.impl != "definition" and {len(case.dims[n]) for n in case.those("csr")} == {2}
]


@pytest.mark.parametrize("case", SPARSE, ids=lambda case: case.id)
def test_sparse_rows_of_all_ranks_are_those_of_one_process(case):
    arrays = whole(case, 2, seed=3)
    for name in case.those("csr"):
        x = arrays[name]
        arrays[name] = np.abs(x) if case.stem == "min_activation" else x
        arrays[name] = np.where(np.abs(x) < 0.4, 0.0, arrays[name])

    def call(**tensors):
        sparse = {name: tensors[name].to_sparse_csr() for name in case.those("csr")}
        return case.function()(**tensors | sparse)

    for reduction in ("mean", "sum") if case.loss.reduces else (None,):
        run_threads(2, lambda own, r=reduction: check(case, own, 2, r, arrays, call))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_without_gather_the_other_ranks_change_nothing(case):
    parts = [case.arrays(3, seed=own) for own in range(2)]
    for impl in (case.impl, *case.implementations) if case.impl else (None,):
        options = {} if impl is None else {"impl": impl}
        expected = [evaluate(case, mine, **options) for mine in parts]
        found = run_threads(2, lambda own, o=options: evaluate(case, parts[own], **o))
        torch.testing.assert_close(found, expected)
        assert found[0][0] != found[1][0]


def _collectives(own):
    assert (d.rank(), d.num_ranks()) == (own, 2)
    x = torch.tensor([[1.0, 10.0]]) * (own + 1)
    signed = x * torch.tensor([1.0, -1.0])
    found = [d.maximum_over_ranks(signed), d.gather_rows(torch.tensor([own == 1]))]
    for function in (d.gather_rows, d.scatter_sum, d.sum_over_ranks, d.average_grad_over_ranks):
        leaf = x.expand(2, 2).T.clone().T.requires_grad_()  # not contiguous
        value = function(leaf)
        weight = torch.arange(1.0, 1 + value.numel()).view_as(value) * (own + 1)
        found += [value, *torch.autograd.grad(value, leaf, weight.T.clone().T)]
    return [each.tolist() for each in found]


def test_every_collective_and_its_gradient():
    first, second = run_threads(2, _collectives)
    assert first[:2] == second[:2] == [[[2, -10]], [False, True]]
    rows = [[1, 10], [1, 10], [2, 20], [2, 20]]
    assert (first[2:4], second[2:4]) == ([rows, [[3, 6], [9, 12]]], [rows, [[15, 18], [21, 24]]])
    assert first[4:6] == second[4:6] == [[[3, 30]], [[1, 2], [2, 4]]]
    assert first[6:8] == second[6:8] == [[[3, 30]] * 2, [[3, 6], [9, 12]]]
    mean = [[1.5, 3], [4.5, 6]]
    assert (first[8:], second[8:]) == ([[[1, 10]] * 2, mean], [[[2, 20]] * 2, mean])
    assert (d.rank(), d.num_ranks()) == (0, 1)


X, IDS, EYE = torch.rand(3, 3), torch.tensor([[0, 1]] * 3), torch.eye(3)
WITH = {"gather": True}


def enqueue(labels):
    sl.LabelQueue(4, 3, 3, gather=True).enqueue(X, labels)


# What is called, what it accepts, and what one rank alone refuses: by type, shape or value.
REFUSED = {
    "dtype": (lambda x: F.flops_loss(x, **WITH), X, X.long()),
    "type": (lambda x: F.flops_loss(x, **WITH), X, [[1.0]]),
    "number": (lambda t: F.info_nce_loss(X, X, temperature=t, **WITH), 0.1, -1.0),
    "id": (lambda ids: F.positive_activation_loss(X, ids, IDS < 2, **WITH), IDS, IDS + 2),
    "weight": (lambda w: F.flops_loss(X, w, **WITH), X[0], -X[0]),
    "label": (lambda labels: F.nws_loss(X, labels, X, None, **WITH), EYE, 7 * EYE),
    "queue": (enqueue, EYE, 7 * EYE),
}


BATCH = sl.SpladeBatch(*(sl.Texts(torch.rand(3, 3), IDS, IDS < 2) for _ in range(2)))


def _objective(batch=BATCH, weight=1.0, **options):
    built = terms.info_nce(sl.InfoNCELoss(**options)), terms.positive_activation("query")
    named = zip(("info_nce", "tokens"), built, strict=True)
    sl.SpladeObjective({name: (weight, x) for name, x in named}, gather=True)(batch)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"weight": 2.0}, r"weights\['info_nce'\] .* 1.0 on rank 0, 2.0 on rank 1"),
        ({"decoupled": True}, "`decoupled` .* False on rank 0, True on rank 1"),
        ({"batch": BATCH._replace(positive_ids=torch.arange(3))}, "None on rank 0, 1 on rank 1"),
    ],
)
def test_what_differs_between_the_ranks_of_an_objective_is_refused(change, expected):
    with pytest.raises(ValueError, match=f"expected the same .*{expected}"):
        run_threads(2, lambda own: _objective(**(change if own else {})))


REFUSED["batch of an objective"] = _objective, BATCH, BATCH._replace(positive=X)


MASKED = [BATCH._replace(candidate_mask=x * torch.ones(3, 6)) for x in (1, 2)]
FOREIGN = BATCH, BATCH._replace(positive=sl.Texts(torch.rand(3, 3), IDS + 2, IDS < 2))
OF_TERMS = ("tokens", "positive_input_ids", FOREIGN), ("info_nce", "candidate_mask", MASKED)


@pytest.mark.parametrize(("term", "argument", "batches"), OF_TERMS)
def test_what_one_rank_refuses_within_a_term_is_an_error_on_every_rank(term, argument, batches):
    first, second = run_threads(2, lambda own: error_of(_objective, batches[own]))
    assert f"the term '{term}': expected every rank to accept its arguments" in first
    assert f"the term '{term}': expected `{argument}`" in second
    assert f"expected `{argument}`" in first


def error_of(call, argument):
    try:
        call(argument)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_refuses_is_an_error_on_every_rank(name):
    call, right, wrong = REFUSED[name]

    def said(own, refusing):
        return error_of(call, wrong if own in refusing else right)

    refusal, _ = everyone = run_threads(2, said, [0, 1])
    assert everyone == [refusal] * 2
    first, second = run_threads(2, said, [1])
    assert second == refusal
    assert first.startswith("ValueError: expected every rank to accept its arguments for ")
    assert first.endswith(f" with gather=True, got on rank 1 {refusal}")
    assert run_threads(2, said, []) == [None, None]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda own: sl.ActivationFrequency(3 + own).all_reduce(), "V"),
        (lambda own: sl.Diagnostics(3 + own).all_reduce(), "V"),
        (lambda own: sl.DocumentFrequency(3, tokenizer_sha256="ab"[own]).all_reduce(), "tokenizer"),
        (lambda own: sl.LabelQueue(8, 1 + own, 3, **WITH).enqueue(X[:, : 1 + own], EYE), "D"),
        (lambda own: F.min_activation_loss(torch.rand(3, 4 + own), gather=True), "V"),
        (lambda own: F.info_nce_loss(X, X, X if own else None, **WITH), "N"),
        (lambda own: (F.idf_flops_loss if own else F.flops_loss)(X, X[0], **WITH), "call"),
    ],
)
def test_other_sizes_are_an_error_on_every_rank(call, name):
    for said in run_threads(2, lambda own: error_of(call, own)):
        assert f"expected the same {name}" in said


@pytest.mark.parametrize("case", FIRST.values(), ids=lambda case: case.id)
def test_another_number_of_rows_is_an_error_on_every_rank(case):
    def call(own):
        case.function()(**to_tensors(case.arrays(3 + own)), gather=True)

    for said in run_threads(2, lambda own: error_of(call, own)):
        assert "3 on rank 0, 4 on rank 1" in said
