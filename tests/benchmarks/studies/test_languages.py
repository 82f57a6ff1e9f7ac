"""The study of the language penalty: its names, its measures, and that the penalty works."""

import csv
import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.studies import languages, locale_names
from benchmarks.studies.languages import Settings, in_scripts, make_objective, make_schedule
from sparse_losses import language_token_ids

TINY = Settings(steps=60, batch_size=16, hidden=32, learning_rate=1e-2, vocab_size=1500)


@pytest.fixture(scope="module")
def everything():
    return locale_names.load()


@pytest.fixture(scope="module")
def names(everything):
    return locale_names.Names(everything.train[:200], everything.held_out[:40])


@pytest.fixture(scope="module")
def texts(names):
    return [text for item in names.train for text in (item.query, item.document)]


@pytest.fixture(scope="module")
def tokens(texts):
    return locale_names.learn_tokens(texts, 1500)


def test_names_are_korean_and_their_documents_are_not(everything):
    assert len(everything.held_out) == locale_names.HELD_OUT < len(everything.train)
    items = everything.train + everything.held_out
    assert len({item.query for item in items}) == len(items)
    assert len({item.document for item in items}) == len(items)
    for item in items:
        assert any("가" <= letter <= "힣" for letter in item.query)
        assert not any("가" <= letter <= "힣" for letter in item.document)


def test_the_same_texts_give_the_same_tokens(texts, tokens):
    assert locale_names.learn_tokens(texts, 1500).vocabulary() == tokens.vocabulary()
    assert tokens.special_ids == (0, 1, 2, 3)
    assert not set(tokens.special_ids) & set(language_token_ids(tokens.tokenizer).tolist())


def test_the_shares_are_counts(tokens):
    torch.manual_seed(0)
    vectors = torch.rand(5, tokens.vocab_size) * (torch.rand(5, tokens.vocab_size) < 0.05)
    vectors[3] = 0
    found = in_scripts(vectors, tokens)
    active = [(row, tokens.vocabulary()[j]) for row, j in vectors.nonzero().tolist()]
    words = [token.replace("▁", "") for _, token in active]
    hangul = [w for w in words if w and all("가" <= letter <= "힣" for letter in w)]
    assert hangul
    assert found["active"] == pytest.approx(len(active) / 4)
    assert found["silent"] == pytest.approx(1 / 5)
    assert found["hangul"] == pytest.approx(len(hangul) / len(active))
    assert 0 < found["latin"] < 1 - found["foreign"] - found["hangul"] + 1e-9


def test_the_penalty_waits_and_rises(tokens):
    settings = Settings(steps=10, language=0.5)
    objective = make_objective(tokens, settings)
    schedule = make_schedule(objective, settings)
    seen = []
    for _ in range(settings.steps):
        seen.append(objective.weights["query_language_penalty"])
        schedule.step()
    assert seen == [0.0] * 4 + [0.5 / 64, 0.5 / 16, 0.5 / 4, 0.5, 0.5, 0.5]


def test_the_penalty_lowers_the_share_of_other_scripts(names):
    without = languages.run_one(TINY, names)["figures"]
    penalised = languages.run_one(dataclasses.replace(TINY, language=0.5), names)["figures"]
    for side in ("query", "document"):
        assert without[f"{side}_foreign"] > 0.3
        assert penalised[f"{side}_foreign"] < without[f"{side}_foreign"] / 2


def test_the_page_shows_the_committed_results():
    docs = Path(__file__).parents[3] / "docs"
    with (docs / "results" / "languages.csv").open(newline="", encoding="utf-8") as file:
        rows = [
            {
                name: value if name in ("variant", "versions", "device") else float(value)
                for name, value in row.items()
            }
            for row in csv.DictReader(file)
        ]
    assert languages.table(rows) in (docs / "languages.md").read_text(encoding="utf-8")


def test_the_command_writes_its_files(inline, names, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(locale_names, "load", lambda: names)
    real = languages.settings_of
    monkeypatch.setattr(
        languages,
        "settings_of",
        lambda *run: dataclasses.replace(real(*run), hidden=32, vocab_size=1500),
    )
    arguments = ["--steps", "2", "--output", str(tmp_path), "--seeds"]
    assert languages.main([*arguments, "0", "1"]) == 0
    assert languages.main([*arguments, "0", "--only", "FLOPS x 3"]) == 0
    with (tmp_path / "languages.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    expected = [*["no penalty"] * 2, *["penalty 0.005"] * 2, "FLOPS x 3"]
    assert [row["variant"] for row in rows] == expected, "earlier runs stay in the table"
    assert all(row["versions"].startswith("torch") for row in rows)
    assert (tmp_path / "languages.svg").read_text(encoding="utf-8").startswith("<?xml")
    table = (tmp_path / "languages.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    assert [line.count("±") for line in table.splitlines()] == [0, 0, 8, 8, 0]
