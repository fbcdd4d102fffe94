"""Which values each setting of the config may have, whatever the others say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.layout.sequence_split import SplitMode
from cp_shared_kv.model.ops.names import AttentionOpsName
from cp_shared_kv.reads.piece_size import PIECE_TOKENS
from cp_shared_kv.transfer.messages import MAX_TOKENS
from cp_shared_kv.transfer.transports import TransferBackend

Device = Literal["cpu", "cuda"]
KVRead = Literal["auto", "pull", "push", "collective", "sparse"]
KVReader = Literal["pull", "push", "collective", "sparse", "cheapest", "local"]
"""The read paths that there are. `cheapest` takes pull, push or sparse for each batch; `local` is
that of a rank which has every page itself."""
READ_IN_BLOCKS: tuple[KVReader, ...] = ("sparse", "cheapest")
"""Those that need no scratch for a whole prefix."""
KVTransportName = TransferBackend | Literal["cuda_ipc"]
Dtype = Literal["auto", "float32", "bfloat16"]
RouterPolicy = Literal["longest_prefix", "least_loaded", "round_robin"]
KVCacheDtype = Literal["auto", "bf16", "fp8_e4m3", "fp32"]
LogLevel = Literal["debug", "info", "warning", "error"]

API_KEY_VARIABLE = "CPKV_API_KEY"
MAX_PAGE_SIZE = 1024
MAX_CP_SIZE = 64
CONTROL_PORT = 30001
MAX_UNITS = 64
"""Most prefill groups, or decode workers, of one run."""

CHOICES: dict[str, tuple[str, ...]] = {
    "device": get_args(Device),
    "dtype": get_args(Dtype),
    "attention_ops": get_args(AttentionOpsName),
    "kv_cache_dtype": get_args(KVCacheDtype),
    "nsa_prefill_cp_mode": get_args(SplitMode),
    "kv_read": get_args(KVRead),
    "router_policy": get_args(RouterPolicy),
    "disaggregation_transfer_backend": get_args(TransferBackend),
    "log_level": get_args(LogLevel),
}
LEAST_MOST: dict[str, tuple[int, int]] = {
    "port": (0, 65535),
    "control_port": (0, 65535),
    "page_size": (1, MAX_PAGE_SIZE),
    "context_length": (2, MAX_TOKENS),
    "chunked_prefill_size": (1, MAX_TOKENS),
    "kv_scratch_tokens": (PIECE_TOKENS, 2**40),
    "max_total_tokens": (1, 2**40),
    "decode_max_total_tokens": (1, 2**40),
    "max_running_requests": (1, 4096),
    "max_queued_requests": (1, 2**20),
    "shutdown_timeout": (0, 86400),
    "start_timeout": (1, 86400),
    "watchdog_timeout": (2, 86400),
    "prefill_groups": (1, MAX_UNITS),
    "decode_workers": (1, MAX_UNITS),
    "attention_context_parallel_size": (1, MAX_CP_SIZE),
}


def flag(field: str) -> str:
    """The command-line spelling of a config field."""
    return "--" + field.replace("_", "-")


def check_values(values: Mapping[str, Any]) -> None:
    """Check each setting, by its field's name. ConfigError for the first that cannot be."""
    for name, allowed in CHOICES.items():
        if values[name] not in allowed:
            raise ConfigError(
                f"{flag(name)} has an unknown value",
                value=values[name],
                allowed=", ".join(allowed),
            )
    for name, (least, most) in LEAST_MOST.items():
        value = values[name]
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"{flag(name)} is out of range", value=value, allowed=f"{least} to {most}"
            )
    _check_page_size(values["page_size"])
    _check_texts(values)


def _check_page_size(page_size: int) -> None:
    if page_size & (page_size - 1):
        raise ConfigError(
            "--page-size is not a power of two",
            value=page_size,
            allowed=f"1, 2, 4 ... {MAX_PAGE_SIZE}",
            change="64 is what the production formats use",
        )


def _check_texts(values: Mapping[str, Any]) -> None:
    api_key = values["api_key"]
    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        # The value is a secret: it is not repeated.
        raise ConfigError(
            f"--api-key, or {API_KEY_VARIABLE} in its place, cannot be sent in a header",
            allowed="one or more printable ASCII characters without spaces",
        )
    if not values["host"]:
        raise ConfigError("--host is empty", allowed="an address such as 127.0.0.1 or 0.0.0.0")
