"""What the studies share: pruning, figures, what acts on the number, and rows that are kept."""

import math

import pytest
import torch
from torch import nn

from benchmarks.studies import learn
from sparse_losses import SpladeHead


def _vectors(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.manual_seed(seed)).relu().log1p()


class Bag(nn.Module):
    """A bag of 30 words with dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.bias = nn.Embedding(30, 8), nn.Parameter(torch.ones(30))
        self.head, self.dropout = SpladeHead(nn.Linear(8, 30).weight, self.bias), nn.Dropout(0.1)

    def forward(self, ids, mask):
        return self.head(self.dropout(self.words(ids)), mask)


def test_pruned_vectors_keep_their_number_and_every_largest_entry():
    x = _vectors(40, 60)
    fewer = learn.pruned(x, 7)
    assert learn.active(fewer) == pytest.approx(7, rel=0.01)
    assert torch.equal(fewer.amax(1), x.amax(1))
    lowest = fewer[(fewer > 0) & (fewer < x.amax(1, keepdim=True))].min()
    assert (x[fewer == 0] < lowest).all()
    assert torch.equal(learn.pruned(x, 60), x)  # there are fewer
    assert learn.active(learn.pruned(x[:5], 7, of=x)) == learn.active(fewer[:5])


def test_figures_follow_their_formulas():
    q, d = _vectors(9, 50), _vectors(20, 50, seed=1)
    d[3] = 0
    rank = {"top": lambda a, b: (a @ b.T).argmax(1).double().mean().item()}
    rows = list(learn.figures_at(q, d, [(3, 5), (3, 5)], lambda a, b: {"top": rank["top"](a, b)}))
    assert [row["asked_document"] for row in rows] == ["", 5]
    for row, (a, b) in zip(rows, [(q, d), (learn.pruned(q, 3), learn.pruned(d, 5))], strict=True):
        shared = [sum(bool(x and y) for x, y in zip(u, v, strict=True)) for u in a for v in b]
        assert row["products"] == pytest.approx(sum(shared) / len(shared), abs=1e-3)
        lists = [sum(bool(v[j]) for v in b) / 20 for j in range(50)]
        assert row["longest_list"] == pytest.approx(max(lists), abs=1e-4)
        assert (row["empty"], row["top"]) == (1, round(rank["top"](a, b), 4))
    assert rows[1]["held_out"] == pytest.approx(5, abs=2)


def test_a_dead_model_has_figures_too():
    empty = torch.zeros(4, 6)
    whole, _ = learn.figures_at(empty, empty, [(2, 3)], lambda q, d: {})
    assert (whole["document"], whole["products"], whole["empty"]) == (0, 0, 4)


def test_the_gain_waits_for_the_ranking_loss_and_then_follows_the_number():
    gain = learn.Gain(target=10, gain=0.5)
    gain.update(3.0, 4.0, 2.0, lambda: 1000.0)
    assert gain.weight == 0, "InfoNCE is above half of chance"
    for count, factor in ((40.0, 2.0), (2.5, 0.5)):
        before = gain.weight or 0.01 * 1.0 / 2.0
        gain.ranking = 1.0
        gain.update(1.0, 4.0, 2.0, lambda count=count: count)
        assert gain.weight == pytest.approx(before * factor)
    gain.update(1.0, 4.0, 2.0, lambda: 1e9)
    assert gain.weight == pytest.approx(1.0 / 2.0), "weighted FLOPS at most the ranking loss"


def test_batch_top_k_keeps_its_number_of_the_batch_and_every_largest_entry():
    x, keep = _vectors(8, 40), learn.BatchTopK(4, first=1, last=3)
    assert torch.equal(keep(x), x)
    counts = [learn.active(keep(x)) for _ in range(3)]
    start = learn.active(x)
    expected = [math.sqrt(start * 4), 4, 4]
    assert counts == pytest.approx(expected, rel=0.15)
    fewer = keep(x)
    assert torch.equal(fewer.amax(1), x.amax(1))
    assert torch.equal(keep.eval()(x), fewer)
    assert torch.equal(learn.BatchTopK(4, 1, 3).eval()(x), x)


@pytest.mark.parametrize("acts", ["", "gain", "topk", "fixed"])
def test_every_arm_trains_from_its_start(acts):
    tower = Bag()
    settings = learn.Settings(
        steps=12, batch=8, lr=0.05, start=0.2, acts=acts, target=3, query_target=2, late=(0.2, 0.5)
    )
    ids = torch.randint(1, 30, (40, 2, 5))
    pairs = [(query[:3], document) for query, document in ids]
    about, encode = learn.train({"query": tower, "document": tower}, pairs, settings)
    assert about["first_active"] == pytest.approx(6, rel=0.4)
    assert about["arm"].startswith("start 1/5, ")
    x = encode("document", [pair[1] for pair in pairs])
    assert not x.requires_grad
    assert x.shape == (40, 30)
    if acts == "topk":
        assert learn.active(x) == pytest.approx(3, rel=0.5)


def test_rows_are_kept_and_known(tmp_path, capsys):
    path = tmp_path / "new" / "study.csv"
    results = learn.Results(path, "study", ("arm", "seed"))
    assert results.missing(arm="gain", seed=0)
    results.add([{"arm": "gain", "seed": 0, "recall_10": 0.5}])
    assert capsys.readouterr().out == "gain 0 0.5\n"
    again = learn.Results(path, "study", ("arm", "seed"))
    again.add([{"arm": "gain", "seed": 1, "recall_10": 0.6}])
    assert not learn.Results(path, "study", ("arm", "seed")).missing(arm="gain", seed=1)
    rows = learn.read(path)
    assert [row["recall_10"] for row in rows] == ["0.5", "0.6"]
    assert all(rows[0][key] for key in ("git_commit", "torch", "device", "python"))


def test_the_table_has_means_of_what_is_alike():
    row = {"arm": "nothing", "asked_query": "", "asked_document": "8", "held_out": ""}
    row |= dict.fromkeys(("query", "document", "products", "longest_list"), "2")
    rows = [
        row | {"row": name, "recall_10": value}
        for name, value in (("a", ".5"), ("a", ".7"), ("b", "1"))
    ]
    lines = learn.table(rows, ["row"], "recall_10").splitlines()
    assert lines[2:] == [
        "| a | nothing |  | 8 | 2 | 0.6 | 2 | 2 | 2 | 2 |  |",
        "| b | nothing |  | 8 | 1 | 1 | 2 | 2 | 2 | 2 |  |",
    ]
