"""What measures on a GPU, as far as a CPU can show it: no assertion here is on a time."""

import ast
import importlib.util
import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
if importlib.util.find_spec("triton"):
    # Triton looks at its variable now, which some tests below unset.
    importlib.import_module("benchmarks.l2")

from benchmarks import ahead, gpu, graphs, samples, training_step
from benchmarks.cases import DTYPES, FAMILIES, Case, Maker, Variant, cases, family
from benchmarks.ceilings import Ceilings
from benchmarks.measure import (
    TRAINING,
    Broken,
    Limits,
    Mismatch,
    Result,
    _guarded,
    asked,
    check_rounded,
    measure,
)
from benchmarks.table import Table, read
from sparse_losses import SpladeObjective, kernels
from sparse_losses.functional import (
    distillation_loss,
    info_nce_loss,
    nws_loss,
    splade_head,
)
from tools.on_device import on_device

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
RATES = Ceilings(1e10, 1e11, 8e11, 5e10)
TINY = [case for case in cases("tiny") if "V" not in case.sizes or case.loss != "info_nce"]


def has_impl(loss: str) -> bool:
    """Return whether the function of a loss has a choice of implementations yet."""
    alone = {
        "info_nce": info_nce_loss,
        "nws": nws_loss,
        "distillation": distillation_loss,
        "splade_head": splade_head,
    }
    return "impl" in inspect.signature(alone.get(loss, SpladeObjective)).parameters


def with_dtype(case: Case, dtype: str) -> Case:
    return replace(case, sizes={**case.sizes, "dtype": dtype})


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter was not chosen when the kernels were defined")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


# The suite.


def test_the_suite_begins_with_the_kernels_and_names_every_dtype():
    found = cases("kernels")
    assert [case.loss for case in found[:3]] == ["splade_head"] * 3
    assert {case.loss for case in found} == {each.loss for each in FAMILIES} - {"end_to_end"}
    assert all(case.sizes["dtype"] in DTYPES for case in found)
    names = [(case.loss, case.name) for case in found]
    assert len(names) == len(set(names))
    sizes = {(case.loss, case.name) for case in found}
    assert ("info_nce", "B=65536 D=768 bf16") in sizes
    assert ("splade_head", "B=32 S=256 V=250002 H=768 1% mask=67% bf16") in sizes


def test_every_kernel_is_measured_at_three_sizes_at_least():
    with_kernel = ("splade_head", "info_nce", "nws", "distillation", "regularisers")
    for loss in with_kernel:
        assert len({case.elements for case in cases("kernels", [loss])}) >= 3, loss


def test_without_a_gpu_no_variant_asks_for_an_implementation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for suite in ("tiny", "quick", "kernels"):
        for case in cases(suite):
            assert not any(variant.impl for variant in case.variants("cpu"))


@pytest.mark.usefixtures("interpreted")
def test_the_interpreter_tries_tiny_cases_only():
    for case in cases("quick"):
        assert not any(variant.impl for variant in case.variants("cpu"))
    found = {case.loss for case in TINY if any(v.impl == "triton" for v in case.variants("cpu"))}
    assert found >= {"splade_head", "info_nce", "nws", "distillation", "regularisers", "flops"}


def test_on_a_gpu_both_implementations_stand_beside_the_formula():
    pytest.importorskip("triton")
    for case in cases("kernels"):
        variants = [v for v in case.variants("cuda") if v.kind != "peer"]
        names = [variant.name for variant in variants]
        assert names in (["eager", "ours"], ["eager", "ours, torch", "ours, triton"]), case


def test_masks_have_the_wanted_share():
    mask = Maker(CPU).mask(4000, 256, 0.67)
    assert mask.double().mean().item() == pytest.approx(0.67, abs=0.01)
    assert mask.sum(1).min() >= 1


def test_half_precision_is_rounded_from_single():
    sizes = {"B": 64, "V": 5000, "density": 0.005, "dtype": "bf16"}
    x = Case(family("flops"), sizes).inputs(Maker(CPU))["activations"]
    assert x.dtype == torch.bfloat16
    assert x.requires_grad
    assert (x != 0).double().mean().item() == pytest.approx(0.005, rel=0.1)
    double = Case(family("flops"), sizes).inputs(Maker(CPU, torch.float64))["activations"]
    assert double.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("case", cases("tiny"), ids=lambda case: f"{case.loss} {case.name}")
def test_no_variant_is_further_from_fp64_than_the_formula(case: Case, dtype: str):
    case = with_dtype(case, dtype)
    variants = [v for v in case.variants("cpu") if v.kind != "peer" and not v.impl]
    check_rounded(case, variants, Maker(CPU))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.loss} {case.name}")
def test_nor_is_any_kernel(case: Case, dtype: str):
    case = with_dtype(case, dtype)
    variants = [v for v in case.variants("cpu") if v.kind == "eager" or v.impl]
    if len(variants) == 1 or not has_impl(case.loss):
        pytest.skip("no choice of implementations")
    if case.loss == "min_activation" and dtype == "bf16":
        pytest.skip("which of two equal activations is among the largest is anyone's choice")
    check_rounded(case, variants, Maker(CPU))
    questions = asked(case, variants, case.inputs(Maker(CPU)))
    assert all(elements > 0 for elements in questions.values())


def test_what_is_further_off_is_found():
    case = with_dtype(Case(family("flops"), family("flops").tiny[0]), "bf16")
    plain = case.variants("cpu")[0]
    wrong = Variant("wrong", lambda activations: 1.05 * plain.call(activations))
    with pytest.raises(Mismatch, match=r"value is off by .*, of which eager's own"):
        check_rounded(case, [plain, wrong], Maker(CPU))
    blind = Variant("blind", lambda activations: plain.call(activations) + 0 * activations.sum())
    check_rounded(case, [plain, blind], Maker(CPU))
    none = Variant("nan", lambda activations: plain.call(activations) * math.nan)
    with pytest.raises(Mismatch):
        check_rounded(case, [plain, none], Maker(CPU))


def _loss_with_impl(activations: torch.Tensor, impl: str = "auto") -> torch.Tensor:
    """Two implementations without a kernel, chosen as the real ones are."""
    if impl == "auto":
        kernels.is_ahead("flops", activations.device, activations.numel())
    return activations.abs().float().mean(0).square().sum()


def _family_with_impl(*more: Variant) -> Case:
    def by(impl: str) -> Callable[..., torch.Tensor]:
        return lambda activations, impl=impl: _loss_with_impl(activations, impl)

    variants = [Variant(f"ours, {impl}", by(impl), impl=impl) for impl in ("torch", "triton")]
    each = replace(family("flops"), variants=(*variants, *more))
    return Case(each, {"B": 4, "V": 50, "density": 0.4, "dtype": "bf16"}, "tiny")


@pytest.mark.usefixtures("interpreted")
def test_a_row_has_its_dtype_its_operation_and_its_ratio_over_torch():
    results = measure(_family_with_impl(), CPU, RATES, Limits(0.0, 2, 2), compiled=False)
    rows = {row.variant: row for row in results if row.pass_ == TRAINING}
    assert [*rows] == ["eager", "ours, torch", "ours, triton"]
    for row in rows.values():
        assert (row.status, row.dtype, row.operation) == ("ok", "bf16", "flops")
        assert row.operation_elements == "200"
        assert row.over_torch_q1 <= row.over_torch <= row.over_torch_q3
        assert row.graph_status == ""
    assert rows["ours, torch"].over_torch == 1


@pytest.mark.usefixtures("interpreted")
def test_where_the_formula_does_not_fit_the_others_are_held_against_each_other(monkeypatch):
    monkeypatch.setattr("benchmarks.memory.available_bytes", lambda device: 10)
    wrong = Variant("ours, wrong", lambda activations: activations.float().abs().sum())
    results = measure(_family_with_impl(wrong), CPU, RATES, Limits(0.0, 1, 1), compiled=False)
    status = {row.variant: row.status for row in results}
    assert status["eager"].startswith("skipped")
    assert status["ours, torch"] == status["ours, triton"] == "ok"
    assert status["ours, wrong"].startswith("MISMATCH")


def test_the_ceiling_is_that_of_the_dtype():
    assert RATES.seconds(0, 8e11) == pytest.approx(8)
    assert RATES.seconds(0, 8e11, is_half=True) == pytest.approx(1)
    assert Ceilings(1e10, 1e11).seconds(0, 1e11, is_half=True) == pytest.approx(1)


def test_the_kernel_that_reads_the_cache_reads_all_of_it():
    pytest.importorskip("triton")
    from benchmarks.l2 import BLOCK, read_repeatedly

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randint(8, (3 * BLOCK,), device=device).float()
    assert read_repeatedly(x, 2).tolist() == [x.sum().item()] * 2
    with pytest.raises(ValueError, match="multiple of 4096"):
        read_repeatedly(x[1:], 2)


def test_the_suite_of_the_kernels_is_refused_on_a_cpu(tmp_path: Path):
    words = ["-m", "benchmarks", "--suite", "kernels", "--output", str(tmp_path / "out.csv")]
    run = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "needs --device cuda" in run.stderr
    assert not (tmp_path / "out.csv").exists()


# What can go wrong on a GPU.


def test_a_variant_that_breaks_the_process_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.measure.is_broken", lambda: True)

    def run() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    status = {"ours, triton": "ok"}
    with pytest.raises(Broken) as caught:
        _guarded(status, Variant("ours, triton", run), run)
    assert caught.value.variant == "ours, triton"
    assert caught.value.status.endswith("illegal memory access was encountered")


def test_the_next_process_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from benchmarks import __main__ as command
    from benchmarks import worker

    words = ["--suite", "tiny", "--only", "margin_mse", "--no-compile"]
    args = command.parser().parse_args([*words, "--worker", "default"])
    output = tmp_path / "run.csv"

    def break_down(*_: object, **__: object) -> list[Result]:
        raise Broken("ours", "failed: illegal memory access")

    whole = worker.measure
    monkeypatch.setattr(worker, "measure", break_down)
    assert worker.work(args, output, budget=0.0) == worker.AGAIN
    statuses = {row["status"] for row in read(output)}
    assert statuses == {f"{worker.BROKE}failed: illegal memory access"}
    monkeypatch.setattr(worker, "measure", whole)
    assert worker.work(args, output, budget=0.0) == 0
    rows = read(output)
    assert len([row for row in rows if row["variant"] == "ours"]) == 2
    assert {row["status"] for row in rows if row["variant"] == "eager"} == {"ok"}


def test_a_case_that_fails_as_a_whole_does_not_end_the_suite(tmp_path: Path, monkeypatch):
    from benchmarks import __main__ as command
    from benchmarks import worker

    words = ["--suite", "tiny", "--only", "margin_mse,flops", "--no-compile"]
    args = command.parser().parse_args([*words, "--worker", "default"])
    whole = worker.measure

    def fails_once(case: Case, *given: object, **more: object) -> list[Result]:
        if case.loss == "margin_mse":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60 GiB")
        return whole(case, *given, **more)

    monkeypatch.setattr(worker, "measure", fails_once)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert worker.work(args, tmp_path / "run.csv", budget=0.0) == 1
    rows = read(tmp_path / "run.csv")
    assert {row["status"] for row in rows if row["loss"] == "flops"} == {"ok"}
    found = {row["status"] for row in rows if row["loss"] == "margin_mse"}
    assert len(found) == 1
    assert "OutOfMemoryError: CUDA out of memory" in found.pop()
    before = (tmp_path / "run.csv").read_text()
    assert worker.work(args, tmp_path / "run.csv", budget=0.0) == 0  # no case is tried for ever
    assert (tmp_path / "run.csv").read_text() == before


def test_what_waits_for_the_gpu_is_not_captured(monkeypatch: pytest.MonkeyPatch):
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("benchmarks.memory.available_bytes", lambda device: 1000)

    def run(call: int) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    device = SimpleNamespace(type="cuda")
    assert graphs.replayed(run, device, needs=1) == (
        "waits for the GPU: called a synchronizing CUDA operation",
        None,
    )
    assert modes == ["error", 0]
    assert graphs.replayed(run, device, needs=900)[0].startswith("skipped: the graph would keep")

    def fails(call: int) -> None:
        raise RuntimeError("no")

    assert graphs.replayed(fails, device, needs=1) == ("failed: RuntimeError: no", None)
    assert graphs.replayed(run, CPU, needs=1) == ("", None)


# A training step.


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 8, 37, 64, 100, 1000])
def test_the_largest_that_fits_is_found(limit: int):
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = training_step.largest(fits, 4, 64)
    assert found <= limit
    assert found >= min(limit, 64) - max(1, min(limit, 64) // 8)
    assert len(tried) == len(set(tried))
    assert max(tried) <= 64


def _step(words: list[str], output: Path) -> tuple[int, list[dict[str, str]]]:
    given = ["--device", "cpu", "--tiny", "--budget", "0.01", "--output", str(output)]
    return training_step.main([*given, *words]), read(output)


def test_a_step_is_measured_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, rows = _step([], tmp_path / "step.csv")
    assert code == 0
    keys = [(row["case"], row["variant"]) for row in rows]
    assert keys == [(case, head) for case in ("pairs=2", "largest") for head in ("eager", "ours")]
    for row in rows:
        assert row["status"].startswith("ok")
        assert float(row["seconds"]) > 0
        assert float(row["tokens_per_second"]) > 0
        assert float(row["gradient_difference"]) < training_step.ALLOWED_GRADIENT
    assert "| largest | ours | 4 |" in capsys.readouterr().out
    before = (tmp_path / "step.csv").read_text()
    # What is lost of a file is measured again, and nothing else.
    (tmp_path / "step.csv").write_text("".join(before.splitlines(keepends=True)[:-1]))
    code, again = _step([], tmp_path / "step.csv")
    assert again[:-1] == rows[:-1]
    assert [(row["case"], row["variant"]) for row in again] == keys


def test_a_head_that_gives_something_else_is_not_timed(tmp_path: Path, monkeypatch):
    pytest.importorskip("transformers")
    from benchmarks import eager

    def wrong(*tensors: torch.Tensor) -> torch.Tensor:
        return eager.splade_head(*tensors) * 2

    def broken(*tensors: torch.Tensor) -> torch.Tensor:
        raise ValueError("expected a GPU")

    found = {"eager": eager.splade_head, "wrong": wrong, "broken": broken}
    monkeypatch.setattr(training_step, "heads", lambda device, *, tiny: found)
    code, rows = _step([], tmp_path / "step.csv")
    assert code == 1
    status = {(row["case"], row["variant"]): row for row in rows}
    assert status["pairs=2", "wrong"]["status"].startswith("MISMATCH")
    assert status["largest", "broken"]["status"] == "failed: ValueError: expected a GPU"
    assert status["largest", "wrong"]["seconds"] == ""


@pytest.mark.usefixtures("interpreted")
def test_a_step_by_the_kernels():
    pytest.importorskip("transformers")
    if not (has_impl("splade_head") and has_impl("objective")):
        pytest.skip("no choice of implementations")
    step = training_step.Step(training_step.Shape(64, 16, 1, 1, 8, 0.2, (1,), 1), CPU)
    found = training_step.heads(CPU, tiny=True)
    assert [*found] == ["eager", "ours, torch", "ours, triton"]
    checked = training_step._compare(step, found, 1)
    assert {about["status"] for about in checked.values()} == {"ok"}


def test_a_step_of_full_size_is_refused_on_a_cpu():
    with pytest.raises(SystemExit, match="--tiny"):
        training_step.main(["--device", "cpu"])


# Everything, in one command.


def _part(code: str, seconds: float = 60, **more: tuple[str, ...]) -> gpu.Part:
    return gpu.Part("part", (sys.executable, "-c", code), seconds, **more)


ENVIRONMENT = gpu._environment(None, Path())


def test_a_part_says_what_came_of_it(tmp_path: Path):
    log = tmp_path / "log"
    done = gpu.run(_part("print('hello')"), log, 60, ENVIRONMENT)
    assert (done.said, done.is_good) == ("done", True)
    assert log.read_text() == "hello\n"
    failed = gpu.run(_part("raise SystemExit(3)"), log, 60, ENVIRONMENT)
    assert (failed.said, failed.is_good) == ("FAILED, code 3", False)


def test_a_part_is_stopped_and_what_it_wrote_is_kept(tmp_path: Path):
    code = "import time; open('{}', 'w').write('kept'); print('half', flush=True); time.sleep(99)"
    kept = tmp_path / "kept"
    outcome = gpu.run(_part(code.format(kept)), tmp_path / "log", 3, ENVIRONMENT)
    assert (outcome.said, outcome.is_good) == ("out of time; what it had is kept", True)
    assert kept.read_text() == "kept"
    assert (tmp_path / "log").read_text().startswith("half\n")


def test_a_part_without_its_tools_is_left_out(tmp_path: Path):
    more = {"modules": ("torch", "nothing_of_that_name"), "programs": ("no-such-program",)}
    outcome = gpu.run(_part("", **more), tmp_path / "log", 60, ENVIRONMENT)
    assert outcome.said == "left out: no nothing_of_that_name, no-such-program"
    assert outcome.is_good
    assert gpu.run(_part(""), tmp_path / "log", 0, ENVIRONMENT).said == "left out: no time"


def test_all_parts_stay_under_25_minutes():
    todo = gpu.parts(ROOT)
    assert sum(part.seconds + gpu.GRACE for part in todo) <= 25 * 60
    assert [part.name for part in todo][2:4] == ["kernels", "training"]
    for file in gpu.WITH_KERNELS:
        assert (ROOT / file).exists()


def test_the_command_runs_the_parts_that_are_named(tmp_path: Path, monkeypatch, capsys):
    todo = [
        gpu.Part("one", (sys.executable, "-c", "print(1)"), 60),
        gpu.Part("two", (sys.executable, "-c", "raise SystemExit(1)"), 60),
    ]
    monkeypatch.setattr(gpu, "parts", lambda output, device: todo)
    words = ["--output", str(tmp_path / "results"), "--logs", str(tmp_path / "logs")]
    words += ["--device", "cpu"]
    assert gpu.main([*words, "--parts", "one"]) == 0
    assert gpu.main(words) == 1
    assert "| two | 0 | FAILED, code 1 |" in capsys.readouterr().out
    assert (tmp_path / "logs" / "one.log").read_text() == "1\n"
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "three"])


def test_code_for_the_cpu_runs_on_a_device():
    with on_device("meta"):
        generator = torch.Generator("cpu")
        assert isinstance(generator, torch.Generator)
        assert torch.Generator | None  # an annotation somewhere
        assert torch.ones(2).device.type == torch.from_numpy(np.ones(2)).device.type == "meta"
    with on_device("cpu"):
        x = torch.rand(3, generator=torch.Generator().manual_seed(0))
        assert torch.from_numpy(x.numpy()).equal(x)
        np.testing.assert_array_equal(np.asarray(x, dtype=np.float64), x.double().numpy())
    assert torch.ones(1).device.type == "cpu"
    assert torch.Generator is type(generator)


def test_samples_of_unknown_kernels_are_refused():
    with pytest.raises(SystemExit):
        samples.main(["--device", "cpu", "no_such_operation"])


# Which kernels are ahead.


def _row(elements: int, q1: float | None, **more: str) -> dict[str, str]:
    ratio = "" if q1 is None else str(q1)
    return {
        "variant": "ours, triton",
        "operation": "nws",
        "operation_elements": str(elements),
        "capability": "sm_90",
        "dtype": "bf16",
        "status": "ok",
        "case": f"B={elements}",
        "pass": TRAINING,
        "over_torch": ratio,
        "over_torch_q1": ratio,
        "over_torch_q3": ratio,
        **more,
    }


def test_a_kernel_is_ahead_from_the_smallest_size_on_from_which_it_always_is():
    rows = [_row(100, 1.5), _row(200, 0.9), _row(400, 1.2), _row(800, 3.0)]
    assert ahead.where_ahead(rows) == {"nws": {(9, 0): 400}}
    # In every case and every pass of a size.
    assert ahead.where_ahead([*rows, _row(400, 0.99, case="another")]) == {"nws": {(9, 0): 800}}
    assert ahead.where_ahead([*rows, _row(800, 1.0)]) == {}
    assert ahead.where_ahead([*rows, _row(800, None, status="MISMATCH: x")]) == {}
    # Where there is nothing to compare with, nothing is said.
    assert ahead.where_ahead([*rows, _row(1600, None)]) == {"nws": {(9, 0): 400}}
    assert ahead.where_ahead([_row(100, None)]) == {}
    # In every dtype: the table has one number for all.
    assert ahead.where_ahead([*rows, _row(400, 0.9, dtype="fp32")]) == {}
    assert ahead.where_ahead([*rows, _row(600, 1.1, dtype="fp32")]) == {"nws": {(9, 0): 600}}
    assert ahead.where_ahead([*rows, _row(100, 1.1, dtype="fp32")]) == {"nws": {(9, 0): 400}}
    others = [
        _row(100, 2.0, variant="ours, torch"),
        _row(100, 2.0, operation=""),
        _row(100, 2.0, capability="avx2"),
    ]
    assert ahead.where_ahead(others) == {}
    both = ahead.where_ahead([*rows, _row(50, 2.0, capability="sm_100")])
    assert both == {"nws": {(9, 0): 400, (10, 0): 50}}


def test_files_without_a_kernel_say_nothing_of_kernels(tmp_path: Path, capsys):
    for name, text in (("empty.csv", ""), ("other.csv", "a,b\n1,2\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(SystemExit):
            ahead.main([str(tmp_path / name)])
        assert f"no results of `python -m benchmarks`: {tmp_path / name}" in capsys.readouterr().err
    (tmp_path / "cpu.csv").write_text("variant,status\nours,ok\n")
    assert ahead.main([str(tmp_path / "cpu.csv")]) == 1
    assert "no kernel was measured" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_begun(tmp_path: Path):
    words = ["--output", str(tmp_path / "results"), "--logs", str(tmp_path / "logs")]
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu.main(words)
    assert not (tmp_path / "results").exists()
    with pytest.raises(SystemExit, match="no CUDA device"):
        samples.main(["head"])


def test_a_table_that_claims_more_than_was_measured_is_found():
    rows = [_row(400, 1.2), _row(800, 3.0)]
    assert ahead.unbacked({"nws": {(9, 0): 400}}, rows) == []
    assert ahead.unbacked({"nws": {(9, 0): 500}}, rows) == []
    assert ahead.unbacked({"nws": {(9, 0): 399}}, rows) == [
        "nws on (9, 0) from 399 elements on: measured from 400 on"
    ]
    assert len(ahead.unbacked({"nws": {(8, 0): 400}, "head": {(9, 0): 9}}, rows)) == 2


def test_the_command_prints_what_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    common = {
        **dict.fromkeys(("device", "threads", "git_commit", "torch", "suite"), "x"),
        "capability": "sm_90",
        "allocator": "default",
    }
    about = ("nws", "B=4", "", 4, TRAINING, "ours, triton", "ours", "ok")
    ratios = {"over_torch": 2.0, "over_torch_q1": 1.5, "over_torch_q3": 2.5}
    result = Result(*about, operation="nws", operation_elements="67633152", **ratios)
    path = tmp_path / "cuda-kernels.csv"
    Table(path, common).add([result])
    assert ahead.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert '    "nws": {(9, 0): 67_633_152},' in out
    table = ast.literal_eval("{" + out.splitlines()[-1] + "}")
    assert ahead.unbacked(table, read(path)) == []


def test_every_entry_of_the_table_is_backed_by_a_committed_result():
    committed = sorted((ROOT / "benchmarks" / "results").glob("cuda-*.csv"))
    rows = [row for path in committed for row in read(path)]
    assert ahead.unbacked(kernels.AHEAD, rows) == []
