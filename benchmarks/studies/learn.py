"""What the studies share: a training by a plain loop, pruning, and the figures of the vectors.

A training is InfoNCE and at most one thing that acts on the number of active dimensions. What is
compared is always pruned to the same dimensions of queries and documents, by a threshold a side.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.run.table import circumstances, markdown, read
from sparse_losses.functional import calibrate_threshold, flops_loss, info_nce_loss

# The weights in the documentation of sentence-transformers' SpladeLoss.
FIXED = {"query": 3e-5, "document": 5e-5}
PROBED = 32  # texts whose dimensions are counted in evaluation mode
Towers = Mapping[
    str, Any
]  # modules by side; a tower maps ids and mask to vectors, and has a `bias`
Rows = Sequence[Tensor]  # token ids of texts


@dataclasses.dataclass(frozen=True)
class Settings:
    """One training."""

    steps: int = 300
    batch: int = 32
    lr: float = 2e-3
    warmup: float = 0.0  # share of the steps
    decay: bool = False  # linearly to 0
    similarity: Literal["cosine", "dot"] = "cosine"
    temperature: float = 0.05
    seed: int = 0
    start: float = 0.0  # active in a text: a share below 1, or dimensions; 0: as the model is
    acts: str = ""  # "" (nothing), "gain", "topk" or "fixed"
    target: float = 32  # dimensions of a document, for "gain" and "topk"
    query_target: float = 24  # for "topk"
    gain: float = 0.3  # of the logarithm of the weight, every five steps
    late: tuple[float, float] = (0.75, 0.9)  # where "topk" starts, and is at its number
    weight: float = 1.0  # factor on sentence-transformers' weights, for "fixed"

    @property
    def arm(self) -> str:
        """The name of what acts, with its start."""
        start = f"1/{1 / self.start:g}" if 0 < self.start < 1 else f"{self.start:g}"
        shift = f"start {start}, " if self.start else ""
        number = f" {self.target:g}" if self.acts in ("gain", "topk") else ""
        late = f" from {self.late[0]:.0%}" if self.acts == "topk" else ""
        weight = f" x{self.weight:g}" if self.weight != 1 else ""
        weight += f" by {self.gain:g}" if self.acts == "gain" and self.gain != Settings.gain else ""
        return f"{shift}{self.acts or 'nothing'}{number}{late}{weight}"


class Gain:
    """A FLOPS weight by one integral gain on its logarithm: ``log w += gain * log(a / target)``.

    ``a`` counts documents in evaluation mode. It waits until InfoNCE is below half of chance, and
    the weighted FLOPS are at most the ranking loss.
    """

    def __init__(self, target: float, gain: float, first: float = 0.01) -> None:
        self.target, self.gain, self.first = target, gain, first
        self.ranking, self.weight = math.nan, 0.0

    def update(
        self, ranking: float, chance: float, flops: float, count: Callable[[], float]
    ) -> None:
        """Show the losses of a step."""
        last = ranking if math.isnan(self.ranking) else self.ranking
        self.ranking = 0.9 * last + 0.1 * ranking
        if flops > 0 and (self.weight or self.ranking <= chance / 2):
            weight = self.weight or self.first * ranking / flops
            ratio = max(count(), 0.1) / self.target
            self.weight = min(weight * ratio**self.gain, ranking / flops)


class BatchTopK(nn.Module):
    """Keeps the ``k * B`` largest entries of a batch, and the largest of every row (2412.06410).

    ``k`` falls geometrically from the count at its start to the target. In evaluation mode the
    smallest entries that were kept, on average, are the threshold.
    """

    def __init__(self, target: float, first: float, last: float) -> None:
        super().__init__()
        self.target, self.first, self.last = target, first, last
        self.calls, self.high, self.threshold = 0, math.nan, math.nan

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, V]`` with fewer entries."""
        if not self.training:
            return x if math.isnan(self.threshold) else self._kept(x, self.threshold)
        self.calls += 1
        active = int((x > 0).sum())
        if self.calls <= self.first or active == 0:
            return x
        if math.isnan(self.high):
            self.high = max(active / len(x), self.target)
        done = min((self.calls - self.first) / max(self.last - self.first, 1), 1.0)
        k = math.exp((1 - done) * math.log(self.high) + done * math.log(self.target))
        kept = x.detach().flatten().topk(min(round(k * len(x)), active))
        smallest = kept.values[-1].item()
        mix = 0.9 if self.calls > self.last + 1 else 0.0
        self.threshold = mix * self.threshold + (1 - mix) * smallest if mix else smallest
        return self._kept(x, smallest)

    @staticmethod
    def _kept(x: Tensor, threshold: float) -> Tensor:
        return x * ((x >= threshold) | (x >= x.detach().amax(1, keepdim=True)))


def pad(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return ids ``[B, S]`` and the mask; no text has the id 0."""
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return ids, (ids > 0).long()


def vectors(tower: Any, rows: Rows) -> Tensor:
    """Return the vectors of texts in the tower's mode."""
    with torch.no_grad():
        return torch.cat([tower(*pad(rows[i : i + 64])) for i in range(0, len(rows), 64)])


def active(x: Tensor) -> float:
    """Return the mean number of active dimensions."""
    return int((x > 0).sum()) / len(x)


def shift(towers: Towers, pairs: Sequence[tuple[Tensor, Tensor]], start: float) -> None:
    """Shift each bias once, so that a text has that share or number of dimensions active."""
    sides = {id(towers[side]): (towers[side], n) for n, side in enumerate(("query", "document"))}
    for tower, column in sides.values():
        if tower.bias is not None:
            x = vectors(tower.eval(), [pair[column] for pair in pairs[:256]])
            number = start if start > 1 else start * x.shape[1]
            if active(x) > number:
                with torch.no_grad():
                    tower.bias -= calibrate_threshold(x, number)


def train(
    towers: Towers,
    pairs: Sequence[tuple[Tensor, Tensor]],
    s: Settings,
    besides: Callable[[Mapping[str, Tensor], Sequence[int]], Tensor] | None = None,
) -> tuple[dict[str, Any], Callable[[str, Rows], Tensor]]:
    """Train; return figures of the training and the encoder in evaluation mode.

    ``besides`` adds a loss of the vectors of both sides and the numbers of their pairs.
    """
    if s.start:
        shift(towers, pairs, s.start)
    modules = nn.ModuleList({id(tower): tower for tower in towers.values()}.values())
    optimizer = torch.optim.AdamW([p for p in modules.parameters() if p.requires_grad], lr=s.lr)
    ramp = max(s.warmup * s.steps, 1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / ramp, 1.0) * (1 - n / s.steps if s.decay else 1.0)
    )
    g = torch.Generator().manual_seed(1000 + s.seed)
    gain = Gain(s.target, s.gain)
    numbers = {"query": s.query_target, "document": s.target}
    keep = {k: BatchTopK(n, *(share * s.steps for share in s.late)) for k, n in numbers.items()}
    chance, counts, probe = math.log(s.batch), [], [pair[1] for pair in pairs[-PROBED:]]

    def encode(side: str, rows: Rows) -> Tensor:
        x = vectors(towers[side], rows)
        return keep[side].eval()(x) if s.acts == "topk" else x

    def count() -> float:
        modules.eval()
        found = active(encode("document", probe))
        modules.train()
        return found

    started = time.perf_counter()
    modules.train()
    for step in range(s.steps):
        drawn = torch.randint(len(pairs), (s.batch,), generator=g).tolist()
        sides = enumerate(("query", "document"))
        x = {side: towers[side](*pad([pairs[i][n] for i in drawn])) for n, side in sides}
        counts.append(active(x["document"]))
        if s.acts == "topk":
            x = {side: keep[side].train()(own) for side, own in x.items()}
        of: Any = {"temperature": s.temperature, "similarity": s.similarity}
        loss = ranking = info_nce_loss(x["query"], x["document"], **of)
        if besides is not None:
            loss = loss + besides(x, drawn)
        if s.acts == "gain":
            flops = flops_loss(x["document"])
            if step % 5 == 0:
                gain.update(ranking.item(), chance, flops.item(), count)
            loss = ranking + gain.weight * flops
        elif s.acts == "fixed":  # their callback raises the weights over a third of the steps
            share = s.weight * min(3 * step / s.steps, 1.0) ** 2
            loss = ranking + share * sum(w * flops_loss(x[side]) for side, w in FIXED.items())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - started
    in_training = active(torch.cat([vectors(towers["document"], probe) for _ in range(4)]))
    modules.eval()
    figures = {
        key: getattr(s, key) for key in ("arm", "steps", "batch", "lr", "similarity", "seed")
    }
    return figures | {
        "first_active": round(counts[0], 1),
        "training_mode": round(in_training, 1),
        "evaluation_mode": round(active(vectors(towers["document"], probe)), 1),
        "seconds": round(seconds, 1),
    }, encode


def pruned(x: Tensor, number: float, of: Tensor | None = None) -> Tensor:
    """Return the entries above the threshold that leaves ``number`` a text, and every largest.

    The threshold is that of the vectors ``of``. With fewer entries all are kept.
    """
    of = x if of is None else of
    if not number or active(of) <= number:
        return x
    threshold = calibrate_threshold(of, number)
    return x * ((x.expm1() > threshold) | (x >= x.amax(1, keepdim=True)))


def figures_at(
    q: Tensor,
    d: Tensor,
    points: Iterable[tuple[float, float]],
    rank: Callable[[Tensor, Tensor], Mapping[str, float]],
    every: int = 2,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of vectors pruned to each pair of numbers; (0, 0) is unpruned.

    ``held_out`` counts every second document, or every ``every``-th, with the others' threshold.
    """
    in_use = (q > 0).any(0) | (d > 0).any(0)
    in_use[0] = True  # of a dead model one dimension is left
    q, d = q[:, in_use], d[:, in_use]
    for number in dict.fromkeys([(0, 0), *points]):
        of_q, of_d = pruned(q, number[0]), pruned(d, number[1])
        others = d[torch.arange(len(d)) % every != 0]
        held_out = active(pruned(d[::every], number[1], of=others)) if number[1] else math.nan
        shares = [(x > 0).float().mean(0).double() for x in (of_q, of_d)]
        found = {
            "asked_query": number[0] or "",
            "asked_document": number[1] or "",
            "query": round(active(of_q), 2),
            "document": round(active(of_d), 2),
            "products": round((shares[0] @ shares[1]).item(), 3),
            "longest_list": round(shares[1].max().item(), 4),
            "empty": int((of_d.amax(1) <= 0).sum()),
            "held_out": round(held_out, 2) if number[1] else "",
        }
        yield found | {key: round(value, 4) for key, value in rank(of_q, of_d).items()}


class Results:
    """A CSV to which rows are added as they come, so that a study can be cut short."""

    def __init__(self, path: Path, study: str, columns: Sequence[str]) -> None:
        self.path, self.columns = path, columns
        self.common = circumstances(torch.device("cpu"), study)
        self.done = {tuple(row[key] for key in columns) for row in read(path)}

    def missing(self, **about: Any) -> bool:
        """Whether no row has these values of the columns that name a training."""
        return tuple(str(about[key]) for key in self.columns) not in self.done

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows and print them."""
        rows = [{**row, **self.common} for row in rows]
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows(rows)
        self.done.add(tuple(str(rows[0][key]) for key in self.columns))
        for row in rows:
            print(*(value for key, value in row.items() if key not in self.common), flush=True)


def table(rows: Sequence[Mapping[str, str]], about: Sequence[str], figure: str) -> str:
    """Return the figures by what a row is about, arm and dimensions: means over the rest."""
    keys = (*about, "arm", "asked_query", "asked_document")
    shown = (figure, "query", "document", "products", "longest_list", "held_out")
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for one in rows:
        groups.setdefault(tuple(one[key] for key in keys), []).append(one)
    lines = []
    for group, own in groups.items():
        found = [[float(one[key]) for one in own if one[key]] for key in shown]
        cells = [f"{sum(x) / len(x):.3g}" if x else "" for x in found]
        lines.append([*group, len(own), *cells])
    return markdown((*keys, "rows", *shown), lines)
