"""One case: check every variant against the eager formula, then memory, then interleaved times."""

import gc
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import graphs, memory, timing
from benchmarks.cases import DTYPES, Case, Family, Inputs, Maker, Variant
from benchmarks.ceilings import Ceilings

__all__ = [
    "FORWARD",
    "TRAINING",
    "Broken",
    "Limits",
    "Mismatch",
    "Result",
    "asked",
    "check",
    "check_rounded",
    "expected",
    "is_broken",
    "measure",
]

FORWARD, TRAINING = "forward", "forward+backward"
SLOW = 20.0  # seconds a call from which one round has to do
# What a variant may be off by beyond the eager formula in the same dtype, both from fp64, relative
# to the norm: a rounding of the result, and for fp32 what another order of a sum may cost.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


# The small copies that were checked, once a process; families, so that none has another's id.
_PASSED: dict[tuple[int, str, str, str], Family] = {}


class Mismatch(AssertionError):
    """A variant does not compute what the eager formula computes."""


class Broken(RuntimeError):
    """A variant left the GPU in a state in which this process cannot go on."""

    def __init__(self, variant: str, status: str) -> None:
        super().__init__(status)
        self.variant, self.status = variant, status


@dataclass(frozen=True)
class Limits:
    """How long a case may take."""

    budget: float  # seconds for the rounds of one pass of one case
    min_rounds: int = 3
    max_rounds: int = 20


@dataclass(frozen=True)
class Result:
    """One row: one variant of one case in one pass."""

    loss: str
    case: str
    group: str
    elements: int
    pass_: str
    variant: str
    kind: str
    status: str
    rounds: int = 0
    seconds: float = math.nan
    seconds_q1: float = math.nan
    seconds_q3: float = math.nan
    speedup: float = math.nan  # eager's time over this one's, round by round
    speedup_q1: float = math.nan
    speedup_q3: float = math.nan
    peak_bytes: float = math.nan
    peak_bytes_without_gradients: float = math.nan
    floor_bytes: float = math.nan
    floor_flops: float = math.nan
    share_of_ceiling: float = math.nan
    dtype: str = "fp32"
    # What the chooser of kernels is asked here: which operation, and how many elements it has.
    operation: str = ""
    operation_elements: str = ""  # all digits
    over_torch: float = math.nan  # the time of impl="torch" over this one's, round by round
    over_torch_q1: float = math.nan
    over_torch_q3: float = math.nan
    graph_status: str = ""
    graph_seconds: float = math.nan  # replayed from a CUDA graph: without launches
    graph_seconds_q1: float = math.nan
    graph_seconds_q3: float = math.nan

    def row(self) -> dict[str, Any]:
        """For the CSV: numbers with six digits, nothing where nothing was measured."""
        return {
            name: ("" if math.isnan(value) else f"{value:.6g}")
            if isinstance(value, float)
            else value
            for name, value in asdict(self).items()
        }


@dataclass
class _Ready:
    """A variant with its inputs prepared."""

    variant: Variant
    inputs: list[Inputs]  # several on a GPU, to be rotated
    wrt: tuple[str, ...]

    def forward(self, turn: int = 0) -> Tensor:
        """The value alone, without a graph."""
        with torch.no_grad():
            return self._call(self.inputs[turn % len(self.inputs)])

    def train(self, turn: int = 0) -> tuple[Tensor, ...]:
        """Value and gradients; the gradients are returned, not accumulated."""
        inputs = self.inputs[turn % len(self.inputs)]
        value = self._call(inputs)
        leaves = [inputs[name] for name in self.wrt]
        return torch.autograd.grad(value, leaves, _upstream(inputs, value))

    def both(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The detached value and the gradients, to be compared."""
        inputs = self.inputs[0]
        value = self._call(inputs)
        leaves = [inputs[name] for name in self.wrt]
        return value.detach(), torch.autograd.grad(value, leaves, _upstream(inputs, value))

    def _call(self, inputs: Inputs) -> Tensor:
        return self.variant.call(**{k: v for k, v in inputs.items() if k != "upstream"})


def _upstream(inputs: Inputs, value: Tensor) -> Tensor | None:
    """In the dtype that comes out, which is not everyone's; cast once."""
    given = inputs.get("upstream")
    if given is not None and given.dtype != value.dtype:
        given = inputs["upstream"] = given.to(value.dtype)
    return given


def _ready(case: Case, variant: Variant, inputs: list[Inputs]) -> _Ready:
    if variant.prepare is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            inputs = [variant.prepare(each) for each in inputs]
    return _Ready(variant, [dict(each) for each in inputs], case.family.wrt)


Found = tuple[Tensor, Sequence[Tensor]]  # a value and gradients


@dataclass(frozen=True)
class _Reference:
    """What everyone is held against, and how far off may be."""

    found: Found
    tolerance: float
    # Of the value and of every gradient, if the reference is of higher precision: how far the eager
    # formula is off in the dtype of the case.
    eager: Sequence[float] | None = None


def _errors(case: Case, variant: Variant, inputs: Inputs, found: Found, wanted: Found) -> list[Any]:
    """The relative errors of the value and of every gradient, 0-d tensors or zeros."""
    names = ["value", *case.family.wrt]
    errors: list[Any] = []
    for name, one, other in zip(names, [found[0], *found[1]], [wanted[0], *wanted[1]], strict=True):
        if one.layout != torch.strided:
            one = one.to_dense()
        if one.shape != other.shape:
            raise Mismatch(f"{variant.name}: {_told(name)} of shape {list(one.shape)}")
        if one.dtype != other.dtype:
            one, other = one.to(torch.float64), other.to(torch.float64)
        on_support = variant.at_stored_entries or case.family.kink_at_zero
        if on_support and name != "value":
            support = inputs[name].detach() != 0
            one, other = one * support, other * support
        if torch.equal(one, other):
            errors.append(0.0)
            continue
        errors.append(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))
    return errors


def _told(name: str) -> str:
    return name if name == "value" else f"gradient of {name}"


def _compare(
    case: Case, variant: Variant, inputs: Inputs, found: Found, wanted: _Reference
) -> None:
    errors = _errors(case, variant, inputs, found, wanted.found)
    for number, (name, error) in enumerate(zip(["value", *case.family.wrt], errors, strict=True)):
        # The value is a sum of many terms and has no ties: it agrees to more digits.
        allowed = wanted.tolerance if name != "value" else min(wanted.tolerance, 1e-3)
        beyond = ""
        if wanted.eager is not None:
            allowed = wanted.eager[number] + wanted.tolerance
            beyond = f", of which eager's own {wanted.eager[number]:.0e}"
        if not error <= allowed:
            raise Mismatch(
                f"{case.loss}, {case.name}, {variant.name}: {_told(name)} is off by "
                f"{float(error):.1e} of its norm, allowed {allowed:.0e}{beyond}"
            )


def check(case: Case, variants: Sequence[Variant], maker: Maker) -> None:
    """Compares value and gradients of all variants with the eager formula's.

    Raises:
        Mismatch: for the first that differs.
    """
    inputs = case.inputs(maker)
    wanted = _ready(case, variants[0], [inputs]).both()
    double = maker.dtype == torch.float64
    for variant in variants[1:]:
        found = _ready(case, variant, [inputs]).both()
        tolerance = 1e-6 if double else case.family.tolerance
        if variant.kind == "peer":  # some compute in single precision, or add an epsilon
            tolerance = max(tolerance, 1e-3)
        _compare(case, variant, inputs, found, _Reference(wanted, tolerance))


def check_rounded(case: Case, variants: Sequence[Variant], maker: Maker) -> None:
    """The same in the dtype of the case: nobody further from fp64 than the eager formula is.

    Raises:
        Mismatch: for the first that is, by more than a rounding.
    """
    inputs = case.inputs(maker)
    wanted = _rounded(case, variants[0], inputs, variants[0])
    for variant in variants[1:]:
        found = _ready(case, variant, [inputs]).both()
        _compare(case, variant, inputs, found, _for(variant, wanted))


def _for(variant: Variant, wanted: _Reference) -> _Reference:
    """Peers may keep less between two steps than the eager formula does."""
    if variant.kind != "peer" or wanted.eager is None:
        return wanted
    return replace(wanted, tolerance=max(1e-3, 4 * wanted.tolerance))


def _rounded(
    case: Case, exact: Variant, inputs: Inputs, eager: Variant, own: Found | None = None
) -> _Reference:
    """The reference in fp64, of the same rounded inputs, and how far the eager formula is off."""
    double = {
        name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for name, x in inputs.items()
    }
    wanted = _ready(case, exact, [double]).both()
    if own is None:
        own = _ready(case, eager, [inputs]).both()
    errors = _errors(case, eager, inputs, own, wanted)
    if not all(math.isfinite(float(error)) for error in errors):
        raise Mismatch(f"{case.loss}, {case.name}: the eager formula is not finite")
    rounding = ROUNDING[case.dtype]
    return _Reference(wanted, rounding, [float(error) for error in errors])


@contextmanager
def _questions() -> Iterator[dict[str, int]]:
    """What the chooser of kernels is asked meanwhile; its answer is no."""
    from sparse_losses import kernels

    found: dict[str, int] = {}

    def no(operation: str, device: torch.device, elements: int) -> bool:
        found[operation] = max(elements, found.get(operation, 0))
        return False

    before, kernels.is_ahead = kernels.is_ahead, no
    try:
        yield found
    finally:
        kernels.is_ahead = before


def asked(case: Case, variants: Sequence[Variant], inputs: Inputs) -> dict[str, int]:
    """Operations that have a kernel for this case, and the elements that their choice goes by."""
    if not any(variant.impl == "triton" for variant in variants):
        return {}
    call = next(variant.call for variant in variants if variant.impl == "torch")
    with _questions() as found, torch.no_grad():
        call(**{k: v for k, v in inputs.items() if k != "upstream"} | {"impl": "auto"})
    return found


def expected(case: Case, device: torch.device, *, compiled: bool) -> list[str]:
    """The variants that a row is wanted for, before anything is computed."""
    names = [variant.name for variant in case.variants(device.type)]
    return [names[0], *(["torch.compile"] if compiled else []), *names[1:]]


def measure(
    case: Case,
    device: torch.device,
    ceilings: Ceilings,
    limits: Limits,
    *,
    compiled: bool = True,
    passes: Sequence[str] = (FORWARD, TRAINING),
    without: Collection[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """All rows of a case.

    A variant that differs from the eager formula gets a row that says so and is not timed; so does
    one that fails or needs more memory than there is.

    Raises:
        Broken: if a variant broke the process; ``without`` it, a new one can go on.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # the last case's blocks, which would be in the way of this one's
    variants = [v for v in case.variants(device.type) if v.name not in without]
    eager = variants[0]
    if compiled and "torch.compile" not in without:
        # Without a reset, the ninth size of a formula falls back to eager.
        torch._dynamo.reset()
        compiled_eager = torch.compile(eager.call, dynamic=False)
        variants.insert(1, Variant("torch.compile", compiled_eager, "compile"))
    status = {variant.name: "ok" for variant in variants}
    is_half = case.dtype.itemsize == 2
    for tiny in case.family.tiny:
        small = replace(case, sizes={**tiny, "dtype": case.sizes.get("dtype", "fp32")})
        for variant in small.variants(device.type)[1:]:
            if variant.name not in status:
                continue
            key = id(case.family), small.name, variant.name, device.type
            if key in _PASSED:
                continue
            pair = [small.variants(device.type)[0], variant]
            if variant.impl != "triton":  # which has no fp64
                _guarded(status, variant, check, small, pair, Maker(device, torch.float64))
            if is_half or variant.impl == "triton":
                _guarded(status, variant, check_rounded, small, pair, Maker(device))
            if status[variant.name] == "ok":
                _PASSED[key] = case.family

    # On a GPU inputs are rotated, so that no repetition finds its own in the cache.
    copies = 3 if device.type == "cuda" and case.elements < 2**26 else 1
    inputs = [case.inputs(Maker(device, seed=seed)) for seed in range(copies)]
    needed = case.eager_bytes()
    if needed > 0.9 * memory.available_bytes(device):
        status["eager"] = f"skipped: needs about {needed / 2**30:.0f} GiB"
        status["torch.compile"] = "skipped: no eager formula to compare with"
    warm = _WarmUp(case, inputs, device)
    if is_half:
        say("fp64")
        warm.exact = next((v for v in variants if v.impl == "torch"), variants[0])
        in_double = needed * 8 / case.dtype.itemsize
        if in_double < 0.5 * memory.available_bytes(device):
            warm.exact = variants[0]
    for variant in variants:
        if status[variant.name] == "ok":
            say(variant.name)
            _guarded(status, variant, warm.up, variant)
    warm.wanted = None
    questions: dict[str, int] = {}
    if any(variant.impl for variant in variants):
        with suppress(Exception):  # what cannot be called has a status that says so
            questions = asked(case, variants, inputs[0])

    results = []
    for pass_ in passes:
        say(pass_)
        found = _one_pass(case, pass_, variants, status, warm, ceilings, limits)
        if len(questions) == 1:  # of several, no time is that of one
            ((operation, elements),) = questions.items()
            found = [
                replace(each, operation=operation, operation_elements=str(elements))
                for each in found
            ]
        results += found
    return results


class _WarmUp:
    """The first call of every variant: compiles, fills caches, is compared, and gives its size."""

    def __init__(self, case: Case, inputs: list[Inputs], device: torch.device) -> None:
        self.case, self.inputs, self.device = case, inputs, device
        self.ready: dict[str, _Ready] = {}
        self.first: dict[str, dict[str, float]] = {FORWARD: {}, TRAINING: {}}
        self.wanted: _Reference | None = None
        self.exact: Variant | None = None  # what gives the reference in fp64

    def up(self, variant: Variant) -> None:
        """Calls it once for its result and, if that was right, once more in either pass."""
        ready = _ready(self.case, variant, self.inputs)
        start = time.perf_counter()
        found = ready.both()
        took = time.perf_counter() - start
        if self.wanted is not None:
            wanted = _for(variant, self.wanted)
            _compare(self.case, variant, self.inputs[0], found, wanted)
        else:  # the eager formula, or the first that fits
            self.wanted = self._reference(variant, found)
        del found
        for pass_, run in ((FORWARD, ready.forward), (TRAINING, ready.train)):
            # What takes this long is warm already, but for a compiler, which has not seen both.
            self.first[pass_][variant.name] = took
            compiles = variant.kind == "compile" and pass_ == FORWARD
            for _ in range(2 if took < 0.25 else int(compiles)):
                self.first[pass_][variant.name] = self._seconds(run)
            if variant.kind == "compile" and took >= 0.25:  # most of it was compilation
                self.first[pass_][variant.name] = self._seconds(run)
        self.ready[variant.name] = ready

    def _reference(self, variant: Variant, found: Found) -> _Reference:
        tolerance = self.case.family.tolerance
        if self.exact is not None:
            wanted = _rounded(self.case, self.exact, self.inputs[0], variant, found)
            # Scores that the dtype cannot tell apart swap the arg-max here and there.
            return replace(wanted, tolerance=max(tolerance, wanted.tolerance))
        return _Reference(found, tolerance)

    def _seconds(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def _one_pass(
    case: Case,
    pass_: str,
    variants: Sequence[Variant],
    status: dict[str, str],
    warm: _WarmUp,
    ceilings: Ceilings,
    limits: Limits,
) -> list[Result]:
    """Memory, then times, of all variants that got this far."""
    measured = [v for v in variants if status[v.name] == "ok"]
    runs = {v.name: _run(warm.ready[v.name], pass_) for v in measured}
    first = {name: warm.first[pass_][name] for name in runs}
    peaks = {}
    for name, run in runs.items():
        gradients = pass_ == TRAINING
        peaks[name] = memory.peak_bytes(
            lambda run=run, gradients=gradients: run(0) if gradients else _forget(run(0)),
            warm.device,
        )
    is_slow = max(first.values(), default=0.0) > SLOW
    samples = timing.interleave(
        runs,
        warm.device,
        budget=limits.budget,
        first=first,
        min_rounds=1 if is_slow else limits.min_rounds,
        max_rounds=limits.max_rounds,
    )
    results = []
    for variant in variants:
        about = {
            "loss": case.loss,
            "case": case.name,
            "group": case.group,
            "elements": case.elements,
            "pass_": pass_,
            "variant": variant.name,
            "kind": variant.kind,
            "status": status[variant.name],
            "dtype": next(name for name, dtype in DTYPES.items() if dtype == case.dtype),
        }
        if variant not in measured:
            results.append(Result(**about))
            continue
        times = samples.times(variant.name)
        figures = {
            "rounds": len(samples.seconds[variant.name]),
            "seconds": times.median,
            "seconds_q1": times.q1,
            "seconds_q3": times.q3,
            "peak_bytes": float(peaks[variant.name][0]),
            "peak_bytes_without_gradients": float(peaks[variant.name][1]),
        }
        if "eager" in runs:
            ratio = samples.ratios(variant.name, "eager")
            figures |= {
                "speedup": ratio.median,
                "speedup_q1": ratio.q1,
                "speedup_q3": ratio.q3,
            }
        plain = next((v.name for v in measured if v.impl == "torch"), None)
        if plain is not None:
            ratio = samples.ratios(variant.name, plain)
            figures |= {
                "over_torch": ratio.median,
                "over_torch_q1": ratio.q1,
                "over_torch_q3": ratio.q3,
            }
        if case.suite == "kernels":
            peak = figures["peak_bytes"]
            said, replays = graphs.replayed(runs[variant.name], warm.device, needs=peak)
            about["graph_status"] = said
            if replays is not None:
                figures |= {
                    "graph_seconds": replays.median,
                    "graph_seconds_q1": replays.q1,
                    "graph_seconds_q3": replays.q3,
                }
        inputs = warm.ready[variant.name].inputs[0]
        num_bytes, num_flops = case.floor(inputs, backward=pass_ == TRAINING)
        figures |= {
            "floor_bytes": num_bytes,
            "floor_flops": num_flops,
            "share_of_ceiling": ceilings.seconds(
                num_bytes, num_flops, is_half=case.dtype.itemsize == 2
            )
            / times.median,
        }
        results.append(Result(**about, **figures))
    return results


def _run(ready: _Ready, pass_: str) -> Callable[[int], Any]:
    return ready.train if pass_ == TRAINING else ready.forward


def _forget(_: object) -> tuple[()]:
    """The value is no gradient: nothing is taken out of the peak."""
    return ()


def _guarded(
    status: dict[str, str], variant: Variant, run: Callable[..., object], *args: Any
) -> None:
    """Notes what went wrong instead of ending the suite; the command fails at its end."""
    try:
        run(*args)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what a kernel did wrong shows here, if not before
    except Mismatch as error:
        status[variant.name] = f"MISMATCH: {error}"
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        status[variant.name] = f"failed: {type(error).__name__}: {line[:150]}"
        if is_broken():
            raise Broken(variant.name, status[variant.name]) from error


def is_broken() -> bool:
    """Whether the GPU answers no more, as after an access beyond its memory."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False
