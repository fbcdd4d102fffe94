"""A prompt's pages from all ranks to decode on GPU 0, by each transport, against a plain copy.

128 K tokens of DeepSeek-V3.2: 61 layers, latent and index K, each rank sending the pages it owns
out of symmetric memory, all at once, into one pool of cudaMalloc memory in a process of its own.
*Adjacent* pages merge into one range a layer, as with a pool that was empty; *shuffled* ones do
not merge at all. The plain copy is one call of the copy engine for as many bytes, of each rank;
rank 0's stays on its GPU, as its part of the transfer does. Times are of hosts, from a barrier to
the last byte, of the slowest rank. Slow ways move fewer layers, and are to be read as GB/s.
"""

from __future__ import annotations

import ctypes
import hashlib
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from benchmarks import Benchmark, Measurement, Progress
from benchmarks.gpu import RANKS
from benchmarks.gpu.rank import GpuRank, slowest
from benchmarks.gpu.workload import INDEX, LATENT, PAGE_SIZE, ROPE
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.memory.cuda_ipc import CudaIpcMapping
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPoolSpec
from cp_shared_kv.testing.rank_process import RankContext
from cp_shared_kv.testing.transport_ends import (
    GPU_KINDS,
    TransportKind,
    environment_of,
    in_environment_of,
    why_not,
)
from cp_shared_kv.testing.transport_peer import Gpus, TransportPeer, TransportPeers
from cp_shared_kv.transfer.descriptors import PageAreas, expand, merge_pages, stripe_destinations
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs
from cp_shared_kv.transfer.transports import make_transport

if TYPE_CHECKING:
    from cp_shared_kv.testing.rank_pool import RankPool

PROMPT_TOKENS = 1 << 17
ROUNDS, WARM_UPS = 7, 1
LIMIT_SECONDS = 120.0
SAMPLED_RANGES = 32
COPY = "plain copy"


@dataclass(frozen=True)
class Case:
    """One way to move the pages of so many layers."""

    kind: TransportKind
    shuffled: bool
    layers: int

    @property
    def name(self) -> str:
        """As its samples are called."""
        order = "shuffled" if self.shuffled else "adjacent"
        return f"{self.kind}, {order}, {self.layers} layers"


CASES = (
    Case("cuda_ipc", shuffled=False, layers=61),
    Case("cuda_ipc", shuffled=True, layers=61),
    Case("mooncake_nvlink", shuffled=False, layers=61),
    Case("mooncake_nvlink", shuffled=True, layers=4),
    Case("mooncake_gpu_tcp", shuffled=False, layers=4),
)


def pages_spec(layers: int) -> KVPoolSpec:
    """DeepSeek-V3.2's pages: latent KV in bf16, index K in fp8."""
    latent = latent_format("bf16", kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, page_size=PAGE_SIZE)
    index = index_format("fp8_scaled", index_head_dim=INDEX, page_size=PAGE_SIZE)
    return KVPoolSpec(latent, index, layers, tuple(range(layers)))


def run(progress: Progress) -> Measurement:
    """Each case that this machine has, and a plain copy of the same bytes beside it."""
    from cp_shared_kv.testing.rank_pool import RankPool

    left_out: dict[str, str] = {}
    for kind in GPU_KINDS:
        with in_environment_of(kind):
            if reason := why_not(kind):
                left_out[kind] = reason
    cases = [case for case in CASES if case.kind not in left_out]
    samples: dict[str, list[float]] = {}
    moved: dict[str, object] = {}
    with RankPool(RANKS) as pool:
        for done, case in enumerate(cases):
            progress(case.name, done, len(cases))
            samples |= _measure_case(pool, case, moved)
    progress("", len(cases), len(cases))
    config: dict[str, object] = {
        "ranks": RANKS,
        "rounds": ROUNDS,
        "prompt_tokens": PROMPT_TOKENS,
        "page_size": PAGE_SIZE,
        "page_bytes": {kind: pages_spec(1).page_bytes(kind) for kind in ("latent", "index")},
        "target": "GPU 0",
        "clock": "hosts, from a barrier to the last byte; the slowest rank",
    }
    return Measurement(config, samples, figures={"moved": moved, "left_out": left_out})


def _measure_case(pool: RankPool, case: Case, moved: dict[str, object]) -> dict[str, list[float]]:
    pages = PROMPT_TOKENS // PAGE_SIZE
    with TransportPeers() as peers:
        peer = peers.start(
            "shared_memory" if case.kind == "cuda_ipc" else "mooncake",
            pages_spec(case.layers).pool_bytes(pages),
            environment_of(case.kind),
            Gpus(target=0, sender=0),
        )
        answers = pool.run(
            f"{__name__}:measure",
            timeout_seconds=300,
            kind=case.kind,
            shuffled=case.shuffled,
            layers=case.layers,
            session_id=peer.info.session_id,
            regions=msgspec.to_builtins(peer.info.regions),
            ipc_handle=peer.ipc_handle,
        )
        for answer in answers:
            _check(peer, answer["sampled"])
    found = slowest([answer["samples"] for answer in answers])
    nbytes = sum(answer["bytes"] for answer in answers)
    named = {case.name: found["transport"], f"{case.name}: {COPY}": found[COPY]}
    medians = {name: statistics.median(values) for name, values in named.items()}
    moved[case.name] = {
        "bytes": nbytes,
        "ranges_per_rank": [answer["ranges"] for answer in answers],
        "gigabytes_per_second": {name: nbytes / took / 1e9 for name, took in medians.items()},
    }
    return named


def _check(peer: TransportPeer, sampled: list[tuple[int, int, str]]) -> None:
    for offset_bytes, nbytes, digest in sampled:
        found = hashlib.sha256(peer.read(offset_bytes, nbytes).tobytes()).hexdigest()
        assert found == digest, f"wrong bytes at {offset_bytes} of decode's pool"


# A rank ------------------------------------------------------------------------------------------


def measure(
    context: RankContext,
    kind: TransportKind,
    shuffled: bool,
    layers: int,
    session_id: str,
    regions: list[Any],
    ipc_handle: str,
) -> dict[str, Any]:
    """Both ways in turn on one rank, and what decode's pool must hold then."""
    with in_environment_of(kind):
        return _measure(
            GpuRank(context),
            kind,
            shuffled,
            layers,
            PeerInfo(session_id, msgspec.convert(regions, tuple[Region, ...])),
            bytes.fromhex(ipc_handle),
        )


def _measure(
    rank: GpuRank,
    kind: TransportKind,
    shuffled: bool,
    layers: int,
    peer: PeerInfo,
    ipc_handle: bytes,
) -> dict[str, Any]:
    spec, pages = pages_spec(layers), PROMPT_TOKENS // PAGE_SIZE
    buffer = rank.buffer(spec.pool_bytes(pages // rank.context.size))
    buffer.tensor.random_(0, 256)
    backend = "shared_memory" if kind == "cuda_ipc" else "mooncake"
    transport = make_transport(backend, f"rank-{rank.context.rank}", rank.device)
    region = transport.register(buffer)
    transport.connect(peer)
    runs = _runs(rank.context, spec, pages, shuffled, region.name, peer.regions[0].name)
    plain = PlainCopy(rank, ipc_handle, peer.regions[0].nbytes, runs.total_bytes)

    def send() -> None:
        sent = transport.write(peer.session_id, runs).result(LIMIT_SECONDS)
        assert sent == runs.total_bytes

    ways = {COPY: lambda: plain.copy(buffer.tensor.data_ptr()), "transport": send}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + WARM_UPS):
        for name, way in ways.items():  # the transport last: its bytes are looked at
            rank.context.group.barrier()
            begun = time.perf_counter()
            way()
            if turn >= WARM_UPS:
                samples[name].append(time.perf_counter() - begun)
    rank.context.group.barrier()
    plain.close()
    transport.close()
    chosen = np.random.default_rng(1).integers(0, runs.count, SAMPLED_RANGES)
    sampled = [_digest(buffer.tensor, runs, int(place)) for place in chosen]
    nbytes, ranges = runs.total_bytes, runs.count
    return {"samples": samples, "bytes": nbytes, "ranges": ranges, "sampled": sampled}


def _runs(
    context: RankContext, spec: KVPoolSpec, pages: int, shuffled: bool, local: str, remote: str
) -> Runs:
    """This rank's pages of the prompt, to where decode wants them."""
    each = pages // context.size
    places = stripe_destinations(PhysicalPages(np.arange(1, pages + 1)), 0, context.size)
    source, target = np.arange(1, each + 1), np.asarray(places)[context.rank :: context.size]
    if shuffled:
        random = np.random.default_rng(context.rank)
        source, target = random.permutation(source), random.permutation(target)
    merged = merge_pages(PhysicalPages(source), PhysicalPages(target))
    areas = PageAreas.between(spec, each, pages)
    return expand(merged, areas, local_region=local, remote_region=remote)


def _digest(tensor: torch.Tensor, runs: Runs, place: int) -> tuple[int, int, str]:
    """Where the first page's worth of a range has gone, and the digest of its bytes."""
    nbytes = min(int(runs.nbytes[place]), 1 << 13)
    start = int(runs.local_offset_bytes[place])
    data = tensor[start : start + nbytes].cpu().numpy().tobytes()
    return int(runs.remote_offset_bytes[place]), nbytes, hashlib.sha256(data).hexdigest()


class PlainCopy:
    """As many bytes by one call of the driver, to a part of decode's pool that is this rank's."""

    def __init__(self, rank: GpuRank, ipc_handle: bytes, pool_bytes: int, nbytes: int) -> None:
        self._mapping = CudaIpcMapping(ipc_handle, pool_bytes, rank.device)
        self._stream, self._nbytes = torch.cuda.Stream(rank.device), nbytes
        self._target = self._mapping.address + rank.context.rank * nbytes
        assert (rank.context.rank + 1) * nbytes <= pool_bytes
        self._driver = ctypes.CDLL("libcuda.so.1")

    def copy(self, source: int) -> None:
        """From an address of this GPU; returns when it has been made."""
        code = self._driver.cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(self._target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(self._nbytes),
            ctypes.c_void_p(self._stream.cuda_stream),
        )
        assert code == 0, f"cuMemcpyDtoDAsync failed with {code}"
        self._stream.synchronize()

    def close(self) -> None:
        """Unmap the pool."""
        self._mapping.close()


BENCHMARK = Benchmark(
    "gpu_transfer", "a prompt's pages to decode: every transport, and a plain copy", run
)
