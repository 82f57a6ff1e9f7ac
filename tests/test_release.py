"""What is published: one version, classifiers that are tested, a floor that replaces nothing."""

import json
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import sparse_losses
from tools import check_wheel
from tools.release_notes import notes

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def pins(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def floor(package):
    (requirement,) = (d for d in PROJECT["dependencies"] if d.startswith(f"{package}>="))
    return requirement.removeprefix(f"{package}>=")


def test_the_citation_names_the_version():
    for name in ("CITATION.cff", "docs/cite.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        (version,) = re.findall(r"^ *version *[:=] *{?([^},\n]+)}?,?$", text, re.MULTILINE)
        assert version == sparse_losses.__version__, name


def test_release_notes_are_the_section_of_the_changelog():
    text = "# Changelog\n\n## Unreleased\n\n## 1.10.0 - today\n\nTen.\n\n### Added\n\n- a\n"
    text += "\n## 1.1\n\nOne.\n"
    assert notes(text, "1.10.0") == "Ten.\n\n### Added\n\n- a\n"
    assert notes(text, "1.1") == "One.\n"
    for version in ("1.1.0", "1.1.", "Unreleased", "1x10.0"):
        with pytest.raises(SystemExit, match=r"expected a section `## .*` in CHANGELOG.md"):
            notes(text, version)


def test_every_classifier_is_a_row_of_the_workflow():
    rows = workflow("tests.yml")["jobs"]["versions"]["strategy"]["matrix"]["include"]
    classified = {
        kind: {c.removeprefix(kind) for c in PROJECT["classifiers"] if c.startswith(kind)}
        for kind in ("Programming Language :: Python :: ", "Operating System :: ")
    }
    pythons, systems = classified.values()
    assert pythons == {row["python"] for row in rows if row["torch"] == "newest"} != set()
    assert min(pythons) == PROJECT["requires-python"].removeprefix(">=")
    runners = {"MacOS": "macos", "Microsoft :: Windows": "windows", "POSIX :: Linux": "ubuntu"}
    for torch in (f"{floor('torch')}.*", "newest"):
        tested = {row["os"].removesuffix("-latest") for row in rows if row["torch"] == torch}
        assert tested == {runners[system] for system in systems}


def test_the_oldest_environment_has_the_oldest_versions():
    oldest = pins("constraints-oldest.txt")
    for package in ("torch", "numpy"):
        assert oldest[package].startswith(f"{floor(package)}.")


def test_actions_are_pinned_and_every_job_ends():
    assert len(WORKFLOWS) >= 3
    for file in WORKFLOWS:
        for job in workflow(file.name)["jobs"].values():
            assert 0 < job["timeout-minutes"] <= 60
            for step in job["steps"]:
                assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40)), step


def test_hooks_run_what_make_lint_runs():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = {hook["entry"].split(" -m ")[1] for repo in config["repos"] for hook in repo["hooks"]}
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.M)[1]
    linted = {line.split(" -m ")[1] for line in recipe.splitlines()}
    assert {re.sub(r" --check| \.$", "", command) for command in linted} == hooks


def test_the_sdist_lists_everything_that_is_tracked():
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode or "pyproject.toml" not in run.stdout.split():
        pytest.skip("not a clone")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    include = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    tracked = {name.partition("/")[0] for name in run.stdout.splitlines()}
    by_itself = {"pyproject.toml", "LICENSE"}
    missing = tracked - {name.removeprefix("/") for name in include} - by_itself
    assert missing == check_wheel.NOT_SHIPPED
    for name in include:
        assert (ROOT / name.removeprefix("/")).exists(), name


def test_check_wheel_finds_extra_and_missing_files():
    data = [f"sparse_losses/{name}" for name in check_wheel.DATA]
    right = [*data, "sparse_losses/a.py", "sparse_losses-1.dist-info/METADATA"]
    assert check_wheel.wrong_in_wheel(right) == []
    for name in ("tests/a.py", "examples/demo/__main__.py", "sparse_losses/a.svg"):
        assert check_wheel.wrong_in_wheel([*right, name]) == [f"{name} is in the wheel"]
    assert check_wheel.wrong_in_wheel(right[1:]) == [f"{data[0].rpartition('/')[2]} is missing"]
    tracked = ["a.py", "tests/b.py", ".ci/run"]
    assert check_wheel.missing_in_sdist(["x-1/a.py", "x-1/tests/b.py"], tracked) == []
    assert check_wheel.missing_in_sdist(["x-1/a.py"], tracked) == ["tests/b.py"]


def put(folder, name, version, requires=()):
    """An installed package that is nothing but its metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    (info / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any")
    (info / "RECORD").touch()
    return info


def put_wheel(folder, name, version, requires=()):
    info = put(folder / "unpacked", name, version, requires)
    wheel = folder / f"{info.stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in info.iterdir():
            archive.write(file, f"{info.name}/{file.name}")


@pytest.mark.parametrize(
    ("installed", "replaced"),
    [
        ("2.6.0+cu124", False),
        ("2.16.0.dev20261101+cu132", False),  # a nightly build
        ("2.5.1", True),
        (None, True),
    ],
)
def test_installing_the_package_keeps_a_supported_pytorch(tmp_path, installed, replaced):
    pytest.importorskip("pip")
    for name, version in (("torch", "2.15.0"), ("numpy", "2.4.6")):  # what an index would offer
        put_wheel(tmp_path, name, version)
    put_wheel(tmp_path, "sparse-losses", sparse_losses.__version__, PROJECT["dependencies"])
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").rglob("site-packages")
    put(site, "numpy", "1.26.4")
    if installed:
        put(site, "torch", installed)
    python = next((tmp_path / "venv").glob("[bS]*/python*"))  # bin, or Scripts
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--dry-run"]
    command += ["--isolated", "--no-index", "--find-links", str(tmp_path), "--report", "-", "-q"]
    run = subprocess.run([*command, "sparse-losses"], capture_output=True, text=True, check=True)
    installed = {each["metadata"]["name"] for each in json.loads(run.stdout)["install"]}
    assert installed == {"sparse-losses"} | ({"torch"} if replaced else set())
