"""From the fields of a POST /v1/completions to a prompt, or a 400 that names the field."""

from __future__ import annotations

from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.completion_schema import CompletionBody
from cp_shared_kv.server.generation_call import (
    GenerationCall,
    check_bounds,
    check_neutral,
    checked_call,
)
from cp_shared_kv.server.generation_defaults import GenerationDefaults


def checked_completion(
    fields: CompletionBody, defaults: GenerationDefaults, vocab_size: int
) -> GenerationCall:
    """Check what is the completions API's own, then what both share. Raises `ApiError` (400)."""
    check_bounds("logprobs", fields.logprobs)
    if fields.echo and fields.logprobs is not None:
        raise ApiError(
            400,
            "echo is true beside logprobs; allowed: one of them, for the prompt's own tokens have "
            "no log-probabilities here",
            param="echo",
            code="unsupported_value",
        )
    choices = 1 if fields.n is None else fields.n
    check_neutral(
        fields,
        {
            "best_of": (choices, f"null or n, which is {choices}"),
            "suffix": ("", "null or an empty string"),
            "add_special_tokens": (True, "true"),
        },
    )
    return checked_call(fields, defaults, vocab_size=vocab_size, logprobs=fields.logprobs)


def one_prompt(given: str | list[str | int | list[int]]) -> str | list[int]:
    """The prompt, whichever of its forms it has. Raises `ApiError` (400)."""
    prompt = given
    if isinstance(given, list) and given and not isinstance(given[0], int):
        if len(given) > 1:
            raise ApiError(
                400,
                f"prompt holds {len(given)} prompts; allowed: one in a request. Send a request "
                "for each",
                param="prompt",
            )
        prompt = given[0]
    if not prompt:
        raise ApiError(400, "prompt is empty; allowed: at least one token", param="prompt")
    if isinstance(prompt, str):
        return prompt
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) != len(prompt):
        raise ApiError(
            400,
            "prompt mixes token ids with other values; allowed: a string, or a list of token ids",
            param="prompt",
        )
    return token_ids
