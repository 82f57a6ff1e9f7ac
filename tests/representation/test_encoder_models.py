"""Decoder models, adapters, pooled positions and BGE-M3's layer in a ``SpladeEncoder``."""

import json

import peft
import pytest
import torch
import transformers
from tokenizers import processors

from sparse_losses import SpladeEncoder
from sparse_losses.functional import splade_pool
from tests.representation import tiny_models as tiny

both_ways = pytest.mark.skipif(not tiny.BOTH_WAYS, reason="an older transformers attends one way")

LINEAR = {"expansion": False, "importance": "linear", "activation": "identity"}


SETTINGS = [{"activation": "log1p_relu"}, {"softcap": 1.5}, {"logit_scale": 0.25}]
SETTINGS += [{"pool_special_tokens": False}, SETTINGS[0] | {"softcap": 2.0, "logit_scale": 3.0}]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_settings_of_the_logits_are_applied_and_saved(options, tmp_path):
    encoder, whole = tiny.make(**options), tiny.make()
    batch, special = encoder.tokenize(tiny.TEXTS), torch.tensor(encoder.tokenizer.all_special_ids)
    mask = batch["attention_mask"].bool()
    if "pool_special_tokens" in options:
        mask &= ~torch.isin(batch["input_ids"], special)
        assert not tiny.dense(encoder, [""]).any()
        for weights in encoder.token_weights(tiny.TEXTS[:2]):
            assert weights[0][1] == weights[-1][1] == 0 < max(w for _, w in weights)
    with torch.no_grad():
        logits = options.get("logit_scale", 1.0) * whole.model(**batch).logits
        rest = {name: options[name] for name in ("activation", "softcap") if name in options}
        torch.testing.assert_close(encoder(**batch), splade_pool(logits, mask, **rest))
    again = tiny.reloaded(encoder, tmp_path)
    assert again.pool_special_tokens == encoder.pool_special_tokens
    tiny.assert_same(again, encoder)
    assert SpladeEncoder.from_pretrained(tmp_path, activation="relu").activation == "relu"


@both_ways
@pytest.mark.parametrize("kind", tiny.CAUSAL)
def test_attention_goes_both_ways_unless_told_otherwise(kind, tmp_path):
    ids = torch.arange(10, 16)[None].repeat(2, 1)
    ids[1, -1] = 99
    model, words = tiny.pair(kind)
    for bidirectional in (False, True, False):  # of one model, again and again
        encoder = SpladeEncoder(model, words, bidirectional=bidirectional).eval()
        for each in (encoder, tiny.reloaded(encoder, tmp_path)):
            with torch.no_grad():
                states = each._read(ids)[0]
            assert torch.allclose(states[0, 0], states[1, 0], atol=1e-5) is not bidirectional
            assert type(each.model) is type(model)
            tiny.assert_same(each, encoder)


@both_ways
@pytest.mark.parametrize("seed", range(4))
def test_experts_attend_both_ways(seed):
    """They round a state by which other tokens they read: equal states do not tell."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = {**tiny.SIZES, **tiny.IDS, **experts, "head_dim": 8, "num_key_value_heads": 1}
    torch.manual_seed(seed)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(vocab_size=300, **sizes))
    encoder = SpladeEncoder(tiny.scattered(model), tiny.tokenizer("bytes"))
    assert encoder.model.config.is_causal is False


def test_model_that_stays_causal_is_refused():
    """So does every model of an older transformers, which reads no ``is_causal`` in a config."""
    config = transformers.OpenAIGPTConfig(vocab_size=300, n_embd=16, n_layer=1, n_head=2)
    model = transformers.OpenAIGPTLMHeadModel(config)
    with pytest.raises(ValueError, match=r"attends both ways .*stays causal.*bidirectional=False"):
        SpladeEncoder(model, tiny.tokenizer("bytes"))
    assert getattr(config, "is_causal", True)
    SpladeEncoder(model, tiny.tokenizer("bytes"), bidirectional=False).encode(["a"])


@pytest.mark.parametrize("kind", tiny.CAUSAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_on_either_side_changes_nothing(kind, dtype):
    encoder = tiny.make(kind).to(dtype)
    ids = torch.arange(10, 17)[None]
    padding = torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad():
        alone = encoder(ids, torch.ones_like(ids))
        sides = [[ids, padding], [padding, ids]]  # GPT-2 counts positions from the left
        for parts in sides[:1] if kind == "gpt2" else sides:
            mask = torch.cat([torch.full_like(x, x is ids) for x in parts], 1)
            padded = encoder(torch.cat(parts, 1), mask)
            rounding = 1e-5 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(padded, alone, atol=rounding, rtol=rounding)


def test_tokenizer_without_padding_gets_its_end_of_text_token():
    model, words = tiny.pair("llama")
    words.pad_token, words.eos_token = None, "</s>"
    encoder = SpladeEncoder(model, words, bidirectional=tiny.BOTH_WAYS)
    assert encoder.tokenizer.pad_token == "</s>"
    assert encoder.encode(["a", "a longer text"]).shape == (2, len(words))


BODY = ["query", "q_proj"]
ADAPTED = {
    "body": (BODY, {}),
    "transform": (["dense", "gate_proj"], {}),
    "trained copy": (BODY, {"modules_to_save": ["decoder", "lm_head"]}),
}


def adapted(kind, targets, base=None, **options):
    """A model and its tokenizer; the model has trained adapters, and perhaps a path."""
    model, words = tiny.pair(kind)
    if base is not None:
        model.save_pretrained(base)
        model = type(model).from_pretrained(base)
    return tiny.with_lora(model, targets, **options), words


@pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word", "ignore:Setting .save_emb")
@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
@pytest.mark.parametrize("place", ADAPTED)
def test_adapted_model_trains_and_reloads_alone(kind, place, tmp_path):
    targets, options = ADAPTED[place]
    model, words = adapted(kind, targets, tmp_path / "base", **options)
    encoder = SpladeEncoder(model, words, bidirectional=tiny.BOTH_WAYS).eval()
    batch = encoder.tokenize(tiny.TEXTS)
    logits = encoder.model(**batch).logits
    vectors = encoder(**batch), splade_pool(logits, batch["attention_mask"])
    torch.testing.assert_close(*vectors)
    learned = [p for p in encoder.parameters() if p.requires_grad]
    upstream = torch.randn(len(words))
    actual, wanted = (torch.autograd.grad((x * upstream).sum(), learned) for x in vectors)
    assert all(g.any() for g in wanted)
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)
    folder = tmp_path / "saved"
    again = tiny.reloaded(encoder, folder)
    assert (folder / "adapter_model.safetensors").exists()
    assert not list(folder.glob("model*.safetensors"))
    tiny.assert_same(again, encoder)
    # Training goes on where it stopped.
    assert sum(p.requires_grad for p in again.parameters()) == len(learned)
    tiny.assert_same(tiny.reloaded(again, tmp_path / "twice"), encoder)
    # What PEFT saves, PEFT loads.
    base = type(encoder.model.get_base_model()).from_pretrained(tmp_path / "base")
    base.config.is_causal = not tiny.BOTH_WAYS
    theirs = peft.PeftModel.from_pretrained(base, folder)
    torch.testing.assert_close(theirs(**batch).logits, logits)


def test_adapters_of_peft_alone_load(tmp_path):
    model, words = adapted("bert", BODY, tmp_path / "base")
    words.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapters")
    encoder = SpladeEncoder.from_pretrained(tmp_path / "adapters")
    tiny.assert_same(encoder, SpladeEncoder(model, words))
    path = tmp_path / "adapters" / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": None}
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(OSError, match=r"expected adapter_config.json of .* to name its base model"):
        SpladeEncoder.from_pretrained(tmp_path / "adapters")


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_adapters_of_the_body_are_taken_whenever_they_are_added(architecture):
    encoder = tiny.make(architecture)
    plain = tiny.dense(encoder)
    encoder.model = tiny.with_lora(encoder.model, ["dense"])
    assert not torch.allclose(tiny.dense(encoder), plain)
    adapted = SpladeEncoder(encoder.model, encoder.tokenizer).eval()
    tiny.assert_same(encoder, adapted)


OF_THE_HEAD = [("xlm-roberta", "dense", {}), ("distilbert", "vocab_transform", {})]
OF_THE_HEAD += [("bert", "decoder", {"ensure_weight_tying": False})]


@pytest.mark.parametrize(("architecture", "layer", "options"), OF_THE_HEAD)
def test_adapters_of_the_head_are_refused_when_added_or_removed(architecture, layer, options):
    encoder = tiny.make(architecture)
    encoder.model = tiny.with_lora(encoder.model, [layer], **options)
    with pytest.raises(RuntimeError, match="adding or removing adapters"):
        tiny.dense(encoder)
    if not options:
        adapted = SpladeEncoder(encoder.model, encoder.tokenizer).eval()
        adapted.model = adapted.model.unload()
        with pytest.raises(RuntimeError, match="adding or removing adapters"):
            tiny.dense(adapted)


def test_gradients_are_the_same_with_checkpoints():
    encoder = tiny.make().train()
    batch, gradients, layers = encoder.tokenize(tiny.TEXTS), [], []
    first = encoder.model.bert.encoder.layer[0].attention
    first.register_forward_hook(lambda *call: layers.append(len(gradients)))
    for _ in range(2):
        encoder.zero_grad()
        torch.manual_seed(1)  # of dropout
        encoder(**batch).square().sum().backward()
        gradients.append([x.grad.clone() for x in encoder.parameters() if x.grad is not None])
        is_new = hasattr(encoder.model, "activation_checkpointing_enable")
        kind = "activation" if is_new else "gradient"
        options = {f"{kind}_checkpointing_kwargs": {"use_reentrant": False}}
        getattr(encoder, f"{kind}_checkpointing_enable")(**options)
    torch.testing.assert_close(*gradients)
    assert layers == [0, 1, 1]  # once more in the second backward pass


def test_shift_that_adapters_are_saved_without_is_warned_of():
    encoder = tiny.make()
    encoder.calibrate(tiny.TEXTS, 20, method="shift", verbose=False)
    encoder.model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"]))
    with pytest.warns(UserWarning, match="the shift is not saved"):
        encoder.calibrate(tiny.TEXTS, 10, method="shift", verbose=False)


def test_probes_of_a_model_leave_its_attention_alone():
    """BigBird leaves its sparse attention for good when it reads a short text."""
    sizes = {**tiny.SIZES, "max_position_embeddings": 200, "block_size": 4, "num_random_blocks": 1}
    config = transformers.BigBirdConfig(vocab_size=150, attention_type="block_sparse", **sizes)
    model = tiny.scattered(transformers.BigBirdForMaskedLM(config))
    encoder = SpladeEncoder(model, tiny.tokenizer("wordpiece")).eval()
    batch = encoder.tokenize([" ".join(tiny.TEXTS[:2]) * 4])
    assert batch["input_ids"].shape[1] > 28  # as many it needs
    with torch.no_grad():
        expected = splade_pool(model(**batch).logits, batch["attention_mask"])
        assert model.base_model.attention_type == "block_sparse"
        torch.testing.assert_close(encoder(**batch), expected)
    encoder.encode(["a"])
    assert model.base_model.attention_type == "block_sparse"


def test_types_that_a_tokenizer_gives_a_text_reach_the_model():
    encoder = tiny.make()
    batch = encoder.tokenize(tiny.TEXTS)
    special = [("<s>", 2), ("</s>", 3)]
    template = processors.TemplateProcessing(single="<s>:1 $A:1 </s>:1", special_tokens=special)
    encoder.tokenizer.backend_tokenizer.post_processor = template
    encoder.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    types = torch.ones_like(batch["input_ids"]) * batch["attention_mask"]
    with torch.no_grad():
        expected = encoder(**batch, token_type_ids=types, side="document")
    assert not torch.allclose(expected, encoder(**batch))
    torch.testing.assert_close(tiny.dense(encoder), expected)


@pytest.mark.parametrize("texts", [[""], ["", ""], []], ids=len)
def test_texts_without_any_token_have_no_weights(texts):
    encoder = tiny.make("llama")
    encoder.tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    assert not tiny.dense(encoder, texts).any()
    assert tiny.dense(encoder, [*texts, "a"])[-1].any()


def test_adapters_that_transformers_added_are_saved(tmp_path):
    masked, words = tiny.pair("bert")
    masked.save_pretrained(tmp_path / "base")
    model = type(masked).from_pretrained(tmp_path / "base")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"]))
    encoder = SpladeEncoder(tiny.trained(model), words).eval()
    tiny.assert_same(tiny.reloaded(encoder, tmp_path / "added"), encoder)


@pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word", "ignore:Input and output emb")
@pytest.mark.parametrize(("kind", "copied"), [("bert", True), ("qwen3", True), ("qwen3", False)])
def test_merged_adapters_save_as_a_plain_model(kind, copied, tmp_path):
    """Also with a copy of a projection that is tied to the input embeddings."""
    targets, options = ADAPTED["trained copy" if copied else "body"]
    model, words = adapted(kind, targets, tmp_path / "base", **options)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data += torch.randn_like(parameter)
    options = {"bidirectional": tiny.BOTH_WAYS}
    expected = tiny.dense(SpladeEncoder(model, words, **options).eval())
    encoder = SpladeEncoder(model.merge_and_unload(), words, **options).eval()
    again = tiny.reloaded(encoder, tmp_path / "merged")
    torch.testing.assert_close(tiny.dense(again), expected, atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_adapters_that_would_not_load_are_not_saved(tmp_path):
    model, words = adapted("qwen3", BODY)
    with pytest.raises(TypeError, match=r"without adapters, got PeftModel: .*merge_and_unload"):
        SpladeEncoder(model, words, expansion=False)
    encoder = SpladeEncoder(model, words, bidirectional=tiny.BOTH_WAYS)
    with pytest.raises(ValueError, match=r"of a base model with a path .* of (None|'')"):
        encoder.save_pretrained(tmp_path)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    with pytest.raises(ValueError, match=r"expected one adapter, .* got default, second of"):
        encoder.save_pretrained(tmp_path)


def test_linear_importance_is_bge_m3s_head(tmp_path):
    """The weight of a token is the largest ReLU of one layer over its positions."""
    encoder = tiny.make("xlm-roberta", **LINEAR)
    with torch.no_grad():
        encoder.importance.weight.normal_()
        batch = encoder.tokenize(tiny.TEXTS)
        hidden = encoder.model(**batch)[0]
        ours = encoder(**batch)
    layer = torch.nn.Linear(16, 1)
    encoder.save_pretrained(tmp_path)
    layer.load_state_dict(torch.load(tmp_path / "sparse_linear.pt", weights_only=True))
    expected = torch.zeros_like(ours)
    special = set(encoder.tokenizer.all_special_ids)
    for i, s in batch["attention_mask"].nonzero().tolist():
        if (j := int(batch["input_ids"][i, s])) not in special:
            weight = max(float(layer(hidden[i, s]).detach()), 0.0)
            expected[i, j] = max(float(expected[i, j]), weight)
    assert expected.any()
    torch.testing.assert_close(ours, expected)
    tiny.assert_same(SpladeEncoder.from_pretrained(tmp_path), encoder)
    # A folder of BGE-M3 holds an encoder without a head, a tokenizer and this layer.
    for file in ("sparse_losses.json", "sparse_losses.safetensors", "modules.json"):
        (tmp_path / file).unlink()
    again = SpladeEncoder.from_pretrained(tmp_path, **LINEAR)
    tiny.assert_same(again, encoder)
    (tmp_path / "sparse_linear.pt").write_bytes(b"not a tensor")
    with pytest.raises(OSError, match="is damaged"):
        SpladeEncoder.from_pretrained(tmp_path, expansion=False, importance="linear")
