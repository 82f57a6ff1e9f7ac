"""A tiny corpus, runs with a trainer and without, and every loss with its plain formula."""

import copy

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from sentence_transformers.sparse_encoder import losses as theirs
from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

from sparse_losses import (
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
    RankNetLoss,
    SelfReconstructionLoss,
    SpladeBatch,
    SpladeObjective,
    Texts,
    TripletMarginLoss,
)
from sparse_losses.integrations.sentence_transformers import SentenceTransformersLoss
from sparse_losses.objective import terms
from tests.integrations import setting

NAME = "sentence-transformers"
TEXTS = {
    "anchor": "quick fox|서울 맛집|lazy|a token|jumps|vocabulary|추천|one weight|dog",
    "positive": "the quick brown fox|서울 맛집 추천|lazy dog|a learned token|over|a|b|c|d",
    "negative": "retriever|fox|점심 메뉴|sparse|vectors|the|U.S.A.|brown|over the",
    "other": "dog|one|메뉴|sparse|lazy|jumps over|서울|quick|weight a token",
}
COLUMNS = {name: texts.split("|") for name, texts in TEXTS.items()}
ROWS, BATCH = 9, 4  # the last batch of an epoch is a single row
VOCABULARY = 150
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def sparse_encoder(folder):
    modules = [Transformer(folder, transformer_task="fill-mask"), SpladePooling("max")]
    return SparseEncoder(modules=modules, device="cpu")


def arguments(path, kind=SparseEncoderTrainingArguments, **settings):
    sizes = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    sizes |= {"max_steps": -1, "num_train_epochs": 2, "learning_rate": 0.01}
    return setting.arguments(path, kind, batch_sampler=setting.in_order, **(sizes | settings))


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
        model=model,
        args=arguments(path, kind, **settings),
        train_dataset=data,
        loss=loss,
        callbacks=list(callbacks),
    )
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
SIMILARITY = 0.5 + 0.5 * torch.eye(5)


def rows_of(texts):
    return torch.cat([x.activations for x in texts])


def dots(texts):
    anchor, *others = [x.activations for x in texts]
    return torch.stack([(anchor * x).sum(1) for x in others], 1)


def of_margins(texts, labels):
    sides = (x for scores in (dots(texts), labels) for x in (scores[:, 0], scores[:, 1:]))
    return MarginMSELoss()(*sides)


def objective():
    ids = {"special_token_ids": [0, 1, 2, 3, 4]}
    return SpladeObjective(
        {
            "info_nce": (1.0, terms.info_nce(InfoNCELoss(temperature=0.5))),
            "triplet_margin": (0.5, terms.triplet_margin()),
            "margin_mse": (0.01, terms.margin_mse()),
            "distillation": (0.2, terms.distillation()),
            "query_flops": (0.02, terms.flops("query")),
            "document_min_activation": (0.1, terms.min_activation("document", **ids)),
            "document_self_reconstruction": (0.3, terms.self_reconstruction("document", **ids)),
            "query_positive_activation": (0.05, terms.positive_activation("query", **ids)),
        }
    )


def own_negatives(texts):
    """Each anchor's own, of two columns or more."""
    width = max(x.input_ids.shape[1] for x in texts)
    pad = torch.nn.functional.pad
    ids, masks = (
        torch.stack([pad(x[k], (0, width - x[k].shape[1])) for x in texts], 1) for k in (1, 2)
    )
    return Texts(torch.stack([x.activations for x in texts], 1), ids, masks)


def of_batch(texts, labels):
    anchor, positive, *others = texts
    batch = SpladeBatch(anchor, positive, own_negatives(others), teacher_scores=labels)
    return objective()(batch).total


def of_vectors(loss):
    """The loss of the columns' vectors, and of the labels where there are some."""
    return lambda texts, labels: loss(
        *[x.activations for x in texts], *([] if labels is None else [labels])
    )


def of_rows(loss):
    """The loss of all columns' rows together."""
    return lambda texts, _: loss(rows_of(texts))


def own_tokens(texts, _):
    first, second = texts
    return OWN_TOKENS(*first.join(second)[:3])


def nws(texts, labels):
    query, key = (x.activations for x in texts)
    return NWSLoss(SIMILARITY)(query, labels, PROTOTYPE, key=key, key_labels=labels)


WARM, TRIPLET, PAIRS = InfoNCELoss(temperature=0.5), TripletMarginLoss(margin=1.0), NPairLoss()
CONTRASTIVE, KL, NET = PairwiseContrastiveLoss(margin=2.0), DistillationLoss(), RankNetLoss()
OWN, LANGUAGE = InfoNCELoss(temperature=0.5, in_batch=False), LanguagePenaltyLoss(PENALTY)
IDF, MINIMUM = IdfFlopsLoss(PENALTY), MinActivationLoss(threshold=3.0)
OWN_TOKENS, ITS_TOKENS = SelfReconstructionLoss(balanced=True), PositiveActivationLoss()

# The loss, columns, labels, and the same from a plain loop's tensors.
ALONE = {
    "info_nce": (WARM, 4, None, lambda t, _: WARM(t[0][0], t[1][0], rows_of(t[2:]))),
    "info_nce, own negatives": (
        OWN,
        4,
        None,
        lambda t, _: OWN(t[0][0], t[1][0], own_negatives(t[2:]).activations),
    ),
    "n_pair": (PAIRS, 2, None, of_vectors(PAIRS)),
    "triplet_margin": (TRIPLET, 3, None, of_vectors(TRIPLET)),
    "pairwise_contrastive": (CONTRASTIVE, 2, SAME, of_vectors(CONTRASTIVE)),
    "distillation": (KL, 4, SCORES, lambda t, y: KL(dots(t), y)),
    "margin_mse": (MarginMSELoss(), 4, SCORES, of_margins),
    "ranknet": (NET, 4, SCORES, lambda t, y: NET(dots(t), y)),
    "flops": (FlopsLoss(), 2, None, of_rows(FlopsLoss())),
    "idf_flops": (IDF, 2, None, of_rows(IDF)),
    "min_activation": (MINIMUM, 1, None, of_rows(MINIMUM)),
    "language_penalty": (LANGUAGE, 3, None, of_rows(LANGUAGE)),
    "self_reconstruction": (OWN_TOKENS, 2, None, own_tokens),
    "positive_activation": (ITS_TOKENS, 2, None, lambda t, _: ITS_TOKENS(t[0][0], *t[1][1:3])),
    "nws": (NWSLoss(SIMILARITY), 2, MULTI_HOT, nws),
    "objective": (objective(), 4, SCORES, of_batch),
}


def adapter(model, loss, **options):
    if isinstance(loss, NWSLoss):
        options["prototype"] = PROTOTYPE
    return SentenceTransformersLoss(model, copy.deepcopy(loss), **options)


def random_columns(count, requires_grad=True):
    """Vectors as sparse encoders make them: none is negative, most are 0."""
    generator = torch.Generator().manual_seed(4)
    columns = [torch.relu(torch.randn(6, 40, generator=generator) - 0.5) for _ in range(count)]
    return [x.requires_grad_(requires_grad) for x in columns]


def learning():
    return InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.5)), similarity="cosine")


def splade(model, base, regulariser=None, kind=theirs.SpladeLoss, **options):
    if regulariser is not None:
        wrapped = [SentenceTransformersLoss(model, copy.deepcopy(regulariser)) for _ in range(2)]
        options |= dict(zip(("document_regularizer", "query_regularizer"), wrapped, strict=True))
    return kind(
        model, base, document_regularizer_weight=0.02, query_regularizer_weight=0.05, **options
    )
