"""A trainer's step with a tiny masked language model and with a tiny dense encoder."""

from benchmarks.run.table import read
from benchmarks.studies import trainer_step
from tests.representation.tiny_models import pair


def test_every_variant_takes_the_steps_of_both_kinds_of_models(tmp_path, monkeypatch, capsys):
    model, words = pair("bert")
    for name, own in (("masked", model), ("dense", model.base_model)):
        for part in (own, words):
            part.save_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in ("masked", "dense")]
    monkeypatch.setattr(trainer_step, "START", 20)  # of a tiny vocabulary
    output = tmp_path / "trainer-step.csv"
    sizes = ("--batches", "2x8", "--budget", "0", "--output", str(output))
    assert trainer_step.main(["--models", *folders, *sizes]) == 0
    rows = read(output)
    assert [row["variant"] for row in rows] == list(trainer_step.VARIANTS) * 4
    assert {(row["model"], row["dtype"]) for row in rows} == {
        (name, dtype) for name in ("masked", "dense") for dtype in ("float32", "bfloat16")
    }
    assert all(float(row["seconds"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)
    assert "| dense | 2x8 |" in capsys.readouterr().out
