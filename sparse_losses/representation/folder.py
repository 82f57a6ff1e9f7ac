"""The folder of a ``SpladeEncoder``: of transformers, of sentence-transformers, and our two files.

It is replaced file by file, our settings last, so that a folder that was written in part does not
load. Errors about damaged files name the folder.
"""

import json
import os
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_flag, check_integer
from sparse_losses._core.extras import from_extra
from sparse_losses.representation._language_model import unwrapped

__all__ = [
    "Folder",
    "IdfWeights",
    "UnsupportedEncoder",
    "modules_of",
    "named_damage",
    "write_folder",
    "write_router",
]

# Our files in the folder of the masked language model, and their version.
SETTINGS, TENSORS, FORMAT = "sparse_losses.json", "sparse_losses.safetensors", 1
# Options that the loaders of models, tokenizers and files all take.
HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

# Files and modules of sentence-transformers; versions 5 and 6 both know these names.
MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
ROUTER = "router_config.json"
THEIRS = "sentence_transformers.sparse_encoder.models"
KNOWN = ("MLMTransformer", "Transformer", "SpladePooling", "IdfWeights", "UnsupportedEncoder")
LINEAR = "sparse_linear.pt"  # BGE-M3's layer from a hidden state to its token's weight
ADAPTER, BASE = "adapter_config.json", "base_model"  # PEFT's file; a base model without a path


class IdfWeights(nn.Module):
    """A module of a ``SparseEncoder`` that multiplies the vectors with one weight per token.

    ``SpladeEncoder.save_pretrained`` writes it as the last module if there are idf weights. Load
    the folder with ``SparseEncoder(folder, trust_remote_code=True)``: sentence-transformers
    requires this for modules of other packages.

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
        with from_extra("transformers"):
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
    """The module entry of a saved ``SpladeEncoder`` of another kind; loading it is an error.

    sentence-transformers has no modules for an encoder without expansion, for decoder models, for
    adapters whose base model has no path, and for other pooled positions or logits.
    """

    @classmethod
    def load(cls, model_name_or_path: str, **options: Any) -> NoReturn:
        """Raise an error that names the loader."""
        raise ValueError(
            f"{model_name_or_path} is a SpladeEncoder of a kind for which sentence-transformers "
            "has no modules (decoder model, own settings of the pooling, no expansion, or adapters "
            "with the base model inside): load it with SpladeEncoder.from_pretrained"
        )


class Folder:
    """A folder, or a repository of the Hub. Errors about missing and damaged files have its name.

    Of the ``options`` of ``from_pretrained``, those count that say where files are looked for.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
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

    def json(self, file: str, kind: type = dict, *, required: bool = False) -> Any:
        """Return the content of a JSON file, empty if the folder has no such file."""
        path = self.find(file, required=required)
        if path is None:
            return kind()
        with named_damage(self.name, ValueError):  # no JSON, or no UTF-8
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, kind):
            got, wanted = type(content).__name__, kind.__name__
            raise OSError(
                f"{self.name} is damaged: expected {file} to hold a {wanted}, got a {got}"
            )
        return content

    def tensors(self, file: str) -> dict[str, Tensor]:
        """Return the tensors of a file, which the folder must have."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.find(file, required=True)
        with named_damage(self.name, SafetensorError):
            tensors: dict[str, Tensor] = load_file(path)
        return tensors

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return our settings and tensors: two empty dicts if there are none."""
        if self.find(SETTINGS) is None and self.find(TENSORS) is None:
            return {}, {}
        settings, tensors = self.json(SETTINGS, required=True), self.tensors(TENSORS)
        if (version := settings.get("format")) != FORMAT:
            raise OSError(f"expected {self.name} in format {FORMAT}, got {version!r}")
        if missing := {"expansion", "gate", "idf_weights", "max_length"} - settings.keys():
            raise OSError(f"{self.name} is damaged: {SETTINGS} lacks {', '.join(sorted(missing))}")
        with named_damage(self.name, TypeError, ValueError):
            check_flag(expansion=settings["expansion"], idf_weights=settings["idf_weights"])
            check_integer("max_length", settings["max_length"], minimum=1)
        gate, importance = settings["gate"] is not None, not settings["expansion"]
        parts = {"gate": gate, "importance": importance, "idf_weights": settings["idf_weights"]}
        if {name.split(".")[0] for name in tensors} != {name for name in parts if parts[name]}:
            raise OSError(f"{self.name} is damaged: its two files do not belong together")
        return settings, tensors

    def read_linear(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the state of BGE-M3's layer for a layer of its kind, empty without its file."""
        path = self.find(LINEAR) if isinstance(layer, nn.Linear) else None
        if path is None:
            return {}
        with named_damage(self.name, RuntimeError, pickle.UnpicklingError):
            state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def read_modules(self) -> tuple[Tensor | None, str]:
        """Return idf weights (or ``None``) and activation of sentence-transformers' modules.

        Raises:
            ValueError: if the modules compute anything else than a ``SpladeEncoder`` does.
        """
        idf_weights, activation = None, "relu"
        for kind, path in modules_of(self, "document"):
            if kind == "IdfWeights":
                with named_damage(self.name, KeyError):
                    idf_weights = self.tensors(f"{path}/model.safetensors")["weight"]
            if kind == "UnsupportedEncoder":
                self.find(SETTINGS, required=True)  # or the encoder would be another one
            settings = self.json(f"{path}/config.json") if kind == "SpladePooling" else {}
            activation = settings.get("activation_function", activation)
            for key, value, allowed in (
                ("pooling_strategy", settings.get("pooling_strategy", "max"), ["max"]),
                ("activation_function", activation, ["relu", "log1p_relu"]),
            ):
                if value not in allowed:
                    expected = f"{key} {' or '.join(map(repr, allowed))}, got {value!r}"
                    raise ValueError(f"expected {self.name} to have {expected}")
            if kind not in KNOWN:
                raise ValueError(f"expected {self.name} to have known modules only, got {kind}")
        if prompt := self.json(PROMPTS).get("default_prompt_name"):
            warnings.warn(
                f"{self.name} has the default prompt {prompt!r} for sentence-transformers: prepend "
                "it to the texts yourself",
                stacklevel=3,
            )
        return idf_weights, activation

    def read_model(self, *, has_logits: bool, **options: Any) -> tuple[Any, Any]:
        """Return the language model and its tokenizer; warn of weights that are missing."""
        from safetensors import SafetensorError
        from transformers import AutoTokenizer
        from transformers.utils import logging

        if place := next((path for _, path in modules_of(self, "document")), ""):
            inside = self.inside(place)
            return inside.read_model(has_logits=has_logits, **{**options, **inside.hub})
        if adapter := self.json(ADAPTER):
            return self._read_adapted(adapter, **options)
        if Path(self.name).is_dir():
            self.find("config.json", required=True)
        own = {**self.hub, "trust_remote_code": options.get("trust_remote_code")}
        verbosity = logging.get_verbosity()
        if not has_logits:  # the layers before the logits may be new
            logging.set_verbosity_error()
        try:
            with named_damage(self.name, SafetensorError, json.JSONDecodeError):
                tokenizer = AutoTokenizer.from_pretrained(self.name, **own)
                model, report = _auto_class(self.name, own).from_pretrained(
                    self.name, output_loading_info=True, **options
                )
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
        return model, tokenizer

    def _read_adapted(self, adapter: dict[str, Any], **options: Any) -> tuple[Any, Any]:
        """Return a ``PeftModel`` that can be trained, and its tokenizer."""
        with from_extra("peft"):
            from peft import PeftModel
        from transformers import AutoTokenizer

        base = adapter.get("base_model_name_or_path")
        if not base:
            self.inside(BASE).find("config.json", required=True)
            # By its path: from the name, transformers would read the adapters beside it again.
            base = os.path.join(self._local(f"{BASE}/*"), BASE)
        remote = {"trust_remote_code": options.get("trust_remote_code")}
        others = {key: value for key, value in options.items() if key not in HUB}
        model = _auto_class(base, remote).from_pretrained(base, **others)
        where = (base, {}) if self.find("tokenizer_config.json") is None else (self.name, self.hub)
        tokenizer = AutoTokenizer.from_pretrained(where[0], **where[1], **remote)
        return PeftModel.from_pretrained(model, self.name, is_trainable=True, **self.hub), tokenizer

    def _local(self, pattern: str) -> str:
        """Return the path of the folder, with the files of a ``pattern`` if it is on the Hub."""
        if os.path.isdir(self.name):
            return os.path.join(self.name, self.hub.get("subfolder") or "")
        from huggingface_hub import snapshot_download

        names = ("cache_dir", "force_download", "local_files_only", "revision", "token")
        options = {name: self.hub[name] for name in names if name in self.hub}
        path: str = snapshot_download(self.name, allow_patterns=pattern, **options)
        return path


def _auto_class(name: str, options: dict[str, Any]) -> Any:
    """Return the class of ``transformers`` that loads a model with its logits."""
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


@contextmanager
def named_damage(name: str, *errors: type[Exception]) -> Iterator[None]:
    """Name the folder in errors about damaged files, which do not say which one it is."""
    try:
        yield
    except errors as error:
        raise OSError(f"{name} is damaged: {error!r}") from error


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
    with from_extra("transformers"):
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
        is_supported = (
            settings["expansion"]
            and settings["pool_special_tokens"]
            and settings["softcap"] is settings["logit_scale"] is None
            and not type(inner).__name__.endswith("ForCausalLM")
            and not (new / BASE).exists()
        )
        vocab_size = inner.config.get_text_config().vocab_size
        _write_modules(new, settings, tensors, vocab_size, is_supported)
        if (target / PROMPTS).exists():
            (new / PROMPTS).unlink(missing_ok=True)  # theirs may hold prompts
        save_file(tensors, new / TENSORS)
        _write_json(new / SETTINGS, {"format": FORMAT, **settings})

        (target / SETTINGS).unlink(missing_ok=True)
        # Of a model that was in more files or fewer, none may be read in place of the new ones.
        for pattern in ("model*.safetensors*", "adapter_*", f"{BASE}/*", LINEAR):
            for stale in target.glob(pattern):
                stale.unlink()
        files = [path.relative_to(new) for path in new.rglob("*") if path.is_file()]
        order = {TENSORS: 0, SETTINGS: 2}  # so that until the end only one of the two is there
        for file in sorted(files, key=lambda file: order.get(str(file), 1)):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / file, target / file)


def _save_model(model: Any, folder: Path) -> None:
    """Write a model; of a ``PeftModel`` its adapters, and its base model if that has no path."""
    inner = unwrapped(model)
    is_plain = inner is model
    has_base = getattr(model, "_hf_peft_config_loaded", False) and model.name_or_path
    if is_plain and not has_base and any(".base_layer." in name for name in model.state_dict()):
        raise TypeError(
            "expected a PeftModel, as get_peft_model makes it, to save adapters: those of this "
            f"{type(model).__name__} were added to its layers and would lack a base model"
        )
    if not is_plain and list(model.peft_config) != ["default"]:
        names = ", ".join(model.peft_config)
        raise ValueError(f"expected one adapter, named 'default', to save, got {names}")
    model.save_pretrained(folder)
    if is_plain or model.active_peft_config.base_model_name_or_path:
        return
    prefix = model.base_model.prefix  # of the names of the adapters' own parts, such as "lora_"
    own = {
        name.replace(".base_layer", "").replace(".original_module", ""): tensor
        for name, tensor in inner.state_dict().items()
        if f".{prefix}" not in f".{name}" and ".modules_to_save." not in name
    }
    inner.save_pretrained(folder / BASE, state_dict=own)


def _write_modules(
    folder: Path,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    vocab_size: int,
    is_supported: bool,
) -> None:
    """Write the modules of sentence-transformers, and the files that are not part of the model."""
    if not is_supported:
        # Without an entry they would build another model.
        modules = [("", f"{__name__}.{UnsupportedEncoder.__name__}")]
    else:
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
    if is_supported and settings["idf_weights"]:
        modules.append(("2_IdfWeights", f"{__name__}.{IdfWeights.__name__}"))
        weights = IdfWeights(vocab_size)
        weights.weight = tensors["idf_weights"]
        weights.save(folder / "2_IdfWeights")
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(modules)
    ]
    _write_json(folder / MODULES, entries)


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def modules_of(folder: Folder, side: str) -> list[tuple[str, str]]:
    """Return kinds and paths of sentence-transformers' modules, in a ``Router`` those of a side."""
    entries = folder.json(MODULES, list)
    with named_damage(folder.name, TypeError, KeyError, AttributeError, ValueError):
        modules = [(entry["type"], entry["path"]) for entry in entries]
        if [kind.rsplit(".", 1)[-1] for kind, _ in modules] == ["Router"]:
            config = folder.json(ROUTER, required=True)
            modules = [(config["types"][path], path) for path in config["structure"][side]]
        for _, path in modules:
            place = PureWindowsPath(path)  # it knows both kinds of slashes
            if place.anchor or ".." in place.parts:
                raise ValueError(f"expected paths inside it in {MODULES}, got {path!r}")
        return [(kind.rsplit(".", 1)[-1], path) for kind, path in modules]


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
    router = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}
    _write_json(folder / MODULES, [router])
