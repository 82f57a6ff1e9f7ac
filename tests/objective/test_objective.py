import copy
import math
import pickle
from inspect import isfunction

import pytest
import torch

import sparse_losses as sl
import sparse_losses.functional as F
from sparse_losses import SpladeBatch, SpladeObjective, Texts
from sparse_losses.objective import terms
from tests.cases import LOSSES
from tests.objective import making
from tests.objective.making import B, N, V, alone, batch, cosines, margins, objective

TAUGHT = ("distillation", "ranknet", "margin_mse")


def change(b, function):
    """The batch with other activations on every side that it has."""
    sides = (s and s._replace(activations=function(s.activations)) for s in b[:3])
    return SpladeBatch(*sides, *b[3:])


@pytest.mark.parametrize("negative", [None, "shared", "one", "own"])
def test_the_total_is_the_weighted_sum_of_the_terms(negative):
    b = batch(negative, grad=True)
    with torch.no_grad():
        expected = {term: alone(term, b) for term in making.terms_of(b)}
    weights = {name: 0.5 + number for number, name in enumerate(expected)}
    total, values = objective(weights)(b)
    torch.testing.assert_close(values, expected)
    assert [*values] == [*weights]
    assert not any(value.requires_grad for value in values.values())
    torch.testing.assert_close(total, sum(weights[n] * v for n, v in expected.items()))


# `terms.flops` takes IDF-FLOPS; the others need what a batch lacks, or are the user's own term.
WITHOUT_BUILDER = {"IdfFlopsLoss", "InfoNCEFromScoresLoss", "MaskedLogitMSELoss"}
WITHOUT_BUILDER |= {"NPairLoss", "NWSLoss", "PairwiseContrastiveLoss"}


def test_every_loss_has_a_builder_that_the_tests_call_or_is_named_here():
    """A new loss needs a builder in ``objective/terms.py`` and a call in ``making.py``."""
    made = {getattr(make, "func", make).__name__ for make, _ in making.CALLS.values()}
    assert made.isdisjoint(WITHOUT_BUILDER)
    assert made | WITHOUT_BUILDER == {loss.module for loss in LOSSES.values()}
    own = [x for x in vars(terms).values() if isfunction(x) and x.__module__ == terms.__name__]
    kinds = {name.removeprefix("query_").removeprefix("document_") for name in making.CALLS}
    assert {x.__name__ for x in own if x.__name__[0] != "_"} == kinds


class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    def forward(self, b):
        return self.factor * b.texts("document").activations.mean()


def test_functions_and_modules_of_the_user_are_terms():
    b, documents = batch("own", grad=True), making.documents
    by_hand = lambda b: b.scores("dot").square().mean()  # noqa: E731
    made = SpladeObjective({"mine": (2.0, by_hand), "learned": (0.5, Learned())})
    total, values = made(b)
    own = (b.anchor[0][:, None] * b.negative[0]).sum(-1)
    scores = torch.cat([b.anchor[0] @ b.positive[0].T, own], 1)
    torch.testing.assert_close(values["mine"], scores.square().mean())
    torch.testing.assert_close(values["learned"], 3 * documents(b).activations.mean())
    torch.testing.assert_close(total, 2 * values["mine"] + values["learned"] / 2)
    total.backward()
    assert made.terms["learned"].factor.grad == documents(b).activations.mean() / 2


def test_modules_of_terms_are_part_of_the_objective():
    temperature = torch.nn.Parameter(torch.tensor(0.3))
    losses = {"info_nce": sl.InfoNCELoss(temperature=temperature)}
    losses["flops"] = sl.FlopsLoss(torch.ones(V))
    made = objective({"info_nce": 1.0, "query_flops": 1.0}, losses, stopword_ids=[3])
    names = {"terms.info_nce.loss.temperature", "terms.query_flops.loss.token_weight"}
    assert set(made.state_dict()) == names
    assert [*made.parameters()] == [temperature]
    assert made.to("meta").terms["query_flops"].stopword_ids.is_meta
    b, made = batch(), objective({"info_nce": 1.0, "query_flops": 2.0})
    again = pickle.loads(pickle.dumps(copy.deepcopy(made)))
    assert torch.equal(again(b).total, made(b).total)


def test_a_zero_weight_is_not_called():
    def poison(_):
        raise AssertionError("was called")

    made = SpladeObjective({"info_nce": (1.0, terms.info_nce()), "poison": (0, poison)})
    assert set(made(batch()).terms) == {"info_nce"}
    made.weights["poison"] = 1.0
    with pytest.raises(AssertionError, match="was called"):
        made(batch())


def test_without_terms_the_total_is_0_with_a_graph():
    b = batch(grad=True)
    total, values = objective({"info_nce": 0.0})(b)
    total.backward()
    assert (total, values) == (0, {})
    assert not b.anchor.activations.grad.any()


@pytest.mark.parametrize("ids", [[], [1, 4]])
@pytest.mark.parametrize("term", ["document_flops", "document_min_activation", "info_nce"])
def test_csr_texts_are_joined_and_their_stopwords_hidden(term, ids):
    made = objective({term: 1.0}, stopword_ids=ids, special_token_ids=ids)
    dense = batch("shared", grad=True)
    sparse = change(dense, lambda x: x.detach().to_sparse_csr().requires_grad_())
    found = []
    for b in (dense, sparse):
        value, leaves = made(b).total, making.vectors(b)[1:]
        pairs = zip(torch.autograd.grad(value, leaves), making.vectors(dense)[1:], strict=True)
        found.append((value, [slope.to_dense() * (x != 0) for slope, x in pairs]))
    torch.testing.assert_close(*found)


def test_a_mask_of_the_batch_serves_a_loss_without_in_batch_negatives():
    b = batch("own")
    mask = torch.ones(B, B + N, dtype=torch.bool)
    mask[0, B] = False
    loss = sl.InfoNCELoss(in_batch=False)
    made = SpladeObjective({"it": (1.0, terms.info_nce(loss))})
    own = torch.cat([mask[:, :1], mask[:, B:]], 1)
    expected = loss(*(x.activations for x in b[:3]), candidate_mask=own)
    torch.testing.assert_close(made(b._replace(candidate_mask=mask)).total, expected)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("teacher_scale", [None, 0.5])
def test_distillation_compares_scaled_scores(similarity, teacher_scale):
    b = batch()
    scales = {"score_scale": 20.0, "teacher_scale": teacher_scale, "similarity": similarity}
    names = ("distillation", "context_distillation", "ranknet")
    values = objective(dict.fromkeys(names, 1.0), **scales)(b).terms
    x, y = b.anchor.activations, b.positive.activations
    score = cosines if similarity == "cosine" else lambda a, b: a @ b.T
    to_teacher = teacher_scale or 20
    expected = {
        "distillation": F.distillation_loss(20 * score(x, y), to_teacher * b.teacher_scores),
        "context_distillation": F.distillation_loss(
            20 * score(x, x), to_teacher * b.teacher_anchor_scores
        ),
        "ranknet": F.ranknet_loss(score(x, y), b.teacher_scores),
    }
    torch.testing.assert_close(values, expected)


@pytest.mark.parametrize("negative", ["one", "own"])
def test_a_teacher_may_score_each_anchors_own_candidates_or_the_positives_alone(negative):
    b = batch(negative)
    teacher = torch.randn(B, 1 + (N if negative == "own" else 1), dtype=torch.float64)
    b = b._replace(teacher_scores=teacher)
    anchor, positive, vectors = (side.activations for side in b[:3])
    student = cosines(anchor, torch.cat([positive[:, None], vectors.reshape(B, -1, V)], 1))
    values = objective(dict.fromkeys(TAUGHT, 1.0), score_scale=3.0)(b).terms
    gaps = (student[:, :1] - student[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
    expected = {
        "distillation": F.distillation_loss(3 * student, 3 * teacher),
        "ranknet": F.ranknet_loss(student, teacher),
        "margin_mse": gaps.square().mean(),
    }
    torch.testing.assert_close(values, expected)
    teacher = torch.randn(B, B, dtype=torch.float64)
    expected = F.distillation_loss(cosines(anchor, positive), teacher)
    b = b._replace(teacher_scores=teacher)
    torch.testing.assert_close(objective({"distillation": 1.0})(b).total, expected)


def test_teacher_candidates_decide_between_batch_and_own():
    """As many candidates of each anchor's own as positives in the batch."""
    b = batch()._replace(negative=Texts(torch.rand(B, B - 1, V, dtype=torch.float64)))
    anchor, positive, negative = (side.activations for side in b[:3])
    scores, own = cosines(anchor, positive), cosines(anchor, negative)
    own = torch.cat([scores.diagonal()[:, None], own], 1)
    made = objective({"distillation": 1.0})
    for name, student in (("batch", scores), ("own", own)):
        expected = F.distillation_loss(student, b.teacher_scores)
        value = made(b._replace(teacher_candidates=name)).total
        torch.testing.assert_close(value, expected)
    with pytest.raises(ValueError, match=r'`batch.teacher_candidates` to be "batch" or "own"'):
        made(b)


def test_logits_reach_self_reconstruction_and_min_activation_alone():
    b = batch(logits=True)
    names = ("query_self_reconstruction", "query_min_activation", "query_flops")
    values = objective(dict.fromkeys(names, 1))(b).terms
    x, ids, mask, logits = b.anchor
    on_logits = F.self_reconstruction_loss(logits, ids, mask)
    expected = on_logits, F.min_activation_loss(logits, mask.sum(1)), F.flops_loss(x)
    torch.testing.assert_close(values, dict(zip(names, expected, strict=True)))


@pytest.mark.parametrize("negative", [None, "shared", "own"])
def test_stopwords_are_hidden_from_info_nce_and_flops(negative):
    b, stopwords = batch(negative), [3, 7, 11]
    names = ("info_nce", "query_flops", "document_flops")
    hidden = objective(dict.fromkeys(names, 1.0), stopword_ids=stopwords)(b).terms
    seen = torch.ones(V, dtype=torch.float64).index_fill(0, torch.tensor(stopwords), 0.0)
    for name in names:
        expected = alone(name, change(b, lambda x: x * seen))
        torch.testing.assert_close(hidden[name], expected)


def test_special_tokens_do_not_count_as_a_texts_own():
    b = batch()
    b.anchor.input_ids[:, 0], b.anchor.input_ids[:, 4] = 0, 1
    names = ("query_min_activation", "query_self_reconstruction", "document_positive_activation")
    losses = {"min_activation": sl.MinActivationLoss(threshold=5.0)}
    options = {"ignore_token_ids": [0, 1]}
    losses["self_reconstruction"] = sl.SelfReconstructionLoss(**options)
    losses["positive_activation"] = sl.PositiveActivationLoss(**options)
    made = objective(dict.fromkeys(names, 1.0), losses, special_token_ids=[0, 1])
    x, ids, mask, _ = b.anchor
    expected = (
        F.min_activation_loss(x, ((ids > 1) & mask.bool()).sum(1), threshold=5.0),
        F.self_reconstruction_loss(x, ids, mask, **options),
        F.positive_activation_loss(b.positive.activations, ids, mask, **options),
    )
    torch.testing.assert_close(made(b).terms, dict(zip(names, expected, strict=True)))


@pytest.mark.parametrize("negative", ["own", "one"])
def test_candidates_that_are_left_out_are_left_out_of_every_term_on_scores(negative):
    """Rows have fewer negatives than others, or a pair is a false negative."""
    torch.manual_seed(0)
    weights = dict.fromkeys(("info_nce", "triplet_margin", *TAUGHT), 1.0)
    b = batch(negative)._replace(positive_ids=None)
    mask = torch.ones(B, b.teacher_scores.shape[1])
    mask[2, 3] = mask[0, B] = mask[1, B + 1] = mask[4, -1] = mask[3, 3] = 0
    values = objective(weights)(b._replace(candidate_mask=mask)).terms
    student, options = making.scores(b), {"candidate_mask": mask}
    anchor, positive, others = making.vectors(b)
    near, far = margins(mask, b)
    sides = *margins(student, b), *margins(b.teacher_scores, b)
    alone = {"candidate_mask": far * near[:, None]}
    own = others if others.ndim == 3 else others[:, None]
    expected = {
        "info_nce": F.info_nce_loss(anchor, positive, others, **options),
        "triplet_margin": F.triplet_margin_loss(anchor, positive, own, **alone),
        "distillation": F.distillation_loss(student, b.teacher_scores, **options),
        "ranknet": F.ranknet_loss(student, b.teacher_scores, **options),
        "margin_mse": F.margin_mse_loss(*sides, **alone),
    }
    torch.testing.assert_close(values, expected)
    without = objective(weights)(b).terms
    assert all(value != without[name] for name, value in values.items())


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("size", [0, B])
def test_sparse_vectors_have_the_scores_and_gradients_of_dense_ones(size, similarity):
    torch.manual_seed(0)
    sides = [(torch.randn(rows, V).double() - 0.7).relu() for rows in (B, B, size) if rows]
    sides[0][1] = 0.0
    names = ["distillation", "context_distillation", "ranknet", *(["margin_mse"] if size else [])]
    made = {name: (1.0, getattr(terms, name)(similarity=similarity)) for name in names}
    made["info_nce"] = 1.0, terms.info_nce(sl.InfoNCELoss(similarity=similarity))
    teacher = {"teacher_scores": torch.randn(B, B + size).double(), "teacher_candidates": "batch"}
    teacher["teacher_anchor_scores"] = torch.randn(B, B).double()
    found = []
    for layout in (torch.strided, torch.sparse_csr):
        leaves = [x.to_sparse_csr() if layout != torch.strided else x.clone() for x in sides]
        texts = [sl.Texts(x.requires_grad_()) for x in leaves]
        output = sl.SpladeObjective(made)(sl.SpladeBatch(*texts, **teacher))
        output.total.backward()
        assert all(x.grad.layout == layout for x in leaves)
        grads = [x.grad.to_dense() * (side > 0) for x, side in zip(leaves, sides, strict=True)]
        found.append((output.total.detach(), output.terms, grads))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    mixed = sl.SpladeBatch(sl.Texts(sides[0].to_sparse_csr()), sl.Texts(sides[1]), **teacher)
    with pytest.raises(ValueError, match=r"'distillation': expected activations .* one layout"):
        sl.SpladeObjective(made)(mixed)


# Errors -------------------------------------------------------------------------------------------

BARE, RAW = Texts(torch.rand(B, V)), torch.rand(B, V)
WIDE = torch.ones(B, B + N + 1)
SHORT_MASK = Texts(torch.rand(B, V), torch.zeros(B, 4, dtype=torch.int64), torch.ones(B, 1))
ALL_SHAPES = rf"\[{B}, {B + N}\] .* or \[{B}, {B}\] .* or \[{B}, {1 + N}\] .*got \[{B}, 2\]"


@pytest.mark.parametrize(
    ("term", "negative", "change", "message"),
    [
        ("distillation", None, {"teacher_scores": None}, "`batch.teacher_scores`, got None"),
        ("triplet_margin", None, {}, "the term 'triplet_margin'.*`batch.negative`, got None"),
        ("query_self_reconstruction", None, {"anchor": BARE}, "`query.input_ids`, got None"),
        ("document_self_reconstruction", "one", {"positive": BARE}, "`input_ids` of both texts"),
        ("query_positive_activation", None, {"positive": BARE}, "`document.input_ids`, got None"),
        ("distillation", "own", {"positive": Texts(torch.rand(B + 1, V))}, "`positive.activations"),
        ("distillation", "own", {"negative": Texts(torch.rand(1, N, V))}, "`negative.activations"),
        ("query_min_activation", "own", {"anchor": SHORT_MASK}, "`anchor.attention_mask`"),
        ("margin_mse", "shared", {}, rf"own negatives, got \[{B}, {B + N}\]"),
        ("margin_mse", "one", {"teacher_scores": RAW[:, :B]}, rf"own negatives, got \[{B}, {B}\]"),
        ("triplet_margin", "shared", {}, r"'triplet_margin'.*`negative`"),
        ("distillation", "own", {"teacher_scores": torch.randn(B, 2)}, ALL_SHAPES),
        ("distillation", "own", {"teacher_candidates": "all"}, "one of 'own', 'batch', None, got"),
        ("context_distillation", None, {"teacher_anchor_scores": torch.ones(B)}, r"\[B, .\], got"),
        ("info_nce", None, {"positive_ids": torch.zeros(B + 1).long()}, "`positive_ids`"),
        ("info_nce", None, {"positive": RAW}, r"`batch.positive` to be Texts\(.*got Tensor"),
        ("triplet_margin", "own", {"candidate_mask": WIDE}, rf"candidate_mask.* \[{B}, {B + N}\]"),
        ("info_nce", "own", {"candidate_mask": WIDE}, rf"candidate_mask.* \[{B}, {B + N}\]"),
    ],
)
def test_a_batch_that_does_not_fit_is_an_error(term, negative, change, message):
    for more in ({}, {"distillation": 1.0}):  # InfoNCE then shares the scores
        made = objective({term: 1.0, **more} if term == "info_nce" else {term: 1.0})
        with pytest.raises((ValueError, TypeError), match=message):
            made(batch(negative)._replace(**change))
        with pytest.raises(TypeError, match=r"to be a SpladeBatch\(Texts\(activations, .*Tensor"):
            made(RAW)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((torch.ones(()), len), r"weights\['x'\]` to be a number, got Tensor"),
        ((math.nan, len), r"weights\['x'\]` to be"),
        ((1.0, lambda b: b.anchor[0].sum(1)), r"the term 'x': expected .* shape \[\], got \[5\]"),
        (terms.flops("query"), r"pair of a weight and a term, 'x': \(1\.0, term\), got Term"),
        (lambda: terms.flops("both"), "`side` to be one of"),
        (lambda: (1.0, terms.distillation(score_scale=0.0)), "the term 'x': .*`score_scale`"),
        (lambda: terms.info_nce(sl.InfoNCELoss), "a module that returns one number"),
        (lambda: (1.0, terms.flops("query", stopword_ids=[3, V])), f"V = {V}, got {V}"),
        (lambda: (1.0, terms.flops("query", stopword_ids=[-1])), f"V = {V}, got -1"),
    ],
)
def test_wrong_terms_are_errors(pair, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SpladeObjective({"x": pair if isinstance(pair, tuple | terms.Term) else pair()})(batch())
