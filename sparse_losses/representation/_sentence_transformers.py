"""A folder that sentence-transformers' SparseEncoder loads: what it reads, written and read."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["read_modules", "write_modules"]

# Names that its versions 5 and 6 both know.
THEIRS = "sentence_transformers.sparse_encoder.models"
OURS = "sparse_losses.integrations.sentence_transformers"
FOLDER = "2_IdfWeights"


def write_modules(
    folder: Path, *, expansion: bool, vocab_size: int, max_length: int, idf_weights: Tensor | None
) -> None:
    """Says which modules follow one another, and writes those that are not in the model."""
    from safetensors.torch import save_file

    modules: list[tuple[str, str]] = []
    files: dict[str, Any] = {}
    if not expansion:
        # Nothing that they could compute: without this they would make a model of their own of it.
        modules.append(("", f"{OURS}.WithoutExpansion"))
    else:
        modules.append(("", f"{THEIRS}.MLMTransformer"))
        modules.append(("1_SpladePooling", f"{THEIRS}.SpladePooling"))
        files["sentence_bert_config.json"] = {"max_seq_length": max_length}
        files["1_SpladePooling/config.json"] = {
            "pooling_strategy": "max",
            "activation_function": "relu",
            "word_embedding_dimension": vocab_size,
        }
        if not (folder / "config_sentence_transformers.json").exists():  # it may hold their prompts
            files["config_sentence_transformers.json"] = {"model_type": "SparseEncoder"}
    if expansion and idf_weights is not None:
        modules.append((FOLDER, f"{OURS}.IdfWeights"))
        files[f"{FOLDER}/config.json"] = {"vocab_size": vocab_size}
        (folder / FOLDER).mkdir(exist_ok=True)
        save_file({"weight": idf_weights}, folder / FOLDER / "model.safetensors")
    files["modules.json"] = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(modules)
    ]
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_modules(name: str, find: Callable[[str], str | None]) -> Tensor | None:
    """The idf weights of a folder that they saved; ``find`` gives a file's path, or ``None``.

    Raises:
        ValueError: if their modules compute something else than a ``SpladeEncoder``.
    """
    from safetensors.torch import load_file

    idf_weights = None
    modules = find("modules.json")
    for module in json.loads(Path(modules).read_text("utf-8")) if modules else []:
        kind, path = module["type"].rsplit(".", 1)[-1], module["path"]
        if kind == "IdfWeights" and (weights := find(f"{path}/model.safetensors")):
            idf_weights = load_file(weights)["weight"]
        elif kind == "SpladePooling":
            config = find(f"{path}/config.json")
            settings = json.loads(Path(config).read_text("utf-8")) if config else {}
            for key, ours in (("pooling_strategy", "max"), ("activation_function", "relu")):
                if settings.get(key, ours) != ours:
                    raise ValueError(
                        f"expected {name} to have {key} {ours!r}, got {settings[key]!r}"
                    )
        elif kind not in ("MLMTransformer", "Transformer", "WithoutExpansion"):
            raise ValueError(f"expected {name} to be of modules known here, got {module['type']}")
    config = find("config_sentence_transformers.json")
    prompt = config and json.loads(Path(config).read_text("utf-8")).get("default_prompt_name")
    if prompt:
        warnings.warn(
            f"{name} has the default prompt {prompt!r} for sentence-transformers: put it before "
            "the texts yourself",
            stacklevel=3,
        )
    return idf_weights
