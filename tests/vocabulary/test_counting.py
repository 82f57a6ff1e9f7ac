"""The vocabulary command: the counts are those of a loop, whatever happens on the way."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sparse_losses.vocabulary import DocumentFrequency, counting
from sparse_losses.vocabulary import __main__ as command
from sparse_losses.vocabulary.__main__ import main
from sparse_losses.vocabulary.counting import Count, Encoder, UserError, find_sources

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
def small_shards(monkeypatch):
    monkeypatch.setattr(counting, "SHARD_BYTES", 64)
    monkeypatch.setattr(counting, "SHARD_ROWS", 3)
    monkeypatch.setattr(counting, "SAVE_SECONDS", 0.0)


def loop(texts, tokenizer, max_length=None):
    """The plain count: a Counter over the set of every document's ids."""
    plain = tokenizers.Tokenizer.from_file(str(tokenizer))
    plain.no_padding()
    plain.no_truncation()
    counts = Counter(
        token
        for text in texts
        for token in set(plain.encode(text, add_special_tokens=False).ids[:max_length])
    )
    return [counts[token] for token in range(plain.get_vocab_size())]


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
    jobs = [] if "--jobs" in options else ["--jobs", "1"]
    return main(["count", *map(str, inputs), *required, *jobs, *options])


def counted(path, texts, tokenizer, **options):
    """Whether the file holds the loop's counts, and nothing lies beside it."""
    counter = DocumentFrequency.load(path)
    beside = [name for name in os.listdir(path.parent) if "partial" in name or name[0] == "."]
    return (
        counter.df.tolist()[: len(loop([], tokenizer))] == loop(texts, tokenizer, **options)
        and counter.num_documents == len(texts)
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
    options = ["--batch-size", "2"]
    assert count(path, tokenizer=tokenizer, output=output, options=options) == 0
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


def test_several_inputs_in_two_processes_count_as_in_one(tokenizer, folder, tmp_path, capfd):
    inputs = [make(tmp_path) for kind, make in MADE.items() if kind not in ("dataset", "text.gz")]
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    assert count(*inputs, tokenizer=tokenizer, output=one) == 0
    assert count(*reversed(inputs), tokenizer=folder, output=two, options=["--jobs", "2"]) == 0
    assert counted(one, TEXTS * len(inputs), tokenizer)
    assert counted(two, TEXTS * len(inputs), tokenizer)
    assert "200 documents" in capfd.readouterr().err


def test_every_line_lies_in_exactly_one_shard_wherever_the_cuts_are(tmp_path, monkeypatch):
    content = "\ufeffa b\r\n\n  \nKöln\n\nx\ny" + "z" * 30 + "\nlast"
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    for size in range(1, len(content.encode()) + 2):
        monkeypatch.setattr(counting, "SHARD_BYTES", size)
        (source,) = find_sources([str(path)], ["text"], [])
        shards = source.shards()
        texts = [text for s in shards for _, _, text in counting._documents(s, ("text",))]
        assert [t for t in texts if t is not None] == ["a b", "Köln", "x", "y" + "z" * 30, "last"]
        assert texts.count(None) == 3
        assert sum(shard.size for shard in shards) == path.stat().st_size
        places = [
            shard.place(index)
            for shard in shards
            for index, _, _ in counting._documents(shard, ("text",))
        ]
        assert places == [f"{path}:{line}" for line in range(1, 9)]


def test_fields_are_joined_splits_chosen_and_empty_texts_are_documents(tokenizer, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "the cat", "body": "sat"}\n\n{"title": "", "body": ""}\n')
    fields = ["--field", "title", "--field", "body"]
    assert count(path, tokenizer=tokenizer, output=tmp_path / "a.npz", options=fields) == 0
    assert counted(tmp_path / "a.npz", ["the cat sat", " "], tokenizer)
    said = capsys.readouterr().err
    assert "Skipped 1 blank line." in said
    assert "1 document without a token" in said
    folder = splits(tmp_path / "data")
    chosen = ["--split", "test"]
    assert count(folder, tokenizer=tokenizer, output=tmp_path / "b.npz", options=chosen) == 0
    assert counted(tmp_path / "b.npz", TEXTS[15:], tokenizer)


def test_documents_are_cut_only_if_asked_and_the_vocabulary_may_be_the_models(tokenizer, tmp_path):
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "a.npz"
    options = ["--max-length", "2", "--vocab-size", "100"]
    assert count(path, tokenizer=tokenizer, output=output, options=options) == 0
    assert counted(output, TEXTS, tokenizer, max_length=2)
    assert loop(TEXTS, tokenizer) != loop(TEXTS, tokenizer, max_length=2)
    assert DocumentFrequency.load(output, vocab_size=100).df[60:].sum() == 0


def test_a_folder_of_transformers_counts_as_its_tokenizer_json(tokenizer, folder, tmp_path):
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "df.npz"
    assert count(path, tokenizer=folder, output=output) == 0
    assert counted(output, TEXTS, tokenizer)
    cut = ["--max-length", "2", "--overwrite"]
    assert count(path, tokenizer=folder, output=output, options=cut) == 0
    assert counted(output, TEXTS, tokenizer, max_length=2)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    plain = tokenizers.Tokenizer.from_file(str(tokenizer))
    for same in (fast, plain):
        assert DocumentFrequency.load(output, tokenizer=same).num_documents == len(TEXTS)


DRIVER = """
import os, signal, sys
from sparse_losses.vocabulary import counting
from sparse_losses.vocabulary.__main__ import main

counting.SHARD_BYTES, counting.SHARD_ROWS, counting.SAVE_SECONDS = 64, 3, 0.0
take = counting.Count._take


def take_and_die(self, index, counts):
    take(self, index, counts)
    if self.finished.sum() == 4:
        os.kill(os.getpid(), signal.SIGKILL)


counting.Count._take = take_and_die
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_killed_count_goes_on_and_ends_with_the_same_counts(jobs, tokenizer, tmp_path, capsys):
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "df.npz"
    command_line = ["count", path, "--tokenizer", tokenizer, "--output", output, "--jobs", jobs]
    # Workers that outlived their parent would hold the pipe, and this would not return.
    killed = subprocess.run(
        [sys.executable, "-c", DRIVER, *map(str, command_line)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not output.exists()
    (tmp_path / ".df.npz.partial.0123").write_bytes(b"killed while saving")
    with pytest.raises(ValueError, match="is not a DocumentFrequency file"):
        DocumentFrequency.load(tmp_path / "df.npz.partial")
    assert main([*map(str, command_line[:-1]), "1"]) == 0
    assert "Going on" in capsys.readouterr().err
    assert counted(output, TEXTS, tokenizer)


@pytest.fixture
def interrupt(monkeypatch):
    """Ctrl-C after so many shards."""

    def after(shards):
        take = Count._take

        def take_and_interrupt(self, index, counts):
            take(self, index, counts)
            if self.finished.sum() == shards:
                os.kill(os.getpid(), signal.SIGINT)
                monkeypatch.setattr(Count, "_take", take)

        monkeypatch.setattr(Count, "_take", take_and_interrupt)

    return after


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_keeps_finished_shards_and_the_command_goes_on(
    jobs, tokenizer, tmp_path, interrupt, monkeypatch, capsys
):
    monkeypatch.setattr(counting, "SAVE_SECONDS", 1e9)  # it saves because it is interrupted
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "df.npz"
    options = ["--jobs", jobs]
    interrupt(3)
    assert count(path, tokenizer=tokenizer, output=output, options=options) == 130
    said = capsys.readouterr().err
    assert "df.npz.partial" in said
    assert "Repeat the command" in said
    assert not output.exists()
    with np.load(f"{output}.partial") as archive:
        assert archive["finished"].sum() >= 3
    assert count(path, tokenizer=tokenizer, output=output) == 0
    assert "Going on" in capsys.readouterr().err
    assert counted(output, TEXTS, tokenizer)


def test_blank_lines_before_the_interruption_are_still_spoken_of(
    tokenizer, tmp_path, interrupt, capsys
):
    path, output = text_file(tmp_path / "a.txt", ["", "the cat", *TEXTS]), tmp_path / "df.npz"
    interrupt(5)
    assert count(path, tokenizer=tokenizer, output=output) == 130
    assert count(path, tokenizer=tokenizer, output=output) == 0
    assert "Skipped 1 blank line." in capsys.readouterr().err


def test_if_the_result_cannot_be_saved_the_counts_are_kept(tokenizer, tmp_path, monkeypatch):
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "df.npz"
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device", str(output))
        patch.setattr(DocumentFrequency, "save", lambda self, path: (_ for _ in ()).throw(full))
        assert count(path, tokenizer=tokenizer, output=output) == 2
    assert Path(f"{output}.partial").exists()
    monkeypatch.setattr(counting, "_count_shard", None)  # nothing is left to count
    assert count(path, tokenizer=tokenizer, output=output) == 0
    assert counted(output, TEXTS, tokenizer)


def test_interrupted_again_and_again_nothing_counts_twice(tokenizer, tmp_path, interrupt):
    path, output = dataset(tmp_path / "data"), tmp_path / "df.npz"
    for shards in range(1, 13):
        interrupt(shards)
        assert count(path, tokenizer=tokenizer, output=output) == 130
    assert count(path, tokenizer=tokenizer, output=output) == 0
    assert counted(output, TEXTS, tokenizer)


def test_a_dead_worker_is_an_error_and_the_command_goes_on(
    tokenizer, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(counting, "SAVE_SECONDS", 1e9)
    path, output = text_file(tmp_path / "a.txt", TEXTS * 20), tmp_path / "df.npz"
    take = Count._take

    def take_and_kill(self, index, counts):
        take(self, index, counts)
        for child in multiprocessing.active_children():
            child.kill()

    with monkeypatch.context() as patch:
        patch.setattr(Count, "_take", take_and_kill)
        assert count(path, tokenizer=tokenizer, output=output, options=["--jobs", "2"]) == 2
    assert "a worker process ended abruptly" in capsys.readouterr().err
    assert count(path, tokenizer=tokenizer, output=output) == 0
    assert "Going on" in capsys.readouterr().err
    assert counted(output, TEXTS * 20, tokenizer)


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
        ([more], tokenizer, [], "a.jsonl is no longer an input"),
        ([more], tokenizer, [], "b.jsonl is a new input"),
        ([more], tokenizer, ["--max-length", "3"], "--max-length was None, is 3"),
        ([more], tokenizer, ["--vocab-size", "99"], "--vocab-size was"),
        ([more], tokenizer, ["--field", "text", "--field", "text"], "--field was ['text'], is"),
        ([more], tmp_path / "lower.json", [], "lower.json (another vocabulary or settings)"),
    ]:
        assert count(*inputs, tokenizer=made_with, output=output, options=options) == 2
        said = capsys.readouterr().err
        assert says in said
        assert "--restart" in said
    rows_file(path, TEXTS[:30])
    assert count(path, tokenizer=tokenizer, output=output) == 2
    assert "a.jsonl has changed" in capsys.readouterr().err
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
    assert "has changed" in capsys.readouterr().err
    Path(f"{output}.partial").write_bytes(b"PK")
    assert count(tmp_path / "d", tokenizer=tokenizer, output=output) == 2
    assert "df.npz.partial is damaged" in capsys.readouterr().err
    assert count(tmp_path / "d", tokenizer=tokenizer, output=output, options=["--restart"]) == 0
    assert counted(output, TEXTS, tokenizer)


GOOD = '{"text": "the cat"}\n'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", GOOD * 9 + "\n{'text': 1}\n", ":11: expected one JSON object a line, got no"),
        ("a.jsonl", GOOD * 9 + "[1]\n" + GOOD, ":10: expected one JSON object a line, got a list"),
        ("a.jsonl", GOOD * 9 + '{"a": 1, "b": 2}\n', ":10: expected a field 'text' (--field), got"),
        ("a.jsonl", GOOD * 9 + '{"text": null}', ":10: expected 'text' to be a string, got null"),
        ("a.jsonl", '{"text": ["a"]}\n', ":1: expected 'text' to be a string, got a list"),
        ("a.jsonl", '{"text": 1.5}\n', ":1: expected 'text' to be a string, got a number"),
        ("a.jsonl", '{"text": true}\n', ":1: expected 'text' to be a string, got a Boolean"),
        ("a.jsonl", "[" * 100_000, ":1: expected one JSON object a line, got no JSON"),
        ("a.jsonl", GOOD * 9 + '{"text": "\\ud800"}\n', ":10: cannot be tokenized"),
        ("a.txt", b"a\n" * 200 + b"caf\xe9\n", ":201: expected UTF-8, got byte 0xe9 at position 3"),
        ("a.txt", "the cat".encode("utf-16"), ":1: expected UTF-8, got byte 0xff at position 0"),
        ("a.txt", "", "expected at least one document, got none in"),
        ("a.txt", "\n \r\n\n", "expected at least one document, got none in"),
        ("a.txt.gz", "no gzip", ":1: expected gzip data, got Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"a\n" * 5000, mtime=0)[:-9], "expected gzip data, got"),
    ],
)
def test_a_wrong_document_is_named_by_file_and_line(
    name, content, says, tokenizer, tmp_path, capsys
):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    output = tmp_path / "df.npz"
    assert count(path, tokenizer=tokenizer, output=output) == 2
    said = capsys.readouterr().err
    assert (f"{name}{says}" if says[0] == ":" else says) in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not output.exists()


def test_a_wrong_document_is_named_from_a_worker_too(tokenizer, tmp_path, capfd):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD * 30 + "{}\n" + GOOD)
    options = ["--jobs", "2"]
    assert count(path, tokenizer=tokenizer, output=tmp_path / "x.npz", options=options) == 2
    said = capfd.readouterr().err
    assert said == f"error: {path}:31: expected a field 'text' (--field), got none\n"


def test_wrong_datasets_are_named(tokenizer, tmp_path, capsys):
    data = datasets.Dataset.from_dict({"text": ["a", None], "words": [["a"], ["b"]], "n": [1, 2]})
    data.save_to_disk(tmp_path / "data")
    data.select([]).save_to_disk(tmp_path / "none")
    folder = splits(tmp_path / "splits")
    (tmp_path / "plain").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{}")
    for path, options, says in [
        (tmp_path / "data", [], "data, row 1: expected 'text' to be a string, got null"),
        (tmp_path / "data", ["--field", "body"], "expected a column 'body' (--field), got 'text',"),
        (tmp_path / "data", ["--field", "words"], "expected column 'words' to hold strings, got L"),
        (tmp_path / "data", ["--field", "n"], "expected column 'n' to hold strings, got Value"),
        (tmp_path / "data", ["--split", "train"], "expected a DatasetDict with --split"),
        (folder, ["--split", "dev"], "has no split 'dev': it has train, test"),
        (tmp_path / "plain", [], "plain to be a file or a folder written by Dataset.save_to_disk"),
        (tmp_path / "broken", [], "cannot read the dataset"),
        (tmp_path / "none", [], "none to have rows, got none"),
    ]:
        output = tmp_path / "df.npz"
        assert count(path, tokenizer=tokenizer, output=output, options=options) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1


def test_wrong_commands_are_named(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path, output = text_file(tmp_path / "a.txt"), tmp_path / "df.npz"
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong.json").write_text("{}")
    for inputs, made_with, out, options, says in [
        (["missing.txt"], tokenizer, output, [], "there is no missing.txt"),
        (["-"], tokenizer, output, [], "standard input"),
        (["/dev/null"], tokenizer, output, [], "expected /dev/null to be a file"),
        ([path, path], tokenizer, output, [], "expected every input once"),
        ([path], tokenizer, output, ["--field", "text"], "got text files only"),
        ([path], tokenizer, output, ["--split", "train"], "got files only"),
        ([path], tokenizer, output, ["--vocab-size", "5"], "expected --vocab-size of at least"),
        ([path], "missing.json", output, [], "there is no tokenizer missing.json"),
        ([path], tmp_path / "wrong.json", output, [], "cannot load the tokenizer"),
        ([path], tmp_path / "empty", output, [], "cannot load the tokenizer"),
        ([path], tokenizer, tmp_path, [], "expected --output to be a file, got the folder"),
        ([path], tokenizer, path, ["--overwrite"], "expected --output to be no input"),
        ([path], tokenizer, path / "df.npz", [], "cannot write to the output folder"),
    ]:
        assert count(*inputs, tokenizer=made_with, output=out, options=options) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert not output.exists()
    for arguments in [[], ["count"], ["count", "a.txt", "--jobs", "0"], ["--top", "x"]]:
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


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.jsonl.gz", "a.jsonl.GZ"])
def test_a_link_is_what_its_name_says(name, tokenizer, tmp_path):
    """Downloaded files are often links to a name without a suffix."""
    made = rows_file(tmp_path / "b.jsonl")
    made = zipped(made) if name.lower().endswith(".gz") else made
    made.rename(tmp_path / "2f4a91")
    (tmp_path / name).symlink_to(tmp_path / "2f4a91")
    assert count(tmp_path / name, tokenizer=tokenizer, output=tmp_path / "df.npz") == 0
    assert counted(tmp_path / "df.npz", TEXTS, tokenizer)


@pytest.mark.parametrize("what", ["input", "dataset", "output"])
def test_what_changes_meanwhile_is_noticed(what, tokenizer, tmp_path, capsys, monkeypatch):
    made = dataset(tmp_path / "data") if what == "dataset" else text_file(tmp_path / "a.txt")
    output = tmp_path / "df.npz"
    plain = Count._take

    def take(self, index, counts):
        plain(self, index, counts)
        if what == "output":
            output.write_bytes(b"of somebody else")
        elif what == "input":
            text_file(made, [*TEXTS, "more"])
        else:
            state = made / "state.json"
            state.write_text(state.read_text() + " ")

    monkeypatch.setattr(Count, "_take", take)
    assert count(made, tokenizer=tokenizer, output=output) == 2
    error = capsys.readouterr().err
    if what == "output":
        assert "df.npz has appeared meanwhile: the counts are kept" in error
        monkeypatch.setattr(Count, "_take", plain)
        assert count(made, tokenizer=tokenizer, output=output, options=["--overwrite"]) == 0
        assert counted(output, TEXTS, tokenizer)
    else:
        assert "changed while it was counted: use --restart" in error
        assert not output.exists()


def test_a_device_is_no_output(tokenizer, tmp_path, capsys):
    made = text_file(tmp_path / "a.txt")
    assert count(made, tokenizer=tokenizer, output="/dev/null", options=["--overwrite"]) == 2
    assert "expected --output to be a regular file, got the device" in capsys.readouterr().err


def test_where_there_is_no_terminal_a_line_says_how_far_it_is(
    tokenizer, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(command, "LINE_SECONDS", 0.0)
    path = text_file(tmp_path / "a.txt")
    assert count(path, tokenizer=tokenizer, output=tmp_path / "df.npz") == 0
    captured = capsys.readouterr()
    assert "100% · 40 documents" in captured.err
    assert "Wrote" in captured.err
    assert captured.out == ""


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
    shown = {row[1]: row for row in (line.split() for line in lines) if len(row) == 5}
    seen = {token for token, index in vocabulary.items() if counter.df[index] > 0}
    assert seen == set(shown)
    assert "[CLS]" in seen  # which rich would take for markup
    for token in seen:
        index = vocabulary[token]
        df = int(counter.df[index])
        assert shown[token][0] == str(index)
        assert shown[token][2:4] == [str(df), f"{df / 40:.1%}"]
        assert float(shown[token][4]) == pytest.approx(float(counter.idf()[index]), abs=0.0051)
    assert main(["show", str(output), "--top", "1"]) == 0
    assert str(int(counter.df.argmax())) in capsys.readouterr().out


def test_show_refuses_another_tokenizer(tokenizer, tmp_path, capsys):
    DocumentFrequency(60, tokenizer_sha256="abc").save(tmp_path / "other.npz")
    DocumentFrequency(60).save(tmp_path / "unknown.npz")
    for name, says in [("other", "got 'abc'"), ("unknown", "got no fingerprint")]:
        arguments = ["show", str(tmp_path / f"{name}.npz"), "--tokenizer", str(tokenizer)]
        assert main(arguments) == 2
        assert says in capsys.readouterr().err
    assert main(["show", str(tmp_path / "unknown.npz")]) == 0
    assert "0 documents, 0 of 60 tokens seen, tokenizer not known" in capsys.readouterr().out


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
        said = capsys.readouterr().err
        assert f"needs {package}; install with: pip install" in said


def test_the_encoder_reads_the_file_anew_in_a_worker(tokenizer, tmp_path):
    encoder = Encoder.load(str(tokenizer))
    job = Count([], encoder, tmp_path / "df.npz").job
    worker = counting._Worker(job, None, None)
    assert worker.encoder.fingerprint == encoder.fingerprint
    changed = counting._Worker(counting.dataclasses.replace(job, fingerprint="x"), None, None)
    with pytest.raises(UserError, match="changed while it was read"):
        _ = changed.encoder
