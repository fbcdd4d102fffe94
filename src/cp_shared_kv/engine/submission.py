"""From a prompt that the server has sent to its offer, or why it can never be served here.

The server refuses such prompts first; this holds for any other client too.
"""

from __future__ import annotations

from cp_shared_kv.engine.api import EngineRefusal
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.messages import Submit
from cp_shared_kv.transfer.codec import check_int64
from cp_shared_kv.transfer.messages import Offer


def checked_offer(
    message: Submit, *, epoch: int, peer_epoch: int, limits: EngineLimits, vocab_size: int
) -> Offer:
    """The offer of a prompt that fits. EngineRefusal (`invalid` or `too_long`) for any other."""
    try:
        check_int64("token_ids", message.token_ids, at_least=0, at_most=vocab_size - 1)
        message.sampling.check_vocabulary(vocab_size)
        if message.max_tokens < 1:
            raise ValueError(f"max_tokens is {message.max_tokens}; allowed: 1 or more")
        offer = Offer(
            epoch=epoch,
            peer_epoch=peer_epoch,
            room=message.room,
            token_ids=message.token_ids,
            max_tokens=message.max_tokens,
            sampling=message.sampling,
        )
    except ValueError as error:
        raise EngineRefusal(str(error), kind="invalid") from error
    prompt_tokens = len(message.token_ids) // 8
    needed = prompt_tokens + message.max_tokens
    if (
        prompt_tokens > limits.logical_tokens
        or needed > limits.decode_tokens
        or needed > limits.context_length
    ):
        raise EngineRefusal(
            f"{prompt_tokens} prompt tokens and {message.max_tokens} to generate exceed "
            f"logical_tokens={limits.logical_tokens}, decode_tokens={limits.decode_tokens} or "
            f"context_length={limits.context_length}",
            kind="too_long",
        )
    return offer
