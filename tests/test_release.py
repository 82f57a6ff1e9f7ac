"""What is published: one version, classifiers that are tested, a floor that replaces nothing."""

import re
import tomllib
from email.message import Message
from itertools import chain
from pathlib import Path

import pytest
import yaml

from tools import check_wheel, release

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    for path in (ROOT / ".github" / "workflows").glob("*.yml")
}


def floor(package):
    (requirement,) = (d for d in PROJECT["dependencies"] if d.startswith(f"{package}>="))
    return requirement.removeprefix(f"{package}>=")


READY = {
    "README.md": "pip install sparse-losses",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.0 - 2026-12-01\n\n- a\n",
    "CITATION.cff": "version: 1.2.0\ndate-released: 2026-12-01\nrepository-code: https://x/y\n",
    "docs/cite.md": "  version = {1.2.0},\n",
    "tools/recipe.yaml": '  version: "1.2.0"\n  homepage: https://x/y\n',
}


def built(missing=""):
    message = Message()
    message["Version"] = "1.2.0"
    for name in release.ADDRESSES.keys() - {missing}:
        message["Project-URL"] = f"{name}, https://x/y"
    return message


def test_the_release_checklist_finds_what_is_missing():
    assert list(release.problems("v1.2.0", READY, built())) == []
    assert len(list(release.problems("v1.2.1", READY, built()))) == 1
    for name, variable in release.ADDRESSES.items():
        (found,) = release.problems("v1.2.0", READY, built(missing=name))
        assert name in found
        assert variable in found
    for name, old, new in [
        ("README.md", "pip", "There is no release on PyPI. pip"),
        ("docs/cite.md", "1.2.0", "1.1.0"),
        ("CITATION.cff", "repository-code: https://x/y\n", ""),
        ("CHANGELOG.md", "2026-12-01", "2026-12-02"),
    ]:
        texts = READY | {name: READY[name].replace(old, new)}
        assert len(list(release.problems("v1.2.0", texts, built()))) == 1, name


def test_release_notes_are_the_section_of_the_changelog():
    text = "# Changelog\n\n## Unreleased\n\n## 1.10.0 - today\n\nTen.\n\n- a\n\n## 1.1\n\nOne.\n"
    assert release.notes(text, "1.10.0") == "Ten.\n\n- a\n"
    assert release.notes(text, "1.1") == "One.\n"
    for version in ("1.1.0", "Unreleased", "1x10.0"):
        with pytest.raises(SystemExit, match=f"## {version}"):
            release.notes(text, version)


def test_every_classifier_is_a_row_of_the_workflow():
    rows = WORKFLOWS["tests.yml"]["versions"]["strategy"]["matrix"]["include"]
    classified = {
        kind: {c.removeprefix(kind) for c in PROJECT["classifiers"] if c.startswith(kind)}
        for kind in ("Programming Language :: Python :: ", "Operating System :: ")
    }
    pythons, systems = classified.values()
    assert {"3.11"} <= pythons <= {row["python"] for row in rows if row["torch"] == "newest"}
    assert min(pythons) == PROJECT["requires-python"].removeprefix(">=")
    runners = {"MacOS": "macos", "Microsoft :: Windows": "windows", "POSIX :: Linux": "ubuntu"}
    for torch in (f"{floor('torch')}.*", "newest"):
        tested = {row["os"].removesuffix("-latest") for row in rows if row["torch"] == torch}
        assert {runners[system] for system in systems} <= tested == {*runners.values()}


def test_the_oldest_environment_has_the_oldest_versions():
    pins = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")
    for package in ("torch", "numpy"):
        assert f"\n{package}=={floor(package)}." in pins


def test_actions_are_pinned_and_every_job_ends():
    assert len(WORKFLOWS) >= 3
    for job in chain(*(jobs.values() for jobs in WORKFLOWS.values())):
        assert 0 < job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40)), step


def test_check_wheel_finds_extra_and_missing_files():
    data = [f"sparse_losses/{name}" for name in sorted(check_wheel.DATA)]
    right = [*data, "sparse_losses/a.py", "sparse_losses-1.dist-info/sboms/a.cdx.json"]
    assert check_wheel.wrong_in_wheel(right) == []
    for names in (right[:-1], right[1:], [*right, "tests/a.py"], [*right, "sparse_losses/a.svg"]):
        assert len(check_wheel.wrong_in_wheel(names)) == 1
    assert check_wheel.missing_in_sdist(["x-1/a.py"], ["a.py", "t/b.py", ".ci/run"]) == ["t/b.py"]
