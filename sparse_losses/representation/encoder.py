"""An encoder from texts to sparse vectors: tokenizer, language model and head."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import pruned_weights, weights_of
from sparse_losses._core.checks import check_choice, check_integer, check_shapes
from sparse_losses._core.implementations import is_exported
from sparse_losses._core.token_ids import as_mask, attended_ids
from sparse_losses.representation import encoding, parts
from sparse_losses.representation._language_model import (
    evaluating,
    saves_weights,
    set_attention,
    unwrapped,
    without_cache,
)
from sparse_losses.representation.dense import set_identity_head
from sparse_losses.representation.folder import LINEAR, Folder, named_damage, write_folder
from sparse_losses.representation.gate import ContextGate
from sparse_losses.representation.head import SpladeHead
from sparse_losses.representation.parts import SETTINGS, SIDES
from sparse_losses.representation.scale import multiply, scaled_parameters

if TYPE_CHECKING:
    from sparse_losses.sparsity.calibration import Calibration

OPTIONS = (*SETTINGS, "importance", "max_length")  # of the constructor, which a folder keeps


class SpladeEncoder(nn.Module):
    r"""An encoder of texts into vectors over the vocabulary of a language model.

    $$x_j = u_j \log\bigl(1 + \mathrm{ReLU}(g_j \max_s \ell_{sj})\bigr)$$

    $\ell_{sj}$ are the model's logits at the pooled positions $s$, $g$ is the gate and $u$ are the
    idf weights (1 without them). ``SpladeHead`` computes them without storing ``[B, S, V]``.

    With ``expansion=False`` only the tokens of the text have weight, but for special tokens. A
    small network on the hidden states gives one logit per position; a token gets the largest logit
    of its positions.

    Args:
        model: A masked or causal language model of ``transformers``, or a ``PeftModel`` around it,
            after ``resize_token_embeddings``. With ``expansion=False`` only its encoder is kept.
        tokenizer: Its tokenizer. Without a padding token, it pads with its end-of-text token.
        expansion: Whether a text may have weight at tokens that are not in it.
        gate: A ``ContextGate``, or ``True`` for a new one.
        idf_weights: ``[V]``, finite and >= 0; factors on the activations.
        max_length: The largest number of tokens of a text, with special ones. ``None``: the limit
            of tokenizer and model.
        importance: The network of ``expansion=False``: ``"mlp"``, two layers, or ``"linear"``, one
            as in BGE-M3.
        pool_special_tokens: Whether special tokens of the tokenizer give weights to other tokens.
        activation: As in ``splade_head``; with ``expansion=False`` also ``"identity"``: the ReLU
            alone, as in BGE-M3.
        softcap: The soft cap of the logits. ``None``: that of the model.
        logit_scale: A factor > 0 on the logits, for heads with a large norm, as of decoders and
            ModernBERT. ``"auto"`` measures it as in ``SpladeHead``, on the first batch in training
            mode. A normalisation before the projection, as masked models have, is multiplied by it;
            it is then ``None``, like 1.
        bidirectional: Whether each position of a causal language model attends to later ones.
        prune_ratio: The default ``prune_ratio`` of ``encode``.
        max_active_dims: The default ``max_active_dims`` of ``encode``.
        budgets: Thresholds, which ``calibrate`` sets: for each number of a document's active
            dimensions those of documents and of queries, or ``None``. A dimension is 0 unless its
            pooled logit is above. The largest number is the default.
        keep_at_least: How many of its largest dimensions a text keeps whatever the threshold is.
        prompts: What ``encode`` puts before texts: a dict with ``"document"`` and ``"query"``.

    Raises:
        TypeError: for another kind of model or gate.
        ValueError: for a gate, idf weights, a maximum or a tokenizer that do not fit the model.

    Examples:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast
        >>> from sparse_losses import SpladeEncoder
        >>> words = {"[PAD]": 0, "[UNK]": 1, "learned": 2, "sparse": 3, "retrieval": 4}
        >>> tokens = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]")
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> encoder = SpladeEncoder(BertForMaskedLM(BertConfig(vocab_size=5, **sizes)), tokenizer)
        >>> encoder.encode(["sparse", "retrieval"]).shape
        torch.Size([2, 5])

    References:
        SPLADE v2: Sparse Lexical and Expansion Model for Information Retrieval. ``expansion=False``
        and idf weights: the notes of a Korean neural sparse retriever.
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
        idf_weights: Tensor | Literal[False] | None = None,
        max_length: int | None = None,
        importance: Literal["mlp", "linear"] = "mlp",
        pool_special_tokens: bool = True,
        activation: Literal["relu", "log1p_relu", "identity"] = "relu",
        softcap: float | None = None,
        logit_scale: float | Literal["auto"] | None = None,
        bidirectional: bool = True,
        prune_ratio: float | None = None,
        max_active_dims: int | None = None,
        budgets: Mapping[float, tuple[float | None, float | None]] | None = None,
        keep_at_least: int = 1,
        prompts: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.expansion, self.activation = expansion, activation
        self.pool_special_tokens, self.bidirectional = pool_special_tokens, bidirectional
        self.softcap, self.logit_scale = softcap, logit_scale
        self.prune_ratio, self.max_active_dims = prune_ratio, max_active_dims
        self.budgets, self.keep_at_least, self.prompts = budgets or {}, keep_at_least, prompts
        parts.check({name: getattr(self, name) for name in SETTINGS}, importance)
        inner, model = unwrapped(model), getattr(model, "_orig_mod", model)
        if expansion:
            self.head = SpladeHead.from_masked_lm(model, activation=activation)
            self.head.softcap = softcap or self.head.softcap
            folds = saves_weights(model)
            if logit_scale == "auto":
                self.head._await_scale(fold=folds)
            elif logit_scale and folds and (scaled := scaled_parameters(self.head)):
                multiply(scaled, logit_scale)
                self.logit_scale = None
            else:
                self.head.logit_scale *= logit_scale or 1.0
        elif not isinstance(getattr(inner, "base_model", None), nn.Module) or inner is not model:
            what = "expected `model` to be a model of transformers without adapters"
            kind = type(model).__name__
            raise TypeError(f"{what}, got {kind}: model.merge_and_unload() merges adapters")
        self.model, self.tokenizer = model if expansion else model.base_model, tokenizer
        set_attention(inner, bidirectional=bidirectional)
        self._inputs = without_cache(inner.base_model)
        config, like = inner.config.get_text_config(), next(model.parameters())
        self.vocab_size = len(self.head.weight) if expansion else int(config.vocab_size)
        parts.check_tokenizer(tokenizer, self.vocab_size)
        self.max_length = parts.max_length(max_length, inner, tokenizer)
        with like.device:
            if not expansion:
                self.importance = parts.importance(importance, config.hidden_size).to(like)
            gate = parts.gate(gate, config.hidden_size, self.vocab_size)
            self.gate = None if gate is None else gate.to(like)
            self.register_buffer("idf_weights", parts.idf_weights(idf_weights, self.vocab_size))
            special = torch.tensor(tokenizer.all_special_ids, dtype=torch.int64)
            self.register_buffer("_special_ids", special, persistent=False)

    def _settings(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in SETTINGS}
        if self.logit_scale == "auto" and not self.head.awaits_scale:
            factor = float(cast(Tensor, self.head.measured_scale))
            settings["logit_scale"] = None if factor == 1.0 else factor  # it is in the weights
        return settings

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
        active: float | None = None,
        layout: torch.layout = torch.strided,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return activations ``[B, V]``, fp32 (fp64 for a model in fp64).

        Args:
            input_ids: ``[B, S]`` integers; ``tokenize`` gives them.
            attention_mask: ``[B, S]`` 0/1; without it all positions are attended.
            pool_mask: ``[B, S]`` 0/1: the attended positions that may give weights, such as those
                after a prompt.
            return_logits: Also return the signed pooled logits ``[B, V]`` after the gate and before
                threshold and idf weights; without expansion they are 0 at other tokens.
            apply_idf: Whether to multiply with the idf weights; ``None``: if there are any.
            side: ``"document"`` or ``"query"``: prune by that side's threshold.
            active: One of the numbers in ``budgets``, whose threshold is used.
            layout: ``torch.sparse_csr``, as in ``splade_head``: with expansion, without idf weights
                and threshold.
            **inputs: Other inputs of the model, such as ``token_type_ids``.

        Raises:
            ValueError: for ids outside [0, V), and options that do not go together.
            RuntimeError: if the model's output embeddings were replaced.
        """
        threshold = self._threshold(side, active)
        idf = None if apply_idf is False else self.idf_weights
        if apply_idf and idf is None:
            raise ValueError("expected idf weights for `apply_idf=True`, got None")
        is_plain = self.expansion and idf is None and threshold is None
        if layout != torch.strided and not is_plain:
            raise ValueError(f"expected expansion, no idf weights and no threshold for {layout}")
        hidden, pooled, gate = self._read(input_ids, attention_mask, pool_mask, **inputs)
        options = {"return_logits": return_logits, "layout": layout}
        activations, logits = self._activations(hidden, input_ids, pooled, gate, **options)
        if threshold is not None:
            counted = None if self.idf_weights is None else self.idf_weights > 0
            how: Any = {"activation": self.activation, "counted": counted}
            activations = pruned_weights(activations, threshold, self.keep_at_least, **how)
        if idf is not None:
            activations = activations * idf
        return (activations, logits) if return_logits else activations

    def _threshold(self, side: str | None, active: float | None) -> float | None:
        check_choice("side", side, (None, *SIDES))
        check_choice("active", active, (None, *self.budgets))
        if side is None or not self.budgets:
            return None
        return self.budgets[active or max(self.budgets)][SIDES.index(side)]

    def _read(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pool_mask: Tensor | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states, the positions that may give weights, bool, and the gate."""
        masks = {"attention_mask": attention_mask, "pool_mask": pool_mask}
        optional = {name: (mask, "B S, optional") for name, mask in masks.items()}
        check_shapes(input_ids=(input_ids, "B S"), **optional)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        everywhere = torch.tensor(True, device=input_ids.device)
        attended_ids("input_ids", input_ids, everywhere, self.vocab_size, gathered=True)
        pooled = as_mask("attention_mask", attention_mask)
        if pool_mask is not None:
            pooled = pooled & as_mask("pool_mask", pool_mask)
        if not (self.pool_special_tokens and self.expansion):
            # Not by `isin`, for which ONNX has no operation.
            pooled = pooled & ~(input_ids[..., None] == self._special_ids).any(-1)
        model = self.model
        if self.expansion:
            if not is_exported():
                self.head.follow(model, "create the encoder")
            model = unwrapped(model).base_model
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **inputs}
        hidden = model(**{**self._inputs, **inputs})[0]
        return hidden, pooled, None if self.gate is None else self.gate(hidden, attention_mask)

    def _activations(
        self, hidden: Tensor, ids: Tensor, pooled: Tensor, gate: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return activations, and the pooled logits if they are asked for."""
        if self.expansion:
            output: Any = self.head(hidden, pooled, gate=gate, **options)
            return output if isinstance(output, tuple) else (output, output)
        logits = parts.token_logits(self.importance, hidden, ids, pooled, self.vocab_size)
        logits = logits if gate is None else logits * gate
        return weights_of(logits, self.activation), logits

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Recompute the model's layers in the backward pass; a Trainer of transformers asks."""
        self.model.activation_checkpointing_enable(**options)

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """Do so in a transformers that has this name for it."""
        self.model.gradient_checkpointing_enable(**options)

    def tokenize(
        self, texts: Sequence[str], *, side: Literal["document", "query"] | None = None
    ) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask`` ``[B, S]``, on the model's device.

        With a ``side`` its prompt is put before the texts.
        """
        # Models that count positions from the left need text there.
        options = {"padding_side": "right", "max_length": self.max_length}
        options |= {"truncation": self.max_length is not None}
        prompt = (self.prompts or {}).get(side or "", "")
        return encoding.token_ids(self.tokenizer, texts, self.device, prompt, **options)

    def encode(
        self,
        texts: Sequence[str],
        *,
        side: Literal["document", "query"] = "document",
        output: Literal["csr", "dense", "tokens"] = "csr",
        batch_size: int = 32,
        active: float | None = None,
        prune_ratio: float | None = None,
        max_active_dims: int | None = None,
        show_progress: bool | None = None,
    ) -> Any:
        """Return the vectors of texts, in their order, on the CPU, in evaluation mode.

        Args:
            texts: Strings. Longer ones are cut at ``max_length`` tokens.
            side: ``"document"`` or ``"query"``: whose threshold prunes them.
            output: ``"csr"`` or ``"dense"``: a tensor ``[N, V]`` of this layout. ``"tokens"``: a
                list of dicts of positive weights by token, the largest first.
            batch_size: Texts per batch; texts of similar length share a batch.
            active: One of the numbers in ``budgets``, whose threshold is used.
            prune_ratio: The share of a text's largest weight, in [0, 1), below which weights are
                dropped. ``None``: the encoder's.
            max_active_dims: How many weights a text keeps at most. ``None``: the encoder's.
            show_progress: Whether to show a progress bar; ``None``: in a terminal.

        Raises:
            TypeError: for anything but a sequence of strings.
            ValueError: if a text's activations are not finite.
        """
        check_choice("output", output, ("csr", "dense", "tokens"))
        encoding.check_pruning(prune_ratio, max_active_dims)
        prune_ratio = self.prune_ratio if prune_ratio is None else prune_ratio
        max_active_dims = self.max_active_dims if max_active_dims is None else max_active_dims
        entries, pruning = [], (prune_ratio, max_active_dims)
        with torch.no_grad(), evaluating(self):  # FSDP2 could not train with inference tensors
            for numbers in encoding.batches(texts, batch_size, show_progress):
                batch = self.tokenize([texts[i] for i in numbers], side=side)
                vectors: Any = self(**batch, side=side, active=active)
                entries.append(encoding.entries_of(vectors, numbers, *pruning))
        return encoding.collected(entries, (len(texts), self.vocab_size), output, self.tokenizer)

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
            texts_or_vectors: Strings; or finite vectors ``[N, V]``, dense or sparse, of which
                positive entries count.
            k: The number of tokens, at least 1.
            **options: Options of ``encode``, for texts only.
        """
        check_integer("k", k, minimum=1)
        if not isinstance(vectors := texts_or_vectors, Tensor):
            options |= {"output": "tokens", "max_active_dims": k}
            return cast(list[dict[str, float]], self.encode(vectors, **options))
        if options:
            raise TypeError(f"expected no options with vectors, got {', '.join(options)}")
        if vectors.shape[1:] != (self.vocab_size,):
            expected, got = f"[N, V] with V = {self.vocab_size}", list(vectors.shape)
            raise ValueError(f"expected vectors {expected}, got {got}")
        entries = encoding.entries_of(vectors, range(len(vectors)), None, k)
        named = encoding.collected([entries], vectors.shape, "tokens", self.tokenizer)
        return cast(list[dict[str, float]], named)

    def token_weights(self, texts: Sequence[str]) -> list[list[tuple[str, float]]]:
        r"""Return the activation of the strongest token at each position of a text.

        $$w_s = \max_j u_j \log\bigl(1 + \mathrm{ReLU}(g_j \, \ell_{sj})\bigr)$$

        With ``expansion=False`` a position activates its own token only, and special tokens have a
        weight of 0.

        Returns:
            For each text its tokens in order, with special tokens, each with its weight >= 0.
        """
        encoding.check_texts(texts)
        found = []
        with torch.no_grad(), evaluating(self):
            for batch in (self.tokenize([text]) for text in texts):
                hidden, pooled, gate = self._read(**batch)
                # Each position is a text of one token.
                one, ids, only = (x[0][:, None] for x in (hidden, batch["input_ids"], pooled))
                gate = None if gate is None else gate.expand(len(ids), -1)
                weights = self._activations(one, ids, only, gate)[0]
                if self.idf_weights is not None:
                    weights = weights * self.idf_weights
                names = encoding.spelled(self.tokenizer, ids[:, 0].tolist())
                found.append(list(zip(names, weights.amax(1).tolist(), strict=True)))
        return found

    def calibrate(self, documents: Sequence[str], *targets: Any, **options: Any) -> "Calibration":
        """Do what ``sparse_losses.calibrate`` does with this encoder; see there."""
        from sparse_losses.sparsity.calibration import calibrate

        return calibrate(self, documents, *targets, **options)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        gate: ContextGate | bool | None = None,
        idf_weights: Tensor | Literal[False] | None = None,
        **options: Any,
    ) -> "SpladeEncoder":
        """Load a saved encoder, or a language model, in evaluation mode.

        Args:
            name_or_path: A folder, or a name on the Hugging Face Hub.
            gate: ``True``: the saved one, or else a new one; ``False``: none; ``None``: as saved.
            idf_weights: ``False``: none; ``None``: as saved.
            **options: Other arguments of the class, left out: as saved; and options of the loaders
                of ``transformers``, such as ``dtype`` and ``revision``.

        Raises:
            OSError: if there is no such folder, or it is incomplete or damaged.
            ValueError: if sentence-transformers saved it with modules that compute something else.

        Warns:
            UserWarning: if the checkpoint lacks weights: they are random then.
        """
        own = {name: x for name in OPTIONS if (x := options.pop(name, None)) is not None}
        folder = Folder(name_or_path, **options)
        settings, tensors = folder.read()
        sizes, settings = settings.pop("gate", None), settings | own
        model, tokenizer = folder.read_model(has_logits=settings.get("expansion", True), **options)
        with named_damage(folder.name), torch.device("cpu"):
            if gate in (None, True) and sizes:
                config = unwrapped(model).config.get_text_config()
                gate = ContextGate(config.hidden_size, config.vocab_size, **sizes)
            else:
                tensors = {key: x for key, x in tensors.items() if not key.startswith("gate.")}
        saved = tensors.pop("idf_weights", None)
        weights = saved if idf_weights is None else idf_weights
        encoder = cls(model, tokenizer, gate=gate, idf_weights=weights, **settings)
        with named_damage(folder.name):
            if settings.get("importance") == "linear" and (path := folder.find(LINEAR)):
                state = torch.load(path, map_location="cpu", weights_only=True)
                tensors = {f"importance.{name}": x for name, x in state.items()} | tensors
            encoder.load_state_dict(tensors, strict=False)
        return encoder.eval()

    @classmethod
    def from_dense(
        cls,
        name_or_path: str | os.PathLike[str],
        texts: Sequence[str],
        *,
        start_active: float = 256,
        **options: Any,
    ) -> "SpladeEncoder":
        """Make a SPLADE model of a dense encoder, such as a folder of sentence-transformers.

        Its head starts as the identity: logits are dot products of hidden states and word
        embeddings, to which the projection is tied. The bias takes off each token's mean over the
        texts, if they are several, and is shifted so that a text starts with ``start_active``
        dimensions. Pooling of the folder is left out. Train the model, then prune it.

        Args:
            name_or_path: A folder, or a name on the Hugging Face Hub.
            texts: Some hundred texts like those to be encoded, on which the start is measured.
            start_active: Active dimensions of a text at the start.
            **options: As in ``from_pretrained``, without ``expansion`` and ``logit_scale``.

        Raises:
            ValueError: if the checkpoint has a trained head, which ``from_pretrained`` loads.
            TypeError: if its architecture has no masked language model, or one with another head,
                such as ALBERT's, whose word embeddings have another width.
        """
        if given := ", ".join({"expansion", "importance", "logit_scale"} & options.keys()):
            raise TypeError(f"expected no {given} for a dense encoder")
        encoding.check_texts(texts)
        if not texts:
            raise ValueError("expected some `texts` to measure the start on, got none")
        names = options.keys() & {*OPTIONS, "gate", "idf_weights"}
        own = {name: options.pop(name) for name in names}
        folder = Folder(name_or_path, is_dense=True, **options)
        saved, _ = folder.read()
        model, tokenizer = folder.read_model(has_logits=True, **options)
        encoder = cls(model, tokenizer, **saved | own).eval()
        set_identity_head(model, **encoder.tokenize(texts[:64]))
        if len(set(texts)) > 1:  # of one text the mean is the text itself
            total = torch.zeros_like(encoder.head.weight[:, 0], dtype=torch.float32)
            with torch.no_grad():
                for numbers in encoding.batches(texts, 32):
                    batch = encoder.tokenize([texts[i] for i in numbers], side="document")
                    total += encoder(**batch, return_logits=True)[1].sum(0)
                cast(Tensor, encoder.head.bias).sub_(total / len(texts))
        encoder.calibrate(texts, start_active, method="shift", verbose=False)
        return encoder

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write everything ``from_pretrained`` reads, as safetensors and JSON.

        ``transformers`` and sentence-transformers load the folder, too; the latter prunes by
        ``max_active_dims`` alone. Of a ``PeftModel`` the adapters are saved, with the name of the
        base model. Until the last file is written the folder does not load. Other files stay.

        Raises:
            TypeError: for parameters that are sharded over ranks.
            ValueError: for adapters of a base model without a path, or several of them.
        """
        if any(hasattr(parameter, "full_tensor") for parameter in self.parameters()):
            how = "save by torch.distributed.checkpoint, and load that in one process"
            raise TypeError(f"expected whole parameters, got DTensors: {how}")
        settings = self._settings() | {"max_length": self.max_length}
        if self.gate is not None:
            settings["gate"] = self.gate.settings
        if not self.expansion and isinstance(self.importance, nn.Linear):
            settings["importance"] = "linear"
        own, state = ("gate", "importance", "idf_weights"), self.state_dict().items()
        tensors = {key: x.contiguous() for key, x in state if key.split(".")[0] in own}
        write_folder(folder, self.model, self.tokenizer, settings, tensors)
