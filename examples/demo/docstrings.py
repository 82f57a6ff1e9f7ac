"""The docstrings of the installed Python as pairs: collected, cleaned and without duplicates.

Sources are parsed, never imported: importing every module of an installation is slow, prints, and
runs other people's code. Functions written in C have no source; they come from a short list of
modules that are safe to import.
"""

from __future__ import annotations

import ast
import gc
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import platform
import re
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from examples.demo.corpus import Corpus, Pair, Row, split
from examples.demo.texts import cut, is_prose, unique, without_name

PACKAGES = ("torch", "numpy", "sympy", "networkx")
TASKS = ("name → document", "summary → rest")


def _words(text: str) -> list[str]:
    return text.split()


C_NAMESPACES = _words("""
    builtins math cmath itertools time operator functools collections struct zlib binascii
    array mmap select signal gc errno unicodedata os sys
    numpy numpy.ndarray numpy.linalg numpy.random numpy.random.Generator
    torch torch.Tensor torch.linalg torch.fft torch.special torch.nn.functional
""")
_SKIPPED_FOLDERS = _words("""
    test tests testing idlelib lib2to3 turtledemo site-packages dist-packages __pycache__
    ensurepip pydoc_data _vendor vendored benchmarks
""")

MINIMUM_BODY_WORDS = 20
MINIMUM_DOCUMENT_WORDS = 12
SUMMARY_WORDS = range(4, 26)

Docstring = tuple[str, str]  # qualified name, raw text


def load() -> Corpus:
    """Harvest, clean, de-duplicate and split; the same installed versions give the same corpus."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    gc.disable()  # it would take a third of the time to search syntax trees for cycles
    try:
        rows = to_rows(harvest())
    finally:
        gc.enable()
    return split(rows, TASKS, {"python": platform.python_version(), **versions})


def harvest() -> Iterator[Docstring]:
    """Yield every public object's docstring: sources first, then C functions."""
    yield from parse_folder(Path(sysconfig.get_path("stdlib")), "")
    for package in PACKAGES:
        source = importlib.util.find_spec(package).origin
        yield from parse_folder(Path(source).parent, package)
    for namespace in C_NAMESPACES:
        yield from inspect_namespace(namespace)


def parse_folder(folder: Path, package: str) -> Iterator[Docstring]:
    """Parse the sources under a folder, without private folders and private objects.

    Private modules are parsed, because public functions are defined there, but left out of the
    name: ``numpy.lib._impl.mean`` is shown as ``numpy.lib.mean``, closer to the import.
    """
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if any(part in _SKIPPED_FOLDERS or part.startswith("test_") for part in parts):
            continue
        if any(part.startswith("_") and part != "_core" for part in parts[:-1]):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # odd escapes in other people's strings
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # skips templates and broken files
            continue
        public = [part for part in (package, *parts) if part and not part.startswith("_")]
        yield from _walk(tree, ".".join(public))


def _walk(node: ast.AST, prefix: str) -> Iterator[Docstring]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name.startswith("_"):
                continue
            name = f"{prefix}.{child.name}" if prefix else child.name
            if text := ast.get_docstring(child, clean=True):
                yield name, text
            if isinstance(child, ast.ClassDef):
                yield from _walk(child, name)
        elif isinstance(child, ast.If | ast.Try):
            yield from _walk(child, prefix)


def inspect_namespace(namespace: str) -> Iterator[Docstring]:
    """Yield docstrings of objects without Python source."""
    scope = pkgutil.resolve_name(namespace)
    for name in dir(scope):
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(scope, name, None)
        members = {name: value}
        if isinstance(value, type) and value.__module__ == namespace:
            own = sorted(vars(value).items())
            members |= {f"{name}.{key}": x for key, x in own if not key.startswith("_")}
        for key, member in members.items():
            text = getattr(member, "__doc__", None)
            is_function = callable(member) or inspect.isroutine(member)
            if isinstance(text, str) and is_function and not isinstance(member, types.FunctionType):
                yield f"{namespace}.{key}".removeprefix("builtins."), inspect.cleandoc(text)


_SIGNATURE = re.compile(r"\s*[\w.*]+\s?\([^\n]*\)\s*(->\s*[^\n]+)?(?:\n|$)")
_OPEN_SIGNATURE = re.compile(r"\s*[\w.]+\([^()]*\)\s*(->[^\n]*)?\n")
_DROPPED_SECTIONS = {"references", "see also", "seealso"}
_SECTIONS = {"keyword arguments", "keyword args", "other parameters", "see also"}.union(
    _words("""
    parameters parameter params arguments args kwargs returns return yields yield raises
    raise warns warnings warning notes note examples example attributes methods shape
    explanation inputs input outputs output deprecated references
""")
)
_DROPPED_DIRECTIVES = _words("""
    math code code-block sourcecode plot testcode testsetup testoutput doctest image figure
    autosummary automethod autofunction autoclass jupyter-execute productionlist index table
    list-table include raw digraph graphviz toctree tabularcolumns versionadded versionchanged
    deprecated module currentmodule rubric highlight
""")
_DIRECTIVE = re.compile(r"\s*\.\. +([\w-]+)::\s*(.*)$")
_UNDERLINE = re.compile(r"\s*([-=~^\"'*+#])\1{2,}\s*$")
_INLINE = (
    (re.compile(r":math:`[^`]*`"), " "),
    (re.compile(r":[\w:]+:`[~!]?([^`<]*?)(?:\s*<[^`]*>)?`"), r"\1"),
    (re.compile(r":(?:param|type|arg|raises?|rtype|returns?|keyword|var)\b[ \w,.*]*:"), " "),
    (re.compile(r"https?://\S+|www\.\S+"), " "),
    (re.compile(r"\[[\w. -]{1,12}\]_"), " "),
    (re.compile(r"\$[^$\n]*\$"), " "),
    (re.compile(r"`+([^`]*)`+_*"), r"\1"),
    (re.compile(r"\*{1,2}(?=\S)([^*\n]+?)(?<=\S)\*{1,2}"), r"\1"),
    (re.compile(r"\|(\w+)\|"), r"\1"),
    (re.compile(r"\{\w+\}"), " "),
    (re.compile(r"\\\w+|[{}^\\]"), " "),
)
_SENTENCE_END = re.compile(
    r"(?<=[^.\s][.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!\bcf\.)(?<!\bvs\.)\s+(?=[A-Z])"
)


def clean(docstring: str) -> tuple[str, str]:
    """Turn a docstring into its first sentence and the rest, as plain words on one line.

    Signatures, doctests, code, formulas, section headings, cross-references, roles and addresses
    are removed; notes and the descriptions of arguments are kept.
    """
    docstring = docstring.encode(errors="ignore").decode()  # removes lone surrogates
    prose = "\n".join(_prose_lines(_without_signature(docstring)))
    paragraphs = re.split(r"\n(?:[^\S\n]*\n)+", prose)
    texts = [text for each in paragraphs if (text := _inline(each.replace("\n", " ")))]
    if not texts:
        return "", ""
    summary, *rest = _SENTENCE_END.split(texts[0], maxsplit=1)
    return summary, " ".join(rest + texts[1:])


def _without_signature(text: str) -> str:
    text = text.lstrip()
    while match := _SIGNATURE.match(text) or _OPEN_SIGNATURE.match(text):
        text = text[match.end() :].lstrip()
    return text.removeprefix("--\n\n").lstrip()


def _prose_lines(text: str) -> Iterator[str]:
    lines = text.expandtabs().splitlines()
    dropped_indent: int | None = None  # lines indented deeper than this belong to a dropped block
    in_doctest = in_dropped_section = False
    for number, line in enumerate(lines):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if dropped_indent is not None:
            if not stripped or indent > dropped_indent:
                continue
            dropped_indent = None
        if in_doctest or stripped.startswith(">>>"):
            in_doctest = bool(stripped)
            continue
        following = lines[number + 1] if number + 1 < len(lines) else ""
        underlined = bool(stripped and _UNDERLINE.match(following))
        heading = stripped.rstrip(":").lower()
        if underlined or (heading in _SECTIONS and len(stripped) < 24):
            in_dropped_section = heading in _DROPPED_SECTIONS
            if stripped.endswith("::"):
                dropped_indent = indent
            yield ""
            continue
        if in_dropped_section or _UNDERLINE.match(line):
            continue
        if directive := _DIRECTIVE.match(line):
            if directive[1] in _DROPPED_DIRECTIVES:
                dropped_indent = indent
                continue
            yield ""
            yield directive[2]
            continue
        if stripped.startswith(".. "):  # a comment, a footnote or a link target
            dropped_indent = indent
            continue
        if stripped.endswith("::"):
            dropped_indent = indent
            line = line.rstrip().removesuffix("::")
        yield line


def _inline(text: str) -> str:
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def spoken(name: str) -> str:
    """Return an identifier as words: `SMTPNotSupported` becomes `SMTP Not Supported`."""
    return " ".join(_CAMEL.sub(" ", name.replace("_", " ")).split())


def to_rows(docstrings: Iterable[Docstring]) -> list[Row]:
    """Clean docstrings, drop duplicates, and build the pairs of both tasks.

    Short names come first, so that an object with aliases keeps its plainest name.
    """
    candidates: list[tuple[str, str, str]] = []
    seen = set()
    for name, docstring in sorted(
        docstrings, key=lambda one: (one[0].count("."), len(one[0]), one)
    ):
        if docstring in seen:
            continue
        seen.add(docstring)
        summary, body = clean(docstring)
        text = cut(f"{summary} {body}")
        if len(text.split()) >= MINIMUM_DOCUMENT_WORDS and is_prose(text):
            candidates.append((name, summary, body))
    rows = []
    for name, summary, body in unique(candidates):
        leaf = name.rpartition(".")[2]
        text = f"{summary.rstrip('.')}. {body}" if body else summary
        document = cut(without_name(text, leaf))
        rest = cut(without_name(body, leaf))
        pairs = []
        if len(document.split()) >= MINIMUM_DOCUMENT_WORDS and len(leaf) > 1:
            pairs.append(Pair(0, spoken(leaf), document))
        if len(summary.split()) in SUMMARY_WORDS and len(rest.split()) >= MINIMUM_BODY_WORDS:
            pairs.append(Pair(1, without_name(summary, leaf), rest))
        if pairs:
            indexed = cut(f"{spoken(leaf)}. {text}")
            group = spoken(leaf).lower()
            rows.append(Row(name, group, tuple(pairs), indexed))
    return rows
