"""A whole training step on a device that is not the CPU: nothing of ours waits for it.

A trainer's or a model's own waits are counted apart. The device is half a step behind the host.
"""

import pytest
import torch

from sparse_losses import (
    Curriculum,
    Diagnostics,
    LabelQueue,
    LanguagePenaltyLoss,
    NWSLoss,
    Phase,
    SparsityController,
    SpladeBatch,
    SpladeEncoder,
    SpladeObjective,
    Texts,
    TrainingSchedule,
    Warmup,
)
from sparse_losses.functional import cached_backward
from tests.representation.tiny_models import pair
from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)
simulated_device.start()
SIM = torch.device("sim")
EVERY, NUM_LABELS = 3, 5
TEXTS = [
    ["서울 맛집 추천", "a learned sparse retriever"],
    ["vectors over the vocabulary", "서울"],
    ["one weight a token", "the quick brown fox"],
]
WEIGHTS = {
    "info_nce": 1.0,
    "triplet_margin": 0.1,
    "distillation": 0.1,
    "context_distillation": 0.1,
    "margin_mse": 0.1,
    **{
        f"{side}_{term}": 0.01
        for side in ("query", "document")
        for term in (
            "flops",
            "min_activation",
            "language_penalty",
            "self_reconstruction",
            "positive_activation",
        )
    },
}


@pytest.fixture(autouse=True)
def _tied_weights_stay_tied():
    """Where a module is moved to a device of this kind PyTorch makes new parameters otherwise."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


class Training:
    """Everything that a step may have, on the simulated device."""

    def __init__(self, architecture: str) -> None:
        model, tokenizer = pair(architecture)
        self.encoder = SpladeEncoder(model, tokenizer, max_length=16).train().to(SIM)
        size, special = self.encoder.vocab_size, tokenizer.all_special_ids
        stopwords = [size - 2, size - 1]
        self.objective = SpladeObjective(
            WEIGHTS,
            language_penalty=LanguagePenaltyLoss(torch.ones(size)),
            special_token_ids=special,
            stopword_ids=stopwords,
            score_scale=20.0,
        ).to(SIM)
        self.nws = NWSLoss(torch.eye(NUM_LABELS)).to(SIM)
        self.queue = LabelQueue(8, size, NUM_LABELS).to(SIM)
        self.prototype = torch.nn.Parameter(torch.rand(NUM_LABELS, size, device=SIM))
        self.optimizer = torch.optim.AdamW([*self.encoder.parameters(), self.prototype], lr=1e-3)
        phases = [Phase(step, step, temperature=0.1 - 0.001 * step) for step in range(50)]
        warmups = {"query_flops": Warmup(50, "quadratic")}
        curriculum = Curriculum(phases, unit="step")
        self.schedule = TrainingSchedule(self.objective, curriculum, warmups=warmups)
        self.controller = SparsityController(
            self.objective, target_active=8, every=EVERY, ignore_steps=0
        )
        for steered in (self.schedule, self.controller):
            steered.attach(self.optimizer)
        self.diagnostics = Diagnostics(
            size, special_token_ids=special, stopword_ids=stopwords, allowed_token_ids=range(9, 60)
        )
        self.sent, self.logged = None, []
        self.columns = [
            {name: x.to(SIM) for name, x in self.encoder.tokenize(texts).items()} for texts in TEXTS
        ]
        self.teacher, self.own_teacher = torch.rand(2, 2, device=SIM), torch.rand(2, 2, device=SIM)
        self.labels = torch.eye(NUM_LABELS, device=SIM)[:2]

    def encode(self, **column):
        return self.encoder(**column, return_logits=True)

    def loss(self, *vectors):
        texts = [
            Texts(activations, **column, logits=logits)
            for (activations, logits), column in zip(vectors, self.columns, strict=True)
        ]
        output = self.objective(
            SpladeBatch(
                *texts,
                teacher_scores=self.teacher,
                teacher_anchor_scores=self.own_teacher,
                teacher_candidates="own",
            )
        )
        features, queue = texts[0].activations, self.queue
        queued = {"queue": queue.features.clone(), "queue_labels": queue.labels.clone()}
        nws = self.nws(features, self.labels, self.prototype, queue_mask=queue.mask, **queued)
        queue.enqueue(features, self.labels)
        self.diagnostics.update(texts[1], other_side=texts[0])
        return output._replace(total=output.total + nws)

    def step(self, *, cached=False):
        if cached:
            cached_backward(self.encode, self.columns, self.loss, mini_batch_size=1)
        else:
            self.loss(*(self.encode(**column) for column in self.columns)).total.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.sent is not None:
            self.logged.append(self.sent.read() | self.controller.report())
        self.sent = self.diagnostics.report_later()
        self.diagnostics.reset()


def waits_of_the_model(training, *, cached):
    """How often the layers below the head wait, whoever calls them."""
    model, inputs = training.encoder.model.base_model, training.columns[0]
    with simulated_device.counting() as counts:
        model(**inputs)
    return counts.waits * (2 * sum(map(len, TEXTS)) if cached else len(TEXTS))


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("architecture", ["deberta-v2", "bert"])
def test_a_step_waits_for_nothing(architecture, cached):
    training = Training(architecture)
    for _ in range(2):  # what is copied to the device once, and what the optimizer begins with
        training.step(cached=cached)
    with simulated_device.counting() as counts:
        training.step(cached=cached)
    expected = waits_of_the_model(training, cached=cached)
    assert architecture != "deberta-v2" or not expected, "a model without a wait of its own"
    weights = {"document_flops": set(), "query_flops": set()}
    temperatures = set()
    with simulated_device.lag(counts.launches // 2):
        for _ in range(2 * EVERY):
            with simulated_device.counting() as counts:
                training.step(cached=cached)
            assert counts.waits == expected, [o.name for o in counts.operations if o.waits]
            for name, seen in weights.items():
                seen.add(training.objective.weights[name])
            temperatures.add(training.objective.info_nce.temperature)
    assert len(weights["document_flops"]) == 2, "the controller steered"
    assert len(weights["query_flops"]) == len(temperatures) == 2 * EVERY, "and the schedule"
    assert all(0 < report["active_dimensions"] < 1000 for report in training.logged)
    assert all(report["texts"] == 2 for report in training.logged), "what was sent, not what is"


def test_what_is_read_at_once_waits():
    training = Training("deberta-v2")
    training.step()
    training.diagnostics.update(torch.eye(training.encoder.vocab_size, device=SIM)[:2])
    for read in (training.diagnostics.report, training.diagnostics.top_tokens):
        training.diagnostics.update(torch.eye(training.encoder.vocab_size, device=SIM)[:2])
        with simulated_device.counting() as counts:
            read()
        assert counts.waits == 1
