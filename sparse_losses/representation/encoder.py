"""An encoder from texts to sparse vectors: tokenizer, language model and head."""

import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import Activation, weights_of
from sparse_losses._core.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_shapes,
)
from sparse_losses._core.dtensors import full, is_dtensor
from sparse_losses._core.implementations import is_exported
from sparse_losses._core.precision import compute_dtype
from sparse_losses._core.token_ids import as_mask, attended_ids
from sparse_losses.representation._language_model import (
    check_bidirectional,
    evaluating,
    projection_of,
    unwrapped,
)
from sparse_losses.representation.calibration import calibrate_encoder
from sparse_losses.representation.encoding import (
    batches,
    check_finite,
    check_pruning,
    check_texts,
    collected,
    entries_of,
    named,
    pruned,
    spelled,
)
from sparse_losses.representation.folder import Folder, named_damage, write_folder
from sparse_losses.representation.gate import ContextGate
from sparse_losses.representation.head import SpladeHead

SIDES = ("document", "query")
# Arguments of the constructor that are kept as attributes, shown and saved, with their defaults.
SETTINGS: dict[str, Any] = {
    "expansion": True,
    "pool_special_tokens": True,
    "activation": "relu",
    "softcap": None,
    "logit_scale": None,
    "bidirectional": True,
    "prune_ratio": None,
    "max_active_dims": None,
    "document_threshold": None,
    "query_threshold": None,
}


class SpladeEncoder(nn.Module):
    r"""An encoder of texts into vectors over the vocabulary of a language model.

    $$x_j = u_j \log\bigl(1 + \mathrm{ReLU}(g_j \max_s \ell_{sj})\bigr)$$

    $\ell_{sj}$ are the model's logits at the pooled positions $s$, $g$ is the gate and $u$ are the
    idf weights (1 without them). ``SpladeHead`` computes them without storing ``[B, S, V]``.

    With ``expansion=False`` only the tokens of the text have weight. A small network on the hidden
    states gives one logit per position; a token gets the largest logit of its positions. Special
    tokens and all others are 0.

    Args:
        model: A masked or causal language model of ``transformers``, or a ``PeftModel`` around it.
            With ``expansion=False`` only its encoder is kept.
        tokenizer: Its tokenizer. Without a padding token, it pads with its end-of-text token.
        expansion: Whether a text may have weight at tokens that are not in it.
        gate: A ``ContextGate``, or ``True`` for a new one.
        idf_weights: ``[V]``, finite and >= 0; factors on the activations.
        max_length: The largest number of tokens read from a text, special tokens included.
            ``None``: the limit of the tokenizer or the model.
        importance: With ``expansion=False`` the network: ``"mlp"``, two layers, or ``"linear"``,
            one layer as in BGE-M3.
        pool_special_tokens: Whether special tokens of the tokenizer give weights to other tokens.
        activation: ``"relu"`` or ``"log1p_relu"``, as in ``splade_head``; with
            ``expansion=False`` also ``"identity"``: the ReLU alone, as in BGE-M3.
        softcap: The soft cap of the logits. ``None``: that of the model.
        logit_scale: A factor > 0 on the logits, such as $H^{-1/4}$ for decoders. ``None``: 1.
        bidirectional: Whether each position of a causal language model attends to later ones.
        prune_ratio: The default ``prune_ratio`` of ``encode``.
        max_active_dims: The default ``max_active_dims`` of ``encode``.
        document_threshold: A dimension of a document is 0 unless its pooled logit is above it.
        query_threshold: The same for queries.

    Create the encoder after ``resize_token_embeddings``, which replaces the matrix.

    Raises:
        TypeError: for another kind of model, gate or flag.
        ValueError: for a gate, idf weights, a maximum or a tokenizer that do not fit the model.

    Examples:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast
        >>> from sparse_losses import SpladeEncoder
        >>> words = ["[PAD]", "[UNK]", "learned", "sparse", "retrieval"]
        >>> vocabulary = {word: i for i, word in enumerate(words)}
        >>> tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        >>> tokens.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]")
        >>> config = BertConfig(
        ...     vocab_size=5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> encoder = SpladeEncoder(BertForMaskedLM(config), tokenizer)
        >>> encoder.encode(["sparse retrieval", "learned"]).shape
        torch.Size([2, 5])

    References:
        SPLADE v2: Sparse Lexical and Expansion Model for Information Retrieval. The network of
        ``expansion=False`` and the idf weights: the notes of a Korean neural sparse retriever.
    """

    # For a Trainer of transformers, which else takes the loss of a batch with `labels` for a sum.
    accepts_loss_kwargs = False
    idf_weights: Tensor | None
    _special_ids: Tensor

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        expansion: bool = True,
        gate: ContextGate | bool | None = None,
        idf_weights: Tensor | None = None,
        max_length: int | None = None,
        importance: Literal["mlp", "linear"] = "mlp",
        pool_special_tokens: bool = True,
        activation: Literal["relu", "log1p_relu", "identity"] = "relu",
        softcap: float | None = None,
        logit_scale: float | None = None,
        bidirectional: bool = True,
        prune_ratio: float | None = None,
        max_active_dims: int | None = None,
        document_threshold: float | None = None,
        query_threshold: float | None = None,
    ) -> None:
        super().__init__()
        self.expansion, self.activation = expansion, activation
        self.pool_special_tokens, self.bidirectional = pool_special_tokens, bidirectional
        self.softcap, self.logit_scale = softcap, logit_scale
        self.prune_ratio, self.max_active_dims = prune_ratio, max_active_dims
        self.document_threshold, self.query_threshold = document_threshold, query_threshold
        _check_settings(self._settings() | {"importance": importance, "max_length": max_length})
        inner = unwrapped(model)
        if expansion:
            self.head = SpladeHead.from_masked_lm(model, activation=activation)
            self.head.softcap = softcap or self.head.softcap
            self.head.logit_scale *= logit_scale or 1.0
        elif not isinstance(getattr(inner, "base_model", None), nn.Module) or inner is not model:
            raise TypeError(
                "expected `model` to be a model of transformers without adapters, got "
                f"{type(model).__name__}: model.merge_and_unload() merges adapters"
            )
        self.model = model if expansion else model.base_model
        self._is_causal = type(inner).__name__.endswith("ForCausalLM")
        if self._is_causal:
            inner.config.is_causal = not bidirectional
            if bidirectional:
                check_bidirectional(inner)
        self.tokenizer = tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        config = inner.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        largest = max(tokenizer.get_vocab().values(), default=0)
        if largest >= self.vocab_size:
            raise ValueError(
                "expected `tokenizer` to have ids below the model's vocabulary size "
                f"{self.vocab_size}, got the id {largest}"
            )
        like = next(model.parameters())
        if not expansion:
            self.importance = _importance(importance, config.hidden_size).to(like)
        gate = _gate(gate, config.hidden_size, self.vocab_size)
        self.gate = None if gate is None else gate.to(like)
        if idf_weights is not None:
            idf_weights = _checked_idf_weights(idf_weights, self.vocab_size).to(like.device)
        self.register_buffer("idf_weights", idf_weights)
        self.max_length = _max_length(max_length, inner, tokenizer)
        special = torch.tensor(tokenizer.all_special_ids, dtype=torch.int64, device=like.device)
        self.register_buffer("_special_ids", special, persistent=False)

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SETTINGS}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        pool_mask: Tensor | None = None,
        return_logits: bool = False,
        apply_idf: bool | None = None,
        side: Literal["document", "query"] | None = None,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return activations ``[B, V]``, fp32 (fp64 for a model in fp64).

        Args:
            input_ids: ``[B, S]`` integers.
            attention_mask: ``[B, S]`` 0/1; without it all positions are attended.
            pool_mask: ``[B, S]`` 0/1: the attended positions that may give weights, such as those
                after a prompt; without it all, or with ``pool_special_tokens=False`` all but
                special tokens.
            return_logits: Also return the signed pooled logits ``[B, V]`` after the gate and before
                threshold and idf weights. (Without expansion they are 0, without a gradient, at
                tokens that are not in the text.)
            apply_idf: Whether to multiply with the idf weights; ``None``: if there are any.
            side: ``"document"`` or ``"query"``: prune by that side's threshold.
            **inputs: Other inputs of the model, such as ``token_type_ids``.

        Raises:
            TypeError: for texts (``tokenize`` gives their ids) or floating-point numbers.
            ValueError: for ids outside [0, V); for ``apply_idf=True`` without idf weights.
            RuntimeError: if the model's output embeddings were replaced.
        """
        check_shapes(input_ids=(input_ids, "B S"))
        attended_ids("input_ids", input_ids, torch.tensor(True), self.vocab_size, gathered=True)
        check_choice("side", side, (None, *SIDES))
        threshold = None if side is None else getattr(self, f"{side}_threshold")
        if apply_idf is not None:
            check_flag(apply_idf=apply_idf)
        if apply_idf and self.idf_weights is None:
            raise ValueError("expected idf weights for `apply_idf=True`, got None")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden = self._hidden(input_ids, attention_mask, **inputs)
        pooled = self._pooled(input_ids, attention_mask, pool_mask)
        gate = None if self.gate is None else self.gate(hidden, attention_mask)
        if self.expansion:
            needs_logits = return_logits or threshold is not None
            output: Any = self.head(hidden, pooled, gate=gate, return_logits=needs_logits)
            activations, logits = output if needs_logits else (output, output)
            if threshold is not None:
                activations = torch.where(logits <= threshold, 0.0, activations)
        else:
            logits = self._token_logits(hidden, input_ids, pooled)
            logits = logits if gate is None else logits * gate
            activations = weights_of(logits, self.activation, threshold)
        if self.idf_weights is not None and apply_idf is not False:
            activations = activations * self.idf_weights
        return (activations, logits) if return_logits else activations

    def _pooled(
        self, input_ids: Tensor, attention_mask: Tensor, pool_mask: Tensor | None = None
    ) -> Tensor:
        """Return which positions may give weights, bool ``[B, S]``."""
        check_shapes(attention_mask=(attention_mask, "B S"), pool_mask=(pool_mask, "B S, optional"))
        pooled = as_mask("attention_mask", attention_mask)
        if pool_mask is not None:
            pooled = pooled & as_mask("pool_mask", pool_mask)
        if not (self.pool_special_tokens and self.expansion):
            # Not by `isin`, for which ONNX has no operation.
            is_special = (input_ids[..., None] == self._special_ids).any(-1)
            pooled = pooled & ~is_special
        return pooled

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Any) -> Tensor:
        model = self.model
        if self.expansion:
            linear, model = projection_of(model), unwrapped(model).base_model
            is_same = linear is self.head._linear[0] and linear.weight is self.head.weight
            if not is_exported() and (not is_same or len(linear.weight) != self.vocab_size):
                raise RuntimeError(
                    "expected the output embeddings that the encoder was created with, got others: "
                    "create it after resize_token_embeddings and after adding adapters to them"
                )
        if self._is_causal:
            inputs = {"use_cache": False, **inputs}
        hidden: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, **inputs)[0]
        return hidden

    def _position_logits(self, hidden: Tensor) -> Tensor:
        """Return the logit of each position's own token ``[B, S]``, without expansion."""
        logits: Tensor = self.importance(hidden)[:, :, 0].to(compute_dtype(hidden=hidden))
        return logits

    def _token_logits(
        self, hidden: Tensor, input_ids: Tensor, pooled_mask: Tensor, absent: float = 0.0
    ) -> Tensor:
        """Return the logit of every token of the texts, ``absent`` at the others."""
        logits = self._position_logits(hidden)
        # The positions that do not count go to an extra column.
        columns = torch.where(pooled_mask, input_ids, self.vocab_size)
        pooled = logits.new_full((logits.shape[0], self.vocab_size + 1), absent)
        return pooled.scatter_reduce(1, columns, logits, "amax", include_self=False)[:, :-1]

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask`` ``[B, S]``, on the model's device."""
        check_texts(texts)
        batch = self.tokenizer(
            list(texts),
            padding=True,
            padding_side="right",  # models that count positions from the left need text there
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        return {name: batch[name].to(self.device) for name in ("input_ids", "attention_mask")}

    def encode(
        self,
        texts: Sequence[str],
        *,
        side: Literal["document", "query"] = "document",
        output: Literal["csr", "dense", "tokens"] = "csr",
        batch_size: int = 32,
        prune_ratio: float | None = None,
        max_active_dims: int | None = None,
        show_progress: bool | None = None,
    ) -> Any:
        """Return the vectors of texts, in their order, on the CPU, in evaluation mode.

        Args:
            texts: Strings. Longer ones are cut at ``max_length`` tokens.
            side: ``"document"`` or ``"query"``: whose threshold prunes them.
            output: ``"csr"`` or ``"dense"``: a tensor ``[N, V]``, sparse in CSR layout or dense.
                ``"tokens"``: a list of dicts of positive weights by token, the largest first.
            batch_size: Texts per batch; texts of similar length share a batch.
            prune_ratio: The share of a text's largest weight, in [0, 1), below which weights are
                dropped. ``None``: the encoder's ``prune_ratio``.
            max_active_dims: The largest number of weights to keep per text. ``None``: the
                encoder's ``max_active_dims``.
            show_progress: Whether to show a progress bar; ``None``: in a terminal.

        Raises:
            TypeError: for anything but a sequence of strings.
            ValueError: if a text's activations are not finite.
        """
        from tqdm.auto import tqdm

        check_choice("side", side, SIDES)
        check_choice("output", output, ("csr", "dense", "tokens"))
        check_pruning(prune_ratio, max_active_dims)
        prune_ratio = self.prune_ratio if prune_ratio is None else prune_ratio
        max_active_dims = self.max_active_dims if max_active_dims is None else max_active_dims
        parts = batches(texts, batch_size)
        vectors: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(texts)
        disable = None if show_progress is None else not show_progress
        with (
            torch.no_grad(),  # FSDP2 could not train with what inference mode has gathered
            evaluating(self),
            tqdm(total=len(texts), desc="Encoding", unit="text", disable=disable) as progress,
        ):
            for numbers in parts:
                activations = full(self(**self.tokenize([texts[i] for i in numbers]), side=side))
                for i, entries in zip(numbers, entries_of(activations, numbers), strict=True):
                    vectors[i] = pruned(*entries, prune_ratio, max_active_dims)
                progress.update(len(numbers))
        return collected(vectors, output, self.tokenizer, self.vocab_size)

    def encode_document(self, texts: Sequence[str], **options: Any) -> Any:
        """Return the vectors of documents, as ``encode`` does."""
        return self.encode(texts, side="document", **options)

    def encode_query(self, texts: Sequence[str], **options: Any) -> Any:
        """Return the vectors of queries, as ``encode`` does with ``side="query"``."""
        return self.encode(texts, side="query", **options)

    def top_tokens(
        self, texts_or_vectors: Sequence[str] | Tensor, k: int = 20, **options: Any
    ) -> list[dict[str, float]]:
        """Return the ``k`` tokens of largest weight of each text or vector, the largest first.

        Args:
            texts_or_vectors: Strings; or floating vectors ``[N, V]``, dense or sparse, of which
                positive entries count.
            k: The number of tokens, at least 1.
            **options: Options of ``encode``, for texts only.

        Raises:
            TypeError: for anything but strings or floating vectors, or options with vectors.
            ValueError: for vectors of another shape, or that are not finite.
        """
        check_integer("k", k, minimum=1)
        if not isinstance(texts_or_vectors, Tensor):
            top: list[dict[str, float]] = self.encode(
                texts_or_vectors, output="tokens", max_active_dims=k, **options
            )
            return top
        if options:
            raise TypeError(f"expected no options with vectors, got {', '.join(options)}")
        vectors, size = texts_or_vectors.detach(), self.vocab_size
        if not vectors.is_floating_point():
            raise TypeError(f"expected vectors to be floating point, got {vectors.dtype}")
        if vectors.ndim != 2 or vectors.shape[1] != size:
            got = list(vectors.shape)
            raise ValueError(f"expected vectors of shape [N, V] with V = {size}, got {got}")
        entries = entries_of(vectors)
        return [named(self.tokenizer, *pruned(*each, None, k)) for each in entries]

    def token_weights(
        self, texts: Sequence[str], *, batch_size: int = 32
    ) -> list[list[tuple[str, float]]]:
        r"""Return the activation of the strongest token at each position of a text.

        $$w_s = \max_j u_j \log\bigl(1 + \mathrm{ReLU}(g_j \, \ell_{sj})\bigr)$$

        With ``expansion=False`` a position activates its own token only, and special tokens have a
        weight of 0. Arguments and errors are those of ``encode``.

        Returns:
            For each text its tokens in order, with special tokens but without padding, each with
            its weight, a ``float`` >= 0. Computed in evaluation mode.
        """
        parts = batches(texts, batch_size)
        result: list[list[tuple[str, float]]] = [[]] * len(texts)
        with torch.no_grad(), evaluating(self):
            for numbers in parts:
                batch = self.tokenize([texts[i] for i in numbers])
                weights = self._position_weights(**batch)
                check_finite(weights, numbers)
                attended = batch["attention_mask"].bool()
                for i, ids, row, kept in zip(
                    numbers, batch["input_ids"], weights, attended, strict=True
                ):
                    names = spelled(self.tokenizer, ids[kept].tolist())
                    result[i] = list(zip(names, row[kept].tolist(), strict=True))
        return result

    def _position_weights(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the largest activation of every pooled position, ``[B, S]``, 0 at others."""
        hidden = self._hidden(input_ids, attention_mask)
        gate = None if self.gate is None else self.gate(hidden, attention_mask)
        idf = hidden.new_ones(self.vocab_size) if self.idf_weights is None else self.idf_weights
        if self.expansion:
            rows = []
            for i, states in enumerate(hidden):  # each position is a text of one token
                factor = None if gate is None else gate[i].expand(len(states), -1)
                rows.append((self.head(states[:, None], gate=factor) * idf).amax(1))
            weights = torch.stack(rows)
        else:
            logits = self._position_logits(hidden)
            logits = logits if gate is None else logits * gate.gather(1, input_ids)
            weights = weights_of(logits, self.activation) * idf[input_ids]
        return weights.masked_fill(~self._pooled(input_ids, attention_mask), 0.0)

    def calibrate(
        self,
        texts: Sequence[str],
        target_active: float,
        *,
        side: Literal["document", "query"] = "document",
        method: Literal["prune", "shift"] = "prune",
        batch_size: int = 32,
    ) -> float:
        """Make texts keep ``target_active`` dimensions each, on average.

        ``"prune"`` sets the ``side``'s threshold: ``encode_document`` (or ``encode_query``) drops
        the dimensions whose pooled logit is not above it. ``"shift"`` subtracts it from the bias of
        the vocabulary projection (of the importance layer with ``expansion=False``), which lowers
        all weights of both sides, and can add dimensions. A bias in half precision takes few
        values, so it may miss the target by a few percent. Dimensions with an idf weight of 0 are
        not counted.

        Args:
            texts: A sample of the texts to be encoded, which were not trained on.
            target_active: Active dimensions per text, on average, > 0.
            side: ``"document"`` or ``"query"``: whose vectors are pruned.
            method: ``"prune"`` or ``"shift"``.
            batch_size: Texts per batch.

        Returns:
            The threshold of the pooled logits; of ``"shift"`` the number that was subtracted,
            which is negative if fewer than ``target_active`` were active.

        Raises:
            TypeError: for anything but a sequence of strings.
            ValueError: if fewer dimensions are active (with ``"shift"``: can be), a logit is NaN,
                or there is neither a bias to shift nor a config's ``decoder_bias`` to add one.
        """
        check_choice("side", side, SIDES)
        check_choice("method", method, ("prune", "shift"))
        t = calibrate_encoder(self, texts, target_active, method, batch_size)
        if method == "prune":
            setattr(self, f"{side}_threshold", t)
        return t

    def extra_repr(self) -> str:
        """Return the thresholds and other settings that are not the default."""
        settings = self._settings().items()
        return ", ".join(f"{name}={x!r}" for name, x in settings if x != SETTINGS[name])

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        expansion: bool | None = None,
        gate: ContextGate | bool | None = None,
        idf_weights: Tensor | Literal[False] | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> "SpladeEncoder":
        """Load a saved encoder, or a language model, in evaluation mode.

        Args:
            name_or_path: A folder, or a name on the Hugging Face Hub.
            expansion: ``None``: as saved, or ``True`` for a plain language model.
            gate: ``None``: as saved; ``True``: the saved one, or else a new one; ``False``: none.
            idf_weights: ``None``: as saved; ``False``: none.
            max_length: ``None``: as saved, or else the limit of the tokenizer or the model.
            **options: Other arguments of the class, ``None`` or left out: as saved; and options of
                the loaders of ``transformers``, such as ``dtype`` and ``revision``.

        Raises:
            OSError: if there is no such folder, or it is incomplete or damaged.
            ValueError: if sentence-transformers saved it with modules that compute something else.

        Warns:
            UserWarning: if the checkpoint lacks weights: they are random then.
        """
        options |= {"expansion": expansion, "max_length": max_length}
        own = {name: options.pop(name, None) for name in (*SETTINGS, "importance", "max_length")}
        folder = Folder(name_or_path, **options)
        saved, tensors = folder.read()
        own = {name: saved.get(name) if x is None else x for name, x in own.items()}
        settings: dict[str, Any] = {name: x for name, x in own.items() if x is not None}
        has_logits = bool(settings.get("expansion", True))
        model, tokenizer = folder.read_model(has_logits=has_logits, **options)
        with named_damage(folder.name):
            _check_settings(saved)
            if (gate is None or gate is True) and saved.get("gate"):
                config = unwrapped(model).config.get_text_config()
                gate = ContextGate(config.hidden_size, config.vocab_size, **saved["gate"])
                gate.load_state_dict(_part(tensors, "gate"))
        if idf_weights is not False:
            weights = tensors.get("idf_weights") if idf_weights is None else idf_weights
            settings["idf_weights"] = weights
        encoder = cls(model, tokenizer, gate=gate, **settings)
        with named_damage(folder.name):
            if not encoder.expansion and (
                part := _part(tensors, "importance") or folder.read_linear(encoder.importance)
            ):
                encoder.importance.load_state_dict(part)
        return encoder.eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write everything ``from_pretrained`` reads, as safetensors and JSON.

        ``transformers`` and sentence-transformers load the folder, too. Of a ``PeftModel`` the
        adapters are saved as PEFT does, with the path or name of the base model. All files are
        written into a temporary folder first, so that a full disk leaves the old ones unchanged.
        README.md is a model card; one without its last line is yours, and stays.

        Args:
            folder: Made if it does not exist; files of other names stay.

        Raises:
            TypeError: for parameters that are sharded over ranks.
            ValueError: for adapters of a base model without a path, or several of them.
        """
        if any(is_dtensor(parameter) for parameter in self.parameters()):
            raise TypeError(
                "expected whole parameters, got DTensors: save by torch.distributed.checkpoint, "
                "and load that in one process"
            )
        settings = self._settings() | {
            "max_length": self.max_length,
            "idf_weights": self.idf_weights is not None,
            "gate": None if self.gate is None else self.gate.settings,
        }
        if not self.expansion:
            settings["importance"] = "linear" if isinstance(self.importance, nn.Linear) else "mlp"
        tensors = {
            name: tensor.contiguous()
            for name, tensor in self.state_dict().items()
            if name.split(".")[0] in ("gate", "importance", "idf_weights")
        }
        write_folder(folder, self.model, self.tokenizer, settings, tensors)


def _check_settings(settings: dict[str, Any]) -> None:
    settings = {"importance": "mlp", "max_length": None, **SETTINGS, **settings}
    expansion, max_length = settings["expansion"], settings["max_length"]
    flags = ("expansion", "pool_special_tokens", "bidirectional")
    check_flag(**{name: settings[name] for name in flags})
    activations = get_args(Activation) if expansion else (*get_args(Activation), "identity")
    check_choice("activation", settings["activation"], activations)
    check_choice("importance", settings["importance"], ("mlp",) if expansion else ("mlp", "linear"))
    for name in ("softcap", "logit_scale"):
        if settings[name] is not None:
            check_number(name, settings[name], minimum=0.0, exclusive=True)
            if not expansion:
                raise ValueError(f"expected no `{name}` with expansion=False")
    for name in (f"{side}_threshold" for side in SIDES):
        if settings[name] is not None:
            check_number(name, settings[name], minimum=0.0)
    check_pruning(settings["prune_ratio"], settings["max_active_dims"])
    if max_length is not None:
        check_integer("max_length", max_length, minimum=1)


def _importance(kind: str, hidden_size: int) -> nn.Module:
    last = nn.Linear(hidden_size, 1)
    # All tokens start active: behind the activation's ReLU an inactive one has no gradient.
    nn.init.ones_(last.bias)
    if kind == "linear":
        return last
    return nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Dropout(0.1), last)


def _max_length(max_length: int | None, model: Any, tokenizer: Any) -> int:
    """Return the largest number of tokens, by default the limit of model and tokenizer."""
    positions = [
        # RoBERTa and its descendants number positions from the padding index on.
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    if max_length is None:
        known = getattr(model.config, "max_position_embeddings", None)
        # The limit of a tokenizer is 1e30 if it is unknown.
        return int(min([*positions, *([known] if known else []), tokenizer.model_max_length]))
    special = tokenizer.num_special_tokens_to_add(pair=False)
    check_integer("max_length", max_length, minimum=special + 1)
    if positions and max_length > min(positions):
        raise ValueError(
            f"expected `max_length` of at most the model's {min(positions)} positions, got "
            f"{max_length}"
        )
    return int(max_length)


def _gate(gate: object, hidden_size: int, vocab_size: int) -> ContextGate | None:
    if gate is None or gate is False:
        return None
    if gate is True:
        heads = next(n for n in (4, 2, 1) if hidden_size % n == 0)
        return ContextGate(hidden_size, vocab_size, num_heads=heads)
    if not isinstance(gate, ContextGate):
        raise TypeError(f"expected `gate` to be a ContextGate, True, False or None, got {gate!r}")
    expected, sizes = (hidden_size, vocab_size), (gate.hidden_size, gate.vocab_size)
    if sizes != expected:
        raise ValueError(f"expected `gate` of hidden and vocab_size {expected}, got {sizes}")
    return gate


def _checked_idf_weights(idf_weights: Tensor, vocab_size: int) -> Tensor:
    check_shapes(idf_weights=(idf_weights, "V"))
    copied = idf_weights.detach().clone(memory_format=torch.contiguous_format).float()
    if len(copied) != vocab_size or not (copied.isfinite() & (copied >= 0)).all():
        raise ValueError(f"expected `idf_weights` to be V = {vocab_size} finite numbers >= 0")
    return copied


def _part(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    start = f"{name}."
    return {key.removeprefix(start): x for key, x in tensors.items() if key.startswith(start)}
