"""The battery of short trainings runs, with every controller."""

import csv
import dataclasses

import pytest

pytest.importorskip("transformers")

from benchmarks.studies import battery


def test_rows_differ_and_a_third_is_held_back():
    names = [row.name for row in battery.ROWS]
    assert len(set(names)) == len(names)
    held = sum(row.held_back for row in battery.ROWS)
    assert 0.2 < held / len(names) < 0.45


@pytest.mark.parametrize("model", ["bag", "static"])
def test_every_controller_trains_and_is_measured(model, tmp_path, monkeypatch, capsys):
    row = dataclasses.replace(battery.Row(model), steps=6, batch=4)
    results = {way: battery.train(row, way) for way in battery.CONTROLLERS}
    assert results["none"]["status"] == ""
    assert results["planned"]["training"] == results["none"]["training"]  # it still waits
    assert all(0 <= result["recall_10"] <= 1 for result in results.values())


def test_the_command_writes_its_rows(tmp_path, monkeypatch, capsys):
    row = dataclasses.replace(battery.Row("bag"), steps=2, batch=4)
    monkeypatch.setattr(battery, "ROWS", [row])
    monkeypatch.setattr(battery, "ProcessPoolExecutor", InPlace)
    output = tmp_path / "battery.csv"
    options = ["--only", row.name, "--controllers", "none", "--output", str(output)]
    assert battery.main(options) == 0
    with output.open() as file:
        (written,) = csv.DictReader(file)
    assert written["name"] == row.name
    assert row.name in capsys.readouterr().out


class InPlace:
    """A pool that computes in this process, where the patched rows are."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def submit(self, function, *arguments):
        self.result = lambda: function(*arguments)
        return self
