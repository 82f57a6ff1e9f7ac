"""A tiny corpus, runs with a trainer and without, and every loss with its plain formula."""

import copy

import sentence_transformers as st
import torch
from datasets import Dataset
from sentence_transformers.sparse_encoder import losses as theirs
from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

import sparse_losses as sl
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
ROWS = 9
VOCABULARY = 150
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def sparse_encoder(folder):
    modules = [Transformer(folder, transformer_task="fill-mask"), SpladePooling("max")]
    return st.SparseEncoder(modules=modules, device="cpu")


def dataset(columns, labels=None):
    table = {name: COLUMNS[name] for name in list(COLUMNS)[:columns]}
    if labels is not None:
        table["label"] = labels.tolist()
    return Dataset.from_dict(table)


def trainer(model, loss, data, path, callbacks=(), **settings):
    sizes = {"max_steps": -1, "num_train_epochs": 2, "learning_rate": 0.01}
    settings = {"batch_sampler": setting.in_order, **sizes, **settings}
    args = setting.arguments(path, st.SparseEncoderTrainingArguments, **settings)
    options = {"train_dataset": data, "loss": loss, "callbacks": list(callbacks)}
    return st.SparseEncoderTrainer(model=model, args=args, **options)


def train(*args, resume=None, **options):
    trained = trainer(*args, **options)
    trained.train(resume_from_checkpoint=resume)
    return trained


def logged(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_step(wrapped, columns, labels, reference, function):
    """Value and gradients are those of a formula of the vectors of a model of the same weights."""
    texts = []
    for column in columns:
        vectors = reference({k: x for k, x in column.items() if k != "texts"})
        ids, mask = column["input_ids"], column["attention_mask"]
        texts.append(sl.Texts(vectors["sentence_embedding"], ids, mask))
    value, expected = wrapped(columns, labels), function(texts, labels)
    torch.testing.assert_close(value.double(), expected.double(), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(columns, labels), value.detach(), rtol=1e-5, atol=1e-6)
    for each in (value, expected):
        (each / 3).backward()  # as a trainer does that accumulates batches
    gradients = [[x.grad for x in model.parameters()] for model in (wrapped.model, reference)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert any(x is not None and x.any() for x in gradients[0])


def preprocessed(model, columns, rows=slice(None)):
    return [model.preprocess(COLUMNS[name][rows]) for name in list(COLUMNS)[:columns]]


def assert_same_weights(one, other, rtol=1e-3, atol=1e-5):
    mine, theirs = (dict(model.named_parameters()) for model in (one, other))
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


def assert_moved(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert not all(torch.equal(x, y) for x, y in pairs)


SCORES = 5.0 * torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(1))
SAME = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1])
PENALTY = torch.linspace(0.0, 2.0, VOCABULARY)


def rows_of(texts):
    return torch.cat([x.activations for x in texts])


def dots(texts):
    anchor, *others = [x.activations for x in texts]
    return torch.stack([(anchor * x).sum(1) for x in others], 1)


def of_margins(texts, labels):
    sides = (x for scores in (dots(texts), labels) for x in (scores[:, 0], scores[:, 1:]))
    return sl.MarginMSELoss()(*sides)


def objective():
    words = {"ignore_token_ids": [0, 1, 2, 3, 4]}
    own, its = sl.SelfReconstructionLoss(**words), sl.PositiveActivationLoss(**words)
    several = {
        "info_nce": (1.0, terms.info_nce(sl.InfoNCELoss(temperature=0.5))),
        "distillation": (0.2, terms.distillation()),
        "query_flops": (0.02, terms.flops("query")),
        "document_self_reconstruction": (0.3, terms.self_reconstruction("document", own)),
        "query_positive_activation": (0.05, terms.positive_activation("query", its)),
    }
    return sl.SpladeObjective(several)


def own_negatives(texts):
    """Each anchor's own, of two columns or more."""
    width = max(x.input_ids.shape[1] for x in texts)
    pad = torch.nn.functional.pad
    ids, masks = (
        torch.stack([pad(x[k], (0, width - x[k].shape[1])) for x in texts], 1) for k in (1, 2)
    )
    return sl.Texts(torch.stack([x.activations for x in texts], 1), ids, masks)


def of_own(texts, _):
    return OWN(texts[0][0], texts[1][0], own_negatives(texts[2:]).activations)


def of_batch(texts, labels):
    anchor, positive, *others = texts
    batch = sl.SpladeBatch(anchor, positive, own_negatives(others), teacher_scores=labels)
    return objective()(batch).total


def of_vectors(loss, *labels):
    """The loss of the columns' vectors, and of labels."""
    return lambda texts, _: loss(*[x.activations for x in texts], *labels)


def of_rows(loss):
    """The loss of all columns' rows together."""
    return lambda texts, _: loss(rows_of(texts))


WARM, PAIRS, NET = sl.InfoNCELoss(temperature=0.5), sl.NPairLoss(), sl.RankNetLoss()
CONTRASTIVE, TRIPLET = sl.PairwiseContrastiveLoss(margin=2.0), sl.TripletMarginLoss(margin=1.0)
OWN, LANGUAGE = sl.InfoNCELoss(temperature=0.5, in_batch=False), sl.LanguagePenaltyLoss(PENALTY)
IDF, MINIMUM = sl.IdfFlopsLoss(PENALTY), sl.MinActivationLoss(threshold=3.0)
KL = sl.DistillationLoss()
OWN_TOKENS, ITS_TOKENS = sl.SelfReconstructionLoss(balanced=True), sl.PositiveActivationLoss()

# The loss, columns, labels, and the same from a plain loop's tensors.
ALONE = {
    "info_nce": (WARM, 4, None, lambda t, _: WARM(t[0][0], t[1][0], rows_of(t[2:]))),
    "info_nce, own negatives": (OWN, 4, None, of_own),
    "n_pair": (PAIRS, 2, None, of_vectors(PAIRS)),
    "triplet_margin": (TRIPLET, 3, None, of_vectors(TRIPLET)),
    "pairwise_contrastive": (CONTRASTIVE, 2, SAME, of_vectors(CONTRASTIVE, SAME)),
    "distillation": (KL, 4, SCORES, lambda t, y: KL(dots(t), y)),
    "margin_mse": (sl.MarginMSELoss(), 4, SCORES, of_margins),
    "ranknet": (NET, 4, SCORES, lambda t, y: NET(dots(t), y)),
    "flops": (sl.FlopsLoss(), 2, None, of_rows(sl.FlopsLoss())),
    "idf_flops": (IDF, 2, None, of_rows(IDF)),
    "min_activation": (MINIMUM, 1, None, of_rows(MINIMUM)),
    "language_penalty": (LANGUAGE, 3, None, of_rows(LANGUAGE)),
    "self_reconstruction": (OWN_TOKENS, 2, None, lambda t, _: OWN_TOKENS(*t[0].join(t[1])[:3])),
    "positive_activation": (ITS_TOKENS, 2, None, lambda t, _: ITS_TOKENS(t[0][0], *t[1][1:3])),
    "objective": (objective(), 4, SCORES, of_batch),
}


def adapter(model, loss, **options):
    return SentenceTransformersLoss(model, copy.deepcopy(loss), **options)


def random_columns(count):
    """Vectors as sparse encoders make them: none is negative, most are 0."""
    generator = torch.Generator().manual_seed(4)
    return [torch.relu(torch.randn(6, 40, generator=generator) - 0.5) for _ in range(count)]


def splade(model, base, regulariser=None, kind=theirs.SpladeLoss, **options):
    if regulariser is not None:
        wrapped = [SentenceTransformersLoss(model, copy.deepcopy(regulariser)) for _ in range(2)]
        options |= dict(zip(("document_regularizer", "query_regularizer"), wrapped, strict=True))
    return kind(
        model, base, document_regularizer_weight=0.02, query_regularizer_weight=0.05, **options
    )
