"""How many requests a batch may have: as many as scratch holds the pages of."""

from __future__ import annotations

import types

import pytest

from cp_shared_kv.integrations.sglang.admission import add_one_req

LIMIT_PAGES = 10


def _request(prefix_tokens: int, new_tokens: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(prefix_indices=[0] * prefix_tokens, extend_input_len=new_tokens)


def _adder(*running: types.SimpleNamespace) -> types.SimpleNamespace:
    sharing = types.SimpleNamespace(batch_pages=LIMIT_PAGES)
    pool = types.SimpleNamespace(sharing=sharing)
    allocator = types.SimpleNamespace(get_kvcache=lambda: pool)
    return types.SimpleNamespace(token_to_kv_pool_allocator=allocator, can_run_list=list(running))


def _asked(adder: types.SimpleNamespace, request: types.SimpleNamespace) -> str:
    result = add_one_req(lambda *_args, **_kwargs: "asked SGLang", adder, request, False, None)
    return result if isinstance(result, str) else result.name


@pytest.mark.parametrize(
    ("running", "request_", "answer"),
    [
        ([], (64 * 100, 64), "asked SGLang"),  # the first one always: scratch holds a context
        ([(64 * 5, 60)], (0, 64 * 4), "asked SGLang"),
        ([(64 * 5, 60)], (0, 64 * 4 + 1), "OTHER"),
        ([(64 * 5, 60), (64 * 3, 1)], (0, 1), "OTHER"),
    ],
)
def test_the_next_batch_takes_what_does_not_fit(running, request_, answer) -> None:
    adder = _adder(*(_request(*tokens) for tokens in running))

    assert _asked(adder, _request(*request_)) == answer
