"""What the formulas say, term by term, in float64 NumPy and Python loops.

Nothing here is imported from the package, nothing is vectorised for speed and nothing is shared
with the implementation. A loss with a ``reduction`` has an oracle that yields one value a row, and
``None`` for a row that is not valid; :func:`reduce_rows` reduces them. A loss that is a
statistic of the whole batch returns one float. An optional input that is absent is ``None``.
"""

import math
from collections.abc import Iterable

import numpy as np

Values = Iterable[float | None]


def reduce_rows(values: Values, reduction: str) -> np.ndarray | float:
    """Reduce row values: a row that is not valid is 0 and does not count in the mean."""
    values = list(values)
    kept = [0.0 if value is None else value for value in values]
    if reduction == "none":
        return np.array(kept)
    count = sum(value is not None for value in values)
    return math.fsum(kept) if reduction == "sum" else math.fsum(kept) / max(count, 1)


def mean(values: list[float], of_nothing: float | None = None) -> float | None:
    """Return the mean; of an empty list ``None``, or another number."""
    return math.fsum(values) / len(values) if values else of_nothing


def softplus(x: float) -> float:
    """Return ``log(1 + exp(x))``."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def log_sum_exp(values: list[float]) -> float:
    """Return ``log(sum(exp(values)))``; minus infinity for an empty list."""
    if not values:
        return -math.inf
    top = max(values)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(v - top) for v in values))


def sim(a: np.ndarray, b: np.ndarray, kind: str) -> float:
    """Similarity of two vectors; a zero vector has cosine 0 with everything."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if kind == "dot":
        return math.fsum(a * b)
    if kind == "euclidean":
        return -math.fsum((a - b) ** 2)
    top_a, top_b = np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0)
    if top_a == 0.0 or top_b == 0.0:
        return 0.0
    a, b = a / top_a, b / top_b
    return math.fsum(a * b) / (math.sqrt(math.fsum(a * a)) * math.sqrt(math.fsum(b * b)))


# Who belongs together -----------------------------------------------------------------------------


def _is_false_negative(score, largest_positive, margin, ratio) -> bool:
    """Whether a similarity is above the positive's plus the margin, or times the ratio."""
    if margin is not None and score > largest_positive + margin:
        return True
    return ratio is not None and largest_positive > 0 and score > ratio * largest_positive


def false_negative_mask(scores, positive_mask=None, *, margin=None, ratio=None) -> np.ndarray:
    """1 for candidates that do not score too high to be negatives."""
    kept = np.ones(np.shape(scores), bool)
    for i, row in enumerate(scores):
        positives = [
            j for j in range(len(row)) if (i == j if positive_mask is None else positive_mask[i][j])
        ]
        for j, score in enumerate(row):
            if positives and j not in positives:
                largest = max(float(row[p]) for p in positives)
                kept[i, j] = not _is_false_negative(float(score), largest, margin, ratio)
    return kept


def info_nce(
    anchor,
    positive,
    negative=None,
    *,
    temperature=0.07,
    similarity="cosine",
    symmetric=False,
    in_batch=True,
    negatives_from=("document",),
    positive_ids=None,
    positive_mask=None,
    candidate_mask=None,
    false_negative_margin=None,
    false_negative_ratio=None,
    decoupled=False,
) -> Values:
    """Minus log of the positive's share among the candidates."""
    batch, t = len(anchor), temperature

    def is_positive(i, j) -> bool:
        return i == j if positive_mask is None else bool(positive_mask[i][j])

    def is_candidate(i, column) -> bool:
        return candidate_mask is None or bool(candidate_mask[i][column])

    def row(i, queries, keys, pair) -> float | None:
        """One direction; ``pair(i, j)`` are row and column of query i and key j in the masks."""
        if in_batch:
            allowed = [j for j in range(batch) if is_candidate(*pair(i, j))]
        else:
            allowed = [i] if is_candidate(i, 0) else []
        own = [j for j in allowed if is_positive(*pair(i, j))]
        others = [j for j in allowed if j not in own]
        if positive_ids is not None:
            others = [j for j in others if positive_ids[i] != positive_ids[j]]
        own_scores = [sim(queries[i], keys[j], similarity) for j in own]
        scores = [sim(queries[i], keys[j], similarity) for j in others]
        for source, x in (("query", anchor), ("positive", positive)):
            if source in negatives_from:
                scores += [sim(x[i], x[j], similarity) for j in others if j != i]
        bounds = false_negative_margin, false_negative_ratio
        negatives = [
            s for s in scores if not own or not _is_false_negative(s, max(own_scores), *bounds)
        ]
        if negative is not None:
            for n, vector in enumerate(negative if np.ndim(negative) == 2 else negative[i]):
                if is_candidate(i, (batch if in_batch else 1) + n):
                    negatives.append(sim(queries[i], vector, similarity))
        if not own or (decoupled and not negatives):
            return None
        candidates = [s / t for s in (negatives if decoupled else own_scores + negatives)]
        if not decoupled and len(candidates) == 1:
            return 0.0
        return mean([log_sum_exp(candidates) - s / t for s in own_scores])

    forward = [row(i, anchor, positive, lambda i, j: (i, j)) for i in range(batch)]
    if not symmetric:
        yield from forward
        return
    backward = [row(i, positive, anchor, lambda i, j: (j, i)) for i in range(batch)]
    for pair in zip(forward, backward, strict=True):
        yield None if None in pair else sum(pair) / 2


def info_nce_from_scores(
    scores, positive_mask, *, candidate_mask=None, temperature=1.0, decoupled=False
) -> Values:
    """The mean over a row's positives of minus log of their share."""
    for i, row in enumerate(scores):
        row = [score / temperature for score in row]
        kept = [j for j in range(len(row)) if candidate_mask is None or candidate_mask[i][j]]
        positives = [row[j] for j in kept if positive_mask[i][j]]
        negatives = [row[j] for j in kept if not positive_mask[i][j]]
        if not positives or (decoupled and not negatives):
            yield None
            continue
        total = log_sum_exp(negatives if decoupled else positives + negatives)
        yield mean([total - score for score in positives])


def n_pair(anchor, positive, negative=None) -> Values:
    """``log(1 + sum_k exp(a.n_k - a.p))``."""
    for i in range(len(anchor)):
        if negative is None:
            others = [positive[j] for j in range(len(anchor)) if j != i]
        else:
            others = list(negative if np.ndim(negative) == 2 else negative[i])
        own = sim(anchor[i], positive[i], "dot")
        gaps = [sim(anchor[i], n, "dot") - own for n in others]
        yield softplus(log_sum_exp(gaps)) if gaps else 0.0


def pairwise_contrastive(x1, x2, same, *, margin=1.0) -> Values:
    """``d^2`` for a pair that belongs together, ``max(0, margin - d)^2`` otherwise."""
    for a, b, together in zip(x1, x2, same, strict=True):
        d = math.sqrt(-sim(a, b, "euclidean"))
        yield d**2 if together else max(0.0, margin - d) ** 2


def triplet_margin(
    anchor, positive, negative, *, candidate_mask=None, margin=0.3, similarity="cosine"
) -> Values:
    """The hinge on the similarity gap, averaged over the row's negatives that are there."""
    for i in range(len(anchor)):
        own = sim(anchor[i], positive[i], similarity)
        others = negative[i : i + 1] if np.ndim(negative) == 2 else negative[i]
        if candidate_mask is not None:
            others = [n for n, is_there in zip(others, candidate_mask[i], strict=True) if is_there]
        yield mean([max(0.0, margin - own + sim(anchor[i], n, similarity)) for n in others])


def nws(
    query,
    query_labels,
    prototype,
    label_similarity,
    *,
    key=None,
    key_labels=None,
    queue=None,
    queue_labels=None,
    queue_mask=None,
    alpha=1.0,
    beta=1.0,
    temperature=0.07,
    aggregation="mean",
    decoupled=True,
    eps=1e-8,
) -> Values:
    """One query, one reference and one label at a time."""
    num_labels = len(prototype)
    labelled = []  # keys and queue rows: (vector, labels)
    if key is not None:
        labelled += zip(key, key_labels, strict=True)
    if queue is not None:
        if queue_mask is None:  # a slot of zeros alone was never filled
            queue_mask = np.any(queue, axis=1) | np.any(queue_labels, axis=1)
        kept = np.asarray(queue_mask) != 0
        labelled += [(v, y) for v, y, keep in zip(queue, queue_labels, kept, strict=True) if keep]

    for z, y in zip(query, query_labels, strict=True):
        own = [c for c in range(num_labels) if y[c]]
        if not own:
            yield None
            continue

        # D_ic and the weights of the references
        def contribution(labels, c, own=own):
            union = len({*own, *(d for d in range(num_labels) if labels[d])})
            return alpha / union if c in own and labels[c] else 0.0

        normaliser = {}
        for c in own:
            total = math.fsum(contribution(labels, c) for _, labels in labelled)
            total += 1.0 - alpha / len(own)
            normaliser[c] = 1.0 if total <= 1e-6 else total

        references = []  # (score, is positive, weight as a positive, weight as a negative)
        for vector, labels in labelled:
            score = sim(z, vector, "cosine") / temperature
            theirs = [d for d in range(num_labels) if labels[d]]
            shared = [c for c in own if labels[c]]
            weight = math.fsum(contribution(labels, c) / (normaliser[c] + eps) for c in shared)
            if not theirs:
                agreement = 0.0
            else:
                similar = [label_similarity[c][d] for c in own for d in theirs]
                average = math.fsum(similar) / (len(similar) + eps)
                agreement = max(similar) if aggregation == "max" else average
            unlike = min(max(1.0 - agreement, 0.0), 1.0)
            references.append((score, bool(shared), weight, beta * unlike))
        for c in range(num_labels):
            score = sim(z, prototype[c], "cosine") / temperature
            weight = 1.0 / (normaliser[c] + eps) if c in own else 0.0
            references.append((score, c in own, weight, 1.0))

        denominator = [
            score + math.log(unlike)
            for score, is_positive, _, unlike in references
            if not is_positive and unlike > 0
        ]
        if not decoupled:
            denominator += [score for score, is_positive, _, _ in references if is_positive]
        if eps > 0:
            denominator.append(max(score for score, *_ in references) + math.log(eps))
        if not denominator:
            yield None
            continue
        log_denominator = log_sum_exp(denominator)
        positives = [(score, weight) for score, is_positive, weight, _ in references if is_positive]
        total = math.fsum(-weight * (score - log_denominator) for score, weight in positives)
        yield total / (len(own) + eps)


# What the vector looks like -----------------------------------------------------------------------


def _columns(activations, threshold) -> list[list[float]]:
    """The columns, in which rows with at most so many active entries are zeros."""
    rows = [[float(v) for v in row] for row in activations]
    for row in rows:
        if threshold is not None and sum(1 for v in row if v != 0) <= threshold:
            row[:] = [0.0] * len(row)
    return [[row[j] for row in rows] for j in range(np.shape(activations)[1])]


def _squared_mean(column, estimator) -> float:
    if estimator == "biased":
        return mean(column, of_nothing=0.0) ** 2
    places = range(len(column))
    return mean([column[i] * column[k] for i in places for k in places if i != k])


def flops(activations, token_weight=None, *, estimator="biased", threshold=None) -> float:
    """Weighted squared column means; unbiased: the mean product of distinct pairs of rows."""
    squares = [_squared_mean(column, estimator) for column in _columns(activations, threshold)]
    weights = np.ones(len(squares)) if token_weight is None else token_weight
    return math.fsum(float(w) * s for w, s in zip(weights, squares, strict=True))


def idf_flops(activations, token_penalty, *, beta=0.3, estimator="biased", threshold=None) -> float:
    """Weighted absolute means plus beta times weighted squared means."""
    total = []
    for w, column in zip(token_penalty, _columns(activations, threshold), strict=True):
        total.append(w * abs(mean(column, of_nothing=0.0)))
        total.append(beta * w * _squared_mean(column, estimator))
    return math.fsum(total)


def min_activation(activations, token_counts=None, *, top_k=5, threshold=0.5) -> Values:
    """How far the mean of the largest values stays below the threshold."""
    for i, row in enumerate(activations):
        k = top_k if token_counts is None else min(top_k, int(token_counts[i]))
        if k == 0:
            yield None
            continue
        largest = sorted((float(v) for v in row), reverse=True)[:k]
        yield max(0.0, threshold - math.fsum(largest) / k)


def language_penalty(activations, token_penalty) -> Values:
    """``sum_j p_j x_ij``."""
    for row in activations:
        yield math.fsum(p * v for p, v in zip(token_penalty, row, strict=True))


# Which tokens it names ----------------------------------------------------------------------------


def _attended(ids, mask, ignored) -> set[int]:
    return {int(t) for t, m in zip(ids, mask, strict=True) if m} - {int(t) for t in ignored or ()}


def self_reconstruction(
    activations, input_ids, attention_mask, *, ignore_token_ids=None, balanced=False
) -> Values:
    """Binary cross-entropy against the multi-hot vector of the input's tokens."""
    ignored = {int(t) for t in ([] if ignore_token_ids is None else ignore_token_ids)}
    for row, ids, mask in zip(activations, input_ids, attention_mask, strict=True):
        targets = _attended(ids, mask, ignored)
        inside, outside = [], []
        for j, x in enumerate(row):
            if j in ignored:
                continue
            target = 1.0 if j in targets else 0.0
            # -target log sigmoid(x) - (1 - target) log(1 - sigmoid(x))
            term = target * softplus(-float(x)) + (1.0 - target) * softplus(float(x))
            (inside if target else outside).append(term)
        if balanced:
            yield mean(inside, of_nothing=0.0) / 2 + mean(outside, of_nothing=0.0) / 2
        else:
            yield mean(inside + outside)


def positive_activation(
    activations,
    positive_input_ids,
    positive_attention_mask,
    token_weight=None,
    *,
    saturating=False,
    ignore_token_ids=None,
) -> Values:
    """Minus the (weighted) mean activation of the positive's tokens."""
    ignored = [] if ignore_token_ids is None else ignore_token_ids
    rows = zip(activations, positive_input_ids, positive_attention_mask, strict=True)
    for row, ids, mask in rows:
        tokens = sorted(_attended(ids, mask, ignored))
        weights = [1.0 if token_weight is None else float(token_weight[t]) for t in tokens]
        total = math.fsum(weights)
        if not tokens or total == 0.0:
            yield None
            continue
        terms = [softplus(-float(row[t])) if saturating else -float(row[t]) for t in tokens]
        yield math.fsum(w * v for w, v in zip(weights, terms, strict=True)) / total


# What the teacher says ----------------------------------------------------------------------------


def _candidates(teacher_scores, candidate_mask) -> list[list[int]]:
    """Of each row the columns that neither the mask nor a teacher's ``-inf`` leaves out."""
    masks = np.ones(np.shape(teacher_scores)) if candidate_mask is None else candidate_mask
    rows = zip(teacher_scores, masks, strict=True)
    return [[c for c in range(len(t)) if mask[c] and t[c] != -math.inf] for t, mask in rows]


def _standardised(scores: list[float]) -> list[float]:
    """z-scores with the unbiased deviation; constant scores give 0."""
    if len(scores) < 2 or max(scores) == min(scores):
        return [0.0] * len(scores)
    centred = [s - mean(scores) for s in scores]
    std = math.sqrt(math.fsum(x**2 for x in centred) / (len(scores) - 1))
    return [x / (std + 1e-8) for x in centred]


def distillation(
    student_scores,
    teacher_scores,
    *,
    temperature=3.0,
    alpha_kl=0.7,
    alpha_mse=0.3,
    standardize="batch",
    candidate_mask=None,
) -> float:
    """Tempered KL from the teacher plus the squared distance of z-scores."""
    rows = enumerate(_candidates(teacher_scores, candidate_mask))
    groups = [[(i, c) for c in candidates] for i, candidates in rows]

    def both(group) -> list[list[float]]:
        return [[float(x[i][c]) for i, c in group] for x in (student_scores, teacher_scores)]

    divergences = []
    for group in filter(None, groups):
        s, t = ([score / temperature for score in scores] for scores in both(group))
        log_q, log_p = ([v - log_sum_exp(x) for v in x] for x in (s, t))
        terms = (math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))
        divergences.append(math.fsum(terms))
    kl = mean(divergences, of_nothing=0.0)

    if standardize == "batch":
        groups = [[place for group in groups for place in group]]
    squared = []
    for group in groups:
        z = [_standardised(scores) for scores in both(group)]
        too_few = standardize == "row" and len(group) < 3
        squared += [0.0 if too_few else (a - b) ** 2 for a, b in zip(*z, strict=True)]
    return alpha_kl * temperature**2 * kl + alpha_mse * mean(squared, of_nothing=0.0)


def margin_mse(
    student_positive, student_negative, teacher_positive, teacher_negative, *, candidate_mask=None
) -> Values:
    """The mean of ``((s+ - s-) - (t+ - t-))^2`` over the negatives of a row that are there."""
    for i, (sp, tp) in enumerate(zip(student_positive, teacher_positive, strict=True)):
        scores = (np.atleast_1d(x[i]) for x in (student_negative, teacher_negative))
        squares = []
        for n, (sn, tn) in enumerate(zip(*scores, strict=True)):
            is_there = candidate_mask is None or np.atleast_1d(candidate_mask[i])[n]
            if is_there and tp != -np.inf and tn != -np.inf:
                squares.append(float(((sp - sn) - (tp - tn)) ** 2))
        yield mean(squares)


def masked_logit_mse(student_logits, teacher_logits, *, threshold=0.0) -> Values:
    """The mean of ``(z - t)^2`` over the dimensions where either is above the threshold."""
    for student, teacher in zip(student_logits, teacher_logits, strict=True):
        pairs = zip(student, teacher, strict=True)
        squares = [float((z - t) ** 2) for z, t in pairs if z > threshold or t > threshold]
        yield mean(squares)


def ranknet(student_scores, teacher_scores, *, candidate_mask=None, temperature=1.0) -> Values:
    """The mean over ordered pairs of ``log(1 + exp(-(s_a - s_b) / T))``."""
    kept_of_rows = _candidates(teacher_scores, candidate_mask)
    for s, t, kept in zip(student_scores, teacher_scores, kept_of_rows, strict=True):
        pairs = [(a, b) for a in kept for b in kept if t[a] > t[b]]
        yield mean([softplus(-(s[a] - s[b]) / temperature) for a, b in pairs])


# From logits to sparse vectors --------------------------------------------------------------------


def capped(logit, softcap=None) -> float:
    """``cap * tanh(logit / cap)``."""
    return float(logit) if softcap is None else softcap * math.tanh(float(logit) / softcap)


def token_weight(logit, activation="relu", threshold=None) -> float:
    """``log1p(relu(logit))``, for ``log1p_relu`` its log1p, 0 for a logit up to the threshold."""
    if threshold is not None and logit <= threshold:
        return 0.0
    weight = math.log1p(max(float(logit), 0.0))
    return math.log1p(weight) if activation == "log1p_relu" else weight


def _positions(mask) -> list[int]:
    return [s for s, is_attended in enumerate(mask) if is_attended]


def splade_pool(
    logits, attention_mask, activation="relu", softcap=None, threshold=None
) -> np.ndarray:
    """``max_s mask * log1p(relu(logit))`` over the positions of a text."""
    pooled = np.zeros((len(logits), np.shape(logits)[2]))
    for i, j in np.ndindex(*pooled.shape):
        limit = threshold[j] if np.ndim(threshold) else threshold
        column = (capped(logits[i][s][j], softcap) for s in _positions(attention_mask[i]))
        pooled[i, j] = max((token_weight(z, activation, limit) for z in column), default=0.0)
    return pooled


def pooled_logits(logits, attention_mask, softcap=None) -> np.ndarray:
    """The signed maximum over the attended positions, 0 for a text without any."""
    pooled = np.zeros((len(logits), np.shape(logits)[2]))
    for i, j in np.ndindex(*pooled.shape):
        column = (capped(logits[i][s][j], softcap) for s in _positions(attention_mask[i]))
        pooled[i, j] = max(column, default=0.0)
    return pooled


def token_weights(logits, attention_mask) -> np.ndarray:
    """The same with the maximum over the vocabulary, one weight a position."""
    weights = np.zeros(np.shape(logits)[:2])
    for i, row in enumerate(attention_mask):
        for s in _positions(row):
            weights[i, s] = max(token_weight(z) for z in logits[i][s])
    return weights


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Return the exact dot product, rounded once."""
    products = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    return math.fsum(products) if np.isfinite(products).all() else float(sum(products))


def head_logits(hidden, weight, bias=None, mask=None, gate=None, softcap=None) -> np.ndarray:
    """Return ``g_ij cap(max_s h_is . w_j + b_j)``, 0 for a text without a position."""
    pooled = np.zeros((len(hidden), len(weight)))
    for i, j in np.ndindex(*pooled.shape):
        positions = range(len(hidden[i])) if mask is None else _positions(mask[i])
        if len(positions):
            top = max(dot(hidden[i][s], weight[j]) for s in positions)
            value = capped(top + (0.0 if bias is None else float(bias[j])), softcap)
            pooled[i, j] = value * (1.0 if gate is None else float(gate[i][j]))
    return pooled


def head_activations(pooled: np.ndarray, **options) -> np.ndarray:
    """Return the weight of every logit."""
    out = np.zeros_like(pooled)
    for index in np.ndindex(*pooled.shape):
        out[index] = token_weight(pooled[index], **options)
    return out


def grid(rng: np.random.Generator, shape, bits: int = 9, scale: float = 2.0**-6) -> np.ndarray:
    """Draw multiples of ``scale`` of that many bits and a sign, whose dot products fp32 holds."""
    return rng.integers(-(2**bits) + 1, 2**bits, size=shape) * scale
