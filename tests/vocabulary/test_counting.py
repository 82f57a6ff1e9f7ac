"""The vocabulary command: the counts are those of a loop, also after an interruption."""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparse_losses.vocabulary import DocumentFrequency, counting
from sparse_losses.vocabulary.__main__ import main

datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "서울", "Köln", "naïve", "[CLS]", "zebra", "x1"]
TEXTS = [" ".join(WORDS[(i * k) % 12] for k in range(1, 2 + i % 9)) for i in range(40)]
SIZE = 60


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer.json that asks for special tokens, padding and truncation."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=SIZE, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.enable_padding(length=16)
    made.enable_truncation(4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(counting, "BATCH", 3)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def text_file(path, texts=TEXTS):
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def rows_file(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def zipped(path):
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return Path(f"{path}.gz")


def dataset(folder, **columns):
    data = datasets.Dataset.from_dict(columns or {"text": TEXTS, "n": list(range(40))})
    data.with_format("numpy").save_to_disk(folder)
    return folder


def splits(folder):
    parts = {"train": TEXTS[:15], "test": TEXTS[15:]}
    made = {name: datasets.Dataset.from_dict({"text": part}) for name, part in parts.items()}
    datasets.DatasetDict(made).save_to_disk(folder)
    return folder


def count(*inputs, tokenizer, output, options=()):
    required = ["--tokenizer", str(tokenizer), "--output", str(output)]
    return main(["count", *map(str, inputs), *required, *options])


def is_count_of(path, texts, tokenizer, max_length=None):
    """Whether the file holds the counts of a plain loop, and nothing lies beside it."""
    plain = tokenizers.Tokenizer.from_file(str(tokenizer))
    plain.no_padding()
    plain.no_truncation()
    ids = [plain.encode(text, add_special_tokens=False).ids[:max_length] for text in texts]
    expected = Counter(token for document in ids for token in set(document))
    counter = DocumentFrequency.load(path, tokenizer=plain)
    return (
        counter.df[:SIZE].tolist() == [expected[token] for token in range(SIZE)]
        and counter.num_documents == len(texts)
        and counter.num_tokens == sum(map(len, ids))
        and not [name for name in os.listdir(path.parent) if "partial" in name or name[0] == "."]
    )


def test_counts_of_all_kinds_of_inputs_and_tokenizers_equal_a_loop(tokenizer, tmp_path):
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), pad_token="[PAD]")
    fast.save_pretrained(tmp_path / "model")
    link = tmp_path / "link.jsonl"
    link.symlink_to(rows_file(tmp_path / "blob"))  # as in a cache: the kind is in the link's name
    inputs = [
        link,
        text_file(tmp_path / "a.txt"),
        rows_file(tmp_path / "a.JSONL"),
        rows_file(tmp_path / "a.json"),
        zipped(text_file(tmp_path / "b.txt")),
        zipped(rows_file(tmp_path / "c.ndjson")),
        dataset(tmp_path / "data"),
        splits(tmp_path / "splits"),
    ]
    one, two = tmp_path / "made" / "one.npz", tmp_path / "two.npz"
    assert count(*inputs, inputs[0], tokenizer=tokenizer, output=one) == 0
    assert count(*reversed(inputs), tokenizer=tmp_path / "model", output=two) == 0
    assert is_count_of(one, TEXTS * len(inputs), tokenizer)  # what is named twice is counted once
    assert is_count_of(two, TEXTS * len(inputs), tokenizer)
    assert DocumentFrequency.load(two, tokenizer=fast).num_documents == 40 * len(inputs)


def test_slow_tokenizers_count_too(tmp_path):
    slow = transformers.ByT5Tokenizer()
    slow.save_pretrained(tmp_path / "bytes")
    path, output = text_file(tmp_path / "a.txt", ["abba", "Köln", "", "b"]), tmp_path / "df.npz"
    options = ["--max-length", "4", "--vocab-size", "500"]  # that of a model
    assert count(path, tokenizer=tmp_path / "bytes", output=output, options=options) == 0
    counter = DocumentFrequency.load(output, tokenizer=slow, vocab_size=500)
    ids = [slow(text, add_special_tokens=False)["input_ids"][:4] for text in ("abba", "Köln", "b")]
    expected = Counter(token for document in ids for token in set(document))
    assert counter.df.tolist() == [expected[token] for token in range(counter.vocab_size)]
    assert (counter.num_documents, counter.num_tokens) == (3, 9)


def test_blank_lines_line_ends_and_byte_order_marks_are_no_text(tokenizer, tmp_path):
    path, output = tmp_path / "a.txt", tmp_path / "df.npz"
    path.write_bytes("\ufeffcat sat\r\n\n  \nKöln\n\nthe\nmat".encode())
    assert count(path, tokenizer=tokenizer, output=output) == 0
    assert is_count_of(output, ["cat sat", "Köln", "the", "mat"], tokenizer)


def test_fields_are_joined_in_their_order_and_empty_texts_are_documents(tokenizer, tmp_path):
    path, output = tmp_path / "a.jsonl", tmp_path / "df.npz"
    path.write_text('{"title": "the cat", "body": "sat"}\n\n{"title": "", "body": ""}\n')
    data = dataset(tmp_path / "data", body=["on"], title=["mat"], n=[1])
    options = ["--field", "title", "--field", "body", "--max-length", "2"]  # the order decides
    assert count(path, data, tokenizer=tokenizer, output=output, options=options) == 0
    assert is_count_of(output, ["the cat sat", " ", "mat on"], tokenizer, max_length=2)


@contextmanager
def stopped_after(batches):
    """Ctrl-C in the next batch."""
    update, left = DocumentFrequency._update_ragged, iter(range(batches))

    def update_or_stop(counter, documents):
        if next(left, None) is None:
            raise KeyboardInterrupt
        update(counter, documents)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DocumentFrequency, "_update_ragged", update_or_stop)
        yield


@pytest.mark.parametrize("batches", [0, 3, 5, 20])
def test_interrupted_count_continues_after_the_last_whole_input(
    batches, tokenizer, tmp_path, capsys
):
    inputs = [text_file(tmp_path / "a.txt", TEXTS[:12]), rows_file(tmp_path / "b.jsonl")]
    inputs.append(dataset(tmp_path / "data"))  # 4, 14 and 14 batches
    output, partial = tmp_path / "df.npz", tmp_path / "df.npz.partial"
    with stopped_after(batches):
        assert count(*inputs, tokenizer=tokenizer, output=output) == 130
    assert "repeat the command to continue" in capsys.readouterr().err
    assert not output.exists()
    done = (batches >= 4) + (batches >= 18)
    assert partial.exists() == (done > 0)
    with stopped_after(32 - [0, 4, 18][done]):  # neither more nor fewer batches are left
        assert count(*inputs, tokenizer=tokenizer, output=output) == 0
    documents = [0, 12, 52][done]
    assert (f"Continuing after {documents} documents" in capsys.readouterr().err) == (done > 0)
    assert is_count_of(output, TEXTS[:12] + TEXTS * 2, tokenizer)


def test_unfinished_count_of_something_else_is_refused(tokenizer, tmp_path, capsys):
    first, second = text_file(tmp_path / "a.txt"), text_file(tmp_path / "b.txt")
    output, partial = tmp_path / "df.npz", tmp_path / "df.npz.partial"
    with stopped_after(20):
        assert count(first, second, tokenizer=tokenizer, output=output) == 130
    state = partial.read_text()
    lower = tokenizers.Tokenizer.from_file(str(tokenizer))
    lower.normalizer = tokenizers.normalizers.Lowercase()
    lower.save(str(tmp_path / "lower.json"))
    for inputs, made_with, options in [
        ([second], tokenizer, []),
        ([first, second], tmp_path / "lower.json", []),
        ([first, second], tokenizer, ["--max-length", "3"]),
        ([first, second], tokenizer, ["--field", "body"]),
    ]:
        assert count(*inputs, tokenizer=made_with, output=output, options=options) == 2
        assert "restart: it was made with other inputs or options" in capsys.readouterr().err
    text_file(first, [*TEXTS, "more"])
    assert count(first, second, tokenizer=tokenizer, output=output) == 2
    settings, _, numbers, df = json.loads(state)
    for damaged in (
        state[:99],
        "{}",
        json.dumps([settings, None, numbers, df]),
        json.dumps([settings, {}, numbers, [-1, *df[1:]]]),
        json.dumps([settings, {}, [1, numbers[1]], df]),  # fewer documents than one token is in
    ):
        partial.write_text(damaged)
        assert count(first, second, tokenizer=tokenizer, output=output) == 2
        assert "partial, start over with --restart: " in capsys.readouterr().err
    assert count(first, second, tokenizer=tokenizer, output=output, options=["--restart"]) == 0
    assert is_count_of(output, [*TEXTS, "more", *TEXTS], tokenizer)


GOOD = '{"text": "the cat"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD * 9 + "\n{'text': 1}\n", ":11: Expecting property name"),
        ("a.jsonl", GOOD * 9 + "[1]\n" + GOOD, ":10: expected a text in 'text' (--field), got [1]"),
        ("a.jsonl", "[" * 100_000, ":1: maximum recursion depth exceeded"),
        ("a.jsonl", GOOD * 9 + '{"text": "\\ud800"}\n', ":10: 'utf-8' codec can't encode"),
        ("a.txt", b"a\n" * 200 + b"caf\xe9\n", ":201: 'utf-8' codec can't decode"),
        ("a.txt", "\n \r\n\n", "expected at least one document, got none in"),
        ("a.txt.gz", "no gzip", ":0: Not a gzipped file"),
    ],
)
def test_wrong_documents_are_errors_with_file_and_line(
    name, content, message, tokenizer, tmp_path, capsys
):
    path, output = tmp_path / name, tmp_path / "df.npz"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert count(path, tokenizer=tokenizer, output=output) == 2
    error = capsys.readouterr().err
    assert f"error: {path}{message}" in error if message[0] == ":" else message in error
    assert os.listdir(tmp_path) == [name]


def test_wrong_commands_are_errors(tokenizer, tmp_path, capsys):
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "df.npz"
    data = dataset(tmp_path / "data", text=["a", None])
    (tmp_path / "wrong.json").write_text("{}")
    folder = "expected a file or a folder of Dataset.save_to_disk, got "
    for inputs, made_with, out, options, message in [
        (["missing.txt"], tokenizer, output, [], folder),
        ([data], tokenizer, output, [], "data:2: expected a text in 'text' (--field), got {'text"),
        ([data], tokenizer, output, ["--field", "body"], "data:0: "),
        ([path], tokenizer, output, ["--vocab-size", "5"], "expected --vocab-size of at least"),
        ([path], tokenizer, output, ["--max-length", "0"], "--max-length` to be an integer >= 1"),
        ([path], tmp_path / "wrong.json", output, [], "cannot load the tokenizer"),
        ([path], tokenizer, tmp_path, ["--overwrite"], f"{tmp_path} exists"),
        ([path], tokenizer, path, ["--overwrite"], "expected --output to differ"),
    ]:
        assert count(*inputs, tokenizer=made_with, output=out, options=options) == 2
        assert message in capsys.readouterr().err
    assert not output.exists()


def test_result_is_overwritten_only_on_request(tokenizer, tmp_path, capsys):
    one, two = text_file(tmp_path / "a.txt"), text_file(tmp_path / "b.txt", TEXTS[:5])
    output = tmp_path / "df.npz"
    assert count(one, tokenizer=tokenizer, output=output) == 0
    assert count(two, tokenizer=tokenizer, output=output) == 2
    assert "df.npz exists: add --overwrite" in capsys.readouterr().err
    assert is_count_of(output, TEXTS, tokenizer)
    assert count(two, tokenizer=tokenizer, output=output, options=["--overwrite"]) == 0
    assert is_count_of(output, TEXTS[:5], tokenizer)
    assert "100%" in capsys.readouterr().err  # progress


def test_show_lists_the_most_frequent_tokens_by_name(tokenizer, tmp_path, capsys):
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "df.npz"
    assert count(path, tokenizer=tokenizer, output=output) == 0
    capsys.readouterr()
    assert main(["show", str(output), "--tokenizer", str(tokenizer), "--top", str(SIZE)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    counter = DocumentFrequency.load(output)
    vocabulary = tokenizers.Tokenizer.from_file(str(tokenizer)).get_vocab()
    rows = [line for line in lines if line[0].isdecimal() and len(line) == 5]
    assert [int(df) for _, df, *_ in rows] == sorted(
        filter(None, counter.df.tolist()), reverse=True
    )
    for number, df, share, idf, token in rows:
        assert (int(number), int(df)) == (vocabulary[token], counter.df[vocabulary[token]])
        assert share == f"{int(df) / 40:.1%}"
        assert float(idf) == pytest.approx(float(counter.idf()[int(number)]), abs=0.0051)
    DocumentFrequency(SIZE, tokenizer_sha256="abc").save(tmp_path / "other.npz")
    assert main(["show", str(tmp_path / "other.npz"), "--tokenizer", str(tokenizer)]) == 2
    assert "got 'abc'" in capsys.readouterr().err


def test_missing_packages_are_named(tokenizer, tmp_path, monkeypatch, capsys):
    path, folder = text_file(tmp_path / "a.txt"), dataset(tmp_path / "data")
    for package, inputs, made_with in [
        ("tokenizers", [path], tokenizer),
        ("transformers", [path], "bert-base-uncased"),
        ("datasets", [folder], tokenizer),
    ]:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert count(*inputs, tokenizer=made_with, output=tmp_path / "df.npz") == 2
        assert f"expected the package {package}: pip install" in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="needs dask[distributed]"
)
def test_example_for_dask_counts_like_the_command(tokenizer, tmp_path):
    """Two files in two processes: one counter a partition, merged."""
    for part, texts in enumerate((TEXTS[:30], TEXTS[30:])):
        zipped(rows_file(tmp_path / f"part-{part}.jsonl", texts))
    arguments = [tmp_path / "part-*.jsonl.gz", "--tokenizer", tokenizer, "--field", "text"]
    script = ROOT / "examples" / "document_frequency_dask.py"
    ran = subprocess.run(
        [sys.executable, script, *arguments, "--output", tmp_path / "dask.npz"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert "40 documents of " in ran.stdout
    assert is_count_of(tmp_path / "dask.npz", TEXTS, tokenizer)
