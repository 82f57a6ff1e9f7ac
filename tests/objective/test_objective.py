import math

import numpy as np
import pytest
import torch

from sparse_losses import (
    IdfFlopsLoss,
    InfoNCELoss,
    LanguagePenaltyLoss,
    MinActivationLoss,
    SelfReconstructionLoss,
    SpladeBatch,
    SpladeObjective,
    Texts,
)
from sparse_losses.functional import (
    distillation_loss,
    flops_loss,
    gradient_report,
    info_nce_loss,
    language_penalty_loss,
    margin_mse_loss,
    min_activation_loss,
    positive_activation_loss,
    ranknet_loss,
    self_reconstruction_loss,
    triplet_margin_loss,
)
from sparse_losses.objective.terms import NEEDS

B, V, S, N = 5, 40, 6, 3


def _texts(*shape, logits=False, grad=False):
    x = (torch.rand(*shape, V, dtype=torch.float64) - 0.4).relu()
    if grad:
        x.requires_grad_()
    ids = torch.randint(0, V, (*shape, S))
    mask = torch.ones(*shape, S, dtype=torch.int64)
    mask[..., -1] = 0
    return Texts(x, ids, mask, torch.randn(*shape, V, dtype=torch.float64) if logits else None)


def _batch(negative=None, **options):
    shape = {None: None, "shared": (N,), "one": (B,), "own": (B, N)}[negative]
    columns = B + (0 if shape is None else shape[-1])
    teacher = torch.randn(B, columns, dtype=torch.float64)
    teacher[1, -1] = -torch.inf  # no candidate
    return SpladeBatch(
        _texts(B, **options),
        _texts(B, **options),
        None if shape is None else _texts(*shape),
        positive_ids=torch.tensor([0, 1, 2, 3, 1]),
        teacher_scores=teacher,
        teacher_anchor_scores=torch.randn(B, B, dtype=torch.float64),
    )


def _change(batch, function):
    """The batch with other activations on every side that it has."""
    sides = {name: getattr(batch, name) for name in ("anchor", "positive", "negative")}
    changed = {
        name: texts._replace(activations=function(texts.activations))
        for name, texts in sides.items()
        if texts is not None
    }
    return batch._replace(**changed)


def _unit(x):
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-300)


def _cosines(a, b):
    return _unit(a) @ _unit(b).T


def _own_cosines(a, b):
    """``[B, N]``: of each row with its own."""
    return (_unit(a)[:, None] * _unit(b)).sum(-1)


def _documents(batch):
    if batch.negative is None:
        return batch.positive
    return Texts(
        *(
            None if x is None else torch.cat([x, y.flatten(0, -2)])
            for x, y in zip(batch.positive, batch.negative, strict=True)
        )
    )


def _expected(batch):
    """Every term by its own function, nothing shared."""
    anchor, positive, negative = batch[:3]
    documents = _documents(batch)
    scores = _cosines(anchor.activations, positive.activations)
    if negative is not None and negative.activations.ndim == 2:
        scores = torch.cat([scores, _cosines(anchor.activations, negative.activations)], 1)
    elif negative is not None:
        own = _own_cosines(anchor.activations, negative.activations)
        scores = torch.cat([scores, own], 1)
    expected = {
        "info_nce": info_nce_loss(
            anchor.activations,
            positive.activations,
            None if negative is None else negative.activations,
            positive_ids=batch.positive_ids,
        ),
        "distillation": distillation_loss(scores, batch.teacher_scores),
        "ranknet": ranknet_loss(scores, batch.teacher_scores),
        "context_distillation": distillation_loss(
            _cosines(anchor.activations, anchor.activations), batch.teacher_anchor_scores
        ),
        "query_positive_activation": positive_activation_loss(
            anchor.activations, positive.input_ids, positive.attention_mask
        ),
        "document_positive_activation": positive_activation_loss(
            positive.activations, anchor.input_ids, anchor.attention_mask
        ),
    }
    for side, texts in (("query", anchor), ("document", documents)):
        expected[f"{side}_flops"] = flops_loss(texts.activations)
        expected[f"{side}_min_activation"] = min_activation_loss(
            texts.activations, texts.attention_mask.sum(-1)
        )
        expected[f"{side}_language_penalty"] = language_penalty_loss(
            texts.activations, torch.arange(V, dtype=torch.float64)
        )
        expected[f"{side}_self_reconstruction"] = self_reconstruction_loss(*texts[:3])
    if negative is not None and negative.activations.shape[:-1] != (N,):
        expected["triplet_margin"] = triplet_margin_loss(
            anchor.activations, positive.activations, negative.activations
        )
        sides = []
        for each in (scores, batch.teacher_scores):
            own = each[:, B:] if negative.activations.ndim == 3 else each[:, B:].diagonal()[:, None]
            sides += [each[:, :B].diagonal(), own]
        expected["margin_mse"] = margin_mse_loss(*sides)
    return expected


def _objective(weights, **losses):
    penalty = LanguagePenaltyLoss(torch.arange(V, dtype=torch.float64))
    return SpladeObjective(weights, language_penalty=penalty, **losses)


@pytest.mark.parametrize("negative", [None, "shared", "one", "own"])
def test_the_total_is_the_weighted_sum_of_the_terms(negative):
    batch = _batch(negative, grad=True)
    with torch.no_grad():
        expected = _expected(batch)
    weights = {name: 0.5 + number for number, name in enumerate(expected)}
    total, terms = _objective(weights)(batch)
    if negative == "own":  # which no term lacks
        assert set(expected) == set(NEEDS)
    torch.testing.assert_close(terms, expected)
    assert not any(term.requires_grad for term in terms.values())
    torch.testing.assert_close(total, sum(weights[n] * v for n, v in expected.items()))


@pytest.mark.parametrize("negative", [None, "shared", "own"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("options", [{}, {"decoupled": True, "reduction": "sum"}])
def test_info_nce_is_the_same_when_it_shares_the_scores(negative, symmetric, options):
    results = []
    for shared in (False, True):
        torch.manual_seed(1)
        batch = _batch(negative, grad=True)
        temperature = torch.nn.Parameter(torch.tensor(0.2, dtype=torch.float64))
        loss = InfoNCELoss(temperature=temperature, symmetric=symmetric, **options)
        objective = SpladeObjective({"info_nce": 1.0}, info_nce=loss)
        if shared:  # and the other term gives no gradient of its own
            objective.weights["distillation"] = 1e-300
        total, _ = objective(batch)
        leaves = [batch.anchor.activations, batch.positive.activations, temperature]
        results.append([total.detach(), *torch.autograd.grad(total, leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("teacher_scale", [None, 0.5])
def test_distillation_compares_scaled_scores_in_the_similarity_of_info_nce(
    similarity, teacher_scale
):
    batch = _batch()
    objective = SpladeObjective(
        {"distillation": 1.0},
        info_nce=InfoNCELoss(similarity=similarity),
        score_scale=20.0,
        teacher_scale=teacher_scale,
    )
    x, y = batch.anchor.activations, batch.positive.activations
    scores = x @ y.T if similarity == "dot" else _cosines(x, y)
    expected = distillation_loss(20 * scores, (teacher_scale or 20) * batch.teacher_scores)
    torch.testing.assert_close(objective(batch).total, expected)


@pytest.mark.parametrize("negative", ["one", "own"])
def test_a_teacher_may_score_each_anchors_own_candidates(negative):
    batch = _batch(negative)
    count = 1 + (N if negative == "own" else 1)
    teacher = torch.randn(B, count, dtype=torch.float64)
    batch = batch._replace(teacher_scores=teacher)
    anchor, positive, negative = (side.activations for side in batch[:3])
    candidates = torch.cat([positive[:, None], negative.reshape(B, -1, V)], 1)
    student = _own_cosines(anchor, candidates)
    weights = {"distillation": 1.0, "margin_mse": 1.0, "ranknet": 1.0}
    terms = SpladeObjective(weights, score_scale=3.0)(batch).terms
    expected = distillation_loss(3 * student, 3 * teacher)
    torch.testing.assert_close(terms["distillation"], expected)
    torch.testing.assert_close(terms["ranknet"], ranknet_loss(3 * student, teacher))
    gaps = (student[:, :1] - student[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
    torch.testing.assert_close(terms["margin_mse"], gaps.square().mean())


def test_a_zero_weight_is_not_computed():
    class Poison(torch.nn.Module):
        def forward(self, *_):
            raise AssertionError("was computed")

    objective = SpladeObjective({"info_nce": 1.0, "query_flops": 0.0, "triplet_margin": 0})
    objective.flops = objective.triplet_margin = objective.distillation = Poison()
    assert set(objective(_batch()).terms) == {"info_nce"}
    objective.weights["query_flops"] = 1.0
    with pytest.raises(AssertionError, match="was computed"):
        objective(_batch())


def test_without_terms_the_total_is_0_with_a_graph():
    batch = _batch(grad=True)
    total, terms = SpladeObjective({"info_nce": 0.0})(batch)
    total.backward()
    assert total == 0
    assert terms == {}
    assert not batch.anchor.activations.grad.any()


def test_logits_reach_self_reconstruction_and_min_activation_alone():
    batch = _batch(logits=True)
    weights = dict.fromkeys(("query_self_reconstruction", "query_min_activation", "query_flops"), 1)
    terms = SpladeObjective(weights)(batch).terms
    x, ids, mask, logits = batch.anchor
    torch.testing.assert_close(
        terms["query_self_reconstruction"], self_reconstruction_loss(logits, ids, mask)
    )
    torch.testing.assert_close(
        terms["query_min_activation"], min_activation_loss(logits, mask.sum(-1))
    )
    torch.testing.assert_close(terms["query_flops"], flops_loss(x))


@pytest.mark.parametrize("negative", [None, "shared", "own"])
def test_stopwords_are_hidden_from_info_nce_and_flops_alone(negative):
    batch, stopwords = _batch(negative), [3, 7, 11]
    weights = dict.fromkeys(_expected(batch), 1.0)
    weights.pop("triplet_margin", None)
    shown = _objective(weights)(batch).terms
    hidden = _objective(weights, stopword_ids=stopwords)(batch).terms
    changed = {name for name in shown if not torch.equal(shown[name], hidden[name])}
    assert changed == {"info_nce", "query_flops", "document_flops"}

    seen = torch.ones(V, dtype=torch.float64).index_fill(0, torch.tensor(stopwords), 0.0)
    expected = _expected(_change(batch, lambda x: x * seen))
    for name in changed:
        torch.testing.assert_close(hidden[name], expected[name])


BARE = Texts(torch.rand(B, V))


@pytest.mark.parametrize(
    ("term", "missing", "source"),
    [
        ("distillation", "teacher_scores", ": BM25Teacher"),
        ("context_distillation", "teacher_anchor_scores", ": .*score_anchors=True"),
        ("triplet_margin", "negative", ""),
        ("query_self_reconstruction", "anchor.input_ids", ""),
        ("document_self_reconstruction", "negative.input_ids", ""),
        ("query_positive_activation", "positive.input_ids", ""),
        ("document_positive_activation", "anchor.input_ids", ""),
    ],
)
def test_a_missing_input_names_the_term_and_its_source(term, missing, source):
    objective = SpladeObjective({term: 2.5})
    objective(_batch("one"))
    side, _, part = missing.partition(".")
    message = rf"term '{term}' \(weight 2.5\) needs `batch.{missing}`, got None{source}"
    with pytest.raises(ValueError, match=message):
        objective(_batch("one")._replace(**{side: BARE if part else None}))


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ({"info_nce": torch.ones(3)}, {}, r"0-d tensor, got one of shape \[3\]"),
        ({"info_nce": math.nan}, {}, r"weights\['info_nce'\]` to be"),
        ({}, {"min_activation": MinActivationLoss(reduction="none")}, "`min_activation` to reduce"),
        ({}, {"info_nce": InfoNCELoss}, "instance of InfoNCELoss, got the class InfoNCELoss"),
        ({}, {"flops": InfoNCELoss()}, "`flops` to be an instance of FlopsLoss or IdfFlopsLoss"),
        ({}, {"language_penalty": torch.rand(V)}, "instance of LanguagePenaltyLoss, got Tensor"),
        ({}, {"stopword_ids": [-1]}, ">= 0, got -1"),
        ({"info_nce": 1.0}, {"stopword_ids": [V]}, rf"`stopword_ids` below V = {V}, got {V}"),
    ],
)
def test_wrong_settings_are_errors(weights, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SpladeObjective(weights, **options)(_batch())


SHORT_MASK = Texts(torch.rand(B, V), torch.zeros(B, 4, dtype=torch.int64), torch.ones(B, 1))
NO_MASK = Texts(torch.rand(B, N, V))
NO_IDS = Texts(torch.rand(B, V), None, torch.ones(B, S))
BOOLS = torch.ones(B, B + N, dtype=torch.bool)
ALL_SHAPES = rf"\[{B}, {B + N}\] .* or \[{B}, {B}\] .* or \[{B}, {1 + N}\] .*, got \[{B}, 2\]"


@pytest.mark.parametrize(
    ("term", "negative", "change", "message"),
    [
        ("distillation", "own", {"positive": Texts(torch.rand(B + 1, V))}, "`positive.activations"),
        ("distillation", "own", {"negative": Texts(torch.rand(1, N, V))}, "`negative.activations"),
        ("query_min_activation", "own", {"anchor": SHORT_MASK}, "`anchor.attention_mask`"),
        ("document_min_activation", "own", {"negative": NO_MASK}, "needs `attention_mask`"),
        ("document_min_activation", "own", {"positive": NO_IDS}, "needs `input_ids` of positives"),
        ("document_language_penalty", None, {}, "'document_language_penalty'.*LanguagePenaltyLoss"),
        ("triplet_margin", "shared", {}, rf"triplet_margin.*B = {B}, got \[{N}, {V}\]"),
        ("distillation", "own", {"teacher_scores": torch.randn(B, 2)}, ALL_SHAPES),
        ("distillation", "own", {"teacher_scores": BOOLS}, "to be numbers, got torch.bool"),
        ("context_distillation", None, {"teacher_anchor_scores": torch.ones(B)}, r"\[B, .\], got"),
    ],
)
def test_a_batch_that_does_not_fit_is_an_error(term, negative, change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SpladeObjective({term: 1.0})(_batch(negative)._replace(**change))


def _square_batch(**options):
    """As many candidates of each anchor's own as positives in the batch."""
    negative = Texts(torch.rand(B, B - 1, V, dtype=torch.float64))
    teacher = torch.randn(B, B, dtype=torch.float64)
    return _batch()._replace(negative=negative, teacher_scores=teacher, **options)


def test_teacher_candidates_decide_between_batch_and_own():
    batch = _square_batch(teacher_candidates="batch")
    anchor, positive, negative = (side.activations for side in batch[:3])
    scores, own = _cosines(anchor, positive), _own_cosines(anchor, negative)
    own = torch.cat([scores.diagonal()[:, None], own], 1)
    objective = SpladeObjective({"distillation": 1.0})
    expected = distillation_loss(scores, batch.teacher_scores)
    torch.testing.assert_close(objective(batch).total, expected)
    expected = distillation_loss(own, batch.teacher_scores)
    torch.testing.assert_close(objective(batch._replace(teacher_candidates="own")).total, expected)
    with pytest.raises(ValueError, match=r'`batch.teacher_candidates` to be "batch" or "own"'):
        objective(batch._replace(teacher_candidates=None))


def test_a_teacher_may_score_the_positives_alone_beside_negatives():
    batch = _batch("own")
    teacher = torch.randn(B, B, dtype=torch.float64)
    expected = distillation_loss(_cosines(batch.anchor[0], batch.positive[0]), teacher)
    batch = batch._replace(teacher_scores=teacher)
    torch.testing.assert_close(SpladeObjective({"distillation": 1.0})(batch).total, expected)
    with pytest.raises(ValueError, match=r"'margin_mse' needs .* of the negatives too"):
        SpladeObjective({"margin_mse": 1.0})(batch)


@pytest.mark.parametrize(
    ("negative", "candidates", "message"),
    [
        ("shared", "own", r"\[B, 1 \+ N\] with own negatives"),
        ("own", "batch", rf"\[{B}, {B + N}\] \(all\) or \[{B}, {B}\] \(positives\), got"),
        ("own", "all", "`batch.teacher_candidates` to be one of 'own', 'batch', None, got 'all'"),
    ],
)
def test_scores_that_contradict_teacher_candidates_are_an_error(negative, candidates, message):
    teacher = torch.randn(B, 1 + N)
    batch = _batch(negative)._replace(teacher_scores=teacher, teacher_candidates=candidates)
    with pytest.raises(ValueError, match=message):
        SpladeObjective({"distillation": 1.0})(batch)


def test_a_half_precision_teacher_does_not_overflow():
    batch = _batch()
    teacher = (1000 * torch.randn(B, B)).half()
    objective = SpladeObjective({"distillation": 1.0}, score_scale=100.0)
    half, full = (
        objective(batch._replace(teacher_scores=t)).total for t in (teacher, teacher.float())
    )
    assert half.isfinite()
    torch.testing.assert_close(half, full)


def test_an_unknown_term_is_an_error():
    objective = SpladeObjective({})
    objective.weights["infonce"] = 1.0
    with pytest.raises(ValueError, match=r"`weights` .*, got 'infonce'"):
        objective(_batch())


def test_a_weight_may_be_learned():
    weight = torch.nn.Parameter(torch.tensor(2.0))
    batch = _batch()
    total, terms = SpladeObjective({"query_flops": weight})(batch)
    total.backward()
    torch.testing.assert_close(weight.grad, terms["query_flops"].float())


def test_the_objective_uses_the_losses_of_its_arguments():
    penalty = torch.rand(V, dtype=torch.float64)
    batch = _batch()
    objective = SpladeObjective(
        {"query_flops": 1.0, "query_self_reconstruction": 1.0},
        flops=IdfFlopsLoss(penalty, beta=0.7),
        self_reconstruction=SelfReconstructionLoss(balanced=True),
    )
    terms = objective(batch).terms
    mean = batch.anchor.activations.mean(0)
    torch.testing.assert_close(terms["query_flops"], (penalty * (mean + 0.7 * mean**2)).sum())
    torch.testing.assert_close(
        terms["query_self_reconstruction"],
        self_reconstruction_loss(*batch.anchor[:3], balanced=True),
    )
    assert "flops.token_penalty" in objective.state_dict()


def test_special_tokens_do_not_count_as_a_texts_own():
    batch = _batch()
    ids = batch.anchor.input_ids.clone()
    ids[:, 0], ids[:, 4] = 0, 1
    batch = batch._replace(anchor=batch.anchor._replace(input_ids=ids))
    names = ("query_min_activation", "query_self_reconstruction", "document_positive_activation")
    objective = SpladeObjective(
        dict.fromkeys(names, 1.0),
        special_token_ids=[0, 1],
        min_activation=MinActivationLoss(threshold=5.0),
    )
    x, ids, mask, _ = batch.anchor
    counts = ((ids > 1) & mask.bool()).sum(1)
    own, options = batch.positive.activations, {"ignore_token_ids": [0, 1]}
    expected = (
        min_activation_loss(x, counts, threshold=5.0),
        self_reconstruction_loss(x, ids, mask, **options),
        positive_activation_loss(own, ids, mask, **options),
    )
    terms = objective(batch).terms
    torch.testing.assert_close(terms, dict(zip(names, expected, strict=True)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.rand(B, V), "`batch` to be a SpladeBatch, .*got Tensor"),
        (SpladeBatch(_texts(B), torch.rand(B, V)), "`batch.positive` to be Texts, .*got Tensor"),
    ],
    ids=["a tensor", "a tensor beside texts"],
)
def test_raw_tensors_are_errors_that_name_the_texts(batch, message):
    objective = SpladeObjective({"info_nce": 1.0})
    with pytest.raises(TypeError, match=message) as error:
        objective(batch)
    assert "SpladeBatch(Texts(activations, ...), Texts(activations, ...))" in str(error.value)
    with pytest.raises(TypeError, match=message):
        gradient_report(objective, batch)


def _sharing(info_nce=None, **batch):
    """An objective whose InfoNCE is computed of the scores that distillation needs as well."""
    x = torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(0))
    made = SpladeBatch(Texts(x[0]), Texts(x[1]), teacher_scores=torch.eye(4), **batch)
    weights = {"info_nce": 1.0, "distillation": 1.0}
    return SpladeObjective(weights, info_nce=info_nce or InfoNCELoss()), made


@pytest.mark.parametrize(
    ("ids", "error"), [(torch.zeros(5).long(), ValueError), (torch.zeros(4), TypeError)]
)
def test_ids_beside_shared_scores_are_checked(ids, error):
    objective, batch = _sharing(positive_ids=ids)
    with pytest.raises(error, match="positive_ids"):
        objective(batch)


def test_hooks_of_the_module_run_and_see_the_same_value():
    seen = []
    loss = InfoNCELoss()
    objective, batch = _sharing(loss)
    expected = objective(batch).terms["info_nce"]
    loss.register_forward_hook(lambda _, __, value: seen.append(value.detach()))
    torch.testing.assert_close(objective(batch).terms["info_nce"], expected)
    torch.testing.assert_close(seen[0], expected)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("objective", "impl", "fast"),
        ("objective", "score_scale", 0.0),
        ("objective", "teacher_scale", -1.0),
        ("info_nce", "temperature", -1.0),
        ("info_nce", "similarity", "cos"),
        ("info_nce", "impl", "no"),
    ],
)
def test_assigned_settings_are_checked_at_the_next_call(owner, name, value):
    objective, batch = _sharing()
    setattr(objective if owner == "objective" else objective.info_nce, name, value)
    with pytest.raises(ValueError, match=name):
        objective(batch)


# Candidates left out


@pytest.mark.parametrize("negative", ["own", "one"])
def test_candidates_that_are_left_out_are_left_out_of_every_term_on_scores(negative):
    """Rows have fewer negatives than others, or a pair is a false negative."""
    torch.manual_seed(0)
    names = ("info_nce", "triplet_margin", "distillation", "margin_mse", "ranknet")
    weights = dict.fromkeys(names, 1.0)
    batch = _batch(negative)._replace(positive_ids=None)
    mask = torch.ones(B, batch.teacher_scores.shape[1])
    mask[2, 3] = mask[0, B] = mask[1, B + 1] = mask[4, -1] = 0
    terms = SpladeObjective(weights)(batch._replace(candidate_mask=mask)).terms
    anchor, positive, vectors = (texts.activations for texts in batch[:3])
    expected = info_nce_loss(anchor, positive, vectors, candidate_mask=mask)
    torch.testing.assert_close(terms["info_nce"], expected)

    x, y = (torch.nn.functional.normalize(t, dim=-1) for t in (anchor, positive))
    others = torch.nn.functional.normalize(vectors, dim=-1)
    if negative == "own":
        far, own = torch.einsum("bd,bnd->bn", x, others), mask[:, B:]
        scores, taught = torch.cat([x @ y.T, far], dim=1), batch.teacher_scores[:, B:]
    else:
        far, own = (x * others).sum(1, keepdim=True), mask[:, B:].diagonal()[:, None]
        scores = torch.cat([x @ y.T, x @ others.T], dim=1)
        taught = batch.teacher_scores[:, B:].diagonal()[:, None]
        vectors = vectors[:, None]
    expected = triplet_margin_loss(anchor, positive, vectors, own)
    torch.testing.assert_close(terms["triplet_margin"], expected)
    assert expected > 0
    expected = distillation_loss(scores, batch.teacher_scores, candidate_mask=mask)
    torch.testing.assert_close(terms["distillation"], expected)
    expected = ranknet_loss(scores, batch.teacher_scores, candidate_mask=mask)
    torch.testing.assert_close(terms["ranknet"], expected)
    near, teacher = (s[:, :B].diagonal() for s in (scores, batch.teacher_scores))
    is_there = (own != 0) & (taught != -torch.inf) & (teacher != -torch.inf)[:, None]
    errors = (near[:, None] - far - teacher[:, None] + taught).square()
    rows = [
        error[there].mean() for error, there in zip(errors, is_there, strict=True) if any(there)
    ]
    torch.testing.assert_close(terms["margin_mse"], torch.stack(rows).mean())


@pytest.mark.parametrize(
    "options",
    [
        {"false_negative_margin": -0.2},
        {"false_negative_ratio": 0.8},
        {"negatives_from": ("document", "query")},
    ],
    ids=lambda options: next(iter(options)),
)
def test_infonce_keeps_its_options_where_it_shares_the_scores(options):
    batch = _batch("own")
    objective = SpladeObjective(
        {"info_nce": 1.0, "distillation": 1.0}, info_nce=InfoNCELoss(**options)
    )
    value = objective(batch).terms["info_nce"]
    vectors = [texts.activations for texts in batch[:3]]
    expected = info_nce_loss(*vectors, positive_ids=batch.positive_ids, **options)
    torch.testing.assert_close(value, expected)
    assert value != info_nce_loss(*vectors, positive_ids=batch.positive_ids)


@pytest.mark.parametrize("stopwords", [(), (1, 4)])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("bounds", [(0.05, None), (None, 0.9), (-0.3, 0.95), (None, None)])
def test_the_share_of_false_negatives_is_that_of_a_loop(bounds, similarity, stopwords):
    margin, ratio = bounds
    batch = _batch("own")
    mask = torch.ones(B, B + N)
    mask[1, 2] = mask[3, 3] = 0
    batch = batch._replace(candidate_mask=mask, positive_ids=torch.tensor([0, 1, 2, 3, 0]))
    options = {"false_negative_margin": margin, "false_negative_ratio": ratio}
    loss = InfoNCELoss(**options, similarity=similarity)
    objective = SpladeObjective({"info_nce": 1.0}, info_nce=loss, stopword_ids=stopwords)
    seen, left_out = 0, 0
    x, y = (t.activations.index_fill(1, objective.stopword_ids, 0.0).numpy() for t in batch[:2])
    if similarity == "cosine":
        x, y = (t / np.linalg.norm(t, axis=1, keepdims=True) for t in (x, y))
    for i in range(B):
        own = x[i] @ y[i]
        for j in range(B):
            if j == i or i == 3 or (i, j) == (1, 2) or {i, j} == {0, 4}:
                continue
            above = margin is not None and x[i] @ y[j] > own + margin
            above |= ratio is not None and own > 0 and x[i] @ y[j] > ratio * own
            seen, left_out = seen + 1, left_out + above
    share = objective.false_negatives(batch)
    assert share.item() == pytest.approx(left_out / seen)
    assert (left_out > 0) == (bounds != (None, None))


@pytest.mark.parametrize("term", ["info_nce", "triplet_margin", "distillation"])
def test_a_mask_of_other_candidates_is_refused(term):
    batch = _batch("own")._replace(candidate_mask=torch.ones(B, B + N + 1))
    with pytest.raises(ValueError, match=rf"candidate_mask.* = \[{B}, {B + N}\]"):
        SpladeObjective({term: 1.0})(batch)
