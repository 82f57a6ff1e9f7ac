"""Exported encoders: plain operations, without this package, at any batch size and length."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from sparse_losses import SpladeHead
from sparse_losses.functional import splade_pool
from sparse_losses.representation import head
from tests.representation.tiny_models import make

pytestmark = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="PyTorch 2.6 cannot say that it exports"
)
SHAPES = [(1, 2), (2, 7), (5, 33)]
NAMES = ("input_ids", "attention_mask")
SETTINGS = {"pool_special_tokens": False, "softcap": 2.0, "logit_scale": 0.5}
KINDS = {
    "plain": {},
    "pruned": {"budgets": {9: (1.0, None)}, "idf_weights": True},
    "gate": {"gate": True},
    "input tokens": {"expansion": False},
    "settings": {"activation": "log1p_relu", **SETTINGS},
    "decoder": {},
}


class Documents(nn.Module):
    """Documents as ``encode_document`` prunes them, for TorchScript, which takes no strings."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.max_length = encoder, encoder.max_length
        self.vocab_size = encoder.vocab_size

    def forward(self, input_ids, attention_mask):
        return self.encoder(input_ids, attention_mask, side="document")


def encoder_of(kind):
    encoder = make("qwen3" if kind == "decoder" else "bert", **KINDS[kind])
    return Documents(encoder) if kind == "pruned" else encoder


def inputs_of(shape, encoder):
    ids = torch.randint(5, encoder.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(shape, dtype=torch.int64)
    mask[0, : shape[1] // 3] = 0  # padding on the left
    mask[-1, shape[1] - shape[1] // 3 :] = 0
    return ids, mask


def check(function, encoder, shapes=SHAPES, **options):
    """Assert that a function gives what the encoder gives, at all shapes."""
    for shape in shapes:
        inputs = inputs_of(shape, encoder)
        with torch.no_grad():
            torch.testing.assert_close(function(*inputs), encoder(*inputs), **options)


def exported(module, inputs, names=NAMES, longest=512):
    length = torch.export.Dim("length", min=2, max=longest)
    sizes = {0: torch.export.Dim("batch", min=1, max=512), 1: length}
    shapes = dict.fromkeys(names, sizes)
    return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


class Pool(nn.Module):
    def forward(self, logits, attention_mask):
        return splade_pool(logits, attention_mask, activation="log1p_relu")


@pytest.mark.parametrize("kind", ["auto", "tiles", "pool"])
def test_head_and_pooling_export_to_plain_operations(kind, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(head, "EXPORTED", 7)  # columns of a tile, of 50
    weights = nn.Parameter(torch.randn(50, 8)), nn.Parameter(torch.randn(50))
    module = Pool() if kind == "pool" else SpladeHead(*weights, impl=kind)
    data = [(torch.randn(*shape, 8), torch.ones(shape)) for shape in SHAPES]
    names = ("logits" if kind == "pool" else "hidden", "attention_mask")
    program = exported(module, data[1], names)
    for inputs in data:
        torch.testing.assert_close(program.module()(*inputs), module(*inputs))
    shapes = [getattr(x.meta.get("val"), "shape", ()) for x in program.graph.nodes]
    whole = [shape for shape in shapes if len(shape) == 3 and shape[2] == 50]
    assert not whole, "a head never holds [B, S, V]"
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    others = {target for target in targets if not target.startswith("aten.")}
    assert len(targets) > len(others) == len([x for x in others if "sym" in x or "built-in" in x])


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_exports_with_any_batch_size_and_length(kind, tmp_path):
    encoder = encoder_of(kind)
    program = exported(encoder, inputs_of((2, 9), encoder), longest=encoder.max_length)
    assert not [node for node in program.graph.nodes if "sparse_losses" in str(node.target)]
    check(program.module(), encoder)
    if kind != "plain":
        return
    ids, mask = inputs_of((5, 33), encoder)
    torch.export.save(program, tmp_path / "encoder.pt2")
    torch.save((ids, mask, encoder(ids, mask)), tmp_path / "example.pt")
    alone = (
        "import sys, torch; sys.modules['sparse_losses'] = None\n"
        f"ids, mask, out = torch.load({str(tmp_path / 'example.pt')!r})\n"
        f"program = torch.export.load({str(tmp_path / 'encoder.pt2')!r})\n"
        "torch.testing.assert_close(program.module()(ids, mask), out)"
    )
    subprocess.run([sys.executable, "-I", "-W", "ignore", "-c", alone], check=True, cwd=tmp_path)


@pytest.mark.filterwarnings("ignore")  # of the exporter, on PyTorch
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_runtime_gives_the_same_vectors(kind, tmp_path):
    pytest.importorskip("onnxscript", reason="make test-oldest has no ONNX")
    onnxruntime = pytest.importorskip("onnxruntime")
    encoder, file = encoder_of(kind), tmp_path / "encoder.onnx"
    shapes = {name: {0: "batch", 1: "length"} for name in NAMES}
    options = {"input_names": NAMES, "output_names": ["activations"], "dynamic_shapes": shapes}
    inputs = inputs_of((2, 9), encoder)
    torch.onnx.export(encoder, inputs, file, dynamo=True, verbose=False, **options)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(*inputs):
        feed = {name: x.numpy() for name, x in zip(NAMES, inputs, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    check(run, encoder, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["pruned", "settings"])
def test_trace_of_a_short_text_is_right_for_others(kind, tmp_path):
    """OpenSearch deploys TorchScript; a traced model loads without this package."""
    encoder = encoder_of(kind)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, on every check of a shape
        traced = torch.jit.trace(encoder, inputs_of((2, 9), encoder), strict=False)
    traced.save(tmp_path / "encoder.ts")
    check(torch.jit.load(tmp_path / "encoder.ts"), encoder, [(1, 1), *SHAPES[1:]])
