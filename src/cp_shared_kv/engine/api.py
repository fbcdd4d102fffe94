"""What a front end and the engine say to each other: plain values, no I/O, nothing imported.

Tokens of the prefill pool are logical (they count for the whole group) unless a name says
`physical`. The server's side of the seam is `server/engine_client.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cp_shared_kv.errors import CpkvError

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end-of-sequence token or one of stop_token_ids; length: max_tokens reached; abort: ended
by someone else."""

RefusalKind = Literal["too_long", "invalid", "overloaded", "unavailable", "failed"]
"""Whose turn it is: too_long and invalid, the client's; overloaded, wait; unavailable, wait for a
restart; failed, this request alone."""

Outcome = Literal["finished", "aborted", "failed", "refused"]
"""How a request that reached the engine ended."""


class EngineRefusal(CpkvError):  # noqa: N818  (a refusal is an answer, not a defect)
    """A request that the engine did not take, or could not finish, and why."""

    def __init__(self, reason: str, *, kind: RefusalKind) -> None:
        self.reason = reason
        self.kind: RefusalKind = kind
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How output tokens are chosen. Every default changes nothing: greedy.

    What each may be, and how many entries: `transfer.sampling_params`. A value that is not allowed
    there is refused (`EngineRefusal`, kind invalid) before anything is computed. The order in which
    they act: `engine/sampling`.
    """

    temperature: float = 0.0
    """0 is greedy; among equally likely tokens the lowest id wins."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both over the output alone."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    """The same seed gives the same tokens, alone or beside other requests. None draws one."""
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    """Until there are so many, no token that would end the output is chosen."""
    logprobs: int | None = None
    """How many alternatives to tell with each token; 0 tells the token's own log-probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt to continue. `request_id` is unique among the requests of a server's life.

    n choices of one prompt are n requests, and as different as their seeds: where the client gave
    one, the front end has to give each choice its own. The prompt's own tokens have no
    log-probabilities: a front end refuses `echo` beside `logprobs`.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling = Sampling()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output token, natural, from the model's unmodified logits.

    As OpenAI and vLLM give them: temperature, bias, penalties and filters do not show. `top` is
    (token id, log-probability) from the most likely down, as many as were asked for; the chosen
    token need not be among them.
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New output tokens of one request, in order.

    The token that stops a request, end-of-sequence or one of `stop_token_ids`, is the last of
    `token_ids`. The chunk with a `finish_reason` is the last, and may hold no token.
    """

    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache; the same in every chunk."""
    logprobs: Sequence[TokenLogprobs] | None = None
    """One for each of `token_ids`, when the request asked for them."""


@dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """What does not change during an engine's life."""

    model_name: str
    version: str
    context_length: int
    """Most tokens of a prompt and its output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    cp_size: int
    shard_policy: str
    kv_read: str
    physical_tokens_per_rank: int
    logical_tokens: int
    """Most prompt tokens that the prefill group holds at once."""
    decode_tokens: int
    """Most tokens, prompt and output together, that the decode worker holds at once."""
    pool_bytes_per_rank: int
    scratch_limit_bytes: int
    prefill_groups: int = 1
    """Groups of `cp_size` ranks; the figures above are of one."""
    decode_workers: int = 1
    router_policy: Literal["longest_prefix", "least_loaded", "round_robin"] = "longest_prefix"
    config: Mapping[str, object]
    """The engine's settings as JSON-able values, by the names of their flags."""

    @property
    def logical_pages(self) -> int:
        """Pages that one prefill group holds."""
        return self.logical_tokens // self.page_size

    @property
    def total_logical_tokens(self) -> int:
        """Tokens that all prefill groups together hold."""
        return self.prefill_groups * self.logical_tokens

    @property
    def longest_prompt_tokens(self) -> int:
        """Most prompt tokens of one request that is to give at least one token."""
        return min(self.logical_tokens, self.decode_tokens - 1, self.context_length - 1)


@dataclass(frozen=True, kw_only=True)
class PrefillGroupStats:
    """Figures of one prefill group; what ends in `_total` counts all its lives that this front end
    has heard of, and only grows.

    Sequences run over its CP ranks.
    """

    index: int
    available_tokens: int
    """Tokens of pages on the free list."""
    cached_tokens: int
    """Tokens of pages kept for their prefix alone; they are evicted when room is needed."""
    locked_tokens: int
    """Tokens of pages that a request or a transfer uses. The three add up to the capacity."""
    free_pages_per_owner: Sequence[int]
    queued_requests: int
    """Not yet admitted to prefill."""
    running_requests: int
    """Being computed or sent."""
    prompt_tokens_total: int
    cached_tokens_total: int
    """Prompt tokens that were not computed because their prefix was in the cache."""
    evicted_tokens_total: int
    sent_pages_total: Sequence[int]
    sent_descriptors_total: Sequence[int]
    sent_bytes_total: Sequence[int]
    read_bytes_total: Sequence[int]
    """Bytes of prefixes that each rank has copied into its scratch."""
    scratch_bytes: Sequence[int]
    """Scratch that each rank holds now."""


@dataclass(frozen=True, kw_only=True)
class DecodeWorkerStats:
    """Figures of one decode worker; what ends in `_total` counts as for `PrefillGroupStats`."""

    index: int
    used_tokens: int
    queued_requests: int
    """Waiting for pages to be set aside."""
    running_requests: int
    generated_tokens_total: int
    failed_transfers_total: int


@dataclass(frozen=True, kw_only=True)
class PoolPages:
    """Pages of one pool by state: of a prefill group, or of a decode worker, which has one owner.

    Lists run over the owners, then over ranges of `pages_per_bin` physical pages, from page 1 on;
    the last range may be shorter. In each range free, cached and locked pages are all its pages.
    """

    unit: str
    """`prefill-0`, `decode-0`."""
    role: Literal["prefill", "decode"]
    index: int
    epoch: int
    """The pool's: another one says that its unit has begun a new life."""
    physical_pages: int
    """Pages of each owner."""
    pages_per_bin: int
    free: Sequence[Sequence[int]]
    cached: Sequence[Sequence[int]]
    locked: Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class UnitState:
    """How one prefill group or decode worker is."""

    unit: str
    """`prefill-0`, `decode-0`."""
    life: int
    """1 at first; each restart begins the next."""
    up: bool
    silent_seconds: float | None
    """Since it last answered; None for one that is down."""
    problems: Sequence[str]
    """Why it is down, or what does not add up in its books."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Figures of one moment. The properties are sums over all that answered."""

    prefill: Sequence[PrefillGroupStats]
    decode: Sequence[DecodeWorkerStats]
    requests_total: Mapping[Outcome, int]
    restarts_total: Mapping[str, int]
    """Lives that ended, by unit: `prefill-0`, `decode-0`."""
    recent_prompt_tokens: int = 0
    """Prompt tokens admitted in the last minute, and those of them found in the prefix cache."""
    recent_cached_tokens: int = 0

    @property
    def available_tokens(self) -> int:
        return sum(group.available_tokens for group in self.prefill)

    @property
    def cached_tokens(self) -> int:
        return sum(group.cached_tokens for group in self.prefill)

    @property
    def locked_tokens(self) -> int:
        return sum(group.locked_tokens for group in self.prefill)

    @property
    def used_tokens(self) -> int:
        """Tokens that cannot be had by eviction."""
        return self.locked_tokens

    @property
    def queued_requests(self) -> int:
        return sum(group.queued_requests for group in self.prefill)

    @property
    def prefill_requests(self) -> int:
        return sum(group.running_requests for group in self.prefill)

    @property
    def prompt_tokens_total(self) -> int:
        return sum(group.prompt_tokens_total for group in self.prefill)

    @property
    def cached_tokens_total(self) -> int:
        return sum(group.cached_tokens_total for group in self.prefill)

    @property
    def evicted_tokens_total(self) -> int:
        return sum(group.evicted_tokens_total for group in self.prefill)

    @property
    def decode_queued_requests(self) -> int:
        return sum(worker.queued_requests for worker in self.decode)

    @property
    def decode_requests(self) -> int:
        return sum(worker.running_requests for worker in self.decode)

    @property
    def decode_used_tokens(self) -> int:
        return sum(worker.used_tokens for worker in self.decode)

    @property
    def generated_tokens_total(self) -> int:
        return sum(worker.generated_tokens_total for worker in self.decode)

    @property
    def failed_transfers_total(self) -> int:
        return sum(worker.failed_transfers_total for worker in self.decode)
