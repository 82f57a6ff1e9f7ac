"""BM25 of the queries and documents of a batch, from token ids: a cheap teacher."""

import torch
from torch import Tensor

from sparse_losses._core.checks import check_number, check_shapes
from sparse_losses._core.token_ids import TokenIds, as_mask, attended_ids, id_mask

LOOKUPS = 1 << 22  # maximal number per block: a few tensors of 32 MB
ABSENT = torch.iinfo(torch.int64).max


@torch.no_grad()
def bm25_scores(
    query_input_ids: Tensor,
    query_attention_mask: Tensor,
    document_input_ids: Tensor,
    document_attention_mask: Tensor,
    idf: Tensor,
    *,
    mean_length: float,
    k1: float = 1.2,
    b: float = 0.75,
    ignore_token_ids: TokenIds = (),
) -> Tensor:
    r"""BM25 scores of every query of a batch with every document.

    $$\mathrm{BM25}(q, d) = \sum_t q_t \, \mathrm{idf}_t \,
    \frac{f_t \, (k_1 + 1)}{f_t + k_1 \, (1 - b + b \, |d| / \overline{|d|})}$$

    $q_t$ and $f_t$ count token $t$ in query and document, $|d|$ is the number of tokens of the
    document, repeats included, $\overline{|d|}$ its mean over the corpus. Memory grows with the
    tokens of the batch, not with the vocabulary.

    Args:
        query_input_ids: ``[B, S]`` integers in ``[0, V)``.
        query_attention_mask: ``[B, S]`` bool, int or float 0/1; ids are ignored where it is 0.
        document_input_ids: ``[C, T]``, shared by all queries, or ``[B, N, T]``, ``N`` per query.
        document_attention_mask: in the shape of ``document_input_ids``.
        idf: ``[V]``, floating, such as ``DocumentFrequency.idf()``.
        mean_length: > 0, in tokens, such as ``DocumentFrequency.mean_length``.
        k1: weight of repeats of a token in a document, >= 0; at 0 repeats add nothing.
        b: strength of the normalisation by document length, in [0, 1].
        ignore_token_ids: ids that neither score nor count in a length, such as special tokens.

    Returns:
        fp32 ``[B, C]``, or ``[B, N]`` with ``N`` documents per query, without a gradient. A query
        or a document without tokens scores 0.

    Raises:
        ValueError: for wrong shapes, devices or numbers, or an id outside ``[0, V)``.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses import bm25_scores
        >>> queries, documents = torch.tensor([[1, 2]]), torch.tensor([[1, 1, 3], [2, 3, 0]])
        >>> idf = torch.tensor([0.0, 1.0, 2.0, 0.5])
        >>> bm25_scores(queries, queries > 0, documents, documents > 0, idf, mean_length=2.5)
        tensor([[1.3018, 2.1782]])

    References:
        The Probabilistic Relevance Framework: BM25 and Beyond, eq. 3.15 and its remark on queries.
    """
    vocab_size = check_shapes(
        query_input_ids=(query_input_ids, "B S"),
        query_attention_mask=(query_attention_mask, "B S"),
        document_input_ids=(document_input_ids, "C T or B N T"),
        document_attention_mask=(document_attention_mask, "C T or B N T"),
        idf=(idf, "V"),
    )["V"]
    check_bm25(mean_length=mean_length, k1=k1, b=b)
    if not idf.is_floating_point():
        raise TypeError(f"expected `idf` to be floating point, got {idf.dtype}")
    ignored = id_mask("ignore_token_ids", ignore_token_ids, vocab_size, idf.device)

    def kept(side: str, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        counts = as_mask(f"{side}_attention_mask", attention_mask)
        ids = attended_ids(f"{side}_input_ids", input_ids, counts, vocab_size)
        if ignored is not None:
            counts = counts & ~ignored[ids]
        return torch.where(counts, ids, ABSENT)

    query = kept("query", query_input_ids, query_attention_mask)
    document = kept("document", document_input_ids, document_attention_mask).sort(-1).values
    counts = document != ABSENT
    length = counts.sum(-1, keepdim=True).float()
    first, behind = (torch.searchsorted(document, document, right=last) for last in (False, True))
    frequency = (behind - first).float()
    relative_length = 1 - b + b * length / mean_length
    # Both sides of the fraction are divided by k1 + 1: with a huge k1 they would overflow.
    saturated = frequency / (frequency / (k1 + 1) + k1 / (k1 + 1) * relative_length)
    weight = torch.where(counts, idf.float()[torch.where(counts, document, 0)] * saturated, 0.0)
    if document.ndim == 3:
        own = query[:, None].expand(-1, document.shape[1], -1)
        return _look_up(own, document, weight).sum(-1)
    blocks = 1 + len(document) * query.numel() // LOOKUPS
    columns = [
        _look_up(query.flatten().expand(len(ids), -1), ids, weights)
        .view(len(ids), *query.shape)
        .sum(-1)
        for ids, weights in zip(document.chunk(blocks), weight.chunk(blocks), strict=True)
    ]
    return torch.cat(columns).T


def check_bm25(*, mean_length: float, k1: float, b: float) -> None:
    """Raise for numbers outside the ranges of BM25's formula."""
    check_number("mean_length", mean_length, minimum=0.0, exclusive=True)
    check_number("k1", k1, minimum=0.0)
    check_number("b", b, minimum=0.0)
    if b > 1:
        raise ValueError(f"expected `b` in [0, 1], got {b!r}")


def _look_up(tokens: Tensor, document: Tensor, weight: Tensor) -> Tensor:
    """Return the weights of ``tokens [..., S]`` in sorted documents ``[..., T]``, 0 if absent."""
    if document.shape[-1] == 0:
        return weight.new_zeros(tokens.shape)
    tokens = tokens.contiguous()
    place = torch.searchsorted(document, tokens).clamp(max=document.shape[-1] - 1)
    return torch.where(document.gather(-1, place) == tokens, weight.gather(-1, place), 0.0)
