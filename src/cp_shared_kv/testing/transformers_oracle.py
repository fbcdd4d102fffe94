"""The independent oracle: Hugging Face transformers (5.17 or newer) on the same checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from cp_shared_kv.testing.model_on_ranks import ComputedRows
from cp_shared_kv.testing.routing_margin import least_routing_margin

SURE_MARGIN = 1e-5
"""Where the scores of the last selected and the first left out differ by more, fp32 rounding
cannot have exchanged them."""


@dataclass(frozen=True)
class Agreement:
    """How far computed rows are from the oracle's."""

    rows: int
    relative_error: float
    """Of all logits: the norm of the difference over the norm of the oracle's."""
    worst_row_error: float
    sparse_rows: int
    """Rows of all layers with an indexer that had to leave a position out."""
    sure_rows: int
    """Of these, rows with a margin above SURE_MARGIN."""
    sure_rows_agreeing: int
    """Of these, rows that selected the oracle's set."""
    rows_agreeing: int
    """Sparse rows of any margin that selected the oracle's set."""
    least_margin: float
    greedy_agreeing: int
    """Rows with the oracle's likeliest next token."""
    least_routing_margin: float
    """Of the oracle's own rows; below SURE_ROUTING_MARGIN the errors may be those of a near tie."""


@dataclass(frozen=True)
class _Answer:
    """One prompt's forward; see `logits_and_selections`."""

    logits: torch.Tensor
    selected: torch.Tensor
    routing_margin: float


class TransformersOracle:
    """One model, each prompt in one forward, without any cache of ours.

    transformers gives two norms of each layer, those of the query and KV latents, an epsilon of
    1e-6 whatever the config says. Here they have the config's, as in SGLang and vLLM: for GLM
    that is another number.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        transformers.utils.logging.disable_progress_bar()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation="eager", **_dequantising(checkpoint)
        )
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
                norm.variance_epsilon = model.config.rms_norm_eps
        self._model = model.eval()
        self._answers: dict[tuple[int, ...], _Answer] = {}

    @property
    def layers(self) -> Any:
        """The decoder layers, as transformers has them."""
        return self._model.model.layers

    def generate(self, prompt: list[int], new_tokens: int) -> list[int]:
        """The prompt and its greedy continuation, end tokens not heeded."""
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        generated = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return generated[0].tolist()

    def logits_and_selections(self, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32[T, vocab] and, True where selected and visible, bool[layers, T, T], of the layers
        with an indexer."""
        answer = self._answer(token_ids)
        return answer.logits, answer.selected

    def least_routing_margin(self, requests: list[list[int]]) -> float:
        """By how much the nearest choice of experts was decided, in all rows of the requests."""
        return min(self._answer(token_ids).routing_margin for token_ids in requests)

    def compare(self, computed: ComputedRows, requests: list[list[int]]) -> Agreement:
        """Compare rows of requests, given by their token ids, with one forward of each."""
        answers = [self._answer(token_ids) for token_ids in requests]
        expected = torch.stack([answers[r].logits[p] for r, p in computed.rows.tolist()])
        same_set = torch.stack(
            [
                _same_set(computed.selected[:, i], answers[r].selected[:, p])
                for i, (r, p) in enumerate(computed.rows.tolist())
            ],
            dim=1,
        )
        sparse, sure = computed.margins.isfinite(), computed.margins > SURE_MARGIN
        difference = computed.logits - expected
        row_errors = difference.norm(dim=1) / expected.norm(dim=1)
        return Agreement(
            rows=len(expected),
            relative_error=float(difference.norm() / expected.norm()),
            worst_row_error=float(row_errors.max()),
            sparse_rows=int(sparse.sum()),
            sure_rows=int((sparse & sure).sum()),
            sure_rows_agreeing=int((sparse & sure & same_set).sum()),
            rows_agreeing=int((sparse & same_set).sum()),
            least_margin=float(computed.margins.min()),
            greedy_agreeing=int((computed.logits.argmax(1) == expected.argmax(1)).sum()),
            least_routing_margin=self.least_routing_margin(requests),
        )

    def _answer(self, token_ids: list[int]) -> _Answer:
        key = tuple(token_ids)
        if key not in self._answers:
            self._answers[key] = self._forward(token_ids)
        return self._answers[key]

    @torch.no_grad()
    def _forward(self, token_ids: list[int]) -> _Answer:
        selected: list[torch.Tensor] = []
        routing_margins = [float("inf")]

        def keep(_module: Any, _arguments: Any, chosen: torch.Tensor) -> None:
            selected.append(chosen[0].long())

        def keep_margin(gate: Any, arguments: Any, _: Any) -> None:
            routing_margins.append(least_routing_margin(gate, arguments[0]))

        indexers = [layer.self_attn.indexer for layer in self.layers]
        gates = [layer.mlp.gate for layer in self.layers if hasattr(layer.mlp, "gate")]
        hooks = [indexer.register_forward_hook(keep) for indexer in indexers if indexer is not None]
        hooks += [gate.register_forward_hook(keep_margin) for gate in gates]
        try:
            logits = self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        size = len(token_ids)
        masks = [torch.zeros(size, size, dtype=torch.bool).scatter_(1, s, True) for s in selected]
        return _Answer(logits.float(), torch.stack(masks).tril(), min(routing_margins))


def _dequantising(checkpoint: Path) -> dict[str, Any]:
    """What makes transformers dequantise a block-fp8 checkpoint to the dtype asked for."""
    if "quantization_config" not in json.loads((checkpoint / "config.json").read_bytes()):
        return {}
    return {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}


def _same_set(selected: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Per layer: do positions i64[layers, k], padded with -1, name just the True of the mask?"""
    ours = torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.bool)
    ours.scatter_(1, selected.where(selected >= 0, torch.tensor(mask.shape[1])), True)
    return (ours[:, :-1] == mask).all(dim=1)
