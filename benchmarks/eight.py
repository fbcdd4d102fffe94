"""`python -m benchmarks.eight`: a group of eight ranks, in parts that can be run one by one.

Made for eight GPUs of one host, and it runs on any number of ranks and on CPUs too, at sizes that
fit. A part that has its result for this commit and these options is not run again, so a run that
was cut off goes on where it stopped; none begins after --seconds. Each part leaves a JSON, see
record.py.

equal   shared against replicated, every logit bit by bit: both splits and every read, at N and N/2
plan    the sizes of the plan: a pool of 237,312 tokens on each rank, 78 layers in bf16 with fp8
        index K, a prompt that no rank could hold; what each rank stored, read, and sent
table   the read, write and transfer measurements of benchmarks.gpu at N (GPUs only)
ttft    time to first token at 128 K and 1 M, shared against replicated, at N (GPUs only)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import httpx

from benchmarks import Measurement
from benchmarks.nvlink import between, nvlink_kib
from benchmarks.record import RESULTS, record, this_commit
from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.engine.cluster import no_progress
from cp_shared_kv.engine.config_values import KVRead
from cp_shared_kv.engine.replay import compare_recordings, replay_replicated
from cp_shared_kv.errors import ConfigError
from cp_shared_kv.testing.running_cluster import Running, running, small_config

PLAN_TOKENS, PLAN_LAYERS = 237_312, 78
SPLITS = ("in-seq-split", "round-robin-split")
OUTPUT_TOKENS = 4
ANSWER_SECONDS = 400.0
BEGIN_SECONDS = 420.0
"""No part begins later than this, so that a run ends within nine minutes."""
TABLE = ("gpu_floors", "gpu_full_prefix", "gpu_selected_rows", "gpu_writes", "gpu_transfer")
TTFT_CASES = (("bf16", 1 << 17), ("bf16", 1 << 20), ("fp8_e4m3", 1 << 17))


@dataclass(frozen=True)
class Options:
    """What the figures depend on, and where they go."""

    device: str
    ranks: int
    tokens_per_rank: int
    layers: int
    results: Path = RESULTS
    commit: str | None = None

    @property
    def sizes(self) -> dict[str, object]:
        """Without where the result goes."""
        names = ("device", "ranks", "tokens_per_rank", "layers")
        return {name: getattr(self, name) for name in names}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eight",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="all that the device has")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens-per-rank", type=int, default=PLAN_TOKENS)
    parser.add_argument("--layers", type=int, default=PLAN_LAYERS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON files")
    parser.add_argument("--commit", help="which commit this is, in a copy that has no .git")
    parser.add_argument(
        "--seconds",
        type=float,
        default=BEGIN_SECONDS,
        help="begin no part later than this; run again for the rest (default: %(default)g)",
    )
    parser.add_argument("--again", action="store_true", help="run parts that have a result too")
    given = parser.parse_args(arguments)
    options = Options(
        given.device,
        given.ranks,
        given.tokens_per_rank,
        given.layers,
        given.results,
        given.commit or this_commit(),
    )
    if options.ranks < 2:
        parser.error("--ranks: a group has 2 or more")
    there = {name: part for name, part in PARTS.items() if given.device == "cuda" or name in ON_CPU}
    unknown = [name for name in given.parts if name not in there]
    if unknown:
        parser.error(
            f"no part {', '.join(unknown)} on {given.device}; there are: {', '.join(there)}"
        )
    started = time.monotonic()
    for name in given.parts or there:
        found = None if given.again else result_of(name, options)
        if found is not None:
            print(f"{name}: done before, see {found}", flush=True)
            continue
        begun = time.monotonic()
        if begun - started > given.seconds:
            print(f"{name}: not begun after {given.seconds:g} s; run this again", flush=True)
            continue
        print(f"{name} ...", flush=True)
        measurement = there[name](options)
        path = record(f"eight_{name}", measurement, options.results, options.commit)
        print(f"{name}: {time.monotonic() - begun:.0f} s, {path}", flush=True)
        print(json.dumps(measurement.figures, indent=1), flush=True)
    return 0


def result_of(part: str, options: Options) -> Path | None:
    """The result of a part that was run on this commit with these options, if there is one."""
    for path in sorted(options.results.glob(f"eight_{part}-*.json"), reverse=True):
        told = json.loads(path.read_text())
        if told["commit"] == options.commit and told["config"] == options.sizes:
            return path
    return None


# Equal bits --------------------------------------------------------------------------------------


def equal(options: Options) -> Measurement:
    """Every read with one split, and one read with the other; half as many ranks once each."""
    reads, refused = _reads(options.device)
    cases = [(options.ranks, SPLITS[turn % 2], read) for turn, read in enumerate(reads)]
    cases.append((options.ranks, SPLITS[1], reads[0]))
    if options.ranks >= 4:
        cases += [(options.ranks // 2, split, reads[0]) for split in SPLITS]
    found: dict[str, object] = {}
    seconds: list[float] = []
    for ranks, split, read in cases:
        begun = time.perf_counter()
        case = f"N={ranks}, {split}, {read}"
        found[case] = _compared(options.device, ranks, split, read)
        seconds.append(time.perf_counter() - begun)
        print(f"  {case}: {found[case]}, {seconds[-1]:.0f} s", flush=True)
    figures: dict[str, object] = {"cases": found, "refused": refused}
    return Measurement(options.sizes, {"a case": seconds}, figures=figures)


def _reads(device: str) -> tuple[list[KVRead], dict[str, str]]:
    """The values of --kv-read, auto first, that a device has; and why the others are refused."""
    there: list[KVRead] = []
    refused: dict[str, str] = {}
    for read in get_args(KVRead):
        try:
            small_config(device=device, kv_read=read)
        except ConfigError as error:
            refused[read] = str(error)
        else:
            there.append(read)
    return there, refused


def _compared(device: str, ranks: int, split: str, read: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        shared, replicated = Path(directory) / "shared", Path(directory) / "replicated"
        config = small_config(
            device=device,
            attention_context_parallel_size=ranks,
            nsa_prefill_cp_mode=split,
            kv_read=read,
            record_batches=shared,
        )
        with running(config, Path(directory) / "log") as served:
            base = "".join(f"line {i} of the agreement, {i * 31 % 89}; " for i in range(60))
            _ask_all(served, [base[:1300], "short", base[:100]])
            _ask_all(served, [base[:1300] + " what then?", base[:700] + " and?", "x"])
            replay_replicated(served.cluster, shared, replicated, on_progress=no_progress)
        compared = compare_recordings(shared, replicated, ranks)
        difference = compared.difference
        return {
            "rows": compared.rows,
            "difference": None if difference is None else str(difference),
        }


def _ask_all(served: Running, prompts: list[str]) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(partial(_ask, served), prompts))


def _ask(served: Running, prompt: str) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    url = f"{served.url}/v1/completions"
    answer = httpx.post(url, json=body, trust_env=False, timeout=ANSWER_SECONDS)
    answer.raise_for_status()
    return answer.json()


# The sizes of the plan ---------------------------------------------------------------------------


def plan(options: Options) -> Measurement:
    """Widths of latent and index K as in DeepSeek-V3.2, all else tiny, and a long prompt."""
    prompt_tokens = options.tokens_per_rank + 4096
    shape = ModelShape(
        num_hidden_layers=options.layers,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        index_topk=2048,
        max_position_embeddings=1 << 20,
    )
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_tiny_checkpoint(model, shape, seed=3)
        config = small_config(
            model_path=model,
            device=options.device,
            dtype="bfloat16",
            attention_context_parallel_size=options.ranks,
            max_total_tokens=options.tokens_per_rank,
            decode_max_total_tokens=prompt_tokens + 4096,
            chunked_prefill_size=min(8192, options.tokens_per_rank),
        )
        begun = time.perf_counter()
        with running(config, Path(directory) / "log") as served:
            started_in = time.perf_counter() - begun
            counted = nvlink_kib()
            begun = time.perf_counter()
            answer = _ask(served, ("the agreement, line by line; " * prompt_tokens)[:prompt_tokens])
            seconds = time.perf_counter() - begun
            links = between(counted, nvlink_kib())
            served.until(decode_used_tokens=0)
            lines = served.log_lines("CP shared KV")
            info = served.get("/server_info").json()
    sent = [int(line.split("pages=")[1].split()[0]) for line in lines if "transfer:" in line]
    read = [rank["read_bytes"] for rank in info["ranks"]]
    logical_tokens = options.ranks * options.tokens_per_rank
    if sum(f"logical_tokens={logical_tokens}" in line for line in lines) != 2:
        raise RuntimeError(f"two lines should say logical_tokens={logical_tokens}: {lines}")
    if answer["usage"]["prompt_tokens"] <= options.tokens_per_rank:
        raise RuntimeError(f"the prompt fits one rank: {answer['usage']}")
    figures: dict[str, object] = {
        "log_lines": [line for line in lines if "transfer:" not in line],
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "completion_tokens": answer["usage"]["completion_tokens"],
        "one_rank_holds_tokens": options.tokens_per_rank,
        "pages_sent_by_rank": sent,
        "busiest_rank_over_even": max(sent) * len(sent) / sum(sent),
        "read_bytes_by_rank": read,
        "busiest_reader_over_even": max(read) * len(read) / sum(read),
        "nvlink": links,
        "logical_tokens": info["max_total_num_tokens"],
        "pool_bytes_per_rank": info["capacity"]["pool_bytes_per_rank"],
    }
    samples = {"the prompt": [seconds], "the start": [started_in]}
    return Measurement(options.sizes, samples, figures=figures)


# What benchmarks.gpu measures --------------------------------------------------------------------


def table(options: Options) -> Measurement:
    """The measurements of reads, writes and transfers, at N, and what went over the links."""
    command = [sys.executable, "-m", "benchmarks.gpu", *TABLE, "--results", str(options.results)]
    if options.commit is not None:
        command += ["--commit", options.commit]
    counted, begun = nvlink_kib(), time.perf_counter()
    subprocess.run(command, check=True, env={**os.environ, "BENCH_RANKS": str(options.ranks)})
    seconds = time.perf_counter() - begun
    newest = [max(path.name for path in options.results.glob(f"{name}-*.json")) for name in TABLE]
    figures: dict[str, object] = {"files": newest, "nvlink": between(counted, nvlink_kib())}
    return Measurement(options.sizes, {"all": [seconds]}, figures=figures)


def ttft(options: Options) -> Measurement:
    """The time to first token, at N."""
    # Here, since on a CPU there need not be a triton.
    from benchmarks.gpu.time_to_first_token import measure_case, measurement
    from cp_shared_kv.testing.rank_pool import RankPool

    samples: dict[str, list[float]] = {}
    links: dict[str, object] = {}
    with RankPool(options.ranks) as pool:
        for kv_cache_dtype, prefix_tokens in TTFT_CASES:
            counted = nvlink_kib()
            samples |= measure_case(pool, kv_cache_dtype, prefix_tokens)
            case = f"{kv_cache_dtype}, {prefix_tokens >> 10} K"
            links[case] = between(counted, nvlink_kib())
            print(f"  {case}: measured", flush=True)
    goals = measurement(samples).goals
    return Measurement(options.sizes, samples, goals, figures={"nvlink": links})


PARTS: dict[str, Callable[[Options], Measurement]] = {
    "equal": equal,
    "plan": plan,
    "table": table,
    "ttft": ttft,
}
ON_CPU = ("equal", "plan")

if __name__ == "__main__":
    sys.exit(main())
