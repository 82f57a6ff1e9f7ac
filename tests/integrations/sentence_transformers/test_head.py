"""``use_splade_head``: what sentence-transformers computes, without the logits of all positions."""

import copy
import pickle
from pathlib import Path

import peft
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import losses as theirs
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch.distributed.fsdp import fully_shard

import sparse_losses as sl
from sparse_losses.integrations.sentence_transformers import use_splade_head
from sparse_losses.objective import terms
from tests.distributed.ranks import as_torchrun_would
from tests.integrations.sentence_transformers import runs
from tests.representation.tiny_models import ISSUE, language_model, saved, tokenizer

TEXTS = runs.COLUMNS["positive"] + runs.COLUMNS["negative"]  # one is empty


def features(model):
    return model.preprocess(TEXTS)


def vectors_and_gradients(model, weight):
    model.zero_grad()
    vectors = model(features(model))["sentence_embedding"]
    (vectors.float() * weight).sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    return vectors.detach().float(), [p.grad.clone() for p in trained]


def assert_equal_vectors(one, other, rtol=1e-5, atol=1e-5):
    vectors = [x.encode(TEXTS, convert_to_sparse_tensor=False) for x in (one, other)]
    assert 0 < vectors[0].count_nonzero() < vectors[0].numel()
    torch.testing.assert_close(*vectors, rtol=rtol, atol=atol)


def refuse_logits(model):
    """Make an encoder fail where it would compute the logits of a position."""
    layer = model[0].model.get_output_embeddings()
    layer.register_forward_pre_hook(lambda *_: pytest.fail("the projection ran"))
    return model


def of(architecture, path, change=lambda model: None):
    """An encoder of a tiny language model."""
    model = language_model(architecture, runs.VOCABULARY)
    change(model)
    return runs.sparse_encoder(saved(path, model, tokenizer("wordpiece")))


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("architecture", ISSUE)
@pytest.mark.parametrize("autocast", [False, True])
def test_vectors_and_gradients_are_theirs(architecture, activation, autocast, tmp_path):
    reference = of(architecture, tmp_path)
    reference[1].activation_function = activation
    reference[1].chunk_size = 3  # ours needs none
    model = refuse_logits(use_splade_head(copy.deepcopy(reference)))
    weight = torch.rand(len(TEXTS), runs.VOCABULARY)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        both = [vectors_and_gradients(x, weight) for x in (model, reference)]
    (found, gradients), (expected, their_gradients) = both
    assert found.dtype == torch.float32
    error = 3e-2 if autocast else 1e-5
    torch.testing.assert_close(found, expected, rtol=error, atol=error * expected.max().item())
    if autocast:  # positions tie in half precision, so another may win: both are off by that
        _, exact = vectors_and_gradients(reference, weight)
        ours, others = (distance(x, exact) for x in (gradients, their_gradients))
        assert ours <= 1.1 * others
    else:
        assert distance(gradients, their_gradients) <= 1e-5


def distance(gradients, exact):
    """The relative error of a gradient as a whole."""
    one, other = (torch.cat([x.flatten() for x in each]) for each in (gradients, exact))
    return ((one - other).norm() / other.norm()).item()


def test_the_saved_folder_is_the_same_and_loads_without_the_head(folder, tmp_path):
    models = runs.sparse_encoder(folder), use_splade_head(runs.sparse_encoder(folder))
    folders = []
    for name, model in zip(("theirs", "ours"), models, strict=True):
        model.encode(TEXTS)
        model.save_pretrained(str(tmp_path / name))
        paths = sorted(x for x in (tmp_path / name).rglob("*") if x.is_file())
        folders.append({x.relative_to(tmp_path / name): x.read_bytes() for x in paths})
    assert folders[0].keys() == folders[1].keys()
    for path in folders[0].keys() - {Path("README.md")}:
        assert folders[0][path] == folders[1][path], path
    loaded = SparseEncoder(str(tmp_path / "ours"), device="cpu")
    assert type(loaded[1]).forward is SpladePooling.forward
    assert_equal_vectors(models[1], loaded)


@pytest.mark.parametrize(
    "again", [use_splade_head, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_the_head_twice_is_as_once_and_a_copy_has_its_own(again, folder):
    model, reference = use_splade_head(runs.sparse_encoder(folder)), runs.sparse_encoder(folder)
    twin = again(model)
    with torch.no_grad():
        for parameter in model.parameters() if twin is not model else ():
            parameter.zero_()
    assert_equal_vectors(refuse_logits(twin), reference)
    with torch.no_grad():
        twin[0].model.get_output_embeddings().bias += 1.0
        reference[0].model.get_output_embeddings().bias += 1.0
    assert_equal_vectors(twin, reference)


@pytest.mark.works_with(runs.NAME, "cached")
@pytest.mark.parametrize(("cache", "use_reentrant"), [("ours", False), ("theirs", True)])
# sentence-transformers 6.2 with transformers 5.23, about each other.
@pytest.mark.filterwarnings("ignore:`SparseEncoder` only defines `gradient_che:FutureWarning")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is depr:FutureWarning")
# The first of the two passes, which has no gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_trainer_gives_the_same_weights(cache, use_reentrant, sparse, tmp_path):
    loss, columns, labels, _ = runs.ALONE["info_nce"]
    checkpointing = {"activation_checkpointing": True, "num_train_epochs": 1}
    checkpointing["activation_checkpointing_kwargs"] = {"use_reentrant": use_reentrant}
    model, reference = refuse_logits(use_splade_head(sparse())), sparse()
    for each, settings in ((model, checkpointing), (reference, {"num_train_epochs": 1})):
        if cache == "theirs":
            cached = {"kind": theirs.CachedSpladeLoss, "mini_batch_size": 3}
            wrapped = runs.splade(each, runs.adapter(each, loss), **cached)
        else:
            wrapped = runs.adapter(each, loss, mini_batch_size=3)
        runs.train(each, wrapped, runs.dataset(columns, labels), tmp_path, **settings)
    assert model[0].auto_model.is_activation_checkpointing
    runs.assert_same_weights(model, reference)
    runs.assert_moved(model, sparse())


RANKING = sl.InfoNCELoss(temperature=0.5, similarity="dot")
SIDES = {f"{side}_flops": (0.1, terms.flops(side)) for side in ("query", "document")}
OBJECTIVE = sl.SpladeObjective({"info_nce": (1.0, terms.info_nce(RANKING)), **SIDES})


@pytest.mark.parametrize(("loss", "columns"), [(RANKING, 4), (OBJECTIVE, 3)])
def test_sparse_vectors_give_the_same_weights(loss, columns, sparse, tmp_path):
    models, seen = [use_splade_head(sparse(), layout=torch.sparse_csr), sparse()], []
    models[0][-1].register_forward_hook(lambda *args: seen.append(args[2]["sentence_embedding"]))
    for model in models:
        wrapped = runs.adapter(model, loss)
        runs.train(model, wrapped, runs.dataset(columns), tmp_path, num_train_epochs=1)
    assert {x.layout for x in seen} == {torch.sparse_csr}
    runs.assert_same_weights(*models)
    runs.assert_moved(models[0], sparse())
    assert_equal_vectors(*models, rtol=1e-3)


def test_what_sparse_vectors_cannot_be_is_said(sparse):
    model = use_splade_head(sparse(), layout=torch.sparse_csr).train()
    for loss, columns, options, message in [
        (sl.InfoNCELoss(in_batch=False, similarity="dot"), 3, {}, "negatives that all anchors"),
        (sl.InfoNCELoss(similarity="dot"), 2, {"mini_batch_size": 3}, "no mini_batch_size"),
        (sl.TripletMarginLoss(), 3, {}, "expected `anchor` to be dense"),
    ]:
        wrapped = runs.adapter(model, loss, **options)
        with pytest.raises((TypeError, ValueError), match=message):
            wrapped(runs.preprocessed(model, columns))


def one_step(model, rows, gather=False):
    """Train on pairs by an objective; return the whole weights."""
    flops = {"flops": (0.1, terms.flops("document"))}
    objective = sl.SpladeObjective({"info_nce": (1.0, terms.info_nce()), **flops}, gather=gather)
    columns = (runs.COLUMNS[name][rows] for name in ("anchor", "positive"))
    texts = [sl.Texts(model(model.preprocess(x))["sentence_embedding"]) for x in columns]
    objective(sl.SpladeBatch(*texts)).total.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {name: getattr(p, "full_tensor", p.clone)() for name, p in model.named_parameters()}


def on_device(rank, folder, path):
    """FSDP2, with head and embeddings, which are tied, in one group; each rank has four rows."""
    model = use_splade_head(runs.sparse_encoder(folder).double())
    for layer in model[0].auto_model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    weights = one_step(model, slice(4 * rank, 4 * rank + 4), gather=True)
    torch.save(weights, f"{path}/{rank}.pt")


@pytest.mark.works_with(runs.NAME, "sharded")
def test_sharded_by_two_devices_it_takes_the_step_of_one_process(sparse, folder, tmp_path):
    as_torchrun_would(on_device, folder, str(tmp_path))
    reference = sparse()
    weight = reference[0].auto_model.get_output_embeddings().weight
    assert weight is reference[0].auto_model.get_input_embeddings().weight
    expected = {name: x.detach() for name, x in one_step(reference, slice(8)).items()}
    runs.assert_moved(reference, sparse())
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected)


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_unpadded_texts_are_pooled_one_by_one(architecture, tmp_path):
    """What the transformer passes on with flash attention: all texts in a row, and their ends."""
    model = of(architecture, tmp_path)
    padded = features(model)
    expected = model(dict(padded))["sentence_embedding"]
    use_splade_head(model)
    hidden = model[0](dict(padded))["token_embeddings"]
    mask = padded["attention_mask"].bool()
    ends = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    flat = {"token_embeddings": hidden[mask][None], "cu_seq_lens_q": ends}
    found = model[1](flat)["sentence_embedding"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_lora_adapters_train_as_they_are(sparse):
    reference = sparse()
    reference.add_adapter(peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    reference.double()
    model = use_splade_head(copy.deepcopy(reference))
    weight = torch.rand(len(TEXTS), runs.VOCABULARY)
    found, expected = (vectors_and_gradients(x, weight) for x in (model, reference))
    torch.testing.assert_close(found, expected)
    assert any("lora" in name for name, x in model.named_parameters() if x.requires_grad)


@pytest.mark.parametrize("architecture", ISSUE)
def test_a_scale_is_in_the_weights_and_in_the_folder(architecture, tmp_path):
    """Its logits are those of the model times the factor, with the head and without it."""

    @torch.no_grad()
    def move(model):
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))

    plain = of(architecture, tmp_path, move)
    scaled = use_splade_head(copy.deepcopy(plain), logit_scale=1 / 30)
    logits = use_splade_head(plain).encode(TEXTS, convert_to_sparse_tensor=False).expm1()
    found = scaled.encode(TEXTS, convert_to_sparse_tensor=False)
    torch.testing.assert_close(found, (logits / 30).log1p(), rtol=1e-3, atol=1e-5)
    scaled.save_pretrained(str(tmp_path / "scaled"))
    assert_equal_vectors(SparseEncoder(str(tmp_path / "scaled"), device="cpu"), scaled)


def test_a_measured_scale_is_in_the_weights_and_in_the_folder(tmp_path):
    model = of("modernbert", tmp_path, lambda model: model.head.norm.weight.data.mul_(16))
    before = copy.deepcopy(model)
    use_splade_head(model, logit_scale="auto")
    assert_equal_vectors(model, before)  # evaluation measures nothing
    for _ in range(2):
        vectors = model.train()(features(model))["sentence_embedding"]
        assert vectors.square().sum(1).mean().item() == pytest.approx(64, rel=1e-3)
    model.save_pretrained(str(tmp_path / "scaled"))
    assert_equal_vectors(SparseEncoder(str(tmp_path / "scaled"), device="cpu"), model)


def test_a_scale_needs_a_normalisation_before_the_projection(folder):
    model = runs.sparse_encoder(folder)
    model[0].model.cls.predictions.transform.LayerNorm = torch.nn.Identity()
    before = [p.detach().clone() for p in model.parameters()]
    for scale in (0.5, "auto"):
        with pytest.raises(TypeError, match="expected a normalisation before the projection"):
            use_splade_head(model, logit_scale=scale)
    torch.testing.assert_close(before, [p.detach() for p in model.parameters()], rtol=0, atol=0)
    with pytest.raises(ValueError, match="logit_scale"):
        use_splade_head(model, logit_scale=0.0)


REFUSED = [
    (1, torch.nn.Identity(), "after the Transformer, got Ident"),
    (1, SpladePooling("sum"), r"\"max\"\) after .*'sum'"),
    (0, torch.nn.Identity(), "expected a SparseEncoder of a Transformer, got"),
]


@pytest.mark.parametrize(("place", "module", "message"), REFUSED)
def test_what_it_cannot_compute_is_refused_and_unchanged(place, module, message, folder):
    model = runs.sparse_encoder(folder)
    model[place] = module
    before = [vars(x).get("forward") for x in model.modules()]
    with pytest.raises(TypeError, match=message):
        use_splade_head(model)
    assert [vars(x).get("forward") for x in model.modules()] == before


def test_another_projection_needs_the_head_again(folder):
    model, reference = use_splade_head(runs.sparse_encoder(folder)), runs.sparse_encoder(folder)
    for each in (model, reference):
        layer = torch.nn.Linear(16, runs.VOCABULARY)
        torch.nn.init.constant_(layer.bias, 0.5)
        with torch.no_grad():
            layer.weight.copy_(each[0].model.get_output_embeddings().weight.flip(0))
        each[0].model.set_output_embeddings(layer)
    with pytest.raises(RuntimeError, match="again after resizing"):
        model.encode(TEXTS)
    assert_equal_vectors(use_splade_head(model), reference)
