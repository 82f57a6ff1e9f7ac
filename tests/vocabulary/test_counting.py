"""The vocabulary command: the counts are those of a loop, whatever happens on the way."""

import gzip
import importlib.util
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from sparse_losses.vocabulary import DocumentFrequency, counting
from sparse_losses.vocabulary import __main__ as command
from sparse_losses.vocabulary.__main__ import main
from sparse_losses.vocabulary.counting import Count, UserError, find_sources, load_tokenizer
from sparse_losses.vocabulary.document_frequency import write_archive

datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "서울", "Köln", "naïve", "[CLS]", "zebra", "x1"]
TEXTS = [" ".join(WORDS[(i * k) % 12] for k in range(1, 2 + i % 9)) for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer.json that asks for special tokens, padding and truncation."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=60, special_tokens=special, show_progress=False
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
    monkeypatch.setattr(counting, "BATCH_ROWS", 3)
    monkeypatch.setattr(counting, "SAVE_SECONDS", 0.0)


def encoded(texts, tokenizer, max_length=None):
    """The ids of every text, one text at a time."""
    plain = tokenizers.Tokenizer.from_file(str(tokenizer))
    plain.no_padding()
    plain.no_truncation()
    return [plain.encode(text, add_special_tokens=False).ids[:max_length] for text in texts]


def loop(texts, tokenizer, **options):
    """The plain count: a Counter over the set of every document's ids."""
    ids = encoded(texts, tokenizer, **options)
    counts = Counter(token for document in ids for token in set(document))
    return [counts[token] for token in range(60)]


def rows_file(path, texts=TEXTS, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def text_file(path, texts=TEXTS):
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def zipped(path):
    with gzip.open(f"{path}.gz", "wb") as file:
        file.write(path.read_bytes())
    return Path(f"{path}.gz")


def dataset(folder, texts=TEXTS):
    datasets.Dataset.from_dict({"text": texts, "n": list(range(len(texts)))}).save_to_disk(folder)
    return folder


def splits(folder):
    one, other = (datasets.Dataset.from_dict({"text": part}) for part in (TEXTS[:15], TEXTS[15:]))
    datasets.DatasetDict({"train": one, "test": other}).save_to_disk(folder)
    return folder


def count(*inputs, tokenizer, output, options=()):
    required = ["--tokenizer", str(tokenizer), "--output", str(output)]
    return main(["count", *map(str, inputs), *required, *options])


def refused(capsys, says, *inputs, **arguments):
    """Insist that the command says so, in a line, and does nothing."""
    assert count(*inputs, **arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def counted(path, texts, tokenizer, **options):
    """Whether the file holds the loop's counts, and nothing lies beside it."""
    counter = DocumentFrequency.load(path)
    beside = [name for name in os.listdir(path.parent) if "partial" in name or name[0] == "."]
    return (
        counter.df.tolist()[:60] == loop(texts, tokenizer, **options)
        and counter.num_documents == len(texts)
        and counter.num_tokens == sum(map(len, encoded(texts, tokenizer, **options)))
        and beside == []
    )


MADE = {
    "text": lambda folder: text_file(folder / "a.txt"),
    "jsonl": lambda folder: rows_file(folder / "a.jsonl"),
    "json": lambda folder: rows_file(folder / "a.json"),
    "text.gz": lambda folder: zipped(text_file(folder / "a.txt")),
    "jsonl.gz": lambda folder: zipped(rows_file(folder / "a.ndjson")),
    "dataset": lambda folder: dataset(folder / "data"),
    "splits": lambda folder: splits(folder / "data"),
}


@pytest.mark.parametrize("kind", MADE)
def test_the_count_is_that_of_a_loop_for_every_kind_of_input(kind, tokenizer, tmp_path):
    path = MADE[kind](tmp_path)
    output = tmp_path / "made" / "df.npz"
    assert count(path, tokenizer=tokenizer, output=output) == 0
    assert counted(output, TEXTS, tokenizer)


@pytest.fixture
def folder(tokenizer, tmp_path, monkeypatch):
    """The same tokenizer as a folder of transformers."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer), unk_token="[UNK]", pad_token="[PAD]"
    )
    fast.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_lines_end_as_they_may_and_blank_ones_and_a_mark_at_the_start_are_no_text(
    tokenizer, tmp_path, capsys
):
    path, output = tmp_path / "a.txt", tmp_path / "df.npz"
    path.write_bytes("\ufeffcat sat\r\n\n  \nKöln\n\nthe\nmat".encode())
    assert count(path, tokenizer=tokenizer, output=output) == 0
    assert counted(output, ["cat sat", "Köln", "the", "mat"], tokenizer)
    assert "Blank lines skipped: 3." in capsys.readouterr().err


@pytest.mark.parametrize("limit", [1, 10, 10_000])
def test_the_count_does_not_depend_on_the_batches(limit, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(counting, "BATCH_ROWS", 1000)
    monkeypatch.setattr(counting, "BATCH_CHARACTERS", limit)
    path, output = rows_file(tmp_path / "a.jsonl"), tmp_path / "df.npz"
    assert count(path, tokenizer=tokenizer, output=output) == 0
    assert counted(output, TEXTS, tokenizer)


def test_fields_are_joined_and_empty_texts_are_documents(tokenizer, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "the cat", "body": "sat"}\n\n{"title": "", "body": ""}\n')
    fields = ["--field", "title", "--field", "body"]
    assert count(path, tokenizer=tokenizer, output=tmp_path / "a.npz", options=fields) == 0
    assert counted(tmp_path / "a.npz", ["the cat sat", " "], tokenizer)
    said = capsys.readouterr().err
    assert "Blank lines skipped: 1." in said
    assert "Documents without tokens (included in the count): 1." in said


def test_columns_of_a_dataset_are_joined_in_the_order_asked_for(tokenizer, tmp_path):
    columns = {"b": ["the", "cat"], "a": ["sat", "on"], "n": [1, 2]}
    datasets.Dataset.from_dict(columns).with_format("numpy").save_to_disk(tmp_path / "data")
    options = ["--field", "b", "--field", "a", "--max-length", "1"]  # the order decides
    output = tmp_path / "df.npz"
    assert count(tmp_path / "data", tokenizer=tokenizer, output=output, options=options) == 0
    assert counted(output, ["the sat", "cat on"], tokenizer, max_length=1)


def test_documents_are_cut_only_if_asked_and_the_vocabulary_may_be_the_models(tokenizer, tmp_path):
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "a.npz"
    options = ["--max-length", "2", "--vocab-size", "100"]
    assert count(path, tokenizer=tokenizer, output=output, options=options) == 0
    assert counted(output, TEXTS, tokenizer, max_length=2)
    assert loop(TEXTS, tokenizer) != loop(TEXTS, tokenizer, max_length=2)
    assert DocumentFrequency.load(output, vocab_size=100).df[60:].sum() == 0


def test_several_inputs_in_any_order_and_a_folder_of_transformers_count_as_one(
    tokenizer, folder, tmp_path, capsys
):
    inputs = [make(tmp_path) for kind, make in MADE.items() if kind not in ("dataset", "text.gz")]
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    assert count(*inputs, tokenizer=tokenizer, output=one) == 0
    assert "200 documents" in capsys.readouterr().err
    cut = ["--max-length", "2"]
    assert count(*reversed(inputs), tokenizer=folder, output=two, options=cut) == 0
    assert counted(one, TEXTS * len(inputs), tokenizer)
    assert counted(two, TEXTS * len(inputs), tokenizer, max_length=2)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    for same in (fast, tokenizers.Tokenizer.from_file(str(tokenizer))):
        assert DocumentFrequency.load(two, tokenizer=same).num_documents == 200
    options = ["--overwrite"]  # one split, by its folder
    assert count(tmp_path / "data" / "test", tokenizer=folder, output=one, options=options) == 0
    assert counted(one, TEXTS[15:], tokenizer)


def test_a_slow_tokenizer_counts_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    slow = transformers.ByT5Tokenizer()
    assert not hasattr(slow, "backend_tokenizer")
    slow.save_pretrained(tmp_path / "bytes")
    path, output = text_file(tmp_path / "a.txt", ["abba", "Köln", "", "b"]), tmp_path / "df.npz"
    options = ["--max-length", "4"]
    assert count(path, tokenizer=tmp_path / "bytes", output=output, options=options) == 0
    counter = DocumentFrequency.load(output, tokenizer=slow)
    ids = [slow(text, add_special_tokens=False)["input_ids"][:4] for text in ("abba", "Köln", "b")]
    expected = Counter(token for document in ids for token in set(document))
    assert counter.df.tolist() == [expected[token] for token in range(counter.vocab_size)]
    assert (counter.num_documents, counter.num_tokens) == (3, 9)


def interrupted(at, arguments):
    """Run the command up to this line of the two modules; how many lines it came to."""
    files = {counting.__file__, sys.modules[DocumentFrequency.__module__].__file__}
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        code = main(arguments)
    finally:
        sys.settrace(before)
    assert code == (130 if lines >= at else 0)
    return lines


# Between opening a file and the `with` that closes it, which only the end of the process does then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_at_any_line_the_count_ends_with_the_same_file(tokenizer, tmp_path):
    texts, data, output = tmp_path / "a.jsonl.gz", tmp_path / "data", tmp_path / "df.npz"
    zipped(rows_file(tmp_path / "a.jsonl", ["", *TEXTS[:5]]))
    dataset(data, TEXTS[5:10])
    inputs = [str(text_file(tmp_path / "b.txt", TEXTS[10:14])), str(texts), str(data)]
    arguments = ["count", *inputs, "--tokenizer", str(tokenizer), "--output", str(output)]
    arguments += ["--overwrite"]
    lines = interrupted(10**9, arguments)
    uninterrupted = output.read_bytes()
    stopped = range(1, lines, max(lines // 12, 1))
    for at in stopped:
        output.unlink(missing_ok=True)
        interrupted(at, arguments)
        interrupted(at, arguments)  # and again, not far from there
        assert main(arguments) == 0
        assert counted(output, ["", *TEXTS[:14]], tokenizer)
        assert output.read_bytes() == uninterrupted
    assert len(stopped) >= 12


@pytest.fixture
def ctrl_c():
    """Ctrl-C; a shell starts background jobs with the signal ignored, and they inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupt(monkeypatch, ctrl_c):
    """Ctrl-C after so many batches."""

    def after(batches):
        save, left = Count.save, iter(range(batches))

        def save_and_interrupt(self):
            save(self)
            if next(left, None) == batches - 1:
                ctrl_c()

        monkeypatch.setattr(Count, "save", save_and_interrupt)

    return after


def test_ctrl_c_says_what_is_kept_and_the_command_continues(
    tokenizer, tmp_path, interrupt, ctrl_c, monkeypatch, capsys
):
    path, output = text_file(tmp_path / "a.txt", ["", "the cat", *TEXTS]), tmp_path / "df.npz"
    with monkeypatch.context() as patch:
        patch.setattr(counting, "SAVE_SECONDS", 1e9)
        patch.setattr(Count, "_ids", lambda self, texts: ctrl_c())
        assert count(path, tokenizer=tokenizer, output=output) == 130
    assert "Stopped; nothing was saved yet." in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["a.txt"]
    interrupt(3)
    assert count(path, tokenizer=tokenizer, output=output) == 130
    said = capsys.readouterr().err
    assert f"Stopped; 8 documents are kept in {output}.partial. Repeat the command" in said
    assert not output.exists()
    with pytest.raises(ValueError, match="is not a DocumentFrequency file"):
        DocumentFrequency.load(f"{output}.partial")
    (tmp_path / ".df.npz.partial.0123").write_bytes(b"of a process killed while it saved")
    assert count(path, tokenizer=tokenizer, output=output) == 0
    said = capsys.readouterr().err
    assert "Continuing after 8 documents, " in said
    assert "% of the input." in said
    assert "Blank lines skipped: 1." in said  # before the interruption
    assert counted(output, ["the cat", *TEXTS], tokenizer)


def test_if_the_result_cannot_be_saved_the_counts_are_kept(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(counting, "SAVE_SECONDS", 1e9)
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "df.npz"
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device", str(output))
        patch.setattr(DocumentFrequency, "save", lambda self, path: (_ for _ in ()).throw(full))
        assert count(path, tokenizer=tokenizer, output=output) == 2
    assert Path(f"{output}.partial").exists()
    monkeypatch.setattr(Count, "_ids", None)  # nothing is left to count
    assert count(path, tokenizer=tokenizer, output=output) == 0
    assert counted(output, TEXTS, tokenizer)


def test_an_unfinished_count_with_other_settings_is_refused_until_restarted(
    tokenizer, tmp_path, interrupt, capsys
):
    path, more = rows_file(tmp_path / "a.jsonl"), rows_file(tmp_path / "b.jsonl")
    output = tmp_path / "df.npz"
    interrupt(2)
    assert count(path, tokenizer=tokenizer, output=output) == 130
    lower = tokenizers.Tokenizer.from_file(str(tokenizer))
    lower.normalizer = tokenizers.normalizers.Lowercase()
    lower.save(str(tmp_path / "lower.json"))
    os.rename(path, tmp_path / "moved.jsonl")
    for inputs, made_with, options, says in [
        ([more], tokenizer, [], ", is no input; "),
        ([more], tokenizer, [], "b.jsonl was no input, is "),
        ([more], tokenizer, ["--max-length", "3"], "--max-length was None, is 3"),
        ([more], tokenizer, ["--vocab-size", "99"], "--vocab-size was"),
        ([more], tokenizer, ["--field", "body"], "--field was text, is body"),
        ([more], tmp_path / "lower.json", [], "the tokenizer's SHA-256 was "),
    ]:
        capsys.readouterr()
        arguments = {"tokenizer": made_with, "output": output, "options": options}
        assert "--restart" in refused(capsys, says, *inputs, **arguments)
    rows_file(path, TEXTS[:30])
    says = "a.jsonl was 1669 bytes written at "
    refused(capsys, says, path, tokenizer=tokenizer, output=output)
    assert count(path, tokenizer=tokenizer, output=output, options=["--restart"]) == 0
    assert counted(output, TEXTS[:30], tokenizer)


def test_a_changed_dataset_and_a_damaged_partial_file_are_refused(
    tokenizer, tmp_path, interrupt, capsys
):
    output = tmp_path / "df.npz"
    interrupt(2)
    assert count(dataset(tmp_path / "d"), tokenizer=tokenizer, output=output) == 130
    dataset(tmp_path / "d", TEXTS[::-1])
    assert count(tmp_path / "d", tokenizer=tokenizer, output=output) == 2
    assert f"{tmp_path / 'd'} was " in capsys.readouterr().err
    Path(f"{output}.partial").write_bytes(b"PK")
    assert count(tmp_path / "d", tokenizer=tokenizer, output=output) == 2
    assert "df.npz.partial is damaged" in capsys.readouterr().err
    assert count(tmp_path / "d", tokenizer=tokenizer, output=output, options=["--restart"]) == 0
    assert counted(output, TEXTS, tokenizer)


@pytest.mark.parametrize(
    "changes",
    [
        {"df": [-1, *[0] * 9]},
        {"df": [1.0] * 10},
        {"df": [0] * 3},
        {"numbers": [5, 9, 0, 5, 5, 0]},
        {"numbers": [5, 9, 0, -5, 5, 0, 0]},
        {"numbers": [5, 9, 7, 0, 5, 0, 0]},
        {"numbers": [math.nan, 9, 0, 5, 5, 0, 0]},
        {"numbers": [0] * 7},
        {"settings": "[1]"},
        {"settings": "{"},
    ],
)
def test_a_partial_file_whose_numbers_cannot_be_is_refused(tokenizer, tmp_path, changes):
    rows_file(tmp_path / "a.jsonl", TEXTS)
    sources = find_sources([str(tmp_path / "a.jsonl")], [])
    begun, again = (
        Count(sources, load_tokenizer(str(tokenizer)), tmp_path / "df.npz") for _ in range(2)
    )
    begun.save()
    size = begun.counter.vocab_size
    df = np.array([3] + [0] * (size - 1))
    right = {
        "df": df,
        "numbers": np.array([5, 9, 0, 5, 5, 0, 0]),
        "settings": np.str_(json.dumps(begun.settings)),
    }
    write_archive(begun.partial, **right)
    assert again.resume()
    assert (again.kept, again.row, again.counter.num_tokens) == (5, 5, 9)
    (name, bad), before = *changes.items(), again.counter.df.clone()
    if name == "df" and len(bad) == 10:
        bad = bad + [0] * (size - 10)
    write_archive(begun.partial, **{**right, name: np.array(bad)})
    with pytest.raises(UserError, match=r"df.npz.partial is damaged: start over with --restart"):
        again.resume()
    assert torch.equal(again.counter.df, before)


GOOD = '{"text": "the cat"}\n'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", GOOD * 9 + "\n{'text': 1}\n", ":11: expected one JSON object per line, got: "),
        ("a.jsonl", GOOD * 9 + "[1]\n" + GOOD, ":10: expected one JSON object per line, got [1]"),
        ("a.jsonl", GOOD * 9 + '{"a": 1, "b": 2}\n', ":10: expected a field 'text' (--field), got"),
        ("a.jsonl", GOOD * 9 + '{"text": null}', ":10: expected 'text' to be a string, got None"),
        ("a.jsonl", '{"text": ["a"]}\n', ":1: expected 'text' to be a string, got ['a']"),
        ("a.jsonl", '{"text": 1.5}\n', ":1: expected 'text' to be a string, got 1.5"),
        ("a.jsonl", '{"text": true}\n', ":1: expected 'text' to be a string, got True"),
        ("a.jsonl", "[" * 100_000, ":1: maximum recursion depth exceeded"),
        ("a.jsonl", GOOD * 9 + '{"text": "\\ud800"}\n', ":10: expected UTF-8, got: 'utf-8' codec"),
        ("a.txt", b"a\n" * 200 + b"caf\xe9\n", ":201: expected UTF-8, got: 'utf-8' codec can't"),
        ("a.txt", "the cat".encode("utf-16"), ":1: expected UTF-8, got: 'utf-8' codec can't dec"),
        ("a.txt", "", "expected at least one document, got none in"),
        ("a.txt", "\n \r\n\n", "expected at least one document, got none in"),
        ("a.txt.gz", "no gzip", ":1: expected gzip data, got Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"a\n" * 500, mtime=0)[:-9], "expected gzip data, got"),
    ],
)
def test_a_wrong_document_is_named_by_file_and_line(
    name, content, says, tokenizer, tmp_path, capsys
):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    output = tmp_path / "df.npz"
    says = f"{name}{says}" if says[0] == ":" else says
    refused(capsys, says, path, tokenizer=tokenizer, output=output)
    assert not output.exists()


def test_a_wrong_line_after_an_interruption_has_its_number_in_the_file(
    tokenizer, tmp_path, interrupt, capsys
):
    path, output = tmp_path / "a.jsonl", tmp_path / "df.npz"
    path.write_text(GOOD * 30 + "{}\n" + GOOD)
    interrupt(2)
    assert count(path, tokenizer=tokenizer, output=output) == 130
    capsys.readouterr()
    assert count(path, tokenizer=tokenizer, output=output) == 2
    error = f"error: {path}:31: expected a field 'text' (--field), got []\n"
    assert capsys.readouterr().err.endswith(error)


def test_wrong_datasets_are_named(tokenizer, tmp_path, capsys):
    data = datasets.Dataset.from_dict({"text": ["a", None], "words": [["a"], ["b"]], "n": [1, 2]})
    data.save_to_disk(tmp_path / "data")
    data.select([]).save_to_disk(tmp_path / "none")
    (tmp_path / "plain").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{}")
    for path, options, says in [
        ("data", [], "data, row 1: expected 'text' to be a string, got None"),
        ("data", ["--field", "body"], "data: expected a column 'body' (--field), got ['text', "),
        ("data", ["--field", "words"], "data, row 0: expected 'words' to be a string, got ['a']"),
        ("data", ["--field", "n"], "data, row 0: expected 'n' to be a string, got 1"),
        ("plain", [], "plain to be a file or a folder written by Dataset.save_to_disk"),
        ("broken", [], "broken (empty or damaged?): "),
        ("none", [], "none (empty or damaged?): "),
    ]:
        arguments = {"tokenizer": tokenizer, "output": tmp_path / "df.npz", "options": options}
        refused(capsys, says, tmp_path / path, **arguments)


def test_wrong_commands_are_named(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "df.npz"
    terminal = os.ttyname(os.openpty()[1])  # a device that nobody misses
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong.json").write_text("{}")
    for inputs, made_with, out, options, says in [
        (["missing.txt"], tokenizer, output, [], "there is no file or folder missing.txt"),
        (["-"], tokenizer, output, [], "there is no file or folder -"),
        (["/dev/null"], tokenizer, output, [], "expected /dev/null to be a file"),
        ([path, path], tokenizer, output, [], "expected every input once"),
        ([path], tokenizer, output, ["--field", "text"], "got text files only"),
        ([path], tokenizer, output, ["--vocab-size", "5"], "expected --vocab-size of at least"),
        ([path], tokenizer, output, ["--vocab-size", "9" * 17], "cannot allocate memory"),
        ([path], tokenizer, output, ["--vocab-size", "9" * 99], "cannot allocate memory"),
        ([path], "missing.json", output, [], "there is no tokenizer missing.json"),
        ([path], tmp_path / "wrong.json", output, [], "cannot load the tokenizer"),
        ([path], tmp_path / "empty", output, [], "cannot load the tokenizer"),
        ([path], tokenizer, tmp_path, [], "to be a regular file, got the folder"),
        ([path], tokenizer, path, ["--overwrite"], "expected --output to differ"),
        ([path], tokenizer, path / "df.npz", [], "cannot write to the folder"),
        ([path], tokenizer, terminal, ["--overwrite"], "a regular file, got the device"),
    ]:
        refused(capsys, says, *inputs, tokenizer=made_with, output=out, options=options)
    assert not output.exists()
    for arguments in [[], ["count"], ["count", "a.txt", "--max-length", "0"], ["--top", "x"]]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2


def test_a_result_is_overwritten_only_if_asked(tokenizer, tmp_path, capsys):
    one, two = text_file(tmp_path / "a.txt"), text_file(tmp_path / "b.txt", TEXTS[:5])
    output = tmp_path / "df.npz"
    assert count(one, tokenizer=tokenizer, output=output) == 0
    assert count(two, tokenizer=tokenizer, output=output) == 2
    assert "df.npz exists: add --overwrite" in capsys.readouterr().err
    assert counted(output, TEXTS, tokenizer)
    assert count(two, tokenizer=tokenizer, output=output, options=["--overwrite"]) == 0
    assert counted(output, TEXTS[:5], tokenizer)


@pytest.mark.parametrize("name", ["a.JSONL", "a.jsonl.GZ"])
def test_a_link_is_what_its_name_says(name, tokenizer, tmp_path):
    """Downloaded files are often links to a name without a suffix."""
    made = rows_file(tmp_path / "b.jsonl")
    (zipped(made) if name.endswith(".GZ") else made).rename(tmp_path / "2f4a91")
    (tmp_path / name).symlink_to(tmp_path / "2f4a91")
    assert count(tmp_path / name, tokenizer=tokenizer, output=tmp_path / "df.npz") == 0
    assert counted(tmp_path / "df.npz", TEXTS, tokenizer)


@pytest.mark.parametrize("what", ["input", "dataset", "output"])
def test_what_changes_meanwhile_is_noticed(what, tokenizer, tmp_path, capsys, monkeypatch):
    made = dataset(tmp_path / "data") if what == "dataset" else text_file(tmp_path / "a.txt")
    output = tmp_path / "df.npz"
    plain = Count.save

    def save(self):
        plain(self)
        if what == "output":
            output.write_bytes(b"of somebody else")
        elif what == "input":
            text_file(made, [*TEXTS, "more"])
        else:
            state = made / "state.json"
            state.write_text(state.read_text() + " ")

    monkeypatch.setattr(Count, "save", save)
    assert count(made, tokenizer=tokenizer, output=output) == 2
    error = capsys.readouterr().err
    if what == "output":
        assert "df.npz exists: add --overwrite" in error
        assert output.read_bytes() == b"of somebody else"
        monkeypatch.setattr(Count, "save", plain)
        assert count(made, tokenizer=tokenizer, output=output, options=["--overwrite"]) == 0
        assert counted(output, TEXTS, tokenizer)
    else:
        assert "changed while it was counted: use --restart" in error
        assert not output.exists()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_or_on_a_terminal_a_bar_says_how_far_it_is(
    terminal, tokenizer, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(command, "LINE_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    path, stream = text_file(tmp_path / "a.txt"), io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    assert count(path, tokenizer=tokenizer, output=tmp_path / "df.npz") == 0
    assert "100% · 40 documents · " in stream.getvalue()
    assert ("━" in stream.getvalue()) == terminal
    assert "Wrote" in stream.getvalue()
    assert capsys.readouterr().out == ""


def test_merged_counts_are_those_of_one_run(tokenizer, tmp_path, capsys):
    parts = [TEXTS[:10], TEXTS[10:11], TEXTS[11:]]
    outputs = []
    for number, texts in enumerate(parts):
        outputs.append(str(tmp_path / f"{number}.npz"))
        path = text_file(tmp_path / f"{number}.txt", texts)
        assert count(path, tokenizer=tokenizer, output=outputs[-1]) == 0
    merged = tmp_path / "all.npz"
    assert main(["merge", *outputs, "--output", str(merged)]) == 0
    assert "40 documents of 3 files" in capsys.readouterr().out
    assert counted(merged, TEXTS, tokenizer)
    assert main(["merge", *outputs, "--output", str(merged)]) == 2
    assert "exists: add --overwrite" in capsys.readouterr().err
    assert main(["merge", *outputs, "--output", str(merged), "--overwrite"]) == 0


@pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="needs dask[distributed]"
)
def test_the_recipe_for_dask_counts_like_the_command(tokenizer, tmp_path):
    """Two files in two processes: one counter a partition, merged."""
    zipped(rows_file(tmp_path / "a.jsonl", TEXTS[:30])).rename(tmp_path / "part-0.jsonl.gz")
    zipped(rows_file(tmp_path / "b.jsonl", TEXTS[30:])).rename(tmp_path / "part-1.jsonl.gz")
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
    assert counted(tmp_path / "dask.npz", TEXTS, tokenizer)
    assert count(tmp_path / "a.jsonl", tokenizer=tokenizer, output=tmp_path / "one.npz") == 0
    one = DocumentFrequency.load(tmp_path / "one.npz")
    assert one.merge(DocumentFrequency.load(tmp_path / "dask.npz")).num_documents == 70


def test_what_must_not_be_merged(tmp_path, capsys):
    for name, fingerprint, size in [("a", "aa", 5), ("b", "bb", 5), ("c", "aa", 6)]:
        DocumentFrequency(size, tokenizer_sha256=fingerprint).save(tmp_path / f"{name}.npz")
    (tmp_path / "d.npz").write_bytes(b"PK")
    a = str(tmp_path / "a.npz")
    for other, says in [
        ("b.npz", "expected counters of the same `tokenizer_sha256`, got 'aa' and 'bb'"),
        ("c.npz", "expected counters of the same `vocab_size`, got 5 and 6"),
        ("d.npz", "d.npz is not a DocumentFrequency file"),
        ("a.npz", "expected every file once"),
        ("e.npz", "No such file or directory"),
    ]:
        arguments = ["merge", a, str(tmp_path / other), "--output", str(tmp_path / "all.npz")]
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert not (tmp_path / "all.npz").exists()


def test_show_lists_the_most_frequent_tokens_by_name(tokenizer, tmp_path, capsys):
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "df.npz"
    assert count(path, tokenizer=tokenizer, output=output) == 0
    capsys.readouterr()
    assert main(["show", str(output), "--tokenizer", str(tokenizer), "--top", "60"]) == 0
    head, *lines = (line for line in capsys.readouterr().out.splitlines() if line.strip())
    assert "40 documents" in head
    counter = DocumentFrequency.load(output)
    vocabulary = tokenizers.Tokenizer.from_file(str(tokenizer)).get_vocab()
    shown = {row[4]: row for row in (line.split() for line in lines[2:])}
    seen = {token for token, index in vocabulary.items() if counter.df[index] > 0}
    assert seen == set(shown)
    assert f"{counter.mean_length:.1f} tokens per document" in lines[0]
    assert lines[1].split() == ["id", "df", "of", "documents", "idf", "token"]
    for token in seen:
        index = vocabulary[token]
        df = int(counter.df[index])
        assert shown[token][0] == str(index)
        assert shown[token][1:3] == [str(df), f"{df / 40:.1%}"]
        assert float(shown[token][3]) == pytest.approx(float(counter.idf()[index]), abs=0.0051)
    assert main(["show", str(output), "--top", "1"]) == 0
    assert str(int(counter.df.argmax())) in capsys.readouterr().out


def test_show_refuses_another_tokenizer_and_takes_a_file_of_an_older_version(
    tokenizer, tmp_path, capsys
):
    DocumentFrequency(60, tokenizer_sha256="abc").save(tmp_path / "other.npz")
    old = DocumentFrequency(60)
    old.update(torch.tensor([[1, 2]]), torch.ones(1, 2))
    old.num_tokens = None
    old.save(tmp_path / "old.npz")
    for name, says in [("other", "got 'abc'"), ("old", "got no fingerprint")]:
        arguments = ["show", str(tmp_path / f"{name}.npz"), "--tokenizer", str(tokenizer)]
        assert main(arguments) == 2
        assert says in capsys.readouterr().err
    assert main(["show", str(tmp_path / "old.npz")]) == 0
    said = capsys.readouterr().out
    assert "1 documents, 2 of 60 tokens seen, tokenizer not known" in said
    assert "tokens per document" not in said


def test_missing_packages_are_named(tokenizer, tmp_path, monkeypatch, capsys):
    path, folder = text_file(tmp_path / "a.txt"), dataset(tmp_path / "data")
    for package, inputs, made_with in [
        ("tokenizers", [path], tokenizer),
        ("transformers", [path], "bert-base-uncased"),
        ("datasets", [folder], tokenizer),
        ("rich", [path], tokenizer),
    ]:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert count(*inputs, tokenizer=made_with, output=tmp_path / "df.npz") == 2
        said = capsys.readouterr().err
        assert f"needs {package}; install with: pip install" in said
