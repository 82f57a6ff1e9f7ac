"""Hypothesis strategies: small problems with generic numbers, ties, zeros and every option."""

import numpy as np
import torch
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 5)
temperatures = st.floats(0.02, 5.0)
similarities = st.sampled_from(["cosine", "dot"])

# What a cosine does not see. Squares of the outer ones leave the range of fp32.
MAGNITUDES = (1e-30, 1e-20, 1e-8, 1e-3, 1.0, 1e4, 1e10, 1e19, 1e30)
SMALL = (1e-37, 1e-30, 1e-8, 1e-3)  # the same for what is summed with numbers around 1


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Standard normal numbers, in float64."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def multi_hot(inputs: dict, prefix: str = "") -> torch.Tensor:
    """The attended ids as a 0/1 matrix, built as the source's sample code does."""
    x, mask = inputs["activations"], inputs[f"{prefix}attention_mask"]
    target = torch.zeros_like(x)
    target.scatter_add_(1, inputs[f"{prefix}input_ids"].clamp(min=0), mask.to(x.dtype))
    return target.clamp(max=1.0)


@st.composite
def vectors(draw, rows: int, width: int, similarity: str = "dot") -> np.ndarray:
    """Draw ``rows`` vectors: generic, integers with ties and zero rows, of extreme magnitudes."""
    rng = np.random.default_rng(draw(seeds))
    x = rng.normal(size=(rows, width)) * draw(st.sampled_from([0.3, 1.0, 2.0]))
    match draw(st.sampled_from(["generic", "ties", "scaled"])):
        case "ties":
            x = rng.integers(-1, 2, size=(rows, width)).astype(np.float64)
        case "scaled":
            x *= rng.choice(MAGNITUDES if similarity == "cosine" else SMALL, size=(rows, 1))
    return x


@st.composite
def activations(draw, min_rows: int = 1, min_vocab: int = 1) -> np.ndarray:
    """Draw non-negative sparse rows, as a SPLADE head gives them; some columns tiny."""
    rng = np.random.default_rng(draw(seeds))
    shape = (draw(st.integers(min_rows, 6)), draw(st.integers(min_vocab, 12)))
    active = rng.random(shape) < draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    scale = rng.choice([1.0, 1.0, *SMALL], size=(1, shape[1]))
    return np.log1p(rng.gamma(1.0, 2.0, size=shape)) * scale * active


@st.composite
def info_nce_problems(draw) -> tuple[dict, dict]:
    """Draw the tensors and hyperparameters of an InfoNCE call, every option included."""
    rng = np.random.default_rng(draw(seeds))
    batch, width = draw(sizes), draw(st.integers(2, 4))
    similarity = draw(similarities)
    tensors = {name: draw(vectors(batch, width, similarity)) for name in ("anchor", "positive")}
    negatives = draw(st.sampled_from([None, "shared", "per row"]))
    if negatives is not None:
        count = draw(st.integers(1, 4))
        is_shared = negatives == "shared"
        flat = draw(vectors(count if is_shared else count * batch, width, similarity))
        tensors["negative"] = flat if is_shared else flat.reshape(batch, count, width)
    options = {
        "temperature": draw(temperatures),
        "similarity": similarity,
        "symmetric": draw(st.booleans()),
        "decoupled": draw(st.booleans()),
    }
    options["in_batch"] = draw(st.booleans()) if negatives is not None else True
    if draw(st.booleans()):
        tensors["positive_ids"] = rng.integers(0, 3, size=batch)
    if options["in_batch"] and draw(st.booleans()):
        density = draw(st.sampled_from([0.1, 0.4, 0.9]))
        tensors["positive_mask"] = rng.random((batch, batch)) < density
    if draw(st.booleans()):
        width = (batch if options["in_batch"] else 1) + np.shape(tensors.get("negative", [[]]))[-2]
        width -= "negative" not in tensors
        tensors["candidate_mask"] = rng.random((batch, width)) < draw(st.sampled_from([0.3, 0.8]))
    if options["in_batch"]:
        more = draw(st.sets(st.sampled_from(["query", "positive"])))
        options["negatives_from"] = ("document", *sorted(more))
    # Far from round numbers, so that no tie of integers is decided by rounding.
    options["false_negative_margin"] = draw(st.sampled_from([None, None, -0.1234, 0.0987, 0.4321]))
    options["false_negative_ratio"] = draw(st.sampled_from([None, None, 0.9513, 0.3217]))
    return tensors, options


def _labels(rng: np.random.Generator, rows: int, labels: int, density: float) -> np.ndarray:
    return (rng.random((rows, labels)) < density).astype(np.int64)


@st.composite
def nws_problems(draw) -> tuple[dict, dict]:
    """Draw an NWS call: any references, unlabelled rows, empty label sets, every option."""
    rng = np.random.default_rng(draw(seeds))
    batch, width, labels = draw(sizes), draw(st.integers(2, 4)), draw(st.integers(1, 4))
    density = draw(st.sampled_from([0.1, 0.4, 0.9]))
    similar = rng.choice([0.0, 0.25, 1.0, rng.random()], size=(labels, labels))
    similar = np.maximum(similar, similar.T)
    np.fill_diagonal(similar, 1.0)
    tensors = {
        "query": draw(vectors(batch, width, "cosine")),
        "query_labels": _labels(rng, batch, labels, density),
        "prototype": draw(vectors(labels, width, "cosine")),
        "label_similarity": similar,
    }
    for name in ("key", "queue"):
        if draw(st.booleans()):
            rows = draw(st.integers(0, 5))
            tensors[name] = draw(vectors(rows, width, "cosine"))
            tensors[f"{name}_labels"] = _labels(rng, rows, labels, density)
            if name == "queue" and draw(st.booleans()):
                tensors["queue_mask"] = rng.random(rows) < 0.6
    options = {
        "alpha": draw(st.sampled_from([0.0, 0.5, 0.9, 1.0, 3.0])),
        "beta": draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        "temperature": draw(temperatures),
        "aggregation": draw(st.sampled_from(["mean", "max"])),
        "decoupled": draw(st.booleans()),
        "eps": draw(st.sampled_from([0.0, 1e-8, 1e-3])),
    }
    return tensors, options


@st.composite
def token_problems(draw, weight: bool = False, prefix: str = "") -> tuple[dict, dict]:
    """Draw activations and attended ids: padding, duplicates, ignored ids and empty rows."""
    rng = np.random.default_rng(draw(seeds))
    batch, vocab, length = draw(sizes), draw(st.integers(2, 9)), draw(st.integers(1, 6))
    mask = (rng.random((batch, length)) < draw(st.sampled_from([0.0, 0.5, 1.0]))).astype(np.int64)
    ids = np.where(mask, rng.integers(0, vocab, size=(batch, length)), -100)
    tensors = {
        "activations": draw(vectors(batch, vocab)),
        f"{prefix}input_ids": ids,
        f"{prefix}attention_mask": mask,
    }
    if weight and draw(st.booleans()):
        tensors["token_weight"] = rng.integers(0, 3, size=vocab) / 2.0
    options = {}
    if draw(st.booleans()):
        ids = st.lists(st.integers(0, vocab - 1), max_size=vocab - 1)
        options["ignore_token_ids"] = draw(ids)
    return tensors, options


@st.composite
def score_problems(draw) -> tuple[dict, dict]:
    """Draw teacher and student scores: ties, constant rows, masked and ``-inf`` candidates."""
    rng = np.random.default_rng(draw(seeds))
    standardize = draw(st.sampled_from(["batch", "row"]))
    batch, width = draw(sizes), draw(st.integers(2 if standardize == "batch" else 3, 6))
    names = ("student_scores", "teacher_scores")
    tensors = {name: draw(vectors(batch, width)) for name in names}
    options = {
        "temperature": draw(st.floats(0.2, 5.0)),
        "alpha_kl": draw(st.sampled_from([0.0, 0.7, 2.0])),
        "alpha_mse": draw(st.sampled_from([0.0, 0.3, 2.0])),
        "standardize": standardize,
    }
    if draw(st.booleans()):
        density = draw(st.sampled_from([0.2, 0.6, 0.9]))
        tensors["candidate_mask"] = rng.random((batch, width)) < density
    if draw(st.booleans()):
        hidden = rng.random((batch, width)) < 0.3
        tensors["teacher_scores"] = np.where(hidden, -np.inf, tensors["teacher_scores"])
    return tensors, options
