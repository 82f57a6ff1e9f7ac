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


@pytest.mark.parametrize(
    ("code", "seconds", "modules", "said", "log"),
    [
        ("print('hello')", 60, (), "done", "hello\n"),
        ("raise SystemExit(3)", 60, (), "FAILED, code 3", ""),
        ("", 60, ("torch", "no_such", "nor_such"), "left out: no no_such, nor_such", None),
        ("", 0, (), "left out: no time", None),
        (
            "import time; print('half', flush=True); time.sleep(99)",
            3,
            (),
            "out of time; what it had is kept",
            "half\n",
        ),
    ],
)
def test_a_part_says_what_came_of_it(tmp_path: Path, code, seconds, modules, said, log):
    path = tmp_path / "log"
    outcome = gpu.run(_part(code, 60, modules), path, seconds)
    assert (outcome.said, outcome.is_good) == (said, not said.startswith("FAILED"))
    assert (path.read_text()[: len(log)] if path.exists() else None) == log


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
    """What runs when the time is over is stopped, and what is left is left out."""
    codes = ("print(1)", "raise SystemExit(1)", "import time; time.sleep(60)", "")
    todo = [
        gpu.Part(name, (sys.executable, "-c", code), 60)
        for name, code in zip(("one", "two", "three", "four"), codes, strict=True)
    ]
    monkeypatch.setattr(gpu, "parts", lambda output, device: todo)
    monkeypatch.setattr(gpu, "GRACE", 1)
    words = ["--output", str(tmp_path / "results"), "--logs", str(tmp_path / "logs")]
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device"):
            gpu.main(words)
        assert not (tmp_path / "results").exists()
    words += ["--device", "cpu"]
    assert gpu.main([*words, "--parts", "one"]) == 0
    start = time.monotonic()
    assert gpu.main([*words, "--minutes", "0.1"]) == 1
    assert time.monotonic() - start < 20
    out = capsys.readouterr().out
    assert "| two | 0 | FAILED, code 1 |" in out
    assert re.search(r"^\| three \| \d+ \| out of time; what it had is kept \|$", out, re.MULTILINE)
    assert "| four | 0 | left out: no time |" in out
    assert (tmp_path / "logs" / "one.log").read_text() == "1\n"
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "five"])


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
