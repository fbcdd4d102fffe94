"""One frozen config; every rule about what goes with what is checked when it is built."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cp_shared_kv.engine.config_values import (
    CONTROL_PORT,
    READ_IN_BLOCKS,
    Device,
    Dtype,
    KVCacheDtype,
    KVRead,
    KVReader,
    KVTransportName,
    LogLevel,
    RouterPolicy,
    check_values,
    flag,
)
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.host_address import check_host
from cp_shared_kv.errors import ConfigError
from cp_shared_kv.layout.sequence_split import SplitMode
from cp_shared_kv.model.ops.names import AttentionOpsName
from cp_shared_kv.transfer.transports import TransferBackend


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything a user can choose. Names follow SGLang's flags where SGLang has one.

    Raises `ConfigError` for a value out of range and for settings that do not go together.
    """

    model_path: Path
    """Directory of a Hugging Face checkpoint (config.json, safetensors, tokenizer.json), or `demo`
    for a tiny built-in model."""

    served_model_name: str | None = None
    """Name that clients ask for; the directory's name by default."""

    host: str = "127.0.0.1"
    """Address of the HTTP server."""

    port: int = 30000
    """Port of the HTTP server; 0 picks a free one."""

    device: Device = "cpu"
    """Where the ranks and decode workers compute and keep KV: on the CPU, or each rank on a GPU of
    its own; decode workers take further GPUs, or share them."""

    ranks_share_gpus: bool = False
    """Let the ranks of a group share GPUs where there are too few: to try things out, slowly."""

    dtype: Dtype = "auto"
    """Compute type of the model; auto takes the checkpoint's, with bfloat16 for its float16."""

    attention_ops: AttentionOpsName = "auto"
    """What computes sparse attention: torch, triton or hopper; auto takes the last that runs."""

    kv_cache_dtype: KVCacheDtype = "auto"
    """What KV pages store; auto takes the compute type, fp8_e4m3 needs a model of its widths."""

    page_size: int = 64
    """Tokens a KV page holds: the unit of ownership, prefix matching and transfer."""

    context_length: int | None = None
    """Longest prompt plus output in tokens; the model's own limit by default."""

    chunked_prefill_size: int = 2048
    """New tokens that one prefill batch may compute."""

    max_total_tokens: int | None = None
    """Physical KV tokens of each rank; by default half of the free memory, of GPUs 0.9 of it, is
    shared out, up to four contexts a rank."""

    decode_max_total_tokens: int | None = None
    """KV tokens of each decode worker; by default the logical tokens of a prefill group."""

    max_running_requests: int = 64
    """Requests that may decode at once."""

    max_queued_requests: int | None = None
    """Requests that may wait for prefill before more are answered 503; by default any number."""

    attention_context_parallel_size: int = 1
    """Ranks of the prefill context-parallel group (N)."""

    prefill_groups: int = 1
    """Prefill groups of this run, each of N ranks with a pool and a prefix cache of its own."""

    decode_workers: int = 1
    """Decode workers of this run, each with a pool of its own; any group can send to any."""

    router_policy: RouterPolicy = "longest_prefix"
    """Which group and decode worker takes a request: those that hold most of its prompt unless
    they have much more to do than others, those with least to do, or each in its turn."""

    enable_nsa_prefill_context_parallel: bool = False
    """Split the prefill of sparse-attention (NSA, DSA) models over the group; needs N of 2 or
    more."""

    nsa_prefill_cp_mode: SplitMode = "in-seq-split"
    """How a chunk's tokens are dealt to the ranks: in consecutive pieces from both ends (even work
    under causal attention), or one by one."""

    enable_nsa_prefill_cp_shared_kv: bool = False
    """Give each KV page one owner among the ranks: N times the capacity, the same answers. Needs
    --enable-nsa-prefill-context-parallel."""

    kv_read: KVRead = "auto"
    """How a rank reads pages it does not own: one-sided pull out of its peers' memory, push by
    their owners (GPUs only), a collective gather of bytes, or sparse: a pull of index K in blocks,
    and of latent KV the rows alone that a rank's tokens have selected; auto is pull, and on GPUs
    whichever of pull, push and sparse is estimated to be fastest for a batch."""

    kv_scratch_tokens: int | None = None
    """Prefix tokens of one layer that a rank's scratch holds at once, with --kv-read sparse or, on
    GPUs, auto; by default the longest prefix. Longer ones are read in blocks, with the same
    answers."""

    disaggregation_transfer_backend: TransferBackend = "shared_memory"
    """What carries KV pages from prefill to decode: copies into mapped memory, of the host or of
    GPUs, or the Mooncake Transfer Engine (of the extra `mooncake`; with --device cuda its build for
    CUDA) over TCP within this host, or NVLink with MC_INTRANODE_NVLINK=1 in the environment."""

    verify_kv_transfer: bool = False
    """Send a checksum with each KV page and compare it before decode starts: a page damaged on its
    way fails its request alone, with the page's name."""

    disable_radix_cache: bool = False
    """Never reuse the KV of earlier prompts."""

    record_batches: Path | None = None
    """Directory for a recording of all batch messages and logits (costs speed; for proofs)."""

    control_host: str | None = None
    """IPv4 address of this host at which decode workers on other hosts can join (`cpkv join`); by
    default none can. Needs --control-keys and the mooncake backend."""

    control_port: int = CONTROL_PORT
    """Port at --control-host where they join; 0 picks a free one."""

    control_keys: Path | None = None
    """Directory with the keys of the cluster (`cpkv keys` makes them): who has them gets in."""

    api_key: str | None = field(default=None, repr=False)
    """Key that HTTP clients must send as `Authorization: Bearer KEY`; by default the environment's
    CPKV_API_KEY, which `ps` does not show, or else none."""

    enable_metrics: bool = False
    """Serve Prometheus metrics at /metrics."""

    shutdown_timeout: int = 20
    """Seconds that answers under way may go on after SIGTERM or Ctrl-C."""

    start_timeout: int = 180
    """Seconds that processes may take to load the model before they count as failed."""

    watchdog_timeout: int = 300
    """Seconds without a sign of life after which a process counts as hung, is killed and started
    again."""

    log_level: LogLevel = "info"
    """Least severe log lines to show."""

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                "cp-shared-kv runs on Linux only",
                value=sys.platform,
                change="use a Linux machine, virtual machine or container",
            )
        check_values(vars(self))
        self._check_combinations()
        self._check_control()

    @property
    def cp_size(self) -> int:
        """Ranks of the prefill group (N)."""
        return self.attention_context_parallel_size

    @property
    def shares_kv(self) -> bool:
        """Whether pages have one owner (else every rank keeps a full replica)."""
        return self.enable_nsa_prefill_cp_shared_kv

    @property
    def resolved_kv_read(self) -> KVReader:
        """The read path that will run: `local` where each rank has every page itself."""
        if not self.shares_kv or self.cp_size == 1:
            return "local"
        if self.kv_read == "auto":
            return "cheapest" if self.device == "cuda" else "pull"
        return self.kv_read

    @property
    def transport(self) -> KVTransportName:
        """What carries pages to decode: mapped memory is mapped by CUDA where it is a GPU's."""
        if self.disaggregation_transfer_backend == "shared_memory" and self.device == "cuda":
            return "cuda_ipc"
        return self.disaggregation_transfer_backend

    @property
    def model_name(self) -> str:
        """The name that clients ask for."""
        # Made absolute, for "." has no name of its own; links keep the name that the user gave.
        return self.served_model_name or Path(os.path.abspath(self.model_path)).name

    def _check_combinations(self) -> None:
        for name in ("max_total_tokens", "decode_max_total_tokens"):
            tokens: int | None = getattr(self, name)
            if tokens is not None and tokens < self.page_size:
                raise ConfigError(
                    f"{flag(name)} is less than one page",
                    value=tokens,
                    allowed=f"at least --page-size {self.page_size}",
                )
        if self.cp_size > 1 and not self.enable_nsa_prefill_context_parallel:
            raise ConfigError(
                "several ranks need prefill context parallelism",
                value=f"--attention-context-parallel-size {self.cp_size}",
                change="add --enable-nsa-prefill-context-parallel, or use one rank",
            )
        if self.enable_nsa_prefill_context_parallel and self.cp_size < 2:
            raise ConfigError(
                "--enable-nsa-prefill-context-parallel has nothing to split over",
                value=f"--attention-context-parallel-size {self.cp_size}",
                allowed="2 or more ranks",
                change="raise --attention-context-parallel-size or drop the flag",
            )
        if self.shares_kv and not self.enable_nsa_prefill_context_parallel:
            raise ConfigError(
                "--enable-nsa-prefill-cp-shared-kv shares the KV of a context-parallel group",
                change="add --enable-nsa-prefill-context-parallel and "
                "--attention-context-parallel-size 2 or more",
            )
        if self.kv_read != "auto" and not self.shares_kv:
            raise ConfigError(
                "--kv-read chooses how shared pages are read, and nothing is shared",
                value=self.kv_read,
                allowed="auto",
                change="add --enable-nsa-prefill-cp-shared-kv or drop --kv-read",
            )
        for setting, is_set in (
            (f"--attention-ops {self.attention_ops}", self.attention_ops in ("triton", "hopper")),
            ("--kv-read push", self.kv_read == "push"),
            ("--ranks-share-gpus", self.ranks_share_gpus),
        ):
            if is_set and self.device != "cuda":
                raise ConfigError(
                    f"{setting} is for GPUs",
                    value=f"--device {self.device}",
                    change="add --device cuda, or drop it",
                )
        if self.kv_scratch_tokens is not None and self.resolved_kv_read not in READ_IN_BLOCKS:
            raise ConfigError(
                "--kv-scratch-tokens bounds what is read in blocks, and whole prefixes are read",
                value=f"--kv-read {self.kv_read}",
                allowed="--kv-read sparse, or auto between GPUs",
                change="add --kv-read sparse or drop --kv-scratch-tokens",
            )
        if self.record_batches is not None and self.prefill_groups + self.decode_workers > 2:
            raise ConfigError(
                "--record-batches records one prefill group and one decode worker",
                value=f"--prefill-groups {self.prefill_groups} "
                f"--decode-workers {self.decode_workers}",
                change="record with one of each",
            )

    def _check_control(self) -> None:
        if self.control_host is None:
            if self.control_keys is not None or self.control_port != CONTROL_PORT:
                raise ConfigError(
                    "--control-keys and --control-port are for links to other hosts",
                    change="add --control-host, the address of this host that they reach",
                )
            return
        check_host("--control-host", self.control_host)
        if self.control_keys is None:
            raise ConfigError(
                "--control-host would let other hosts in without keys",
                value=self.control_host,
                change="make keys with `cpkv keys DIRECTORY` and add --control-keys DIRECTORY",
            )
        if self.disaggregation_transfer_backend != "mooncake":
            raise ConfigError(
                "--control-host is for decode workers on other hosts, which no page would reach",
                value=f"--disaggregation-transfer-backend {self.disaggregation_transfer_backend}",
                allowed="mooncake",
            )
        if self.device != "cpu":
            raise ConfigError(
                "--control-host is for workers on other hosts, which run on CPUs only so far",
                value=f"--device {self.device}",
                allowed="--device cpu",
            )
        if self.record_batches is not None:
            raise ConfigError(
                "--record-batches records one prefill group and one decode worker, on one host",
                change="drop --control-host or --record-batches",
            )
        ControlKeys.load(self.control_keys)

    def as_plain(self) -> dict[str, Any]:
        """The config as JSON-able values, paths as strings (for child processes, /server_info)."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: str(v) if isinstance(v, Path) else v for k, v in plain.items()}

    def as_shown(self) -> dict[str, Any]:
        """As `as_plain`, but for everybody to see: without the API key."""
        return self.as_plain() | {"api_key": None if self.api_key is None else "(set)"}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> EngineConfig:
        """Inverse of `as_plain`; checks every rule again."""
        values = dict(plain)
        for name in ("model_path", "record_batches", "control_keys"):
            if values.get(name) is not None:
                values[name] = Path(values[name])
        return cls(**values)
