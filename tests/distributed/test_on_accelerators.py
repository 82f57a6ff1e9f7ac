"""FSDP2 under accelerate and the Trainer of transformers, which ignore it on a CPU."""

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from sparse_losses import SpladeBatch, SpladeObjective
from sparse_losses.objective import terms
from tests.distributed.ranks import as_torchrun_would
from tests.integrations import setting

HAS_GPU = torch.cuda.is_available()
BATCH = 8


def objective(gather):
    weighted = {"info_nce": (1.0, terms.info_nce()), "flops": (0.01, terms.flops("document"))}
    return SpladeObjective(weighted, gather=gather)


def by_accelerate(folder, batch_size):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["BertLayer"],
    )
    accelerator = Accelerator(cpu=not HAS_GPU, fsdp_plugin=plugin)
    example = setting.example("train_with_accelerate")
    training = example.Training(setting.encoder(), objective(gather=True))
    optimizer = torch.optim.SGD(training.parameters(), lr=setting.RATE)
    loader = setting.loader(setting.rows(2 * BATCH), batch_size)
    example.train(accelerator, *accelerator.prepare(training, optimizer, loader))
    return training.encoder.model


class EncoderTrainer(setting.InOrder):
    """Its model is the encoder, all of which is then in FSDP's groups.

    Of the masked language model accelerate would shard the output embeddings apart from the head,
    which in BERT and XLM-R share a bias.
    """

    def compute_loss(self, model, inputs, **_):
        return self.objective(SpladeBatch.from_columns(model, inputs)).total


def by_trainer(folder, batch_size):
    args = setting.arguments(
        folder,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]},
        use_cpu=not HAS_GPU,
        per_device_train_batch_size=batch_size,
        max_steps=2,
        remove_unused_columns=False,
    )
    trainer = EncoderTrainer(
        setting.encoder(),
        args,
        objective=objective(gather=True),
        data_collator=setting.collate,
        train_dataset=setting.rows(2 * BATCH),
    )
    trainer.train()
    return trainer.model.model


def trained(rank, path, world):
    for train in (by_accelerate, by_trainer):
        setting.forget_accelerator()
        model = train(path / train.__name__, BATCH // world)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        weights = {name: p.full_tensor().cpu() for name, p in model.named_parameters()}
        torch.save(weights, path / f"{train.__name__} {rank}.pt")


@pytest.mark.skipif(not HAS_GPU, reason="they ignore FSDP on a CPU")
def test_both_train_as_one_process(tmp_path):
    world = min(torch.cuda.device_count(), 2)
    as_torchrun_would(trained, tmp_path, world, processes=world)
    encoder = setting.encoder()
    setting.plain_loop(encoder, objective(False), setting.loader(setting.rows(2 * BATCH), BATCH))
    for path in tmp_path.glob("*.pt"):
        expected = {name: p.detach() for name, p in encoder.model.named_parameters()}
        torch.testing.assert_close(torch.load(path), expected, rtol=1e-4, atol=1e-5)
