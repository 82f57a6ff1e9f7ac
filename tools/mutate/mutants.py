"""The mutants of a file, by the operators of mutmut and five of our own.

A mutant is useful if a careless test would miss it. Some kinds are therefore left out: changes of
messages and types, changes that fail at the first call (such as ``None`` in place of an argument),
and the dimension 1 in place of -1, which is the same dimension of a matrix.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

SMALL = 150  # lines; a longer file gets a random sample of its mutants
SAMPLE = 100
WITHOUT = {
    mutators.operator_string,
    mutators.operator_dict_arguments,
    mutators.operator_arg_removal,
    mutators.operator_assignment,
    mutators.operator_lambda,
}
OPERATORS = [
    (kind, change) for kind, change in mutators.mutation_operators if change not in WITHOUT
]
Span = tuple[tuple[int, int], tuple[int, int]]
# `strict` only asserts, and `device` matters only on accelerators, which `make test-sim` covers.
UNSEEN = {"strict", "device"}
UNTESTED_CALLS = {"TypeVar", "ParamSpec", "cast", "warn"}
MODULES = {"cst", "dist", "functools", "inspect", "itertools", "math", "nn", "nnf", "np", "os"}
MODULES |= {"torch", "warnings"}


@dataclass(frozen=True)
class Mutant:
    """One changed place."""

    first: int  # line
    last: int
    function: str  # qualified name of the outermost function around it; empty at module level
    before: str
    after: str
    source: str
    nth: int = 0  # number among mutants with the same text

    @property
    def key(self) -> str:
        """A name that stays the same if only other lines change."""
        where = "\0".join((self.function, self.before, self.after)) + "\0" * self.nth
        return hashlib.sha256(where.encode()).hexdigest()[:12]


def mutants_of(source: str) -> list[Mutant]:
    """Return all mutants of a file, in order and without duplicates."""
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    visitor = _Visitor()
    wrapper.visit(visitor)
    lines = source.split("\n")
    found: list[Mutant] = []
    seen, read = {source}, Counter[tuple[str, ...]]()
    for span, function, new in visitor.found:
        code = wrapper.module.code_for_node(new)
        (first, left), (last, right) = span
        before = "\n".join(lines[first - 1 : last])
        after = lines[first - 1][:left] + code + lines[last - 1][right:]
        mutated = "\n".join([*lines[: first - 1], after, *lines[last:]])
        if mutated not in seen:
            seen.add(mutated)
            said = function, _one_line(before), _one_line(after)
            found.append(Mutant(first, last, *said, mutated, read[said]))
            read[said] += 1
    return found


def sampled(mutants: list[Mutant], source: str, seed: str) -> list[Mutant]:
    """Return the mutants that compile: all in a small file, a random sample in a longer one."""
    order = list(range(len(mutants)))
    size = len(mutants)
    if source.count("\n") >= SMALL:
        random.Random(seed).shuffle(order)
        size = SAMPLE
    chosen: list[int] = []
    for n in order:
        if len(chosen) < size and _compiles(mutants[n].source):
            chosen.append(n)
    return [mutants[n] for n in sorted(chosen)]


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Span, str, cst.CSTNode]] = []  # place, function, replacement
        self.scope: list[str] = []  # classes and functions
        self.functions: list[str] = []  # qualified names of the enclosing functions

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_wording(node):
            return False
        if isinstance(node, (cst.ClassDef, cst.FunctionDef)):
            self.scope.append(node.name.value)
        for old, new in _changes(node):
            place = self.get_metadata(PositionProvider, old)
            span = (place.start.line, place.start.column), (place.end.line, place.end.column)
            self.found.append((span, self.functions[0] if self.functions else "", new))
        return True

    def on_leave(self, node: cst.CSTNode) -> None:
        if isinstance(node, (cst.ClassDef, cst.FunctionDef)) and not _is_wording(node):
            self.scope.pop()

    def on_visit_attribute(self, node: cst.CSTNode, attribute: str) -> None:
        if isinstance(node, cst.FunctionDef) and attribute == "body":
            self.functions.append(".".join(self.scope))

    def on_leave_attribute(self, node: cst.CSTNode, attribute: str) -> None:
        if isinstance(node, cst.FunctionDef) and attribute == "body":
            self.functions.pop()


def _is_wording(node: cst.CSTNode) -> bool:
    """Return whether a node contains only types, messages or calls that no test checks."""
    match node:
        case cst.Annotation() | cst.Raise() | cst.FormattedString() | cst.BaseString():
            return True
        case cst.Import() | cst.ImportFrom():
            return True
        case cst.FunctionDef(name=cst.Name("extra_repr" | "__repr__")):
            return True
        case cst.Call(func=cst.Name(name) | cst.Attribute(attr=cst.Name(name))):
            return name in UNTESTED_CALLS
        case cst.Arg(keyword=cst.Name("strict")):  # of zip
            return True
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name("__all__"))]):
            return True
        case cst.AnnAssign(annotation=cst.Annotation(annotation=cst.Name("TypeAlias"))):
            return True
    return False


def _changes(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """Yield pairs of the node to replace (this one or a part of it) and its replacement."""
    for kind, change in OPERATORS:
        if isinstance(node, kind) and not _is_dimension(node):
            for new in change(node):
                yield node, new
    if isinstance(node, cst.Call):
        for n, argument in enumerate(node.args):  # x.sum(0, keepdim=True) -> x.sum(0)
            if argument.keyword and argument.keyword.value not in UNSEEN:
                yield node, node.with_changes(args=[*node.args[:n], *node.args[n + 1 :]])
    match node:
        case cst.Call(func=cst.Attribute(value=value)) if not _is_module(value):
            yield node, value  # x.clamp(min=0) -> x
        case cst.BinaryOperation(operator=cst.Multiply() | cst.Divide(), left=left):
            yield node, left  # x / scale -> x
        case cst.If(test=cst.Name() | cst.Attribute() | cst.Call() as test):
            yield test, cst.UnaryOperation(cst.Not(), test)
        case cst.Expr(value=cst.Call()):
            yield node, cst.Pass()  # a check, or an operation in place


def _is_dimension(node: cst.CSTNode) -> bool:
    """Return whether it is ``-1``: as a dimension of a matrix, ``+1`` would be the same."""
    match node:
        case cst.UnaryOperation(operator=cst.Minus(), expression=cst.Integer()):
            return True
    return False


def _is_module(node: cst.BaseExpression) -> bool:
    while isinstance(node, cst.Attribute):
        node = node.value
    match node:
        case cst.Name(name) | cst.Call(func=cst.Name(name)):
            return name in MODULES or name == "super"
    return False


def _compiles(source: str) -> bool:
    try:
        compile(source, "", "exec")
    except SyntaxError:
        return False
    return True


def _one_line(text: str) -> str:
    return " ".join(text.split())
