"""The Trainer of transformers: what it does beyond the table of test_loops.py."""

from itertools import count

import numpy as np
import pytest
import torch

from sparse_losses import (
    RECOMMENDED,
    V26,
    V28,
    BM25Teacher,
    Diagnostics,
    DocumentFrequency,
    SparsityController,
    SpladeEncoder,
)
from sparse_losses.integrations.transformers import SpladeCollator, SpladeTrainer
from tests.integrations import setting
from tests.integrations.setting import arguments
from tests.integrations.trainers import InOrder, by_hugging_face, compare

VOCAB_SIZE = setting.VOCAB_SIZE
EXACT = {"rtol": 0.0, "atol": 0.0}
works_with = pytest.mark.works_with
TRAINER = "Hugging Face Trainer"


@works_with(TRAINER, "accumulation")
def test_a_last_step_of_fewer_batches_is_the_mean_of_those(tmp_path):
    collate = SpladeCollator(setting.tokenizer(), 16)
    options = {"accumulation": 3, "epochs": 1, "collate": collate}
    run = by_hugging_face(tmp_path, setting.row_by_row(), **options)
    assert len(run.totals) == 2
    compare(run, setting.row_by_row(), batch_size=12, epochs=1, collate=collate)


def resumable(folder, encoder, objective, **settings):
    saved = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    stateful = {"optim": "adamw_torch", "lr_scheduler_type": "linear"}
    return SpladeTrainer(
        encoder,
        arguments(folder, **saved, **stateful, **settings),
        objective=objective,
        schedules=setting.steered(objective),
        diagnostics={"document": Diagnostics(encoder.vocab_size)},
        train_dataset=setting.rows(24),
    )


def checked(history):
    """What was logged of every step, but for how long it took."""
    return {entry["step"]: entry for entry in history if "loss" in entry}


@works_with(TRAINER, "resume")
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"accelerator_config": {"use_seedable_sampler": False}},  # PyTorch's own
    ],
)
def test_shuffled_rows_dropout_and_a_gate_are_resumed_too(tmp_path, settings):
    options = {"dropout": 0.1, "gate": True, "idf_weights": torch.linspace(0.5, 1.5, VOCAB_SIZE)}
    first = resumable(tmp_path, setting.encoder(**options), setting.objective(), **settings)
    first.train()
    objective = setting.objective()
    second = resumable(tmp_path, setting.encoder(**options), objective, **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    torch.testing.assert_close(setting.weights(second.model), setting.weights(first.model), **EXACT)
    assert checked(second.state.log_history) == checked(first.state.log_history)
    for mine, theirs in zip(second.schedules, first.schedules, strict=True):
        assert mine.state_dict() == theirs.state_dict()
    assert second.schedules[0].steps_taken == 8
    assert objective.weights == first.model.objective.weights


def test_a_checkpoint_is_a_folder_of_the_encoder(tmp_path):
    encoder = setting.encoder(0.1, gate=True)
    trainer = resumable(tmp_path, encoder, setting.objective())
    trainer.train()
    found = SpladeEncoder.from_pretrained(tmp_path / "checkpoint-8")
    texts = ["서울 맛집", "a learned sparse retriever"]
    torch.testing.assert_close(
        found.encode(texts, output="dense"), encoder.encode(texts, output="dense"), **EXACT
    )
    assert trainer.schedules[1].checkpoint == str(tmp_path / "checkpoint-8")
    trainer.save_model(str(tmp_path / "end"))
    found = SpladeEncoder.from_pretrained(tmp_path / "end")
    torch.testing.assert_close(setting.weights(found), setting.weights(encoder), **EXACT)


def test_resuming_needs_the_schedules_of_the_run(tmp_path):
    resumable(tmp_path, setting.encoder(), setting.objective()).train()
    again = resumable(tmp_path, setting.encoder(), setting.objective())
    again.schedules = again.schedules[:1]
    with pytest.raises(ValueError, match=r"expected 2 schedules as in .*checkpoint-8.*, got 1"):
        again.train(resume_from_checkpoint=True)


class Words(torch.nn.Module):
    """An encoder that is not ours: a token activates its neighbours."""

    def __init__(self, vocab_size):
        super().__init__()
        self.map = torch.nn.Embedding(vocab_size, vocab_size)
        self.again = self.map  # shared, as a tied head is

    def forward(self, input_ids, attention_mask):
        return (self.map(input_ids) * attention_mask[..., None]).relu().amax(1)


@works_with(TRAINER, "resume")
def test_another_encoder_resumes_and_the_best_of_it_comes_back(tmp_path):
    collator = SpladeCollator(setting.encoder().tokenizer, 16)
    best = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "earliness",
    }

    def trainer():
        torch.manual_seed(3)
        calls = count()
        return SpladeTrainer(
            Words(VOCAB_SIZE),
            arguments(tmp_path, **{"max_steps": 6, "save_strategy": "steps", **best}),
            objective=setting.objective(),
            data_collator=collator,
            train_dataset=setting.rows(),
            eval_dataset=setting.rows(4),
            compute_metrics=lambda _: {"earliness": -next(calls)},  # so the first is the best
        )

    first = trainer()
    first.train()
    assert first.state.best_global_step == 2
    name = "eval_info_nce"
    before = [entry[name] for entry in first.state.log_history if name in entry]
    assert first.evaluate()[name] == pytest.approx(before[0])
    assert before[0] > before[-1]
    second = trainer()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert checked(second.state.log_history) == checked(first.state.log_history)
    torch.testing.assert_close(setting.weights(second.model), setting.weights(first.model), **EXACT)


@works_with(TRAINER, "fp32")
def test_terms_are_logged_as_means_of_the_window(tmp_path):
    """Evaluation in between is no part of it."""
    objective = setting.objective()
    encoder = setting.encoder()
    trainer = SpladeTrainer(
        encoder,
        arguments(
            tmp_path,
            max_steps=5,
            gradient_accumulation_steps=2,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=1,
        ),
        objective=objective,
        schedules=[SparsityController(objective, target_active=30, every=1)],
        diagnostics={side: Diagnostics(encoder.vocab_size) for side in ("query", "document")},
        train_dataset=setting.rows(40),
        eval_dataset=setting.rows(4),
    )
    seen = []
    objective.register_forward_hook(lambda m, _, found: seen.append(found) if m.training else None)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    for entry, window in zip(logged, (seen[:4], seen[4:8]), strict=True):
        for name in ("info_nce", "query_flops", "document_flops"):
            values = [output.terms[name].item() for output in window]
            assert entry[name] == pytest.approx(sum(values) / 4)
        assert entry["loss"] == pytest.approx(sum(o.total.item() for o in window) / 4)
        assert entry["query/texts"] == entry["document/texts"] == 16
        assert 0 < entry["query/active_dimensions"] < entry["document/largest"]
        assert entry["document_flops/step"] == entry["step"]
    assert logged[1]["document_flops/weight"] == 0.01  # the first 20 steps
    assert not any(isinstance(value, str) for entry in logged for value in entry.values())


def recall(prediction):
    anchor, positive = (torch.from_numpy(x) for x in prediction.predictions)
    best = (anchor @ positive.T).argmax(1)
    return {"recall": (best == torch.arange(len(best))).double().mean().item()}


@pytest.mark.parametrize("metrics", [None, recall])
def test_evaluation_needs_no_labels(tmp_path, metrics):
    """Loss and terms are means over rows, of which the last batch has fewer."""
    encoder, objective, rows = setting.encoder(), setting.objective(), setting.rows(7)
    trainer = SpladeTrainer(
        encoder,
        arguments(tmp_path, per_device_eval_batch_size=4),
        objective=objective,
        eval_dataset=rows,
        compute_metrics=metrics,
    )
    found = trainer.evaluate()
    encoder.eval()
    collator = SpladeCollator(encoder.tokenizer, encoder.max_length)
    with torch.no_grad():
        of_four, of_three = (
            objective(setting.batch_of(encoder, collator(some))) for some in (rows[:4], rows[4:])
        )
    mean = (4 * of_four.total.item() + 3 * of_three.total.item()) / 7
    assert found["eval_loss"] == pytest.approx(mean, rel=1e-5)
    for name, term in of_four.terms.items():
        mean = (4 * term.item() + 3 * of_three.terms[name].item()) / 7
        assert found[f"eval_{name}"] == pytest.approx(mean, rel=1e-5)
    assert ("eval_recall" in found) == (metrics is not None)
    if metrics:
        texts = [[row[name] for row in rows] for name in ("anchor", "positive")]
        vectors = [encoder.encode(column, output="dense").numpy() for column in texts]
        expected = recall(type("Prediction", (), {"predictions": vectors}))
        assert found["eval_recall"] == pytest.approx(expected["recall"])


def test_activation_checkpointing_changes_nothing(tmp_path):
    run = by_hugging_face(tmp_path / "1", setting.objective(), activation_checkpointing=True)
    plain = by_hugging_face(tmp_path / "2", setting.objective())
    assert run.encoder.model.is_activation_checkpointing
    assert run.totals == pytest.approx(plain.totals, rel=1e-6)
    weights = (setting.weights(x.encoder, x.objective) for x in (run, plain))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)


def test_a_plain_callable_is_an_objective_too_and_may_ask_for_logits(tmp_path):
    seen = []

    def loss(batch):
        seen.append(batch)
        return (batch.anchor.activations - batch.positive.activations).square().mean()

    encoder = setting.encoder()
    trainer = SpladeTrainer(
        encoder,
        arguments(tmp_path, per_device_train_batch_size=16),
        objective=loss,
        return_logits=True,
        train_dataset=setting.rows(),
    )
    trainer.train()
    losses = [entry["loss"] for entry in checked(trainer.state.log_history).values()]
    assert losses[-1] < losses[0]
    assert seen[0].anchor.logits.min() < 0
    assert seen[0].negative.logits.shape == (16, 1, VOCAB_SIZE)
    assert seen[0].teacher_scores.shape == (16, 2)
    assert seen[0].teacher_candidates == "own", "also where 16 fitted other candidates"
    assert seen[0].positive_ids.dtype == torch.int64


def test_a_learned_temperature_is_not_decayed(tmp_path):
    run = by_hugging_face(tmp_path, setting.objective(), weight_decay=0.1)
    decayed, kept = run.optimizer.param_groups
    temperature = run.objective.info_nce.temperature
    assert any(parameter is temperature for parameter in kept["params"])
    assert any(p is run.encoder.head.weight for p in decayed["params"])


def test_the_collator_tokenizes_as_the_encoder_does():
    encoder = setting.encoder()
    collator = SpladeCollator(encoder.tokenizer, encoder.max_length)
    rows = [
        {"anchor": "서울 맛집", "positive": "a " * 100, "negative": ["", "over the"], "id": 3},
        {"anchor": "", "positive": "sparse", "negative": ["one weight a", "a"], "id": 4},
    ]
    batch = collator(rows)
    assert sorted(batch) == ["anchor", "negative", "positive"]
    for name in ("anchor", "positive"):
        expected = encoder.tokenize([row[name] for row in rows])
        torch.testing.assert_close(dict(batch[name]), expected, **EXACT)
    expected = encoder.tokenize(["", "over the", "one weight a", "a"])["input_ids"]
    assert batch["negative"]["input_ids"].tolist() == expected.unflatten(0, (2, 2)).tolist()
    single = collator([{**row, "negative": "over the"} for row in rows])
    assert single["negative"]["input_ids"].ndim == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"anchor": "a"}, r"expected rows with 'anchor' and 'positive'.*got \['anchor'\]"),
        ({"anchor": "a", "positive": "b"}, "either all or no rows with 'negative'"),
        ({"anchor": "a", "positive": "b", "negative": ["c", "d"]}, r"in every row, got \[1, 2\]"),
        ({"anchor": "a", "positive": "b", "negative": "c"}, r"got \[1, None\]"),
        ({"anchor": "a", "positive": "b", "negative": None}, "'negative' to be a text.*got None"),
        ({"anchor": "a", "positive": None, "negative": ["c"]}, "'positive' to be .*got None"),
        ({"anchor": "a", "positive": "b", "negative": [None]}, r"one or more, got \[None\]"),
        ({"anchor": "a", "positive": "b", "negative": []}, r"one or more, got \[\]"),
        ({"anchor": "a", "positive": "b", "negative": {"c"}}, r"one or more, got \{'c'\}"),
        ({"anchor": "a", "positive": "b", "negative": {"c": 1}}, r"one or more, got \{'c': 1\}"),
        ({"anchor": ["a"], "positive": "b", "negative": ["c"]}, r"'anchor' to be a text, got \['a"),
    ],
)
def test_rows_that_differ_are_errors(other, message):
    collator = SpladeCollator(setting.encoder().tokenizer, 16)
    with pytest.raises(ValueError, match=message):
        collator([{"anchor": "a", "positive": "b", "negative": ["c"]}, other])


PAIRS = [{"anchor": a, "positive": f"{a} {b}"} for a, b in zip("abcd", "efgh", strict=True)]


def overlap(query, document):
    """A teacher of texts: the letters that they share."""
    rows = [[len({*q} & {*d} - {" "}) for d in document["texts"]] for q in query["texts"]]
    return torch.tensor(rows, dtype=torch.float64)


def test_rows_may_bring_the_scores_of_a_whole_batch():
    collator = SpladeCollator(setting.tokenizer(), 16)
    scores, anchors = torch.rand(4, 4), torch.rand(4, 4)
    rows = [
        row | {"teacher_scores": s.tolist(), "teacher_anchor_scores": a.tolist()}
        for row, s, a in zip(PAIRS, scores, anchors, strict=True)
    ]
    batch = collator(rows)
    torch.testing.assert_close(batch["teacher_scores"], scores, **EXACT)
    torch.testing.assert_close(batch["teacher_anchor_scores"], anchors, **EXACT)
    assert "teacher_candidates" not in batch, "without negatives there is one kind"
    with pytest.raises(ValueError, match=r"either all or no rows with .*'teacher_anchor_scores'"):
        collator([*rows[:3], PAIRS[3]])


@pytest.mark.parametrize("negative", ["ab", ["ab", "cd", "x"]])
@pytest.mark.parametrize("candidates", ["own", "batch"])
@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_scores_beside_negatives_are_what_the_collator_was_told(negative, candidates, count):
    collator = SpladeCollator(setting.tokenizer(), 16, teacher_candidates=candidates)
    rows = [row | {"negative": negative, "teacher_scores": [0.5] * count} for row in PAIRS]
    is_list = isinstance(negative, list)
    right = {"own": [4 if is_list else 2], "batch": [4, 7 if is_list else 8]}[candidates]
    if count in right:
        assert collator(rows)["teacher_candidates"] == candidates
        return
    wanted = " or ".join(f".* = {n}" for n in right)
    with pytest.raises(ValueError, match=rf'{wanted} .*{candidates!r}, got \[{count}\]: use "own"'):
        collator(rows)


@pytest.mark.parametrize("negative", [None, "a f", ["a f", "h"]])
def test_a_teacher_scores_the_batch_that_was_made(negative):
    rows = PAIRS if negative is None else [row | {"negative": negative} for row in PAIRS]
    collator = SpladeCollator(setting.tokenizer(), 16, teacher=overlap, score_anchors=True)
    batch = collator(rows)
    expected = torch.eye(4)
    if negative == "a f":
        first = torch.tensor([1.0, 0.0, 0.0, 0.0])
        expected = torch.cat([expected, first[:, None].expand(4, 4)], 1)
    if isinstance(negative, list):
        expected = torch.cat([expected, torch.tensor([[1.0, 0], [0, 0], [0, 0], [0, 0]])], 1)
    torch.testing.assert_close(batch["teacher_scores"], expected.double())
    torch.testing.assert_close(batch["teacher_anchor_scores"], torch.eye(4).double())
    assert batch.get("teacher_candidates") == (None if negative is None else "batch")
    assert "texts" not in batch["anchor"]
    plain = SpladeCollator(setting.tokenizer(), 16, teacher=overlap)(rows)
    assert "teacher_anchor_scores" not in plain


def test_a_collators_teacher_is_the_only_one():
    with pytest.raises(ValueError, match="`teacher` for `score_anchors=True`, got None"):
        SpladeCollator(setting.tokenizer(), score_anchors=True)
    with pytest.raises(ValueError, match="`teacher_candidates` to be one of 'own', 'batch', got"):
        SpladeCollator(setting.tokenizer(), teacher_candidates="all")
    taught = SpladeCollator(setting.tokenizer(), teacher=overlap)
    rows = [row | {"teacher_scores": [1.0] * 4} for row in PAIRS]
    with pytest.raises(ValueError, match=r"because of `teacher`, got \['teacher_scores'\]"):
        taught(rows)


def pairs():
    return [{name: row[name] for name in ("anchor", "positive")} for row in setting.rows(16)]


def bm25():
    counts = DocumentFrequency(VOCAB_SIZE)
    counts.update(**setting.encoder().tokenize([row["positive"] for row in pairs()]))
    return counts, BM25Teacher(counts, special_token_ids=setting.tokenizer().all_special_ids)


def of_preset(preset, counts, steps):
    """Objective and schedules of the shortest code from a preset to a run."""
    special = setting.tokenizer().all_special_ids
    objective = preset.objective(idf=counts.idf(), special_token_ids=special)
    return objective, preset.schedules(objective, steps=steps, steps_per_epoch=4)


@pytest.mark.parametrize(
    ("preset", "teacher"),
    [
        (V26, overlap),
        (V28.without("query_language_penalty"), overlap),
        (V26, "bm25"),
        (RECOMMENDED.replace(target_active={"document_flops": 10}), "bm25"),
    ],
    ids=["V26", "V28", "V26 with BM25", "RECOMMENDED"],
)
def test_a_preset_trains_on_plain_pairs_with_a_teacher(preset, teacher, tmp_path):
    counts, of_ids = bm25()
    teacher = of_ids if teacher == "bm25" else teacher
    objective, schedules = of_preset(preset, counts, 8)
    encoder = setting.encoder()
    trainer = InOrder(
        encoder,
        arguments(tmp_path, max_steps=8),
        objective=objective,
        schedules=schedules,
        teacher=teacher,
        train_dataset=pairs(),
    )
    trainer.train()
    logged = checked(trainer.state.log_history)
    assert {name for name, weight in preset.weights.items() if weight} <= logged[8].keys()
    assert all(entry["distillation"] > 0 for entry in logged.values())

    anchors = "context_distillation" in preset.weights
    collate = SpladeCollator(setting.tokenizer(), 40, teacher=teacher, score_anchors=anchors)
    reference, theirs = of_preset(preset, counts, 8)
    other = setting.encoder()
    batches = list(setting.loader(pairs(), 4, collate_fn=collate)) * 2
    totals = setting.plain_loop(other, reference, batches, schedules=theirs)
    assert [entry["loss"] for entry in logged.values()] == pytest.approx(totals, rel=1e-4)
    setting.assert_trained_alike(encoder, objective, other, reference, 1e-4)
    silent, scores = of_preset(preset, counts, 8)[0], batches[0]["teacher_scores"]
    assert scores.shape == (4, 4)
    batches[0]["teacher_scores"] = -scores
    changed = silent(setting.batch_of(setting.encoder(), batches[0])).terms["distillation"]
    assert changed != pytest.approx(logged[1]["distillation"], rel=1e-3), "the scores are read"


def test_a_teacher_is_the_trainers_or_the_collators(tmp_path):
    collator = SpladeCollator(setting.tokenizer(), 16)
    with pytest.raises(ValueError, match="expected `teacher` or `data_collator`, got both"):
        SpladeTrainer(
            setting.encoder(),
            arguments(tmp_path),
            objective=setting.objective(),
            teacher=overlap,
            data_collator=collator,
        )


@pytest.mark.parametrize("number", [0.75, "x", None])
def test_ids_that_are_no_integers_are_an_error(number):
    collator = SpladeCollator(setting.encoder().tokenizer, 16)
    row = {"anchor": "a", "positive": "b"}
    with pytest.raises(ValueError, match=rf"'positive_ids' to be integers, got {number!r}"):
        collator([row | {"positive_ids": 0}, row | {"positive_ids": number}])
    ids = [row | {"positive_ids": one} for one in (3, np.int64(4), torch.tensor(5))]
    assert collator(ids)["positive_ids"].tolist() == [3, 4, 5]

    with pytest.raises(ValueError, match=f"'positive_ids' to be integers of 64 bits, got {2**63}"):
        collator([row | {"positive_ids": 2**63}])


@pytest.mark.parametrize("name", ["teacher_scores", "teacher_anchor_scores"])
@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (None, "to be a list of numbers in every row, got None"),
        (["a", "b"], r"to be a list of numbers in every row, got \['a', 'b'\]"),
        ([1.0, None], r"to be a list of numbers in every row, got \[1.0, None\]"),
        ([[1.0, 2.0]], r"to be a list of numbers in every row, got \[\["),
        (0.5, "to be a list of numbers in every row, got 0.5"),
        ([1.0, 2.0, 3.0], r"in every row, got \[2, 3\]"),
    ],
)
def test_scores_that_are_no_list_of_numbers_are_an_error(name, scores, message):
    first, second = (dict(row) for row in PAIRS[:2])
    with pytest.raises(ValueError, match=f"{name}' {message}"):
        SpladeCollator(setting.tokenizer(), 16)([first | {name: [1, 2]}, second | {name: scores}])


@pytest.mark.parametrize("convert", [torch.tensor, np.array, lambda row: [*torch.tensor(row)]])
def test_a_row_may_hold_its_scores_as_a_tensor(convert):
    scores = [[1.0, 2.0], [3.0, 4.0]]
    rows = [row | {"teacher_scores": convert(s)} for row, s in zip(PAIRS[:2], scores, strict=True)]
    assert SpladeCollator(setting.tokenizer(), 16)(rows)["teacher_scores"].tolist() == scores


@pytest.mark.parametrize("made", [None, "none", ["a"]])
def test_a_teacher_that_returns_no_scores_is_an_error(made):
    collator = SpladeCollator(setting.tokenizer(), 16, teacher=lambda query, document: made)
    with pytest.raises(
        TypeError, match=r"expected the teacher to return .*, got (NoneTy|str|list)"
    ):
        collator(PAIRS)


def test_a_collator_checks_its_settings():
    tokenizer = setting.tokenizer()
    special = tokenizer.num_special_tokens_to_add(pair=False)
    for length in (0, special):
        with pytest.raises(ValueError, match=f"`max_length` .* >= {special + 1}, got {length}"):
            SpladeCollator(tokenizer, length)
    SpladeCollator(tokenizer, special + 1)
    with pytest.raises(TypeError, match=r"`teacher` to be a BM25Teacher .*, got 'bm25'"):
        SpladeCollator(tokenizer, teacher="bm25")
    with pytest.raises(ValueError, match="expected at least one row, got none"):
        SpladeCollator(tokenizer)([])
    with pytest.raises(TypeError, match=r"expected rows as dicts of columns, got 'abc'"):
        SpladeCollator(tokenizer)(["abc"])


@pytest.mark.parametrize("metric", ["info_nce", "eval_document_flops", "eval_some_info_nce"])
def test_the_worst_model_is_not_to_be_kept_for_the_best(tmp_path, metric):
    args = arguments(tmp_path, metric_for_best_model=metric)
    with pytest.raises(ValueError, match="`greater_is_better=False` for a loss"):
        SpladeTrainer(setting.encoder(), args, objective=setting.objective())
    args = arguments(tmp_path, metric_for_best_model=metric, greater_is_better=False)
    SpladeTrainer(setting.encoder(), args, objective=setting.objective())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diagnostics": {"queries": Diagnostics(VOCAB_SIZE)}}, "diagnostics"),
        ({"compute_loss_func": print}, "got `compute_loss_func`"),
        ({"model": Words(5)}, "expected `data_collator` for a model that is no SpladeEncoder"),
        ({"return_logits": 1}, "return_logits"),
        ({"settings": {"label_smoothing_factor": 0.1}}, "no classes to smooth, got 0.1"),
        ({"settings": {"push_to_hub": True}}, r"got True; to publish: `encoder.save_pretrained"),
        ({"settings": {"neftune_noise_alpha": 5.0}}, r"`neftune_noise_alpha=None`, got 5.0"),
    ],
)
def test_wrong_settings_are_errors(tmp_path, options, message):
    settings = options.get("settings", {})
    options = {name: option for name, option in options.items() if name != "settings"}
    options = {"model": setting.encoder(), "args": arguments(tmp_path, **settings), **options}
    with pytest.raises((TypeError, ValueError), match=message):
        SpladeTrainer(**options, objective=setting.objective())


@pytest.mark.parametrize("refused", ["create_model_card", "push_to_hub"])
def test_what_would_publish_says_how_to(tmp_path, refused):
    trainer = SpladeTrainer(setting.encoder(), arguments(tmp_path), objective=setting.objective())
    with pytest.raises(NotImplementedError, match=r"`encoder.save_pretrained\(folder\)`, then up"):
        getattr(trainer, refused)("a title")


def test_what_the_controller_has_not_seen_yet_is_not_logged(tmp_path):
    objective = setting.objective()
    schedules = [SparsityController(objective, target_active=30, every=3)]
    options = {"schedules": schedules, "train_dataset": setting.rows()}
    trainer = SpladeTrainer(setting.encoder(), arguments(tmp_path), objective=objective, **options)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    seen = [f"document_flops/{name}" for name in ("active", "dead_rows", "mean_activation")]
    for entry in logged[:2]:
        assert entry["document_flops/weight"] == 0.01
        assert not entry.keys() & {*seen}
    assert entry["step"] == 2
    assert logged[2]["document_flops/mean_activation"] > 0
    assert logged[2].keys() >= {*seen}


def test_several_gpus_in_one_process_are_an_error(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="expected one process per GPU, got 2 GPUs in this one"):
        SpladeTrainer(setting.encoder(), args, objective=setting.objective())
