"""DocumentFrequency: the counts are those of a loop, however the documents come."""

import math
import os
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_losses import DocumentFrequency
from sparse_losses.vocabulary.document_frequency import tokenizer_sha256

V = 6
documents = st.lists(st.lists(st.integers(0, V - 1), max_size=5), max_size=8)


def loop(docs, vocab_size=V):
    """Every document counts each of its tokens once."""
    counts = Counter(token for doc in docs for token in set(doc))
    return [counts[token] for token in range(vocab_size)]


def padded(docs, pad=-100):
    width = max(map(len, docs), default=0)
    ids = [doc + [pad] * (width - len(doc)) for doc in docs]
    mask = [[1] * len(doc) + [0] * (width - len(doc)) for doc in docs]
    shape = (len(docs), width)
    return torch.tensor(ids).long().reshape(shape), torch.tensor(mask).reshape(shape)


def counted(*batches, **options):
    counter = DocumentFrequency(V, **options)
    for docs in batches:
        counter.update(*padded(docs))
    return counter


def same(one, other):
    numbers = [(each.df.tolist(), each.num_documents, each.num_tokens) for each in (one, other)]
    return numbers[0] == numbers[1]


@given(documents, st.integers(1, 4), st.randoms(use_true_random=False))
def test_counts_equal_a_loop_over_documents_however_they_come(docs, size, random):
    counter = counted(docs)
    assert counter.df.tolist() == loop(docs)
    assert (counter.num_documents, counter.num_tokens) == (len(docs), sum(map(len, docs)))
    shuffled = random.sample(docs, len(docs))
    batches = [shuffled[i : i + size] for i in range(0, len(docs), size)]
    assert same(counted(*batches), counted(docs))
    merged = DocumentFrequency(V)
    for batch in batches:
        merged.merge(counted(batch))
    assert same(merged, counted(docs))


def test_mean_length_counts_attended_tokens_with_repeats_and_needs_a_document():
    counter = counted([[1, 1, 1], [2], []], [[3, 4]])
    assert counter.mean_length == 6 / 4
    with pytest.raises(ValueError, match="at least one document for `mean_length`"):
        _ = DocumentFrequency(V).mean_length
    with pytest.raises(ValueError, match="at least one document"):
        DocumentFrequency(V).idf()
    with pytest.raises(ValueError, match="'bm25', 'standard', got 'plain'"):
        counter.idf("plain")


@pytest.mark.parametrize(("size", "sha"), [(V + 1, "a"), (V, "b"), (V, None)])
def test_merge_refuses_another_vocabulary(size, sha):
    name = "vocab_size" if size > V else "tokenizer_sha256"
    with pytest.raises(ValueError, match=f"equal `{name}` to merge"):
        counted(tokenizer_sha256="a").merge(DocumentFrequency(size, tokenizer_sha256=sha))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16])
def test_ids_may_be_any_integers_and_the_mask_any_zero_one_dtype(dtype):
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]], dtype=dtype)
    for integer in (torch.uint8, torch.int32, torch.int64):
        counter = DocumentFrequency(V)
        counter.update(torch.tensor([[1, 2, 7], [2, 2, 5]], dtype=integer), mask)
        assert counter.df.tolist() == loop([[1, 2], [2, 5]])


@pytest.mark.parametrize("bad", [V, -1, -100])
def test_an_attended_id_outside_the_vocabulary_changes_nothing(bad):
    counter = counted([[1, 2]])
    with pytest.raises(ValueError, match=rf"V = {V}, got {bad}\b"):
        counter.update(torch.tensor([[0, 1], [2, bad]]), torch.ones(2, 2))
    assert same(counter, counted([[1, 2]]))


@given(documents.filter(len))
def test_idf_is_the_formula_for_every_token(docs):
    counter, n, df = counted(docs), len(docs), loop(docs)
    bm25 = [math.log(1 + (n - d + 0.5) / (d + 0.5)) for d in df]
    standard = [math.log(n / (d + 1)) for d in df]
    np.testing.assert_allclose(counter.idf(), bm25, rtol=1e-12)
    np.testing.assert_allclose(counter.idf("standard"), standard, rtol=1e-12, atol=1e-15)
    assert counter.idf().dtype == counter.idf("standard").dtype == torch.float64


def test_a_saved_file_keeps_its_mode_and_only_files_are_replaced(tmp_path):
    path = tmp_path / "counts"
    counted([[1, 2]]).save(path)
    path.chmod(0o600)
    counted([[1]]).save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="to be a regular file or a new one"):
        counted([[1]]).save(tmp_path)


def test_error_while_saving_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "counts"
    counted([[1, 2]]).save(path)
    old = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("No space left")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="No space left"):
        counted([[1]]).save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "sha"), [("counts.npz", None), ("counts", "e3b0c442")])
def test_loaded_counter_equals_the_saved_one(tmp_path, name, sha):
    counter = counted([[1, 2], [2], []], tokenizer_sha256=sha)
    counter.save(tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    loaded = DocumentFrequency.load(str(tmp_path / name))
    assert same(loaded, counter)
    assert (loaded.vocab_size, loaded.tokenizer_sha256) == (V, sha)
    loaded.update(*padded([[5]]))
    assert loaded.merge(counter).df.tolist() == loop([[1, 2], [2], [], [5], [1, 2], [2], []])


def _archive(**changes):
    arrays = {"df": np.zeros(2, np.int64), "num_documents": 3, "vocab_size": 2, "num_tokens": 4}
    arrays |= {"tokenizer_sha256": ""} | changes
    return {name: value for name, value in arrays.items() if value is not None}


OTHERS = [{"df": df} for df in (None, np.zeros(2), np.array([0, 4]), np.array([0, -1]))]
OTHERS += [{"df": np.array([{}, {}], dtype=object)}, {"num_tokens": 3, "df": np.array([2, 2])}]
OTHERS += [{"num_tokens": -7}, {"num_documents": 1.5}, {"num_documents": -1}]
OTHERS += [{"vocab_size": 3}, {"vocab_size": 2.0}, {"df": np.zeros(1000, np.int64)}]
OTHERS += [{"tokenizer_sha256": np.zeros(3)}, {"num_documents": None}, {"vocab_size": None}]


@pytest.mark.parametrize("changes", OTHERS)
def test_other_archives_are_refused(tmp_path, changes):
    np.savez(tmp_path / "other.npz", **_archive(**changes))
    with pytest.raises(ValueError, match=r"other\.npz is not a DocumentFrequency file"):
        DocumentFrequency.load(tmp_path / "other.npz")


def test_counts_of_another_size_are_refused(tmp_path):
    counted([[1, 2]]).save(tmp_path / "counts.npz")
    assert DocumentFrequency.load(tmp_path / "counts.npz", vocab_size=V).vocab_size == V
    with pytest.raises(ValueError, match=f"expected vocab_size = 9, got {V}"):
        DocumentFrequency.load(tmp_path / "counts.npz", vocab_size=9)


def test_it_counts_whatever_the_default_device(tmp_path):
    batch = padded([[1, 2], [2]])
    with torch.device("meta"):
        counter = DocumentFrequency(V)
        counter.update(*batch)
        counter.save(tmp_path / "counts.npz")
        loaded = DocumentFrequency.load(tmp_path / "counts.npz")
    assert same(loaded, counted([[1, 2], [2]]))


def test_truncated_file_is_refused(tmp_path):
    path = tmp_path / "counts.npz"
    counted([[1, 2], [2]], tokenizer_sha256="abc").save(path)
    content = path.read_bytes()
    for damaged in (b"counts", *(content[:end] for end in range(0, len(content), 7))):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"counts\.npz is not a DocumentFrequency file"):
            DocumentFrequency.load(path)


def test_an_old_file_without_the_number_of_tokens_loads(tmp_path):
    np.savez(tmp_path / "old.npz", **_archive(df=np.array([3, 1]), num_tokens=None))
    old = DocumentFrequency.load(tmp_path / "old.npz")
    assert (old.df.tolist(), old.num_documents, old.num_tokens) == ([3, 1], 3, None)
    new = DocumentFrequency(2)
    new.update(torch.tensor([[0, 1]]), torch.ones(1, 2))
    for counter in (old, new.merge(old), old.merge(new)):
        counter.save(tmp_path / "new.npz")
        loaded = DocumentFrequency.load(tmp_path / "new.npz")
        assert same(loaded, counter)
        assert loaded.idf().isfinite().all()
        with pytest.raises(ValueError, match=r"`num_tokens` for .*an old file"):
            _ = loaded.mean_length


class Tokenizer(dict):
    def get_vocab(self):
        return self


def test_load_checks_the_tokenizer_by_its_pairs_of_token_and_id(tmp_path):
    ours, other = Tokenizer({"가": 0, "b": 1}), Tokenizer({"b": 0, "가": 1})
    assert tokenizer_sha256(ours) == tokenizer_sha256(Tokenizer({"b": 1, "가": 0}))
    path = tmp_path / "counts.npz"
    counted([[1, 2]], tokenizer_sha256=tokenizer_sha256(ours)).save(path)
    assert same(DocumentFrequency.load(path, tokenizer=ours), counted([[1, 2]]))
    with pytest.raises(ValueError, match=r"counts\.npz .*tokenizer") as error:
        DocumentFrequency.load(path, tokenizer=other)
    assert tokenizer_sha256(ours) in str(error.value)
    counted([[1]]).save(path)
    with pytest.raises(ValueError, match="got None"):
        DocumentFrequency.load(path, tokenizer=ours)
