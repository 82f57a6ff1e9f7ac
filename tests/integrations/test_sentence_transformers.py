"""Our losses in sentence-transformers' trainers: trained, beside a plain loop and beside theirs."""

import copy
import os
import re
import socket
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer import losses as dense_losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.sparse_encoder import losses as theirs
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from torch.utils.data import SequentialSampler
from transformers import AutoModel

from sparse_losses import (
    Diagnostics,
    DistillationLoss,
    FlopsLoss,
    IdfFlopsLoss,
    InfoNCELoss,
    LanguagePenaltyLoss,
    MarginMSELoss,
    MinActivationLoss,
    NPairLoss,
    NWSLoss,
    PairwiseContrastiveLoss,
    PositiveActivationLoss,
    SelfReconstructionLoss,
    SparsityController,
    SpladeBatch,
    SpladeObjective,
    Texts,
    TrainingSchedule,
    TripletMarginLoss,
    Warmup,
)
from sparse_losses.integrations.sentence_transformers import LossState, SentenceTransformersLoss
from tests.representation.tiny_models import masked_lm, tokenizer

NAME = "sentence-transformers"
ANCHORS = [
    "quick fox",
    "서울 맛집",
    "lazy",
    "a token",
    "jumps",
    "vocabulary",
    "추천",
    "one weight",
    "dog",
]
POSITIVES = [
    "the quick brown fox",
    "서울 맛집 추천",
    "lazy dog",
    "a learned token",
    "over",
    *"abcd",
]
NEGATIVES = ["retriever", "fox", "점심 메뉴", "", "vectors", "the", "U.S.A.", "brown", "over the"]
OTHERS = ["dog", "one", "메뉴", "sparse", "lazy", "jumps over", "서울", "quick", "weight a token"]
COLUMNS = {"anchor": ANCHORS, "positive": POSITIVES, "negative": NEGATIVES, "other": OTHERS}
ROWS, BATCH = 9, 4  # the last batch of an epoch is a single row
VOCABULARY = 150
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def in_order(dataset, batch_size, drop_last, **_):
    return DefaultBatchSampler(SequentialSampler(dataset), batch_size, drop_last)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    words = tokenizer("wordpiece")
    masked_lm("bert", len(words), **NO_DROPOUT).save_pretrained(path)
    words.save_pretrained(path)
    return str(path)


def sparse_encoder(folder):
    return SparseEncoder(modules=[MLMTransformer(folder), SpladePooling("max")], device="cpu")


@pytest.fixture
def sparse(folder):
    """Makes the same sparse encoder every time."""
    return lambda: sparse_encoder(folder)


@pytest.fixture
def dense(folder, tmp_path):
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "dense")
    tokenizer("wordpiece").save_pretrained(tmp_path / "dense")

    def make():
        transformer = Transformer(str(tmp_path / "dense"))
        pooling = Pooling(transformer.get_embedding_dimension())
        return SentenceTransformer(modules=[transformer, pooling], device="cpu")

    return make


def arguments(path, kind=SparseEncoderTrainingArguments, **settings):
    return kind(
        output_dir=str(path),
        **{
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "num_train_epochs": 2,
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "batch_sampler": in_order,
        }
        | settings,
    )


def dataset(columns, labels=None):
    table = {name: COLUMNS[name] for name in list(COLUMNS)[:columns]}
    if labels is not None:
        table["label"] = labels.tolist()
    return Dataset.from_dict(table)


def train(model, loss, data, path, resume=None, callbacks=(), **settings):
    of_sparse = isinstance(model, SparseEncoder)
    trainer_class = SparseEncoderTrainer if of_sparse else SentenceTransformerTrainer
    kind = SparseEncoderTrainingArguments if of_sparse else SentenceTransformerTrainingArguments
    trainer = trainer_class(
        model=model, args=arguments(path, kind, **settings), train_dataset=data, loss=loss
    )
    for make in callbacks:
        trainer.add_callback(make(trainer))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def plain_loop(
    model,
    function,
    columns,
    labels=None,
    *,
    learned=(),
    epochs=2,
    every=1,
    lr=0.01,
    batch=BATCH,
    count=ROWS,
):
    """The same run without a trainer: batches in order, SGD, the mean over ``every`` batches."""
    optimizer = torch.optim.SGD([*model.parameters(), *learned], lr=lr)
    model.train()
    values = []
    for _ in range(epochs):
        batches = [range(i, min(i + batch, count)) for i in range(0, count, batch)]
        for start in range(0, len(batches), every):
            together = batches[start : start + every]
            for rows in together:
                texts = []
                for name in list(COLUMNS)[:columns]:
                    features = model.preprocess([COLUMNS[name][i] for i in rows])
                    ids, mask = features["input_ids"], features["attention_mask"]
                    texts.append(Texts(model(features)["sentence_embedding"], ids, mask))
                value = function(texts, None if labels is None else labels[list(rows)])
                (value / len(together)).backward()
                values.append(value.item())
            optimizer.step()
            optimizer.zero_grad()
    return values


def assert_same_weights(one, other, rtol=1e-3, atol=1e-5):
    for (name, x), y in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_moved(one, other):
    assert any(
        not torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True)
    )


SCORES = 5.0 * torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(1))
SAME = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1])
MULTI_HOT = (torch.rand(ROWS, 5, generator=torch.Generator().manual_seed(2)) < 0.4).long()
PENALTY = torch.linspace(0.0, 2.0, VOCABULARY)
PROTOTYPE = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(3))
DOT = InfoNCELoss(temperature=1.0, similarity="dot")
SIMILARITY = 0.5 + 0.5 * torch.eye(5)


def all_rows(texts):
    return torch.cat([x.activations for x in texts])


def joined(texts):
    first, *others = texts
    for other in others:
        first = first.join(other)
    return first


def dots(texts):
    anchor, *others = [x.activations for x in texts]
    return torch.stack([(anchor * x).sum(1) for x in others], 1)


def mse_of_margins(texts, labels):
    student, labels = dots(texts), labels
    margins = (student[:, :1] - student[:, 1:]) - (labels[:, :1] - labels[:, 1:])
    return (margins**2).mean()


def objective(**more):
    return SpladeObjective(
        {
            "info_nce": 1.0,
            "triplet_margin": 0.5,
            "margin_mse": 0.01,
            "distillation": 0.2,
            "query_flops": 0.02,
            "document_flops": 0.01,
            "document_min_activation": 0.1,
            "query_language_penalty": 0.01,
            "document_self_reconstruction": 0.3,
            "query_positive_activation": 0.05,
        }
        | more,
        info_nce=InfoNCELoss(temperature=0.5),
        language_penalty=LanguagePenaltyLoss(PENALTY),
        special_token_ids=[0, 1, 2, 3, 4],
    )


def of_batch(texts, labels):
    """A plain loop's objective: two negatives a row, made by hand."""
    anchor, positive, one, two = texts
    width = max(one.input_ids.shape[1], two.input_ids.shape[1])
    ids, masks = (
        torch.stack([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in pair], dim=1)
        for pair in ((one.input_ids, two.input_ids), (one.attention_mask, two.attention_mask))
    )
    negative = Texts(torch.stack([one.activations, two.activations], 1), ids, masks)
    return objective()(SpladeBatch(anchor, positive, negative, teacher_scores=labels)).total


# The loss, columns, labels, and the same from a plain loop's tensors.
ALONE = {
    "info_nce": (
        InfoNCELoss(temperature=0.5),
        4,
        None,
        lambda t, _: InfoNCELoss(temperature=0.5)(
            t[0].activations, t[1].activations, all_rows(t[2:])
        ),
    ),
    "info_nce, own negatives": (
        InfoNCELoss(temperature=0.5, in_batch=False),
        4,
        None,
        lambda t, _: (
            -torch.nn.functional.normalize(t[0].activations, dim=1)
            .mul(2.0)
            .unsqueeze(1)
            .mul(
                torch.nn.functional.normalize(torch.stack([x.activations for x in t[1:]], 1), dim=2)
            )
            .sum(2)
            .log_softmax(1)[:, 0]
            .mean()
        ),
    ),
    "n_pair": (NPairLoss(), 2, None, lambda t, _: NPairLoss()(*[x.activations for x in t])),
    "triplet_margin": (
        TripletMarginLoss(margin=1.0),
        3,
        None,
        lambda t, _: TripletMarginLoss(margin=1.0)(*[x.activations for x in t]),
    ),
    "pairwise_contrastive": (
        PairwiseContrastiveLoss(margin=2.0),
        2,
        SAME,
        lambda t, y: PairwiseContrastiveLoss(margin=2.0)(t[0].activations, t[1].activations, y),
    ),
    "distillation": (
        DistillationLoss(),
        4,
        SCORES,
        lambda t, y: DistillationLoss()(dots(t), y),
    ),
    "margin_mse": (MarginMSELoss(), 4, SCORES, mse_of_margins),
    "flops": (FlopsLoss(), 2, None, lambda t, _: (all_rows(t).mean(0) ** 2).sum()),
    "idf_flops": (
        IdfFlopsLoss(PENALTY),
        2,
        None,
        lambda t, _: IdfFlopsLoss(PENALTY)(all_rows(t)),
    ),
    "min_activation": (
        MinActivationLoss(threshold=3.0),
        1,
        None,
        lambda t, _: torch.relu(3.0 - all_rows(t).topk(5).values.mean(1)).mean(),
    ),
    "language_penalty": (
        LanguagePenaltyLoss(PENALTY),
        3,
        None,
        lambda t, _: (all_rows(t) @ PENALTY).mean(),
    ),
    "self_reconstruction": (
        SelfReconstructionLoss(balanced=True),
        2,
        None,
        lambda t, _: SelfReconstructionLoss(balanced=True)(*joined(t)[:3]),
    ),
    "positive_activation": (
        PositiveActivationLoss(),
        2,
        None,
        lambda t, _: PositiveActivationLoss()(*[t[0].activations, *t[1][1:3]]),
    ),
    "nws": (
        NWSLoss(SIMILARITY),
        2,
        MULTI_HOT,
        lambda t, y: NWSLoss(SIMILARITY)(
            t[0].activations, y, PROTOTYPE, key=t[1].activations, key_labels=y
        ),
    ),
    "objective": (objective(), 4, SCORES, of_batch),
}


def adapter(model, loss, **options):
    if isinstance(loss, NWSLoss):
        options["prototype"] = PROTOTYPE
    return SentenceTransformersLoss(model, copy.deepcopy(loss), **options)


@pytest.mark.works_with(NAME, "fp32")
@pytest.mark.parametrize("name", ALONE)
def test_alone_trains_as_a_plain_loop_does(name, sparse, tmp_path):
    loss, columns, labels, function = ALONE[name]
    model, reference = sparse(), sparse()
    trainer = train(model, adapter(model, loss), dataset(columns, labels), tmp_path)
    values = plain_loop(reference, function, columns, labels)
    assert logged(trainer) == pytest.approx(values, rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)
    assert_moved(model, sparse())


@pytest.mark.works_with(NAME, "fp32")
@pytest.mark.parametrize(
    "name", ["info_nce", "n_pair", "triplet_margin", "pairwise_contrastive", "margin_mse"]
)
def test_dense_encoders_train_too(name, dense, tmp_path):
    loss, columns, labels, function = ALONE[name]
    model, reference = dense(), dense()
    trainer = train(model, adapter(model, loss), dataset(columns, labels), tmp_path)
    values = plain_loop(reference, function, columns, labels)
    assert logged(trainer) == pytest.approx(values, rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)
    assert_moved(model, dense())


@pytest.mark.works_with(NAME, "fp32")
def test_the_loss_falls(sparse, tmp_path):
    model = sparse()
    loss = SentenceTransformersLoss(model, InfoNCELoss(temperature=0.1))
    trainer = train(
        model, loss, dataset(2), tmp_path, optim="adamw_torch", learning_rate=5e-3, max_steps=30
    )
    values = logged(trainer)[::3]  # full batches; the single row has a loss of 0
    assert values[-1] < 0.5 * values[0]


def test_a_callable_makes_the_loss(sparse, tmp_path):
    loss, columns, _, function = ALONE["info_nce"]
    model, reference = sparse(), sparse()
    train(model, lambda encoder: adapter(encoder, loss), dataset(columns), tmp_path)
    plain_loop(reference, function, columns)
    assert_same_weights(model, reference)


def test_a_dict_of_losses_takes_each_its_dataset(sparse, tmp_path):
    model, reference = sparse(), sparse()
    data = DatasetDict({"triples": dataset(3), "pairs": dataset(2, SAME)})
    losses = {
        "triples": lambda encoder: adapter(encoder, ALONE["triplet_margin"][0]),
        "pairs": adapter(model, ALONE["pairwise_contrastive"][0]),
    }
    settings = {"multi_dataset_batch_sampler": "round_robin", "num_train_epochs": 1}
    trainer = train(model, losses, data, tmp_path, **settings)
    rows = [range(i, min(i + BATCH, ROWS)) for i in range(0, ROWS, BATCH)]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.01)
    values = []
    for some in rows:
        for columns, labels, loss in (
            (3, None, ALONE["triplet_margin"][0]),
            (2, SAME, ALONE["pairwise_contrastive"][0]),
        ):
            texts = [[COLUMNS[name][i] for i in some] for name in list(COLUMNS)[:columns]]
            vectors = [reference(reference.preprocess(x))["sentence_embedding"] for x in texts]
            value = loss(*vectors, *([] if labels is None else [labels[list(some)]]))
            value.backward()
            values.append(value.item())
            optimizer.step()
            optimizer.zero_grad()
    assert logged(trainer) == pytest.approx(values, rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)


def test_margins_do_where_only_they_matter(sparse):
    vectors = [torch.rand(ROWS, VOCABULARY) for _ in range(4)]
    margins = SCORES[:, :1] - SCORES[:, 1:]
    expected = mse_of_margins([Texts(x) for x in vectors], SCORES)
    for loss in (MarginMSELoss(), SpladeObjective({"margin_mse": 1.0}, info_nce=DOT)):
        wrapped = SentenceTransformersLoss(sparse(), loss)
        for labels in (SCORES, margins):
            found = wrapped.compute_loss_from_embeddings(vectors, labels)
            found = found if torch.is_tensor(found) else found["margin_mse"]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    one = SentenceTransformersLoss(sparse(), MarginMSELoss())
    found = [
        one.compute_loss_from_embeddings(vectors[:3], x) for x in (margins[:, 0], SCORES[:, :2])
    ]
    torch.testing.assert_close(*found)
    # The z-score of a batch moves with the rows' levels.
    for loss in (DistillationLoss(), SpladeObjective({"margin_mse": 1.0, "distillation": 1.0})):
        wrapped = SentenceTransformersLoss(sparse(), loss)
        wrapped.compute_loss_from_embeddings(vectors, SCORES)
        with pytest.raises(ValueError, match=r"expected labels \[9, 3\], .* got \[9, 2\]"):
            wrapped.compute_loss_from_embeddings(vectors, margins)


def test_labels_may_be_ids_of_the_positives(sparse):
    vectors, ids = [torch.rand(4, VOCABULARY) for _ in range(2)], torch.tensor([7, 7, 1, 2])
    expected = InfoNCELoss()(*vectors, positive_ids=ids)
    for loss in (InfoNCELoss(), SpladeObjective({"info_nce": 1.0})):
        wrapped = SentenceTransformersLoss(sparse(), loss, labels_are_positive_ids=True)
        found = wrapped.compute_loss_from_embeddings(vectors, ids)
        assert (found if torch.is_tensor(found) else found["info_nce"]) == expected
        unread = SentenceTransformersLoss(sparse(), loss)
        found = unread.compute_loss_from_embeddings(vectors, ids)
        assert (found if torch.is_tensor(found) else found["info_nce"]) != expected


def random_columns(count, requires_grad=True):
    """Vectors as sparse encoders make them: none is negative, most are 0."""
    generator = torch.Generator().manual_seed(4)
    columns = [torch.relu(torch.randn(6, 40, generator=generator) - 0.5) for _ in range(count)]
    return [x.requires_grad_(requires_grad) for x in columns]


MNRL = theirs.SparseMultipleNegativesRankingLoss
LIKE_THEIRS = {
    "MNRL, pairs": (lambda m: MNRL(m), InfoNCELoss(temperature=1.0, similarity="dot"), 2, None),
    "MNRL, scale 20": (
        lambda m: MNRL(m, scale=20.0),
        InfoNCELoss(temperature=1 / 20, similarity="dot"),
        3,
        None,
    ),
    "MNRL, negatives": (
        lambda m: MNRL(m, scale=0.5),
        InfoNCELoss(temperature=2.0, similarity="dot"),
        4,
        None,
    ),
    "dense MNRL": (
        lambda m: dense_losses.MultipleNegativesRankingLoss(m),
        InfoNCELoss(temperature=1 / 20),
        3,
        None,
    ),
    "dense symmetric": (
        lambda m: dense_losses.MultipleNegativesRankingLoss(
            m, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ),
        InfoNCELoss(temperature=1 / 20, symmetric=True),
        2,
        None,
    ),
    "MarginMSE, scores": (lambda m: theirs.SparseMarginMSELoss(m), MarginMSELoss(), 4, SCORES[:6]),
    "MarginMSE, margins": (
        lambda m: theirs.SparseMarginMSELoss(m),
        MarginMSELoss(),
        4,
        SCORES[:6, :1] - SCORES[:6, 1:],
    ),
    "MarginMSE, one": (lambda m: theirs.SparseMarginMSELoss(m), MarginMSELoss(), 3, SCORES[:6, 0]),
    "DistillKLDiv": (
        lambda m: theirs.SparseDistillKLDivLoss(m),
        DistillationLoss(temperature=2.0, alpha_kl=1.0, alpha_mse=0.0),
        4,
        SCORES[:6],
    ),
    "DistillKLDiv, 4": (
        lambda m: theirs.SparseDistillKLDivLoss(m, temperature=4.0),
        DistillationLoss(temperature=4.0, alpha_kl=1.0, alpha_mse=0.0),
        3,
        SCORES[:6, :2],
    ),
    "Triplet": (
        lambda m: theirs.SparseTripletLoss(
            m, distance_metric=dense_losses.TripletDistanceMetric.COSINE, triplet_margin=0.5
        ),
        TripletMarginLoss(margin=0.5),
        3,
        None,
    ),
}


@pytest.mark.parametrize("name", LIKE_THEIRS)
def test_where_the_formulas_coincide_values_and_gradients_do(name, sparse):
    make, ours, columns, labels = LIKE_THEIRS[name]
    model = sparse()
    found, expected = random_columns(columns), random_columns(columns)
    one = SentenceTransformersLoss(model, ours).compute_loss_from_embeddings(found, labels)
    other = make(model).compute_loss_from_embeddings(expected, labels)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    one.backward()
    other.backward()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


def test_contrastive_is_theirs_without_the_half(sparse):
    vectors, model = random_columns(2), sparse()
    metric = dense_losses.SiameseDistanceMetric.EUCLIDEAN
    other = dense_losses.ContrastiveLoss(model, distance_metric=metric, margin=4.0)
    ours = SentenceTransformersLoss(model, PairwiseContrastiveLoss(margin=4.0))
    found = ours.compute_loss_from_embeddings(vectors, SAME[:6])
    expected = 2.0 * other.compute_loss_from_embeddings(vectors, SAME[:6])
    torch.testing.assert_close(found, expected)


REGULARISERS = {
    "flops": (FlopsLoss(), lambda x: (x.mean(0) ** 2).sum()),
    "idf_flops": (IdfFlopsLoss(PENALTY), lambda x: IdfFlopsLoss(PENALTY)(x)),
    "min_activation": (
        MinActivationLoss(threshold=3.0),
        lambda x: torch.relu(3.0 - x.topk(5).values.mean(1)).mean(),
    ),
    "language_penalty": (LanguagePenaltyLoss(PENALTY), lambda x: (x @ PENALTY).mean()),
}


def splade(model, base, regulariser=None, kind=theirs.SpladeLoss, **options):
    if regulariser is not None:
        wrapped = [SentenceTransformersLoss(model, copy.deepcopy(regulariser)) for _ in range(2)]
        options |= dict(zip(("document_regularizer", "query_regularizer"), wrapped, strict=True))
    return kind(
        model, base, document_regularizer_weight=0.02, query_regularizer_weight=0.05, **options
    )


def ramp(step, warm_up=2):
    """Their warm-up: quadratic, over a third of (here) six steps."""
    return min(1.0, step / warm_up) ** 2


KINDS = {
    "SpladeLoss": {},
    "CachedSpladeLoss": {"kind": theirs.CachedSpladeLoss, "mini_batch_size": 3},
}


@pytest.mark.works_with(NAME, "fp32", "cached")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REGULARISERS)
def test_within_splade_loss_as_loss_and_regulariser(name, kind, sparse, tmp_path):
    regulariser, formula = REGULARISERS[name]
    loss, columns, labels, function = ALONE["info_nce"]
    model, reference = sparse(), sparse()
    wrapped = splade(model, adapter(model, loss), regulariser, **KINDS[kind])
    trainer = train(model, wrapped, dataset(columns), tmp_path)
    terms = []

    def whole(texts, labels):
        base, factor = function(texts, labels), ramp(len(terms))
        of_documents = 0.02 * factor * formula(all_rows(texts[1:]))
        of_queries = 0.05 * factor * formula(texts[0].activations)
        terms.append((base.item(), of_documents.item(), of_queries.item()))
        return base + of_documents + of_queries

    values = plain_loop(reference, whole, columns, labels)
    assert logged(trainer) == pytest.approx(values, rel=1e-3, abs=1e-3)
    names = ("base_loss", "document_regularizer_loss", "query_regularizer_loss")
    for found, expected in zip(names, zip(*terms, strict=True), strict=True):
        assert logged(trainer, found) == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)
    assert_moved(model, sparse())


WITHOUT_IDS = sorted(ALONE.keys() - {"self_reconstruction", "positive_activation", "objective"})


@pytest.mark.works_with(NAME, "fp32", "cached")
@pytest.mark.parametrize("name", WITHOUT_IDS)
def test_every_loss_of_vectors_is_a_base_of_splade_loss_cached_or_not(name, sparse, tmp_path):
    loss, columns, labels, function = ALONE[name]
    columns = 2 if name == "min_activation" else columns  # SpladeLoss wants documents
    model, cached = sparse(), sparse()
    data = dataset(columns, labels)
    one = splade(model, adapter(model, loss))
    trainer = train(model, one, data, tmp_path, num_train_epochs=1)
    before = sparse()
    vectors = plain_loop(before, lambda t, y: function(t, y), columns, labels, epochs=1)
    assert logged(trainer, "base_loss")[0] == pytest.approx(vectors[0], rel=1e-3, abs=1e-3)
    other = splade(cached, adapter(cached, loss), **KINDS["CachedSpladeLoss"])
    train(cached, other, data, tmp_path, num_train_epochs=1)
    assert_same_weights(model, cached)


def test_an_objective_without_token_ids_is_a_base_of_splade_loss(sparse, tmp_path):
    weights = {"info_nce": 1.0, "triplet_margin": 0.5}
    model, cached = sparse(), sparse()
    for encoder, kind in ((model, "SpladeLoss"), (cached, "CachedSpladeLoss")):
        ours = SentenceTransformersLoss(encoder, SpladeObjective(weights))
        trainer = train(
            encoder, splade(encoder, ours, FlopsLoss(), **KINDS[kind]), dataset(3), tmp_path
        )
        parts = (
            "info_nce",
            "triplet_margin",
            "document_regularizer_loss",
            "query_regularizer_loss",
        )
        total = [sum(x) for x in zip(*(logged(trainer, part) for part in parts), strict=True)]
        assert logged(trainer) == pytest.approx(total, abs=3e-4)
    assert_same_weights(model, cached)


def test_a_run_with_our_flops_and_info_nce_is_a_run_with_theirs(sparse, tmp_path):
    model, reference = sparse(), sparse()
    base = SentenceTransformersLoss(model, InfoNCELoss(temperature=1 / 20, similarity="dot"))
    ours = train(model, splade(model, base, FlopsLoss()), dataset(3), tmp_path, learning_rate=1e-4)
    base = MNRL(reference, scale=20.0)
    other = train(reference, splade(reference, base), dataset(3), tmp_path, learning_rate=1e-4)
    assert logged(ours) == pytest.approx(logged(other), rel=1e-3, abs=1e-3)
    assert_same_weights(model, reference)
    assert_moved(model, sparse())


@pytest.mark.works_with(NAME, "cached", "accumulation")
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["info_nce", "margin_mse", "self_reconstruction", "objective"])
def test_our_gradient_caching_and_accumulation_change_nothing(name, every, sparse, tmp_path):
    loss, columns, labels, function = ALONE[name]
    model, cached, reference = sparse(), sparse(), sparse()
    data, settings = dataset(columns, labels), {"gradient_accumulation_steps": every}
    train(model, adapter(model, loss), data, tmp_path, **settings)
    trainer = train(cached, adapter(cached, loss, mini_batch_size=3), data, tmp_path, **settings)
    plain_loop(reference, function, columns, labels, every=every)
    assert_same_weights(model, reference)
    assert_same_weights(cached, reference)
    assert_moved(model, sparse())
    if name == "objective":
        assert {*objective().weights} <= {*trainer.state.log_history[0]}


def learning():
    return InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.5)), similarity="cosine")


@pytest.mark.works_with(NAME, "cached", "accumulation")
@pytest.mark.parametrize("mini_batch_size", [None, 3])
@pytest.mark.parametrize("every", [1, 2])
def test_what_a_loss_learns_is_trained(mini_batch_size, every, sparse, tmp_path):
    model, reference, temperature = sparse(), sparse(), torch.nn.Parameter(torch.tensor(0.5))
    ours = SentenceTransformersLoss(model, learning(), mini_batch_size=mini_batch_size)
    train(model, ours, dataset(2), tmp_path, gradient_accumulation_steps=every)
    plain = InfoNCELoss(temperature=temperature)
    plain_loop(
        reference,
        lambda t, _: plain(t[0].activations, t[1].activations),
        2,
        learned=[temperature],
        every=every,
    )
    assert abs(temperature.item() - 0.5) > 1e-4
    assert ours.loss.temperature.item() == pytest.approx(temperature.item(), rel=1e-4)
    assert_same_weights(model, reference)


def test_prototypes_are_learned(sparse, tmp_path):
    model, prototype = sparse(), torch.nn.Parameter(PROTOTYPE.clone())
    ours = SentenceTransformersLoss(model, NWSLoss(SIMILARITY), prototype=prototype)
    train(model, ours, dataset(1, MULTI_HOT), tmp_path, learning_rate=0.5)
    assert (prototype - PROTOTYPE).abs().max() > 1e-3


def run_with_state(model, path, resume=None, checkpoint=None, keep=True, **settings):
    """A temperature that is learned, a schedule and a controller, saved every other step."""
    ours = SpladeObjective(
        {"info_nce": 1.0, "document_flops": 0.02, "query_flops": 0.01}, info_nce=learning()
    )
    schedule = TrainingSchedule(ours, warmups={"query_flops": Warmup(5, "quadratic")})
    controller = SparsityController(
        ours, "document_flops", target_active=20, ignore_steps=1, every=1, window=3
    )
    kept = [lambda trainer: LossState(trainer, schedule, controller, checkpoint=checkpoint)]
    trainer = train(
        model,
        SentenceTransformersLoss(model, ours),
        dataset(2),
        path,
        resume=resume,
        callbacks=kept if keep else (),
        save_strategy="steps",
        save_steps=2,
        learning_rate=1e-3,
        optim="adamw_torch",
        **settings,
    )
    return trainer, ours, schedule


@pytest.mark.works_with(NAME, "fp32", "resume")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_resumed_run_is_the_run(elsewhere, sparse, tmp_path):
    model, same = sparse(), sparse()
    whole, *_ = run_with_state(model, tmp_path / "one")
    middle = str(tmp_path / "one" / "checkpoint-2")
    options = {"path": tmp_path / "two", "checkpoint": middle} if elsewhere else {}
    resumed, ours, schedule = run_with_state(
        same, **{"path": tmp_path / "one"} | options, resume=middle
    )
    for name in ("loss", "info_nce", "query_flops", "document_flops"):
        assert logged(resumed, name) == logged(whole, name), name
    assert_same_weights(same, model, rtol=0, atol=0)
    assert schedule.steps_taken == 6
    assert ours.weights["query_flops"] == 0.01
    assert ours.weights["document_flops"] != 0.02
    assert ours.info_nce.temperature.item() != 0.5
    assert ours.info_nce.temperature == whole.loss.loss.info_nce.temperature


def test_state_that_is_not_there_is_an_error(sparse, tmp_path):
    run_with_state(sparse(), tmp_path, max_steps=2, keep=False)
    middle = str(tmp_path / "checkpoint-2")
    with pytest.raises(FileNotFoundError, match=r"sparse_losses.pt in .*checkpoint-2, .* got none"):
        run_with_state(sparse(), tmp_path, resume=middle)
    run_with_state(sparse(), tmp_path, max_steps=2)
    model, ours = sparse(), SpladeObjective({"info_nce": 1.0}, info_nce=learning())
    loss, kept = SentenceTransformersLoss(model, ours), [lambda trainer: LossState(trainer)]
    with pytest.raises(ValueError, match=r"temperature'\] and 0 schedules .* got .*'\] and 2"):
        train(model, loss, dataset(2), tmp_path, resume=middle, callbacks=kept)


def test_their_warm_up_resumes_over_our_regularisers(sparse, tmp_path):
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = sparse()
        loss = splade(model, SentenceTransformersLoss(model, InfoNCELoss()), FlopsLoss())
        settings = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 3}
        trainer = train(model, loss, dataset(2), tmp_path, resume=resume, **settings)
        runs.append((trainer, model))
    (whole, model), (resumed, same) = runs
    parts = logged(whole, "document_regularizer_loss")
    assert parts[0] == 0.0
    assert parts[1] > 0.0
    assert logged(resumed, "document_regularizer_loss")[-4:] == parts[-4:]
    assert_same_weights(same, model, rtol=0, atol=0)


def test_nothing_stays_attached_after_training(sparse, tmp_path):
    model = sparse()
    trainer, ours, schedule = run_with_state(model, tmp_path)
    assert schedule.steps_taken == 6
    assert not ours._forward_hooks
    trainer.train()
    assert schedule.steps_taken == 12


def test_a_controller_sees_cached_batches_once_a_step(sparse, tmp_path):
    found = []
    for mini_batch_size in (None, 3):
        model = sparse()
        ours = SpladeObjective({"info_nce": 1.0, "document_flops": 0.02})
        controller = SparsityController(ours, target_active=20, ignore_steps=0, every=1, window=3)
        loss = SentenceTransformersLoss(model, ours, mini_batch_size=mini_batch_size)
        kept = [lambda trainer, one=controller: LossState(trainer, one)]
        data = dataset(3)
        train(model, loss, data, tmp_path, callbacks=kept, learning_rate=1e-3)
        found.append(controller.report())
    statuses = {report.pop("status") for report in found}
    assert statuses == {"sparsifying"}
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0]["step"] == 6
    assert found[0]["weight"] != 0.02


def test_diagnostics_look_on(sparse, tmp_path):
    model, ours = sparse(), SpladeObjective({"info_nce": 1.0})
    diagnostics = Diagnostics(VOCABULARY)
    ours.register_forward_hook(
        lambda _, batch, __: diagnostics.update(batch[0].positive, other_side=batch[0].anchor)
    )
    loss = SentenceTransformersLoss(model, ours)
    train(model, loss, dataset(2), tmp_path, learning_rate=0.0, num_train_epochs=1)
    with torch.no_grad():
        vectors = model.train()(model.preprocess(POSITIVES))["sentence_embedding"]
    report = diagnostics.report()
    assert report["active_dimensions"] == pytest.approx((vectors > 0).sum(1).float().mean().item())
    assert 0.0 < report["input_recall"] <= 1.0
    assert 0.0 < report["other_side_recall"] <= 1.0


@pytest.mark.works_with(NAME, "bf16")
@pytest.mark.parametrize("mini_batch_size", [None, 3])
@pytest.mark.parametrize("name", ["info_nce", "objective"])
def test_bf16(name, mini_batch_size, sparse, tmp_path):
    loss, columns, labels, function = ALONE[name]
    model, reference, full = sparse(), sparse(), sparse()
    ours = adapter(model, loss, mini_batch_size=mini_batch_size)
    data = dataset(columns, labels)
    trainer = train(model, ours, data, tmp_path, bf16=True, learning_rate=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = plain_loop(reference, function, columns, labels, lr=1e-3)
    exact = plain_loop(full, function, columns, labels, lr=1e-3)
    assert logged(trainer) == pytest.approx(values, rel=0.02)
    assert logged(trainer) != pytest.approx(exact, rel=1e-5)
    assert logged(trainer)[-3] < logged(trainer)[0]


@pytest.mark.works_with(NAME, "compile")
@pytest.mark.parametrize("name", ["info_nce", "objective", "SpladeLoss"])
def test_a_compiled_model(name, sparse, tmp_path):
    loss, columns, labels, _ = ALONE["info_nce" if name == "SpladeLoss" else name]
    models = [sparse(), sparse()]
    runs = []
    for model, settings in zip(models, ({}, COMPILED), strict=True):
        ours = adapter(model, loss)
        ours = splade(model, ours, FlopsLoss()) if name == "SpladeLoss" else ours
        data = dataset(columns, labels)
        runs.append(train(model, ours, data, tmp_path, num_train_epochs=1, **settings))
    compiled = runs[1].loss.model
    assert type(compiled).__name__ == "OptimizedModule"
    assert logged(runs[1]) == pytest.approx(logged(runs[0]), rel=1e-3, abs=1e-3)
    assert_same_weights(*models)


COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.mark.parametrize("mini_batch_size", [None, 3])
@pytest.mark.parametrize("name", ["info_nce", "objective"])
def test_the_evaluation_loss_is_the_loss(name, mini_batch_size, sparse, tmp_path):
    loss, columns, labels, function = ALONE[name]
    model, data = sparse(), dataset(columns, labels)
    ours = adapter(model, loss, mini_batch_size=mini_batch_size)
    trainer = SparseEncoderTrainer(
        model=model, args=arguments(tmp_path), eval_dataset=data, loss=ours
    )
    metrics = trainer.evaluate()
    values = plain_loop(sparse(), function, columns, labels, epochs=1, lr=0.0)
    expected = sum(v * n for v, n in zip(values, (4, 4, 1), strict=True)) / ROWS
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-3)
    if name == "objective":
        assert "eval_info_nce" in trainer.state.log_history[-1]


@pytest.mark.parametrize("save", ["save_pretrained", "create_model_card"])
def test_the_model_card_tells_of_the_loss(save, sparse, tmp_path):
    model = sparse()
    base = SentenceTransformersLoss(model, InfoNCELoss(temperature=0.123))
    regulariser = SentenceTransformersLoss(model, FlopsLoss())
    loss = {
        "alone": SentenceTransformersLoss(model, objective(), mini_batch_size=7),
        "splade": splade(model, base, query_regularizer=regulariser),
        "taught": SentenceTransformersLoss(model, MarginMSELoss(), similarity="cosine"),
        "ids": SentenceTransformersLoss(model, InfoNCELoss(), labels_are_positive_ids=True),
    }
    data = {
        "alone": dataset(4, SCORES),
        "splade": dataset(2),
        "taught": dataset(3, SCORES[:, 0]),
        "ids": dataset(2, SAME),
    }
    trainer = train(model, loss, DatasetDict(data), tmp_path, max_steps=1)
    if save == "save_pretrained":
        model.save_pretrained(str(tmp_path))
    else:
        trainer.create_model_card()
    card = (tmp_path / "README.md").read_text("utf-8")
    assert "sparse_losses.integrations.sentence_transformers.SentenceTransformersLoss" in card
    for said in (
        '"document_self_reconstruction": 0.3',
        "InfoNCELoss(temperature=0.5, similarity='cosine'",
        '"mini_batch_size": 7',
        "InfoNCELoss(temperature=0.123",
        '"query_regularizer": "SentenceTransformersLoss"',
        '"similarity": "cosine"',
        '"labels_are_positive_ids": true',
        "- loss:SentenceTransformersLoss",
        "- loss:SpladeObjective",
        "- loss:FlopsLoss",
        "- loss:MarginMSELoss",
        "#### SentenceTransformersLoss",
        "@software{sparse_losses,",
    ):
        assert said in card, said


def test_the_citation_is_the_repositorys(sparse):
    ours = SentenceTransformersLoss(sparse(), FlopsLoss()).citation
    root = Path(__file__).resolve().parents[2]
    known = (root / "CITATION.cff").read_text("utf-8")
    for field in ("title", "name", "version"):
        value = re.search(rf"^ *-? ?{field}: \"?(.+?)\"?$", known, re.MULTILINE)[1]
        assert value in ours, field


WRONG = {
    "a loss of theirs": (lambda m: torch.nn.MSELoss(), {}, TypeError, "got MSELoss"),
    "no reduction": (lambda m: InfoNCELoss(reduction="none"), {}, ValueError, "reduction='none'"),
    "similarity": (lambda m: MarginMSELoss(), {"similarity": "l2"}, ValueError, "'l2'"),
    "no prototypes": (lambda m: NWSLoss(None), {}, ValueError, "got None for NWSLoss"),
    "prototypes": (
        lambda m: FlopsLoss(),
        {"prototype": PROTOTYPE},
        ValueError,
        "got one for FlopsLoss",
    ),
    "empty mini-batches": (lambda m: FlopsLoss(), {"mini_batch_size": 0}, ValueError, "got 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_adapted_says_so(name, sparse):
    make, options, error, message = WRONG[name]
    model = sparse()
    with pytest.raises(error, match=message):
        SentenceTransformersLoss(model, make(model), **options)


UNFIT = {
    "no positives": (InfoNCELoss(), 1, None, "InfoNCELoss expected two columns or more"),
    "no negatives": (TripletMarginLoss(), 2, None, "expected a column of negatives, got two"),
    "no teacher": (MarginMSELoss(), 3, None, r"\[6, 2\].* or \[6, 1\], its margins, got None"),
    "too many scores": (DistillationLoss(), 3, SCORES[:6], r"labels \[6, 2\].* got \[6, 3\]"),
    "no sameness": (PairwiseContrastiveLoss(), 2, None, "two columns and labels .* and None"),
    "three to compare": (PairwiseContrastiveLoss(), 3, SAME[:6], "two columns .* got 3"),
    "no classes": (NWSLoss(SIMILARITY), 1, None, r"labels \[B, L\] .* got None"),
    "no ids": (SelfReconstructionLoss(), 2, None, "SpladeLoss hands on vectors alone"),
    "no ids of positives": (PositiveActivationLoss(), 2, None, "SpladeLoss hands on vectors"),
    "no ids for a term": (
        SpladeObjective({"query_self_reconstruction": 1.0}),
        2,
        None,
        r"needs `batch.anchor.input_ids`, got None",
    ),
    "no teacher for a term": (
        SpladeObjective({"distillation": 1.0}),
        3,
        None,
        r"SpladeObjective expected labels \[6, 2\]",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_columns_that_do_not_fit_say_so(name, sparse):
    loss, columns, labels, message = UNFIT[name]
    with pytest.raises(ValueError, match=message):
        adapter(sparse(), loss).compute_loss_from_embeddings(random_columns(columns), labels)


@pytest.mark.parametrize("name", ["info_nce", "margin_mse", "flops", "objective"])
def test_an_empty_batch_is_zero(name, sparse):
    loss, columns, labels, _ = ALONE[name]
    loss = SpladeObjective({"info_nce": 1.0}) if name == "objective" else loss
    empty = [x[:0] for x in random_columns(columns)]
    labels = labels[:0] if labels is not None else None
    value = adapter(sparse(), loss).compute_loss_from_embeddings(empty, labels)
    value = value if torch.is_tensor(value) else value["info_nce"]
    assert value == 0
    value.backward()


def test_no_term_at_all_is_zero(sparse):
    found = adapter(sparse(), SpladeObjective({})).compute_loss_from_embeddings(random_columns(2))
    assert found == 0
    found.backward()


DEVICES = ("triplet_margin", "margin_mse", "learned temperature")


def of_devices(name):
    if name == "learned temperature":
        return SpladeObjective({"info_nce": 1.0}, info_nce=learning()), 2, None
    return ALONE[name][:3]


def on_device(rank, folder, path, port):
    """One of two processes, each with every other batch of two."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    for name in DEVICES:
        model = sparse_encoder(folder)
        loss, columns, labels = of_devices(name)
        ours = SentenceTransformersLoss(model, loss)
        trainer = train(
            model,
            ours,
            dataset(columns, labels).select(range(8)),
            f"{path}/{name}",
            callbacks=[LossState],
            per_device_train_batch_size=2,
            num_train_epochs=1,
            ddp_backend="gloo",
        )
        state = {"model": model.state_dict(), "learned": [*ours.loss.parameters()]}
        torch.save(state | {"values": logged(trainer)}, f"{path}/{name}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.works_with(NAME, "devices")
def test_two_devices_train_as_one_on_the_global_batch(folder, sparse, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(on_device, (folder, str(tmp_path), port), nprocs=2)
    for name in DEVICES:
        reference, temperature = sparse(), torch.nn.Parameter(torch.tensor(0.5))
        settings = {"epochs": 1, "count": 8, "batch": 4}
        if name == "learned temperature":  # of a device's own batch
            settings |= {"learned": [temperature], "batch": 2, "every": 2}
            plain = InfoNCELoss(temperature=temperature)
            columns, labels = 2, None

            def function(t, _, plain=plain):
                return plain(t[0].activations, t[1].activations)
        else:
            _, columns, labels, function = ALONE[name]
        values = plain_loop(reference, function, columns, labels, **settings)
        every = settings.get("every", 1)
        means = [sum(values[i : i + every]) / every for i in range(0, len(values), every)]
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            model = sparse()
            model.load_state_dict(found["model"])
            assert_same_weights(model, reference)
            assert_moved(model, sparse())
            if name == "learned temperature":
                assert found["learned"][0].item() == pytest.approx(temperature.item(), rel=1e-5)
                assert abs(temperature.item() - 0.5) > 1e-4
            if rank == 0:
                assert found["values"] == pytest.approx(means, rel=1e-3, abs=1e-3)
