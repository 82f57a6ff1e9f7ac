"""The number of active dimensions: thresholds that make it, or a shifted bias to start from."""

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from sparse_losses._core.activation import Activation, logits_at, weights_of
from sparse_losses._core.checks import check_choice, check_integer, check_number, check_shapes
from sparse_losses.representation._language_model import evaluating, warn_of_adapters
from sparse_losses.representation.encoding import batches, check_texts
from sparse_losses.representation.parts import SIDES
from sparse_losses.sparsity.entries import Entries, products_limit
from sparse_losses.sparsity.models import Adapter, Budgets, Limits, adapter_of, default

DOUBLE: Any = {"dtype": torch.float64, "device": "cpu"}
START = 256  # dimensions of a start that the warning names, or a sixteenth of a small vocabulary


class Sparsity(NamedTuple):
    """What a sample of texts has; of queries ``None`` without any."""

    document_active: float  # dimensions, on average
    query_active: float | None
    products: float | None  # of a query and a document: sum_j p_q(j) p_d(j)
    longest_list: float  # the share of documents in the longest posting list
    empty_documents: int
    empty_queries: int | None


class Calibration(NamedTuple):
    """What ``calibrate`` set and what that gives; its ``str`` is what ``calibrate`` prints.

    Attributes:
        document_threshold: the pooled logit above which a document keeps a dimension, or ``None``.
        query_threshold: the same for queries.
        before: of whole vectors: ``document_active`` and ``query_active`` dimensions, ``products``
            of a pair, the share of documents in the ``longest_list``, ``empty_documents`` and
            ``empty_queries``.
        after: the same of what is left.
        shift: the number that was subtracted from the bias.
        budgets: both thresholds by a document's number of active dimensions, asked or measured.

    Examples:
        >>> from sparse_losses import Calibration
        >>> Calibration._fields[:4]
        ('document_threshold', 'query_threshold', 'before', 'after')
    """

    document_threshold: float | None
    query_threshold: float | None
    before: Sparsity
    after: Sparsity
    shift: float | None
    budgets: Budgets

    def __str__(self) -> str:
        """Return a line for each side, the products and the longest list."""
        one, two, lines = self.before, self.after, []
        for i, name in enumerate(("documents", "queries")):
            by = "" if self[i] is None else f", those above {self[i]:.4g}"
            if one[i] is not None:
                numbers = f"{one[i]:.4g} -> {two[i]:.4g} dimensions{by}"
                lines.append(f"{name}: {numbers}; {one[4 + i]} -> {two[4 + i]} empty")
        if one.products is not None:
            lines.append(f"products of a pair: {one.products:.3g} -> {two.products:.3g}")
        longest = f"{one.longest_list:.1%} -> {two.longest_list:.1%} of documents"
        lines.append(f"longest posting list: {longest}")
        if self.shift is not None:
            lines.append(f"subtracted from the bias: {self.shift:.4g}")
        if len(self.budgets) > 1:
            lines.append(f"for encode(..., active=): {', '.join(map(str, self.budgets))}")
        return "\n".join(lines)


def calibrate_threshold(
    activations: Tensor, target_active: float, *, activation: Activation = "relu"
) -> float:
    r"""Find the threshold that leaves ``target_active`` dimensions per text, on average.

    The threshold $t$ is in units of the pooled logits $z$ of activations
    $x = \log(1 + \max(0, z))$: $e^x - 1 > t$ holds for that many entries per row.

    Args:
        activations: ``[B, V]`` or ``[B, N, V]``, without idf weights; a NaN counts for nothing.
        target_active: mean number of entries to keep per row, in (0, V].
        activation: as in ``splade_head``, which made the activations.

    Returns:
        $t \ge 0$, between the smallest entry that is kept and the largest that is not. Equal
        entries are kept or dropped together, whichever is nearer the target.

    Raises:
        ValueError: if an activation is below 0, or that of no finite logit.
        TypeError: if ``activations`` is not a dense tensor.

    Warns:
        UserWarning: if fewer entries are active; all are kept, and $t = 0$.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import calibrate_threshold
        >>> logits = torch.tensor([[1.0, 2.0, 0.0], [4.0, 6.0, 8.0]])
        >>> t = calibrate_threshold(logits.log1p(), target_active=1.5)
        >>> t > 2, (logits > t).sum().item()
        (True, 3)
    """
    check_shapes(activations=(activations, "B V or B N V"))
    check_choice("activation", activation, get_args(Activation))
    _check_number("target_active", target_active, activations.shape[-1], 0)
    rows = Entries("row", 0.0, keep=0)
    rows.add(activations.detach().flatten(0, -2))
    rows.join()
    if math.isinf(_logit(largest := rows.maxima[0].max().item(), activation)):
        raise ValueError(f"expected `activations` to be those of finite logits, got {largest:g}")
    return _logit(rows.limit(target_active), activation)


def calibrate(
    model: Any,
    documents: Any,
    target_active: float | Sequence[float] | None = None,
    *,
    queries: Any = None,
    query_target: float | Sequence[float] | None = None,
    target_products: float | None = None,
    method: Literal["prune", "shift"] = "prune",
    keep_at_least: int = 1,
    batch_size: int = 32,
    show_progress: bool | None = None,
    verbose: bool = True,
) -> Calibration:
    r"""Make texts keep as many active dimensions as you name, on average.

    ``"prune"`` is for a trained model: it finds a threshold for each side, and a text loses the
    dimensions whose pooled logit is not above it. A ``SpladeEncoder`` keeps and saves thresholds. A
    ``SparseEncoder`` prunes in this process and in evaluation mode alone, by the queries' threshold
    in ``encode_query`` and else by the documents'. A ``SpladeHead`` keeps the documents' alone; the
    queries' is returned. The thresholds take the place of the model's ``max_active_dims``, which
    becomes ``None``.

    ``"shift"`` is for a start, before training. It subtracts a number from the bias of the
    vocabulary projection (with ``expansion=False``, of the importance layer) and removes
    thresholds. This changes both sides, and can add dimensions. A bias in half precision may miss
    the number by a few percent.

    With ``target_products`` one threshold (or shift) for both sides gives
    $\sum_j p_q(j) \, p_d(j)$ products of a query and a document; $p(j)$ is the share of a side's
    texts that activate dimension $j$.

    Args:
        model: a ``SpladeEncoder``, a ``SpladeHead``, or a ``SparseEncoder`` of a fill-mask
            transformer and ``SpladePooling``, or of a ``Router`` with these for documents.
        documents: texts like those to be encoded, which were not trained on; for a ``SpladeHead``
            batches ``(hidden, attention_mask)`` of ``[B, S, H]`` and ``[B, S]``. It reads them in
            evaluation mode. Of many millions of entries a sample of the texts counts.
        target_active: active dimensions of a document, in (0, V]. A ``SpladeEncoder`` takes several
            numbers: ``encode(texts, active=64)`` uses one of them, and else the largest.
        queries: the same as ``documents``, of the other side.
        query_target: active dimensions of a query: one number, or one for each of
            ``target_active``. A side without a number keeps the threshold that it has.
        target_products: products of a query and a document, > 0.
        method: ``"prune"`` or ``"shift"``.
        keep_at_least: how many of its largest entries pruning leaves in every text.
        batch_size: texts a batch.
        show_progress: whether to show a progress bar; ``None``: after ten seconds.
        verbose: whether to print the result.

    Returns:
        Thresholds and counts, before and after.

    Raises:
        TypeError: for another model, or data of another kind.
        ValueError: for numbers that nothing can give, no texts, a missing side or bias.

    Warns:
        UserWarning: if more than half of the vocabulary is active, so that training should have
            started sparse; if there is less than asked, or ``keep_at_least`` leaves more.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeHead, calibrate
        >>> head = SpladeHead(torch.eye(5))
        >>> hidden = torch.tensor([[[2.0, 1.0, 0.0, 0.0, 0.0]]])
        >>> calibration = calibrate(head, [(hidden, torch.ones(1, 1))], target_active=1)
        documents: 2 -> 1 dimensions, those above 1; 0 -> 0 empty
        longest posting list: 100.0% -> 100.0% of documents
        >>> (head(hidden) > 0).tolist()
        [[True, False, False, False, False]]
    """
    check_choice("method", method, ("prune", "shift"))
    check_integer("keep_at_least", keep_at_least, minimum=0)
    is_shift, numbers = method == "shift", (target_active, query_target, target_products)
    kept, lowest = (0, -math.inf) if is_shift else (keep_at_least, 0.0)
    sides: list[Entries] = []
    with contextlib.ExitStack() as stack, torch.no_grad():
        of = adapter_of(model, is_shift, stack)
        both = [documents] if queries is None else [documents, queries]
        for name, data in zip(SIDES, both, strict=False):
            if of.takes_texts:
                check_texts(data)
                if not data:
                    raise ValueError(f"expected at least one {name}, got none")
        targets = _targets(of, is_shift, kept, queries, *numbers)
        stack.enter_context(evaluating(model))
        for i, data in enumerate(both):
            wanted = math.inf
            if of.takes_texts:
                wanted = max(pair[i] or math.inf for pair in targets) * len(data)
            sides.append(side := Entries(SIDES[i], lowest, kept, wanted))
            for batch in _batches(of, data, batch_size, show_progress):
                side.add(of.read(batch, SIDES[i]))
            side.join()
    before = _sparsity(sides, (None, None))
    if not is_shift and before.document_active > of.vocab_size / 2:
        start = min(START, of.vocab_size // 16)
        warnings.warn(
            f"documents have {before.document_active:,.0f} of {of.vocab_size:,} dimensions: before "
            f'training, calibrate(model, texts, {start}, method="shift") makes a sparse start',
            stacklevel=2,
        )
    one = None if target_products is None else products_limit(sides, target_products)
    shift, budgets, limits = None, Budgets(), default({})
    if is_shift:
        shift = sides[0].limit(targets[0][0] or 0.0) if one is None else one
        for module in model.modules():  # FSDP2 would drop what is changed in whole parameters
            getattr(module, "reshard", lambda: None)()
        with torch.no_grad():
            cast(Tensor, of.bias()).sub_(shift)
        warn_of_adapters(model, "the shift")
        limits = shift, shift
    else:
        for pair in sorted(targets, key=lambda pair: pair[0] or 0.0):  # the largest is the last
            limits, thresholds = _pruned(sides, pair, one, of)
            if pair[0] is not None:
                budgets[pair[0]] = thresholds
    after = _sparsity(sides, limits)
    if not (is_shift or budgets):  # no number of documents' dimensions was named
        budgets = {x: (own[0], thresholds[1]) for x, own in of.budgets.items() if one is None}
        budgets = budgets or {after.document_active: thresholds}
    of.prune(budgets, keep_at_least)
    result = Calibration(*default(budgets), before, after, shift, budgets)
    if verbose:
        print(result)
        if not is_shift and of.takes_texts and not of.takes_several:
            print("A SparseEncoder does not save these thresholds: calibrate again after loading.")
    return result


def _batches(of: Adapter, data: Any, batch_size: int, show_progress: bool | None) -> Iterator[Any]:
    if not of.takes_texts:
        yield from data
        return
    bar = {"desc": "Calibrating", "delay": 10 if show_progress is None else 0}
    for numbers in batches(data, batch_size, show_progress is not False, **bar):
        yield [data[i] for i in numbers]


def _pruned(
    sides: Sequence[Entries], targets: Limits, one: float | None, of: Adapter
) -> tuple[Limits, Limits]:
    """Return the limits of the weights of both sides, and their thresholds, of the logits."""
    limits, thresholds = [one, one], list(default(of.budgets))
    for i, side in enumerate(sides):
        if (target := targets[i]) is not None:
            limits[i] = side.limit(target)
        if (limit := limits[i]) is not None:
            thresholds[i] = _logit(limit, of.activation)
        elif (held := thresholds[i]) is not None:
            limits[i] = weights_of(torch.tensor(held, **DOUBLE), of.activation).item()
    return (limits[0], limits[1]), (thresholds[0], thresholds[1])


def _logit(weight: float, activation: str) -> float:
    return logits_at(torch.tensor(weight, **DOUBLE), activation).item()


def _sparsity(sides: Sequence[Entries], limits: Limits) -> Sparsity:
    pairs = list(zip(sides, limits, strict=False))
    shares, empty = [side.share(x) for side, x in pairs], [side.empty(x) for side, x in pairs]
    active, longest = [share.sum().item() for share in shares], shares[0].max().item()
    if len(sides) == 1:
        return Sparsity(active[0], None, None, longest, empty[0], None)
    products = float(shares[0] @ shares[1])
    return Sparsity(active[0], active[1], products, longest, empty[0], empty[1])


def _targets(
    of: Adapter, is_shift: bool, keep: int, texts: Any, documents: Any, queries: Any, products: Any
) -> list[Limits]:
    """Return the numbers of active dimensions of documents and queries, checked."""
    numbers = list(documents) if isinstance(documents, (list, tuple)) else [documents]
    others = list(queries) if isinstance(queries, (list, tuple)) else [queries] * len(numbers)
    if len(numbers) > 1 and (is_shift or not of.takes_several):
        raise ValueError("expected one `target_active`: only pruning a SpladeEncoder takes several")
    if len(others) != len(numbers):
        raise ValueError(f"expected a `query_target` for each of {documents}, got {queries}")
    if is_shift and queries is not None:
        raise ValueError("expected no `query_target`: one shift changes both sides")
    for name, values in (("target_active", numbers), ("query_target", others)):
        for i, value in enumerate(values):
            if value is not None:
                _check_number(name, value, of.vocab_size, keep)
                values[i] = int(value) if value == int(value) else float(value)  # not NumPy's
    given = [x for x in (*numbers, *others, products) if x is not None]
    if not (numbers and given) or (products is not None and len(given) > 1):
        raise ValueError(f"expected active dimensions or `target_products`, got {given}")
    if products is not None:
        check_number("target_products", products, minimum=0.0, exclusive=True)
    if texts is None and (queries is not None or products is not None):
        raise ValueError("expected `queries` for `query_target` or `target_products`, got None")
    if is_shift and of.bias() is None:
        raise ValueError("expected a projection with a bias to shift, got none")
    return list(zip(numbers, others, strict=True))


def _check_number(name: str, value: float, vocab_size: int, keep: int) -> None:
    check_number(name, value, minimum=0.0, exclusive=True)
    if not keep <= value <= vocab_size:
        least = f"from `keep_at_least` = {keep}" if keep else "above 0 and up"
        raise ValueError(f"expected `{name}` {least} to V = {vocab_size}, got {value}")
