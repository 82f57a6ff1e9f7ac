"""The number of active dimensions: thresholds that make it, or a shifted bias to start from."""

import bisect
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sparse_losses._core.activation import Activation, largest_entries, logits_at, weight_at
from sparse_losses._core.checks import check_choice, check_integer, check_number, check_rows
from sparse_losses.representation._language_model import evaluating
from sparse_losses.sparsity.models import Budgets, Thresholds, adapter_of

LIMIT = 1 << 24  # entries of a side that are held, 12 bytes each
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
        before: what whole vectors have: ``document_active`` and ``query_active`` dimensions,
            ``products`` of a query and a document, the share of documents in the
            ``longest_list``, the numbers of ``empty_documents`` and ``empty_queries``.
        after: the same of what is left.
        shift: the number that was subtracted from the bias.
        budgets: both thresholds for each number of active dimensions.

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
        before, after = self.before, self.after
        lines = []
        for i, name in enumerate(("documents", "queries")):
            if before[i] is not None:
                by = "" if self[i] is None else f", those above {self[i]:.4g}"
                empty = f"{before[4 + i]} -> {after[4 + i]} empty"
                lines.append(f"{name}: {before[i]:.4g} -> {after[i]:.4g} dimensions{by}; {empty}")
        if before.products is not None:
            lines.append(f"products of a pair: {before.products:.3g} -> {after.products:.3g}")
        share = f"{before.longest_list:.1%} -> {after.longest_list:.1%} of documents"
        lines.append(f"longest posting list: {share}")
        if self.shift is not None:
            lines.append(f"subtracted from the bias: {self.shift:.4g}")
        if len(self.budgets) > 1:
            lines.append(f"for encode(..., active=): {', '.join(map(str, self.budgets))}")
        return "\n".join(lines)


def calibrate_threshold(
    activations: Tensor, target_active: float, *, activation: Activation = "relu"
) -> float:
    r"""Find the threshold that leaves ``target_active`` dimensions per text, on average.

    Activations are $x = \log(1 + \max(0, z))$ of pooled logits $z$. The threshold $t$ is in units
    of $z$: $e^x - 1 > t$ holds for that many entries per row.

    Args:
        activations: pooled vectors ``[..., V]``, floating, without idf weights; a NaN counts for
            nothing.
        target_active: mean number of entries to keep per row, in (0, V].
        activation: as in ``splade_head``, which made the activations.

    Returns:
        $t \ge 0$, between the smallest entry that is kept and the largest that is not; 0 if all
        are kept. Equal entries are kept or dropped together, whichever is nearer the target.

    Raises:
        ValueError: if an activation is below 0, or that of no finite logit: infinite or above
            709.78, the logarithm of the largest float.
        TypeError: if ``activations`` is not a dense tensor.

    Warns:
        UserWarning: if fewer entries are active; all are kept.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import calibrate_threshold
        >>> logits = torch.tensor([[1.0, 2.0, 0.0], [4.0, 6.0, 8.0]])
        >>> t = calibrate_threshold(logits.log1p(), target_active=1.5)
        >>> t > 2, (logits > t).sum().item()
        (True, 3)
    """
    check_rows("activations", activations)
    check_choice("activation", activation, get_args(Activation))
    _check_number("target_active", target_active, activations.shape[-1], 0)
    rows = _Texts("row", lowest=0.0, keep=0)
    rows.add(activations.detach().flatten(0, -2))
    rows.close()
    if math.isinf(_logit(rows.largest.max().item(), activation)):
        largest = f"{rows.largest.max().item():g}"
        raise ValueError(f"expected `activations` to be those of finite logits, got {largest}")
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

    ``"prune"`` is for a trained model. It finds a threshold for each side; a text loses the
    dimensions whose pooled logit is not above it. A ``SpladeEncoder`` keeps and saves thresholds. A
    ``SparseEncoder`` prunes in this process, in evaluation mode: by the queries' threshold in
    ``encode_query``, else by the documents'; its folder lacks them. A ``SpladeHead`` has one
    threshold, the documents'.

    ``"shift"`` is for a start, before training. It subtracts a number from the bias of the
    vocabulary projection (of the importance layer with ``expansion=False``), which changes the
    weights of both sides and can add dimensions. A bias in half precision takes few values, so it
    may miss the number by a few percent.

    ``target_products`` takes the place of the numbers: one threshold (or shift) for both sides
    gives $\sum_j p_q(j) \, p_d(j)$ products of a query and a document, with $p$ the share of a
    side's texts that activate dimension $j$.

    Args:
        model: a ``SpladeEncoder``, a ``SpladeHead``, or a ``SparseEncoder`` of a fill-mask
            transformer and ``SpladePooling``, or of a ``Router`` with these for documents. It runs
            in evaluation mode.
        documents: texts like those to be encoded, which were not trained on; for a ``SpladeHead``
            batches ``(hidden, attention_mask)`` of ``[B, S, H]`` and ``[B, S]``.
        target_active: active dimensions of a document, in (0, V]. For a ``SpladeEncoder`` it may
            be several numbers, one of which ``encode(texts, active=64)`` takes, by default the
            largest.
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
        ValueError: for numbers that nothing can give, no texts, a missing side, and without a bias
            to shift or a config's ``decoder_bias`` to add one.

    Warns:
        UserWarning: if there is less than asked, which is all kept, or if ``keep_at_least`` leaves
            more; if more than half of the vocabulary is active: training should start sparse.

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
    is_shift, of = method == "shift", adapter_of(model, method)
    kept, lowest = (0, -math.inf) if is_shift else (keep_at_least, 0.0)
    targets = _targets(of, is_shift, kept, target_active, query_target, target_products)
    if queries is None and (query_target is not None or target_products is not None):
        raise ValueError("expected `queries` for `query_target` and `target_products`, got None")
    sides: list[_Texts] = []
    with torch.no_grad(), evaluating(model):
        for name, data in (("document", documents), ("query", queries)):
            if data is None and name == "query":
                continue
            total = of.number_of(data)
            numbers = [number for pair in targets if (number := pair[len(sides)]) is not None]
            wanted = max(numbers) * total if numbers and total else None
            sides.append(_Texts(name, lowest=lowest, keep=kept, wanted=wanted))
            for x in _watched(of.read(data, name, is_shift, batch_size), total, show_progress):
                sides[-1].add(x)
            sides[-1].close()
    before = _sparsity(sides, (None, None))
    if not is_shift and before.document_active > of.vocab_size / 2:
        warnings.warn(
            f"documents have {before.document_active:,.0f} of {of.vocab_size:,} dimensions. Before "
            f"training, calibrate(model, texts, {min(START, of.vocab_size // 16)}, "
            'method="shift") makes a sparse start',
            stacklevel=2,
        )
    one = None if target_products is None else _products_limit(sides, target_products)
    if is_shift:
        one = sides[0].limit(targets[0][0]) if one is None else one
        for module in model.modules():  # FSDP2 would drop what is changed in whole parameters
            getattr(module, "reshard", lambda: None)()
        with torch.no_grad():
            of.bias().sub_(one)
        result = Calibration(*of.thresholds, before, _sparsity(sides, (one, one)), one, {})
    else:
        found = [_pruned(sides, pair, one, of) for pair in targets]
        budgets = {pair[0]: each[1] for pair, each in zip(targets, found, strict=True) if pair[0]}
        limits, thresholds = found[max(range(len(found)), key=lambda i: targets[i][0] or 0.0)]
        of.prune(thresholds, keep_at_least, budgets)
        result = Calibration(*thresholds, before, _sparsity(sides, limits), None, budgets)
    if verbose:
        print(result)
    return result


class _Texts:
    """What the texts of one side have, and as many of their entries as may be held."""

    def __init__(self, name: str, *, lowest: float, keep: int, wanted: float | None = None) -> None:
        self.name, self.lowest, self.keep = name, lowest, keep
        self.is_exact, self.floor, self.texts, self.batches = wanted is not None, lowest, 0, 0
        self.stride = math.ceil(4 * (wanted or 0) / LIMIT) or 1  # of the batches that are held
        self.maxima: list[Tensor] = []
        self.parts: list[tuple[int, Tensor, Tensor]] = []  # texts, dimensions, values

    def add(self, x: Tensor) -> None:
        """Count the entries of a batch ``[B, V]`` that are above ``lowest``, and hold them."""
        x = x.detach().nan_to_num(self.lowest, math.inf, -math.inf)
        if self.lowest == 0.0 and (x < 0).any():
            raise ValueError(f"expected activations >= 0, got {x.min().item():g}")
        active = (x > 0).sum(0).cpu()
        self.active = self.active + active if self.batches else active
        self.maxima.append(x.amax(1).double().cpu())
        self.texts, self.batches = self.texts + len(x), self.batches + 1
        if (self.batches - 1) % self.stride:
            return
        if self.keep:  # no limit is above these
            x = torch.where(largest_entries(x, self.keep) & (x > 0), math.inf, x)
        row, column = (x > self.floor).nonzero(as_tuple=True)
        self.parts.append((len(x), column.int().cpu(), x[row, column].double().cpu()))
        while sum(len(values) for _, _, values in self.parts) > LIMIT:
            if self.is_exact:  # at most a quarter of them is wanted
                self._join()
                self.values, order = self.values.topk(LIMIT // 2)
                self.floor = self.values[-1].item()
                self.parts = [(self.held, self.columns[order], self.values)]
            elif len(self.parts) > 1:  # half of the texts, which come sorted by length
                self.parts, self.stride = self.parts[::2], 2 * self.stride
            else:
                return

    def _join(self) -> None:
        texts, columns, values = zip(*self.parts, strict=True)
        self.held, self.columns, self.values = sum(texts), torch.cat(columns), torch.cat(values)

    def close(self) -> None:
        """Join what is held; raise if that is nothing."""
        if not self.texts:
            raise ValueError(f"expected at least one {self.name}, got none")
        self._join()
        self.largest = torch.cat(self.maxima)

    def share(self, limit: float | None) -> Tensor:
        """Return the share of texts that have each dimension above a limit, ``[V]``."""
        if limit is None:
            return self.active.double() / self.texts
        above = self.columns[self.values > limit]
        return torch.bincount(above, minlength=len(self.active)).double() / self.held

    def empty(self, limit: float | None) -> int:
        """Return how many texts have nothing above a limit."""
        return int((self.largest <= (0.0 if limit is None or self.keep else limit)).sum())

    def limit(self, target: float) -> float:
        """Return the limit that ``target`` entries a text are above, or nearly."""
        what = f"{target:g} active dimensions a {self.name}"
        return _nearest([self], target, what, lambda x: int((self.values > x).sum()) / self.held)


def _nearest(
    sides: Sequence[_Texts], target: float, what: str, given: Callable[[float], float]
) -> float:
    """Return the limit of values at which ``given``, which falls with it, is nearest to a target.

    It lies between two values, so that equal ones stay or go together, and leaves at least one.
    """
    values = torch.cat([side.values for side in sides])
    steps = values[values.isfinite()].unique()
    lowest = sides[0].lowest if sides[0].lowest == 0.0 or not len(steps) else steps[0] - 1.0
    steps = torch.cat([steps.new_tensor([lowest]), steps]).tolist()
    left = functools.cache(lambda i: given(steps[i]))
    i = bisect.bisect_left(range(len(steps)), -target, key=lambda i: -left(i))
    if i == 0:
        if left(0) < target:
            warnings.warn(f"expected {what}, got {left(0):.4g}: all are kept", stacklevel=4)
        return steps[0]
    if i == len(steps):
        if left(i - 1) > 1.02 * target:
            warnings.warn(f"expected {what}, got {left(i - 1):.4g} at least", stacklevel=4)
        return steps[-1]
    if left(i) == 0 or left(i - 1) - target <= target - left(i):
        i -= 1
    above = steps[i + 1] if i + 1 < len(steps) else steps[i]
    return steps[0] if i == 0 else steps[i] / 2 + above / 2  # the sum could overflow


def _products_limit(sides: Sequence[_Texts], target: float) -> float:
    what = f"{target:g} products of a query and a document"
    return _nearest(
        sides, target, what, lambda x: (sides[0].share(x) * sides[1].share(x)).sum().item()
    )


def _pruned(
    sides: Sequence[_Texts], targets: Thresholds, one: float | None, of: Any
) -> tuple[Sequence[float | None], Thresholds]:
    """Return the limits of the weights of both sides, and their thresholds, of the logits."""
    limits: list[float | None] = [None, None]
    thresholds = list(of.thresholds)
    for i, (side, target, held) in enumerate(zip(sides, targets, of.thresholds, strict=False)):
        if one is not None or target is not None:
            limit = side.limit(target) if target is not None else one
            limits[i], thresholds[i] = limit, _logit(limit, of.activation)
        elif held is not None:
            limits[i] = weight_at(held, of.activation)
    return limits, (thresholds[0], thresholds[1])


def _logit(weight: float | None, activation: str) -> float:
    return logits_at(torch.tensor(weight, dtype=torch.float64, device="cpu"), activation).item()


def _sparsity(sides: Sequence[_Texts], limits: Sequence[float | None]) -> Sparsity:
    shares = [side.share(limit) for side, limit in zip(sides, limits, strict=False)]
    active: list[Any] = [share.sum().item() for share in shares]
    empty: list[Any] = [side.empty(limit) for side, limit in zip(sides, limits, strict=False)]
    products = (shares[0] * shares[1]).sum().item() if len(sides) > 1 else None
    active, empty = [*active, None], [*empty, None]
    return Sparsity(*active[:2], products, shares[0].max().item(), *empty[:2])


def _targets(
    of: Any, is_shift: bool, keep: int, documents: Any, queries: Any, products: Any
) -> list[Thresholds]:
    """Return the numbers of active dimensions of documents and queries, checked."""
    numbers = list(documents) if isinstance(documents, (list, tuple)) else [documents]
    others = list(queries) if isinstance(queries, (list, tuple)) else [queries] * len(numbers)
    if len(numbers) != 1 and (is_shift or not of.takes_several):
        raise ValueError("expected one `target_active`: only pruning a SpladeEncoder takes several")
    if not numbers or len(others) != len(numbers):
        raise ValueError(f"expected a `query_target` for each of {documents}, got {queries}")
    if is_shift and queries is not None:
        raise ValueError("expected no `query_target`: one shift changes both sides")
    for name, values in (("target_active", numbers), ("query_target", others)):
        for value in values:
            if value is not None:
                _check_number(name, value, of.vocab_size, keep)
    is_given = documents is not None or queries is not None
    if is_given == (products is not None):
        got = "both" if is_given else "neither"
        raise ValueError(f"expected active dimensions or `target_products`, got {got}")
    if products is not None:
        check_number("target_products", products, minimum=0.0, exclusive=True)
    return list(zip(numbers, others, strict=True))


def _check_number(name: str, value: float, vocab_size: int, keep: int) -> None:
    check_number(name, value, minimum=0.0, exclusive=True)
    if not keep <= value <= vocab_size:
        bounds = f"from {keep} (`keep_at_least`)" if keep else "of at most"
        raise ValueError(f"expected `{name}` {bounds} to V = {vocab_size}, got {value}")


def _watched(
    batches: Iterator[Tensor], total: int | None, show_progress: bool | None
) -> Iterator[Tensor]:
    """Yield the batches, and show by tqdm, if it is there, how many texts are done."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield from batches
        return
    options: dict[str, Any] = {"disable": show_progress is False, "total": total, "unit": "text"}
    with tqdm(desc="Calibrating", delay=0 if show_progress else 10, **options) as progress:
        for x in batches:
            yield x
            progress.update(len(x))
