"""The folder of a ``SpladeEncoder``: of transformers, of sentence-transformers, and our two files.

What a folder of sentence-transformers says is applied, or refused by the name of its key.
"""

import functools
import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any, get_args

import torch
from torch import Tensor

from sparse_losses._core.activation import Activation
from sparse_losses._core.extras import from_extra
from sparse_losses.representation._language_model import unwrapped
from sparse_losses.representation.dense import check_untrained
from sparse_losses.representation.parts import SIDES

# Our files in the folder of the language model, and their version.
SETTINGS, TENSORS, FORMAT = "sparse_losses.json", "sparse_losses.safetensors", 1
# Options that the loaders of models, tokenizers and files all take.
HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

# Files of sentence-transformers, and its modules by names that its versions 5 and 6 both know.
MODULES, ENCODER, ROUTER = "modules.json", "config_sentence_transformers.json", "router_config.json"
TRANSFORMER, THEIRS = "sentence_bert_config.json", "sentence_transformers.sparse_encoder.models"
# What its files may say of a fill-mask model and its pooling, by key; () is anything, which is
# applied or changes no vector. Other values and other keys are refused.
KEYS: dict[str, tuple[Any, ...]] = {
    "transformer_task": ("fill-mask",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "logits"}},),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": ({}, None),
    "query_expansion": (None,),
    "tokenizer_name_or_path": (None,),
    "pooling_strategy": ("max",),
    "activation_function": get_args(Activation),
    **dict.fromkeys(("max_seq_length", "query_length", "document_length", "do_lower_case"), ()),
    **dict.fromkeys(("model_kwargs", "config_kwargs", "processor_kwargs"), ()),
    **dict.fromkeys(("model_args", "config_args", "tokenizer_args"), ()),  # their former names
    **dict.fromkeys(("unpad_inputs", "chunk_size"), ()),
    **dict.fromkeys(("embedding_dimension", "word_embedding_dimension"), ()),
}
OWN_KIND = "SpladeEncoder"  # of a saved encoder for which these have no modules: they refuse it
LINEAR = "sparse_linear.pt"  # BGE-M3's layer from a hidden state to its token's weight
ADAPTER = "adapter_config.json"  # PEFT's file
# What transformers and PEFT write, and would read in place of other files of a new model.
STALE = ("model.safetensors", "model.safetensors.index.json", ADAPTER, "adapter_model.safetensors")
PLAIN = {"pool_special_tokens": True, "softcap": None, "logit_scale": None}  # as its modules are
CUTS = {"budgets": "thresholds", "prune_ratio": "prune_ratio"}  # for which these have no place
OWN = "<!-- save_pretrained writes this file: remove this line to keep your changes -->"
CARD = """---
library_name: {library}
tags: [sparse-encoder, splade, sparse-losses, feature-extraction]
base_model: {base}
---
# {name}
A sparse encoder, saved by sparse-losses: a {kind}. `SpladeEncoder.from_pretrained("{name}")` of
`sparse_losses` loads it. With sentence-transformers: {theirs}.

{own}
"""


@contextmanager
def named_damage(name: str, errors: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Name the folder in errors about damaged files, which come in many types."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except errors as error:
        raise OSError(f"{name} is damaged: {error!r}") from error


class Folder:
    """A folder or a repository of the Hub. Errors about missing and damaged files name it."""

    def __init__(
        self, name: str | os.PathLike[str], *, is_dense: bool = False, **options: Any
    ) -> None:
        self.name, self.is_dense = os.fspath(name), is_dense
        self.hub = {key: value for key, value in options.items() if key in HUB}

    def find(self, file: str, *, required: bool = False) -> str | None:
        """Return the path of a file, or ``None`` if the folder has no such file."""
        with from_extra("transformers"):
            from transformers.utils import cached_file

        missing = {"_raise_exceptions_for_missing_entries": False}
        offline = {"_raise_exceptions_for_connection_errors": False}
        path: str | None = cached_file(self.name, file, **missing, **offline, **self.hub)
        if path is None and required:
            raise OSError(f"{self.name} is incomplete: it has no {file}")
        return path

    def inside(self, path: str) -> "Folder":
        """Return the folder at a path in this one."""
        place = PureWindowsPath(path)  # it knows both kinds of slashes
        if place.anchor or ".." in place.parts:
            raise ValueError(f"expected paths inside it in {MODULES}, got {path!r}")
        subfolder = "/".join(filter(None, (self.hub.get("subfolder"), path)))
        return Folder(self.name, **{**self.hub, "subfolder": subfolder})

    def json(self, file: str, *, required: bool = False) -> Any:
        """Return the content of a JSON file, an empty dict if the folder has no such file."""
        path = self.find(file, required=required)
        return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))

    def tensors(self, file: str) -> dict[str, Tensor]:
        """Return the tensors of a file, which the folder must have."""
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = load_file(self.find(file, required=True), device="cpu")
        return tensors

    def modules(self, side: str) -> dict[str, "Folder"]:
        """Return folders of sentence-transformers' modules by kind, of a ``Router`` one side's."""
        with named_damage(self.name):
            chain = [(x["type"].rsplit(".", 1)[-1], x["path"]) for x in self.json(MODULES)]
            if chain and chain[0][0] == "Router":
                at = chain[0][1]
                config = self.inside(at).json(ROUTER, required=True)
                routes = config.get("parameters", {}).get("route_mappings") or {}
                tasks = ((side, "text"), (side, None), (None, "text"), (None, None))
                route = next((routes[str(x)] for x in tasks if str(x) in routes), side)
                names = config["structure"][route]
                kinds = [config["types"][name].rsplit(".", 1)[-1] for name in names]
                paths = [f"{at}/{name}" if at else name for name in names]
                chain[:1] = zip(kinds, paths, strict=True)
            return {kind: self.inside(path) for kind, path in chain}

    @functools.cached_property
    def said(self) -> dict[str, Any]:
        """What sentence-transformers' files tell its modules, and the model's ``place``."""
        modules = self.modules("document")
        kinds, place = list(modules), next(iter(modules.values()), self)
        if kinds in ([], [OWN_KIND]):
            return {"place": place}
        chains = [[kind, "SpladePooling"] for kind in ("MLMTransformer", "Transformer")]
        if kinds[:1] != ["Transformer"] if self.is_dense else kinds not in chains:
            dense = "" if self.is_dense else ": SpladeEncoder.from_dense takes dense encoders"
            got = f"{', '.join(kinds)}{dense}"
            raise ValueError(f"expected {self.name} to have known modules only, got {got}")
        said: dict[str, Any] = {}
        if kinds[0] == "Transformer":
            said["transformer_task"] = "feature-extraction"
        with named_damage(self.name):
            said |= place.json(TRANSFORMER)
            said |= {} if self.is_dense else modules["SpladePooling"].json("config.json")
            for key, old in (("model", "model"), ("config", "config"), ("processor", "tokenizer")):
                given = said.get(f"{old}_args") or said.get(f"{key}_kwargs") or {}
                # Whom to trust is the caller's to say, as there.
                said[f"{key}_kwargs"] = {k: x for k, x in given.items() if k != "trust_remote_code"}
        for key, value in said.items():
            allowed = KEYS.get(key)
            if not self.is_dense and (allowed is None or (allowed and value not in allowed)):
                known = " or ".join(map(repr, allowed or ())) or "no such key"
                raise ValueError(f"expected {self.name} to have {key} = {known}, got {value!r}")
        sides = {said.get("query_length"), said.get("document_length")}
        if len(sides) > 1:
            what = f"{self.name} to have one query_length and document_length"
            raise ValueError(f"expected {what}, got {sides}")
        cut = said["processor_kwargs"].get("model_max_length")
        limits = *sides, said.get("max_seq_length"), cut
        return said | {"place": place, "max_length": min((x for x in limits if x), default=None)}

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return settings and tensors: ours, or those that sentence-transformers' files tell."""
        said = self.said
        with named_damage(self.name):
            theirs, documents, queries = self.json(ENCODER), *map(self.modules, SIDES)
            has_own = not self.is_dense and any(self.find(file) for file in (SETTINGS, TENSORS))
            if has_own or OWN_KIND in documents:
                settings, tensors = self.json(SETTINGS, required=True), self.tensors(TENSORS)
                if settings.pop("format") != FORMAT:
                    raise ValueError(f"expected format {FORMAT}")
                pairs = settings["budgets"]  # JSON has no such keys
                settings["budgets"] = {number: (one, other) for number, (one, other) in pairs}
            else:
                settings, tensors = {"activation": said.get("activation_function")}, {}
                settings["max_active_dims"] = theirs.get("max_active_dims")
            limits = settings.get("max_length"), said.get("max_length")
            settings["max_length"] = min((x for x in limits if x), default=None)
            if any((theirs.get("prompts") or {}).values()):
                settings["prompts"] = theirs["prompts"]
            where, default = "in sentence-transformers", theirs.get("default_prompt_name")
            if default:
                what = f"has the default prompt {default}, for texts without a side"
                warnings.warn(f"{self.name} {what}, {where}", stacklevel=3)
            kind, place = next(iter(queries.items()), ("", said["place"]))
            if place.hub != said["place"].hub and kind != "SparseStaticEmbedding":
                what = f"encodes queries by another {kind}, which is not loaded"
                warnings.warn(f"{self.name} {what}, {where}", stacklevel=3)
        return {name: x for name, x in settings.items() if x is not None}, tensors

    def read_model(self, *, has_logits: bool, **options: Any) -> tuple[Any, Any]:
        """Return the language model, with adapters as a ``PeftModel``, and its tokenizer."""
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoTokenizer

        said = self.said
        place, remote = said["place"], {"trust_remote_code": options.get("trust_remote_code")}
        name, where, adapter = self.name, place.hub, place.json(ADAPTER)
        if adapter:
            name, where = adapter["base_model_name_or_path"], {}
            if not name:
                raise OSError(f"expected {ADAPTER} of {self.name} to name its base model")
        elif os.path.isdir(self.name):
            place.find("config.json", required=True)
        options = {key: value for key, value in options.items() if key not in HUB}
        with named_damage(self.name, (SafetensorError, json.JSONDecodeError)):
            configured = {**said.get("config_kwargs", {}), **where, **remote}
            config = AutoConfig.from_pretrained(name, **configured)
            if self.is_dense and hasattr(config, "classifier_bias"):  # ModernBERT's head
                config.classifier_bias = config.decoder_bias = True
            options = {**said.get("model_kwargs", {}), **options, **where, "config": config}
            load = _auto_class(config).from_pretrained
            model, report = load(name, output_loading_info=True, **options)
            if place.find("tokenizer_config.json") is not None:  # or it is the base model's
                name, where = self.name, place.hub
            options = {**said.get("processor_kwargs", {}), **where, **remote}
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # so transformers does without files
            raise OSError(f"{self.name} is incomplete: its tokenizer has no vocabulary")
        if limit := said.get("max_length"):
            tokenizer.model_max_length = min(tokenizer.model_max_length, limit)
        if said.get("do_lower_case"):
            from tokenizers import normalizers

            backend = tokenizer.backend_tokenizer
            steps = [normalizers.Lowercase(), *filter(None, [backend.normalizer])]
            backend.normalizer = normalizers.Sequence(steps)
        missing = report["missing_keys"]
        if self.is_dense:
            check_untrained(self.name, model, missing)
        needed = f"{model.base_model_prefix}." if self.is_dense or not has_logits else ""
        if new := ", ".join(sorted(x for x in missing if x.startswith(needed))):
            text = "they are random. Load a masked or causal language model, or train them."
            warnings.warn(f"{self.name} has no weights for {new}: {text}", stacklevel=3)
        if adapter:
            with from_extra("peft"):
                from peft import PeftModel

            model = PeftModel.from_pretrained(model, self.name, is_trainable=True, **place.hub)
        return model, tokenizer


def _auto_class(config: Any) -> Any:
    """Return the loader of masked language models, of causal ones if the folder has such a one."""
    import transformers as t
    from transformers.models.auto import modeling_auto as auto

    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(config.model_type)
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    has_own = "AutoModelForMaskedLM" in (getattr(config, "auto_map", None) or {})
    is_causal = causal != masked and causal in (config.architectures or [])
    is_masked = has_own or (masked is not None and not is_causal)
    return t.AutoModelForMaskedLM if is_masked else t.AutoModelForCausalLM


def write_folder(
    folder: str | os.PathLike[str],
    model: Any,
    tokenizer: Any,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """Write a folder that ``Folder`` reads; until its last file is written it does not load."""
    from safetensors.torch import save_file

    target, inner = Path(folder), unwrapped(model)
    if inner is not model:
        names, base = list(model.peft_config), model.active_peft_config.base_model_name_or_path
        if names != ["default"] or not base:
            what = "one adapter, named 'default', of a base model with a path or a name on the Hub"
            raise ValueError(f"expected {what}, got {', '.join(names)} of {base!r}")
    target.mkdir(parents=True, exist_ok=True)
    for stale in (SETTINGS, LINEAR, *STALE):
        (target / stale).unlink(missing_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    if settings.get("importance") == "linear":
        torch.save({x: tensors[f"importance.{x}"] for x in ("weight", "bias")}, target / LINEAR)
    asked = [number for number, pair in settings["budgets"].items() if pair[0] is not None]
    limit = settings["max_active_dims"] or int(max(asked, default=0)) or None
    said = {"model_type": "SparseEncoder", "prompts": settings.pop("prompts") or {}}
    _write_json(target / ENCODER, said | {"max_active_dims": limit})
    is_plain = not tensors and all(settings[key] == value for key, value in PLAIN.items())
    if not is_plain or _auto_class(inner.config).__name__.endswith("CausalLM"):
        theirs = "it has no modules for this encoder"  # without an entry they would build another
        _write_entries(target, {"": f"sparse_losses.{OWN_KIND}"})
    else:
        theirs = f'`SparseEncoder("{target.resolve().name}")`'
        pooling = {"pooling_strategy": "max", "activation_function": settings["activation"]}
        _write_json(target / "1_SpladePooling" / "config.json", pooling)
        _write_json(target / TRANSFORMER, {"max_seq_length": settings["max_length"]})
        kinds = {"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}
        _write_entries(target, {path: f"{THEIRS}.{kind}" for path, kind in kinds.items()})
        if cuts := ", ".join(name for key, name in CUTS.items() if settings[key]):
            kept = "all active dimensions" if limit is None else f"the {limit} largest"
            less = f"does not apply {cuts}, and keeps {kept}"
            theirs += f", which {less}"
            warnings.warn(f"sentence-transformers {less} of {target}", stacklevel=3)
    card = target / "README.md"
    if not card.exists() or card.read_bytes().rstrip().endswith(OWN.encode()):
        card.write_text(_card(target.resolve().name, inner, theirs), encoding="utf-8")
    save_file(tensors, target / TENSORS)
    settings["budgets"] = list(settings["budgets"].items())
    _write_json(target / SETTINGS, {"format": FORMAT, **settings})


def _card(name: str, model: Any, theirs: str) -> str:
    base, kind = model.name_or_path, type(model).__name__
    if os.path.exists(base) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base):
        base = "# its name on the Hub"
    library = "sentence-transformers" if theirs.startswith("`") else "transformers"
    return CARD.format(library=library, base=base, name=name, kind=kind, theirs=theirs, own=OWN)


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_entries(folder: Path, types: dict[str, str]) -> None:
    """Write the table of sentence-transformers' modules, each with its folder and its type."""
    rows = [{"idx": i, "name": str(i), "path": x, "type": types[x]} for i, x in enumerate(types)]
    _write_json(folder / MODULES, rows)


def write_router(folder: Path, query: str, *, frozen: bool) -> None:
    """Make the written encoder the document side of a ``Router`` with a query side in ``query``."""
    _write_json(folder / query / "config.json", {"frozen": frozen})
    entries = json.loads((folder / MODULES).read_text(encoding="utf-8"))
    types = {entry["path"]: entry["type"] for entry in entries}
    content = {
        "types": {query: f"{THEIRS}.SparseStaticEmbedding", **types},
        "structure": {"query": [query], "document": list(types)},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    _write_json(folder / ROUTER, content)
    _write_entries(folder, {"": "sentence_transformers.models.Router"})
