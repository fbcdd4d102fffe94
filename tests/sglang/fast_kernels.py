"""What SGLang's Triton kernels do, in torch: their interpreter takes seconds for a few tokens.

The same functions serve the shared and the replicated pool. That the kernels themselves write and
read alike, by our tables, is shown by the test that has them interpreted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from sglang.srt.layers.attention.nsa import index_buf_accessor as accessor
from sglang.srt.mem_cache import memory_pool

from cp_shared_kv.integrations.sglang.page_formats import pool_spec

_SPEC = pool_spec(656, 512, 64, 128, 1)
_KEY_BYTES = 128


@contextlib.contextmanager
def fast_kernels() -> Iterator[None]:
    """For the time of the context."""
    with (
        mock.patch.object(accessor.GetK, "execute", _get_k),
        mock.patch.object(accessor.GetS, "execute", _get_s),
        mock.patch.object(accessor.GetKAndS, "execute", _get_k_and_s),
        mock.patch.object(accessor.SetKAndS, "execute", _set_k_and_s),
        mock.patch.object(memory_pool, "set_mla_kv_buffer_triton", _set_mla_kv_buffer),
        mock.patch.object(memory_pool, "quantize_k_cache_separate", _quantize),
    ):
        yield


def _index_rows(pool, buf, seq_len, page_indices):
    token = torch.arange(seq_len)
    slots = page_indices.long()[token // pool.page_size] * pool.page_size + token % pool.page_size
    return _SPEC.index.gather_rows(buf, slots)


def _get_k(pool, buf, seq_len, page_indices):
    return _index_rows(pool, buf, seq_len, page_indices)[:, :_KEY_BYTES]


def _get_s(pool, buf, seq_len, page_indices):
    return _index_rows(pool, buf, seq_len, page_indices)[:, _KEY_BYTES:]


def _get_k_and_s(pool, buf, page_indices, seq_len_tensor, seq_len_sum, max_seq_len):
    lengths = seq_len_tensor.tolist()
    assert (sum(lengths), max(lengths)) == (seq_len_sum, max_seq_len)
    requests = zip(lengths, page_indices, strict=True)
    rows = torch.cat([_index_rows(pool, buf, length, pages) for length, pages in requests])
    return rows[:, :_KEY_BYTES], rows[:, _KEY_BYTES:]


def _set_k_and_s(pool, buf, loc, index_k, index_k_scale):
    rows = torch.cat((index_k.view(torch.uint8), index_k_scale.view(torch.uint8)), dim=1)
    _SPEC.index.scatter_rows(buf, loc, rows)


def _set_mla_kv_buffer(kv_buffer, loc, cache_k_nope, cache_k_rope):
    kv_buffer[loc] = torch.cat((cache_k_nope, cache_k_rope), dim=-1)


def _quantize(k_nope, k_rope):
    rows = _SPEC.latent.encode(k_nope.squeeze(1), k_rope.squeeze(1)).unsqueeze(1)
    return rows[..., :528], rows[..., 528:]
