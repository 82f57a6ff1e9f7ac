"""Document frequencies of tokens: counted batch by batch, merged, reduced over ranks, saved."""

import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from sparse_losses._core.checks import check_choice, check_integer, check_shapes
from sparse_losses._core.token_ids import as_mask, attended_ids, distinct_ids
from sparse_losses.distributed import agree_across_ranks, num_ranks, sum_over_ranks

NUMBERS = ("num_documents", "vocab_size", "num_tokens")  # of a file; old ones lack the last


class DocumentFrequency:
    r"""Counter of the number of documents that contain each token.

    $$\mathrm{idf}_j = \log\Bigl(1 + \frac{N - \mathrm{df}_j + 0.5}{\mathrm{df}_j + 0.5}\Bigr)
    \;(\text{bm25}) \qquad \log \frac{N}{\mathrm{df}_j + 1} \;(\text{standard})$$

    $\mathrm{df}_j$ documents of $N$ contain token $j$.

    Args:
        vocab_size: Number of token ids, V.
        tokenizer_sha256: Fingerprint of the tokenizer, from the function ``tokenizer_sha256``. Only
            counters with equal fingerprints (or ``None``) merge.

    Attributes:
        df: Number of documents per token, int64 ``[V]``, on the CPU.
        num_documents: Number of documents, N.
        num_tokens: Number of attended tokens in all documents, repeats included; ``None`` if
            counts come from an old file, which did not have it.

    Examples:
        >>> import torch
        >>> from sparse_losses import DocumentFrequency
        >>> counter = DocumentFrequency(vocab_size=5)
        >>> ids, mask = torch.tensor([[1, 2, 2], [1, 3, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
        >>> counter.update(ids, mask)
        >>> counter.df
        tensor([0, 2, 1, 1, 0])
        >>> counter.mean_length
        2.5
        >>> counter.idf()
        tensor([1.7918, 0.1823, 0.6931, 0.6931, 1.7918], dtype=torch.float64)
    """

    def __init__(self, vocab_size: int, *, tokenizer_sha256: str | None = None) -> None:
        check_integer("vocab_size", vocab_size, minimum=1)
        self.vocab_size, self.tokenizer_sha256 = int(vocab_size), tokenizer_sha256
        self.df = torch.zeros(self.vocab_size, dtype=torch.int64, device="cpu")
        self.num_documents = 0
        self.num_tokens: int | None = 0

    @property
    def mean_length(self) -> float:
        """Mean number of tokens per document, ``num_tokens / num_documents``."""
        if self.num_tokens is None:
            raise ValueError("expected `num_tokens` for `mean_length`, but an old file had none")
        return self.num_tokens / self._documents_for("mean_length")

    def _documents_for(self, wanted: str) -> int:
        if self.num_documents == 0:
            raise ValueError(f"expected at least one document for `{wanted}`, got none")
        return self.num_documents

    def update(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        """Count a batch; each row is a document and adds 1 to the ``df`` of each of its tokens.

        An empty document counts. A wrong id is an error that leaves the counter unchanged.
        """
        check_shapes(input_ids=(input_ids, "B S"), attention_mask=(attention_mask, "B S"))
        attended = as_mask("attention_mask", attention_mask.cpu())
        ids = attended_ids("input_ids", input_ids.cpu(), attended, self.vocab_size)
        ids, repeats = distinct_ids(ids, attended)
        self.df += torch.bincount(ids[~repeats], minlength=self.vocab_size)
        self._add(len(ids), int(attended.sum()))

    def _add(self, num_documents: int, num_tokens: int | None) -> None:
        self.num_documents += num_documents
        if self.num_tokens is not None:
            self.num_tokens = None if num_tokens is None else self.num_tokens + num_tokens

    def merge(self, other: "DocumentFrequency") -> Self:
        """Add the counts of ``other``, of the same vocabulary, and return this counter."""
        for name in ("vocab_size", "tokenizer_sha256"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(f"expected equal `{name}` to merge, got {ours!r} and {theirs!r}")
        self.df += other.df
        self._add(other.num_documents, other.num_tokens)
        return self

    def all_reduce(self) -> Self:
        """Sum the counts over the ranks, once, after all counting; return this counter."""
        is_unknown = self.num_tokens is None
        numbers = torch.tensor([self.num_documents, self.num_tokens or 0, is_unknown], device="cpu")
        on_gpu = num_ranks() > 1 and torch.distributed.get_backend() == "nccl"
        counts = torch.cat([self.df, numbers]).to("cuda" if on_gpu else "cpu")
        vocabulary = {"vocab_size": self.vocab_size, "tokenizer_sha256": self.tokenizer_sha256}
        agree_across_ranks("DocumentFrequency.all_reduce", True, counts, **vocabulary)
        counts = sum_over_ranks(counts).cpu()
        self.df, (self.num_documents, num_tokens, num_unknown) = counts[:-3], counts[-3:].tolist()
        self.num_tokens = None if num_unknown else num_tokens
        return self

    def idf(self, smoothing: Literal["bm25", "standard"] = "bm25") -> Tensor:
        """Return the inverse document frequency of every token, float64 ``[V]``."""
        check_choice("smoothing", smoothing, ("bm25", "standard"))
        n, df = self._documents_for("idf"), self.df.double()
        is_bm25 = smoothing == "bm25"
        return torch.log1p((n - df + 0.5) / (df + 0.5)) if is_bm25 else torch.log(n / (df + 1))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an ``.npz`` archive under this very name; when whole, it replaces an old file."""
        numbers = {name: getattr(self, name) for name in NUMBERS}
        arrays: dict[str, Any] = {n: np.int64(x) for n, x in numbers.items() if x is not None}
        arrays |= {"df": self.df.numpy(), "tokenizer_sha256": np.str_(self.tokenizer_sha256 or "")}
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # root would replace /dev/null for everybody
            raise ValueError(f"expected {path} to be a regular file or a new one")
        unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            with unfinished.open("xb") as file:  # to its name, NumPy would append .npz
                np.savez_compressed(file, **arrays)
                file.flush()
                os.fsync(file)  # or a power cut could leave an empty file under the name
            if target.exists():
                shutil.copymode(target, unfinished)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, tokenizer: Any = None, vocab_size: int | None = None
    ) -> Self:
        """Load a file written by ``save``, without unpickling.

        Impossible numbers are refused, and counts of another ``tokenizer`` (with ``get_vocab()``)
        or ``vocab_size``, before the counts are unpacked.
        """
        sha256 = None if tokenizer is None else tokenizer_sha256(tokenizer)
        with open(path, "rb") as file:
            try:
                archive = np.load(file, allow_pickle=False)
                size = int(archive["vocab_size"])
                if vocab_size not in (None, size):
                    raise ValueError(f"expected vocab_size = {vocab_size}, got {size}")
                if archive.zip.getinfo("df.npy").file_size > 8 * size + 1024:  # with its header
                    raise ValueError(f"its `df` has more than {size} counts")
                if archive.zip.testzip() is not None:
                    raise ValueError("its checksum is wrong")
                numbers = {name: archive[name].item() for name in NUMBERS if name in archive}
                for name, number in numbers.items():
                    check_integer(name, number, minimum=0)
                counter = cls(numbers["vocab_size"])
                counter.tokenizer_sha256 = str(archive["tokenizer_sha256"].item()) or None
                vars(counter).update({"num_tokens": None, **numbers})  # old files have no tokens
                df = counter.df = torch.from_numpy(archive["df"])
                if df.dtype != torch.int64 or df.shape != (counter.vocab_size,):
                    raise ValueError(f"its `df` is of {df.dtype} {list(df.shape)}")
                most = numbers.get("num_tokens", df.sum())
                if df.min() < 0 or df.max() > numbers["num_documents"] or df.sum() > most:
                    raise ValueError(f"its `df` is not of {counter.num_documents} documents")
            except Exception as error:  # a damaged archive fails in many ways
                raise ValueError(f"{path} is not a DocumentFrequency file: {error}") from error
        if sha256 not in (None, had := counter.tokenizer_sha256):
            raise ValueError(f"expected {path} to have tokenizer_sha256 = {sha256!r}, got {had!r}")
        return counter


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the fingerprint of a tokenizer: SHA-256 of its sorted (token, id) pairs."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()
