"""The settings of complete training runs, as data.

``RECOMMENDED`` is the recipe to start with; it ranks by dot products. ``COSINE`` ranks by cosines
and has all losses of plain pairs, so that each can be switched off.
V22 to V28 are versions of a Korean neural sparse retriever: V22 to V26 come from its notes on loss
functions, V28 from the notes on that experiment. A number that the notes do not give is ``None``
here and must be set before use.
"""

from sparse_losses.objective.preset import Preset
from sparse_losses.objective.schedules import Curriculum, Phase

__all__ = ["COSINE", "RECOMMENDED", "V22", "V23", "V25", "V26", "V28", "Preset"]

# Every number is one line, with its reason. Figures are nDCG@10 on the docstrings and on Debian's
# packages, of validation queries at target 64 and of one seed where nothing else is said:
# docs/results/recipe.csv.
RECOMMENDED = Preset(
    name="RECOMMENDED",
    weights={
        "info_nce": 1.0,  # the scale of all others
        "distillation": 3.0,  # 1: -.006 and -.006; 6: -.005 and -.001
        "document_flops": 0.1,  # where the controller starts
        "query_flops": 0.1,  # 0.3: +.001 and -.003
    },
    temperature=1.0,  # the encoder learns the scale of dot products
    similarity="dot",  # COSINE: -.028 and -.010, means of three seeds
    teacher="bm25",  # no model: it reads the token ids of the batch
    distillation_temperature=1.0,  # unused: the KL is off
    alpha_kl=0.0,  # the KL in place of the z-scores, weight 1: -.006 and -.014
    alpha_mse=1.0,  # z-scores need no scale
    # A retriever learns to rank before it learns to be sparse. The documents' weight warms up only
    # where no controller steers it.
    warmup={"query_flops": 0.5, "document_flops": 0.5},
    # Documents at 32: -.010 and -.004, means of three seeds. With a second target of 24 for the
    # queries: +.002 and -.014; without the teacher +.005 and +.001, means of three seeds.
    target_active={"document_flops": 64},
)

COSINE = Preset(  # docs/demo.md has an ablation of these losses
    name="COSINE",
    weights={
        "info_nce": 1.0,
        "distillation": 1.0,
        "document_flops": 0.03,  # where the controller starts
        "query_flops": 0.03,
        "query_self_reconstruction": 1.0,  # the token terms keep a text's own words active
        "document_self_reconstruction": 1.0,
        "query_positive_activation": 1.0,
        "document_positive_activation": 1.0,
        "query_min_activation": 0.5,
        "document_min_activation": 0.5,
    },
    temperature=0.05,
    symmetric=True,  # a document is compared with all queries of the batch, too
    teacher="bm25",
    score_scale=20.0,  # 1 / temperature: cosines are too flat for a softmax
    teacher_scale=0.5,  # BM25 scores are too steep for one
    distillation_temperature=1.0,  # the two scales replace it
    alpha_kl=1.0,  # BM25's order and margins,
    alpha_mse=0.0,  # not its z-scores
    beta=0.3,  # IdfFlopsLoss's default
    idf_alpha=4.0,  # a rare token costs e^-4 of a common one
    special_penalty=100.0,  # special tokens mean nothing in a search
    stopword_penalty=15.0,  # V26's
    top_k=5,  # a text keeps five tokens at least
    threshold=0.5,
    balanced=True,  # so that a long text's many silent tokens do not outweigh its own
    warmup={"query_flops": 0.5, "document_flops": 0.5},
    target_active={"document_flops": 64},
)

_TERMS = (
    "info_nce",
    "query_self_reconstruction",
    "query_positive_activation",
    "triplet_margin",
    "query_flops",
    "query_min_activation",
    "distillation",
)


def _weights(*column: float) -> dict[str, float]:
    """Return a column of the notes' table "Loss weights by version"."""
    return dict(zip(_TERMS, column, strict=False))  # V22 has no distillation


_OURS = {
    "sides": "the notes name none but the anchors' positive tokens: they are query_... here; the "
    "documents are indexed, so consider document_... too",
    "special tokens": "the token losses ignore them, because FLOPS lowers them",
    "short texts": "min activation averages no more activations than a text has tokens",
}
_PLAIN = {**_OURS, "idf_alpha": "none: IDF-aware FLOPS begins with V25"}


V22 = Preset(name="V22", weights=_weights(2.0, 4.0, 10.0, 2.5, 0.005, 1.0), ours=_PLAIN)
V23 = Preset(name="V23", weights=_weights(2.5, 1.0, 3.0, 0.0, 0.003, 1.0, 1.0), ours=_PLAIN)
V25 = Preset(
    name="V25",
    weights=_weights(3.0, 0.5, 2.0, 0.0, 0.002, 1.0, 2.0),
    beta=0.3,
    idf_alpha=2.5,
    stopword_penalty=5.0,
    ours=_OURS,
)
V26 = Preset(
    name="V26",
    weights=_weights(3.0, 0.5, 2.0, 0.0, 0.010, 1.0, 2.0),
    temperature=0.07,
    margin=0.3,
    teacher="BAAI/bge-m3",
    distillation_temperature=3.0,
    alpha_kl=0.7,
    alpha_mse=0.3,
    beta=0.3,
    idf_alpha=4.0,
    special_penalty=100.0,
    stopword_penalty=15.0,
    top_k=5,
    threshold=0.5,
    curriculum=Curriculum(
        [
            Phase(1, 8, temperature=0.08, weights={"info_nce": 2.5, "distillation": 2.5}),
            Phase(9, 17, temperature=0.05, weights={"info_nce": 3.0, "distillation": 1.5}),
            Phase(18, 25, temperature=0.04, weights={"info_nce": 3.0, "distillation": 0.8}),
        ]
    ),
    ours=_OURS,
)
V28 = V26.replace(
    name="V28",
    weights={"query_language_penalty": 0.5, "context_distillation": 1.0},
    language_penalty=100.0,
    training={
        "num_epochs": 25,
        "batch_size": 24,
        "learning_rate": 3.0e-5,
        "gradient_accumulation_steps": 4,
        "context_gate_hidden": 256,
        "context_attention_heads": 4,
        "context_gate_dropout": 0.1,
    },
    ours={
        **_OURS,
        "context_distillation": "named without a formula: here of the anchors' mutual scores",
        "unchanged": "numbers that the notes on V28 do not repeat are V26's",
        "phases": "the notes on V28 list no info_nce: V26's 2.5, 3.0 and 3.0",
    },
)
