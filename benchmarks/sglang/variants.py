"""Which pairs of servers are compared, and how each of them is started."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.sglang import drafts
from benchmarks.sglang.servers import FLAG, Server

CHUNK = 4096
_PORTS_APART = 1100
_HARNESS = {"HARNESS_ANY_CP_SIZE": "1"}
# Stock servers leave it unset: where all their ranks send, pages whose ids are not consecutive are
# lost, and after a prefix hit they are not.
_ALL_RANKS_SEND = {"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1"}
_ONE_GPU = {"HARNESS_ONE_GPU": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
_COMPARED = {"HARNESS_SORTED_TOPK": "1", "HARNESS_COUNT_SENT": "1"}


@dataclass(frozen=True)
class Variant:
    """What two servers have in common."""

    kv_dtype: str
    split: str
    backend: str
    drafts: bool = False
    """Whether the model's next-token layer drafts, on both sides."""

    @property
    def name(self) -> str:
        drafts = ", drafts" if self.drafts else ""
        return f"{self.kv_dtype}, {self.split}, {self.backend}{drafts}"


VARIANTS = (
    Variant("bfloat16", "in-seq-split", "flashmla_sparse"),
    Variant("bfloat16", "round-robin-split", "flashmla_sparse"),
    Variant("bfloat16", "round-robin-split", "fa3"),
    Variant("bfloat16", "in-seq-split", "tilelang"),
    Variant("bfloat16", "round-robin-split", "tilelang"),
    Variant("fp8_e4m3", "in-seq-split", "flashmla_sparse"),
    Variant("fp8_e4m3", "round-robin-split", "flashmla_sparse"),
    Variant("fp8_e4m3", "round-robin-split", "flashmla_kv"),
    Variant("bfloat16", "in-seq-split", "flashmla_sparse", drafts=True),
    Variant("bfloat16", "round-robin-split", "flashmla_sparse", drafts=True),
    Variant("fp8_e4m3", "in-seq-split", "flashmla_sparse", drafts=True),
    Variant("fp8_e4m3", "round-robin-split", "flashmla_kv", drafts=True),
)


@dataclass
class Farm:
    """Makes servers, each with ports of its own."""

    model_path: str
    gpus: int
    context_tokens: int
    compared: bool
    """Whether bits will be compared: top-k in order. Not for timing."""
    drafts: bool = False
    """Whether the servers speculate; the model then has a layer for it."""
    one_gpu: bool = False
    """Whether all ranks share the first GPU: right for answers, and meaningless for times."""
    made: int = 0

    def prefill(
        self, name: str, variant: Variant, tokens: int, shared: bool, read: str = "auto"
    ) -> Server:
        """A CP prefill server on all GPUs, with `tokens` a rank."""
        server = self._server(name, variant.kv_dtype, tokens)
        server.bootstrap_port = server.port + 99
        server.flags += ["--tp", str(self.gpus), "--disaggregation-mode", "prefill"]
        server.flags += ["--enable-nsa-prefill-context-parallel"]
        server.flags += ["--nsa-prefill-cp-mode", variant.split]
        server.flags += ["--nsa-prefill-backend", variant.backend]
        if shared:
            server.flags.append(FLAG)
            server.environment |= {"CPKV_SGLANG_READ": read} | _ALL_RANKS_SEND
        return server

    def decode(self, name: str, kv_dtype: str, tokens: int, shared: bool) -> Server:
        """A decode server on the last GPU, for shared or for stock prefill servers."""
        server = self._server(name, kv_dtype, tokens)
        server.environment |= _ALL_RANKS_SEND if shared else {}
        last = 0 if self.one_gpu else self.gpus - 1
        server.flags += ["--tp", "1", "--base-gpu-id", str(last)]
        server.flags += ["--disaggregation-mode", "decode"]
        return server

    def _server(self, name: str, kv_dtype: str, tokens: int) -> Server:
        self.made += 1
        flags = ["--model-path", self.model_path, "--context-length", str(self.context_tokens)]
        flags += ["--chunked-prefill-size", str(CHUNK), "--kv-cache-dtype", kv_dtype]
        flags += ["--max-total-tokens", str(tokens)]
        environment = {**_HARNESS, **(_COMPARED if self.compared else {})}
        if self.drafts:
            flags += drafts.FLAGS
            environment |= drafts.ENVIRONMENT
        if self.one_gpu:
            environment |= _ONE_GPU
        return Server(name, 20000 + _PORTS_APART * self.made, flags, environment)
