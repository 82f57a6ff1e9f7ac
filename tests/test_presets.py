"""The presets, number by number, against the tables of the notes they come from."""

import dataclasses

import pytest
import torch

import sparse_losses as sl
import sparse_losses.functional as F
from sparse_losses.presets import RECOMMENDED, V22, V23, V25, V26, V28

# "Loss weights by version" and the "V26 settings" of every section, from the notes on loss
# functions; then "Weights by phase (V26)". The phases of V28 name no info_nce: it is V26's.
TABLE = """
                             V22     V23     V25     V26
info_nce                     2.0     2.5     3.0     3.0
query_self_reconstruction    4.0     1.0     0.5     0.5
query_positive_activation    10.0    3.0     2.0     2.0
triplet_margin               2.5     0.0     0.0     0.0
query_flops                  0.005   0.003   0.002   0.010
query_min_activation         1.0     1.0     1.0     1.0
distillation                 -       1.0     2.0     2.0
temperature                  -       -       -       0.07
margin                       -       -       -       0.3
idf_alpha                    -       -       2.5     4.0
special_penalty              -       -       -       100.0
stopword_penalty             -       -       5.0     15.0
beta                         -       -       0.3     0.3
top_k                        -       -       -       5
threshold                    -       -       -       0.5
distillation_temperature     -       -       -       3.0
alpha_kl                     -       -       -       0.7
alpha_mse                    -       -       -       0.3
"""
PHASES = [(8, 0.08, 2.5, 2.5), (17, 0.05, 3.0, 1.5), (25, 0.04, 3.0, 0.8)]
V, SPECIAL, STOPWORDS, ALLOWED = 30, [0, 1], [2, 5], range(20)
IDF = torch.linspace(0.3, 6.0, V, dtype=torch.float64)
READY = {"temperature": 0.05, "margin": 0.3, "top_k": 4, "threshold": 0.6}
READY |= {"distillation_temperature": 2.0, "alpha_kl": 0.6, "alpha_mse": 0.4}


def test_weights_and_settings_are_those_of_the_notes():
    names, *rows = (line.split() for line in TABLE.strip().splitlines())
    for column, preset in enumerate((V22, V23, V25, V26)):
        assert preset.name == names[column]
        numbers = {name: row[column] for name, *row in rows}
        expected = {name: None if x == "-" else float(x) for name, x in numbers.items()}
        held = {name: getattr(preset, name, preset.weights.get(name)) for name in expected}
        assert held == expected
        assert preset.weights.keys() <= expected.keys()
    more = {"query_language_penalty": 0.5, "context_distillation": 1.0}
    assert V28.weights == {**V26.weights, **more}
    assert V28.language_penalty == 100.0
    kept = {field.name for field in dataclasses.fields(V26)}
    kept -= {"name", "weights", "language_penalty", "ours"}
    assert all(getattr(V28, name) == getattr(V26, name) for name in kept)
    expected = [
        sl.Phase(last, temperature, {"info_nce": ranking, "distillation": taught})
        for last, temperature, ranking, taught in PHASES
    ]
    assert V26.curriculum == sl.Curriculum(expected)


def texts():
    ids = torch.randint(0, V, (4, 6))
    x = (torch.rand(4, V, dtype=torch.float64) - 0.3).relu()
    return sl.Texts(x, ids, torch.ones_like(ids))


@pytest.mark.parametrize("preset", [V22, V23, V25, V26, V28], ids=lambda preset: preset.name)
def test_totals_are_those_of_the_loss_functions(preset):
    preset = preset.replace(**{name: READY[name] for name in preset.missing()})
    ids = {"special_token_ids": SPECIAL, "stopword_ids": STOPWORDS}
    objective = preset.objective(idf=IDF, allowed_token_ids=ALLOWED, **ids)
    (schedule,) = preset.schedules(objective, steps_per_epoch=2)
    query, document, _ = sides = texts(), texts(), texts()
    vectors = [side.activations for side in sides]
    scores, anchors = torch.randn(4, 12, dtype=torch.float64).split([8, 4], 1)
    batch = sl.SpladeBatch(*sides, teacher_scores=scores, teacher_anchor_scores=anchors)
    x, *keys = (torch.nn.functional.normalize(side, dim=1) for side in vectors)
    flops, ignored = F.flops_loss(vectors[0]), {"ignore_token_ids": SPECIAL}
    if preset.idf_alpha is not None:
        options = {"stopword_ids": STOPWORDS, "stopword_penalty": preset.stopword_penalty}
        if preset.special_penalty is not None:
            options |= {"special_token_ids": SPECIAL, "special_penalty": preset.special_penalty}
        penalty = F.idf_penalty(IDF, alpha=preset.idf_alpha, **options)
        flops = F.idf_flops_loss(vectors[0], penalty, beta=preset.beta)
    foreign = F.language_penalty(V, ALLOWED, special_token_ids=SPECIAL, penalty=100.0)
    own = (query.input_ids > 1).sum(1)
    taught = {name: getattr(preset, name) or 0.0 for name in ("alpha_kl", "alpha_mse")}
    taught |= {"temperature": preset.distillation_temperature or 1.0}
    least = {"top_k": preset.top_k or 1, "threshold": preset.threshold or 0.0}
    values = {
        "query_self_reconstruction": F.self_reconstruction_loss(*query[:3], **ignored),
        "query_positive_activation": F.positive_activation_loss(
            query[0], *document[1:3], **ignored
        ),
        "query_flops": flops,
        "query_language_penalty": F.language_penalty_loss(vectors[0], foreign),
        "query_min_activation": F.min_activation_loss(vectors[0], own, **least),
        "triplet_margin": F.triplet_margin_loss(*vectors, margin=preset.margin or 0.0),
        "distillation": F.distillation_loss(x @ torch.cat(keys).T, scores, **taught),
        "context_distillation": F.distillation_loss(x @ x.T, anchors, **taught),
    }
    for epoch in range(1, 28):
        weights, temperature = dict(preset.weights), preset.temperature
        if preset.curriculum is not None:
            phase = next((phase for phase in PHASES if epoch <= phase[0]), PHASES[-1])
            _, temperature, weights["info_nce"], weights["distillation"] = phase
        values["info_nce"] = F.info_nce_loss(*vectors, temperature=temperature)
        expected = sum(weight * values[name] for name, weight in weights.items() if weight)
        torch.testing.assert_close(objective(batch).total, expected, rtol=1e-12, atol=1e-12)
        schedule.step()
        schedule.step()


def test_recommended_is_info_nce_of_dot_products():
    batch = sl.SpladeBatch(texts(), texts())
    expected = F.info_nce_loss(batch[0][0], batch[1][0], temperature=1.0, similarity="dot")
    torch.testing.assert_close(RECOMMENDED.objective()(batch).total, expected)
    assert (RECOMMENDED.start_active, RECOMMENDED.target_active) == (256, 64)


def test_what_an_objective_needs_and_hides():
    assert V22.missing() == ["temperature", "margin", "top_k", "threshold"]
    assert V26.missing() == V28.missing() == []
    hidden = V26.objective(idf=IDF, stopword_ids=STOPWORDS, hide_stopwords=True).terms
    assert hidden["info_nce"].stopword_ids.tolist() == STOPWORDS
    assert hidden["query_flops"].stopword_ids.tolist() == STOPWORDS
    assert RECOMMENDED.missing() == []
    for wrong, message in (
        (V22.objective, r"numbers for V22.replace\(temperature=\.\.\., margin"),
        (V26.objective, "expected `idf`"),
        (lambda: V28.objective(idf=IDF), "`allowed_token_ids`"),
        (lambda: V26.schedules(V26.objective(idf=IDF)), "`steps_per_epoch`"),
        (lambda: V26.replace(weights={"flops": 1.0}), "one of .*'query_flops'.*, got 'flops'"),
        (lambda: V26.objective(idf=IDF, hide_stopwords=True), "`stopword_ids` with"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            wrong()


def test_a_term_of_weight_0_is_off_in_every_phase():
    zeros = dict.fromkeys(("distillation", "context_distillation"), 0.0)
    preset = V28.replace(weights=zeros)
    objective = preset.objective(idf=IDF, allowed_token_ids=ALLOWED)
    (schedule,) = preset.schedules(objective, steps_per_epoch=1)
    for epoch in range(1, 27):
        on = {name for name, weight in V28.weights.items() if weight} - {*zeros}
        assert {*objective.active()} == on
        assert objective.weights["info_nce"] == (2.5 if epoch <= 8 else 3.0)
        schedule.step()
