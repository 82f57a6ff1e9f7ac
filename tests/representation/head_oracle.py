"""What the SPLADE head is, one dot product at a time, and numbers with which that is exact.

The formulas are float64 NumPy and Python loops; nothing is imported from the package. The numbers
lie on a grid: the terms of every dot product and its partial sums, in any order, fit the 24 bits of
fp32, yet not the 8 bits of bf16. fp32 then has no rounding to hide behind: the maximum, its
position and the sign are right or wrong.
"""

import math

import numpy as np
from hypothesis import strategies as st

from tests.oracles import capped, token_weight
from tests.strategies import seeds


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Return the exact dot product, rounded once."""
    products = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    return math.fsum(products) if np.isfinite(products).all() else float(sum(products))


def maxima(hidden, weight, mask=None) -> tuple[np.ndarray, np.ndarray]:
    """Return ``max_s h_is . w_j`` and its first position; -1 for a text without a position."""
    batch, length, _ = np.shape(hidden)
    vocab = len(weight)
    top = np.zeros((batch, vocab))
    position = np.full((batch, vocab), -1)
    for i in range(batch):
        for j in range(vocab):
            for s in range(length):
                if mask is not None and not mask[i][s]:
                    continue
                value = dot(hidden[i][s], weight[j])
                if position[i, j] < 0 or value > top[i, j]:
                    top[i, j], position[i, j] = value, s
    return top, position


def logits(hidden, weight, bias=None, mask=None, gate=None, softcap=None) -> np.ndarray:
    """Return ``g_ij cap(max_s h_is . w_j + b_j)``, 0 for a text without a position."""
    top, position = maxima(hidden, weight, mask)
    pooled = np.zeros_like(top)
    for i, j in np.ndindex(*top.shape):
        if position[i, j] >= 0:
            value = capped(top[i, j] + (0.0 if bias is None else float(bias[j])), softcap)
            pooled[i, j] = value * (1.0 if gate is None else float(gate[i][j]))
    return pooled


def activations(pooled: np.ndarray, **options) -> np.ndarray:
    """Return the weight of every logit."""
    out = np.zeros_like(pooled)
    for index in np.ndindex(*pooled.shape):
        out[index] = token_weight(pooled[index], **options)
    return out


def gradients(hidden, weight, bias, mask, gate, upstream, upstream_logits=None) -> dict:
    """Return the gradients of ``sum(upstream * activations)``, plus that of the logits.

    Each is a pair with the sum of its terms' magnitudes, to which rounding errors are relative.
    """
    top, position = maxima(hidden, weight, mask)
    batch, vocab = top.shape
    shapes = {"hidden": np.shape(hidden), "weight": np.shape(weight)}
    shapes |= {"bias": (vocab,), "gate": (batch, vocab)}
    grads = {name: (np.zeros(shape), np.zeros(shape)) for name, shape in shapes.items()}

    for i, j in np.ndindex(batch, vocab):
        s = position[i, j]
        if s < 0:
            continue
        g = 1.0 if gate is None else float(gate[i][j])
        ungated = top[i, j] + (0.0 if bias is None else float(bias[j]))
        outer = [0.0 if upstream_logits is None else float(upstream_logits[i][j])]
        if g * ungated > 0:
            outer.append(float(upstream[i][j]) / (1.0 + g * ungated))
        for name, index, factor in (
            ("gate", (i, j), np.asarray(ungated)),
            ("bias", j, np.asarray(g)),
            ("hidden", (i, s), g * np.asarray(weight[j], np.float64)),
            ("weight", j, g * np.asarray(hidden[i][s], np.float64)),
        ):
            total, size = grads[name]
            total[index] += sum(outer) * factor
            size[index] += sum(map(abs, outer)) * np.abs(factor)
    return grads


# ------------------------------------------------------------------------------------------------
# Numbers


def grid(rng: np.random.Generator, shape, bits: int = 9, scale: float = 2.0**-6) -> np.ndarray:
    """Draw multiples of ``scale`` of that many bits and a sign."""
    return rng.integers(-(2**bits) + 1, 2**bits, size=shape) * scale


def is_exact(hidden, weight, unit: float) -> bool:
    """Whether every partial sum of every dot product is a multiple of ``unit`` that fp32 holds."""
    flat = np.abs(np.asarray(hidden, np.float64)).reshape(-1, np.shape(hidden)[-1])
    largest = (flat @ np.abs(np.asarray(weight, np.float64)).T).max(initial=0.0)
    return bool(largest < 2.0**24 * unit)


@st.composite
def problems(draw) -> dict:
    """Draw the arrays of a call whose signs may hang on the last digit of a logit."""
    rng = np.random.default_rng(draw(seeds))
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    vocab, width = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["grid", "ties", "near ties"]))
    if kind == "ties":
        hidden = rng.integers(-1, 2, size=(batch, length, width)).astype(float)
        weight = rng.integers(-1, 2, size=(vocab, width)).astype(float)
    elif kind == "grid":
        hidden = grid(rng, (batch, length, width))
        weight = grid(rng, (vocab, width))
    else:  # bf16 cannot tell 513 from 512
        hidden = rng.integers(512, 516, size=(batch, length, width)) * 2.0**-6
        weight = rng.integers(1, 512, size=(vocab, width)) * 2.0**-6
    assert is_exact(hidden, weight, 2.0**-12)
    mask = None
    if draw(st.booleans()):
        mask = rng.random((batch, length)) < draw(st.sampled_from([0.0, 0.4, 0.8]))
    bias = None
    edge = draw(st.sampled_from(["none", "random", "knife", "knife"]))
    if edge == "random":
        bias = grid(rng, vocab)
    elif edge == "knife":  # one text of each column is at -1, 0 or 1 units
        top, _ = maxima(hidden, weight, mask)
        bias = -top[rng.integers(0, batch, size=vocab), np.arange(vocab)]
        bias = bias + rng.integers(-1, 2, size=vocab) * 2.0**-12
    gate = rng.choice([0.0, 0.5, 1.0], size=(batch, vocab)) if draw(st.booleans()) else None
    return {"hidden": hidden, "weight": weight, "bias": bias, "attention_mask": mask, "gate": gate}
