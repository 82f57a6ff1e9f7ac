"""A pytest session that imports everything once and then forks for every mutant."""

import contextlib
import gc
import itertools
import json
import mmap
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NoReturn

import hypothesis
import pytest

from tools.mutate.mutants import Mutant

# Tests that compile a graph take seconds, and the trace does not see which lines they run.
SLOW = re.compile("compil|one_graph|inductor")
SLOW_SECONDS = 2.0
BROKEN = 99  # exit status of a child after an error of this tool


def is_slow(item: pytest.Item, seconds: float) -> bool:
    """Return whether ``--fast`` leaves this test out."""
    return seconds > SLOW_SECONDS or SLOW.search(item.name) is not None


class Tests:
    """A plugin that selects and measures the tests and then calls ``run``."""

    def __init__(self, path: Path, wanted: dict[str, str], run: Callable[["Tests"], None]) -> None:
        self.path, self.wanted, self.run = path, wanted, run
        self.items: list[pytest.Item] = []
        self.lines: set[int] = set()  # lines of the file that have run
        self.reports: list[pytest.TestReport] = []
        self.in_child = False
        self.functions: list[FunctionType] = []  # functions of the file
        self.failed = mmap.mmap(-1, 4)  # a child writes the number of its failed test here, from 1

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """Record the lines of the file that run; a function for ``sys.settrace``."""
        if frame.f_code.co_filename != str(self.path):
            return None
        self.lines.add(frame.f_lineno)
        return self.trace

    def pytest_configure(self, config: pytest.Config) -> None:
        """Let Hypothesis draw the same examples in every run and never shrink a failure."""
        phases = hypothesis.Phase.explicit, hypothesis.Phase.generate
        hypothesis.settings.register_profile(
            "mutate",
            hypothesis.settings.default,
            derandomize=True,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
        )
        hypothesis.settings.load_profile("mutate")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that targets.toml selects."""
        items[:] = [item for item in items if self._is_wanted(item)]
        self.items = items

    def _is_wanted(self, item: pytest.Item) -> bool:
        name = item.nodeid.split("::")[0]
        return any(name.startswith(p) and re.search(r, item.name) for p, r in self.wanted.items())

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Call ``run`` instead of the tests, unless a module cannot be imported."""
        if session.testsfailed:
            return None
        self.run(self)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """End a child at its first failure, before pytest formats it."""
        error = call.excinfo
        if not (self.in_child and error) or error.errisinstance(pytest.skip.Exception):
            return
        if item.get_closest_marker("xfail") is None:
            self.failed[:] = (1 + self.items.index(item)).to_bytes(4, "big")
            _leave(1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """For ``measure``: the outcomes of a test's setup, call and teardown."""
        self.reports.append(report)

    def take_failed(self) -> str | None:
        """Return the name of the test that failed in the last child, and forget it."""
        number = int.from_bytes(self.failed[:], "big")
        self.failed[:] = bytes(4)
        return self.items[number - 1].nodeid if number else None

    def run_items(self, items: Sequence[pytest.Item], seconds: dict[str, float]) -> NoReturn:
        """Run tests in a child until one fails or takes far longer than without the mutant."""
        self.in_child = True
        for item, after in itertools.pairwise([*items, None]):
            signal.setitimer(signal.ITIMER_PROF, 10 + 10 * seconds.get(item.nodeid, 1.0))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        _leave(0)

    def measure(self, into: Path, leave_out_slow: bool) -> NoReturn:
        """Write the time of each test, the lines that it reaches, and the tests that fail."""
        seconds, lines, failed = {}, {}, []
        items = [i for i in self.items if not (leave_out_slow and SLOW.search(i.name))]
        for item, after in itertools.pairwise([*items, None]):
            self.lines, self.reports, start = set(), [], time.process_time()
            if not SLOW.search(item.name):
                sys.settrace(self.trace)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            sys.settrace(None)
            if any(report.failed for report in self.reports):
                failed.append(item.nodeid)
            elif not any(report.skipped for report in self.reports):
                seconds[item.nodeid] = time.process_time() - start
                lines[item.nodeid] = sorted(self.lines)
        into.write_text(json.dumps([seconds, lines, failed]), encoding="utf-8")
        _leave(0)


def in_child(work: Callable[[], object], limit: int) -> int | None:
    """Call ``work`` in a fork; return its exit status, 1 after a crash, ``None`` after a timeout.

    ``limit`` is in wall-clock seconds.
    """
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os.setpgrp()
        nowhere = os.open(os.environ.get("MUTATE_LOG", os.devnull), os.O_WRONLY | os.O_APPEND)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        signal.alarm(limit)
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
            os._exit(BROKEN)
        os._exit(int(code) if isinstance(code, int) else 0)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the processes that a test started
    if os.WIFSIGNALED(status):
        return None if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM) else 1
    if os.WEXITSTATUS(status) == BROKEN:
        sys.exit("expected a child to end by itself; MUTATE_LOG=FILE keeps its words")
    return os.WEXITSTATUS(status)


def _leave(code: int) -> NoReturn:
    os._exit(code)


def swap(path: Path, old: Sequence[FunctionType], mutant: Mutant) -> bool:
    """Put the code of a mutant into the existing functions; return whether this was possible."""
    code = compile(mutant.source, str(path), "exec")
    if not mutant.function:
        return _transplant(path, old, code)
    new = [c for c in _functions(code) if c.co_qualname == mutant.function]
    targets = [f for f in old if f.__code__.co_qualname == mutant.function]
    try:
        for function in targets:
            function.__code__ = new[0]
    except ValueError:  # the number of free variables differs
        return False
    return len(new) == 1 and bool(targets)


def _transplant(path: Path, old: Sequence[FunctionType], code: CodeType) -> bool:
    """Run the changed module in a new namespace and copy its defaults and plain constants."""
    module = next(m for m in sys.modules.values() if getattr(m, "__file__", None) == str(path))
    namespace = dict(vars(module))
    try:
        exec(code, namespace)
    except Exception:  # an operator of PyTorch cannot be defined twice
        return False
    fresh = [f for f in functions_of(path) if f.__globals__ is namespace]
    names = [f.__code__.co_qualname for f in fresh]
    for function, name in zip(fresh, names, strict=True):
        for other in old:
            if other.__code__.co_qualname == name and names.count(name) == 1:
                other.__defaults__ = function.__defaults__
                other.__kwdefaults__ = function.__kwdefaults__
    for name, value in namespace.items():
        if isinstance(value, (bool, int, float, str, tuple, frozenset)):
            setattr(module, name, value)
    return True


def _functions(code: CodeType) -> list[CodeType]:
    """Return the code of functions and methods, without nested functions."""
    found = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            is_class = "__module__" in constant.co_names and not constant.co_flags & 2
            found += _functions(constant) if is_class else [constant]
    return found


def functions_of(path: Path) -> list[FunctionType]:
    """Return all functions that were defined in a file."""
    return [
        thing
        for thing in gc.get_objects()
        if type(thing) is FunctionType and thing.__code__.co_filename == str(path)
    ]


def body_of(functions: Sequence[FunctionType], name: str) -> set[int]:
    """The lines of a function below its first, without those of the functions within it."""
    return {
        line
        for function in functions
        if function.__code__.co_qualname == name
        for _, _, line in function.__code__.co_lines()
        if line is not None and line > function.__code__.co_firstlineno
    }
