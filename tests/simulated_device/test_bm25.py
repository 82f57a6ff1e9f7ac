"""BM25 of a batch on an accelerator: the CPU's scores, without a wait."""

import pytest
import torch

from sparse_losses import bm25_scores
from tools import simulated_device


@pytest.mark.parametrize("own", [False, True])
def test_the_scores_of_a_batch_need_no_wait(own):
    if reason := simulated_device.why_not():
        pytest.skip(reason)
    simulated_device.start()
    torch.manual_seed(0)
    query, document = torch.randint(50, (4, 6)), torch.randint(50, (4, 3, 12))
    document = document if own else document.flatten(0, 1)
    idf = torch.rand(50)

    def score(device):
        there = [x.to(device) for x in (query, query > 5, document, document > 5, idf)]
        with simulated_device.counting() as counts:
            return bm25_scores(*there, mean_length=11.0, ignore_token_ids=(7, 8)), counts

    expected, _ = score("cpu")
    got, counts = score("sim")
    torch.testing.assert_close(got.cpu(), expected)
    assert counts.waits == 0
