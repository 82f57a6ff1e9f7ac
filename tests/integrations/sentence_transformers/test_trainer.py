"""Teachers, learned parameters, the model card, errors; test_loops.py has the trainers' options."""

import pytest
import torch
from datasets import DatasetDict

import sparse_losses as sl
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss, keep_texts
from sparse_losses.integrations.transformers import TrainingState
from sparse_losses.objective import terms
from tests.integrations.sentence_transformers import runs


def taught_objective():
    scaled = {"score_scale": 10.0, "similarity": "dot"}
    several = {"info_nce": (1.0, terms.info_nce())}
    several["distillation"] = (2.0, terms.distillation(**scaled))
    several["context"] = (0.5, terms.context_distillation(**scaled))
    return sl.SpladeObjective(several)


def bm25(model):
    """The teacher, and its scores of texts with texts."""
    counts = sl.DocumentFrequency(runs.VOCABULARY)
    features = model.preprocess(runs.COLUMNS["positive"])
    counts.update(features["input_ids"], features["attention_mask"])
    teacher = sl.BM25Teacher(counts, special_token_ids=model.tokenizer.all_special_ids)
    return teacher, lambda x, y: teacher(model.preprocess(x), model.preprocess(y))


def bi_encoder(model):
    options = {"convert_to_tensor": True, "show_progress_bar": False}

    def scores(queries, documents):
        documents = model.encode_document(documents, **options)
        return model.similarity(model.encode_query(queries, **options), documents)

    return model, scores


@pytest.mark.parametrize(
    ("kind", "columns", "mini_batch_size"),
    [("BM25", 2, 3), ("BM25", 4, None), ("dense", 3, None), ("dense", 4, 3), ("sparse", 2, None)],
)
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

    def by_hand(texts, _):
        names = [*runs.COLUMNS][:columns]
        queries, *others = [runs.COLUMNS[name][:4] for name in names]
        taught = [scores(queries, x) for x in others]
        anchor, positive, *negatives = texts
        negative = negatives[0] if negatives else None
        if columns == 4:  # each anchor's own
            taught[1:] = [x.diagonal()[:, None] for x in taught[1:]]
            negative = runs.own_negatives(negatives)
        known = {"teacher_scores": torch.cat(taught, 1), "teacher_candidates": "batch"}
        known["teacher_anchor_scores"] = scores(queries, queries)
        return loss(sl.SpladeBatch(anchor, positive, negative, **known)).total

    ours = runs.adapter(model, loss, teacher=teacher, mini_batch_size=mini_batch_size)
    assert ours.get_config_dict()["teacher"] == type(teacher).__name__
    trainer = runs.trainer(model, ours, runs.dataset(columns), tmp_path)
    assert keep_texts(trainer) is trainer
    features, _ = trainer.collect_features(next(iter(trainer.get_train_dataloader())))
    runs.assert_same_step(ours, features, None, reference, by_hand)
    ours_own = {id(x) for x in ours.parameters()}
    assert not [x for x in teacher.parameters() if id(x) in ours_own], "nobody optimises it"


def test_a_bi_encoder_says_that_it_needs_texts(dense, sparse):
    student, texts = sparse(), [runs.COLUMNS["anchor"][:3], runs.COLUMNS["positive"][:3]]
    ours = runs.adapter(student, taught_objective(), teacher=dense().float())
    with pytest.raises(ValueError, match=r"got token ids alone .*keep_texts\(trainer\)"):
        ours([student.preprocess(x) for x in texts])
    ours = runs.adapter(student, taught_objective(), teacher=bm25(student)[0])
    with pytest.raises(TypeError, match="expected `query` as a dict of the tensors input_ids"):
        ours.compute_loss_from_embeddings(runs.random_columns(2))


def test_the_second_pass_of_the_cache_is_under_the_autocast_of_the_first(sparse):
    """In an own loop, whose backward pass is outside of it."""
    gradients = []
    for size in (None, 9, 3):
        model = sparse().float()
        ours = SentenceTransformersLoss(model, sl.InfoNCELoss(), mini_batch_size=size)
        with torch.autocast("cpu", torch.bfloat16):
            value = ours(runs.preprocessed(model, 2))
        value.backward()
        found = [x.grad.flatten() for x in model.parameters() if x.grad is not None]
        gradients.append(torch.cat(found))
    whole, *cached = gradients
    for gradient in cached:  # bf16 rounds other sums; fp32 in the second pass is off by more
        assert (gradient - whole).norm() < 0.01 * whole.norm()


@pytest.mark.works_with(runs.NAME, "fp32", "resume")
def test_learned_parameters_of_a_dict_of_losses_are_resumed(sparse, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    settings |= {"multi_dataset_batch_sampler": "round_robin"}
    data = DatasetDict({"pairs": runs.dataset(2), "splade": runs.dataset(3)})
    both = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model, learning = sparse(), torch.nn.Parameter(torch.tensor(0.5))
        pairs, base = (runs.adapter(model, sl.InfoNCELoss(temperature=learning)) for _ in range(2))
        loss = {"pairs": pairs, "splade": runs.splade(model, base, sl.FlopsLoss())}
        options = {"resume": resume, "callbacks": [TrainingState(loss=loss)]}
        trainer = runs.train(model, loss, data, tmp_path, **options, **settings)
        learned = [x.loss.temperature.item() for x in (pairs, base)]
        both.append((runs.logged(trainer), learned, model))
    (values, learned, model), (resumed_values, resumed, same) = both
    assert resumed == learned
    assert len({0.5, *learned}) == 3
    assert resumed_values == values
    runs.assert_same_weights(same, model, rtol=0, atol=0)


def test_model_card_describes_the_loss(sparse, tmp_path):
    model = sparse()
    loss = SentenceTransformersLoss(model, runs.objective(), mini_batch_size=7)
    data = runs.dataset(4, runs.SCORES)
    runs.train(model, loss, data, tmp_path, max_steps=1).create_model_card()
    card = (tmp_path / "README.md").read_text("utf-8")
    name = "sparse_losses.integrations.sentence_transformers.loss.SentenceTransformersLoss"
    for text in (name, "document_self_reconstruction", '"mini_batch_size": "7"', "InfoNCELoss("):
        assert text in card, text


WRONG = [
    (torch.nn.MSELoss(), {}, "SpladeObjective, .* of one number, got MSELoss"),
    (sl.InfoNCELoss(reduction="none"), {}, "reduction='none'"),
    (sl.FlopsLoss(), {"labels_are_ids": True}, r"of FlopsLoss \(\(\)\), got \['labels_a"),
]


@pytest.mark.parametrize(("loss", "options", "message"), WRONG)
def test_wrong_options_are_errors(loss, options, message, sparse):
    with pytest.raises((TypeError, ValueError), match=message):
        SentenceTransformersLoss(sparse(), loss, **options)


DISTILLED = sl.SpladeObjective({"distillation": (1.0, terms.distillation())})
UNFIT = [
    (sl.InfoNCELoss(), 1, None, "InfoNCELoss expected 2 columns or more, got 1"),
    (sl.InfoNCELoss(), 2, torch.arange(6), r"InfoNCELoss .*`labels_are_ids=True`.* got labels \[6"),
    (sl.TripletMarginLoss(), 3, torch.rand(6), "TripletMarginLoss expected labels alone with"),
    (sl.DistillationLoss(), 3, runs.SCORES[:6], r"labels as \[\[6, 2\]\], got \[6, 3\]"),
    (sl.PairwiseContrastiveLoss(), 2, None, "same"),
    (sl.PairwiseContrastiveLoss(), 3, runs.SAME[:6], "B = 6"),
    (sl.SelfReconstructionLoss(), 2, None, "input_ids"),
    (DISTILLED, 3, None, "teacher_scores"),
]


@pytest.mark.parametrize(("loss", "columns", "labels", "message"), UNFIT)
def test_wrong_columns_are_errors(loss, columns, labels, message, sparse):
    wrapped, vectors = runs.adapter(sparse(), loss), runs.random_columns(columns)
    with pytest.raises((TypeError, ValueError), match=message):
        wrapped.compute_loss_from_embeddings(vectors, labels)
