"""Document frequencies of tokens: counted batch by batch, merged, reduced over ranks, saved."""

import hashlib
import json
import os
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparse_losses._core.checks import check_choice, check_integer, check_shapes
from sparse_losses._core.dtensors import agree, is_dtensor, on_one_rank
from sparse_losses._core.files import replaced_file
from sparse_losses._core.token_ids import as_mask, attended_ids, first_occurrences
from sparse_losses.distributed import agree_across_ranks, num_ranks, sum_over_ranks

ARRAYS = {"df", "num_documents", "vocab_size", "tokenizer_sha256"}  # of a file


class DocumentFrequency:
    r"""Counter of the number of documents that contain each token.

    $$
    \mathrm{idf}_j =
    \begin{cases}
      \log\left(1 + \dfrac{N - \mathrm{df}_j + 0.5}{\mathrm{df}_j + 0.5}\right) & \text{bm25} \\
      \log \dfrac{N}{\mathrm{df}_j + 1} & \text{standard}
    \end{cases}
    $$

    where $\mathrm{df}_j$ is the number of documents that contain token $j$ and $N$ the number of
    documents.

    Args:
        vocab_size: Number of token ids, V.
        tokenizer_sha256: Fingerprint of the tokenizer that made the ids, from the function
            ``tokenizer_sha256``. Only counters with equal fingerprints (or ``None``) merge.

    Attributes:
        df: Number of documents per token, int64 ``[V]``, on the CPU.
        num_documents: Number of documents, N.
        num_tokens: Number of attended tokens in all documents, repeats included. ``None`` if it is
            unknown, after loading or merging counts that an older version saved.

    Examples:
        >>> import torch
        >>> from sparse_losses import DocumentFrequency
        >>> counter = DocumentFrequency(vocab_size=5)
        >>> input_ids = torch.tensor([[1, 2, 2], [1, 3, 0]])
        >>> attention_mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        >>> counter.update(input_ids, attention_mask)
        >>> counter
        DocumentFrequency(vocab_size=5, num_documents=2)
        >>> counter.df
        tensor([0, 2, 1, 1, 0])
        >>> counter.mean_length
        2.5
        >>> counter.idf()
        tensor([1.7918, 0.1823, 0.6931, 0.6931, 1.7918], dtype=torch.float64)

    References:
        Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009. The
        1 inside the logarithm keeps ``bm25`` positive for tokens that occur in most documents.
    """

    def __init__(self, vocab_size: int, *, tokenizer_sha256: str | None = None) -> None:
        check_integer("vocab_size", vocab_size, minimum=1)
        self.vocab_size = int(vocab_size)
        self.tokenizer_sha256 = tokenizer_sha256
        self.df = torch.zeros(self.vocab_size, dtype=torch.int64)
        self.num_documents = 0
        self.num_tokens: int | None = 0

    def __repr__(self) -> str:
        counts = f"vocab_size={self.vocab_size}, num_documents={self.num_documents}"
        fingerprint = f", tokenizer_sha256={self.tokenizer_sha256!r}" * bool(self.tokenizer_sha256)
        return f"DocumentFrequency({counts}{fingerprint})"

    @property
    def mean_length(self) -> float:
        """Mean number of tokens per document, ``num_tokens / num_documents``.

        Raises:
            ValueError: If no document was counted, or the number of tokens is unknown.
        """
        if self.num_tokens is None:
            raise ValueError(
                "expected counts with `num_tokens` for `mean_length`, got counts that an older "
                "version saved without it: count the documents again"
            )
        if self.num_documents == 0:
            raise ValueError("expected at least one document for `mean_length`, got none")
        return self.num_tokens / self.num_documents

    def update(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        """Count a batch; each row is a document and adds 1 to the ``df`` of each of its tokens.

        Args:
            input_ids: Token ids, integers ``[B, S]``, on any device.
            attention_mask: Bool, integer or float 0/1 ``[B, S]``; ids are ignored where it is 0. A
                row of zeros is an empty document, which counts as a document.

        Raises:
            ValueError: If the shapes are not ``[B, S]``, or an attended id is outside ``[0, V)``;
                the counter is then unchanged.
            TypeError: If the ids are not integers.
        """
        if is_dtensor(input_ids) or is_dtensor(attention_mask):  # or each rank would count them
            texts = {"input_ids": input_ids, "attention_mask": attention_mask}
            agree("DocumentFrequency.update", False, texts)
            input_ids, attention_mask = on_one_rank(input_ids, attention_mask)
        check_shapes(input_ids=(input_ids, "B S"), attention_mask=(attention_mask, "B S"))
        attended = as_mask("attention_mask", attention_mask.cpu())
        ids = attended_ids("input_ids", input_ids.cpu(), attended, self.vocab_size)
        ordered, first = first_occurrences(ids, attended)
        self.df += torch.bincount(ordered[first], minlength=self.vocab_size)
        self.num_documents += len(ids)
        if self.num_tokens is not None:
            self.num_tokens += int(attended.sum())

    def merge(self, other: "DocumentFrequency") -> "DocumentFrequency":
        """Add the counts of ``other``, which is not changed, and return this counter.

        Raises:
            ValueError: If the vocabulary sizes or the tokenizer fingerprints differ.
        """
        for name in ("vocab_size", "tokenizer_sha256"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(f"expected equal `{name}` to merge, got {ours!r} and {theirs!r}")
        self.df += other.df
        self.num_documents += other.num_documents
        if self.num_tokens is None or other.num_tokens is None:
            self.num_tokens = None
        else:
            self.num_tokens += other.num_tokens
        return self

    def all_reduce(self) -> "DocumentFrequency":
        """Sum the counts over the ranks of the default process group and return this counter.

        Call it once, on every rank, after all counting: a second call would count every document
        again. Without a process group it does nothing.

        Raises:
            ValueError: On every rank, if the ranks count different vocabularies.
        """
        if num_ranks() == 1:
            return self
        nccl = torch.distributed.get_backend() == "nccl"  # NCCL needs GPU tensors
        numbers = [self.num_documents, self.num_tokens or 0, self.num_tokens is None]
        counts = torch.cat([self.df, torch.tensor(numbers)]).to("cuda" if nccl else "cpu")
        vocabulary = {"vocab_size": self.vocab_size, "tokenizer_sha256": self.tokenizer_sha256}
        agree_across_ranks("DocumentFrequency.all_reduce", True, counts, **vocabulary)
        counts = sum_over_ranks(counts).cpu()
        self.num_documents, num_tokens, unknown = counts[-3:].tolist()
        self.df, self.num_tokens = counts[:-3], None if unknown else num_tokens
        return self

    def idf(self, smoothing: Literal["bm25", "standard"] = "bm25") -> Tensor:
        """Return the inverse document frequency of every token, float64 ``[V]``.

        Args:
            smoothing: ``"bm25"`` is positive for every token; ``"standard"`` is 0 for a token in
                N - 1 documents and slightly negative for one in all N.

        Raises:
            ValueError: If no document was counted, or the smoothing is unknown.
        """
        check_choice("smoothing", smoothing, ("bm25", "standard"))
        if self.num_documents == 0:
            raise ValueError("expected at least one document for `idf`, got none")
        df = self.df.double()
        if smoothing == "bm25":
            return torch.log1p((self.num_documents - df + 0.5) / (df + 0.5))
        return torch.log(self.num_documents / (df + 1))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the counts to ``path`` atomically, as an ``.npz`` archive; no suffix is appended.

        Raises:
            ValueError: If ``path`` exists and is not a regular file.
        """
        numbers = {"num_documents": self.num_documents, "vocab_size": self.vocab_size}
        if self.num_tokens is not None:  # first: a damaged directory may lose its last entry
            numbers = {"num_tokens": self.num_tokens, **numbers}
        arrays: dict[str, Any] = {name: np.int64(number) for name, number in numbers.items()}
        arrays |= {"df": self.df.numpy(), "tokenizer_sha256": np.str_(self.tokenizer_sha256 or "")}
        with replaced_file(path) as file:  # NumPy appends .npz to a name, but not to an open file
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        vocab_size: int | None = None,
    ) -> "DocumentFrequency":
        """Load a file written by ``save``, without unpickling.

        Args:
            path: The file.
            tokenizer: The tokenizer that must have made the counts, with ``get_vocab()``.
            vocab_size: The V that the counts must have, such as that of the model.

        Raises:
            ValueError: If the file was not written by ``save``, is damaged, or has another
                tokenizer (or no fingerprint) or vocabulary size.
        """
        sha256 = None if tokenizer is None else tokenizer_sha256(tokenizer)
        with open(path, "rb") as file:
            try:
                archive = np.load(file, allow_pickle=False)
                if archive.zip.testzip() is not None:
                    raise ValueError("its checksum is wrong")
                counter = cls._of(dict(archive))
            except Exception as error:  # a damaged archive fails in many ways
                raise ValueError(f"{path} is not a DocumentFrequency file: {error}") from error
        for name, wanted in (("vocab_size", vocab_size), ("tokenizer_sha256", sha256)):
            received = getattr(counter, name)
            if wanted not in (None, received):
                raise ValueError(f"expected {path} to have {name} = {wanted!r}, got {received!r}")
        return counter

    @classmethod
    def _of(cls, arrays: dict[str, Any]) -> "DocumentFrequency":
        if arrays.keys() - {"num_tokens"} != ARRAYS:
            raise ValueError(f"it contains {', '.join(arrays)}")
        fingerprint = str(arrays["tokenizer_sha256"]) or None
        counter = cls(int(arrays["vocab_size"]), tokenizer_sha256=fingerprint)
        counter.num_documents = int(arrays["num_documents"])
        # Files of older versions have no number of tokens.
        counter.num_tokens = int(arrays["num_tokens"]) if "num_tokens" in arrays else None
        df = torch.from_numpy(arrays["df"])
        is_count = df.dtype == torch.int64 and df.shape == counter.df.shape
        if not is_count or df.min() < 0 or df.max() > counter.num_documents:
            raise ValueError(f"expected V integers in [0, {counter.num_documents}] as `df`")
        counter.df = df
        return counter


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the fingerprint of a tokenizer's vocabulary, for ``DocumentFrequency``.

    It is the SHA-256 of the (token, id) pairs in sorted order, 64 hexadecimal digits.
    """
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()
