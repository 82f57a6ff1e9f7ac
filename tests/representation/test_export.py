"""Exported encoders: plain operations, without this package, at any batch size and length."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from sparse_losses import SpladeEncoder, SpladeHead
from sparse_losses.functional import splade_pool
from tests.representation.tiny_models import causal_lm, make, tokenizer

pytestmark = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="PyTorch 2.6 cannot say that it exports"
)
SHAPES = [(1, 2), (2, 7), (5, 33), (3, 300)]


class Head(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.head = SpladeHead(
            nn.Parameter(torch.randn(50, 8)), nn.Parameter(torch.randn(50)), **options
        )

    def forward(self, hidden, attention_mask):
        return self.head(hidden, attention_mask)


class Pool(nn.Module):
    def forward(self, logits, attention_mask):
        return splade_pool(logits, attention_mask, activation="log1p_relu")


def batch_of(shape, width=8):
    torch.manual_seed(sum(shape))
    mask = torch.ones(shape, dtype=torch.int64)
    mask[0, : shape[1] // 3] = 0  # padding on the left
    mask[-1, shape[1] - shape[1] // 3 :] = 0
    return torch.randn(*shape, width), mask


def encoder_of(kind):
    if kind == "decoder":
        words = tokenizer("bytes")
        return SpladeEncoder(causal_lm("qwen3", len(words)), words).eval()
    options = {
        "plain": {},
        "pruned": {"document_threshold": 1.0},
        "idf": {"idf_weights": True},
        "gate": {"gate": True},
        "input tokens": {"expansion": False},
        "settings": {
            "pool_special_tokens": False,
            "activation": "log1p_relu",
            "softcap": 2.0,
            "logit_scale": 0.5,
        },
    }[kind]
    encoder = make("bert", **options)
    return Documents(encoder) if kind == "pruned" else encoder


class Documents(nn.Module):
    """Documents as ``encode_document`` prunes them, for TorchScript, which takes no strings."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.vocab_size = encoder, encoder.vocab_size
        self.max_length = encoder.max_length

    def forward(self, input_ids, attention_mask):
        return self.encoder(input_ids, attention_mask, side="document")


ENCODERS = ["plain", "pruned", "idf", "gate", "input tokens", "settings", "decoder"]


def ids_of(shape, encoder):
    ids = torch.randint(5, encoder.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    return ids, batch_of(shape)[1]


def dynamic(longest=512):
    length = torch.export.Dim("length", min=2, max=longest)
    return {0: torch.export.Dim("batch", min=1, max=512), 1: length}


def exported(module, inputs, names=("input_ids", "attention_mask")):
    sizes = dynamic(min(getattr(module, "max_length", 512), 512))
    shapes = dict.fromkeys(names, sizes)
    return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize("make_module", [Head, Pool], ids=["head", "pool"])
def test_head_and_pooling_export_to_plain_operations(make_module):
    module = make_module()
    first = "hidden" if make_module is Head else "logits"
    program = exported(module, batch_of((2, 9)), (first, "attention_mask"))
    for shape in SHAPES:
        inputs = batch_of(shape)
        torch.testing.assert_close(program.module()(*inputs), module(*inputs))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    others = {target for target in targets if not target.startswith("aten.")}
    assert len(targets) > len(others) == len([x for x in others if "sym" in x or "built-in" in x])


def test_named_implementation_exports_as_the_definition():
    program = exported(Head(impl="tiles"), batch_of((2, 9)), ("hidden", "attention_mask"))
    assert "sparse_losses" not in str(program.graph)


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoder_exports_with_any_batch_size_and_length(kind, tmp_path):
    encoder = encoder_of(kind)
    program = exported(encoder, ids_of((2, 9), encoder))
    assert not [node for node in program.graph.nodes if "sparse_losses" in str(node.target)]
    lengths = [shape for shape in SHAPES if shape[1] <= encoder.max_length]
    for shape in lengths:
        ids, mask = ids_of(shape, encoder)
        with torch.no_grad():
            torch.testing.assert_close(program.module()(ids, mask), encoder(ids, mask))
    if kind != "plain":
        return
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
@pytest.mark.parametrize("kind", ENCODERS)
def test_onnx_runtime_gives_the_same_vectors(kind, tmp_path):
    pytest.importorskip("onnxscript", reason="make test-oldest has no ONNX")
    onnxruntime = pytest.importorskip("onnxruntime")
    encoder = encoder_of(kind)
    file = tmp_path / "encoder.onnx"
    sizes = {0: "batch", 1: "length"}
    torch.onnx.export(
        encoder,
        ids_of((2, 9), encoder),
        file,
        dynamo=True,
        verbose=False,
        input_names=["input_ids", "attention_mask"],
        output_names=["activations"],
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
    )
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for shape in [shape for shape in SHAPES if shape[1] <= encoder.max_length]:
        ids, mask = ids_of(shape, encoder)
        feed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        (vectors,) = session.run(None, feed)
        with torch.no_grad():
            expected = encoder(ids, mask)
        torch.testing.assert_close(torch.from_numpy(vectors), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["pruned", "idf", "settings"])
def test_trace_of_a_short_text_is_right_for_others(kind, tmp_path):
    """OpenSearch deploys TorchScript; a traced model loads without this package."""
    encoder = encoder_of(kind)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, on every check of a shape
        traced = torch.jit.trace(encoder, ids_of((2, 9), encoder), strict=False)
    traced.save(tmp_path / "encoder.ts")
    loaded = torch.jit.load(tmp_path / "encoder.ts")
    for shape in [(1, 1), (2, 7), (5, 33)]:
        ids, mask = ids_of(shape, encoder)
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids, mask), encoder(ids, mask))


def test_side_is_an_argument_of_exported_encoders():
    encoder = make(document_threshold=1.0)
    inputs, options = ids_of((2, 9), encoder), {"side": "document"}
    sizes = dynamic(encoder.max_length)
    shapes = {"input_ids": sizes, "attention_mask": sizes, "side": None}
    program = torch.export.export(encoder, inputs, options, dynamic_shapes=shapes, strict=False)
    ids, mask = ids_of((5, 17), encoder)
    expected = encoder(ids, mask, **options)
    assert 0 < (expected > 0).sum() < (encoder(ids, mask) > 0).sum()
    torch.testing.assert_close(program.module()(ids, mask, **options), expected)
