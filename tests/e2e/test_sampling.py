"""Seeded sampling through a whole cluster: every token is the one that the model's logits, the
request's params and its seed decide, and nothing else."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cp_shared_kv.demo_model.cache import demo_checkpoint_directory
from cp_shared_kv.engine.api import EngineRefusal, GenerateRequest, Sampling, TokenLogprobs
from cp_shared_kv.engine.client import ClusterClient
from cp_shared_kv.engine.cluster import Cluster, no_progress
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessUp
from cp_shared_kv.engine.replay import Comparison, compare_recordings, replay_replicated
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.sampling.sampler import sample
from cp_shared_kv.engine.sampling.state import SamplingState, prompt_tokens_for_sampling
from cp_shared_kv.engine.sampling.wire_params import wire_params
from cp_shared_kv.server.process import describe
from cp_shared_kv.testing.running_cluster import CP_SIZE, small_config
from cp_shared_kv.testing.transformers_oracle import TransformersOracle

pytestmark = pytest.mark.e2e

OUTPUT_TOKENS = 16
FIRST, SECOND = 65, 66
"""Likeliest by far where a bias says so, from the first token on, which a rank chooses."""


def prompt(tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


CASES: dict[str, tuple[list[int], Sampling]] = {
    "greedy": (prompt(65, 1), Sampling(ignore_eos=True)),
    "temperature": (prompt(700, 2), Sampling(temperature=1.0, seed=1, ignore_eos=True)),
    "another seed": (prompt(700, 2), Sampling(temperature=1.0, seed=2, ignore_eos=True)),
    "all filters": (
        prompt(301, 3),
        Sampling(temperature=0.9, top_k=60, top_p=0.8, min_p=0.02, seed=-5, ignore_eos=True),
    ),
    "all penalties": (
        prompt(130, 4),
        Sampling(
            temperature=0.7,
            repetition_penalty=1.4,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            seed=7,
            ignore_eos=True,
            logprobs=3,
        ),
    ),
    "greedy with penalties": (
        prompt(3, 5),
        Sampling(repetition_penalty=1.6, frequency_penalty=1.0, ignore_eos=True, logprobs=0),
    ),
    "bias from the first token": (
        prompt(90, 6),
        Sampling(logit_bias={FIRST: 90.0}, frequency_penalty=2.0, ignore_eos=True),
    ),
    "repetition of the prompt": (
        [FIRST, *range(100, 150)],
        Sampling(logit_bias={FIRST: 90.0, SECOND: 75.0}, repetition_penalty=1.5, ignore_eos=True),
    ),
    "stop id at the least length": (
        prompt(64, 7),
        Sampling(logit_bias={FIRST: 90.0}, stop_token_ids=[FIRST], min_tokens=5),
    ),
}


@dataclass
class Answer:
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None


@dataclass
class Answers:
    spec: RunSpec
    alone: dict[str, Answer]
    together: dict[str, Answer]
    unseeded: list[Answer]
    refusal: EngineRefusal
    replayed: Comparison


async def ask(client: ClusterClient, name: str, token_ids: list[int], sampling: Sampling) -> Answer:
    answer = Answer([], None if sampling.logprobs is None else [], None)
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=token_ids,
        max_tokens=OUTPUT_TOKENS,
        sampling=sampling,
    )
    async with aclosing(client.generate(request)) as chunks:
        async for chunk in chunks:
            answer.token_ids += chunk.token_ids
            answer.finish_reason = chunk.finish_reason
            if answer.logprobs is None:
                assert chunk.logprobs is None
            else:
                assert chunk.logprobs is not None
                answer.logprobs += chunk.logprobs
    return answer


async def ask_all(spec: RunSpec) -> Answers:
    client = ClusterClient(spec.endpoints.inbox(Life("server", 0, 1)), describe(spec))
    for life in (Life("prefill", 0, 1), Life("decode", 0, 1)):
        await client.on_news(ProcessUp(life=str(life), address=spec.endpoints.inbox(life)))
    await client.start()
    try:
        alone = {name: await ask(client, name, *case) for name, case in CASES.items()}
        found = await asyncio.gather(*(ask(client, f"{n} again", *c) for n, c in CASES.items()))
        hot = Sampling(temperature=5.0, ignore_eos=True)
        unseeded = [await ask(client, f"unseeded {i}", prompt(10, 8), hot) for i in range(2)]
        beyond = Sampling(stop_token_ids=[spec.vocab_size])
        with pytest.raises(EngineRefusal) as refused:
            await ask(client, "beyond", prompt(10, 8), beyond)
    finally:
        await client.close()
    together = dict(zip(CASES, found, strict=True))
    return Answers(spec, alone, together, unseeded, refused.value, Comparison(0, 0, None))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """All questions, one by one and then at once; then the same batches on a replicated group."""
    directory: Path = tmp_path_factory.mktemp("sampling")
    shared, replicated = directory / "shared", directory / "replicated"
    config = small_config(record_batches=shared)
    with Cluster(config, log_file=directory / "log") as cluster:
        found = asyncio.run(ask_all(cluster.spec))
        replay_replicated(cluster, shared, replicated, on_progress=no_progress)
    found.replayed = compare_recordings(shared, replicated, CP_SIZE)
    return found


@pytest.fixture(scope="module")
def oracle() -> TransformersOracle:
    return TransformersOracle(demo_checkpoint_directory())


@pytest.mark.parametrize("name", CASES)
def test_a_request_gives_the_same_tokens_alone_and_in_company(answers: Answers, name: str) -> None:
    alone, together = answers.alone[name], answers.together[name]
    assert alone.token_ids == together.token_ids
    assert alone.finish_reason == together.finish_reason


@pytest.mark.parametrize("name", CASES)
def test_every_token_is_what_the_logits_of_transformers_and_the_seed_decide(
    answers: Answers, oracle: TransformersOracle, name: str
) -> None:
    prompt_ids, sampling = CASES[name]
    answer = answers.alone[name]
    logits, _ = oracle.logits_and_selections(prompt_ids + answer.token_ids)
    params = wire_params(sampling)
    state = SamplingState(
        params,
        vocab_size=answers.spec.vocab_size,
        eos_token_ids=answers.spec.eos_token_ids,
        prompt_token_ids=prompt_tokens_for_sampling(params, np.array(prompt_ids)),
    )
    for at, token in enumerate(answer.token_ids):
        row = logits[len(prompt_ids) - 1 + at].unsqueeze(0)
        expected = sample(row, [state])[0]
        assert expected.token_id == token
        if answer.logprobs is not None:
            assert expected.logprobs is not None
            told = answer.logprobs[at]
            assert told.token_id == token
            assert told.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-3)
            assert [t for t, _ in told.top] == [t for t, _ in expected.logprobs.top]
        state.append(token)


def test_seeds_make_the_difference(answers: Answers) -> None:
    assert answers.alone["temperature"].token_ids != answers.alone["another seed"].token_ids
    first, second = answers.unseeded
    assert first.token_ids != second.token_ids


def test_the_first_token_obeys_the_bias(answers: Answers) -> None:
    assert answers.alone["bias from the first token"].token_ids[0] == FIRST


def test_the_first_token_knows_what_is_in_the_prompt(answers: Answers) -> None:
    assert answers.alone["repetition of the prompt"].token_ids[0] == SECOND


def test_a_stop_id_ends_at_the_least_length_and_not_before(answers: Answers) -> None:
    answer = answers.alone["stop id at the least length"]
    assert len(answer.token_ids) == 6
    assert answer.token_ids.index(FIRST) == 5
    assert answer.finish_reason == "stop"


def test_logprobs_are_as_many_as_asked_and_negative(answers: Answers) -> None:
    told = answers.alone["all penalties"].logprobs
    assert told is not None
    assert len(told) == OUTPUT_TOKENS
    for one in told:
        assert len(one.top) == 3
        assert -math.inf < one.logprob <= one.top[0][1] <= 0.0


def test_a_token_beyond_the_vocabulary_is_the_clients_to_change(answers: Answers) -> None:
    assert answers.refusal.kind == "invalid"
    assert str(answers.spec.vocab_size) in answers.refusal.reason


def test_a_recording_with_sampling_replays_bit_for_bit(answers: Answers) -> None:
    assert answers.replayed.difference is None
    assert answers.replayed.decode_rows > len(CASES) * OUTPUT_TOKENS
