"""An engine without one: it answers the server as a test tells it to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator

from cp_shared_kv.engine.api import (
    DecodeWorkerStats,
    EngineDescription,
    EngineRefusal,
    EngineStats,
    FinishReason,
    GenerateRequest,
    PoolPages,
    PrefillGroupStats,
    TokenChunk,
    TokenLogprobs,
    UnitState,
)

EOS = 257
"""The end of a sequence: `</s>` of the tokenizer of bytes, `<s>`, `</s>`."""
VOCAB_SIZE = 260

DESCRIPTION = EngineDescription(
    model_name="fake-model",
    version="0.0.test",
    context_length=1024,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(EOS,),
    page_size=64,
    cp_size=4,
    shard_policy="page_interleaved",
    kv_read="pull",
    physical_tokens_per_rank=128,
    logical_tokens=512,
    decode_tokens=768,
    pool_bytes_per_rank=3 * 2**20,
    scratch_limit_bytes=65536,
    config={"model_path": "/models/fake", "port": 30000},
)

STATS = EngineStats(
    prefill=[
        PrefillGroupStats(
            index=0,
            available_tokens=192,
            cached_tokens=128,
            locked_tokens=192,
            free_pages_per_owner=(1, 1, 1, 0),
            queued_requests=3,
            running_requests=2,
            prompt_tokens_total=1000,
            cached_tokens_total=250,
            evicted_tokens_total=64,
            sent_pages_total=(4, 3, 3, 2),
            sent_descriptors_total=(8, 6, 6, 4),
            sent_bytes_total=(4000, 3000, 3000, 2000),
            read_bytes_total=(100, 200, 300, 400),
            scratch_bytes=(10, 20, 30, 40),
        )
    ],
    decode=[
        DecodeWorkerStats(
            index=0,
            used_tokens=320,
            queued_requests=1,
            running_requests=5,
            generated_tokens_total=77,
            failed_transfers_total=1,
        )
    ],
    requests_total={"finished": 9, "aborted": 2, "failed": 1, "refused": 4},
    restarts_total={"decode-0": 1},
)


POOLS = [
    PoolPages(
        unit="prefill-0",
        role="prefill",
        index=0,
        epoch=2**60 + 1,
        physical_pages=2,
        pages_per_bin=1,
        free=[[1, 0], [0, 1], [0, 1], [0, 0]],
        cached=[[0, 1], [0, 0], [0, 0], [1, 0]],
        locked=[[0, 0], [1, 0], [1, 0], [0, 1]],
    ),
    PoolPages(
        unit="decode-0",
        role="decode",
        index=0,
        epoch=2**60 + 2,
        physical_pages=12,
        pages_per_bin=6,
        free=[[1, 6]],
        cached=[[0, 0]],
        locked=[[5, 0]],
    ),
]
UNITS = [
    UnitState(unit="prefill-0", life=1, up=True, silent_seconds=0.5, problems=[]),
    UnitState(unit="decode-0", life=2, up=False, silent_seconds=None, problems=["it was killed"]),
]


class FakeEngine:
    """Gives `output` token by token, or `outputs` to one request after the other. What a test
    changes on it is reset before the next.

    The log-probability of token t is -t / 100; its alternatives are t, t + 1, ...
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.output = list(b"the answer")
        self.outputs: list[list[int]] = []
        self.tokens_per_chunk = 1
        self.eos_token_id = EOS
        self.cached_tokens = 0
        self.refusal: EngineRefusal | None = None
        self.refuse_after_tokens = 0
        self.stall_after_tokens: int | None = None
        self.end_without_reason = False
        self.abort_after_tokens: int | None = None
        self.crash: Exception | None = None
        self.health = (True, "ok")
        self.problems: dict[str, list[str]] = {"prefill-0": [], "decode-0": []}
        self.current_stats: EngineStats | None = STATS
        self.pools = POOLS
        self.most_bins = 0
        self.requests: list[GenerateRequest] = []
        self.started = threading.Event()
        self.stalled = threading.Event()
        self.aborted: list[str] = []
        self.aborted_finished: bool | None = None
        self.abort_called = threading.Event()

    async def describe(self) -> EngineDescription:
        return DESCRIPTION

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        self.requests.append(request)
        self.started.set()
        if self.crash is not None:
            raise self.crash
        sent = 0
        for token_ids, reason in self._script(request):
            if self.stall_after_tokens is not None and sent >= self.stall_after_tokens:
                await self._stall()
            if self.refusal is not None and sent >= self.refuse_after_tokens:
                raise self.refusal
            if self.abort_after_tokens is not None and sent >= self.abort_after_tokens:
                yield TokenChunk([], "abort", self.cached_tokens)
                return
            if reason is not None and self.end_without_reason:
                return
            yield TokenChunk(token_ids, reason, self.cached_tokens, _logprobs(request, token_ids))
            sent += len(token_ids)
            await asyncio.sleep(0)

    def _script(self, request: GenerateRequest) -> Iterator[tuple[list[int], FinishReason | None]]:
        output = self.outputs.pop(0) if self.outputs else self.output
        output = output[: request.max_tokens]
        ending = set(request.sampling.stop_token_ids)
        ending |= set() if request.sampling.ignore_eos else {self.eos_token_id}
        stops = [at for at, token_id in enumerate(output) if token_id in ending]
        stopped = bool(stops)
        if stopped:
            output = output[: stops[0] + 1]
        size = self.tokens_per_chunk
        pieces = [output[i : i + size] for i in range(0, len(output), size)]
        for piece in pieces[:-1]:
            yield piece, None
        yield pieces[-1], "stop" if stopped else "length"

    async def _stall(self) -> None:
        self.stalled.set()
        while self.stall_after_tokens is not None:
            await asyncio.sleep(0.01)

    def release(self) -> None:
        """Let what is stalled go on."""
        self.stall_after_tokens = None

    async def abort(self, request_id: str, *, finished: bool = False) -> None:
        self.aborted.append(request_id)
        self.aborted_finished = finished
        self.abort_called.set()

    async def flush_cache(self) -> int:
        if self.refusal is not None:
            raise self.refusal
        return 2

    async def check_invariants(self) -> dict[str, list[str]]:
        if self.refusal is not None:
            raise self.refusal
        return self.problems

    async def stats(self) -> EngineStats:
        if self.current_stats is None:
            raise EngineRefusal("the engine does not answer", kind="unavailable")
        return self.current_stats

    async def page_maps(self, most_bins: int) -> list[PoolPages]:
        if self.current_stats is None:
            raise EngineRefusal("the engine does not answer", kind="unavailable")
        self.most_bins = most_bins
        return self.pools

    def units(self) -> list[UnitState]:
        return UNITS

    def healthy(self) -> tuple[bool, str]:
        return self.health


def _logprobs(request: GenerateRequest, token_ids: list[int]) -> list[TokenLogprobs] | None:
    count = request.sampling.logprobs
    if count is None:
        return None
    return [
        TokenLogprobs(t, -t / 100, [(t + i, -(t + i) / 100) for i in range(count)])
        for t in token_ids
    ]
