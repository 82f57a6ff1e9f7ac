"""Teachers, learned parameters, evaluation, the end; the model card; errors.

Accumulation, gradient caching and half precision are rows of tests/integrations/test_loops.py.
"""

import pytest
import torch
from datasets import DatasetDict
from sentence_transformers import SparseEncoderTrainer

from sparse_losses import (
    BM25Teacher,
    DistillationLoss,
    DocumentFrequency,
    FlopsLoss,
    InfoNCELoss,
    MarginMSELoss,
    NWSLoss,
    PairwiseContrastiveLoss,
    PositiveActivationLoss,
    SelfReconstructionLoss,
    SpladeBatch,
    SpladeObjective,
    TripletMarginLoss,
)
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss, keep_texts
from sparse_losses.integrations.transformers import TrainingState
from sparse_losses.objective import terms
from tests.integrations.sentence_transformers.runs import (
    ALONE,
    COLUMNS,
    NAME,
    PROTOTYPE,
    ROWS,
    SAME,
    SCORES,
    SIMILARITY,
    VOCABULARY,
    adapter,
    arguments,
    assert_moved,
    assert_same_weights,
    dataset,
    learning,
    logged,
    objective,
    own_negatives,
    plain_loop,
    random_columns,
    splade,
    train,
)
from tests.representation.tiny_models import CORPUS


def taught_objective():
    scaled = {"score_scale": 10.0, "similarity": "dot"}
    return SpladeObjective(
        {
            "info_nce": (1.0, terms.info_nce()),
            "distillation": (2.0, terms.distillation(**scaled)),
            "context": (0.5, terms.context_distillation(**scaled)),
        }
    )


def bm25(model):
    """The teacher, and its scores of texts with texts."""
    counts = DocumentFrequency(VOCABULARY)
    features = model.preprocess(COLUMNS["positive"])
    counts.update(features["input_ids"], features["attention_mask"])
    teacher = BM25Teacher(counts, special_token_ids=model.tokenizer.all_special_ids)
    return teacher, lambda x, y: teacher(model.preprocess(x), model.preprocess(y))


def bi_encoder(model):
    options = {"convert_to_tensor": True, "show_progress_bar": False}

    def scores(queries, documents):
        documents = model.encode_document(documents, **options)
        return model.similarity(model.encode_query(queries, **options), documents)

    return model, scores


@pytest.mark.parametrize("mini_batch_size", [None, 3])
@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("kind", ["BM25", "dense", "sparse"])
def test_a_teacher_scores_all_candidates(kind, columns, mini_batch_size, sparse, dense, tmp_path):
    """A bi-encoder reads whole texts, of which this student keeps two words."""
    model, reference, loss = sparse(), sparse(), taught_objective()
    teacher, scores = {
        "BM25": lambda: bm25(model),
        "dense": lambda: bi_encoder(dense().float()),
        "sparse": lambda: bi_encoder(sparse().float()),
    }[kind]()
    if kind != "BM25":
        model.max_seq_length = reference.max_seq_length = 4
    seen = []

    def by_hand(texts, _):
        rows = range(0, 4) if len(seen) % 2 == 0 else range(4, 8)
        seen.append(rows)
        queries, *others = [[COLUMNS[name][i] for i in rows] for name in [*COLUMNS][:columns]]
        taught = [scores(queries, x) for x in others]
        anchor, positive, *negatives = texts
        negative = negatives[0] if negatives else None
        if columns == 4:  # each anchor's own
            taught[1:] = [x.diagonal()[:, None] for x in taught[1:]]
            negative = own_negatives(negatives)
        known = {"teacher_scores": torch.cat(taught, 1), "teacher_candidates": "batch"}
        known["teacher_anchor_scores"] = scores(queries, queries)
        return loss(SpladeBatch(anchor, positive, negative, **known)).total

    options = {"teacher": teacher, "score_anchors": True, "mini_batch_size": mini_batch_size}
    ours = adapter(model, loss, **options)
    assert ours.get_config_dict()["teacher"] == type(teacher).__name__
    # Of a single row there is nothing to distil.
    trainer = SparseEncoderTrainer(
        model=model,
        args=arguments(tmp_path, dataloader_drop_last=True),
        train_dataset=dataset(columns),
        loss=ours,
    )
    assert keep_texts(trainer) is trainer
    trainer.train()
    values = plain_loop(reference, by_hand, columns, count=8)
    assert logged(trainer) == pytest.approx(values, rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)
    assert_moved(model, sparse())
    ours_own = {id(x) for x in ours.parameters()}
    assert not [x for x in teacher.parameters() if id(x) in ours_own], "nobody optimises it"


def test_a_bi_encoder_teaches_an_own_loop_and_says_that_it_needs_texts(dense, sparse):
    teacher, texts = dense().float(), [COLUMNS["anchor"][:3], COLUMNS["positive"][:3]]
    columns = dict(zip(("anchor", "positive"), texts, strict=True))

    def encode(input_ids, attention_mask):
        return torch.nn.functional.one_hot(input_ids, VOCABULARY).amax(1).float()

    encode.tokenize = sparse().preprocess
    options = {"teacher": teacher, "score_anchors": True}
    nested = [[x, "fox"] for x in COLUMNS["negative"][:3]]
    batch = SpladeBatch.from_columns(encode, columns | {"negative": nested}, **options)
    vectors = [teacher.encode(x, convert_to_tensor=True) for x in texts]
    torch.testing.assert_close(batch.teacher_scores[:, :3], teacher.similarity(*vectors))
    own = teacher.encode([row[1] for row in nested], convert_to_tensor=True)
    torch.testing.assert_close(
        batch.teacher_scores[:, 4], teacher.similarity_pairwise(vectors[0], own)
    )
    assert batch.teacher_anchor_scores.shape == (3, 3)
    student = sparse()
    ours = adapter(student, taught_objective(), teacher=teacher)
    with pytest.raises(ValueError, match=r"got token ids alone .*keep_texts\(trainer\)"):
        ours([student.preprocess(x) for x in texts])
    ours = adapter(student, taught_objective(), teacher=bm25(student)[0])
    with pytest.raises(TypeError, match="expected `query` as a dict of the tensors input_ids"):
        ours.compute_loss_from_embeddings(random_columns(2))


@pytest.mark.works_with(NAME, "cached", "accumulation")
@pytest.mark.parametrize("mini_batch_size", [None, 3])
def test_learned_temperature_is_trained(mini_batch_size, sparse, tmp_path):
    model, reference, temperature = sparse(), sparse(), torch.nn.Parameter(torch.tensor(0.5))
    ours = SentenceTransformersLoss(model, learning(), mini_batch_size=mini_batch_size)
    train(model, ours, dataset(2), tmp_path, gradient_accumulation_steps=2)
    plain = InfoNCELoss(temperature=temperature)

    def by_hand(texts, _):
        return plain(texts[0].activations, texts[1].activations)

    plain_loop(reference, by_hand, 2, learned=[temperature], every=2)
    # The tokenizer's training breaks ties at random, so the size of the step differs by process:
    # what is compared is the step, not the temperature.
    moved = temperature.item() - 0.5
    assert moved != 0.0
    assert ours.loss.temperature.item() - 0.5 == pytest.approx(moved, rel=1e-2)
    assert_same_weights(model, reference)


def test_the_second_pass_of_the_cache_is_under_the_autocast_of_the_first(sparse):
    """In an own loop, whose backward pass is outside of it."""
    gradients = []
    for size in (None, 9, 3):
        model = sparse().float()
        ours = SentenceTransformersLoss(model, InfoNCELoss(), mini_batch_size=size)
        columns = [model.preprocess(COLUMNS[name]) for name in ("anchor", "positive")]
        with torch.autocast("cpu", torch.bfloat16):
            value = ours(columns)
        value.backward()
        found = [x.grad.flatten() for x in model.parameters() if x.grad is not None]
        gradients.append(torch.cat(found))
    whole, *cached = gradients
    for gradient in cached:  # bf16 rounds other sums; fp32 in the second pass is off by more
        assert (gradient - whole).norm() < 0.01 * whole.norm()


def test_the_evaluation_loss_is_the_loss(sparse, tmp_path):
    loss, columns, labels, function = ALONE["objective"]
    model, data = sparse(), dataset(columns, labels)
    ours = adapter(model, loss, mini_batch_size=3)
    trainer = SparseEncoderTrainer(
        model=model, args=arguments(tmp_path), eval_dataset=data, loss=ours
    )
    metrics = trainer.evaluate()
    values = plain_loop(sparse(), function, columns, labels, epochs=1, lr=0.0)
    expected = sum(v * n for v, n in zip(values, (4, 4, 1), strict=True)) / ROWS
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.works_with(NAME, "fp32", "resume")
def test_learned_parameters_of_a_dict_of_losses_are_resumed(sparse, tmp_path):
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = sparse()
        loss = {
            "pairs": SentenceTransformersLoss(model, learning()),
            "splade": splade(model, SentenceTransformersLoss(model, learning()), FlopsLoss()),
        }
        data = DatasetDict({"pairs": dataset(2), "splade": dataset(3)})
        settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
        settings |= {"multi_dataset_batch_sampler": "round_robin"}
        callbacks = [TrainingState(loss=loss)]
        trainer = train(model, loss, data, tmp_path, resume=resume, callbacks=callbacks, **settings)
        learned = [loss["pairs"].loss.temperature, loss["splade"].loss.loss.temperature]
        runs.append((logged(trainer), [x.item() for x in learned], model))
    (values, learned, model), (resumed_values, resumed, same) = runs
    assert resumed == learned
    assert len({0.5, *learned}) == 3
    assert resumed_values == values
    assert_same_weights(same, model, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:a SparseEncoder has no place:UserWarning")
def test_a_sparse_encoder_is_calibrated_at_the_end(sparse, tmp_path, capsys):
    model, documents = sparse(), CORPUS * 2
    loss = SentenceTransformersLoss(model, InfoNCELoss())
    callbacks = [TrainingState(loss=loss, calibrate_on=documents, calibrate_to=9)]
    train(model, loss, dataset(2), tmp_path, callbacks=callbacks)
    others = documents[4::5]
    active = (model.encode_document(others).to_dense() > 0).sum(1).double().mean().item()
    assert f"active dimensions of other texts: {active:.1f} per d" in capsys.readouterr().out
    assert active == pytest.approx(9, rel=0.5)


def test_model_card_describes_the_loss(sparse, tmp_path):
    model = sparse()
    base = SentenceTransformersLoss(model, InfoNCELoss(temperature=0.123))
    regulariser = SentenceTransformersLoss(model, FlopsLoss())
    loss = {
        "alone": SentenceTransformersLoss(model, objective(), mini_batch_size=7),
        "splade": splade(model, base, query_regularizer=regulariser),
        "ids": SentenceTransformersLoss(model, InfoNCELoss(), labels_are_ids=True),
    }
    data = {"alone": dataset(4, SCORES), "splade": dataset(2), "ids": dataset(2, SAME)}
    trainer = train(model, loss, DatasetDict(data), tmp_path, max_steps=1)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text("utf-8")
    for text in (
        "sparse_losses.integrations.sentence_transformers.SentenceTransformersLoss",
        "document_self_reconstruction",
        '"mini_batch_size": "7"',
        "InfoNCELoss(temperature=0.123",
        '"query_regularizer": "SentenceTransformersLoss"',
        '"labels_are_ids": "True"',
        "- loss:SpladeObjective",
        "- loss:FlopsLoss",
    ):
        assert text in card, text


WRONG = [
    (torch.nn.MSELoss(), {}, TypeError, "got MSELoss"),
    (InfoNCELoss(reduction="none"), {}, ValueError, "reduction='none'"),
    (FlopsLoss(), {"labels_are_ids": True}, ValueError, r"of FlopsLoss \(\(\)\), got \['labels_a"),
    (NWSLoss(None), {}, ValueError, r"NWSLoss \(\('prototype',\)\), got \[\]"),
    (InfoNCELoss(), {"teacher": print}, ValueError, r"InfoNCELoss .*, got \['teacher'\]"),
    (FlopsLoss(), {"prototype": PROTOTYPE}, ValueError, r"got \['prototype'\]"),
    (FlopsLoss(), {"mini_batch_size": 0}, ValueError, "got 0"),
]


@pytest.mark.parametrize(("loss", "options", "error", "message"), WRONG)
def test_wrong_options_are_errors(loss, options, error, message, sparse):
    with pytest.raises(error, match=message):
        SentenceTransformersLoss(sparse(), loss, **options)


DISTILLED = SpladeObjective({"distillation": (1.0, terms.distillation())})
OWN_TOKENS = SpladeObjective({"own": (1.0, terms.self_reconstruction("query"))})
UNFIT = [
    (InfoNCELoss(), 1, None, "InfoNCELoss expected 2 columns or more"),
    (TripletMarginLoss(), 2, None, "expected 3 columns or more .*negatives.*, got 2"),
    (MarginMSELoss(), 3, None, r"\[6, 2\], the teacher's scores, got None"),
    (DistillationLoss(), 3, SCORES[:6], r"labels \[6, 2\].* got \[6, 3\]"),
    (PairwiseContrastiveLoss(), 2, None, "same"),
    (PairwiseContrastiveLoss(), 3, SAME[:6], "expected 2 to 2 columns .*, got 3"),
    (NWSLoss(SIMILARITY), 1, None, "query_labels"),
    (SelfReconstructionLoss(), 2, None, "input_ids"),
    (PositiveActivationLoss(), 2, None, "input_ids"),
    (OWN_TOKENS, 2, None, "input_ids"),
    (DISTILLED, 3, SCORES[:6], r"SpladeObjective expected labels \[6, 2\]"),
    (DISTILLED, 3, None, "teacher_scores"),
]


@pytest.mark.parametrize(("loss", "columns", "labels", "message"), UNFIT)
def test_wrong_columns_are_errors(loss, columns, labels, message, sparse):
    with pytest.raises((TypeError, ValueError), match=message):
        adapter(sparse(), loss).compute_loss_from_embeddings(random_columns(columns), labels)
