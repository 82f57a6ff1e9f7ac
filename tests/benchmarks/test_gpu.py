"""What runs on a GPU, as far as a CPU can show it."""

import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("rich")

from benchmarks import __main__ as command
from benchmarks.run import gpu
from benchmarks.studies import training_step
from tools.on_device import on_device

ROOT = Path(__file__).resolve().parents[2]


def _part(code: str, seconds: float = 60, modules: tuple[str, ...] = ()) -> gpu.Part:
    return gpu.Part("part", (sys.executable, "-c", code), seconds, modules)


def test_a_part_says_what_came_of_it(tmp_path: Path):
    log = tmp_path / "log"
    done = gpu.run(_part("print('hello')"), log, 60)
    assert (done.said, done.is_good) == ("done", True)
    assert log.read_text() == "hello\n"
    failed = gpu.run(_part("raise SystemExit(3)"), log, 60)
    assert (failed.said, failed.is_good) == ("FAILED, code 3", False)


def test_a_part_is_stopped_and_what_it_wrote_is_kept(tmp_path: Path):
    code = "import time; open('{}', 'w').write('kept'); print('half', flush=True); time.sleep(99)"
    kept = tmp_path / "kept"
    outcome = gpu.run(_part(code.format(kept)), tmp_path / "log", 3)
    assert (outcome.said, outcome.is_good) == ("out of time; what it had is kept", True)
    assert kept.read_text() == "kept"
    assert (tmp_path / "log").read_text().startswith("half\n")


def test_a_part_without_its_tools_is_left_out(tmp_path: Path):
    part = _part("", modules=("torch", "nothing_of_that_name", "nor_of_that"))
    outcome = gpu.run(part, tmp_path / "log", 60)
    assert outcome.said == "left out: no nothing_of_that_name, nor_of_that"
    assert outcome.is_good
    assert gpu.run(_part(""), tmp_path / "log", 0).said == "left out: no time"


def test_the_time_for_all_parts_is_kept(tmp_path: Path, monkeypatch, capsys):
    """Whatever the parts ask for: what is running is stopped, what is left is left out."""
    sleeps = (sys.executable, "-c", "import time; time.sleep(60)")
    todo = [gpu.Part(name, sleeps, 60) for name in ("one", "two")]
    monkeypatch.setattr(gpu, "parts", lambda output, device: todo)
    monkeypatch.setattr(gpu, "GRACE", 1)
    words = ["--output", str(tmp_path), "--logs", str(tmp_path), "--device", "cpu"]
    start = time.monotonic()
    assert gpu.main([*words, "--minutes", "0.1"]) == 0
    assert time.monotonic() - start < 20
    out = capsys.readouterr().out
    assert re.search(r"^\| one \| \d+ \| out of time; what it had is kept \|$", out, re.MULTILINE)
    assert "| two | 0 | left out: no time |" in out


def test_every_part_is_a_command_that_understands_its_options():
    parts = {part.name: part for part in gpu.parts(ROOT / "build")}
    assert [*parts] == ["tests", "losses", "training"]
    for name, words in (("losses", ["-m", "benchmarks"]), ("training", None)):
        given = list(parts[name].command[1:])
        words = words or ["-m", training_step.__name__]
        assert given[: len(words)] == words
        options = command.parser() if name == "losses" else training_step.parser()
        assert options.parse_args(given[len(words) :]).device == "cuda"
    for file in gpu.TESTED:
        assert file in parts["tests"].command
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_begun(tmp_path: Path):
    words = ["--output", str(tmp_path / "results"), "--logs", str(tmp_path / "logs")]
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu.main(words)
    assert not (tmp_path / "results").exists()
