"""BM25 of a batch: the formula for every pair, what counts, and what never happens on a device."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import bm25_scores
from tests.instruments import default_dtype

V = 7
IDF = torch.linspace(0.25, 4.0, V, dtype=torch.float64)
texts = st.lists(
    st.lists(st.tuples(st.integers(0, V - 1), st.booleans()), max_size=9), min_size=1, max_size=4
)


def loop(queries, documents, *, mean_length, k1=1.2, b=0.75, ignored=(), idf=IDF):
    """BM25 of lists of attended ids, term by term."""
    scores = np.zeros((len(queries), len(documents)))
    for row, query in enumerate(queries):
        for column, document in enumerate(documents):
            kept = Counter(token for token in document if token not in ignored)
            length = sum(kept.values())
            total = 0.0
            for token in query:  # a repeat counts again
                if f := kept[token]:
                    room = f + k1 * (1 - b + b * length / mean_length)
                    total += float(idf[token]) * f * (k1 + 1) / room
            scores[row, column] = total
    return scores


def padded(rows):
    """Ids and mask of lists of (id, attended); what is not attended holds any id, -100 too."""
    longest = max(map(len, rows))
    ids = [[id if on else -100 for id, on in row] + [-1] * (longest - len(row)) for row in rows]
    mask = [[on for _, on in row] + [False] * (longest - len(row)) for row in rows]
    shape = (len(rows), longest)
    return torch.tensor(ids).long().reshape(shape), torch.tensor(mask).bool().reshape(shape)


def attended(rows):
    return [[id for id, on in row if on] for row in rows]


@given(
    texts,
    texts,
    st.floats(0.5, 20),
    st.floats(0, 4),
    st.floats(0, 1),
    st.sets(st.integers(0, V - 1)),
)
def test_scores_equal_the_formula(queries, documents, mean_length, k1, b, ignored):
    options = {"mean_length": mean_length, "k1": k1, "b": b}
    expected = loop(attended(queries), attended(documents), ignored=ignored, **options)
    tensors = *padded(queries), *padded(documents), IDF
    got = bm25_scores(*tensors, ignore_token_ids=ignored, **options)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    # The same documents as each query's own.
    ids, mask = (x.expand(len(queries), *x.shape) for x in padded(documents))
    own = bm25_scores(*padded(queries), ids, mask, IDF, ignore_token_ids=ignored, **options)
    torch.testing.assert_close(own, got)


def test_scores_do_not_depend_on_the_number_of_documents():
    """Thousands are taken in blocks, which end within these."""
    torch.manual_seed(0)
    query, documents = torch.randint(V, (64, 64)), torch.randint(V, (1500, 4))

    def score(part):
        return bm25_scores(query, query > 1, part, part > 0, IDF, mean_length=3)

    one_by_one = torch.cat([score(part) for part in documents.split(300)], dim=1)
    assert torch.equal(score(documents), one_by_one)


@pytest.mark.parametrize(
    ("query", "document"), [((0, 3), (2, 3)), ((2, 0), (2, 3)), ((2, 3), (0, 3)), ((2, 3), (2, 0))]
)
def test_empty_query_or_document_scores_zero(query, document):
    ids = [torch.zeros(shape, dtype=torch.long) for shape in (query, document)]
    got = bm25_scores(ids[0], torch.ones(query), ids[1], torch.ones(document), IDF, mean_length=2)
    assert got.shape == (query[0], document[0])
    assert 0 in (*query[:1], *document[:1]) or not got.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_result_is_float32_without_gradient_whatever_the_default_dtype(dtype):
    ids, idf = torch.tensor([[1, 2, 3]]), IDF.to(dtype).requires_grad_()
    with default_dtype(dtype):
        got = bm25_scores(ids, ids > 0, ids, ids > 0, idf, mean_length=3)
    assert (got.dtype, got.requires_grad) == (torch.float32, False)
    assert got.item() == pytest.approx(idf.detach().double()[1:4].sum().item(), rel=1e-6)


def test_compiles_as_one_graph():
    ids = torch.tensor([[1, 2, 3], [4, 4, 0]])

    def score(query, document):
        return bm25_scores(query, query > 0, document, document > 0, IDF, mean_length=2.5)

    compiled = torch.compile(score, fullgraph=True, backend="eager")
    for documents in (ids, ids[:, None].expand(2, 2, 3)):
        assert torch.equal(compiled(ids, documents), score(ids, documents))
