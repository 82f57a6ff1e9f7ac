"""Read and write the files of a folder that sentence-transformers' SparseEncoder loads."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["PROMPTS", "read_modules", "write_modules"]

# Versions 5 and 6 of sentence-transformers both know these names.
THEIRS = "sentence_transformers.sparse_encoder.models"
OURS = "sparse_losses.integrations.sentence_transformers"
FOLDER = "2_IdfWeights"
PROMPTS = "config_sentence_transformers.json"  # and the kind of model


def write_modules(
    folder: Path,
    *,
    expansion: bool,
    vocab_size: int,
    max_length: int,
    idf_weights: Tensor | None,
    has_prompts: bool,
) -> None:
    """Write the list of modules, and the files of those that are not part of the model.

    With ``has_prompts`` the file of the prompts is left out: the one that exists stays.
    """
    from safetensors.torch import save_file

    modules: list[tuple[str, str]] = []
    files: dict[str, Any] = {}
    if not expansion:
        # Their modules cannot compute this; without an entry they would build another model.
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
        if not has_prompts:
            files[PROMPTS] = {"model_type": "SparseEncoder"}
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
    """Return the idf weights of a folder; ``find`` returns the path of a file, or ``None``.

    Raises:
        ValueError: if its modules compute anything else than a ``SpladeEncoder`` does.
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
            raise ValueError(f"expected {name} to have known modules only, got {module['type']}")
    config = find(PROMPTS)
    prompt = config and json.loads(Path(config).read_text("utf-8")).get("default_prompt_name")
    if prompt:
        warnings.warn(
            f"{name} has the default prompt {prompt!r} for sentence-transformers: prepend it to "
            "the texts yourself",
            stacklevel=3,
        )
    return idf_weights
