"""An encoder from texts to sparse vectors: tokenizer, masked language model and head."""

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from sparse_losses._core.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_shapes,
)
from sparse_losses._core.extras import from_extra
from sparse_losses._core.files import replaced_files
from sparse_losses._core.precision import compute_dtype
from sparse_losses._core.token_ids import as_mask
from sparse_losses.fast.sparse import csr
from sparse_losses.representation._masked_lm import evaluating
from sparse_losses.representation._sentence_transformers import PROMPTS, read_modules, write_modules
from sparse_losses.representation.calibration import threshold, threshold_of_rounded
from sparse_losses.representation.gate import ContextGate
from sparse_losses.representation.head import SpladeHead

__all__ = ["SpladeEncoder"]

Output = Literal["csr", "dense", "tokens", "elasticsearch", "qdrant", "vespa"]
OUTPUTS = ("csr", "dense", "tokens", "elasticsearch", "qdrant", "vespa")
CELLS = 1 << 24  # activations of positions computed at once: 64 MB in fp32

# Our files in the folder of the masked language model, and their version.
SETTINGS, TENSORS, FORMAT = "sparse_losses.json", "sparse_losses.safetensors", 1
# Options that the loaders of models, tokenizers and files all take.
HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class SpladeEncoder(nn.Module):
    r"""An encoder of texts into vectors over the vocabulary of a masked language model.

    $$x_j = u_j \log\bigl(1 + \mathrm{ReLU}(g_j \max_s \ell_{sj})\bigr)$$

    $\ell_{sj}$ are the model's logits at the attended positions $s$, $g$ is the gate and $u$ are
    the idf weights (1 without them). ``SpladeHead`` computes them without storing ``[B, S, V]``.

    With ``expansion=False`` only the tokens of the text have weight. A small network on the hidden
    states gives one logit per position; a token gets the largest logit of its positions. Special
    tokens and all others are 0.

    Args:
        model: A masked language model of ``transformers``, on any device, in any precision. With
            ``expansion=False`` only its encoder is kept.
        tokenizer: Its tokenizer.
        expansion: Whether a text may have weight at tokens that are not in it.
        gate: A ``ContextGate``, or ``True`` for a new one.
        idf_weights: ``[V]``, finite and >= 0; factors on the activations.
        max_length: The largest number of tokens read from a text, special tokens included.
            ``None``: the limit of the tokenizer or the model.

    Create the encoder after ``resize_token_embeddings``, which replaces the matrix.

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
        ``expansion=False`` and the idf weights are those of the notes of a Korean neural sparse
        retriever.
    """

    idf_weights: Tensor | None

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        expansion: bool = True,
        gate: ContextGate | bool | None = None,
        idf_weights: Tensor | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        check_flag(expansion=expansion)
        if expansion:
            self.head = SpladeHead.from_masked_lm(model)
        elif not isinstance(getattr(model, "base_model", None), nn.Module):
            raise TypeError(
                f"expected `model` to be a model of transformers, got {type(model).__name__}"
            )
        config = model.config
        self.model = model if expansion else model.base_model
        self.tokenizer = tokenizer
        self.expansion, self.vocab_size = expansion, int(config.vocab_size)
        largest = max(tokenizer.get_vocab().values(), default=0)
        if largest >= self.vocab_size:
            raise ValueError(
                "expected `tokenizer` to have ids below the model's vocabulary size "
                f"{self.vocab_size}, got the id {largest}"
            )

        like = next(model.parameters())
        if not expansion:
            self.importance = _importance(config.hidden_size).to(like)
        if gate is True:
            heads = next(n for n in (4, 2, 1) if config.hidden_size % n == 0)
            gate = ContextGate(config.hidden_size, self.vocab_size, num_heads=heads)
        if gate is not None and gate is not False and not isinstance(gate, ContextGate):
            raise TypeError(
                f"expected `gate` to be a ContextGate, True, False or None, got {gate!r}"
            )
        self.gate = gate.to(like) if isinstance(gate, ContextGate) else None
        if self.gate is not None:
            ours, theirs = (config.hidden_size, self.vocab_size), self.gate
            if (theirs.hidden_size, theirs.vocab_size) != ours:
                raise ValueError(
                    f"expected `gate` of hidden_size {ours[0]} and vocab_size {ours[1]}, got "
                    f"{theirs.hidden_size} and {theirs.vocab_size}"
                )
        self._set_idf_weights(idf_weights)

        self.max_length = _max_length(max_length, model, tokenizer)
        special = torch.tensor(tokenizer.all_special_ids, dtype=torch.int64, device=like.device)
        self.register_buffer("_special_ids", special, persistent=False)
        self._special_ids: Tensor
        self._names: dict[int, str] = {}

    def _set_idf_weights(self, idf_weights: Tensor | None) -> None:
        if idf_weights is not None:
            check_shapes(idf_weights=(idf_weights, "V"))
            if idf_weights.shape[0] != self.vocab_size:
                raise ValueError(
                    f"expected `idf_weights` of the vocabulary's size {self.vocab_size}, got "
                    f"{idf_weights.shape[0]}"
                )
            idf_weights = idf_weights.detach().clone(memory_format=torch.contiguous_format).float()
            if not (idf_weights.isfinite() & (idf_weights >= 0)).all():
                raise ValueError("expected `idf_weights` to be finite and >= 0")
            idf_weights = idf_weights.to(self.device)
        self.register_buffer("idf_weights", idf_weights)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    @overload
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = ...,
        *,
        return_logits: Literal[False] = ...,
        apply_idf: bool | None = ...,
        **inputs: Any,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = ...,
        *,
        return_logits: Literal[True],
        apply_idf: bool | None = ...,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        return_logits: bool = False,
        apply_idf: bool | None = None,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return activations ``[B, V]``, fp32 (fp64 for a model in fp64).

        Args:
            input_ids: ``[B, S]`` integers.
            attention_mask: ``[B, S]`` 0/1; without it all positions are attended.
            return_logits: Also return the signed pooled logits ``[B, V]`` after the gate and before
                the idf weights, for losses that must reach inactive tokens. (Without expansion they
                are 0, and have no gradient, at tokens that are not in the text.)
            apply_idf: Whether to multiply with the idf weights in this call; ``None``: if the
                encoder has idf weights.
            **inputs: Other inputs of the model, such as ``token_type_ids``.

        Raises:
            TypeError: for texts instead of ids.
            ValueError: for ``apply_idf=True`` without idf weights.
            RuntimeError: if the model's output embeddings were replaced.
        """
        if not isinstance(input_ids, Tensor):
            raise TypeError(
                f"expected `input_ids` to be a torch.Tensor, got {type(input_ids).__name__}: "
                "encoder(**encoder.tokenize(texts)), or encoder.encode(texts)"
            )
        if apply_idf is None:
            apply_idf = self.idf_weights is not None
        check_flag(apply_idf=apply_idf)
        if apply_idf and self.idf_weights is None:
            raise ValueError("expected idf weights for `apply_idf=True`, got None")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden, gate = self._states(input_ids, attention_mask, **inputs)
        logits: Tensor | None = None
        activations: Tensor
        if not self.expansion:
            logits = self._token_logits(hidden, input_ids, attention_mask)
            if gate is not None:
                logits = logits * gate
            activations = logits.relu().log1p()
        elif return_logits:
            activations, logits = self.head(hidden, attention_mask, gate=gate, return_logits=True)
        else:
            activations = self.head(hidden, attention_mask, gate=gate)
        if apply_idf and self.idf_weights is not None:
            activations = activations * self.idf_weights
        return activations if not return_logits or logits is None else (activations, logits)

    def _token_logits(
        self, hidden: Tensor, input_ids: Tensor, attention_mask: Tensor, absent: float = 0.0
    ) -> Tensor:
        """Return the logit of every token of the texts, ``absent`` at the others."""
        logit: Tensor = self.importance(hidden)[:, :, 0].to(compute_dtype(hidden=hidden))
        kept = as_mask("attention_mask", attention_mask)
        kept = kept & ~torch.isin(input_ids, self._special_ids)
        # The positions that are not kept go to an extra column.
        columns = torch.where(kept, input_ids, self.vocab_size)
        pooled = logit.new_full((len(logit), self.vocab_size + 1), absent)
        return pooled.scatter_reduce(1, columns, logit, "amax", include_self=False)[:, :-1]

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask`` ``[B, S]`` of texts, on the model's device.

        Raises:
            TypeError: for anything but a sequence of strings.
        """
        _check_texts(texts)
        batch = self.tokenizer(
            list(texts),
            padding=True,
            padding_side="right",  # models that count positions from the left need text there
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        return {name: batch[name].to(self.device) for name in ("input_ids", "attention_mask")}

    def _batches(
        self, texts: Sequence[str], size: int
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield tokenized batches of texts of similar length, with the numbers of the texts."""
        # The longest texts come first, so that an out-of-memory error occurs at once.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for first in range(0, len(texts), size):
            numbers = order[first : first + size]
            yield numbers, self.tokenize([texts[i] for i in numbers])

    @overload
    def encode(
        self,
        texts: Sequence[str],
        *,
        output: Literal["csr", "dense"] = ...,
        batch_size: int = ...,
        max_active_dims: int | None = ...,
        normalize: bool = ...,
        show_progress: bool | None = ...,
    ) -> Tensor: ...
    @overload
    def encode(
        self,
        texts: Sequence[str],
        *,
        output: Literal["tokens", "elasticsearch", "qdrant", "vespa"],
        batch_size: int = ...,
        max_active_dims: int | None = ...,
        normalize: bool = ...,
        show_progress: bool | None = ...,
    ) -> list[dict[str, Any]]: ...
    def encode(
        self,
        texts: Sequence[str],
        *,
        output: Output = "csr",
        batch_size: int = 32,
        max_active_dims: int | None = None,
        normalize: bool = False,
        show_progress: bool | None = None,
    ) -> Tensor | list[dict[str, Any]]:
        """Return the vectors of texts, in their order, on the CPU, in evaluation mode.

        The whole encoder is in evaluation mode meanwhile: do not train it in another thread.

        Args:
            texts: Strings. Longer ones are cut at ``max_length`` tokens.
            output: The format of the result; it holds the positive weights only:

                - ``"csr"``: a sparse tensor ``[N, V]`` in CSR layout.
                - ``"dense"``: a dense tensor ``[N, V]``.
                - ``"tokens"``: dicts of weights by token, the largest first, for ``rank_features``
                  of OpenSearch.
                - ``"elasticsearch"``: the same for its ``sparse_vector``, which refuses dots in
                  tokens: they become ``__``, as in ELSER. If two tokens become the same, the larger
                  weight is kept.
                - ``"qdrant"``: dicts of ``indices`` and ``values``.
                - ``"vespa"``: dicts of ``cells``, for a tensor with one mapped dimension.
            batch_size: Texts per batch; texts of similar length share a batch.
            max_active_dims: The largest number of weights to keep per text; ``None``: all.
            normalize: Whether to scale the weights kept to a Euclidean length of 1, which an index
                that scores by dot products needs after training with cosines.
            show_progress: Whether to show a progress bar; ``None``: in a terminal.

        Raises:
            TypeError: for anything but a sequence of strings.
            ValueError: if a text's activations are not finite.
        """
        from tqdm.auto import tqdm

        _check_texts(texts)
        check_choice("output", output, OUTPUTS)
        check_integer("batch_size", batch_size, minimum=1)
        if max_active_dims is not None:
            check_integer("max_active_dims", max_active_dims, minimum=1)
        check_flag(normalize=normalize)
        vectors: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(texts)
        disable = None if show_progress is None else not show_progress
        with (
            torch.inference_mode(),
            evaluating(self),
            tqdm(total=len(texts), desc="Encoding", unit="text", disable=disable) as progress,
        ):
            for numbers, batch in self._batches(texts, batch_size):
                for i, row in zip(numbers, self(**batch).cpu(), strict=True):
                    if not row.isfinite().all():
                        raise ValueError(f"expected finite activations, got others in text {i}")
                    ids, weights = _largest(row, max_active_dims)
                    if normalize:  # in fp64, so that no square leaves the range of fp32
                        weights = nnf.normalize(weights.double(), dim=0, eps=1e-300).float()
                    vectors[i] = ids, weights
                progress.update(len(numbers))
        return self._formatted(vectors, output)

    def _formatted(
        self, vectors: list[tuple[Tensor, Tensor]], output: Output
    ) -> Tensor | list[dict[str, Any]]:
        if output in ("csr", "dense"):
            counts = torch.tensor([len(ids) for ids, _ in vectors]).long()
            rows = torch.arange(len(vectors)).repeat_interleave(counts)
            empty = (torch.empty(0, dtype=torch.int64), torch.empty(0))
            ids, values = (torch.cat(parts) for parts in zip(empty, *vectors, strict=True))
            if output == "csr":
                return csr(rows, ids, values, (len(vectors), self.vocab_size))
            return torch.zeros(len(vectors), self.vocab_size).index_put_((rows, ids), values)
        if output == "qdrant":
            return [{"indices": i.tolist(), "values": v.tolist()} for i, v in vectors]
        named = [self._named(*vector) for vector in vectors]
        if output == "vespa":
            return [{"cells": weights} for weights in named]
        if output == "elasticsearch":
            return [_without_dots(weights) for weights in named]
        return named

    def _named(self, ids: Tensor, weights: Tensor, count: int | None = None) -> dict[str, float]:
        """Return the weights by token, the largest first; of equal ones, that of the smaller id."""
        order = weights.argsort(descending=True, stable=True)[:count]
        return dict(zip(self._spelled(ids[order].tolist()), weights[order].tolist(), strict=True))

    def _spelled(self, ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them."""
        if len(self._names) != len(self.tokenizer):
            self._names = {i: name for name, i in self.tokenizer.get_vocab().items()}
        # A model may have more rows than its tokenizer has tokens.
        return [self._names.get(i, f"[{i}]") for i in ids]

    def token_weights(
        self, texts: Sequence[str], *, batch_size: int = 32
    ) -> list[list[tuple[str, float]]]:
        r"""Return the activation of the strongest token at each position of a text.

        $$w_s = \max_j u_j \log\bigl(1 + \mathrm{ReLU}(g_j \, \ell_{sj})\bigr)$$

        The weights show which words of a text its vector comes from: the largest $w_s$ is the
        largest weight of the vector. With ``expansion=False`` a position activates its own token
        only, and special tokens have a weight of 0. ``[B, S, V]`` is never stored.

        Args:
            texts: Strings. Longer ones are cut at ``max_length`` tokens.
            batch_size: Texts per batch; texts of similar length share a batch.

        Returns:
            For each text its tokens in order, with special tokens but without padding, each with
            its weight, a ``float`` >= 0. Computed in evaluation mode.

        Raises:
            TypeError: for anything but a sequence of strings.
            ValueError: if a weight is not finite.
        """
        _check_texts(texts)
        check_integer("batch_size", batch_size, minimum=1)
        found: list[list[tuple[str, float]]] = [[]] * len(texts)
        with torch.inference_mode(), evaluating(self):
            for numbers, batch in self._batches(texts, batch_size):
                attended = batch["attention_mask"].bool()
                weights = self._position_weights(**batch)
                rows = zip(numbers, batch["input_ids"], weights, attended, strict=True)
                for i, ids, row, kept in rows:
                    if not row[kept].isfinite().all():
                        raise ValueError(f"expected finite activations, got others in text {i}")
                    spelled = self._spelled(ids[kept].tolist())
                    found[i] = list(zip(spelled, row[kept].tolist(), strict=True))
        return found

    def _states(
        self, input_ids: Tensor, attention_mask: Tensor, **inputs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states ``[B, S, H]``, and the gate ``[B, V]`` if there is one."""
        if self.expansion:
            matrix = self.model.get_output_embeddings().weight
            if self.head.weight is not matrix or matrix.shape[0] != self.vocab_size:
                raise RuntimeError(
                    "expected the output embeddings that the encoder was created with, got others: "
                    "create it after resize_token_embeddings"
                )
        encoder = self.model.base_model if self.expansion else self.model
        hidden = encoder(input_ids=input_ids, attention_mask=attention_mask, **inputs)[0]
        return hidden, None if self.gate is None else self.gate(hidden, attention_mask)

    def _position_weights(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the largest activation of every position, ``[B, S]``."""
        hidden, gate = self._states(input_ids, attention_mask)
        text = torch.arange(len(hidden), device=hidden.device)[:, None].expand_as(input_ids)
        if not self.expansion:
            logits = self.importance(hidden)[:, :, 0].to(compute_dtype(hidden=hidden))
            if gate is not None:
                logits = logits * gate[text, input_ids]
            weights: Tensor = logits.relu().log1p()
            if self.idf_weights is not None:
                weights = weights * self.idf_weights[input_ids]
            return weights.masked_fill(torch.isin(input_ids, self._special_ids), 0.0)
        # The head gets each position as a text of one token.
        some = max(1, CELLS // self.vocab_size)
        found = []
        for states, rows in zip(
            torch.split(hidden.flatten(0, 1), some), torch.split(text.flatten(), some), strict=True
        ):
            activations = self.head(states[:, None], gate=None if gate is None else gate[rows])
            if self.idf_weights is not None:
                activations = activations * self.idf_weights
            found.append(activations.amax(1))
        return torch.cat(found).view(input_ids.shape)

    def top_tokens(
        self, texts_or_vectors: Sequence[str] | Tensor, k: int = 20, **options: Any
    ) -> list[dict[str, float]]:
        """Return the ``k`` tokens of largest weight of each text or vector, the largest first.

        Args:
            texts_or_vectors: Strings; or vectors ``[N, V]`` of the encoder or of ``encode``, dense
                or sparse, in any floating dtype, on any device. Only positive entries of vectors
                count.
            k: The number of tokens, at least 1.
            **options: Options of ``encode``, for texts only.

        Raises:
            TypeError: for anything but strings or floating vectors, or options with vectors.
            ValueError: for vectors of another shape, or that are not finite.
        """
        check_integer("k", k, minimum=1)
        if not isinstance(texts_or_vectors, Tensor):
            return self.encode(texts_or_vectors, output="tokens", max_active_dims=k, **options)
        if options:
            raise TypeError(f"expected no options with vectors, got {', '.join(options)}")
        vectors = texts_or_vectors
        if not vectors.is_floating_point():
            raise TypeError(f"expected vectors to be floating point, got {vectors.dtype}")
        if vectors.ndim != 2 or vectors.shape[1] != self.vocab_size:
            raise ValueError(
                f"expected vectors of shape [N, V] with V = {self.vocab_size}, got "
                f"{list(vectors.shape)}"
            )
        return [self._named(*entries, k) for entries in _rows(vectors.detach())]

    def calibrate(
        self, texts: Sequence[str], target_active: float, *, batch_size: int = 32
    ) -> float:
        r"""Shift the bias so that texts keep ``target_active`` dimensions each, on average.

        After training, this adjusts the sparsity to what an index needs. A threshold of the logits,
        found as by ``calibrate_threshold``, is subtracted from the bias of the vocabulary
        projection, or of the importance layer with ``expansion=False``. As part of the bias it is
        saved and exported with the model.

        The pooled logits are computed in evaluation mode, signed and before the gate, which does
        not change their sign. Dimensions with an idf weight of 0 are not counted.

        A bias in half precision takes few values. Of thresholds next to the exact one, the one is
        chosen whose count, with the rounded bias, is nearest to the target; it may still miss the
        target by a few percent where many logits are nearly equal.

        Args:
            texts: Strings like those to be encoded, such as a sample of the documents.
            target_active: Active dimensions per text, on average, > 0.
            batch_size: Texts per batch; texts of similar length share a batch.

        Returns:
            The number that was subtracted, before rounding; it is negative if fewer than
            ``target_active`` dimensions were active.

        Raises:
            TypeError: for anything but a sequence of strings.
            ValueError: if there are no texts, if ``target_active`` exceeds the dimensions that can
                be active, if a logit is not a number, or if the model has no bias and its config no
                ``decoder_bias`` to add one. The bias is then unchanged.

        Examples:
            ``encoder.calibrate(documents[:1000], target_active=64)``
        """
        _check_texts(texts)
        check_number("target_active", target_active, minimum=0.0, exclusive=True)
        check_integer("batch_size", batch_size, minimum=1)
        kept = round(target_active * len(texts))
        if kept == 0:
            raise ValueError(
                f"expected enough texts to keep at least one dimension, got {len(texts)} texts and "
                f"a `target_active` of {target_active}"
            )
        # Enough logits to find the gap below the threshold even if equal texts have equal entries.
        largest, possible, held = torch.empty(0, dtype=torch.float64), 0, 2 * kept + len(texts)
        tokens = torch.empty(0, dtype=torch.int64)
        with torch.inference_mode(), evaluating(self):
            for _, batch in self._batches(texts, batch_size):
                logits, own = self._ungated_logits(**batch)
                possible += len(logits)
                logits, index = logits.topk(min(held, len(logits)))
                tokens = torch.cat([tokens, own[index].cpu()])
                largest, order = torch.cat([largest, logits.double().cpu()]).sort(descending=True)
                largest, tokens = largest[:held], tokens[order][:held]
        if kept > possible:
            raise ValueError(
                f"expected `target_active` of at most {possible / len(texts):.4g}, the mean that "
                f"can be active, got {target_active}"
            )
        bias = self._bias()
        each = bias.detach().cpu()[tokens if self.expansion else torch.zeros_like(tokens)]
        t = max(threshold(largest, kept), largest[-1].item() - 1.0)
        t = threshold_of_rounded(largest, kept, t, each)
        with torch.no_grad():
            bias.sub_(t)
        return t

    def _ungated_logits(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return all texts' logits that can be active, before the gate, and their tokens."""
        logits: Tensor
        if self.expansion:
            hidden = self.model.base_model(input_ids=input_ids, attention_mask=attention_mask)[0]
            _, logits = self.head(hidden, attention_mask, return_logits=True)
            logits = logits[as_mask("attention_mask", attention_mask).any(1)]
        else:
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
            logits = self._token_logits(hidden, input_ids, attention_mask, absent=-torch.inf)
        tokens = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
        if self.idf_weights is not None:
            counted = self.idf_weights > 0
            logits, tokens = logits[:, counted], tokens[:, counted]
        if logits.isnan().any() or logits.isposinf().any():
            raise ValueError("expected finite logits, got others")
        can_be = logits > -torch.inf
        return logits[can_be], tokens[can_be]

    def _bias(self) -> Tensor:
        """Return the bias of all logits; if there is none, add it to the model and its config."""
        if not self.expansion:
            last = self.importance[-1]
            assert isinstance(last, nn.Linear)
            return last.bias
        if self.head.bias is None:
            if not hasattr(self.model.config, "decoder_bias"):
                raise ValueError(
                    "expected a model whose output embeddings have a bias, or whose config has a "
                    f"`decoder_bias` to add one, got {type(self.model).__name__}"
                )
            projection = self.model.get_output_embeddings()
            projection.bias = nn.Parameter(projection.weight.new_zeros(self.vocab_size))
            self.head.bias = projection.bias
            self.model.config.decoder_bias = True
        assert self.head.bias is not None
        return self.head.bias

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
        """Load an encoder that ``save_pretrained`` wrote, or any masked language model.

        The encoder is in evaluation mode, as in ``transformers``: call ``train()`` to train it.

        Args:
            name_or_path: A folder, or a name on the Hugging Face Hub.
            expansion: ``None``: as saved, or ``True`` for a plain masked language model.
            gate: ``None``: as saved; ``True``: the saved one, or else a new one; ``False``: none.
            idf_weights: ``None``: as saved; ``False``: none.
            max_length: ``None``: as saved, or else the limit of the tokenizer or the model.
            **options: Options of ``AutoModelForMaskedLM.from_pretrained``, such as ``dtype`` and
                ``revision``.

        Raises:
            OSError: if there is no such folder, or it is incomplete, damaged, or was overwritten
                meanwhile.
            ValueError: if sentence-transformers saved it with modules that compute something else.

        Warns:
            UserWarning: if the checkpoint lacks weights, such as those of the layers before the
                logits: they are random then.
        """
        with from_extra("transformers"):
            from transformers import AutoTokenizer
            from transformers.utils import cached_file

        name = os.fspath(name_or_path)
        hub = {key: value for key, value in options.items() if key in HUB}

        def find(file: str) -> str | None:
            path: str | None = cached_file(
                name,
                file,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
                **hub,
            )
            return path

        written = _identity(find(SETTINGS))
        settings, tensors = _read_settings(name, find(SETTINGS), find(TENSORS))
        with _named_damage(name):
            theirs = read_modules(name, find)
        if expansion is None:
            expansion = settings.get("expansion", True)
        if idf_weights is None:
            idf_weights = tensors.get("idf_weights", theirs)
        elif idf_weights is False:
            idf_weights = None

        trust = {k: options[k] for k in ("trust_remote_code",) if k in options}
        with _named_damage(name):
            tokenizer = AutoTokenizer.from_pretrained(name, **hub, **trust)
            model = _masked_lm(name, has_logits=expansion, **options)

        def part(name: str) -> dict[str, Tensor]:
            start = f"{name}."
            return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}

        if (gate is None or gate is True) and settings.get("gate") is not None:
            config = model.config
            try:
                gate = ContextGate(config.hidden_size, config.vocab_size, **settings["gate"])
                gate.load_state_dict(part("gate"))
            except (TypeError, ValueError, RuntimeError) as error:
                raise OSError(f"{name} is damaged: its gate does not load: {error}") from error
        encoder = cls(
            model,
            tokenizer,
            expansion=expansion,
            gate=gate,
            idf_weights=idf_weights,
            max_length=settings.get("max_length") if max_length is None else max_length,
        )
        if not expansion and not settings.get("expansion", True):
            encoder.importance.load_state_dict(part("importance"))
        if _identity(find(SETTINGS)) != written:
            raise OSError(f"{name} was overwritten while it was read: load it again")
        return encoder.eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes everything ``from_pretrained`` reads, as safetensors and JSON.

        The folder is one of ``transformers`` with more files in it: ``AutoModelForMaskedLM`` loads
        it, and so does the ``SparseEncoder`` of sentence-transformers, which gives the same vectors
        (but has no gate, and needs this package installed for idf weights). All files are written
        beside the folder first, so that a full disk or a killed process leaves it unchanged.

        Args:
            folder: Made if it does not exist; files of other names stay.
        """
        with from_extra("transformers"):
            from safetensors.torch import save_file

        tensors = {
            name: tensor.contiguous()
            for name, tensor in self.state_dict().items()
            if name.split(".")[0] in ("gate", "importance", "idf_weights")
        }
        settings = {
            "format": FORMAT,
            "expansion": self.expansion,
            "max_length": self.max_length,
            "idf_weights": self.idf_weights is not None,
            "gate": None
            if self.gate is None
            else {
                "gate_hidden": self.gate.map[0].out_features,
                "num_heads": self.gate.attention.num_heads,
                "dropout": self.gate.attention.dropout,
            },
        }
        # Of a model that was in more files or fewer, none may be read in place of the new ones.
        with replaced_files(folder, last=SETTINGS, instead_of="model*.safetensors*") as new:
            save_file(tensors, new / TENSORS)
            self.model.save_pretrained(new)
            self.tokenizer.save_pretrained(new)
            write_modules(
                new,
                expansion=self.expansion,
                vocab_size=self.vocab_size,
                max_length=self.max_length,
                idf_weights=self.idf_weights,
                has_prompts=(Path(folder) / PROMPTS).exists(),
            )
            text = json.dumps(settings, indent=2) + "\n"
            (new / SETTINGS).write_text(text, encoding="utf-8")


def _identity(file: str | None) -> tuple[int, int] | None:
    """Return what changes when a file is replaced."""
    if file is None:
        return None
    state = os.stat(file)
    return state.st_ino, state.st_mtime_ns


@contextmanager
def _named_damage(name: str) -> Iterator[None]:
    """Name the folder in errors about damaged files, which do not say which one it is."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, json.JSONDecodeError) as error:
        raise OSError(f"{name} is damaged: {error!r}") from error


def _masked_lm(name: str, *, has_logits: bool, **options: Any) -> Any:
    """Load a masked language model, and warn of weights that its checkpoint lacks."""
    from transformers import AutoModelForMaskedLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    if not has_logits:  # no layers before the logits are needed, so no warning that they are new
        logging.set_verbosity_error()
    try:
        model, found = AutoModelForMaskedLM.from_pretrained(
            name, output_loading_info=True, **options
        )
    finally:
        logging.set_verbosity(verbosity)
    needed = "" if has_logits else f"{model.base_model_prefix}."
    if new := sorted(key for key in found["missing_keys"] if key.startswith(needed)):
        warnings.warn(
            f"{name} has no weights for {', '.join(new)}: they are random. Use a checkpoint "
            "of a masked language model, or train them.",
            stacklevel=3,
        )
    return model


def _importance(hidden_size: int) -> nn.Sequential:
    """Return a network from a hidden state to the logit of the token at its position."""
    last = nn.Linear(hidden_size, 1)
    # All tokens start active: behind the activation's ReLU an inactive one has no gradient.
    nn.init.ones_(last.bias)
    return nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Dropout(0.1), last)


def _max_length(max_length: int | None, model: Any, tokenizer: Any) -> int:
    """Return the given maximum, or else the limit of model and tokenizer."""
    positions = [
        # RoBERTa and its descendants number positions from the padding index on.
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    longest = getattr(model.config, "max_position_embeddings", None)
    longest = min([*positions, *([] if longest is None else [longest])], default=None)
    if max_length is None:
        # The limit of a tokenizer is 1e30 if it is unknown.
        return int(min(tokenizer.model_max_length, longest or tokenizer.model_max_length))
    special = tokenizer.num_special_tokens_to_add(pair=False)
    check_integer("max_length", max_length, minimum=special + 1)
    if positions and max_length > min(positions):
        raise ValueError(
            f"expected `max_length` of at most the model's {min(positions)} positions, got "
            f"{max_length}"
        )
    return int(max_length)


def _read_settings(
    name: str, settings: str | None, tensors: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of our two files, or two empty dicts if there are none."""
    from safetensors.torch import load_file

    if settings is None and tensors is None:
        return {}, {}
    if settings is None or tensors is None:
        missing, there = (SETTINGS, TENSORS) if settings is None else (TENSORS, SETTINGS)
        raise OSError(f"{name} is incomplete: it has {there}, but not {missing}")
    try:
        found = json.loads(Path(settings).read_text(encoding="utf-8"))
        made_by = found["format"]
        stored = load_file(tensors)
    except Exception as error:
        raise OSError(f"{name} is damaged: {error!r}") from error
    if isinstance(made_by, int) and made_by > FORMAT:
        raise OSError(
            f"expected {name} in format {FORMAT}, got {made_by}: a newer version of "
            "sparse-losses wrote it"
        )
    kinds = {"expansion": bool, "idf_weights": bool, "gate": dict | None, "max_length": int | None}
    wrong = [key for key, kind in kinds.items() if not isinstance(found.get(key, ...), kind)]
    if made_by != FORMAT or wrong:
        raise OSError(f"{name} is damaged: wrong {', '.join(wrong) or 'format'} in {SETTINGS}")
    wanted = {
        "idf_weights": found["idf_weights"],
        "gate": found["gate"] is not None,
        "importance": not found["expansion"],
    }
    if {part for part, there in wanted.items() if there} != {k.split(".")[0] for k in stored}:
        raise OSError(f"{name} is damaged: its two files do not belong together")
    return found, stored


def _largest(row: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """Return ids (ascending) and weights of a vector's positive entries, or its largest ones."""
    ids = row.nonzero()[:, 0]
    if count is not None and len(ids) > count:
        ids = row.topk(count).indices.sort().values
    return ids, row[ids].float()


def _rows(vectors: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return ids and weights of the positive entries of each vector, on the CPU."""
    if vectors.layout == torch.strided:
        row, ids = vectors.nonzero(as_tuple=True)
        weights = vectors[row, ids]
    else:
        entries = vectors.to_sparse(layout=torch.sparse_coo).coalesce()
        (row, ids), weights = entries.indices(), entries.values()
    if not weights.isfinite().all():
        first = int(row[~weights.isfinite()][0])
        raise ValueError(f"expected finite vectors, got others in row {first}")
    kept = weights > 0
    row, ids, weights = row[kept].cpu(), ids[kept].cpu(), weights[kept].float().cpu()
    counts = torch.bincount(row, minlength=len(vectors)).tolist()
    return list(zip(torch.split(ids, counts), torch.split(weights, counts), strict=True))


def _without_dots(weights: dict[str, float]) -> dict[str, float]:
    """Replace dots by ``__``; of tokens that become equal the first has the largest weight."""
    kept: dict[str, float] = {}
    for token, weight in weights.items():
        kept.setdefault(token.replace(".", "__"), weight)
    return kept


def _check_texts(texts: object) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"expected `texts` to be a list of strings, got {type(texts).__name__}")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"expected `texts` to be strings, got {type(text).__name__} at {i}")
