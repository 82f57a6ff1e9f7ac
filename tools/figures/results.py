"""Pictures of committed results, and V26's schedule; each function draws one."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean

import torch
from matplotlib import rcParams
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from benchmarks.run.table import RESULTS as BENCHMARKS
from benchmarks.run.table import ROOT, Row, largest_cases, read
from sparse_losses import V26, TrainingSchedule, Warmup

DOCS = ROOT / "docs" / "results"
TARGETS = [32, 64, 128]


def plain_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Put the only ticks of a logarithmic axis at these values, written as numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(FixedLocator(values))
    axis.set_ticklabels([f"{v / 1e3:.3g}k" if v >= 1e4 else f"{v:g}" for v in values])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def over_ours(
    figure: Figure,
    rows: Iterable[Row],
    panels: Mapping[str, str],
    series: Mapping[str, tuple[str, str]],
    cases: Sequence[tuple[str, str]],
    *,
    stacked: bool = False,
) -> None:
    """Draw each variant's figure over ours, a line per case: right of 1, ours is less."""
    table = {(row["loss"], row["case"], row["variant"]): row for row in rows}
    is_drawn = [any((*case, name) in table for name in series) for case in cases]
    cases = [case for case, drawn in zip(cases, is_drawn, strict=True) if drawn][::-1]
    both = figure.subplots(2, 1) if stacked else figure.subplots(1, 2, sharey=True)
    for axes, (column, title) in zip(both, panels.items(), strict=True):
        text = axes.spines["left"].get_edgecolor()
        for number, (name, (label, marker)) in enumerate(series.items()):
            own = [case for case in cases if (*case, name) in table]
            ratios = [
                float(table[*case, name][column]) / float(table[*case, "ours"][column])
                for case in own
            ]
            axes.plot(
                ratios,
                [cases.index(case) for case in own],
                marker,
                label=label,
                markersize=6,
                markerfacecolor="none",
                markeredgewidth=1.5,
                color=text if number > 4 else None,  # there are no more colours
            )
        axes.axvline(1, color=text, linewidth=1, linestyle="-")
        plain_ticks(axes.xaxis, [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 200])
        axes.set(xlabel=title, ylim=(-0.6, len(cases) - 0.4))
    for axes in both if stacked else both[:1]:
        axes.set_yticks(range(len(cases)), ["\n".join(case) for case in cases], fontsize=6)
    handles = both[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2 if stacked else 5, fontsize=8)


def benchmarks_peers(figure: Figure, *, file: str, stacked: bool = False) -> None:
    """Time and memory of the peers side by side, or ``stacked`` for a narrow screen."""
    rows = [row for row in read(BENCHMARKS / file) if row["status"].startswith("ok")]
    panels = {"seconds": "time", "peak_bytes": "memory"}
    panels = {key: f"{name} relative to sparse-losses" for key, name in panels.items()}
    peers = {"eager": ("plain formula", "o"), "torch.compile": ("the same, compiled", "x")}
    names = ("ours, compiled", "sentence-transformers", "pytorch-metric-learning")
    for name, marker in zip((*names, "info-nce-pytorch"), "s^D+", strict=True):
        peers[name] = (name.replace("ours", "sparse-losses"), marker)
    figure.set_size_inches((4.6, 12) if stacked else (8.4, 6.4))
    found = {row["variant"] for row in rows}
    peers = {name: look for name, look in peers.items() if name in found}
    over_ours(figure, rows, panels, peers, largest_cases(rows), stacked=stacked)


def growth(figure: Figure) -> None:
    """Time and memory as one size doubles: the slope of a line is its exponent."""
    figure.set_size_inches(8.4, 10)
    rows = read(BENCHMARKS / "growth.csv")
    axes_of = list(dict.fromkeys((row["loss"], row["axis"]) for row in rows))
    panels = figure.subplots(-(-len(axes_of) // 2), 4).flat
    for loss, axis in axes_of:
        own = [row for row in rows if (row["loss"], row["axis"]) == (loss, axis)]
        for column, title, unit in (
            ("seconds", "time, ms", 1e-3),
            ("peak_bytes", "memory, MiB", 2.0**20),
        ):
            panel = next(panels)
            for variant, label, mark in (
                ("eager", "plain formula", "x--"),
                ("ours", "sparse-losses", "o-"),
            ):
                line = [row for row in own if row["variant"] == variant]
                x = [float(row["value"]) for row in line]
                y = [float(row[column]) / unit for row in line]
                panel.plot(x, y, mark, markersize=4, label=label)
            plain_ticks(panel.xaxis, sorted({float(row["value"]) for row in own}))
            panel.set_yscale("log")
            low, high = panel.get_ylim()
            factors = (1, 2, 5) if high < 50 * low else (1,)
            steps = [factor * 10.0**power for power in range(-3, 6) for factor in factors]
            plain_ticks(panel.yaxis, [step for step in steps if low <= step <= high])
            panel.set_title(f"{loss}: {title}", fontsize=8)
            panel.set_xlabel(axis, fontsize=8)
            panel.tick_params(labelsize=7)
    handles = panel.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2)


def curriculum(figure: Figure) -> None:
    """V26's phases and a warm-up, as a schedule sets them at every step of the objective."""
    steps_per_epoch, warmup = 100, 600
    weights: dict[str, list[dict[str, float]]] = {}
    for shape in ("quadratic", "linear"):
        objective = V26.objective(idf=torch.rand(10))
        schedule = TrainingSchedule(
            objective,
            V26.curriculum,
            warmups={"query_flops": Warmup(warmup, shape)},
            steps_per_epoch=steps_per_epoch,
        )
        temperatures, weights[shape] = [], []
        for _ in range(27 * steps_per_epoch):  # V26's phases are the first 25 epochs
            temperatures.append(float(objective.info_nce.temperature))
            weights[shape].append({key: float(x) for key, x in objective.weights.items()})
            schedule.step()
    epochs = [1 + step / steps_per_epoch for step in range(len(temperatures))]
    left, middle, right = figure.subplots(1, 3)
    left.plot(epochs, temperatures)
    left.set(title="temperature of InfoNCE", xlabel="epoch", ylim=(0, 0.09))
    for name in ("info_nce", "distillation"):
        middle.plot(epochs, [each[name] for each in weights["quadratic"]], label=name)
    middle.set(title="weights", xlabel="epoch", ylim=(0, 3.4))
    middle.legend(loc="lower left")
    for axes in (left, middle):
        axes.set_xticks([1, 9, 18, 26])
    for shape, each in weights.items():
        right.plot([x["query_flops"] for x in each[: warmup + 150]], label=shape)
    right.set(title="query_flops, warmed up", xlabel="optimiser step", ylim=(0, 0.0115))
    right.set_xticks([0, 300, 600])
    right.legend(loc="lower right")


LINES = {  # system, similarity, teacher: label, colour, marker, line
    ("sparse-losses", "dot", "True"): ("sparse-losses, teacher", "C0", "o", "-"),
    ("sparse-losses", "dot", "False"): ("sparse-losses", "C0", "s", "--"),
    ("two targets", "dot", "False"): ("sparse-losses, queries' target too", "C0", "D", "--"),
    ("sparse-losses", "cosine", "True"): ("sparse-losses, cosine, teacher", "C2", "o", "-"),
    ("sparse-losses", "cosine", "False"): ("sparse-losses, cosine", "C2", "s", "--"),
    ("sentence-transformers", "dot", "True"): (
        "sentence-transformers, dot, teacher",
        "C1",
        "o",
        "-",
    ),
    ("sentence-transformers", "dot", "False"): ("sentence-transformers, dot", "C1", "s", "--"),
    ("sentence-transformers", "cosine", "True"): (
        "sentence-transformers, cosine, teacher",
        "C3",
        "o",
        "-",
    ),
    ("sentence-transformers", "cosine", "False"): (
        "sentence-transformers, cosine",
        "C3",
        "s",
        "--",
    ),
}
FEWER = {"trained": ("o", "-"), "pruned": ("s", "--"), "shifted": ("x", ":")}
BASELINES = {"BM25, words": "-.", "BM25, same subwords": ":"}


def mean_of(rows: Iterable[Row], variant: str, name: str = "variant") -> tuple[float, float]:
    """Return active dimensions and nDCG@10 of a variant, means over the seeds."""
    own = [row for row in rows if row[name] == variant]
    active = mean(float(row["active_document"] or "nan") for row in own)
    return active, mean(float(row["ndcg_10"]) for row in own)


def front(figure: Figure) -> None:
    """Ranking and sparsity of ours and of sentence-transformers, one panel per corpus."""
    rows = read(DOCS / "against_sentence_transformers.csv")
    corpora = list(dict.fromkeys(row["corpus"] for row in rows))
    panels = figure.subplots(1, len(corpora), squeeze=False)[0]
    handles = {}
    for axes, corpus in zip(panels, corpora, strict=True):
        own = [row for row in rows if row["corpus"] == corpus]
        variants: dict[tuple[str, str, str], set[str]] = {}
        for row in own:
            system = "two targets" if "queries" in row["variant"] else row["system"]
            key = system, row["similarity"], row["teacher"]
            variants.setdefault(key, set()).add(row["variant"])
        for key, (label, colour, marker, line) in LINES.items():
            points = sorted(mean_of(own, variant) for variant in variants.get(key, ()))
            fill = "full" if marker == "o" else "none"
            look = {"color": colour, "marker": marker, "linestyle": line, "fillstyle": fill}
            if points:
                (handles[label],) = axes.plot(*zip(*points, strict=True), **look)
        for name, line in BASELINES.items():
            look = {"color": rcParams["text.color"], "linestyle": line, "linewidth": 1}
            handles[name] = axes.axhline(mean_of(own, name)[1], **look)
        axes.set(title=corpus, xlabel="active dimensions of a document", ylabel="nDCG@10")
        plain_ticks(axes.xaxis, [16, *TARGETS, 256])
    figure.set_size_inches(8.4, 4.4)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=8)


def target_sparsity(figure: Figure) -> None:
    """The battery's active dimensions over what was asked for; ranking of pruned documents."""
    left, right = figure.subplots(1, 2)
    battery = read(DOCS / "battery.csv")
    battery = [row for row in battery if not row["name"].startswith(("bert dot", "decoder"))]
    for way, reached, wanted, label, marker, beside in (
        ("former", "training", "target", "in training, former controller", "x", 1 / 1.2),
        ("controller", "training", "target", "in training", "o", 1.0),
        ("controller", "calibrated", "wanted", "held out, pruned to two thirds", "s", 1.2),
    ):
        own = [row for row in battery if row["controller"] == way and row[reached]]
        places = [float(row["target"]) * beside for row in own]
        ratios = [float(row[reached]) / float(row[wanted]) for row in own]
        left.plot(places, ratios, marker, fillstyle="none", label=label)
    left.axhline(1.0, color=rcParams["text.color"], linewidth=1)
    left.set(title="active dimensions over those asked for", xlabel="target", ylim=(0.7, 2.2))
    plain_ticks(left.xaxis, TARGETS)
    left.legend(fontsize=8)
    rows = read(DOCS / "collection.csv")
    for collection, colour in (("med", "C0"), ("time", "C1")):
        own = [row for row in rows if row["collection"] == collection]
        for label, (marker, line) in FEWER.items():
            names = [f"RECOMMENDED, target {number}" for number in (64, 32, 16)]
            if label != "trained":
                names[1:] = [f"{names[0]}, {label} to {number}" for number in (32, 16)]
            points = [mean_of(own, name, "row") for name in names]
            look = {"color": colour, "marker": marker, "linestyle": line, "fillstyle": "none"}
            right.plot(*zip(*points, strict=True), label=f"{collection.upper()}, {label}", **look)
    right.set(title="nDCG@10", xlabel="active dimensions of a document")
    plain_ticks(right.xaxis, [16, 32, 64])
    right.legend(fontsize=8)


FIGURES = {
    **{
        f"benchmarks_{name}{width}": functools.partial(benchmarks_peers, file=file, stacked=stacked)
        for name, file in (("peers", "cpu-quick.csv"), ("gpu", "cuda-gpu.csv"))
        for width, stacked in (("", False), ("_narrow", True))
    },
    "curriculum": curriculum,
    "front": front,
    "growth": growth,
    "target_sparsity": target_sparsity,
}
