"""What a rank refuses before it has done anything: an epoch larger than its run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.messages import Configure
from cp_shared_kv.engine.rank_epoch import RankEpoch
from cp_shared_kv.errors import ProtocolError

LIMITS = EngineLimits(
    page_size=4,
    cp_size=2,
    shared=True,
    physical_tokens_per_rank=20,
    decode_tokens=40,
    context_length=40,
    scratch_limit_bytes=1000,
    max_prefix_pages=10,
    pool_bytes_per_rank=0,
    decode_pool_bytes=0,
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"physical_pages": 6}, "pages of a pool than this run has: 6; allowed: 5"),
        ({"shared": False, "physical_pages": 11}, "than this run has: 11; allowed: 10"),
        ({"physical_pages": 1 << 40}, "allowed: 5"),
        ({"scratch_limit_bytes": 1001}, "bytes of scratch than this run has: 1001; allowed: 1000"),
    ],
)
def test_more_memory_than_the_run_has_is_refused_before_any_is_asked_for(
    changes: dict[str, Any], said: str
) -> None:
    values: dict[str, Any] = {
        "epoch": 1,
        "shared": True,
        "physical_pages": 5,
        "kv_read": "pull",
        "scratch_limit_bytes": 1000,
    }
    nothing: Any = None
    spec: Any = SimpleNamespace(limits=LIMITS)
    with pytest.raises(ProtocolError, match=said):
        RankEpoch(
            Configure(**(values | changes)),
            spec,
            nothing,
            nothing,
            nothing,
            nothing,
            nothing,
            to_decode=nothing,
            to_controller=nothing,
        )
