"""From the fields of a POST /generate to a checked call, or a 400 that names the field."""

from __future__ import annotations

from dataclasses import replace

from cp_shared_kv.server.api_error import ApiError
from cp_shared_kv.server.generation_call import (
    GenerationCall,
    check_bounds,
    check_neutral,
    check_output_tokens,
    checked_call,
)
from cp_shared_kv.server.generation_defaults import GenerationDefaults
from cp_shared_kv.server.native_schema import NativeBody, NativeSampling
from cp_shared_kv.server.openai_schema import GenerationFields


def checked_native(
    body: NativeBody, defaults: GenerationDefaults, *, model_name: str, vocab_size: int
) -> GenerationCall:
    """Check what is SGLang's own, then what all APIs share. Raises `ApiError` (400)."""
    sampling = body.sampling_params or NativeSampling()
    _check_what_is_not_built(body, sampling)
    check_bounds("top_logprobs_num", body.top_logprobs_num)
    if body.top_logprobs_num and not body.return_logprob:
        raise ApiError(
            400,
            "top_logprobs_num is allowed only beside return_logprob: true",
            param="top_logprobs_num",
        )
    check_output_tokens(
        ("min_new_tokens", sampling.min_new_tokens), ("max_new_tokens", sampling.max_new_tokens)
    )
    fields = GenerationFields(
        model=model_name,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        n=sampling.n,
        seed=sampling.sampling_seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        stream=body.stream,
        timeout=body.timeout,
        rid=body.rid,
    )
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    call = checked_call(fields, defaults, vocab_size=vocab_size, logprobs=logprobs)
    # Each event of SGLang's streams has the counts up to it.
    return replace(call, continuous_usage=True)


def one_native_prompt(body: NativeBody) -> tuple[str, str | list[int]]:
    """The name of the field that has the prompt, and the prompt. Raises `ApiError` (400)."""
    given = {"text": body.text, "input_ids": body.input_ids}
    there = {name: prompt for name, prompt in given.items() if prompt is not None}
    if len(there) != 1:
        what = "text and input_ids were" if there else "no prompt was"
        raise ApiError(
            400,
            f"{what} given; allowed: text or input_ids, one of them",
            param="input_ids" if there else "text",
        )
    return next(iter(there.items()))


def _check_what_is_not_built(body: NativeBody, sampling: NativeSampling) -> None:
    check_neutral(
        body,
        {
            "logprob_start_len": (-1, "null or -1; the prompt's tokens have no log-probabilities"),
            "token_ids_logprob": ([], "null or an empty list; see top_logprobs_num"),
            "return_hidden_states": (False, "null or false"),
            "return_routed_experts": (False, "null or false"),
            "lora_path": ("", "null or an empty string; there are no adapters"),
        },
    )
    free_text = "null; this server does not bind an output to a grammar"
    check_neutral(
        sampling,
        {
            "skip_special_tokens": (True, "true"),
            "spaces_between_special_tokens": (True, "true"),
            "no_stop_trim": (False, "false"),
            "beam_width": (1, "null or 1"),
            "stream_interval": (1, "null or 1"),
            "stop_regex": ([], "null or an empty list; see stop"),
            "custom_params": ({}, "null or an empty object"),
            **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), (None, free_text)),
        },
    )
