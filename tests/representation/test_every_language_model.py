"""Every fill-mask and causal class of the installed transformers, tiny and perturbed.

``python -m tests.representation.test_every_language_model docs/results/language_models.json``
writes what the test sees: which classes are exact, and why others are refused or not built.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

from sparse_losses import SpladeHead
from sparse_losses.functional import splade_pool
from sparse_losses.representation import _language_model as models

# Sizes by the names that configurations give them.
SIZES = {
    16: "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size dim_model qk_head_dim "
    "moe_intermediate_size shared_expert_intermediate_size index_head_dim patch_size",
    8: "head_dim d_head d_kv dim_head q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state mamba_d_head state_size "
    "mamba_head_dim ssm_state_size entity_emb_size pronunciation_embed_dim shape_embed_dim",
    4: "num_experts num_local_experts n_routed_experts mamba_n_heads mamba_num_heads "
    "time_step_rank",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers n_heads n_head "
    "num_attention_heads num_heads encoder_attention_heads decoder_attention_heads index_n_heads "
    "num_experts_per_tok linear_num_key_heads linear_num_value_heads eos_token_id",
    1: "num_key_value_heads n_group topk_group bos_token_id",
    0: "pad_token_id",
    32: "intermediate_size hidden_dim encoder_ffn_dim decoder_ffn_dim ffn_dim n_inner d_inner dff "
    "ffn_hidden_size dim_ff image_size",
    64: "vocab_size max_position_embeddings n_positions max_seq_len max_seq_length n_ctx "
    "max_source_positions max_target_positions",
    20: "entity_vocab_size pronunciation_vocab_size shape_vocab_size",
}
TINY = {name: size for size, names in SIZES.items() for name in names.split()}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
HEADS = {"num_key_value_heads": 2}
# What some architectures need beyond these sizes.
NEEDED = {
    "bailing_hybrid": MIXED | HEADS,
    "codegen": {"rotary_dim": 4, "num_attention_heads": 4},
    "diffllama": HEADS,
    "dots1": {"layer_types": ["full_attention"] * 2},
    "dots3_note_text": HEADS,
    "esmc": HEADS,
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0, 0.0],
        "layer_types": ["full_attention"] * 2,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gptj": {"rotary_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": MIXED | HEADS,
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "neomme": {"head_dim": 16},
    "qwen3_5_moe_text": MIXED,
    "qwen3_5_text": MIXED,
    "qwen3_next": MIXED,
    "reformer": {"axial_pos_embds_dim": (8, 8), "axial_pos_shape": (8, 8), "feed_forward_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "language_models.json"


def configuration(kind):
    """A configuration with small numbers wherever it has such a number, in its parts too."""
    default, needed = kind(), NEEDED.get(kind.model_type, {})
    names = {*default.to_dict(), *getattr(default, "attribute_map", {})}
    sizes = {name: size for name, size in TINY.items() if name in names}
    if "kv_lora_rank" in names:
        sizes |= HEADS
    for name in getattr(default, "sub_configs", {}):
        if getattr(default, name, None) is not None:
            sizes[name] = configuration(type(getattr(default, name))).to_dict()
    return kind(**{**sizes, **needed})


def built(architecture, name):
    """The model in evaluation mode, every parameter moved at random."""
    config, kind = configuration(CONFIG_MAPPING[architecture]), getattr(transformers, name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > 3_000_000:
        raise ValueError(f"its tiny configuration still has {size:,} parameters")
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def seen(architecture, name):
    """What one class does: the table's row. What must not be is an assertion."""
    try:
        model = built(architecture, name)
    except Exception as error:
        return {"status": "not built", "why": f"{type(error).__name__}: {error}"[:200]}
    try:
        head = SpladeHead.from_masked_lm(model)
    except TypeError as error:
        return {"status": "refused", "why": str(error).split(": ", 1)[1].split(". Pass")[0]}
    attention = "both ways"
    try:
        models.set_attention(model, bidirectional=True)
    except ValueError:
        attention = "one way"
    vocab_size = len(head.weight)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 60, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    upstream = torch.randn(2, vocab_size, generator=generator)
    learned = [p for p in model.parameters() if p.requires_grad]

    def vectors(rows, length):
        batch = {"input_ids": ids[rows, :length], "attention_mask": mask[rows, :length]}
        hidden = model.base_model(**batch, **models.without_cache(model.base_model))[0]
        return head(hidden, batch["attention_mask"])

    def gradients(x):
        return torch.autograd.grad((x * upstream).sum(), learned, materialize_grads=True)

    batch = {"input_ids": ids, "attention_mask": mask}
    expected = splade_pool(model(**batch, **models.without_cache(model.base_model)).logits, mask)
    ours = vectors(slice(None), None)
    assert (expected > 0).double().mean() > 0.05
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        change = (vectors(slice(1, None), 5) - ours[1:]).abs().max().item()
        limits = models.position_limits(model)
        if limits and min(limits) <= 64:  # that many tokens do not fail
            long = torch.randint(5, 60, (1, min(limits)), generator=generator)
            longest = {"input_ids": long, "attention_mask": torch.ones_like(long)}
            model.base_model(**longest, **models.without_cache(model.base_model))
    try:
        wanted = gradients(expected)
    except (AssertionError, RuntimeError) as error:  # of the model itself
        return {"status": "exact", "attention": attention, "without gradients": str(error)[:100]}
    largest = max(g.abs().max() for g in wanted)
    for a, b in zip(gradients(ours), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * float(largest), rtol=1e-4)
    return {
        "status": "exact",
        "attention": attention,
        "scale": head.logit_scale,
        "softcap": head.softcap,
        "padding changes vectors": change > 1e-4,  # as the model does itself
    }


CLASSES = sorted({(name, kind) for table in (MASKED, CAUSAL) for kind, name in table.items()})


@pytest.mark.parametrize(("name", "architecture"), CLASSES)
def test_vectors_and_gradients_equal_those_of_the_models_own_logits(name, architecture):
    row, recorded = seen(architecture, name), json.loads(RESULTS.read_text(encoding="utf-8"))
    if version("transformers") == recorded["transformers"] and row["status"] != "not built":
        assert row == recorded["classes"][f"{name} ({architecture})"]
    if row["status"] == "not built":
        pytest.skip(row["why"])


if __name__ == "__main__":
    rows = {f"{name} ({architecture})": seen(architecture, name) for name, architecture in CLASSES}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    text = f'{{"transformers": "{version("transformers")}", "classes": {{\n{lines}\n}}}}\n'
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
