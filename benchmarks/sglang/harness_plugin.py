"""A test-only SGLang plugin: what comparing two servers on a small machine needs. Not our product.

HARNESS_ANY_CP_SIZE=1    lifts SGLang's assertion that a CP group has 8 ranks
HARNESS_SORTED_TOPK=1    exact top-k by torch, in ascending order: SGLang's kernel has indices in
                         the order of arrival, and drops candidates where many score alike, so
                         that stock alone does not repeat its own bits
HARNESS_COUNT_SENT=1     a line in the log for each send of KV pages, with their number
HARNESS_DENSE_DRAFT=1    a draft's layer without experts
HARNESS_LOG_DRAFTS=1     a line in the log for each forward of a draft, with a digest of its logits
HARNESS_ONE_GPU=1        all ranks on one GPU, for a look at answers and never at times: NCCL takes
                         each process for a host of its own, and goes over sockets
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

_log = logging.getLogger("harness")
_NAME = "cpkv_harness"


def install(folder: Path) -> None:
    """Make the plugin known to processes that have `folder` and the checkout on their path."""
    metadata = folder / f"{_NAME}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n")
    points = f"[sglang.srt.plugins]\n{_NAME} = benchmarks.sglang.harness_plugin:activate\n"
    (metadata / "entry_points.txt").write_text(points)


def activate() -> None:
    """What SGLang calls in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if _wanted("HARNESS_ONE_GPU"):
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    for name, target, function, kind in _HOOKS:
        if _wanted(name):
            HookRegistry.register(f"sglang.srt.{target}", function, HookType[kind])
    if _wanted("HARNESS_SORTED_TOPK"):
        _sort_topk()


def _wanted(name: str) -> bool:
    return os.environ.get(name) == "1"


def _one_gpu(original, self):
    """A step of 0 from rank to rank, which the check refuses."""
    self.gpu_id_step = 1
    original(self)
    self.gpu_id_step = 0


def _any_cp_size(original, self):
    """The assertion looks at tp_size alone, and derives the sizes of groups from it."""
    if not self.enable_nsa_prefill_context_parallel:
        return original(self)
    tp_size, self.tp_size = self.tp_size, 8
    try:
        original(self)
    finally:
        self.tp_size = tp_size
    self.attn_cp_size = tp_size // self.dp_size
    if self.nsa_prefill_cp_mode == "in-seq-split":
        self.ep_size = tp_size
    return None


def _count_sent(result, self, _session_id, pages, *_args, **_kwargs):
    _log.warning("sent pages=%d cp_rank=%d status=%s", len(pages), self.attn_cp_rank, result)


def _dense_draft(original, self, layer_id, is_nextn):
    return False if is_nextn else original(self, layer_id, is_nextn)


def _log_draft(result, self, forward_batch, *_args, **_kwargs):
    if not self.is_draft_worker or self.tp_rank != 0:
        return
    logits = result.logits_output.next_token_logits
    digest = hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()[:16]
    # A request's name ends before its room, see requests.py.
    names = [str(name).rsplit("/", 1)[0] for name in forward_batch.rids or []]
    totals = ",".join(map(str, forward_batch.seq_lens.tolist()))
    _log.warning(
        "draft %s of [%s] total=%s sha=%s",
        *(forward_batch.forward_mode.name, "; ".join(names), totals, digest),
    )


_HOOKS = (
    ("HARNESS_ONE_GPU", "server_args.ServerArgs.check_server_args", _one_gpu, "AROUND"),
    (
        "HARNESS_ANY_CP_SIZE",
        "server_args.ServerArgs._handle_model_specific_adjustments",
        _any_cp_size,
        "AROUND",
    ),
    (
        "HARNESS_COUNT_SENT",
        "disaggregation.mooncake.conn.MooncakeKVManager.send_kvcache",
        _count_sent,
        "AFTER",
    ),
    (
        "HARNESS_DENSE_DRAFT",
        "models.deepseek_v2.DeepseekV2DecoderLayer._is_layer_sparse",
        _dense_draft,
        "AROUND",
    ),
    ("HARNESS_LOG_DRAFTS", "model_executor.model_runner.ModelRunner.forward", _log_draft, "AFTER"),
)
"""By the variable that asks for it: what is wrapped, below sglang.srt, and how."""


def _sort_topk() -> None:
    """Exchange SGLang's top-k functions, which it imports anew for each call."""
    import sgl_kernel
    import torch

    def positions(score, lengths, topk, row_starts=None):
        starts = torch.zeros_like(lengths) if row_starts is None else row_starts
        starts, ends = starts.view(-1, 1), (starts + lengths).view(-1, 1)
        column = torch.arange(score.shape[1], device=score.device)
        inside = torch.where((column >= starts) & (column < ends), score, float("-inf"))
        best = inside.topk(min(topk, score.shape[1]), dim=1)
        none = torch.iinfo(torch.int32).max
        found = torch.where(best.values.isneginf(), none, best.indices - starts)
        # With up to topk columns SGLang's kernel takes all of a row, whatever they score.
        place = torch.arange(found.shape[1], device=score.device)
        every = torch.where(place < lengths.view(-1, 1), place, none)
        found = torch.where(lengths.view(-1, 1) <= topk, every, found).sort(dim=1).values
        found = torch.where(found == none, -1, found).int()
        return torch.nn.functional.pad(found, (0, topk - found.shape[1]), value=-1)

    def paged(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None):
        found = positions(score, lengths, topk, row_starts)
        tokens = torch.arange(len(found), device=found.device)
        requests = torch.bucketize(tokens, cu_seqlens_q[1:].long(), right=True)
        requests = requests.clamp(max=len(page_table_size_1) - 1)
        # Rows that pad a CP split may ask for positions past the table, which SGLang lets pass.
        columns = found.clamp(min=0, max=page_table_size_1.shape[1] - 1).long()
        locs = page_table_size_1[requests.unsqueeze(1), columns]
        return torch.where(found < 0, -1, locs.int())

    def ragged(score, lengths, topk_indices_offset, topk, row_starts=None):
        found = positions(score, lengths, topk, row_starts)
        return torch.where(found < 0, -1, found + topk_indices_offset.view(-1, 1)).int()

    sgl_kernel.fast_topk_v2 = positions
    sgl_kernel.fast_topk_transform_fused = paged
    sgl_kernel.fast_topk_transform_ragged_fused = ragged
