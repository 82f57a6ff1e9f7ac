"""Mutation tests of the package: `python -m tools.mutate [--only PATTERN] [--seed SEED]`.

Every file that targets.toml names is changed at one place at a time. Each change is a mutant. The
tests that reach the changed place run until one of them fails; then the mutant is killed.

All this happens in a copy of the repository. One process imports the package and the tests once.
For every mutant it forks, and the fork replaces the changed function. Code that runs during the
import (decorators, constants) cannot be replaced afterwards, so its mutants get a new process.

The results are cached in .cache/mutate. The cache key is a hash of the file and its tests, so an
interrupted run resumes where it stopped. docs/results/mutation.csv has one row per file.
survivors.toml explains why no test can fail for a mutant.
"""

import argparse
import csv
import filecmp
import functools
import gc
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tools.mutate.mutants import Mutant, mutants_of, sampled
from tools.mutate.session import SLOW, Tests, body_of, functions_of, in_child, is_slow, swap

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
TREE = ROOT / "build" / "mutate"
CACHE = ROOT / ".cache" / "mutate"
TABLE = ROOT / "docs" / "results" / "mutation.csv"
COPIED = ["sparse_losses", "tests", "tools", "benchmarks", "conftest.py", "pyproject.toml"]
FIELDS = ["file", "mutants", "killed", "timed_out", "survived", "equivalent", "score"]
FIELDS += ["seed", "hash", "python", "torch", "mutmut"]
REASONS = tomllib.loads((HERE / "survivors.toml").read_text(encoding="utf-8"))
KILLED, SURVIVED, TIMED_OUT, IMPORTED = "killed", "survived", "timed out", "to be imported"
OTHERWISE = 42  # exit status of a child that cannot swap the code
WANTED = 0.95
Selection = dict[str, str]  # file or folder of tests -> pattern for the names of the tests
OPTIONS = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]
OPTIONS += ["-W", "ignore:Module already imported"]  # Hypothesis is imported before pytest
LIMIT = 900  # wall-clock seconds per mutant; large, as the machine may be busy


def main() -> int:
    """Run all sessions of the chosen files and report their scores."""
    arguments = _arguments()
    targets = tomllib.loads((HERE / "targets.toml").read_text(encoding="utf-8"))
    chosen = {n: t for n, t in targets.items() if any(part in n for part in arguments.only)}
    if unknown := [part for part in arguments.only if not any(part in n for n in targets)]:
        sys.exit(f"expected --only with parts of the names in targets.toml, got {unknown}")
    torch.set_num_threads(1)
    _copy_tree()
    is_wrong = False
    for name, sessions in chosen.items():
        file = _File(name, sessions, arguments)
        file.run()
        is_wrong |= file.report(list(targets))
    return int(is_wrong)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="parts of file paths; run only files that match"
    )
    parser.add_argument("--seed", default="0", help="seed of the sample of a long file's mutants")
    parser.add_argument(
        "--survivors",
        action="store_true",
        help="trust cached kills by older tests, and survivors.toml; run all other mutants",
    )
    parser.add_argument("--fast", action="store_true", help="skip tests that compile or are slow")
    parser.add_argument("--first", action="store_true", help="run only the first session per file")
    return parser.parse_args()


def _copy_tree() -> None:
    TREE.mkdir(parents=True, exist_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    listed = ["git", "ls-files", "-co", "--exclude-standard", "--", *COPIED]
    names = subprocess.run(listed, cwd=ROOT, check=True, text=True, stdout=-1).stdout.splitlines()
    for old in TREE.rglob("*.py"):
        if str(old.relative_to(TREE)) not in names:
            old.unlink()
    for name in names:
        source, copy = ROOT / name, TREE / name
        if source.is_file() and not (copy.exists() and filecmp.cmp(source, copy, shallow=False)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
    os.chdir(TREE)
    others = {str(ROOT), *(p for p in sys.path if (Path(p or ".") / "sparse_losses").is_dir())}
    sys.path[:] = [str(TREE), *(p for p in sys.path if p and p not in others)]
    importlib.invalidate_caches()  # Python remembers that a folder of PYTHONPATH did not exist


class _File:
    """One file of the package with its mutants, its tests and the results so far."""

    def __init__(self, name: str, sessions: list[Selection], arguments: argparse.Namespace) -> None:
        self.name, self.arguments = name, arguments
        self.sessions = sessions[:1] if arguments.first else sessions
        self.path = TREE / name
        self.source = self.path.read_text(encoding="utf-8")
        mutants = mutants_of(self.source)
        self.mutants = sampled(mutants, self.source, f"{arguments.seed}:{name}")
        self.hashes = [_hash(name, session) for session in sessions]
        self.cache = _cache(name)
        self.found = _cached(name, self.hashes, arguments.survivors)
        self.reasons = REASONS.get(name, {})
        self.outdated = self.reasons.keys() - {mutant.key for mutant in mutants}
        self.session, self.tests, self.measured = 0, Selection(), CACHE
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, set[int]] = {}
        self.kills: Counter[str] = Counter()  # kills per test

    def run(self) -> None:
        """Run the sessions; each one tries the mutants that survived the session before it."""
        for session, tests in enumerate(self.sessions):
            self.session = session
            self.tests = {path: names for path, names in tests.items() if path != "lines"}
            kind = "fast" if self.arguments.fast else "all"
            self.measured = CACHE / f"{self.hashes[session]}-{kind}.json"
            todo = [m for m in self.mutants if self._is_open(m, session)]
            print(f"{self.name}, {len(todo)} of {len(self.mutants)} mutants", flush=True)
            if todo:
                self._run_session(todo)

    def _is_open(self, mutant: Mutant, session: int) -> bool:
        """Return whether this session has to try the mutant."""
        if not re.search(self.sessions[session].get("lines", ""), mutant.before):
            return False
        outcome, last = self.found.get(mutant.key, (IMPORTED, session))
        return (outcome == IMPORTED and last == session) or (outcome == SURVIVED and last < session)

    def _run_session(self, todo: list[Mutant]) -> None:
        try:
            if self._pytest(functools.partial(self._swap_all, todo), 24 * 3600, trace=True):
                sys.exit(f"expected pytest to collect {list(self.tests)}; MUTATE_LOG=FILE shows it")
            self.found = _cached(self.name, self.hashes, self.arguments.survivors)
            self.seconds, self.lines = _measured(self.measured)
            for mutant in todo:
                if self.found[mutant.key] == (IMPORTED, self.session):
                    self.path.write_text(mutant.source, encoding="utf-8")
                    self._note(mutant, self._pytest(functools.partial(self._run, mutant), LIMIT))
        finally:
            self.path.write_text(self.source, encoding="utf-8")
            self.found = _cached(self.name, self.hashes, self.arguments.survivors)

    def _pytest(self, run: Callable[[Tests], None], limit: int, trace: bool = False) -> int | None:
        """Import the package and collect the tests in a new process, and pass them to ``run``."""
        tests = Tests(self.path, self.tests, run)

        def start() -> int:
            sys.settrace(tests.trace if trace else None)
            sys.dont_write_bytecode = not trace  # the bytecode of a mutant must not stay
            return int(pytest.main([*OPTIONS, *self.tests], plugins=[tests]))

        return in_child(start, limit)

    def _swap_all(self, todo: list[Mutant], tests: Tests) -> None:
        """Measure the imported tests, then try each mutant in a fork."""
        sys.settrace(None)
        sys.dont_write_bytecode = True
        at_import = set(tests.lines)
        tests.functions = functions_of(self.path)
        gc.freeze()  # otherwise the first collection in a fork copies all memory pages
        if not self.measured.exists():
            work = functools.partial(tests.measure, self.measured, self.arguments.fast)
            in_child(work, 24 * 3600)
        self.seconds, self.lines = _measured(self.measured)
        for mutant in todo:
            if self.found.get(mutant.key) == (IMPORTED, self.session):
                continue
            self.path.write_text(mutant.source, encoding="utf-8")  # for tests that start processes
            if at_import & body_of(tests.functions, mutant.function):
                code: int | None = OTHERWISE  # what it made, such as a closure, is there already
            else:
                code = in_child(functools.partial(self._swapped, mutant, tests), LIMIT)
            self.kills.update(filter(None, [tests.take_failed()]))
            reads = at_import.intersection(range(mutant.first, mutant.last + 1))
            if code == 0 and (not mutant.function or reads):
                code = OTHERWISE
            self._note(mutant, code)

    def _swapped(self, mutant: Mutant, tests: Tests) -> None:
        if not swap(self.path, tests.functions, mutant):
            os._exit(OTHERWISE)
        self._run(mutant, tests)

    def _run(self, mutant: Mutant, tests: Tests) -> None:
        """Run the tests that reach the mutant; those with most kills per second run first."""
        place = set(range(mutant.first, mutant.last + 1)) if mutant.function else None
        chosen = []
        for item in tests.items:
            seconds = self.seconds.get(item.nodeid)
            if seconds is None or (self.arguments.fast and is_slow(item, seconds)):
                continue
            elsewhere = SLOW.search(item.name) or "tests/distributed" in item.nodeid
            if place is None or elsewhere or place & self.lines[item.nodeid]:
                chosen.append((seconds, item))
        if not chosen and place is not None:  # a process that a test starts may still reach it
            chosen = [(self.seconds[i.nodeid], i) for i in tests.items if i.nodeid in self.seconds]
        chosen.sort(key=lambda pair: pair[0] / (0.05 + self.kills[pair[1].nodeid]))
        tests.run_items([item for _, item in chosen], self.seconds)

    def _note(self, mutant: Mutant, code: int | None) -> None:
        outcome = {0: SURVIVED, None: TIMED_OUT, OTHERWISE: IMPORTED}.get(code, KILLED)
        line = {"key": mutant.key, "outcome": outcome, "session": self.session}
        line |= {"hash": self.hashes[self.session]}
        line |= {"line": mutant.first, "function": mutant.function}
        line |= {"before": mutant.before, "after": mutant.after}
        with self.cache.open("a", encoding="utf-8") as file:
            print(json.dumps(line, ensure_ascii=False), file=file)

    def report(self, order: list[str]) -> bool:
        """Write the row of this file; return whether it needs better tests or explanations."""
        outcomes = [self.found[mutant.key][0] for mutant in self.mutants]
        done = KILLED, TIMED_OUT  # all others may still be tried in a later session
        alive = [m for m, o in zip(self.mutants, outcomes, strict=True) if o not in done]
        unexplained = [m for m in alive if m.key not in self.reasons]
        equivalent = len(alive) - len(unexplained)
        killed = len(outcomes) - len(alive)
        score = killed / max(len(outcomes) - equivalent, 1) if outcomes else 1.0
        values = [self.name, len(outcomes), outcomes.count(KILLED), outcomes.count(TIMED_OUT)]
        values += [len(alive), equivalent, f"{score:.3f}", self.arguments.seed]
        values += ["-".join(self.hashes), platform.python_version(), torch.__version__]
        values.append(version("mutmut"))
        rows = {}
        if TABLE.exists():
            with TABLE.open(encoding="utf-8", newline="") as file:
                rows = {row["file"]: row for row in csv.DictReader(file)}
        rows[self.name] = dict(zip(FIELDS, map(str, values), strict=True))
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, FIELDS, lineterminator="\n")
            table.writeheader()
            table.writerows(rows[name] for name in order if name in rows)
        for mutant in unexplained:
            print(f"no test fails: {self.name}:{mutant.first} {mutant.function} [{mutant.key}]")
            print(f"    {mutant.before}\n    {mutant.after}", flush=True)
        for key in self.outdated:
            print(f"survivors.toml explains a mutant that no longer exists: {self.name} [{key}]")
        return bool(unexplained or self.outdated) or score < WANTED


def _measured(path: Path) -> tuple[dict[str, float], dict[str, set[int]]]:
    seconds, lines, failed = json.loads(path.read_text(encoding="utf-8"))
    if failed:
        print("left out, as they fail without a mutant:", *failed, sep="\n  ", file=sys.stderr)
    return seconds, {test: set(reached) for test, reached in lines.items()}


def _hash(name: str, session: Selection) -> str:
    """Hash the file, its tests and the helpers of the tests."""
    text = [name, json.dumps(session), (TREE / name).read_text(encoding="utf-8")]
    helpers = [f"tests/{stem}.py" for stem in ("cases", "oracles", "strategies", "conftest")]
    for path in (TREE / each for each in [*session, *helpers] if each != "lines"):
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        text += [file.read_text(encoding="utf-8") for file in files]
    return hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]


def _cache(name: str) -> Path:
    return CACHE / (name.replace("/", ".") + ".jsonl")


def _cached(name: str, hashes: list[str], trust: bool) -> dict[str, tuple[str, int]]:
    """Return the latest cached outcome of each mutant, and the session it comes from."""
    found: dict[str, tuple[str, int]] = {}
    if _cache(name).exists():
        for line in map(json.loads, _cache(name).read_text(encoding="utf-8").splitlines()):
            is_explained = line["outcome"] == SURVIVED and line["key"] in REASONS.get(name, {})
            is_settled = line["outcome"] in (KILLED, TIMED_OUT) or is_explained
            # A survivor of a later session counts only if it survives the current first one too.
            follows = line["outcome"] != SURVIVED or not line["session"] or line["key"] in found
            if (line["hash"] in hashes and follows) or (trust and is_settled):
                found[line["key"]] = line["outcome"], line["session"]
    return found


if __name__ == "__main__":
    sys.exit(main())
