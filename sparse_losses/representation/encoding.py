"""From texts to sparse vectors on the CPU: batches, the entries of vectors, and their formats."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import check_integer, check_number
from sparse_losses.fast.sparse import csr

Entries = tuple[Tensor, Tensor, Tensor]  # rows, ids and weights


def token_ids(
    tokenizer: Any, texts: Sequence[str], device: Any, prompt: str = "", **options: Any
) -> dict[str, Any]:
    """Return ``input_ids`` and ``attention_mask`` ``[B, S]``, padded, on a device."""
    check_texts(texts)
    batch = tokenizer([prompt + text for text in texts], padding=True, **options)
    names = ["input_ids", "attention_mask"]
    if any(any(row) for row in batch.get("token_type_ids") or ()):
        names.append("token_type_ids")  # a model takes 0 for none
    ids = {name: torch.tensor(batch[name], dtype=torch.int64, device=device) for name in names}
    if ids["input_ids"].shape[1:] == (0,):  # texts without a token: models need a position
        ids = {name: nnf.pad(x, (0, 1)) for name, x in ids.items()}
    return ids


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


def entries_of(
    vectors: Tensor,
    numbers: Sequence[int],
    prune_ratio: float | None = None,
    max_active_dims: int | None = None,
) -> Entries:
    """Return the positive entries of vectors, rows of these numbers, pruned, on the CPU."""
    entries = vectors.detach().to_sparse(layout=torch.sparse_coo).coalesce()
    (rows, ids), weights = entries.indices(), entries.values()
    if not weights.isfinite().all():
        raise ValueError("expected finite vectors, got NaN or infinity")
    kept = weights > 0
    rows, ids, weights = rows[kept].cpu(), ids[kept].cpu(), weights[kept].float().cpu()
    order = _by_size(rows, weights)
    counts = torch.bincount(rows, minlength=len(vectors))
    first = (counts.cumsum(0) - counts)[rows]  # the rows rise, here and in that order
    kept = torch.ones_like(rows, dtype=torch.bool)
    if prune_ratio is not None:
        kept = weights[order] >= prune_ratio * weights[order[first]]
    if max_active_dims is not None:
        kept &= torch.arange(len(rows), device="cpu") - first < max_active_dims
    kept = order[kept].sort().values
    return (
        torch.tensor(numbers, dtype=torch.int64, device="cpu")[rows[kept]],
        ids[kept],
        weights[kept],
    )


def _by_size(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the order by row, the largest first; of equal ones, that of the smaller id."""
    order = weights.argsort(descending=True, stable=True)
    return order[rows[order].argsort(stable=True)]


def check_pruning(prune_ratio: float | None, max_active_dims: int | None) -> None:
    """Raise unless these are a number in [0, 1) and an integer >= 1, or ``None``."""
    if prune_ratio is not None:
        check_number("prune_ratio", prune_ratio, minimum=0.0)
        if prune_ratio >= 1:
            raise ValueError(f"expected `prune_ratio` in [0, 1), got {prune_ratio}")
    if max_active_dims is not None:
        check_integer("max_active_dims", max_active_dims, minimum=1)


def collected(parts: Sequence[Entries], shape: Sequence[int], output: str, tokenizer: Any) -> Any:
    """Return the entries of all parts as ``"csr"``, ``"dense"`` or ``"tokens"``."""
    # On the CPU and in fp32, whatever the default device and dtype are.
    empty = torch.empty(0, dtype=torch.int64, device="cpu")
    entries = zip((empty, empty, empty.float()), *parts, strict=True)
    rows, ids, weights = (torch.cat(each) for each in entries)
    if output == "tokens":
        order = _by_size(rows, weights)
        names = spelled(tokenizer, ids[order].tolist())
        pairs = zip(names, weights[order].tolist(), strict=True)
        counts = torch.bincount(rows, minlength=shape[0]).tolist()
        return [dict(itertools.islice(pairs, count)) for count in counts]
    order = rows.argsort(stable=True)
    matrix = csr(rows[order], ids[order], weights[order], (shape[0], shape[1]))
    return matrix if output == "csr" else matrix.to_dense()


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
