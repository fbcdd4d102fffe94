"""What the plugin works with, and every other mix with the reason why it is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PAGE_SIZE = 64
TRANSPORT = "mooncake"

BACKENDS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("in-seq-split", "bfloat16"): ("flashmla_sparse", "tilelang"),
    ("in-seq-split", "fp8_e4m3"): ("flashmla_sparse",),
    ("round-robin-split", "bfloat16"): ("flashmla_sparse", "tilelang", "fa3"),
    ("round-robin-split", "fp8_e4m3"): ("flashmla_sparse", "flashmla_kv"),
}
"""By split and KV type: the prefill backends that read what the plugin gives them."""


@dataclass(frozen=True)
class Refusal:
    """One setting that does not go with the flag: what was found, why it is refused, what to do."""

    setting: str
    value: object
    reason: str
    change: str

    def __str__(self) -> str:
        return f"{self.setting} = {self.value}: {self.reason}; to change it: {self.change}"


@dataclass(frozen=True)
class _Off:
    """A setting that must be falsy."""

    attribute: str
    flag: str
    reason: str


_OFF = (
    _Off(
        "enable_hierarchical_cache",
        "--enable-hierarchical-cache",
        "HiCache copies device buffers by loc and would copy other pages",
    ),
    _Off(
        "enable_hisparse",
        "--enable-hisparse",
        "HiSparse translates locs itself and has a pool of its own",
    ),
    _Off("enable_lmcache", "--enable-lmcache", "LMCache reads device buffers by loc"),
    _Off(
        "enable_two_batch_overlap",
        "--enable-two-batch-overlap",
        "the pool has the plan of one batch at a time",
    ),
    _Off("enable_pdmux", "--enable-pdmux", "the pool has the plan of one batch at a time"),
    _Off(
        "enable_mixed_chunk",
        "--enable-mixed-chunk",
        "decode steps would read pages that this rank does not own",
    ),
    _Off(
        "enable_memory_saver",
        "--enable-memory-saver",
        "it would release pages that other ranks read",
    ),
    _Off("use_ray", "--use-ray", "its actors do not inherit the environment that carries the flag"),
    _Off(
        "enable_streaming_session",
        "--enable-streaming-session",
        "sessions that keep pages outside the radix tree are not proven yet",
    ),
    _Off("dllm_algorithm", "--dllm-algorithm", "diffusion models do not prefill once"),
    _Off(
        "enable_multi_layer_eagle",
        "--enable-multi-layer-eagle",
        "a pool for each next-token layer is not proven yet",
    ),
    _Off(
        "enable_prefill_context_parallel",
        "--enable-prefill-context-parallel",
        "that is another context parallelism, for models without DSA",
    ),
)

_OFF_ENVIRONMENT = (
    (
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
        "the pool lies in one buffer of its own, not in Mooncake's",
    ),
    ("SGLANG_DISAGG_STAGING_BUFFER", "staging slices chunks that are contiguous; shards are not"),
    ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "not proven yet"),
)

_Rule = Callable[[Any], Refusal | None]


def refusals(args: Any, *, dsa_model: bool) -> list[Refusal]:
    """Every reason why a server with these parsed ServerArgs cannot run with the flag."""
    found = [rule(args) for rule in _RULES]
    if not dsa_model:
        found.append(
            Refusal(
                "--model-path",
                args.model_path,
                "the model has no DeepSeek sparse attention (DSA)",
                "serve it without the flag",
            )
        )
    for off in _OFF:
        value = getattr(args, off.attribute, None)
        if value:
            found.append(Refusal(off.flag, value, off.reason, f"drop {off.flag}"))
    for name, reason in _OFF_ENVIRONMENT:
        value = os.environ.get(name, "")
        if value.lower() not in ("", "0", "false", "none"):
            found.append(Refusal(name, value, reason, f"unset {name}"))
    return [refusal for refusal in found if refusal is not None]


def _context_parallel(args: Any) -> Refusal | None:
    if args.enable_nsa_prefill_context_parallel:
        return None
    return Refusal(
        "--enable-nsa-prefill-context-parallel",
        False,
        "without a CP group there is nobody to share with",
        "add --enable-nsa-prefill-context-parallel",
    )


def _prefill_only(args: Any) -> Refusal | None:
    mode = args.disaggregation_mode
    if mode == "prefill":
        return None
    if mode == "decode":
        reason = "decode keeps every page itself and needs no plugin"
        change = (
            "drop the flag there, and set SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER=1 instead"
        )
    else:
        reason = "a server that decodes too would read pages that a rank does not own"
        change = "serve prefill and decode apart: --disaggregation-mode prefill"
    return Refusal("--disaggregation-mode", mode, reason, change)


def _transport(args: Any) -> Refusal | None:
    backend = args.disaggregation_transfer_backend
    if backend == TRANSPORT:
        return None
    return Refusal(
        "--disaggregation-transfer-backend",
        backend,
        "its way of sending index K is not wrapped",
        f"--disaggregation-transfer-backend {TRANSPORT}",
    )


def _device(args: Any) -> Refusal | None:
    if args.device == "cuda":
        return None
    return Refusal("--device", args.device, "kernels and collectives are NVIDIA's", "--device cuda")


def _page_size(args: Any) -> Refusal | None:
    if args.page_size == PAGE_SIZE:
        return None
    return Refusal(
        "--page-size",
        args.page_size,
        f"pages of index K hold {PAGE_SIZE} tokens",
        f"--page-size {PAGE_SIZE}",
    )


def _pipeline(args: Any) -> Refusal | None:
    if args.pp_size == 1:
        return None
    return Refusal("--pp-size", args.pp_size, "stages hold different layers", "--pp-size 1")


def _data_parallel(args: Any) -> Refusal | None:
    if args.dp_size == 1:
        return None
    return Refusal(
        "--dp-size",
        args.dp_size,
        "idle groups run forwards without a plan; not proven yet",
        "--dp-size 1, and one server a group",
    )


def _attention(args: Any) -> Refusal | None:
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(args, name)
        if value not in (None, "nsa"):
            flag = "--" + name.replace("_", "-")
            return Refusal(flag, value, "only nsa reads by tables that can be replaced", "drop it")
    return None


def _decode_backend(args: Any) -> Refusal | None:
    if args.nsa_decode_backend != "trtllm":
        return None
    return Refusal(
        "--nsa-decode-backend",
        "trtllm",
        "it changes the layout of KV rows",
        "--nsa-decode-backend flashmla_kv with fp8, fa3 with bfloat16",
    )


def _prefill_backend(args: Any) -> Refusal | None:
    split, dtype, backend = (
        args.nsa_prefill_cp_mode,
        args.kv_cache_dtype,
        args.nsa_prefill_backend,
    )
    allowed = BACKENDS.get((split, dtype), ())
    if backend in allowed:
        return None
    if not allowed:
        return Refusal(
            "--kv-cache-dtype",
            dtype,
            f"no page format for it under {split}",
            "--kv-cache-dtype bfloat16 or fp8_e4m3",
        )
    return Refusal(
        "--nsa-prefill-backend",
        backend,
        f"not proven with {dtype} under {split}",
        f"--nsa-prefill-backend {' or '.join(allowed)}",
    )


def _speculation(args: Any) -> Refusal | None:
    algorithm = args.speculative_algorithm
    if not algorithm:
        return None
    # SGLang has put EAGLE for NEXTN by then, and the model's own path for no path.
    if algorithm not in ("EAGLE", "NEXTN"):
        return Refusal(
            "--speculative-algorithm",
            algorithm,
            "its draft has no DSA pool that could be shared, or none at all to send to decode",
            "--speculative-algorithm EAGLE, with the model's own next-token layer",
        )
    if args.speculative_draft_model_path not in (None, args.model_path):
        return Refusal(
            "--speculative-draft-model-path",
            args.speculative_draft_model_path,
            "a draft of its own has other pages than the model",
            "drop it, so that the model's own next-token layer drafts",
        )
    return None


_RULES: tuple[_Rule, ...] = (
    _context_parallel,
    _prefill_only,
    _transport,
    _device,
    _page_size,
    _pipeline,
    _data_parallel,
    _attention,
    _prefill_backend,
    _decode_backend,
    _speculation,
)
