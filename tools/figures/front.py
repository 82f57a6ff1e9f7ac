"""Ranking and sparsity of ours and of sentence-transformers, from the study's committed results."""

from statistics import mean

from matplotlib import rcParams
from matplotlib.figure import Figure

from tools.figures._shared import Row, plain_ticks, results

LINES = {  # system, similarity, teacher: label, colour, marker, line
    ("sparse-losses", "dot", "True"): ("ours, teacher", "C0", "o", "-"),
    ("sparse-losses", "dot", "False"): ("ours", "C0", "s", "--"),
    ("two targets", "dot", "False"): ("ours, queries' target too", "C0", "D", "--"),
    ("sparse-losses", "cosine", "True"): ("ours, cosine, teacher", "C2", "o", "-"),
    ("sparse-losses", "cosine", "False"): ("ours, cosine", "C2", "s", "--"),
    ("sentence-transformers", "dot", "True"): ("theirs, dot, teacher", "C1", "o", "-"),
    ("sentence-transformers", "dot", "False"): ("theirs, dot", "C1", "s", "--"),
    ("sentence-transformers", "cosine", "True"): ("theirs, cosine, teacher", "C3", "o", "-"),
    ("sentence-transformers", "cosine", "False"): ("theirs, cosine", "C3", "s", "--"),
}
BASELINES = {"BM25, words": "-.", "BM25, same subwords": ":"}


def draw(figure: Figure) -> None:
    """Draw one panel per corpus; a mark is the mean over a setting's seeds."""
    rows = results("against_sentence_transformers.csv")
    corpora = list(dict.fromkeys(row["corpus"] for row in rows))
    panels = figure.subplots(1, len(corpora), squeeze=False)[0]
    for axes, corpus in zip(panels, corpora, strict=True):
        own = [row for row in rows if row["corpus"] == corpus]
        for key, (label, colour, marker, line) in LINES.items():
            points = front([row for row in own if form(row) == key])
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    label=label,
                    color=colour,
                    marker=marker,
                    linestyle=line,
                    fillstyle="full" if marker == "o" else "none",
                )
        for row in own:
            if row["variant"] in BASELINES:
                axes.axhline(
                    float(row["ndcg_10"]),
                    label=row["variant"],
                    color=rcParams["text.color"],
                    linestyle=BASELINES[row["variant"]],
                    linewidth=1,
                )
        axes.set(title=corpus, xlabel="active dimensions of a document", ylabel="nDCG@10")
        plain_ticks(axes.xaxis, [16, 32, 64, 128, 256])
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize=8)


def form(row: Row) -> tuple[str, str, str]:
    """Return the key of a run in `LINES`."""
    system = "two targets" if "queries" in row["variant"] else row["system"]
    return system, row["similarity"], row["teacher"]


def front(rows: list[Row]) -> list[tuple[float, ...]]:
    """Return active dimensions and nDCG@10 of every setting, means over its seeds."""
    return sorted(
        tuple(
            mean(float(row[column]) for row in rows if row["variant"] == variant)
            for column in ("active_document", "ndcg_10")
        )
        for variant in {row["variant"] for row in rows}
    )
