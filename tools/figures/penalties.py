"""Token penalties by the number of documents with the token, for several `alpha`."""

import numpy as np
import torch

from sparse_losses import DocumentFrequency, idf_penalty

DOCUMENTS, COMMONEST = 1_000_000, 600_000  # the rarest token is in no document

X = "documents with the token, of 1,000,000"
LOG_X = True
PANELS = {"penalty": "penalty", "log10": "log10 of the penalty"}
LINES = {
    "α = 1": {"alpha": 1.0, "minimum": 0.0},
    "α = 2.5": {"alpha": 2.5, "minimum": 0.0},
    "α = 4": {"alpha": 4.0, "minimum": 0.0},
    "α = 4, minimum 0.1": {"alpha": 4.0, "minimum": 0.1},
}


def curves(*, alpha: float, minimum: float) -> dict:
    """Return the curves of ordinary tokens, neither special tokens nor stopwords."""
    df = np.unique(np.round(np.geomspace(1, COMMONEST, 121)).astype(np.int64))
    counts = DocumentFrequency(vocab_size=len(df) + 1)
    counts.num_documents = DOCUMENTS
    counts.df = torch.from_numpy(np.concatenate([[0], df]))
    penalty = idf_penalty(counts.idf(), alpha=alpha, minimum=minimum)[1:].numpy()
    return {"x": df, "penalty": {"": penalty}, "log10": {"": np.log10(penalty)}}
