"""The language demo: its names, its measures, and that the penalty does what it is for."""

import csv
import importlib.util
from pathlib import Path

import pytest
import torch

from sparse_losses import language_token_ids

pytest.importorskip("babel")

from benchmarks.studies import languages, locale_names
from benchmarks.studies.languages import Settings, in_scripts, make_objective, make_schedule


@pytest.fixture(scope="module")
def names():
    everything = locale_names.load()
    return locale_names.Names(everything.train[:200], everything.held_out[:40])


@pytest.fixture(scope="module")
def pieces(names):
    return locale_names.Pieces([t for i in names.train for t in (i.query, i.document)], 1500)


TINY = Settings(steps=60, batch_size=16, hidden=32, learning_rate=1e-2)


def test_names_are_korean_and_their_documents_are_not():
    names = locale_names.load()
    assert len(names.held_out) == locale_names.HELD_OUT < len(names.train)
    items = names.train + names.held_out
    assert len({item.query for item in items}) == len(items)
    assert len({item.document for item in items}) == len(items)
    for item in items:
        assert any("가" <= letter <= "힣" for letter in item.query)
        assert not any("가" <= letter <= "힣" for letter in item.document)
    assert names == locale_names.load()


def test_the_same_texts_give_the_same_pieces(names, pieces):
    again = locale_names.Pieces([t for i in names.train for t in (i.query, i.document)], 1500)
    assert again.vocabulary() == pieces.vocabulary()
    assert pieces.special_ids == (0, 1, 2, 3)
    assert not set(pieces.special_ids) & set(language_token_ids(pieces.tokenizer).tolist())


def test_the_shares_are_counts(pieces):
    torch.manual_seed(0)
    vectors = torch.rand(5, pieces.vocab_size) * (torch.rand(5, pieces.vocab_size) < 0.05)
    vectors[3] = 0
    found = in_scripts(vectors, pieces, ("Hangul", "Latin"))
    active = [(row, pieces.vocabulary()[j]) for row, j in vectors.nonzero().tolist()]
    words = [token.replace("▁", "") for _, token in active]
    hangul = [w for w in words if w and all("가" <= letter <= "힣" for letter in w)]
    assert hangul
    assert found["active"] == pytest.approx(len(active) / 4)
    assert found["silent"] == pytest.approx(1 / 5)
    assert found["hangul"] == pytest.approx(len(hangul) / len(active))
    assert 0 < found["latin"] < 1 - found["foreign"] - found["hangul"] + 1e-9


def test_the_penalty_waits_and_rises(pieces):
    settings = Settings(steps=10, language=0.5)
    objective = make_objective(pieces, settings)
    schedule = make_schedule(objective, settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    schedule.attach(optimizer)
    seen = []
    for _ in range(settings.steps):
        seen.append(objective.weights["query_language_penalty"])
        optimizer.step()
    assert seen == [0.0] * 4 + [0.5 / 64, 0.5 / 16, 0.5 / 4, 0.5, 0.5, 0.5]
    early = make_objective(pieces, Settings(steps=10, language=0.5, late=False))
    make_schedule(early, Settings(steps=10, language=0.5, late=False))
    assert early.weights["document_language_penalty"] == 0.5
    assert "query_language_penalty" not in make_objective(pieces, Settings()).weights


def test_the_penalty_lowers_the_share_of_other_scripts(names, pieces):
    steps = []
    without = languages.run_one(names, pieces, TINY, lambda: steps.append(1))
    assert len(steps) == TINY.steps
    penalised = languages.run_one(
        names, pieces, Settings(**{**vars(TINY), "language": 0.005, "late": False})
    )
    for side in ("query", "document"):
        assert without[f"{side}_foreign"] > 0.3
        assert penalised[f"{side}_foreign"] < without[f"{side}_foreign"] / 2


def test_the_page_shows_the_committed_results():
    docs = Path(__file__).parents[3] / "docs"
    rows = languages._finished(docs / "results" / "languages.csv", languages.STEPS)
    page = (docs / "languages.md").read_text(encoding="utf-8")
    assert languages.markdown(rows) in page


@pytest.fixture
def command(names, monkeypatch, tmp_path):
    monkeypatch.setattr(locale_names, "load", lambda: names)

    def run(*arguments):
        return languages.main([*arguments, "--output", str(tmp_path / "out")])

    run.folder = tmp_path / "out"
    return run


def test_the_command_writes_its_files_and_keeps_finished_runs(command, monkeypatch, capsys):
    assert command("--steps", "2") == 0
    with (command.folder / "languages.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["no penalty", "penalty 0.005"]
    assert all(row["versions"].startswith("torch") for row in rows)
    assert (command.folder / "languages.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert "| no penalty |" in capsys.readouterr().out
    before = (command.folder / "languages.csv").read_bytes()

    finished = languages._finished(command.folder / "languages.csv", 2)[0]
    trained = []
    monkeypatch.setattr(
        languages, "run_one", lambda *rest: trained.append(rest) or {**finished, "seed": 1}
    )
    assert command("--steps", "2") == 0
    assert not trained
    assert (command.folder / "languages.csv").read_bytes() == before
    assert command("--steps", "2", "--seeds", "0", "1", "--only", "no penalty") == 0
    assert [settings.seed for _, _, settings, _ in trained] == [1]
    assert "±" in (command.folder / "languages.md").read_text(encoding="utf-8")


def test_a_table_of_other_settings_is_not_mixed_in(command, capsys):
    assert command("--steps", "1", "--only", "no penalty") == 0
    assert command("--steps", "2", "--only", "no penalty") == 1
    assert "made with other settings" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--steps", "0"], ["--seeds", "-1"]])
def test_wrong_arguments_end_the_command(command, arguments):
    with pytest.raises(SystemExit) as ended:
        command(*arguments)
    assert ended.value.code == 2


def test_a_missing_package_is_named(command, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "babel" else found(name)
    )
    assert command() == 1
    assert "needs babel; install with: pip install 'sparse-losses[demo]'" in capsys.readouterr().err
