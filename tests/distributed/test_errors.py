"""Three ranks that disagree: an error on every one of them, and none is left waiting."""

from collections.abc import Callable

import torch

from sparse_losses import (
    FlopsLoss,
    InfoNCELoss,
    MinActivationLoss,
    SpladeBatch,
    SpladeObjective,
    Texts,
)
from tests.distributed.ranks import run_ranks

V = 12


def said(call: Callable[..., object], *args: object) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return "no error"


def disagree(rank: int) -> dict[str, str]:
    x = torch.rand(4, V)

    def batch(rows: int) -> SpladeBatch:
        return SpladeBatch(Texts(x[:rows]), Texts(x[:rows]))

    objective = SpladeObjective({"info_nce": 1.0}, gather=True)
    longer = SpladeObjective({"info_nce": 1.0, "query_flops": float(rank == 1)}, gather=True)
    regulariser = MinActivationLoss(top_k=2, threshold=1.0, gather=True)
    return {
        "rows": said(objective, batch(4 - (rank == 1))),
        "terms": said(longer, batch(4)),
        "precision": said(objective, SpladeBatch(Texts(x), Texts(x.double() if rank == 1 else x))),
        "negatives": said(InfoNCELoss(gather=True), x, x, x if rank == 1 else None),
        "loss": said(regulariser if rank == 1 else FlopsLoss(gather=True), x),
        "after": said(objective, batch(4)),
    }


def test_every_rank_is_told_what_the_others_have():
    everyone = run_ranks(3, disagree, timeout_s=20)
    for rank, found in enumerate(everyone):
        assert (
            "the same B on every rank for SpladeObjective of info_nce with gather" in found["rows"]
        )
        assert "4 on rank 0, 3 on rank 1, 4 on rank 2; the last batch" in found["rows"]
        terms = "info_nce, query_flops" if rank == 1 else "info_nce"
        others = [0, 2] if rank == 1 else [1]
        assert f"to be in SpladeObjective of {terms} with gather=True" in found["terms"]
        assert f"got ranks {others} in another" in found["terms"]
        assert "got 4 on rank 0, 8 on rank 1, 4 on rank 2" in found["precision"]
        assert "the same N on every rank" in found["negatives"]
        assert "got 0 on rank 0, 4 on rank 1, 0 on rank 2" in found["negatives"]
        mine = "min_activation_loss" if rank == 1 else "flops_loss"
        assert f"to be in {mine} with gather=True, as rank {rank} is" in found["loss"]
        assert f"got ranks {others} in another loss" in found["loss"]
        assert found["after"] == "no error", "nothing is left in the pipes"
