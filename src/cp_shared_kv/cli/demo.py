"""`cpkv demo`: a prompt that no single rank could hold, end to end, checked bit for bit."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path
from typing import Annotated, NoReturn

import httpx
import numpy as np
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cp_shared_kv.cli.completion_stream import Completion, stream_completion
from cp_shared_kv.cli.ownership_picture import ownership_picture
from cp_shared_kv.cli.stop_signals import on_stop_signals
from cp_shared_kv.demo_model.cache import demo_checkpoint_directory
from cp_shared_kv.engine.cluster import Cluster, check_backend
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.config_values import Device, KVRead
from cp_shared_kv.engine.replay import Comparison, compare_recordings, replay_replicated
from cp_shared_kv.errors import CapacityError, CpkvError
from cp_shared_kv.layout.sequence_split import SplitMode
from cp_shared_kv.server.serve import open_listener
from cp_shared_kv.transfer.transports import TransferBackend

RANKS: dict[Device, tuple[int, int]] = {"cpu": (4, 4096), "cuda": (2, 6144)}
"""How many, and the tokens that each holds, too few for the prompt's 11,358. Two GPUs are more
common than four."""
CHUNK_TOKENS = 2048
LOG_SECONDS = 5.0
OUTPUT_TOKENS = 16
NO_KEYS = np.zeros(0, dtype=np.int64)
QUESTION = "\n\nIn one sentence, what may a licensee do?\n"

out = Console(highlight=False, soft_wrap=True)


def demo(
    *,
    kv_read: KVRead = "auto",
    nsa_prefill_cp_mode: SplitMode = "in-seq-split",
    disaggregation_transfer_backend: TransferBackend = "shared_memory",
    device: Device = "cpu",
    flip_byte: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run a prompt larger than one rank, end to end, and prove that sharing changed no bit.

    Four prefill ranks whose pools hold 4,096 tokens each share one logical pool of 16,384. The
    11,358-token licence of this package goes through them to a decode worker. Then the recorded
    batches run again on the same ranks with every page on every rank, and all logits are compared.
    On GPUs there are two ranks with 6,144 tokens each.

    Parameters
    ----------
    kv_read
        How a rank reads pages that it does not own.
    nsa_prefill_cp_mode
        How a chunk's tokens are dealt to the ranks.
    disaggregation_transfer_backend
        What carries KV pages from prefill to decode; mooncake needs the extra of that name.
    device
        Where the ranks and the decode worker compute and keep KV; cuda takes two
        GPUs, or has the ranks share the only one.
    flip_byte
        Damage one byte of one page of the replay, to see that the comparison notices.
    """
    started = time.monotonic()
    check_backend(disaggregation_transfer_backend)  # before the model is made
    on_stop_signals(_stop)
    with tempfile.TemporaryDirectory(prefix="cpkv-demo-") as scratch:
        shared = Path(scratch) / "shared"
        cp_size, physical_tokens = RANKS[device]
        config = EngineConfig(
            model_path=demo_checkpoint_directory(),
            served_model_name="demo",
            port=0,
            device=device,
            ranks_share_gpus=device == "cuda",
            attention_context_parallel_size=cp_size,
            enable_nsa_prefill_context_parallel=True,
            enable_nsa_prefill_cp_shared_kv=True,
            nsa_prefill_cp_mode=nsa_prefill_cp_mode,
            kv_read=kv_read,
            disaggregation_transfer_backend=disaggregation_transfer_backend,
            max_total_tokens=physical_tokens,
            chunked_prefill_size=CHUNK_TOKENS,
            record_batches=shared,
        )
        difference = _run(config, shared, Path(scratch), flip_byte=flip_byte)
    out.print(f"[dim]{time.monotonic() - started:.1f} s in all[/dim]")
    return 1 if difference else 0


def _run(config: EngineConfig, shared: Path, scratch: Path, *, flip_byte: bool) -> bool:
    prompt = licence_text()
    log_file, replicated = scratch / "cluster.log", scratch / "replicated"
    with ExitStack() as stack:
        try:
            cluster, url = _start(stack, config, log_file)
            _show_start(cluster, log_file, len(prompt.encode()))
            first = _prefill_with_progress(url, prompt, log_file, len(prompt.encode()))
            _show_pages(cluster, shared, first)
            _show_answer("first request", first)
            _show_transfer(cluster, log_file, 0)
            second = _prefill_with_progress(url, prompt + QUESTION, log_file, len(QUESTION))
            _show_answer("second request, same prefix", second)
            out.print(
                f"  reused {second.cached_tokens} of {second.prompt_tokens} prompt tokens, "
                f"computed {second.prompt_tokens - second.cached_tokens}"
            )
            _show_transfer(cluster, log_file, 1)
            comparison = _replay(cluster, shared, replicated, flip_byte=flip_byte)
        except CpkvError:
            if log_file.exists():  # else no process had begun
                out.print(_tail(log_file), markup=False)
            raise
    return _verdict(comparison)


def _stop() -> NoReturn:
    """Said before the processes are ended, which takes some seconds. Told again, it goes on with
    that: broken off, it would leave processes and memory."""
    on_stop_signals(lambda: None)
    with suppress(OSError):  # the terminal may be what has gone
        print("cpkv: stopping ...", file=sys.stderr, flush=True)
    raise KeyboardInterrupt


def _start(stack: ExitStack, config: EngineConfig, log_file: Path) -> tuple[Cluster, str]:
    """Start the demo's cluster, to be stopped with `stack`; returns it and the server's URL."""
    with _progress() as (progress, task):
        listener = stack.enter_context(open_listener(config.host, config.port))
        host, port = listener.getsockname()[:2]
        cluster = stack.enter_context(
            Cluster(
                config,
                listener=listener,
                log_file=log_file,
                on_progress=lambda what, done, total: progress.update(
                    task, description=what, completed=done, total=total
                ),
            )
        )
    return cluster, f"http://{host}:{port}"


def licence_text() -> str:
    """The text of this package's own licence, as installed."""
    text = distribution("cp-shared-kv").read_text("licenses/LICENSE")
    if text is None:
        raise CpkvError(
            "the licence text is not among the installed files", change="reinstall cp-shared-kv"
        )
    return text


def _show_start(cluster: Cluster, log_file: Path, prompt_tokens: int) -> None:
    for line in _log_lines(log_file, "CP shared KV enabled", "CP shared KV scheduler", "KV Cache"):
        out.print(line, markup=False)
    limits = cluster.limits
    out.print(
        f"\nprompt: this package's licence, {prompt_tokens} byte tokens. "
        "One rank's pool alone would refuse it:"
    )
    try:
        limits.one_rank_pool().admit(0, NO_KEYS, -(-prompt_tokens // limits.page_size))
    except CapacityError as refusal:
        out.print(f"  {refusal}", markup=False)
    else:
        raise CpkvError("one rank holds the whole prompt: this demo would show nothing")


def _prefill_with_progress(url: str, prompt: str, log_file: Path, new_tokens: int) -> Completion:
    """Send one request, showing prefill chunks as they are computed."""
    chunks = -(-new_tokens // CHUNK_TOKENS)
    before = len(_log_lines(log_file, "Prefill batch"))
    result: list[Completion | CpkvError] = []

    def work() -> None:
        try:
            result.append(stream_completion(url, prompt, OUTPUT_TOKENS))
        except CpkvError as error:
            result.append(error)
        except httpx.HTTPError as error:
            result.append(CpkvError("the server has not answered", value=error))

    worker = threading.Thread(target=work, daemon=True)
    with _progress() as (progress, task):
        worker.start()
        while worker.is_alive():
            done = len(_log_lines(log_file, "Prefill batch")) - before
            progress.update(
                task,
                description="prefill on all ranks, then decode",
                completed=min(done, chunks),
                total=chunks + 1,
            )
            worker.join(0.1)
    if isinstance(result[0], CpkvError):
        raise result[0]
    return result[0]


def _show_pages(cluster: Cluster, recording: Path, completion: Completion) -> None:
    out.print(f"\nwho owns the {-(-completion.prompt_tokens // cluster.limits.page_size)} pages:")
    out.print(ownership_picture(recording, cluster.limits))


def _show_answer(what: str, completion: Completion) -> None:
    out.print(
        f"\n{what}: {completion.prompt_tokens} prompt tokens, "
        f"time to first token {completion.first_token_seconds:.2f} s, "
        f"then {completion.tokens_per_second:.0f} tokens/s"
    )
    out.print(f"  first tokens (random weights, so no prose): {completion.text!r}", markup=False)


def _show_transfer(cluster: Cluster, log_file: Path, request: int) -> None:
    """The ranks' lines about one request; they come just behind its answer."""
    ranks = cluster.limits.cp_size
    wanted = slice(request * ranks, (request + 1) * ranks)
    deadline = time.monotonic() + LOG_SECONDS
    while len(lines := _log_lines(log_file, "CP shared KV transfer")[wanted]) < ranks:
        if time.monotonic() > deadline:
            raise CpkvError("the ranks did not report their transfers", value=lines)
        time.sleep(0.02)
    out.print(
        "  pages to decode (a descriptor is one copy of neighbouring pages; all layers, both kinds "
        "of page):"
    )
    for line in lines:
        out.print(f"  {line}", markup=False)


def _replay(cluster: Cluster, shared: Path, replicated: Path, *, flip_byte: bool) -> Comparison:
    """The replicated reference on the same rank processes, then the comparison."""
    out.print(
        f"\nreplicated reference: the same batch messages, {cluster.limits.cp_size} ranks with "
        f"{cluster.limits.logical_tokens} tokens each"
    )
    with _progress() as (progress, task):
        replay_replicated(
            cluster,
            shared,
            replicated,
            on_progress=lambda what, done, total: progress.update(
                task, description=f"replay: {what}", completed=done, total=total
            ),
            flip_byte_before_batch=2 if flip_byte else None,
        )
    return compare_recordings(shared, replicated, cluster.limits.cp_size)


def _verdict(comparison: Comparison) -> bool:
    if comparison.difference is not None:
        out.print(f"[bold red]shared != replicated[/]: first difference at {comparison.difference}")
        return True
    out.print(
        f"[bold green]shared == replicated: logits bit-equal ({comparison.rows} positions)[/]"
    )
    return False


@contextmanager
def _progress() -> Generator[tuple[Progress, TaskID]]:
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield bar, bar.add_task("", total=1)


def _log_lines(log_file: Path, *starts: str) -> list[str]:
    """Messages in the cluster's log that begin with one of `starts`, without their prefix."""
    messages = [line.partition("] ")[2] for line in log_file.read_text().splitlines()]
    return [message for message in messages if message.startswith(starts)]


def _tail(log_file: Path) -> str:
    return "\n".join(log_file.read_text().splitlines()[-20:])
