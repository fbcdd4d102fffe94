"""Attention to selected rows on one GPU: our kernel against FlashMLA's, from rows in bf16 and fp8.

At DeepSeek-V3.2's widths, 128 heads on rows of 512 + 64, 2048 of them for each token, drawn from
all of the prefix. Rows in fp8 are decoded before either kernel; "decoded by torch" is how it was
done before there was a kernel for that. Without FlashMLA ours are measured alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.gpu.clock import GpuClock
from benchmarks.gpu.workload import INDEX_TOPK, LATENT, ROPE, production_spec
from cp_shared_kv.memory.formats.fp8_ds_mla import Fp8DsMlaFormat
from cp_shared_kv.memory.row_decoder import attendable_rows
from cp_shared_kv.memory.row_encoder import RowEncoder
from cp_shared_kv.model.ops import gpu, hopper
from cp_shared_kv.model.query_blocks import ON_GPU

HEADS = 128
SCALE = 192**-0.5
TOKENS = (64, 512, 2048)
PREFIX_TOKENS = (1 << 15, 1 << 17, 1 << 20)
ROUNDS = 7
CHECKED_TOKENS = 8
_Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
_Way = Callable[[slice], torch.Tensor]
"""The attention of some of the tokens."""
OURS, FLASH_MLA = "Triton", "FlashMLA"


def run(progress: Progress) -> Measurement:
    """Check each way on fresh random values, then time it."""
    attends: dict[str, _Attend] = {OURS: _ours}
    if importlib.util.find_spec("sgl_kernel") is not None:
        kernel = importlib.import_module("sgl_kernel.flash_mla").flash_mla_sparse_fwd
        attends[FLASH_MLA] = partial(hopper.attend_rows, kernel)
    cases = [(tokens, prefix) for prefix in PREFIX_TOKENS for tokens in TOKENS]
    samples: dict[str, list[float]] = {}
    errors: dict[str, object] = {}
    for done, (tokens, prefix) in enumerate(cases):
        case = f"{tokens} tokens, {prefix >> 10} K"
        progress(case, done, len(cases))
        values = _Values(tokens, prefix, seed=done)
        ways = values.ways(attends)
        errors[case] = {name: values.error(way) for name, way in ways.items()}
        clock = GpuClock()
        for name, way in ways.items():
            clock.capture(name, partial(values.all_tokens, way), 1, 4)
        clock.capture("fp8, decoding by kernel", values.decode_alone, 1, 4)
        samples |= {f"{case}: {name}": taken for name, taken in clock.samples(ROUNDS).items()}
        torch.cuda.empty_cache()
    progress("", len(cases), len(cases))
    goals = [
        Goal(f"{case}: {form}, {OURS}", 2.0, f"{case}: {form}, {FLASH_MLA}")
        for case in (errors if FLASH_MLA in attends else ())
        for form in ("bf16", "fp8")
    ]
    goals += [
        Goal(f"{case}: fp8, {name}", 1.0, f"{case}: fp8, decoded by torch")
        for case in errors
        for name in attends
    ]
    config: dict[str, object] = {
        "rounds": ROUNDS,
        "heads": HEADS,
        "row": [LATENT, ROPE],
        "index_topk": INDEX_TOPK,
    }
    return Measurement(config, samples, goals, {"relative_errors": errors})


def _ours(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    attended = gpu.attend_rows(q_latent, q_pe, rows, slots, scale)
    assert attended is not None, "the widths are powers of two"
    return attended


class _Values:
    """Random queries, rows in both forms, and what each token has selected."""

    def __init__(self, tokens: int, prefix: int, seed: int) -> None:
        device = torch.device("cuda")
        generator = torch.Generator(device).manual_seed(seed)
        draw = partial(torch.randn, device=device, generator=generator)
        # By heads first, as the absorbed queries come out of their product.
        self.q_latent = draw(HEADS, tokens, LATENT).bfloat16().transpose(0, 1)
        self.q_pe = draw(tokens, HEADS, ROPE).bfloat16()
        spec = production_spec("fp8_ds_mla")
        assert isinstance(spec.latent, Fp8DsMlaFormat)
        self.page_format = spec.latent
        drawn = draw(prefix, LATENT + ROPE).bfloat16()
        encoder = RowEncoder(spec, prefix, device)
        self.stored = encoder.latent(drawn[:, :LATENT], drawn[:, LATENT:])
        self.rows = torch.cat(spec.latent.decode(self.stored, torch.bfloat16), dim=1)
        shape = (tokens, INDEX_TOPK)
        self.slots = torch.randint(prefix, shape, device=device, generator=generator).sort(1).values

    def ways(self, attends: dict[str, _Attend]) -> dict[str, _Way]:
        """Both forms of rows with each kernel, and fp8 as it was."""
        ways = {
            f"{form}, {name}": partial(way, attend)
            for form, way in (("bf16", self._plain), ("fp8", self._decoded))
            for name, attend in attends.items()
        }
        return ways | {"fp8, decoded by torch": self._decoded_by_torch}

    def _plain(self, attend: _Attend, part: slice) -> torch.Tensor:
        return attend(self.q_latent[part], self.q_pe[part], self.rows, self.slots[part], SCALE)

    def _decoded(self, attend: _Attend, part: slice) -> torch.Tensor:
        q_latent, q_pe = self.q_latent[part], self.q_pe[part]
        return torch.cat([
            attend(q_latent[some], q_pe[some], rows, there, SCALE)
            for some, rows, there in attendable_rows(
                self.page_format, self.stored, self.slots[part]
            )
        ])  # fmt: skip

    def _decoded_by_torch(self, part: slice) -> torch.Tensor:
        q_latent, q_pe, slots = self.q_latent[part], self.q_pe[part], self.slots[part]
        attended = torch.empty_like(q_latent)
        step = ON_GPU.most_gathered // (INDEX_TOPK * (LATENT + ROPE))
        for start in range(0, len(slots), step):
            some = slice(start, start + step)
            rows = self.stored.index_select(0, slots[some].flatten())
            decoded = self.page_format.decode(rows, torch.bfloat16)
            latent, k_pe = (values.unflatten(0, slots[some].shape) for values in decoded)
            attended[some] = gpu.sparse_attention(
                q_latent[some], q_pe[some], latent, k_pe, slots[some] >= 0, SCALE
            )
        return attended

    def all_tokens(self, way: _Way, _turn: int) -> None:
        way(slice(0, len(self.slots)))

    def decode_alone(self, _turn: int) -> None:
        for _ in attendable_rows(self.page_format, self.stored, self.slots):
            pass

    def error(self, way: _Way) -> float:
        """Of some tokens against the equation in fp64, relative in norm."""
        part = slice(len(self.slots) - CHECKED_TOKENS, len(self.slots))
        got = way(part)
        rows = self.rows[self.slots[part]].double()
        q = torch.cat([self.q_latent[part], self.q_pe[part]], dim=2).double()
        weights = (torch.bmm(q, rows.transpose(1, 2)) * SCALE).softmax(dim=2)
        expected = torch.bmm(weights, rows[..., :LATENT])
        return float((got - expected).norm() / expected.norm())


BENCHMARK = Benchmark(
    "gpu_attention", "attention to selected rows, our kernel against FlashMLA", run
)
