"""Starts SGLang's servers, waits until they answer, and stops them with all their processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

FLAG = "--enable-nsa-prefill-cp-shared-kv"
_COMMON = (
    *("--host", "127.0.0.1", "--mem-fraction-static", "0.6", "--watchdog-timeout", "900"),
    *("--disable-cuda-graph", "--disable-piecewise-cuda-graph", "--skip-server-warmup"),
    *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),
    *("--grammar-backend", "none", "--sampling-backend", "pytorch"),
    *("--disaggregation-transfer-backend", "mooncake"),
)


@dataclass
class Server:
    """One server: its name, its flags, and the environment beside that of this process."""

    name: str
    port: int
    flags: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    bootstrap_port: int | None = None
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, logs: Path, path: Sequence[Path]) -> None:
        """Begin; `path` is put before the processes' PYTHONPATH."""
        self.log = logs / f"{self.name}.log"
        folders = [str(folder) for folder in path] + [os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **self.environment,
            "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder),
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        }
        command = [sys.executable, "-m", "sglang.launch_server", "--port", str(self.port)]
        command += ["--nccl-port", str(self.port + 77)]
        bootstrap = self.bootstrap_port
        if bootstrap is not None:
            command += ["--disaggregation-bootstrap-port", str(bootstrap)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *_COMMON, *self.flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def answers(self) -> bool:
        """Whether it is up; RuntimeError with the end of its log when it has ended instead."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(
                f"{self.name} ended with {self.process.returncode}:\n{self.errors()}"
            )
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/model_info", timeout=3).status_code == 200
        return False

    def errors(self, lines: int = 40) -> str:
        """The end of its log, and before it what looks like an error."""
        text = self.log.read_text(errors="replace").splitlines()
        suspicious = [line for line in text if re.search(r"Error|Exception|assert|Traceback", line)]
        return "\n".join(line[:400] for line in [*suspicious[-15:], "...", *text[-lines:]])

    def lines(self, pattern: str) -> list[str]:
        """What its log says that matches."""
        text = self.log.read_text(errors="replace").splitlines()
        return [line for line in text if re.search(pattern, line)]

    def stop(self) -> None:
        """All processes of it, at once."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=20)


def await_all(servers: Sequence[Server], seconds: float) -> dict[str, str]:
    """Wait for each; by name, why one did not come up. The others are usable."""
    waiting = list(servers)
    failed: dict[str, str] = {}
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        for server in list(waiting):
            try:
                if server.answers():
                    waiting.remove(server)
            except RuntimeError as error:
                failed[server.name] = str(error)
                waiting.remove(server)
        time.sleep(0.5)
    for server in waiting:
        failed[server.name] = f"not up after {seconds:.0f} s:\n{server.errors()}"
        server.stop()
    return failed
