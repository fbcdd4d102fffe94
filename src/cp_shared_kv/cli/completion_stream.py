"""One streamed /v1/completions request, and what a user would time of it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from cp_shared_kv.errors import CpkvError

READ_SECONDS = 300.0


@dataclass(frozen=True)
class Completion:
    """The answer to one request."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Rate of the tokens behind the first."""
        return (self.completion_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


def stream_completion(url: str, prompt: str, max_tokens: int) -> Completion:
    """Send a prompt, greedy and without stopping at an end token. Raises `CpkvError` if refused."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    first = last = 0.0
    text: list[str] = []
    usage: dict[str, Any] = {}
    with (
        httpx.Client(timeout=httpx.Timeout(READ_SECONDS, connect=5.0), trust_env=False) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        if not response.is_success:
            raise CpkvError(f"the server answered {response.status_code}: {response.read()!r}")
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise CpkvError(f"the request failed: {event['error']['message']}")
            usage = event.get("usage") or usage
            if event["choices"]:
                last = time.monotonic()
                first = first or last
                text.append(event["choices"][0]["text"])
    return Completion(
        text="".join(text),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
        first_token_seconds=first - started,
        decode_seconds=last - first,
    )
