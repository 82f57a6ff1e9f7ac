"""The battery of short trainings runs, with every controller."""

import dataclasses

import pytest

pytest.importorskip("transformers")

from benchmarks.studies import battery


def test_rows_differ_and_a_third_is_held_back():
    names = [row.name for row in battery.ROWS]
    assert len(set(names)) == len(names)
    held = sum(row.held_back for row in battery.ROWS)
    assert 0.2 < held / len(names) < 0.45


@pytest.mark.parametrize("model", ["bag", "static", "trainer", "decoder"])
def test_every_model_trains_with_and_without_the_controller(model, monkeypatch, capsys):
    monkeypatch.setattr(battery, "HELD_OUT", 20)
    row = dataclasses.replace(battery.Row(model), steps=4, batch=4)
    plain, steered = results = [battery.train(row, way) for way in battery.CONTROLLERS]
    assert plain["status"] == ""
    assert steered["status"] == "waiting"
    assert steered["training"] == plain["training"] > 1000, "FLOPS is off in the first steps"
    assert all(0 <= result["recall_10"] <= 1 for result in results)
    assert steered["calibrated"] == pytest.approx(steered["wanted"], rel=0.6)  # of ten texts
    line = battery.table(results).splitlines()[2]
    assert line.startswith(f"| {row.name}{' *' * row.held_back} | 32 | ")
    assert line.endswith(" | waiting |")
