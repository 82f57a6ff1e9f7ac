"""One case: check every variant against the eager formula, then memory, then interleaved times."""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import memory, timing
from benchmarks.cases import Case, Inputs, Maker, Variant
from benchmarks.ceilings import Ceilings

__all__ = ["FORWARD", "TRAINING", "Limits", "Mismatch", "Result", "check", "expected", "measure"]

FORWARD, TRAINING = "forward", "forward+backward"
SLOW = 20.0  # seconds a call from which one round has to do


class Mismatch(AssertionError):
    """A variant does not compute what the eager formula computes."""


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
        return torch.autograd.grad(value, [inputs[n] for n in self.wrt], inputs.get("upstream"))

    def both(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The detached value and the gradients, to be compared."""
        inputs = self.inputs[0]
        value = self._call(inputs)
        leaves = [inputs[name] for name in self.wrt]
        return value.detach(), torch.autograd.grad(value, leaves, inputs.get("upstream"))

    def _call(self, inputs: Inputs) -> Tensor:
        return self.variant.call(**{k: v for k, v in inputs.items() if k != "upstream"})


def _ready(case: Case, variant: Variant, inputs: list[Inputs]) -> _Ready:
    if variant.prepare is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            inputs = [variant.prepare(each) for each in inputs]
    return _Ready(variant, inputs, case.family.wrt)


def _compare(
    case: Case,
    variant: Variant,
    inputs: Inputs,
    found: tuple[Tensor, Sequence[Tensor]],
    wanted: tuple[Tensor, Sequence[Tensor]],
    tolerance: float,
) -> None:
    names = ["value", *(f"gradient of {name}" for name in case.family.wrt)]
    tensors = zip(names, [found[0], *found[1]], [wanted[0], *wanted[1]], strict=True)
    for name, one, other in tensors:
        if one.layout != torch.strided:
            one = one.to_dense()
        on_support = variant.at_stored_entries or case.family.kink_at_zero
        if on_support and name != "value":
            support = inputs[name.removeprefix("gradient of ")].detach() != 0
            one, other = one * support, other * support
        if one.shape != other.shape:
            raise Mismatch(f"{variant.name}: {name} of shape {list(one.shape)}")
        error = torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other)
        # The value is a sum of many terms and has no ties: it agrees to more digits.
        allowed = tolerance if name != "value" else min(tolerance, 1e-3)
        if not (error <= allowed or torch.equal(one, other)):
            raise Mismatch(
                f"{case.loss}, {case.name}, {variant.name}: {name} is off by {error.item():.1e} "
                f"of its norm, allowed {allowed:.0e}"
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
        _compare(case, variant, inputs, found, wanted, tolerance)


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
    say: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """All rows of a case.

    A variant that differs from the eager formula gets a row that says so and is not timed; so does
    one that fails or needs more memory than there is.
    """
    variants = case.variants(device.type)
    eager = variants[0]
    if compiled:
        # Without a reset, the ninth size of a formula falls back to eager.
        torch._dynamo.reset()
        compiled_eager = torch.compile(eager.call, dynamic=False)
        variants.insert(1, Variant("torch.compile", compiled_eager, "compile"))
    status = {variant.name: "ok" for variant in variants}
    for tiny in case.family.tiny:
        small = Case(case.family, tiny)
        for variant in small.variants(device.type)[1:]:
            if variant.name in status:
                pair = [small.variants(device.type)[0], variant]
                _guarded(status, variant, check, small, pair, Maker(device, torch.float64))

    # On a GPU inputs are rotated, so that no repetition finds its own in the cache.
    copies = 3 if device.type == "cuda" and case.elements < 2**26 else 1
    inputs = [case.inputs(Maker(device, seed=seed)) for seed in range(copies)]
    needed = case.eager_bytes()
    if needed > 0.9 * memory.available_bytes(device):
        status["eager"] = f"skipped: needs about {needed / 2**30:.0f} GiB"
        status["torch.compile"] = "skipped: no eager formula to compare with"
    warm = _WarmUp(case, inputs, device)
    for variant in variants:
        if status[variant.name] == "ok":
            say(variant.name)
            _guarded(status, variant, warm.up, variant)
    warm.wanted = None

    results = []
    for pass_ in passes:
        say(pass_)
        results += _one_pass(case, pass_, variants, status, warm, ceilings, limits)
    return results


class _WarmUp:
    """The first call of every variant: compiles, fills caches, is compared, and gives its size."""

    def __init__(self, case: Case, inputs: list[Inputs], device: torch.device) -> None:
        self.case, self.inputs, self.device = case, inputs, device
        self.ready: dict[str, _Ready] = {}
        self.first: dict[str, dict[str, float]] = {FORWARD: {}, TRAINING: {}}
        self.wanted: tuple[Tensor, Sequence[Tensor]] | None = None

    def up(self, variant: Variant) -> None:
        """Calls it once for its result and, if that was right, once more in either pass."""
        ready = _ready(self.case, variant, self.inputs)
        start = time.perf_counter()
        found = ready.both()
        took = time.perf_counter() - start
        if variant.kind == "eager":
            self.wanted = found
        elif self.wanted is not None:
            tolerance = self.case.family.tolerance
            _compare(self.case, variant, self.inputs[0], found, self.wanted, tolerance)
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
        inputs = warm.ready[variant.name].inputs[0]
        num_bytes, num_flops = case.floor(inputs, backward=pass_ == TRAINING)
        figures |= {
            "floor_bytes": num_bytes,
            "floor_flops": num_flops,
            "share_of_ceiling": ceilings.seconds(num_bytes, num_flops) / times.median,
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
    except Mismatch as error:
        status[variant.name] = f"MISMATCH: {error}"
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        status[variant.name] = f"failed: {type(error).__name__}: {line[:150]}"
