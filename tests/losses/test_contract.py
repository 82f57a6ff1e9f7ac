"""What every loss promises (docs/contract.md), and pooling, head and objective, case by case."""

import copy
import inspect
import itertools
import pickle
import re
import subprocess
import sys

import pytest
import torch

import sparse_losses
import sparse_losses.functional as F
from tests.cases import (
    BASE_CASES,
    CASES_AND_LAYERS,
    FIRST,
    LAYER_CASES,
    LOSSES,
    OBJECTIVE_CASES,
    B,
    Case,
    D,
    V,
    assert_follows_the_formula,
    sparse_pair,
    to_arrays,
    to_tensors,
)
from tests.instruments import counting, default_dtype, gradients, weigh

# CASES has a case twice where an implementation beside the definition supports it, a layer's by
# each of them. What does not depend on the implementation runs over ONCE: arguments are checked and
# converted before one is chosen, and compiled, under transforms and for second derivatives it is
# the definition (tests/_core/test_implementations.py).
CASES = CASES_AND_LAYERS
ONCE = BASE_CASES + LAYER_CASES
TRANSFORMED = ONCE + OBJECTIVE_CASES
VOIDABLE = [case for case in CASES if case.invalidate]
WITH_CONSTANTS = [
    case
    for case in BASE_CASES
    if any(case.arrays().get(name) is not None for name in case.loss.constructor)
]
MASKED = [case for case in ONCE if case.masks]


def over(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


def over_reductions(cases):
    """Each case with each reduction; with ``None`` where a loss takes none."""
    some = [
        pytest.param(case, reduction, id=f"{case.id}-{reduction}")
        for case in cases
        for reduction in case.loss.reductions
    ]
    return pytest.mark.parametrize(("case", "reduction"), some)


over_losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.stem)


def watch(case: Case, tensors: dict, *, learned: bool = False) -> dict:
    """Turn the differentiable tensors, and the temperature, into leaves; return them."""
    names = list(case.differentiable)
    if learned and "temperature" in case.loss.hyperparameters:
        number = {**case.loss.hyperparameters, **case.kwargs}["temperature"]
        tensors["temperature"] = torch.tensor(number, dtype=torch.float64)
        names.append("temperature")
    for name in names:
        tensors[name] = tensors[name].detach().clone().requires_grad_()
    return {name: tensors[name] for name in names}


def alive(value: torch.Tensor) -> torch.Tensor:
    """Insist that a value is not zero: zero equals zero whatever the loss computes."""
    assert value.detach().any()
    return value


def assert_zero_with_a_graph(value: torch.Tensor, leaves: dict) -> None:
    assert value.requires_grad
    assert not value.any()
    for gradient in gradients(value.sum(), leaves).values():
        assert not gradient.any()  # a NaN is not zero either


def none(case: Case) -> dict:
    return {"reduction": "none"} if case.loss.reduces else {}


def rounding(case: Case, expected: float) -> float:
    """Return what fp32 arithmetic may lose on this case."""
    temperature = case.kwargs.get("temperature", 1.0)
    return 64 * torch.finfo(torch.float32).eps * max(1.0, abs(expected)) / min(1.0, temperature)


# One signature, two twins -------------------------------------------------------------------------


@over_losses
def test_the_signature_is_the_oracles_and_what_all_losses_share(loss):
    shared = {"gather": False, "impl": "auto", "reduction": "mean"}
    parameters = inspect.signature(getattr(F, loss.function)).parameters
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters.values()]
    own = [p for p in bare if p.name not in shared]
    oracle = inspect.signature(loss.oracle).replace(return_annotation=inspect.Signature.empty)
    assert str(inspect.Signature(own)) == str(oracle)
    assert bare[: len(own)] == own
    assert {p.name: p.default for p in bare[len(own) :]}.items() <= shared.items()
    assert [name for name in parameters if name in loss.tensors] == [*loss.tensors]


OVERRIDES = ("gather", "impl")  # what a call of a module may say besides


@over_losses
def test_the_module_takes_the_same_hyperparameters_and_tensors(loss):
    parameters = inspect.signature(getattr(F, loss.function)).parameters
    tensors = {name: parameters[name] for name in loss.tensors}
    module = getattr(sparse_losses, loss.module)
    constructor = inspect.signature(module).parameters
    forward = inspect.signature(module.forward).parameters
    forward = {n: p for n, p in forward.items() if n not in OVERRIDES}
    assert list(constructor) == [*loss.constructor, *loss.hyperparameters]
    assert list(forward)[1:] == [name for name in tensors if name not in loss.constructor]
    for name, default in loss.hyperparameters.items():
        assert constructor[name].default == default
    for name in list(forward)[1:]:
        assert forward[name].default == tensors[name].default
        assert forward[name].kind == tensors[name].kind


@over([case for case in BASE_CASES if case.loss.module])
def test_the_module_and_its_copies_equal_the_function(case):
    tensors = case.tensors()
    for options in ({}, none(case)):
        module, rest = case.module(tensors, **options)
        copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        for each in (module, module, *copies):  # the second time as the first left it
            assert torch.equal(each(**rest), alive(case.function()(**tensors, **options)))


@over_losses
def test_a_call_overrides_gather_and_impl_for_that_call(loss):
    case = FIRST[loss.stem]
    tensors = case.tensors()
    module, rest = case.module(tensors)
    expected = alive(module(**rest))
    # Without other ranks it is the same number, maybe by another implementation.
    impl = [("impl", "definition", "quickly")] if loss.implementations else []
    overrides = [("gather", True, "yes"), *impl]
    for name, value, wrong in overrides:
        before = getattr(module, name)
        for call in (module(**rest, **{name: value}), case.function()(**tensors, **{name: value})):
            torch.testing.assert_close(call, expected, rtol=1e-12, atol=1e-12)
        assert getattr(module, name) == before
        with pytest.raises((TypeError, ValueError), match=f"expected `{name}` to be "):
            module(**rest, **{name: wrong})


@over([case for case in ONCE if case.loss.implementations])
def test_every_implementation_equals_the_definition_or_is_refused_with_a_reason(case):
    tensors = case.tensors()
    leaves = watch(case, tensors)
    call = case.function()
    expected = alive(call(**tensors, impl="definition"))
    wanted = gradients(expected, leaves)
    for impl in case.loss.implementations:
        if impl not in case.implementations:
            with pytest.raises(ValueError, match=f'expected .* with impl="{impl}"; impl="auto"'):
                call(**tensors, impl=impl)
            continue
        value = call(**tensors, impl=impl)
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradients(value, leaves), wanted, rtol=1e-9, atol=1e-11)


@over(WITH_CONSTANTS)
def test_constructor_tensors_are_buffers_that_follow_the_module(case):
    """Even those that were made in inference mode, which autograd cannot save."""
    (name,) = case.loss.constructor
    tensors = case.tensors()
    leaves = watch(case, tensors)
    expected = alive(case.function()(**tensors))
    with torch.inference_mode():
        module, rest = case.module({**tensors, name: tensors[name].clone()})
    assert torch.equal(module.state_dict()[name], tensors[name])
    assert torch.equal(module(**rest), expected)
    other, _ = case.module({**tensors, name: torch.zeros_like(tensors[name])})
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(**rest), expected)
    torch.testing.assert_close(gradients(module(**rest), leaves), gradients(expected, leaves))
    module, _ = case.module({**tensors, name: tensors[name].clone().requires_grad_()})
    assert not [*module.parameters()]
    assert not getattr(module, name).requires_grad
    single = module.float()(**to_tensors(to_arrays(rest), torch.float32))
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(expected.item(), rel=1e-4)


@over([c for c in BASE_CASES if c.kwargs])
def test_hyperparameters_are_plain_attributes_that_schedules_assign_and_repr_shows(case):
    tensors = case.tensors()
    base, rest = Case(case.stem, "default", case.make).module(tensors)
    for name, value in case.kwargs.items():
        assert name in vars(base)
        setattr(base, name, value)
        assert f"{name}=" in repr(base)
    assert repr(base).startswith(case.loss.module)
    assert base(**rest).item() == pytest.approx(case.expected(case.arrays()), rel=1e-9, abs=1e-12)


# Values, reductions, and rows that are not valid --------------------------------------------------


@over(ONCE)
def test_value_is_the_formula_for_every_reduction_and_batch_size(case):
    for batch in range(case.fewest_rows, B + 1):
        assert_follows_the_formula(case.stem, case.arrays(batch), **case.kwargs)
    assert case.expected(case.arrays()) != 0.0


def _void(case: Case, tensors: dict, rows) -> None:
    name, value = case.invalidate
    tensors[name] = tensors[name].clone()
    for row in rows:
        tensors[name][row] = value


@over(VOIDABLE)
@pytest.mark.parametrize("learned", [False, True], ids=["", "learned temperature"])
def test_a_row_that_is_not_valid_is_zero_without_gradient_and_hides_its_nan(case, learned):
    tensors = case.tensors()
    _void(case, tensors, [2])
    expected = case.expected(to_arrays(tensors))
    for name in case.private:
        tensors[name] = tensors[name].clone()
        tensors[name][2] = torch.nan
    leaves = watch(case, tensors, learned=learned)
    with torch.autograd.set_detect_anomaly(True):  # an error for a NaN that is hidden later, too
        value = case.function()(**tensors, **none(case))
        grads = gradients(weigh(value), leaves)
    if case.loss.reduces:
        assert value[2] == 0.0
        assert (value.detach() != 0).sum() >= B - 2
    mean = case.function()(**tensors)
    assert mean.item() == pytest.approx(expected, rel=1e-9)
    for computed in (grads, gradients(mean, leaves)):
        for name, gradient in computed.items():
            assert torch.isfinite(gradient).all()
            assert gradient.any()
            if name in case.private:
                assert not gradient[2].any()


def _fill(name: str, value: float, *shape: int) -> dict:
    return {name: torch.full(shape, value, dtype=torch.float64)}


BY_ID = {case.id: case for case in BASE_CASES}
ALL_LABELS = {
    name: torch.ones(rows, 4, dtype=torch.long)
    for name, rows in (("query_labels", B), ("key_labels", 5), ("queue_labels", 6))
}
NOTHING_VALID = {  # no negatives, no references to compete, no weight: the call and what it changes
    "decoupled_alone": ("info_nce-decoupled", 1, {}),
    "decoupled_without_negatives": ("info_nce-decoupled", 1, _fill("negative", 0, 0, D)),
    "decoupled_duplicates": (
        "info_nce-ids_symmetric_decoupled",
        B,
        {"positive_ids": torch.full((B,), 7)},
    ),
    "triplet_without_negatives": ("triplet_margin-cosine", B, _fill("negative", 0, B, 0, D)),
    "nws_without_negatives": ("nws-exact", B, ALL_LABELS),
    "weights_of_zero": ("positive_activation-all", B, _fill("token_weight", 0, V)),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("problem", NOTHING_VALID)
def test_rows_without_anything_to_compare_are_zero_and_hide_their_nan(problem, reduction):
    name, batch, changes = NOTHING_VALID[problem]
    case = BY_ID[name]
    tensors = {**case.tensors(batch=batch), **changes}
    for name in case.differentiable:
        if name in case.rows:
            tensors[name] = torch.full_like(tensors[name], torch.nan)
    leaves = watch(case, tensors)
    value = case.function()(**tensors, reduction=reduction)
    assert value.shape == ((batch,) if reduction == "none" else ())
    assert_zero_with_a_graph(value, leaves)


@over_reductions(VOIDABLE)
def test_no_valid_row_gives_zero_with_a_graph(case, reduction):
    tensors = case.tensors()
    alive(case.function()(**tensors))
    _void(case, tensors, range(B))
    leaves = watch(case, tensors)
    value = case.function()(**tensors, **({"reduction": reduction} if reduction else {}))
    assert_zero_with_a_graph(value, leaves)


@over([case for case in BASE_CASES if case.fewest_rows])
def test_too_few_rows_are_refused(case):
    for batch in range(case.fewest_rows):
        _refuses(case, case.tensors(batch), "estimator", exception=ValueError)


# The head's tiles refuse a batch without a position; in the objective distillation refuses one
# without a candidate.
@over(
    [
        case
        for case in CASES
        if case.fewest_rows == 0 and case.impl != "tiles" and case.stem != "objective"
    ]
)
def test_an_empty_batch_gives_zero_with_a_graph_and_one_row_a_finite_gradient(case):
    alive(case.function()(**case.tensors(batch=3)))
    tensors = case.tensors(batch=0)
    leaves = watch(case, tensors)
    for reduction in case.loss.reductions:
        value = case.function()(**tensors, **({"reduction": reduction} if reduction else {}))
        assert value.shape == ((0,) if reduction == "none" else ())
        assert_zero_with_a_graph(value, leaves)
    tensors = case.tensors(batch=1)
    leaves = watch(case, tensors)
    assert all(x.isfinite().all() for x in gradients(case.function()(**tensors), leaves).values())


# Precision ----------------------------------------------------------------------------------------


def skip_where_the_head_rounds(case):
    """The head is a layer: off the CPU its definition multiplies halves as ``nn.Linear`` does."""
    is_the_cpu = torch.get_default_device().type == "cpu"
    if not is_the_cpu and (case.stem, case.impl) == ("splade_head", "definition"):
        pytest.skip("its products are rounded to their dtype there")


@over(CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_dtype_loses_no_more_than_fp32_rounding(case, dtype):
    skip_where_the_head_rounds(case)
    tensors = case.tensors(dtype=dtype)
    exact = to_tensors(to_arrays(tensors))
    leaves, references = watch(case, tensors), watch(case, exact)
    value = case.function()(**tensors)
    assert value.dtype == torch.float32
    expected = case.expected(to_arrays(exact))
    assert abs(value.item() - expected) <= rounding(case, expected)
    expected_gradients = gradients(case.function()(**exact), references)
    for name, gradient in gradients(value, leaves).items():
        assert gradient.dtype == dtype
        reference = expected_gradients[name]
        error = (gradient.double() - reference).norm()
        bound = (torch.finfo(dtype).eps + rounding(case, 1.0)) * reference.norm()
        assert error <= bound + 1e-7


@over(
    [
        c
        for c in CASES
        if sum(a is not None and a.dtype.kind == "f" for a in c.arrays().values()) > 1
    ]
)
@pytest.mark.parametrize("high", [torch.float32, torch.float64], ids=str)
def test_mixed_dtypes_promote(case, high):
    skip_where_the_head_rounds(case)
    tensors = case.tensors(dtype=torch.bfloat16)
    name = case.differentiable[-1]
    tensors[name] = tensors[name].to(high)
    leaves = watch(case, tensors)
    value = case.function()(**tensors)
    assert value.dtype == high
    expected = case.expected(to_arrays(tensors))
    assert abs(value.item() - expected) <= (
        rounding(case, expected)
        if high == torch.float32 or case.stem == "objective"  # its other terms see bf16 alone
        else 1e-9 * max(1.0, abs(expected))
    )
    for leaf, gradient in gradients(value, leaves).items():
        assert gradient.dtype == leaves[leaf].dtype


SETTINGS = {  # the dtype of the inputs, and what is switched on
    "autocast": (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast of bf16": (torch.bfloat16, lambda: torch.autocast("cpu", torch.bfloat16)),
    "bf16 by default": (torch.float32, lambda: default_dtype(torch.bfloat16)),
    "fp64 by default": (torch.float32, lambda: default_dtype(torch.float64)),
    "no_grad": (torch.float64, torch.no_grad),
    "inference_mode": (torch.float64, torch.inference_mode),
}


@over(CASES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_changes_neither_value_nor_gradient(case, setting):
    dtype, switched = SETTINGS[setting]
    tensors = case.tensors(dtype=dtype)
    leaves = watch(case, tensors)
    plain = alive(case.function()(**tensors))
    with switched():
        value = case.function()(**tensors)
        found = gradients(value, leaves) if "default" in setting else None
    if value.requires_grad and found is None:  # a backward pass is outside of autocast
        found = gradients(value, leaves)
    torch.testing.assert_close(value, plain.detach() if found is None else plain, rtol=0, atol=0)
    assert (found is None) == (switched in (torch.no_grad, torch.inference_mode))
    if found is not None:
        torch.testing.assert_close(found, gradients(plain, leaves), rtol=0, atol=0)


# One graph ----------------------------------------------------------------------------------------


@over(TRANSFORMED)
def test_it_compiles_into_one_graph(case):
    """One case a loss by Inductor, as a module."""
    if case.stem == "objective" and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("PyTorch 2.6 compiles an objective, but not the constructor of a loss")
    torch._dynamo.reset()
    tensors = case.tensors(dtype=torch.float32)
    leaves = watch(case, tensors)
    plain = alive(case.function()(**tensors))
    function, backend, rest = case.function(), "aot_eager", tensors
    if case in FIRST.values():
        (function, rest), backend = case.module(tensors), "inductor"
    elif case in BASE_CASES:  # Dynamo alone decides whether an option leaves one graph
        backend = "eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)(**rest)
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-6)
    expected = gradients(plain, leaves)
    torch.testing.assert_close(gradients(compiled, leaves), expected, rtol=1e-4, atol=1e-5)


@over([*FIRST.values(), next(case for case in LAYER_CASES if case.id == "splade_head-all")])
def test_one_graph_serves_every_batch_size(case):
    torch._dynamo.reset()
    graphs, count = counting()
    compiled = torch.compile(case.function(), fullgraph=True, dynamic=True, backend=count)
    for batch in (2, 3, 4, 5, 6):
        tensors = case.tensors(batch=batch, dtype=torch.float32)
        torch.testing.assert_close(compiled(**tensors), alive(case.function()(**tensors)))
    assert len(graphs) == 1


# Every hyperparameter whose default is a float; NWS's beta weighs keys, which the first case lacks.
SCHEDULED = [
    case
    for case in (*FIRST.values(), BY_ID["nws-key"], BY_ID["min_activation-counted"])
    if case.loss.numbers and case is not FIRST["nws"]
]


@over(SCHEDULED)
def test_assigned_numbers_compile_at_most_one_more_graph(case):
    torch._dynamo.reset()
    graphs, count = counting("inductor" if "margin" in case.loss.numbers else "aot_eager")
    tensors = case.tensors()
    leaves = watch(case, tensors)
    module, rest = case.module(tensors)
    compiled = torch.compile(module, fullgraph=True, backend=count)
    values = set()
    for number in (None, 5.9, 6.1, 6.3, 6.5, 6.7):
        for place, name in enumerate(case.loss.numbers if number else ()):
            setattr(module, name, number + place)
        value, expected = compiled(**rest), module(**rest)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
        actual, wanted = gradients(value, leaves), gradients(expected, leaves)
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)
        values.add(value.item())
        if len(values) == 2:
            settled = len(graphs)
    for name in case.loss.numbers:  # each counts
        setattr(module, name, 9.9)
        values.add(module(**rest).item())
    assert len(values) == 6 + len(case.loss.numbers)
    assert settled <= 2
    assert len(graphs) == settled


# Errors name the argument -------------------------------------------------------------------------


def _refuses(case: Case, tensors: dict, *names: str, exception=(ValueError, TypeError)) -> str:
    with pytest.raises(exception) as caught:
        case.function()(**tensors)
    message = str(caught.value)
    assert any(re.search(rf"\b{name}\b", message) for name in names), message
    return message


def _present(case: Case) -> dict:
    return {k: v for k, v in case.tensors().items() if v is not None}


@over(ONCE)
def test_another_dimension_is_refused(case):
    for name in _present(case):
        tensors = case.tensors()
        tensors[name] = tensors[name].unsqueeze(0)
        message = _refuses(case, tensors, name)
        assert str(list(tensors[name].shape))[1:-1] in message, "the received shape is not shown"


@over(ONCE)
def test_another_dtype_device_or_type_is_refused(case):
    for place, (name, tensor) in enumerate(_present(case).items()):
        wrong = [tensor.tolist()]
        if place > 0:  # the first says where the others should be
            wrong.append(tensor.to("meta"))
        if tensor.is_floating_point() or name in case.masks:
            wrong.append(tensor.to(torch.complex128))
            if tensor.is_floating_point() and name not in case.loss.constructor:  # cast along
                wrong.append(tensor.long())
        else:
            wrong += [tensor.double(), tensor.bool(), tensor.to(torch.complex64)]
        for replacement in wrong:
            _refuses(case, {**case.tensors(), name: replacement}, name)


@over([case for case in ONCE if len(case.free) < 2 or len(_present(case)) > 1])
def test_nothing_broadcasts_by_accident(case):
    for name, tensor in _present(case).items():
        for dim in range(tensor.ndim):
            if (name, dim) in case.free:
                continue
            for index in ([0], [*range(tensor.shape[dim]), 0]):  # shrunk to 1, grown by 1
                tensors = case.tensors()
                tensors[name] = tensor.index_select(dim, torch.tensor(index))
                _refuses(case, tensors, *_present(case))


BAD = [(loss, *refused) for loss in LOSSES.values() for refused in loss.refused]


@pytest.mark.parametrize(("loss", "name", "value"), BAD, ids=lambda v: getattr(v, "stem", repr(v)))
def test_a_wrong_hyperparameter_is_refused(loss, name, value):
    case = FIRST[loss.stem]
    tensors = case.tensors()
    with pytest.raises((ValueError, TypeError), match=name):
        case.function()(**tensors, **{name: value})
    module, rest = case.module(tensors)
    setattr(module, name, value)
    with pytest.raises((ValueError, TypeError), match=name):
        module(**rest)
    needs_v = name in ("top_k", "ignore_token_ids") and value in (V + 1, [V], [-1])
    if not needs_v:  # not known yet
        with pytest.raises((ValueError, TypeError), match=name):
            case.module(tensors, **{name: value})


@pytest.mark.parametrize("wrong", [[1.0, 2.0], torch.ones(2, 2, 2)], ids=["list", "dimensions"])
@pytest.mark.parametrize(
    "loss", [x for x in LOSSES.values() if x.constructor], ids=lambda x: x.stem
)
def test_a_constructor_refuses_what_cannot_be_its_tensor(loss, wrong):
    with pytest.raises((ValueError, TypeError), match=loss.constructor[0]):
        getattr(sparse_losses, loss.module)(wrong)


@pytest.mark.cpu_only
@over([case for case in WITH_CONSTANTS if "token_weight" in case.loss.constructor])
def test_a_weight_below_zero_is_refused(case):
    tensors = case.tensors()
    tensors["token_weight"][1] = -0.5
    learned = {**tensors, "token_weight": torch.nn.Parameter(tensors["token_weight"])}
    for call in (case.function(), lambda **tensors: case.module(tensors)):
        for arguments in (tensors, learned):
            with pytest.raises(ValueError, match=r"expected `token_weight` >= 0, got -0\.5"):
                call(**arguments)


TOKEN_CASES = [case for case in BASE_CASES if any("input_ids" in name for name in case.rows)]


def _with_id(case: Case, token: int, attended: int) -> dict:
    tensors = case.tensors()
    ids, mask = (next(n for n in case.rows if n.endswith(e)) for e in ("input_ids", "mask"))
    tensors[ids] = tensors[ids].clone()
    tensors[mask] = tensors[mask].clone()
    tensors[ids][1, 2], tensors[mask][1, 2] = token, attended
    return tensors


@pytest.mark.cpu_only  # a GPU stops the process
@over(TOKEN_CASES)
@pytest.mark.parametrize("token", [V, -1, -100, 2**40])
def test_an_id_outside_the_vocabulary_is_refused_unless_its_mask_is_zero(case, token):
    message = _refuses(case, _with_id(case, token, 1), "input_ids", "positive_input_ids")
    assert re.search(rf"(?<!\d){token}\b", message)
    assert re.search(rf"\b{V}\b", message)
    hidden = case.function()(**_with_id(case, token, 0))
    assert torch.equal(hidden, case.function()(**_with_id(case, 0, 0)))
    values = {case.function()(**_with_id(case, other, 1)).item() for other in range(V)}
    assert len(values) > 3, "attended, the id matters"


@pytest.mark.cpu_only  # a GPU stops the process
@over([FIRST["self_reconstruction"], FIRST["positive_activation"]])
@pytest.mark.parametrize("token", [V, -1])
def test_compiled_and_under_a_transform_a_wrong_id_is_no_silent_row(case, token):
    torch._dynamo.reset()
    compiled = torch.compile(case.function(), fullgraph=True, backend="aot_eager")
    problems = [_with_id(case, token, 1), _with_id(case, 0, 1)]
    stacked = [torch.stack([p[name] for p in problems]) for name in problems[0]]

    def function(*values):
        return case.function()(**dict(zip(problems[0], values, strict=True)))

    for call in (lambda: compiled(**problems[0]), lambda: torch.vmap(function)(*stacked)):
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            call()
    assert compiled(**_with_id(case, token, 0)).isfinite()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_id_outside_the_vocabulary_stops_a_process_with_a_gpu():
    program = """import torch; from sparse_losses.functional import positive_activation_loss
ids, activations = torch.tensor([[3]]).cuda(), torch.ones(1, 3).cuda()
print(positive_activation_loss(activations, ids, torch.ones_like(ids)))"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode != 0
    assert "device-side assert" in ran.stderr


@over(TOKEN_CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_ids_may_have_any_integer_dtype(case, dtype):
    tensors = case.tensors()
    name = next(n for n in case.rows if n.endswith("input_ids"))
    tensors[name] = tensors[name].clamp(min=0)
    plain = alive(case.function()(**tensors))
    tensors[name] = tensors[name].to(dtype)
    assert torch.equal(case.function()(**tensors), plain)


# Sparse activations -------------------------------------------------------------------------------

SPARSE = [c for c in CASES if any(len(c.dims[name]) == 2 for name in c.those("csr"))]


def at_entries(x: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    row = torch.arange(len(x)).repeat_interleave(pattern.crow_indices().diff())
    return x[row, pattern.col_indices()]


@over_reductions(SPARSE)
def test_a_csr_tensor_has_the_value_and_at_its_entries_the_gradient_of_a_dense_one(case, reduction):
    options = {"reduction": reduction} if reduction else {}
    index = torch.int64 if reduction == "none" else torch.int32
    dense, sparse = sparse_pair(case, case.tensors(), index)
    expected, value = (case.function()(**x, **options) for x in (dense, sparse))
    torch.testing.assert_close(value, alive(expected), rtol=1e-10, atol=1e-12)
    names = [n for n in case.those("csr") if sparse[n].layout == torch.sparse_csr]
    wanted = torch.autograd.grad(weigh(expected), [dense[n] for n in names])
    weigh(value).backward()
    for name, x in zip(names, wanted, strict=True):
        gradient = sparse[name].grad
        assert gradient.layout == torch.sparse_csr
        assert torch.equal(gradient.col_indices(), sparse[name].col_indices())
        found = gradient.values()
        torch.testing.assert_close(found, at_entries(x, sparse[name]), rtol=1e-9, atol=1e-11)


@over(SPARSE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_csr_tensor_of_any_dtype_loses_no_more_than_fp32_rounding(case, dtype):
    dense, sparse = sparse_pair(case, case.tensors(dtype=dtype))
    value, expected = case.function()(**sparse), case.expected(to_arrays(dense))
    assert value.dtype == torch.float32
    assert abs(value.item() - expected) <= rounding(case, expected)


@pytest.mark.cpu_only
@over([FIRST[stem] for stem, loss in LOSSES.items() if loss.those("csr")])
def test_csr_that_is_no_matrix_of_activations_is_refused(case):
    (name, *_) = case.those("csr")
    crow = torch.tensor([0, 2, *[2] * (B - 1)])
    for columns, message in (
        ([3, 1], "rising columns in each row"),
        ([3, 3], "rising columns in each row"),
        ([0, 99], r"columns of `.*` in \[0, "),
    ):
        size = case.tensors()[name].shape
        value = torch.ones(2, dtype=torch.float64)
        parts = crow, torch.tensor(columns), value
        x = torch.sparse_csr_tensor(*parts, size, check_invariants=False)
        assert re.search(message, _refuses(case, {**case.tensors(), name: x}, name))
    _refuses(case, {**case.tensors(), name: case.tensors()[name].to_sparse()}, name)
    _, sparse = sparse_pair(case, case.tensors())
    sparse[name].detach().values()[:] = torch.nan
    assert case.function()(**sparse).isnan()


@over([c for c in FIRST.values() if not c.those("csr") and c.stem != "margin_mse"])
def test_other_losses_refuse_csr_by_name(case):
    name = next(n for n, x in case.tensors().items() if x is not None and x.ndim == 2)
    sparse = case.tensors()[name].to_sparse_csr()
    message = _refuses(case, {**case.tensors(), name: sparse}, name, exception=TypeError)
    assert message.endswith(f"got torch.sparse_csr {list(sparse.shape)}")


# NaN in, NaN out ----------------------------------------------------------------------------------


@over_reductions(CASES)
def test_a_nan_is_not_hidden(case, reduction):
    options = {"reduction": reduction} if reduction else {}
    floats = [n for n, t in _present(case).items() if t.is_floating_point()]
    for name in floats:
        if name in ("label_similarity", "token_weight"):
            continue  # refused by value
        tensors = case.tensors()
        tensors[name][1 if tensors[name].shape[0] > 1 else 0] = torch.nan
        if name == "token_penalty" and not tensors["activations"][:, 1].any():
            tensors["activations"][0, 1] = 1.0
        assert case.function()(**tensors, **options).isnan().any(), name
        alive(case.function()(**case.tensors(), **options).nan_to_num(0.0))


def _absent(case: Case, tensors: dict) -> dict:
    """Where the tensors of candidates hold what is none, by mask or by a teacher's ``-inf``."""
    masked = tensors.get("candidate_mask", torch.tensor(1)) == 0
    teacher = next((n for n in ("teacher_scores", "teacher_negative") if n in case.dims), "")
    ruled_out = masked | (tensors[teacher] == -torch.inf) if teacher else masked
    dims = case.dims["candidate_mask" if "candidate_mask" in case.dims else teacher]
    names = [n for n in case.dims if case.dims[n][: len(dims)] == dims and n not in case.masks]
    return {n: masked if n.startswith("teacher") else ruled_out for n in names}


ABSENT = [c for c in CASES if c.name == "infinite" or "candidate_mask" in c.dims]


# InfoNCE's columns are its positives and negatives: tests/losses/test_info_nce.py.
@over([case for case in ABSENT if case.stem != "info_nce"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("learned", [False, True], ids=["", "learned temperature"])
def test_what_is_no_candidate_hides_its_nan_and_has_no_gradient(case, bad, learned):
    tensors = case.tensors()
    plain = alive(case.function()(**tensors))
    absent = _absent(case, tensors)
    for name, where in absent.items():
        where = where.reshape(*where.shape, *[1] * (tensors[name].ndim - where.ndim))
        absent[name] = where.expand_as(tensors[name])
        tensors[name] = tensors[name].masked_fill(where, bad)
    assert any(where.any() for where in absent.values())
    leaves = watch(case, tensors, learned=learned)
    value = case.function()(**tensors)
    torch.testing.assert_close(value, plain)
    for name, gradient in gradients(value, leaves).items():
        assert gradient.isfinite().all()
        assert gradient.any()
        assert name not in absent or not gradient[absent[name]].any()


# Derivatives --------------------------------------------------------------------------------------


def _as_function(case: Case, tensors: dict, *, learned: bool = True, **options) -> tuple:
    """The call as a function of what has a gradient, and that."""
    leaves = watch(case, tensors, learned=learned)

    def function(*values):
        return case.function()(**{**tensors, **dict(zip(leaves, values, strict=True))}, **options)

    return function, tuple(leaves.values())


@over(CASES)
def test_gradcheck(case):
    # `auto` is slow for rows; test_every_implementation compares it entry by entry.
    reductions = ({}, none(case)) if case.impl == "auto" else (none(case),)
    of_temperature = {False, "temperature" in case.loss.hyperparameters}
    for options, learned in itertools.product(reductions, of_temperature):
        function, leaves = _as_function(case, case.tensors(), learned=learned, **options)
        assert torch.autograd.gradcheck(function, leaves, fast_mode=case.impl == "auto")
        value = weigh(function(*leaves))
        assert value.dtype == torch.float64
        assert all(g.any() for g in torch.autograd.grad(value, leaves))


# Second derivatives are the definition's: by `auto`, one case a loss. The check moves all numbers,
# and no number stays 0: FLOPS then has no rows up to its threshold.
@over(
    [c for c in CASES if c.impl != "auto" and not ("flops" in c.stem and "threshold" in c.kwargs)]
    + [c for c in (*FIRST.values(), *LAYER_CASES) if c.implementations]
)
def test_gradgradcheck(case):
    reduction = {} if case.impl is None else none(case)  # `auto` may support means alone
    function, leaves = _as_function(case, case.tensors(batch=3), **reduction)
    alive(function(*leaves))
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@over(CASES)
def test_inputs_are_left_as_they_were_and_constants_get_no_gradient(case):
    tensors = case.tensors()
    leaves = watch(case, tensors)
    before = {k: v.detach().clone() for k, v in tensors.items() if v is not None}
    constants = [
        tensor.requires_grad_()
        for name, tensor in tensors.items()
        if name.startswith("teacher") or name in ("key", "queue", "label_similarity")
        if tensor is not None
    ]
    alive(case.function()(**tensors)).backward()
    for name, tensor in before.items():
        assert torch.equal(tensors[name].detach(), tensor), name
    assert all(alive(leaf.grad) is not None for leaf in leaves.values())
    assert all(constant.grad is None for constant in constants)


@over(TRANSFORMED)
def test_func_grad_and_vmap_over_problems_equal_a_loop_with_autograd(case):
    problems = [case.tensors(seed=seed) for seed in range(3)]
    if "temperature" in case.loss.hyperparameters:
        for problem, number in zip(problems, (0.3, 0.5, 2.0), strict=True):
            problem["temperature"] = torch.tensor(number, dtype=torch.float64)
    names = [name for name, tensor in problems[0].items() if tensor is not None]
    stacked = [torch.stack([problem[name] for problem in problems]) for name in names]

    def function(*values):
        return case.function()(**{**problems[0], **dict(zip(names, values, strict=True))})

    learned = [name for name in names if name in (*case.differentiable, "temperature")]
    grad = torch.func.grad(function, tuple(map(names.index, learned)))
    values, slopes = torch.vmap(function)(*stacked), torch.vmap(grad)(*stacked)
    assert len(set(values.tolist())) == 3
    for place, problem in enumerate(problems):
        alone = grad(*(problem[name] for name in names))
        leaves = [problem[name].requires_grad_() for name in learned]
        value = case.function()(**problem)
        expected = torch.autograd.grad(value, leaves)
        assert all(gradient.any() for gradient in expected)
        for found in ((value, *alone), (values[place], *(slope[place] for slope in slopes))):
            torch.testing.assert_close(found, (value, *expected), rtol=1e-10, atol=1e-12)


@over([*FIRST.values(), *LAYER_CASES])
def test_a_vectorised_jacobian_is_the_jacobian(case):
    tensors = case.tensors()
    name, jacobian = case.differentiable[0], torch.autograd.functional.jacobian

    def function(x):
        values = (case.function()(**{**tensors, name: x}, **o) for o in ({}, none(case)))
        return torch.cat([value.reshape(-1) for value in values])

    vectorised = alive(jacobian(function, tensors[name], vectorize=True))
    torch.testing.assert_close(vectorised, jacobian(function, tensors[name]))


@over(CASES)
def test_non_contiguous_inputs_are_the_same_inputs(case):
    plain, tensors = case.tensors(), _present(case)
    for name, x in tensors.items():
        tensors[name] = torch.stack([x, torch.full_like(x, 1)], dim=-1)[..., 0]
        assert not tensors[name].is_contiguous()
    leaves = {name: tensors[name].requires_grad_() for name in case.differentiable}
    plain_leaves = watch(case, plain)
    value, expected = case.function()(**plain | tensors), alive(case.function()(**plain))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
    wanted = gradients(expected, plain_leaves)
    torch.testing.assert_close(gradients(value, leaves), wanted, rtol=1e-10, atol=1e-12)


# Masks, order, and learned temperatures -----------------------------------------------------------


@pytest.mark.cpu_only
@over(MASKED)
def test_masks_are_bool_int_or_float_of_zero_and_one(case):
    tensors = case.tensors()
    plain = alive(case.function()(**tensors))
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int64, torch.bfloat16, torch.float32):
        value = case.function()(**{**tensors, **{n: tensors[n].to(dtype) for n in case.masks}})
        assert value.dtype == torch.float64
        assert torch.equal(value, plain)
    for name, wrong in itertools.product(case.masks, (-10_000.0, 0.5, 2.0, torch.nan)):
        mask = tensors[name].double()
        mask.view(-1)[-1] = wrong
        message = _refuses(case, {**tensors, name: mask}, name, exception=ValueError)
        assert message.endswith(f"to be 0 or 1, got {wrong:g}")


# Among own negatives' scores, the teacher's first columns are the batch's: no square matrix.
@over([*ONCE, OBJECTIVE_CASES[0]])
def test_rows_may_come_in_any_order(case):
    order = torch.tensor([2, 0, 3, 1])
    tensors = case.tensors()
    moved = dict(tensors)
    for name in case.rows:
        if name in tensors:
            moved[name] = tensors[name][order]
    for name in case.square:
        columns = [*order, *range(B, tensors[name].shape[1])]  # the batch's, then the negatives'
        moved[name] = tensors[name][order][:, columns]
    plain, permuted = (case.function()(**t, **none(case)) for t in (tensors, moved))
    expected = alive(plain[order] if case.loss.reduces else plain)
    torch.testing.assert_close(permuted, expected, rtol=1e-10, atol=1e-12)


@over([case for case in FIRST.values() if "temperature" in case.loss.hyperparameters])
def test_a_temperature_parameter_stays_one_in_the_module(case):
    tensors = case.tensors()
    parameter = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    module, rest = case.module(tensors, temperature=parameter)
    assert list(module.parameters()) == [parameter]
    assert "temperature" in module.state_dict()
    module(**rest).backward()
    assert parameter.grad is not None
    assert parameter.grad.item() != 0.0
    with torch.no_grad():
        parameter.copy_(torch.tensor(0.9))
    expected = case.function()(**tensors, temperature=0.9)
    torch._dynamo.reset()
    for call in (module, torch.compile(module, fullgraph=True, backend="eager")):
        torch.testing.assert_close(call(**rest), expected, rtol=1e-6, atol=1e-9)
