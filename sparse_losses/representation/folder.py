"""The folder of a ``SpladeEncoder``: of transformers, of sentence-transformers, and our two files.

It is replaced file by file, our settings last, so that a folder that was written in part does not
load. Errors about damaged files name the folder.
"""

import json
import os
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

__all__ = [
    "Folder",
    "IdfWeights",
    "WithoutExpansion",
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
POOLING = {"pooling_strategy": "max", "activation_function": "relu"}
KNOWN = ("MLMTransformer", "Transformer", "SpladePooling", "IdfWeights", "WithoutExpansion")


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


class WithoutExpansion(nn.Module):
    """The module entry of a saved ``SpladeEncoder`` without expansion; loading it is an error."""

    @classmethod
    def load(cls, model_name_or_path: str, **options: Any) -> NoReturn:
        """Raise an error that names the loader."""
        raise ValueError(
            f"{model_name_or_path} is a SpladeEncoder without expansion, for which sentence-"
            "transformers has no modules: load it with SpladeEncoder.from_pretrained"
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

    def read_modules(self) -> Tensor | None:
        """Return the idf weights among the modules of sentence-transformers, if there are any.

        Raises:
            ValueError: if the modules compute anything else than a ``SpladeEncoder`` does.
        """
        idf_weights = None
        for kind, path in modules_of(self, "document"):
            if kind == "IdfWeights":
                with named_damage(self.name, KeyError):
                    idf_weights = self.tensors(f"{path}/model.safetensors")["weight"]
            if kind == "WithoutExpansion":
                self.find(SETTINGS, required=True)  # or the encoder would be one with expansion
            settings = self.json(f"{path}/config.json") if kind == "SpladePooling" else {}
            for key in POOLING.keys() & settings.keys():
                if settings[key] != POOLING[key]:
                    expected = f"{key} {POOLING[key]!r}, got {settings[key]!r}"
                    raise ValueError(f"expected {self.name} to have {expected}")
            if kind not in KNOWN:
                raise ValueError(f"expected {self.name} to have known modules only, got {kind}")
        if prompt := self.json(PROMPTS).get("default_prompt_name"):
            warnings.warn(
                f"{self.name} has the default prompt {prompt!r} for sentence-transformers: prepend "
                "it to the texts yourself",
                stacklevel=3,
            )
        return idf_weights

    def read_model(self, *, has_logits: bool, **options: Any) -> tuple[Any, Any]:
        """Return the masked language model and its tokenizer; warn of weights that are missing."""
        from safetensors import SafetensorError
        from transformers import AutoModelForMaskedLM, AutoTokenizer
        from transformers.utils import logging

        if place := next((path for _, path in modules_of(self, "document")), ""):
            inside = self.inside(place)
            return inside.read_model(has_logits=has_logits, **{**options, **inside.hub})
        if Path(self.name).is_dir() and self.find("adapter_config.json") is None:
            self.find("config.json", required=True)
        own = {**self.hub, "trust_remote_code": options.get("trust_remote_code")}
        verbosity = logging.get_verbosity()
        if not has_logits:  # the layers before the logits may be new
            logging.set_verbosity_error()
        try:
            with named_damage(self.name, SafetensorError, json.JSONDecodeError):
                tokenizer = AutoTokenizer.from_pretrained(self.name, **own)
                model, report = AutoModelForMaskedLM.from_pretrained(
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
                "checkpoint of a masked language model, or train them.",
                stacklevel=3,
            )
        return model, tokenizer


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
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        _write_modules(new, settings, tensors, model.config.vocab_size)
        if (target / PROMPTS).exists():
            (new / PROMPTS).unlink(missing_ok=True)  # theirs may hold prompts
        save_file(tensors, new / TENSORS)
        _write_json(new / SETTINGS, {"format": FORMAT, **settings})

        (target / SETTINGS).unlink(missing_ok=True)
        # Of a model that was in more files or fewer, none may be read in place of the new ones.
        for stale in target.glob("model*.safetensors*"):
            stale.unlink()
        files = [path.relative_to(new) for path in new.rglob("*") if path.is_file()]
        order = {TENSORS: 0, SETTINGS: 2}  # so that until the end only one of the two is there
        for file in sorted(files, key=lambda file: order.get(str(file), 1)):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / file, target / file)


def _write_modules(
    folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor], vocab_size: int
) -> None:
    """Write the modules of sentence-transformers, and the files that are not part of the model."""
    if not settings["expansion"]:
        # Their modules cannot compute this; without an entry they would build another model.
        modules = [("", f"{__name__}.{WithoutExpansion.__name__}")]
    else:
        modules = [("", f"{THEIRS}.MLMTransformer"), ("1_SpladePooling", f"{THEIRS}.SpladePooling")]
        pooling = {**POOLING, "word_embedding_dimension": vocab_size}
        longest = {"max_seq_length": settings["max_length"]}
        _write_json(folder / "sentence_bert_config.json", longest)
        _write_json(folder / "1_SpladePooling" / "config.json", pooling)
        _write_json(folder / PROMPTS, {"model_type": "SparseEncoder"})
    if settings["expansion"] and settings["idf_weights"]:
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
