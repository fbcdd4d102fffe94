"""`python -m benchmarks.sglang --model-path DIR`: SGLang with the plugin beside stock SGLang."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import Measurement
from benchmarks.record import RESULTS, record
from benchmarks.sglang import harness_plugin
from benchmarks.sglang.comparing import compare
from benchmarks.sglang.drafts import with_next_token_layer
from benchmarks.sglang.timing import time_servers
from benchmarks.sglang.variants import VARIANTS, Variant
from cp_shared_kv.kernels.needs import missing_for_gpus

REPOSITORY = Path(__file__).parents[2]
_COMPARED = {
    "bfloat16": ("bfloat16", False),
    "fp8_e4m3": ("fp8_e4m3", False),
    "bfloat16_drafts": ("bfloat16", True),
    "fp8_e4m3_drafts": ("fp8_e4m3", True),
}
"""Parts that compare: the KV type of their variants, and whether they speculate."""


def main() -> int:
    """Compare, then time; one result file for each that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True, help="a DSA model that SGLang can load")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument(
        "--one-gpu", action="store_true", help="all ranks on one GPU: answers only, no times"
    )
    parser.add_argument("--part", action="append", choices=(*_COMPARED, "timing"))
    parser.add_argument(
        "--only", action="append", help="variants whose name contains one of these; all by default"
    )
    parser.add_argument("--wait", type=float, default=150, help="seconds for servers to come up")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="for a copy of the sources without git")
    options = parser.parse_args()
    if missing := missing_for_gpus(1 if options.one_gpu else options.gpus):
        sys.exit(f"benchmarks.sglang: {missing}")
    parts = options.part or [*_COMPARED, *([] if options.one_gpu else ["timing"])]
    if options.one_gpu and "timing" in parts:
        parser.error("--part timing: ranks that share a GPU wait for each other's time slices")
    options.results.mkdir(parents=True, exist_ok=True)
    chosen = [v for v in VARIANTS if any(text in v.name for text in options.only or [""])]
    with tempfile.TemporaryDirectory() as folder:
        harness_plugin.install(Path(folder))
        path = [Path(folder), REPOSITORY]
        config: dict[str, Any] = {
            "model": Path(options.model_path).name,
            "cp_ranks": options.gpus,
            "all_ranks_on_one_gpu": options.one_gpu,
        }
        config["doctor"] = _doctor()
        for part in parts:
            if part == "timing":
                _time(chosen[0], options, path, config)
                continue
            variants = [v for v in chosen if (v.kv_dtype, v.drafts) == _COMPARED[part]]
            if not variants:
                continue
            model = Path(options.model_path)
            if variants[0].drafts:
                (own := Path(folder) / part).mkdir()
                model = with_next_token_layer(model, own)
            _compare(part, variants, str(model), options, path, config)
    return 0


def _compare(
    part: str,
    variants: list[Variant],
    model_path: str,
    options: Any,
    path: list[Path],
    config: dict[str, Any],
) -> None:
    found = compare(
        variants,
        model_path,
        options.gpus,
        options.results,
        path,
        options.wait,
        options.one_gpu,
    )
    record(
        f"sglang_{part}", Measurement(config, {}, figures=found), options.results, options.commit
    )
    for name, seen in found.items():
        print(f"== {name}")
        requests: dict[str, Any] | None = seen.get("requests") if isinstance(seen, dict) else None
        if requests is None:
            print(json.dumps(seen, indent=1) if not isinstance(seen, str) else seen)
            continue
        for request, what in requests.items():
            print(f"  {request:32}", json.dumps(what))
        for key, value in seen.items():
            if key not in ("requests", "log"):
                print(f"  {key}: {json.dumps(value)}")
        if any(what["error"][1] for what in requests.values()):
            print(seen["log"])


def _time(variant: Variant, options: Any, path: list[Path], config: dict[str, Any]) -> None:
    samples, figures = time_servers(
        variant, options.model_path, options.gpus, options.results, path, options.wait
    )
    measured = Measurement({**config, "variant": variant.name}, samples, figures=figures)
    record("sglang_timing", measured, options.results, options.commit)
    for case, seconds in samples.items():
        ordered = sorted(seconds)
        median = ordered[len(ordered) // 2]
        print(
            f"{case:60} {median * 1e3:8.1f} ms ({ordered[0] * 1e3:.1f} to {ordered[-1] * 1e3:.1f})"
        )
    print(json.dumps(figures, indent=1))


def _doctor() -> str:
    """What `cpkv sglang doctor` says of this installation."""
    command = [
        sys.executable,
        "-c",
        "from cp_shared_kv.cli import main; main()",
        "sglang",
        "doctor",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
