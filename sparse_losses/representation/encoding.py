"""From texts to sparse vectors on the CPU: batches, the entries of vectors, and their formats."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_losses._core.checks import check_integer, check_number
from sparse_losses.fast.sparse import csr

Entries = tuple[Tensor, Tensor]  # ids and weights of a vector


def token_ids(tokenizer: Any, texts: Sequence[str], device: Any, **options: Any) -> dict[str, Any]:
    """Return ``input_ids`` and ``attention_mask`` ``[B, S]``, padded, on a device."""
    check_texts(texts)
    batch = tokenizer(list(texts), padding=True, **options)
    names = ("input_ids", "attention_mask")
    return {name: torch.tensor(batch[name], dtype=torch.int64, device=device) for name in names}


def batches(
    texts: Sequence[str], batch_size: int, show_progress: bool | None = False, **bar: Any
) -> Iterator[list[int]]:
    """Yield the numbers of the texts of each batch; texts of similar length share a batch."""
    from tqdm.auto import tqdm

    check_texts(texts)
    check_integer("batch_size", batch_size, minimum=1)
    # The longest texts come first, so that an out-of-memory error occurs at once.
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    disable = None if show_progress is None else not show_progress
    options = {"desc": "Encoding", "unit": "text", "total": len(texts), "disable": disable, **bar}
    with tqdm(**options) as progress:
        for first in range(0, len(texts), batch_size):
            yield (numbers := order[first : first + batch_size])
            progress.update(len(numbers))


def entries_of(vectors: Tensor, numbers: Sequence[int] | None = None) -> list[Entries]:
    """Return ids (ascending) and weights of each vector's positive entries, on the CPU."""
    entries = vectors.to_sparse(layout=torch.sparse_coo).coalesce()
    (row, ids), weights = entries.indices(), entries.values()
    if not weights.isfinite().all():
        first = int(row[~weights.isfinite()][0])
        first = first if numbers is None else numbers[first]
        raise ValueError(f"expected finite vectors, got others in row {first}")
    kept = weights > 0
    row, ids, weights = row[kept].cpu(), ids[kept].cpu(), weights[kept].float().cpu()
    counts = torch.bincount(row, minlength=len(vectors)).tolist()
    return list(zip(torch.split(ids, counts), torch.split(weights, counts), strict=True))


def pruned(
    ids: Tensor, weights: Tensor, prune_ratio: float | None, max_active_dims: int | None
) -> Entries:
    """Return the entries of at least ``prune_ratio`` times the largest weight, and the largest."""
    if prune_ratio is not None and len(ids):
        kept = weights >= prune_ratio * weights.max()
        ids, weights = ids[kept], weights[kept]
    if max_active_dims is not None and len(ids) > max_active_dims:
        kept = weights.argsort(descending=True, stable=True)[:max_active_dims].sort().values
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def check_pruning(prune_ratio: float | None, max_active_dims: int | None) -> None:
    """Raise unless these are a number in [0, 1) and an integer >= 1, or ``None``."""
    if prune_ratio is not None:
        check_number("prune_ratio", prune_ratio, minimum=0.0)
        if prune_ratio >= 1:
            raise ValueError(f"expected `prune_ratio` in [0, 1), got {prune_ratio}")
    if max_active_dims is not None:
        check_integer("max_active_dims", max_active_dims, minimum=1)


def collected(vectors: Sequence[Entries], output: str, tokenizer: Any, vocab_size: int) -> Any:
    """Return the entries of vectors as ``output``: ``"csr"``, ``"dense"`` or ``"tokens"``."""
    if output == "tokens":
        return [named(tokenizer, *entries) for entries in vectors]
    # On the CPU and in fp32, whatever the default device and dtype are.
    counts = torch.tensor([len(ids) for ids, _ in vectors], dtype=torch.int64, device="cpu")
    rows = torch.arange(len(vectors), device="cpu").repeat_interleave(counts)
    empty = counts.new_empty(0), torch.empty(0, dtype=torch.float32, device="cpu")
    ids, weights = (torch.cat(parts) for parts in zip(empty, *vectors, strict=True))
    if output == "csr":
        return csr(rows, ids, weights, (len(vectors), vocab_size))
    dense = weights.new_zeros(len(vectors), vocab_size)
    return dense.index_put_((rows, ids), weights)


def named(tokenizer: Any, ids: Tensor, weights: Tensor) -> dict[str, float]:
    """Return the weights by token, the largest first; of equal ones, that of the smaller id."""
    order = weights.argsort(descending=True, stable=True)
    return dict(zip(spelled(tokenizer, ids[order].tolist()), weights[order].tolist(), strict=True))


def spelled(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return tokens as the vocabulary spells them."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    # A model may have more rows than its tokenizer has tokens.
    return [f"[{i}]" if name is None else name for i, name in zip(ids, names, strict=True)]


def check_texts(texts: object) -> None:
    """Raise unless ``texts`` is a sequence of strings."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"expected `texts` to be a list of strings, got {type(texts).__name__}")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"expected `texts` to be strings, got {type(text).__name__} at {i}")
