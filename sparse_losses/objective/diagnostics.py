"""Statistics of the vectors of a training run, and how hard each term pulls at them."""

import itertools
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from sparse_losses._core.checks import check_integer, check_shapes
from sparse_losses._core.entries import entries_of, largest_of_rows, values_at
from sparse_losses._core.precision import compute_dtype, widest_dtype
from sparse_losses._core.token_ids import TokenIds, as_mask, attended_ids, distinct_ids, id_mask
from sparse_losses.distributed import agree_across_ranks, num_ranks, sum_over_ranks
from sparse_losses.objective.batch import SpladeBatch, Texts
from sparse_losses.objective.objective import SpladeObjective

NUMBERS = 12  # that a batch adds beside those by token


class Diagnostics:
    r"""Statistics of the activations of one side, over any number of batches.

    The page Diagnostics has the formulas of all numbers that ``report`` returns; it leaves out
    those whose inputs are missing. ``special_share``, ``stopword_share`` and ``foreign_share`` are
    of the active entries; foreign tokens are neither allowed nor special. ``self_dot`` is the mean
    dot product of a text with itself. ``training_mode`` is the share of the texts that a model in
    training mode has encoded: dropout makes counts that are many times those of evaluation mode,
    which an index has.

    Examples:
        >>> import torch
        >>> from sparse_losses import Diagnostics
        >>> diagnostics = Diagnostics(4, stopword_ids=[0])
        >>> diagnostics.update(torch.tensor([[2.0, 1.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]]))
        >>> report = diagnostics.report()
        >>> report["active_dimensions"], report["stopword_share"], report["semantic_ratio"]
        (1.5, 0.6666666666666666, 0.3333333333333333)
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        special_token_ids: TokenIds = (),
        stopword_ids: TokenIds = (),
        allowed_token_ids: TokenIds | None = None,
        top_k: int = 10,
    ) -> None:
        check_integer("vocab_size", vocab_size, minimum=1)
        check_integer("top_k", top_k, minimum=1)
        self.vocab_size, self.top_k = vocab_size, min(top_k, vocab_size)
        where = vocab_size, torch.device("cpu")
        special = id_mask("special_token_ids", special_token_ids, *where)
        stopword = id_mask("stopword_ids", stopword_ids, *where)
        allowed = id_mask("allowed_token_ids", allowed_token_ids, *where)
        none = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
        self._special = none if special is None else special  # moved to the activations' device
        foreign = None if allowed is None else ~(allowed | self._special)
        groups = {"special": special, "stopword": stopword, "foreign": foreign}
        self._groups = {name: mask for name, mask in groups.items() if mask is not None}
        self.reset()

    def reset(self) -> None:
        """Reset the state to that of a new object."""
        # By token, [3 V]: activations, texts that have it active, and on top. Then `NUMBERS`.
        size = 3 * self.vocab_size + NUMBERS
        self._sums = torch.zeros(size, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def update(
        self,
        texts: Tensor | Texts,
        *,
        other_side: Texts | None = None,
        training: bool | None = None,
    ) -> None:
        """Add a batch, without a wait for the device.

        Args:
            texts: activations ``[B, V]``, dense or CSR; or ``Texts`` (``[B, V]`` or ``[B, N, V]``),
                whose tokens are for ``input_recall``.
            other_side: the positives (or queries) of these texts, for ``other_side_recall``.
            training: ``model.training`` of the encoder, for ``training_mode``.
        """
        x, *tokens, _ = texts.flatten() if isinstance(texts, Texts) else Texts(texts)
        others = [None, None] if other_side is None else other_side[1:3]
        size = check_shapes(
            activations=(x, "B V, csr"),
            input_ids=(tokens[0], "B S, optional"),
            attention_mask=(tokens[1], "B S, optional"),
            other_input_ids=(others[0], "B T, optional"),
            other_attention_mask=(others[1], "B T, optional"),
        )
        if size["V"] != self.vocab_size:
            raise ValueError(f"expected activations of V = {self.vocab_size}, got {size['V']}")
        x, wide = x.detach(), widest_dtype(x.device)
        is_dense = x.layout == torch.strided  # a NaN is larger than any number
        values, index = x.topk(self.top_k, dim=1) if is_dense else largest_of_rows(x, self.top_k)
        is_on_top = values > 0
        top = torch.zeros(self.vocab_size, device=x.device, dtype=wide)
        top.index_add_(0, index.flatten(), is_on_top.flatten().to(wide))
        # A row with a NaN is neither live nor dead.
        is_live, is_dead = is_on_top[:, 0], values[:, 0] <= 0
        value, sums = _sums(x, wide)
        is_active, positive = value > 0, value.relu()  # which keeps a NaN
        count, self_dot = sums(is_active, 1) * is_live, sums(positive.square(), 1)
        one, none = torch.ones_like(count), torch.zeros_like(count)
        by_text = [one, is_live, count, is_dead, count > self.vocab_size / 4, self_dot]
        for ids, mask in (tokens, others):
            known = ids is not None and mask is not None
            by_text += self._recall(x, ids, mask) if known else (none, none)
        by_text += [one if training else none, none if training is None else one]
        by_token = sums(positive, 0), sums(is_active, 0), top
        total = torch.cat([*by_token, torch.stack(by_text).sum(1, dtype=wide)])
        # Out of place: the state may come from inference mode.
        self._sums = total + self._sums.to(total, non_blocking=True)  # at first it is on the host

    def _recall(self, x: Tensor, ids: Any, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the share of each text's tokens that are active, and whether it has any."""
        attended = as_mask("attention_mask", mask)
        ids = attended_ids("input_ids", ids, attended, self.vocab_size)
        self._special = self._special.to(ids.device)  # kept, as the first copy waits
        ids, repeats = distinct_ids(ids, attended & ~self._special[ids])
        found = x.gather(1, ids) if x.layout == torch.strided else values_at(x, ids)
        hits, total = ((found > 0) & ~repeats).sum(1), (~repeats).sum(1)
        return hits / total.clamp(min=1), total > 0

    def all_reduce(self) -> Self:
        """Sum the state over all ranks, each of which must call it, once before a ``reset``."""
        if num_ranks() > 1:
            if torch.distributed.get_backend() == "nccl":  # it cannot send CPU tensors
                self._sums = self._sums.cuda()
            agree_across_ranks("Diagnostics.all_reduce", True, self._sums, V=self.vocab_size)
            self._sums = sum_over_ranks(self._sums)
        return self

    def _read(self) -> list[Tensor]:
        sums = self._sums.cpu()
        return [*sums[:-NUMBERS].view(3, -1), sums[-NUMBERS:]]

    def report(self) -> dict[str, float]:
        """Return the numbers of all batches so far; waits for the device."""
        summed, texts, top, numbers = self._read()
        rows, live, active, dead, dense, self_dot, *pairs = numbers.tolist()
        if rows == 0:
            return {}
        without = 0.0 if dead == rows else math.nan  # no live row: all are dead, or some have a NaN
        share = texts / rows
        report = {
            "texts": rows,
            "active_dimensions": active / live if live else without,
            "self_dot": self_dot / live if live else without,
            "dead_rows": dead / rows,
            "dense_rows": dense / rows,
            "mean_activation": _ratio(summed.sum(), texts.sum()),
            "flops": (summed / rows).square().sum().item(),
            "index_flops": share.square().sum().item(),
            "longest_list": share.max().item(),
            "never_active": (texts == 0).double().mean().item(),
        }
        for name, group in self._groups.items():
            report[f"{name}_share"] = _ratio(texts[group].sum(), texts.sum())
            report[f"{name}_top"] = _ratio(top[group].sum(), top.sum())
        if (stopword := self._groups.get("stopword")) is not None:
            masks = ~(stopword | self._special.cpu()), stopword
            content, common = (_ratio(summed[mask].sum(), texts[mask].sum()) for mask in masks)
            report |= {"semantic_ratio": content / common} if common != 0 else {}
        names = ("input_recall", "other_side_recall", "training_mode")
        for name, part, whole in zip(names, pairs[0::2], pairs[1::2], strict=True):
            report |= {name: part / whole} if whole else {}
        return report

    def top_tokens(self, k: int = 20) -> dict[int, float]:
        """Return the ``k`` ids most often among a text's ``top_k``, with their share of texts."""
        return self._largest_shares(2, k)

    def longest_lists(self, k: int = 20) -> dict[int, float]:
        """Return the ``k`` ids that most texts activate, with their share of the texts."""
        return self._largest_shares(1, k)

    def _largest_shares(self, which: int, k: int) -> dict[int, float]:
        check_integer("k", k, minimum=1)
        *by_token, numbers = self._read()
        share, ids = (by_token[which] / numbers[0]).sort(descending=True, stable=True)
        largest = zip(ids[:k].tolist(), share[:k].tolist(), strict=True)
        return {token: part for token, part in largest if part > 0}


def _sums(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Callable[[Tensor, int], Tensor]]:
    """Return the values of ``x [B, V]``, and what sums such values over a dimension."""
    if x.layout == torch.strided:
        return x, lambda value, dim: value.sum(dim, dtype=dtype)
    entries = entries_of(x)
    by = entries.sum_columns, entries.sum_rows
    return entries.value, lambda value, dim: by[dim](x.shape[1 - dim], value.to(dtype))


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole or part else 0.0  # NaN / 0 is NaN


def gradient_report(objective: SpladeObjective, batch: SpladeBatch) -> dict[str, float]:
    """Return the norm of each active term's weighted gradient, and the cosine of each pair.

    They are ``"norm/a"`` and ``"cosine/a/b"``, of the gradients by all activations of the batch, or
    by the logits of texts that have them. Terms of different sides have the cosine 0 here, though
    not in the encoder. It takes one backward pass per term, to the activations only: the encoder
    does not run, and no ``.grad`` changes. Memory holds one gradient of the batch per term.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeBatch, SpladeObjective, Texts, gradient_report
        >>> from sparse_losses.objective import terms
        >>> flops = {side: (1.0, terms.flops(side)) for side in ("query", "document")}
        >>> batch = SpladeBatch(Texts(torch.eye(2)), Texts(torch.zeros(2, 2)))
        >>> gradient_report(SpladeObjective(flops), batch)
        {'norm/query': 1.0, 'norm/document': 0.0, 'cosine/query/document': 0.0}
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("expected gradients to be recorded, got torch.inference_mode")
    leaves: list[Tensor] = []
    with torch.enable_grad():
        for side in batch._fields[:3]:
            if (texts := getattr(batch, side)) is None:
                continue
            x = texts.activations if texts.logits is None else texts.logits
            x = x.to_dense() if x.layout == torch.sparse_csr else x
            leaves.append(leaf := x.detach().to(compute_dtype(x=x)).requires_grad_())
            fields = {"activations": leaf}
            if texts.logits is not None:
                # The activations, with the gradient of log1p(relu(logits)).
                slope = leaf.relu().log1p()
                activations = texts.activations.detach() + (slope - slope.detach())
                fields = {"activations": activations, "logits": leaf}
            batch = batch._replace(**{side: texts._replace(**fields)})
        values = objective.values(batch)
        weighted = [objective.weights[name] * value for name, value in values.items()]
    gradients = [
        torch.autograd.grad(term, leaves, retain_graph=True, materialize_grads=True)
        if term.requires_grad
        else [torch.zeros_like(leaf) for leaf in leaves]
        for term in weighted
    ]
    wide, size = widest_dtype(leaves[0].device), len(gradients)
    total = torch.zeros(size, size, dtype=wide, device=leaves[0].device)
    for by_leaf in zip(*gradients, strict=True):
        for piece in zip(*(x.flatten().split(1 << 18) for x in by_leaf), strict=True):
            rows = torch.stack(piece).to(wide)  # a piece, because fp64 takes twice the memory
            total += rows @ rows.T
    products: list[list[float]] = total.tolist()
    norms = [math.sqrt(products[i][i]) for i in range(size)]
    report = {f"norm/{name}": norm for name, norm in zip(values, norms, strict=True)}
    for (i, a), (j, b) in itertools.combinations(enumerate(values), 2):
        report[f"cosine/{a}/{b}"] = products[i][j] / (norms[i] * norms[j] or math.inf)
    return report
