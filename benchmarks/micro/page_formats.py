"""The page formats at the production widths: encoding, and gathering with decoding.

The peers: the fp32 format for what the rounding costs; torch's own cast for the look-up table that
decodes e4m3; scattering rows as bytes for scattering them as 4-byte words. CPU time of one thread,
so that other processes count little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.micro.interleave import interleaved
from cp_shared_kv.memory.formats.block_fp8 import dequantise, quantise
from cp_shared_kv.memory.formats.registry import index_format, latent_format

ROUNDS = 21
SEED = 0
TOKENS = 4096
PAGE_SIZE = 64
LATENT, ROPE, INDEX = 512, 64, 128


def run(progress: Progress) -> Measurement:
    """Measure each format, and the two choices that its speed rests on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config: dict[str, object] = {"rounds": ROUNDS, "seed": SEED, "threads": 1, "tokens": TOKENS}
        functions = _functions()
        goals = [
            Goal("e4m3 by table", 0.7, against="e4m3 by torch's cast"),
            Goal("fp8_ds_mla scatter in words", 0.7, against="fp8_ds_mla scatter in bytes"),
            Goal("fp8_scaled scatter in words", 1.0, against="fp8_scaled scatter in bytes"),
        ]
        samples = interleaved(functions, ROUNDS, progress, time.thread_time)
        return Measurement(config, samples, goals)
    finally:
        torch.set_num_threads(threads)


def _functions() -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(SEED)
    latent = torch.randn(TOKENS, LATENT, generator=generator)
    k_pe = torch.randn(TOKENS, ROPE, generator=generator)
    index_k = torch.randn(TOKENS, INDEX, generator=generator)
    slots = torch.randperm(TOKENS, generator=generator) + PAGE_SIZE
    functions: dict[str, Callable[[], object]] = {}
    for name in ("fp32", "bf16", "fp8_ds_mla"):
        codec = latent_format(name, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, page_size=PAGE_SIZE)
        pages = _pages(codec.page_bytes)
        codec.scatter_rows(pages, slots, codec.encode(latent, k_pe))
        functions[f"latent {name} encode"] = partial(codec.encode, latent, k_pe)
        functions[f"latent {name} gather and decode"] = partial(
            lambda codec, pages: codec.decode(codec.gather_rows(pages, slots), torch.float32),
            codec,
            pages,
        )
    for name in ("fp32", "bf16", "fp8_scaled"):
        codec = index_format(name, index_head_dim=INDEX, page_size=PAGE_SIZE)
        pages = _pages(codec.page_bytes)
        codec.scatter_rows(pages, slots, codec.encode(index_k))
        functions[f"index {name} encode"] = partial(codec.encode, index_k)
        functions[f"index {name} gather and decode"] = partial(
            lambda codec, pages: codec.decode(codec.gather_rows(pages, slots), torch.float32),
            codec,
            pages,
        )
    return functions | _choices(latent, slots)


def _choices(latent: torch.Tensor, slots: torch.Tensor) -> dict[str, Callable[[], object]]:
    codes, scales = quantise(latent, "fp32")

    def cast() -> torch.Tensor:
        values = codes.view(torch.float8_e4m3fn).float().unflatten(1, (-1, INDEX))
        return (values * scales.unsqueeze(2)).flatten(1)

    functions: dict[str, Callable[[], object]] = {
        "e4m3 by table": partial(dequantise, codes, scales, torch.float32),
        "e4m3 by torch's cast": cast,
    }
    codecs = (
        latent_format(
            "fp8_ds_mla", kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, page_size=PAGE_SIZE
        ),
        index_format("fp8_scaled", index_head_dim=INDEX, page_size=PAGE_SIZE),
    )
    for codec in codecs:
        rows = torch.zeros(TOKENS, codec.row_bytes, dtype=torch.uint8)
        aligned = _pages(codec.page_bytes)
        # Pages that begin one byte further cannot be written in words.
        shifted = torch.zeros(aligned.numel() + 1, dtype=torch.uint8)[1:].view(aligned.shape)
        functions[f"{codec.name} scatter in words"] = partial(
            codec.scatter_rows, aligned, slots, rows
        )
        functions[f"{codec.name} scatter in bytes"] = partial(
            codec.scatter_rows, shifted, slots, rows
        )
    return functions


def _pages(page_bytes: int) -> torch.Tensor:
    return torch.zeros(TOKENS // PAGE_SIZE + 1, page_bytes, dtype=torch.uint8)


BENCHMARK = Benchmark("page_formats", "encode, gather and decode of each page format", run)
