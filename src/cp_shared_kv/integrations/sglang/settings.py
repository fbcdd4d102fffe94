"""What is set through the environment, for it reaches child processes whatever starts them."""

from __future__ import annotations

import os

from cp_shared_kv.errors import ConfigError

RUN_WITH_FLAG = "CPKV_SGLANG_RUN_WITH_FLAG"
"""Set by the gate for its child processes: they wrap all that a shared pool needs."""
ALL_RANKS_SEND = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"
"""SGLang's: prefill ranks all send, and decode waits for all of them. Needed on both sides."""

SCRATCH_TOKENS = "CPKV_SGLANG_SCRATCH_TOKENS"
READ = "CPKV_SGLANG_READ"
READS = ("auto", "pull", "collective")
LAYERS_WHERE_PULLED = 2
"""The prefix of the layer in use, and that of the next, on its way."""


def run_with_flag() -> bool:
    """Whether this process belongs to a server that was started with the flag."""
    return os.environ.get(RUN_WITH_FLAG) == "1"


def all_ranks_send() -> bool:
    """Whether SGLang would have all prefill ranks send, or decode wait for all of them."""
    return os.environ.get(ALL_RANKS_SEND, "").lower() in ("1", "true", "yes")


def scratch_tokens(context_tokens: int, chunk_tokens: int) -> int:
    """Tokens of one batch, prefix and chunk together, that scratch is provisioned for.

    The default is the longest context and a chunk. ConfigError for a setting that could not hold
    one context.
    """
    text = os.environ.get(SCRATCH_TOKENS, "")
    if not text:
        return context_tokens + chunk_tokens
    if not text.isdigit() or int(text) < context_tokens:
        raise ConfigError(
            SCRATCH_TOKENS,
            value=text,
            allowed=f"{context_tokens} or more, the longest context",
            change="raise it, or lower --context-length",
        )
    return int(text)


def read() -> str:
    """How cached prefixes are read: one of READS. ConfigError for anything else."""
    wanted = os.environ.get(READ, "") or READS[0]
    if wanted not in READS:
        raise ConfigError(READ, value=wanted, allowed=", ".join(READS))
    return wanted
