"""A checkpoint with NaN in it: whoever comes upon it fails alone, with the reason; others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.engine.messages import NO_NUMBERS
from cp_shared_kv.testing.running_cluster import Running, running, small_config

pytestmark = pytest.mark.e2e

POISON = ord("U")
"""Its row of the embedding is NaN: a prompt or an output with it has no next token."""
IN_PREFILL: dict[str, Any] = {"prompt": "aUb"}
IN_DECODE: dict[str, Any] = {"prompt": "Once upon a time", "logit_bias": {str(POISON): 100}}
NEIGHBOUR: dict[str, Any] = {
    "model": "demo",
    "prompt": "a neighbour " * 40,
    "max_tokens": 150,
    "ignore_eos": True,
    "logit_bias": {str(POISON): -100},
}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("poisoned")
    model = directory / "model"
    make_tiny_checkpoint(model, ModelShape(), seed=3)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with running(small_config(model_path=model), directory / "log") as cluster:
        yield cluster


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "drawn"])
def neighbour(request: pytest.FixtureRequest, poisoned: Running) -> tuple[dict[str, Any], str]:
    """A request without NaN, and its text when it is alone."""
    body = NEIGHBOUR | {"temperature": request.param, "seed": 5}
    answer = poisoned.post(body)
    assert answer.status_code == 200, answer.text
    return body, answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", [IN_PREFILL, IN_DECODE], ids=["prefill", "decode"])
def test_a_request_without_a_next_token_fails_alone_and_is_told_why(
    poisoned: Running,
    neighbour: tuple[dict[str, Any], str],
    where: dict[str, Any],
    temperature: float,
    logprobs: int | None,
    stream: bool,
) -> None:
    body, alone = neighbour
    bad = {"model": "demo", "max_tokens": 6, "temperature": temperature, "ignore_eos": True}
    bad |= where | {"logprobs": logprobs, "stream": stream}
    told_before = len(poisoned.log_lines("room "))
    with httpx.stream(
        "POST",
        f"{poisoned.url}/v1/completions",
        json=body | {"stream": True},
        trust_env=False,
        timeout=60,
    ) as under_way:
        events = under_way.iter_lines()
        text = _text(next(events))
        answer = poisoned.post(bad)
        text += "".join(map(_text, events))
    assert text == alone
    if stream and where is IN_DECODE:  # its first token was there
        assert answer.status_code == 200
        events_told = [line for line in answer.text.splitlines() if line]
        assert json.loads(events_told[-1].removeprefix("data: "))["error"]["message"] == NO_NUMBERS
    else:
        assert answer.status_code == 500
        # Of a prompt either side may be the first to say so.
        assert answer.json()["error"]["message"].endswith(NO_NUMBERS)
    told = poisoned.log_lines("room ")[told_before:]
    assert len(told) == 1
    assert told[0].endswith(NO_NUMBERS)
    poisoned.until_nothing_is_held()
    for unit in ("prefill-0", "decode-0"):
        assert poisoned.cluster.life(unit).number == 1


def _text(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    return json.loads(line.removeprefix("data: "))["choices"][0]["text"]
