"""Random calls of every public function, each held against its formula in float64: ``make fuzz``.

A *problem* is a seed. It takes a row of ``tests/cases.py`` and draws everything anew: sizes from 0,
numbers from 0 to the largest of the dtype, masks, hyperparameters, reduction, dtype. A *call* is
this problem by one of its ways, forward and backward, on one device. Its value and its gradients
are compared with the definition in float64 on the CPU, and for one problem in ten that value with
the oracle of ``tests/oracles.py`` (loops, too slow for all).

**How far off a call may be**: by some roundings of the result, or by a multiple of what the formula
loses, operation by operation, in the precision of the call. That baseline is the definition in
float64 with every operation rounded at random: it exists for all options, and overflows nowhere.
Where an operation of the formula leaves the range of fp32, only the functions that promise to hold
such numbers are compared. A NaN that a mask hides changes nothing.

    python -m tools.fuzz --calls 100000
    python -m tools.fuzz --minutes 60 --device sim --start 5000000

A failure is one line of Python, which makes the call, in ``build/fuzz/failures.txt``. The seeds are
consecutive: ``--start`` goes on where a run ended, or does one problem again with ``--calls 1``.
"""

import argparse
import inspect
import itertools
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_losses.functional as F
from tests import cases
from tests.objective import test_diagnostics
from tests.vocabulary import test_bm25, test_labels, test_penalties

__all__ = ["Failure", "check", "fuzz"]

FAILURES = Path("build/fuzz/failures.txt")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALES = (1e-37, 1e-30, 1e-8, 1e-3, 1e2, 1e4, 1e10, 1e19, 1e30, 1e38)
SPECIAL = (0.0, 0.0, 1e-45, 1e-38, 1e-30, 6e-8, 1.0, 1e4, 65504.0, 1e30, 3.4028234663852886e38)
SIZES = {"D": (2, 6), "N": (0, 4), "S": (2, 6), "V": (6, 12), "C": (3, 6)}
ALONG_THE_TEXT = ("input_ids", "attention_mask", "logits", "hidden")
ROUNDINGS = 64  # of a result, relative to the largest of its row
PLAIN = 32  # times what the formula loses where every operation rounds
CASES = cases.BASE_CASES + cases.LAYER_CASES + cases.OBJECTIVE_CASES


@dataclass
class Problem:
    """What is computed, whichever way."""

    seed: int
    case: cases.Case
    tensors: dict[str, Any]  # float64, but of numbers that `dtype` holds
    dtype: torch.dtype
    options: dict[str, Any]
    upstream: Tensor  # gradient of what the call returns
    hidden: dict[str, Tensor] = field(default_factory=dict)  # masks of what may be NaN
    takes_csr: bool = False
    autocast: bool = False
    learned: bool = False  # the temperature is a tensor with a gradient

    @property
    def unit(self) -> float:
        """The rounding of the computation; fp64 against fp64 is compared to fewer digits."""
        return max(torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps, 1e-13)

    def ways(self) -> Iterator[str | None]:
        """Every ``impl``, or ``None`` where there is no choice."""
        names = self.case.loss.ways
        yield from ("auto", "definition", *(n for n in names if n != "auto")) if names else (None,)


@dataclass
class Failure:
    """A call that went wrong, as a line of Python with what is wrong behind it."""

    seed: int
    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.line}  # seed {self.seed}: {self.what}"


# ------------------------------------------------------------------------------------------------
# Drawing


def draw(seed: int) -> Problem:
    """The problem of a seed."""
    rng = np.random.default_rng(seed)
    case = CASES[rng.integers(len(CASES))]
    dtype = DTYPES[rng.integers(len(DTYPES))]
    fewest = 2 if case.stem == "objective" else case.fewest_rows  # teachers need two candidates
    batch = max(fewest, int(rng.choice([0, 1, 1, 2, 2, 3, 4, 6])))
    sizes = {name: int(rng.integers(low, high + 1)) for name, (low, high) in SIZES.items()}
    if not case.kwargs.get("in_batch", True):  # no other candidates are left
        sizes["N"] = max(sizes["N"], 1)
    with mock.patch.multiple(cases, **sizes):  # which the table's factories read when called
        arrays = case.make(rng, batch)
    if rng.random() < 0.05:
        length = int(rng.integers(0, 2))
        for name, array in arrays.items():
            if name.endswith(ALONG_THE_TEXT):
                arrays[name] = array[:, :length]
    _redraw_masks(rng, case, arrays)
    _make_extreme(rng, arrays, dtype)
    if "queue" in arrays:  # without a mask, a slot of zeros would count as empty
        arrays.setdefault("queue_mask", np.ones(len(arrays["queue"]), dtype=bool))
    options = _options(rng, case)
    if case.stem == "nws" and _has_equal_maxima(arrays):
        options["eps"] = 0.0
    problem = Problem(seed, case, cases.to_tensors(arrays), dtype, options, torch.ones(()))
    if rng.random() < 0.1:
        problem.hidden = {
            name: torch.from_numpy(mask & (rng.random(mask.shape) < 0.7))
            for name, mask in _hidden_entries(case, arrays).items()
        }
    problem.takes_csr = case.stem == "info_nce" and rng.random() < 0.1
    problem.autocast = rng.random() < 0.1 and case.stem != "splade_head"
    problem.learned = "temperature" in options and rng.random() < 0.1
    if problem.learned:
        options["temperature"] = torch.tensor(options["temperature"], dtype=dtype).item()
    shape = (batch,) if options.get("reduction") == "none" else ()
    scale = rng.choice([1.0, 1.0, 1e-3, 65536.0])  # the last is a loss scaler's
    problem.upstream = torch.from_numpy(np.asarray(rng.uniform(0.5, 1.5, shape) * scale))
    return problem


def _redraw_masks(rng: np.random.Generator, case: cases.Case, arrays: cases.Arrays) -> None:
    for name in case.masks:
        if rng.random() < 0.3:
            share = rng.choice([0.0, 0.3, 0.7, 1.0])
            mask = rng.random(arrays[name].shape) < share
            arrays[name] = mask.astype(arrays[name].dtype)
    for name, array in arrays.items():  # an id that is attended now
        if name.endswith(("input_ids", "document_ids")):
            array[array < 0] = 0


def _make_extreme(rng: np.random.Generator, arrays: cases.Arrays, dtype: torch.dtype) -> None:
    kind = rng.choice(["plain", "scaled", "rows", "sprinkled", "ties", "equal"], p=_CHANCES)
    together, scale = rng.random() < 0.5, rng.choice(SCALES)
    for name, x in arrays.items():
        if x is None or x.dtype.kind != "f":
            continue
        if name in ("label_similarity", "gate"):
            x = np.round(x) if kind == "ties" else x
        elif kind == "scaled":
            x = x * (scale if together else rng.choice(SCALES))
        elif kind == "rows":
            x = x * rng.choice(SCALES, size=(*x.shape[:-1], 1))
        elif kind == "sprinkled":
            special = rng.choice(SPECIAL, size=x.shape) * np.where(x < 0, -1.0, 1.0)
            x = np.where(rng.random(x.shape) < 0.4, special, x)
        elif kind == "ties":
            x = np.round(x)
        elif kind == "equal" and len(x) and "context" not in arrays:
            # Not the objective's: z-scores enlarge what is left of cosines that should be equal.
            x = np.repeat(x[:1], len(x), axis=0) if x.ndim > 1 else np.full_like(x, x[0])
        limit = torch.finfo(dtype).max
        exact = torch.from_numpy(np.clip(x, -limit, limit)).to(dtype).clamp(-limit, limit)
        arrays[name] = np.where(np.isinf(x), x, exact.double().numpy())


_CHANCES = (0.3, 0.15, 0.15, 0.2, 0.1, 0.1)


def _has_equal_maxima(arrays: cases.Arrays) -> bool:
    """Whether the gradient of a query's largest cosine may go to one reference or another."""
    names = ("prototype", "key", "queue")
    references = [torch.from_numpy(arrays[name]) for name in names if name in arrays]
    rows = (torch.from_numpy(arrays["query"]), torch.cat(references))
    query, references = (torch.nn.functional.normalize(x / 1e38, eps=1e-300) for x in rows)
    best = (query @ references.T).topk(2, dim=1).values
    return bool((best[:, 0] - best[:, 1] < 1e-5).any())


def _options(rng: np.random.Generator, case: cases.Case) -> dict[str, Any]:
    function = case.loss.call or getattr(F, case.loss.function)
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if isinstance(parameter.default, float)
    }
    options |= case.kwargs
    for name, value in options.items():
        if isinstance(value, float) and rng.random() < 0.4:
            if name == "temperature":
                options[name] = float(np.exp(rng.uniform(np.log(0.01), np.log(10.0))))
            else:
                options[name] = value * float(rng.choice([0.0, 0.1, 1.0, 10.0]))
    if case.loss.reduces:
        options["reduction"] = str(rng.choice(["none", "mean", "sum"]))
    return options


def _hidden_entries(case: cases.Case, arrays: cases.Arrays) -> dict[str, np.ndarray]:
    """Which entries masks hide, and their NaN with them."""
    stem = case.stem
    if stem in ("splade_pool", "token_weights") or (stem == "splade_head" and case.masks):
        name = "hidden" if stem == "splade_head" else "logits"
        absent = arrays["attention_mask"] == 0
        return {name: np.broadcast_to(absent[..., None], arrays[name].shape)}
    if stem == "distillation" and "candidate_mask" in arrays:
        absent = arrays["candidate_mask"] == 0
        return {"student_scores": absent, "teacher_scores": absent}
    if stem == "info_nce_from_scores" and "candidate_mask" in arrays:
        return {"scores": arrays["candidate_mask"] == 0}
    if stem == "nws":
        void = ~arrays["query_labels"].any(1, keepdims=True)
        found = {"query": np.broadcast_to(void, arrays["query"].shape)}
        if "queue_mask" in arrays:
            void = arrays["queue_mask"][:, None] == 0
            found["queue"] = np.broadcast_to(void, arrays["queue"].shape)
        return found
    if stem == "positive_activation":
        is_read = np.zeros(arrays["activations"].shape, dtype=bool)
        ids, mask = arrays["positive_input_ids"], arrays["positive_attention_mask"]
        for row, column in zip(*np.nonzero(mask), strict=True):
            is_read[row, ids[row, column]] = True
        return {"activations": ~is_read}
    if stem == "self_reconstruction":
        is_ignored = np.zeros(arrays["activations"].shape, dtype=bool)
        is_ignored[:, list(case.kwargs.get("ignore_token_ids", ()))] = True
        return {"activations": is_ignored}
    if stem == "min_activation" and "token_counts" in arrays:
        void = arrays["token_counts"][:, None] == 0
        return {"activations": np.broadcast_to(void, arrays["activations"].shape)}
    return {}


# ------------------------------------------------------------------------------------------------
# Calling


Found = tuple[Tensor, dict[str, Tensor]]  # a value, and gradients, in float64 on the CPU


def _call(problem: Problem, dtype: torch.dtype, device: str, impl: str | None) -> Found:
    """Value and gradients by one way."""
    case = problem.case
    tensors, leaves = {}, {}
    for name, x in problem.tensors.items():
        if x is not None:
            if name in problem.hidden and dtype == problem.dtype and device is not _EXACT:
                x = x.masked_fill(problem.hidden[name], torch.nan)
            x = x.to(device="cpu" if device is _EXACT else device)
            x = x.to(dtype) if x.is_floating_point() else x
        if problem.takes_csr and impl not in ("definition", None) and name in _CSR and x.ndim == 2:
            x = x.to_sparse_csr()
        if name in case.differentiable:
            leaves[name] = x = x.requires_grad_()
        tensors[name] = x
    options = dict(problem.options)
    if problem.learned:
        number = torch.tensor(options["temperature"], dtype=dtype, requires_grad=True)
        options["temperature"] = leaves["temperature"] = number
    if impl is not None:
        options["impl"] = impl
    on = problem.autocast and device is not _EXACT
    kind = "cpu" if device is _EXACT else device
    with torch.autocast(kind, torch.bfloat16, enabled=on):
        value = replace(case, impl=None).function()(**tensors, **options)
    upstream = problem.upstream.to(value.device, value.dtype)
    found = torch.autograd.grad(value, list(leaves.values()), upstream, allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    return _exact(value), {name: _exact(x) for name, x in gradients.items()}


_EXACT = "the CPU, as the reference"
_CSR = ("anchor", "positive", "negative")


def _exact(x: Tensor) -> Tensor:
    x = x.detach()
    x = x.to_dense() if x.layout == torch.sparse_csr else x
    return x.cpu().double()


def _holds_any_number(problem: Problem) -> bool:
    """Whether squares and products that fp32 cannot hold are no reason for a wrong result."""
    if problem.case.stem in ("info_nce", "triplet_margin"):
        return problem.options.get("similarity", "cosine") == "cosine"
    if problem.case.stem == "distillation":  # a part of weight 0 is not computed
        return problem.options["alpha_kl"] == 0
    return problem.case.stem in ANY_NUMBER


ANY_NUMBER = ("nws", "positive_activation")


def _reference(problem: Problem) -> Found:
    impl = "definition" if problem.case.loss.ways else None
    return _call(replace(problem, hidden={}, autocast=False), torch.float64, _EXACT, impl)


# ------------------------------------------------------------------------------------------------
# Comparing


def check(seed: int, device: str = "cpu") -> tuple[int, list[Failure]]:
    """Makes the calls of a seed; returns how many, and those that went wrong."""
    if seed % 20 == 7:
        return 1, check_layer(seed, device)
    problem = draw(seed)
    problem.takes_csr &= device != "sim"  # which has no sparse layouts
    reference = _reference(problem)
    judge = _Judge(problem, reference)
    failures = []
    if seed % 10 == 0 and (wrong := judge.against_the_oracle()):
        failures.append(Failure(seed, f"the definition: {wrong}", spelt(problem, None, "cpu")))
    calls = 0
    for impl in problem.ways():
        try:
            found = _call(problem, problem.dtype, device, impl)
        except (ValueError, NotImplementedError) as error:
            if 'with impl="' in str(error) or problem.takes_csr:
                continue  # a way that says why it cannot
            found, wrong = None, f"{type(error).__name__}: {error}"
        except Exception as error:  # whatever it is, it is found
            found, wrong = None, f"{type(error).__name__}: {error}"
        calls += 1
        if found is not None:
            wrong = judge.wrong(found, device)
        if wrong:
            failures.append(Failure(seed, wrong.splitlines()[0], spelt(problem, impl, device)))
    return calls, failures


class _Judge:
    """What the answer is, and how far off a call may be."""

    def __init__(self, problem: Problem, reference: Found) -> None:
        self.problem, self.reference = problem, reference
        self.losses: dict[tuple[float, int], dict[str, Tensor]] = {}
        self.largest = 0.0  # number within the computation
        # Whether squares and products that leave the range of fp32 may do harm.
        self.is_bounded = problem.dtype != torch.float64 and not _holds_any_number(problem)

    def wrong(self, found: Found, device: str) -> str:
        """What is wrong with value or gradients, or nothing."""
        problem = self.problem
        value, gradients = found
        wanted, wanted_gradients = self.reference
        least = torch.finfo(torch.promote_types(problem.dtype, torch.float32))
        if wrong := self._differs("value", value, wanted, least, device):
            return wrong
        for name, gradient in gradients.items():
            limits = torch.finfo(problem.dtype)
            expected = wanted_gradients[name]
            if problem.takes_csr and name in _CSR and problem.tensors[name].ndim == 2:
                is_stored = problem.tensors[name] != 0
                if torch.equal(gradient, gradient * is_stored):
                    expected = expected * is_stored
            if wrong := self._differs(name, gradient, expected, limits, device):
                return wrong
        return ""

    def against_the_oracle(self) -> str:
        """What is wrong with the reference itself."""
        problem = self.problem
        options = {k: v for k, v in problem.options.items() if k != "reduction"}
        case = replace(problem.case, kwargs=options)
        arrays = cases.to_arrays(problem.tensors)
        try:
            expected = case.expected(arrays, problem.options.get("reduction", "mean"))
        except OverflowError:  # of a sum in Python
            return ""
        expected = torch.as_tensor(expected, dtype=torch.float64)
        # The loops lose more digits of a loss near 0: they add up what nearly cancels.
        near = (self.reference[0] - expected).abs() <= 1e-13
        expected = torch.where(near, self.reference[0], expected)
        limits = torch.finfo(torch.float64)
        return self._differs("value", self.reference[0], expected, limits, "cpu")

    def _differs(
        self, name: str, found: Tensor, wanted: Tensor, limits: torch.finfo, device: str
    ) -> str:
        if found.shape != wanted.shape:
            return f"{name} of shape {list(found.shape)} for {list(wanted.shape)}"
        if found.numel() == 0 or torch.equal(found, wanted):
            return ""
        unit = 1e-13 if limits.bits == 64 else self.problem.unit
        if device != "cpu" and self.problem.dtype in (torch.float16, torch.bfloat16):
            unit = torch.finfo(self.problem.dtype).eps  # products there may round to it
        # Infinite is what the dtype hardly holds, or did not before it met the upstream gradient.
        most = limits.max / 8
        one, other = (x.clamp(-most, most) for x in (found, wanted))
        is_any = one.isnan() & other.isnan()
        if name != "value" and wanted.ndim:
            size = wanted.abs().amax(-1, keepdim=True)
            before = size / min(1.0, self.problem.upstream.abs().min().item() / 8)
            is_any = is_any | ((before > most) & (one.isnan() | (one.abs() == most)))
        for allowed in self._allowances(name, wanted, unit, limits):
            is_close = ((one - other).abs() <= allowed) | is_any
            if is_close.all():
                return ""
        most = _SINGLE.max / 256  # a sum of some is beyond
        if self.problem.case.stem == "splade_head" and device != "cpu":
            most = min(most, torch.finfo(self.problem.dtype).max / 8)  # of scores in this dtype
        if self.is_bounded and self.largest > most:
            return ""
        place = tuple((~is_close).nonzero()[0].tolist())
        return (
            f"{name}{list(place) if place else ''} is {found[place].item():.6g} for "
            f"{wanted[place].item():.6g}, allowed {allowed[place].item():.1g}"
        )

    def _allowances(
        self, name: str, wanted: Tensor, unit: float, limits: torch.finfo
    ) -> Iterator[Tensor]:
        """The second is larger than the first, and takes longer to find."""
        size = wanted.abs().nan_to_num(0.0, 0.0, 0.0)
        of_row = size if name == "value" or size.ndim == 0 else size.amax(-1, keepdim=True)
        least = torch.finfo(torch.float32).tiny if limits.bits < 64 else 0.0
        allowed = ROUNDINGS * (unit * of_row + least * self.problem.upstream.abs().max())
        allowed = allowed + limits.eps * size + limits.smallest_normal * limits.eps
        if name == "value":
            allowed = allowed + 1e-13  # no closer is the reference
            if self.problem.case.stem == "distillation":  # the z-score of a lone candidate
                allowed = allowed + 8 * limits.eps
        elif wanted.ndim:  # a probability that vanishes, over the length of a short row
            row = self.problem.tensors[name].abs().amax(-1, keepdim=True).clamp(min=1e-45)
            row = row * min(1.0, self.problem.options.get("temperature", 1.0))
            allowed = allowed + ROUNDINGS * least * self.problem.upstream.abs().max() / row
        if self.is_bounded:  # squares vanish
            allowed = allowed + 1e-19 * (1 + self.problem.upstream.abs().max())
        if self.problem.case.stem == "objective":  # terms' gradients are rounded, and their sum
            allowed = allowed + 16 * limits.eps * of_row
        yield allowed
        for times in (6, 60):  # a kink, such as a hinge's, takes more
            loss = self._rounded(unit, times)[name]
            if name != "value" and loss.ndim:
                loss = loss.amax(-1, keepdim=True)
            yield allowed + PLAIN * loss
        allowed = allowed + PLAIN * loss
        if self.problem.case.stem == "distillation":  # whose probabilities are never below that
            allowed = allowed + ROUNDINGS * least * self.largest
        yield allowed

    def _rounded(self, unit: float, times: int) -> dict[str, Tensor]:
        """How far off value and gradients are when every operation rounds by that much."""
        if (unit, times) not in self.losses:
            value, gradients = self.reference
            exact = {"value": value, **gradients}
            losses = {name: torch.zeros_like(x) for name, x in exact.items()}
            for seed in range(times):
                with _Rounding(unit, seed, self.is_bounded) as rounding:
                    value, gradients = _reference(self.problem)
                self.largest = max(self.largest, rounding.largest)
                for name, x in {"value": value, **gradients}.items():
                    off = (x - exact[name]).abs().nan_to_num(0.0, posinf=math.inf)
                    losses[name] = torch.maximum(losses[name], off)
            self.losses[unit, times] = losses
        return self.losses[unit, times]


SUMS = {"mm", "bmm", "addmm", "baddbmm", "sum", "mean"}  # whose terms may cancel
_SINGLE = torch.finfo(torch.float32)


# Operations that return what they are given. The gradient of a maximum looks for it in there.
EXACT = {"amax", "amin", "aminmax", "max", "min", "maximum", "minimum", "topk", "sort", "gather"}
EXACT |= {"index", "index_select", "where", "cat", "stack", "clone", "copy", "to_copy", "clamp"}
EXACT |= {"clamp_min", "clamp_max", "relu", "neg", "abs", "masked_fill", "threshold", "scatter"}


class _Rounding(TorchDispatchMode):
    """Rounds what every operation in float64 returns, where fp32 does not hold it, up or down."""

    def __init__(self, unit: float, seed: int, vanishes: bool) -> None:
        super().__init__()
        self.unit, self.vanishes, self.largest = unit, vanishes, 0.0
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0].strip("_")
        if function.is_view or name in EXACT:
            return result
        if name in SUMS and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            terms = [x.abs() if isinstance(x, Tensor) else x for x in args]
            size = function(*terms, **(kwargs or {}))
            off = torch.empty_like(size).uniform_(-1, 1, generator=self.generator)
            result = torch.where(size < 1e300, result + self.unit * size * off, result)
        if isinstance(result, (tuple, list)):
            return type(result)(self._rounded(function, x) for x in result)
        return self._rounded(function, result)

    def _rounded(self, function: Any, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float64 or x.numel() == 0:
            return x
        is_number = x.abs() < 1e300  # the rest stands for infinity
        self.largest = max(self.largest, torch.where(is_number, x, 0.0).abs().max().item())
        is_exact = ((x == x.round()) & (x.abs() <= 64)).all()  # a mask, counts, ties
        change = self.unit * torch.empty_like(x).uniform_(-1, 1, generator=self.generator)
        rounded = torch.where(is_number & ~is_exact, x * (1 + change), x)
        if self.vanishes:
            rounded = torch.where(rounded.abs() < _SINGLE.tiny, rounded.float().double(), rounded)
        return x.copy_(rounded) if function._schema.is_mutable else rounded


# ------------------------------------------------------------------------------------------------
# Functions without a gradient, each against loops


def _texts(rng: np.random.Generator, rows: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (rows, int(rng.integers(0, 7)))
    mask = rng.random(shape) < rng.choice([0.0, 0.5, 1.0])
    return np.where(mask, rng.integers(0, vocab, shape), -100), mask


def _numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    special = rng.choice([*SPECIAL, 0.5, 2.0], size=shape) * rng.choice([-1.0, 1.0], size=shape)
    return np.where(rng.random(shape) < rng.choice([0.0, 0.5]), special, rng.normal(size=shape))


def _bm25(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any], Any]:
    queries, documents = (_texts(rng, int(rng.integers(0, 4)), 7) for _ in range(2))
    idf = np.abs(_numbers(rng, 7)).clip(max=1e30)
    ignored = rng.integers(0, 7, size=int(rng.integers(0, 3))).tolist()
    options = {"mean_length": rng.uniform(0.1, 9), "k1": rng.choice([0.0, 1.2]), "b": rng.random()}
    options = {name: float(x) for name, x in options.items()}
    attended = [
        [ids[on].tolist() for ids, on in zip(*side, strict=True)] for side in (queries, documents)
    ]
    wanted = test_bm25.loop(*attended, ignored=ignored, idf=idf, **options)
    return [*queries, *documents, idf], {"ignore_token_ids": ignored, **options}, wanted


def _idf_penalty(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any], Any]:
    idf = _numbers(rng, int(rng.integers(1, 9))).astype(np.float32).astype(np.float64)
    ids = [rng.integers(0, len(idf), size=int(rng.integers(0, 3))).tolist() for _ in range(2)]
    options = {
        "alpha": float(rng.choice([0.0, 4.0, 8.0])),
        "special_token_ids": ids[0],
        "stopword_ids": ids[1],
        "minimum": float(rng.choice([0.0, 0.1, 1.0])),
        "shape": str(rng.choice(["exponential", "linear"])),
    }
    return [idf], options, test_penalties.loop(idf.tolist(), **options)


def _language_penalty(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any], Any]:
    size = int(rng.integers(1, 9))
    allowed, special = (rng.integers(0, size, int(rng.integers(0, 4))).tolist() for _ in range(2))
    penalty = float(rng.choice([0.0, 1e-30, 100.0, 1e30]))
    wanted = [0.0 if j in (*allowed, *special) else penalty for j in range(size)]
    return [size, allowed], {"special_token_ids": special, "penalty": penalty}, wanted


def _label_similarity(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any], Any]:
    shape = rng.integers(0, 7), rng.integers(0, 5)
    labels = (rng.random(shape) < rng.choice([0.0, 0.4, 1.0])).astype(rng.choice(["int64", "bool"]))
    method = str(rng.choice(["npmi", "jaccard"]))
    return [labels], {"method": method}, test_labels.loop(labels, method)


def _context_overlap(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any], Any]:
    shape = int(rng.integers(0, 5)), int(rng.integers(0, 7))
    one, other = _numbers(rng, *shape), _numbers(rng, *shape)
    sides = [[set(np.flatnonzero(row > 0)) for row in x.astype(np.float32)] for x in (one, other)]
    wanted = [len(a & b) / max(len(a | b), 1) for a, b in zip(*sides, strict=True)]
    return [one, other], {}, wanted


def _recall_at_k(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any], Any]:
    shape = int(rng.integers(0, 5)), int(rng.integers(1, 7))
    scores = np.round(_numbers(rng, *shape)).astype(np.float32).astype(np.float64)
    positive = rng.random(shape) < rng.choice([0.0, 0.3, 1.0])
    k = int(rng.integers(1, shape[1] + 1))
    wanted = test_diagnostics.recall(scores.tolist(), positive.tolist(), k)
    return [scores, positive], {"k": k}, wanted


def _calibrate_threshold(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any], Any]:
    x = np.round(rng.exponential(2.0, size=rng.integers(1, 7, size=2)), int(rng.integers(0, 3)))
    x = x.astype(np.float32).astype(np.float64)
    active = np.sort(np.expm1(x[x > 0]))[::-1]
    if len(active) == 0:
        x[0, 0], active = 1.0, np.array([math.expm1(1.0)])
    kept = int(rng.integers(1, len(active) + 1))
    reach = sorted({int((active >= edge).sum()) for edge in active})  # ties stay or go together
    best = min(reach, key=lambda n: (abs(n - kept), -n))
    wanted = 0.0 if best == len(active) else (active[best - 1] + active[best]) / 2
    return [x], {"target_active": kept / len(x)}, wanted


def _information(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any], Any]:
    loss, count = float(rng.exponential(3.0)), int(rng.integers(1, 10**6))
    return [torch.tensor(loss), count], {}, min(math.log(count) - loss, math.log(count))


LAYERS = {
    "bm25_scores": _bm25,
    "idf_penalty": _idf_penalty,
    "language_penalty": _language_penalty,
    "label_similarity": _label_similarity,
    "context_overlap": _context_overlap,
    "recall_at_k": _recall_at_k,
    "calibrate_threshold": _calibrate_threshold,
    "mutual_information_lower_bound": _information,
}


def check_layer(seed: int, device: str) -> list[Failure]:
    """One call of a function that has no gradient."""
    rng = np.random.default_rng(seed)
    name = list(LAYERS)[rng.integers(len(LAYERS))]
    given, options, wanted = LAYERS[name](rng)
    arguments = []
    for x in given:
        x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        if isinstance(x, Tensor):
            x = (x.float() if x.is_floating_point() else x).to(device)
        arguments.append(x)
    told = [
        f"torch.tensor({x.tolist()}, dtype={x.dtype}, device={device!r}).reshape({list(x.shape)})"
        if isinstance(x, Tensor)
        else repr(x)
        for x in arguments
    ]
    told += [f"{key}={value!r}" for key, value in options.items()]
    line = f"import torch; import sparse_losses.functional as F; print(F.{name}({', '.join(told)}))"
    try:
        found = torch.as_tensor(getattr(F, name)(*arguments, **options)).cpu().double()
        torch.testing.assert_close(
            found, torch.as_tensor(wanted, dtype=torch.float64), rtol=1e-4, atol=1e-6
        )
    except Exception as error:  # whatever it is, it is found
        return [Failure(seed, f"{type(error).__name__}: {error}".replace("\n", " "), line)]
    return []


# ------------------------------------------------------------------------------------------------
# Telling


def spelt(problem: Problem, impl: str | None, device: str) -> str:
    """The call as one line of Python."""
    case, arguments = problem.case, []
    for name, x in problem.tensors.items():
        if x is not None and name in problem.hidden:
            x = x.masked_fill(problem.hidden[name], torch.nan)
        if x is None:
            arguments.append(f"{name}=None")
            continue
        dtype = problem.dtype if x.is_floating_point() else x.dtype
        more = ", requires_grad=True" if name in case.differentiable else ""
        made = f"torch.tensor({x.tolist()}, dtype={dtype}, device={device!r}{more})"
        if 0 in x.shape:
            made = f"torch.empty({list(x.shape)}, dtype={dtype}, device={device!r}{more})"
        if problem.takes_csr and impl not in ("definition", None) and name in _CSR:
            made += ".to_sparse_csr()" if x.ndim == 2 else ""
        arguments.append(f"{name}={made}")
    options = problem.options | ({} if impl is None else {"impl": impl})
    arguments += [f"{k}={v!r}" for k, v in options.items()]
    function = f"F.{case.loss.function}" if case.loss.call is None else case.loss.call.__name__
    source = "import sparse_losses.functional as F"
    if case.loss.call is not None:
        source = f"from tests.cases import {function}"
    return (
        f"import torch; {source}; nan, inf = float('nan'), float('inf'); "
        f"print({function}({', '.join(arguments)}))"
    )


# ------------------------------------------------------------------------------------------------
# Running


def fuzz(
    seeds: Iterator[int], device: str, is_over: Callable[[int], bool], progress: Any = None
) -> tuple[int, int, list[Failure]]:
    """Makes calls until it is over; returns their number, the next seed, and what went wrong."""
    calls, failures = 0, []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        for seed in seeds:
            if is_over(calls):
                return calls, seed, failures
            more, wrong = check(seed, device)
            calls += more
            failures += wrong
            if progress is not None:
                progress(more, wrong)
    raise AssertionError("seeds never end")


def main() -> None:
    """Runs from the command line; ends with 1 if a call went wrong."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, help="end after so many calls")
    parser.add_argument("--minutes", type=float, help="end after so many minutes")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--device", choices=["cpu", "sim", "cuda"], default="cpu")
    parser.add_argument("--failures", type=Path, default=FAILURES, help="where failures go")
    args = parser.parse_args()
    if args.minutes is not None and not args.minutes > 0:
        parser.error(f"argument --minutes: expected a number > 0, got {args.minutes:g}")
    if args.calls is None and args.minutes is None:
        args.calls = 20_000
    torch.set_num_threads(1)
    if args.device == "sim":
        from tools import simulated_device

        simulated_device.start()  # before the first backward pass of the process
    end = time.monotonic() + 60 * (args.minutes or math.inf)
    args.failures.parent.mkdir(parents=True, exist_ok=True)
    kinds: Counter[str] = Counter()
    with (
        tqdm(total=args.calls, unit=" calls", mininterval=1.0) as bar,
        args.failures.open("a") as file,
    ):

        def progress(more: int, wrong: list[Failure]) -> None:
            bar.update(more)
            for failure in wrong:
                print(failure, file=file, flush=True)
                kinds[failure.line.partition("print(")[2].partition("(")[0]] += 1
            if wrong:
                bar.set_postfix(failures=sum(kinds.values()))

        def is_over(calls: int) -> bool:
            return time.monotonic() > end or (args.calls is not None and calls >= args.calls)

        calls, seed, failures = fuzz(itertools.count(args.start), args.device, is_over, progress)
    print(
        f"{calls} calls on {args.device}, seeds {args.start} to {seed - 1}: {len(failures)} wrong"
    )
    for stem, count in kinds.most_common():
        print(f"  {stem}: {count}")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
