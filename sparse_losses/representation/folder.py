"""The folder of a ``SpladeEncoder``: of transformers, of sentence-transformers, and our two files.

It is replaced file by file, our settings last, so that a folder that was written in part does not
load. Errors about damaged files name the folder.
"""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import Activation
from sparse_losses._core.extras import from_extra
from sparse_losses.representation._language_model import unwrapped

# Our files in the folder of the masked language model, and their version.
SETTINGS, TENSORS, FORMAT = "sparse_losses.json", "sparse_losses.safetensors", 1
# Options that the loaders of models, tokenizers and files all take.
HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

# Files and modules of sentence-transformers; versions 5 and 6 both know these names.
MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
ROUTER = "router_config.json"
THEIRS = "sentence_transformers.sparse_encoder.models"
KNOWN = {"MLMTransformer", "Transformer", "SpladePooling", "IdfWeights", "UnsupportedEncoder"}
LINEAR = "sparse_linear.pt"  # BGE-M3's layer from a hidden state to its token's weight
ADAPTER = "adapter_config.json"  # PEFT's file
CARD = "README.md"  # for the Hub; its last line says whose it is
OWN = "<!-- save_pretrained writes this file: remove this line to keep your changes -->"


class IdfWeights(nn.Module):
    """A module of a ``SparseEncoder`` that multiplies the vectors with one weight per token.

    Load it with ``SparseEncoder(folder, trust_remote_code=True)``, which sentence-transformers
    requires for modules of other packages.

    Args:
        vocab_size: size of the vocabulary, V.

    Examples:
        >>> import torch
        >>> from sparse_losses.integrations.sentence_transformers import IdfWeights
        >>> idf_weights = IdfWeights(3)
        >>> idf_weights.weight.copy_(torch.tensor([1.0, 0.0, 0.5]))
        tensor([1.0000, 0.0000, 0.5000])
        >>> idf_weights({"sentence_embedding": torch.ones(1, 3)})["sentence_embedding"]
        tensor([[1.0000, 0.0000, 0.5000]])
    """

    # It has the methods of sentence-transformers' `Module` without importing it; `integrations`
    # registers it as one.
    weight: Tensor

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(vocab_size))

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Return the features with a weighted ``sentence_embedding`` ``[B, V]``."""
        features["sentence_embedding"] = features["sentence_embedding"] * self.weight
        return features

    def get_embedding_dimension(self) -> int:
        """Return V."""
        return len(self.weight)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"vocab_size": len(self.weight)}

    def on_model_ready(self, model: Any) -> None:
        """Do nothing; sentence-transformers calls it once the model is complete."""

    def save(self, output_path: str | os.PathLike[str], *args: Any, **options: Any) -> None:
        """Write ``config.json`` and the weights."""
        from safetensors.torch import save_file

        folder = Path(output_path)
        _write_json(folder / "config.json", self.get_config_dict())
        save_file({"weight": self.weight.contiguous()}, folder / "model.safetensors")

    @classmethod
    def load(cls, model_name_or_path: str, **options: Any) -> "IdfWeights":
        """Load a module that ``save`` or ``SpladeEncoder.save_pretrained`` wrote."""
        folder = Folder(model_name_or_path, cache_dir=options.get("cache_folder"), **options)
        weight = folder.tensors("model.safetensors")["weight"]
        module = cls(len(weight))
        module.weight.copy_(weight)
        return module


class UnsupportedEncoder(nn.Module):
    """The module entry of a saved encoder that sentence-transformers has no modules for."""

    @classmethod
    def load(cls, model_name_or_path: str, **options: Any) -> NoReturn:
        """Raise an error that names the loader."""
        raise ValueError(
            f"{model_name_or_path} is a SpladeEncoder of a kind for which sentence-transformers "
            "has no modules (decoder model, own settings of the pooling, or no expansion): load it "
            "with SpladeEncoder.from_pretrained"
        )


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
    """A folder, or a repository of the Hub. Errors about missing and damaged files have its name.

    Of the ``options`` of ``from_pretrained``, those count that say where files are looked for.
    """

    def __init__(self, name: str | os.PathLike[str], **options: Any) -> None:
        self.name = os.fspath(name)
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
        subfolder = "/".join(filter(None, (self.hub.get("subfolder"), path)))
        return Folder(self.name, **{**self.hub, "subfolder": subfolder})

    def json(self, file: str, *, required: bool = False) -> Any:
        """Return the content of a JSON file, an empty dict if the folder has no such file."""
        path = self.find(file, required=required)
        return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))

    def tensors(self, file: str) -> dict[str, Tensor]:
        """Return the tensors of a file, which the folder must have."""
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = load_file(self.find(file, required=True))
        return tensors

    def modules(self, side: str) -> dict[str, str]:
        """Return paths of sentence-transformers' modules by kind, in a ``Router`` of a side."""
        with named_damage(self.name):
            types = {entry["path"]: entry["type"] for entry in self.json(MODULES)}
            if [kind.rsplit(".", 1)[-1] for kind in types.values()] == ["Router"]:
                config = self.json(ROUTER, required=True)
                types = {path: config["types"][path] for path in config["structure"][side]}
            for path in types:
                place = PureWindowsPath(path)  # it knows both kinds of slashes
                if place.anchor or ".." in place.parts:
                    raise ValueError(f"expected paths inside it in {MODULES}, got {path!r}")
            return {kind.rsplit(".", 1)[-1]: path for path, kind in types.items()}

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return settings and tensors: ours, or those that sentence-transformers' modules tell.

        Raises:
            ValueError: if the modules compute anything else than a ``SpladeEncoder`` does.
        """
        modules = self.modules("document")
        settings: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        pooling = {"pooling_strategy": "max", "activation_function": "relu"}
        with named_damage(self.name):
            if "SpladePooling" in modules:
                pooling |= self.json(f"{modules['SpladePooling']}/config.json")
            if "IdfWeights" in modules:
                weights = self.tensors(f"{modules['IdfWeights']}/model.safetensors")
                tensors["idf_weights"] = weights["weight"]
            prompt = self.json(PROMPTS).get("default_prompt_name")
            if "UnsupportedEncoder" in modules or self.find(SETTINGS) or self.find(TENSORS):
                settings, tensors = self.json(SETTINGS, required=True), self.tensors(TENSORS)
                if settings["format"] != FORMAT:
                    raise ValueError(f"expected format {FORMAT}, got {settings['format']!r}")
                parts = {name for name in ("gate", "idf_weights") if settings[name]}
                parts |= set() if settings["expansion"] else {"importance"}
                if {name.split(".")[0] for name in tensors} != parts:
                    raise ValueError(f"{SETTINGS} and {TENSORS} do not belong together")
        strategy, activation = pooling["pooling_strategy"], pooling["activation_function"]
        if strategy != "max" or activation not in get_args(Activation):
            raise ValueError(
                f"expected {self.name} to have the pooling_strategy 'max' and the "
                "activation_function 'relu' or 'log1p_relu', "
                f"got {strategy!r} and {activation!r}"
            )
        if others := modules.keys() - KNOWN:
            got = ", ".join(sorted(others))
            raise ValueError(f"expected {self.name} to have known modules only, got {got}")
        if prompt:
            warnings.warn(
                f"{self.name} has the default prompt {prompt!r} for sentence-transformers: prepend "
                "it to the texts yourself",
                stacklevel=3,
            )
        return {"activation": activation, **settings}, tensors

    def read_linear(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the state of BGE-M3's layer for a layer of its kind, empty without its file."""
        path = self.find(LINEAR) if isinstance(layer, nn.Linear) else None
        if path is None:
            return {}
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def read_model(self, *, has_logits: bool, **options: Any) -> tuple[Any, Any]:
        """Return the language model, with adapters as a ``PeftModel``, and its tokenizer.

        Warns:
            UserWarning: if weights are missing.
        """
        from safetensors import SafetensorError
        from transformers import AutoTokenizer
        from transformers.utils import logging

        if place := next(iter(self.modules("document").values()), ""):
            inside = self.inside(place)
            return inside.read_model(has_logits=has_logits, **{**options, **inside.hub})
        adapter = self.json(ADAPTER)
        name, where = self.name, self.hub
        if not adapter and os.path.isdir(self.name):
            self.find("config.json", required=True)
        elif adapter:
            name, where = adapter["base_model_name_or_path"], {}
            if not name:
                raise OSError(f"expected {ADAPTER} of {self.name} to name its base model")
            options = {key: value for key, value in options.items() if key not in HUB}
        remote = {"trust_remote_code": options.get("trust_remote_code")}
        verbosity = logging.get_verbosity()
        if not has_logits:  # the layers before the logits may be new
            logging.set_verbosity_error()
        try:
            with named_damage(self.name, (SafetensorError, json.JSONDecodeError)):
                kind = _auto_class(name, where | remote)
                model, report = kind.from_pretrained(name, output_loading_info=True, **options)
                if self.find("tokenizer_config.json") is not None:  # or it is the base model's
                    name, where = self.name, self.hub
                tokenizer = AutoTokenizer.from_pretrained(name, **where, **remote)
        finally:
            logging.set_verbosity(verbosity)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # so transformers does without files
            raise OSError(f"{self.name} is incomplete: its tokenizer has no vocabulary")
        needed = "" if has_logits else f"{model.base_model_prefix}."
        if new := sorted(key for key in report["missing_keys"] if key.startswith(needed)):
            warnings.warn(
                f"{self.name} has no weights for {', '.join(new)}: they are random. Use a "
                "checkpoint of a masked or causal language model, or train them.",
                stacklevel=3,
            )
        if adapter:
            with from_extra("peft"):
                from peft import PeftModel

            model = PeftModel.from_pretrained(model, self.name, is_trainable=True, **self.hub)
        return model, tokenizer


def _auto_class(name: str, options: dict[str, Any]) -> Any:
    from transformers import (
        MODEL_FOR_MASKED_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
    )

    config = AutoConfig.from_pretrained(name, **options)
    is_causal = any(kind.endswith("ForCausalLM") for kind in config.architectures or [])
    has_masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING or (
        "AutoModelForMaskedLM" in getattr(config, "auto_map", {})
    )
    return AutoModelForMaskedLM if has_masked and not is_causal else AutoModelForCausalLM


def write_folder(
    folder: str | os.PathLike[str],
    model: Any,
    tokenizer: Any,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """Write a folder that ``Folder`` reads; after an error before the last write it is unchanged.

    A process killed while files are replaced leaves a folder that is incomplete and does not load.
    """
    from safetensors.torch import save_file

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=target) as temporary:
        new = Path(temporary)
        _save_model(model, new)
        tokenizer.save_pretrained(new)
        if settings.get("importance") == "linear":
            state = {name.split(".")[1]: x for name, x in tensors.items() if "importance." in name}
            torch.save(state, new / LINEAR)
        inner = unwrapped(model)
        if (
            settings["expansion"]
            and settings["pool_special_tokens"]
            and settings["softcap"] is settings["logit_scale"] is None
            and not type(inner).__name__.endswith("ForCausalLM")
        ):
            vocab_size = inner.config.get_text_config().vocab_size
            _write_modules(new, settings, tensors, vocab_size)
        else:  # without an entry they would build another model
            _write_entries(new, [("", f"{__name__}.{UnsupportedEncoder.__name__}")])
        _write_card(new, target, inner, settings)
        if (target / PROMPTS).exists():
            (new / PROMPTS).unlink(missing_ok=True)  # theirs may hold prompts
        save_file(tensors, new / TENSORS)
        _write_json(new / SETTINGS, {"format": FORMAT, **settings})

        (target / SETTINGS).unlink(missing_ok=True)
        # Of a model that was in more files or fewer, none may be read in place of the new ones.
        for pattern in ("model*.safetensors*", "adapter_*", LINEAR):
            for stale in target.glob(pattern):
                stale.unlink()
        files = [path.relative_to(new) for path in new.rglob("*") if path.is_file()]
        order = {TENSORS: 0, SETTINGS: 2}  # so that until the end only one of the two is there
        for file in sorted(files, key=lambda file: order.get(str(file), 1)):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / file, target / file)


def _save_model(model: Any, folder: Path) -> None:
    """Write a model; of a ``PeftModel`` its adapters, which name their base model."""
    is_plain = unwrapped(model) is model
    has_base = getattr(model, "_hf_peft_config_loaded", False) and model.name_or_path
    if is_plain and not has_base and any(".base_layer." in name for name in model.state_dict()):
        raise TypeError(
            "expected a PeftModel, as get_peft_model makes it, to save adapters: those of this "
            f"{type(model).__name__} were added to its layers and would lack a base model"
        )
    if not is_plain and list(model.peft_config) != ["default"]:
        names = ", ".join(model.peft_config)
        raise ValueError(f"expected one adapter, named 'default', to save, got {names}")
    if not is_plain and not model.active_peft_config.base_model_name_or_path:
        raise ValueError(
            "expected a base model with a path or a name on the Hub, which its adapters are saved "
            "with, got one that was not loaded: save it, load it, and add adapters then"
        )
    model.save_pretrained(folder)


def _write_modules(
    folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor], vocab_size: int
) -> None:
    """Write the modules of sentence-transformers that compute the same."""
    modules = [("", f"{THEIRS}.MLMTransformer"), ("1_SpladePooling", f"{THEIRS}.SpladePooling")]
    pooling = {
        "pooling_strategy": "max",
        "activation_function": settings["activation"],
        "word_embedding_dimension": vocab_size,
    }
    longest = {"max_seq_length": settings["max_length"]}
    _write_json(folder / "sentence_bert_config.json", longest)
    _write_json(folder / "1_SpladePooling" / "config.json", pooling)
    _write_json(folder / PROMPTS, {"model_type": "SparseEncoder"})
    if settings["idf_weights"]:
        modules.append(("2_IdfWeights", f"{__name__}.{IdfWeights.__name__}"))
        weights = IdfWeights(vocab_size)
        weights.weight = tensors["idf_weights"]
        weights.save(folder / "2_IdfWeights")
    _write_entries(folder, modules)


def _write_entries(folder: Path, modules: list[tuple[str, str]]) -> None:
    """Write the table of sentence-transformers' modules, each with its folder and its type."""
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(modules)
    ]
    _write_json(folder / MODULES, entries)


def _write_card(new: Path, target: Path, model: Any, settings: dict[str, Any]) -> None:
    """Write the model card, unless the folder has one of its user."""
    old, name, base = target / CARD, target.resolve().name, model.name_or_path
    if old.exists() and not old.read_bytes().rstrip().endswith(OWN.encode()):
        (new / CARD).unlink(missing_ok=True)  # PEFT's
        return
    if os.path.exists(base) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base):
        base = ""  # no name on the Hub
    is_theirs = UnsupportedEncoder.__name__ not in (new / MODULES).read_text(encoding="utf-8")
    remote = ", trust_remote_code=True" if settings["idf_weights"] else ""
    is_pruned = settings["document_threshold"] or settings["query_threshold"]
    text = f"""---
library_name: {"sentence-transformers" if is_theirs else "transformers"}
tags: [sparse-encoder, splade, sparse-losses, feature-extraction]
{f"base_model: {base}" if base else "# base_model: its name on the Hub"}
---

# {name}

A sparse encoder of {model.config.get_text_config().vocab_size:,} dimensions, for texts of up to
{settings["max_length"]:,} tokens, saved by sparse-losses: a {type(model).__name__}.

With sparse-losses:

```python
from sparse_losses import SpladeEncoder

encoder = SpladeEncoder.from_pretrained("{name}")
vectors = encoder.encode_document(["a text"])
```
"""
    if is_theirs:
        text += f"""
With sentence-transformers{", which does not prune by the thresholds" if is_pruned else ""}:

```python
from sentence_transformers import SparseEncoder

model = SparseEncoder("{name}"{remote})
vectors = model.encode_document(["a text"])
```
"""
    (new / CARD).write_text(f"{text}\n{OWN}\n", encoding="utf-8")


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
    _write_entries(folder, [("", "sentence_transformers.models.Router")])
