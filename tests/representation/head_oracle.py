"""What the SPLADE head is, one dot product at a time: float64 NumPy and Python loops."""

import math

import numpy as np

from tests.oracles import capped, token_weight


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Return the exact dot product, rounded once."""
    products = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    return math.fsum(products) if np.isfinite(products).all() else float(sum(products))


def logits(hidden, weight, bias=None, mask=None, gate=None, softcap=None) -> np.ndarray:
    """Return ``g_ij cap(max_s h_is . w_j + b_j)``, 0 for a text without a position."""
    pooled = np.zeros((len(hidden), len(weight)))
    for i, j in np.ndindex(*pooled.shape):
        positions = [s for s in range(len(hidden[i])) if mask is None or mask[i][s]]
        if positions:
            top = max(dot(hidden[i][s], weight[j]) for s in positions)
            value = capped(top + (0.0 if bias is None else float(bias[j])), softcap)
            pooled[i, j] = value * (1.0 if gate is None else float(gate[i][j]))
    return pooled


def activations(pooled: np.ndarray, **options) -> np.ndarray:
    """Return the weight of every logit."""
    out = np.zeros_like(pooled)
    for index in np.ndindex(*pooled.shape):
        out[index] = token_weight(pooled[index], **options)
    return out


def grid(rng: np.random.Generator, shape, bits: int = 9, scale: float = 2.0**-6) -> np.ndarray:
    """Draw multiples of ``scale`` of that many bits and a sign, whose dot products fp32 holds."""
    return rng.integers(-(2**bits) + 1, 2**bits, size=shape) * scale
