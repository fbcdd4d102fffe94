"""A process that forks or ends while the engine's threads are at work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from cp_shared_kv.testing.transport_ends import TransportEnds
from cp_shared_kv.testing.transport_peer import TransportPeer

SCRIPT = """
import json, os, sys, time
import numpy as np
from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.transfer.mooncake_target import MooncakeTarget
from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs

session_id, regions = json.loads(sys.argv[1])
transport = MooncakeTransport("sender", stall_seconds=1.0, contact_seconds=5.0)
pool = Region(**regions[0])
local = transport.register(PrivateBuffer(pool.nbytes))
transport.connect(PeerInfo(session_id, tuple(Region(**region) for region in regions)))
offsets = np.arange(0, pool.nbytes, 1 << 18, dtype=np.int64)
runs = Runs(local.name, pool.name, offsets, offsets, np.full(len(offsets), 1 << 18))
"""
FORK = """
target = MooncakeTarget("cpkv-test-fork")
own = target.expose(PrivateBuffer(1 << 20))
transport.connect(PeerInfo(target.session_id, target.regions))
offsets = np.arange(0, own.nbytes, 1 << 12, dtype=np.int64)
runs = Runs(local.name, own.name, offsets, offsets, np.full(len(offsets), 1 << 12))
writes = [transport.write(target.session_id, runs) for _ in range(1000)]
for _ in range(8):
    # Engines at both ends are at work: their threads are in the middle of something.
    assert not writes[-1].done()
    pid = os.fork()
    if pid == 0:
        error = transport.write(target.session_id, runs).exception()
        assert error.kind == "forked" and error.quiescent, error
        for leave in (lambda: transport.disconnect(target.session_id), transport.close):
            try:
                leave()
            except TransferError as error:
                assert error.kind == "forked", error
        target.close()
        os._exit(7)
    deadline = time.monotonic() + 15
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.001)
    assert os.waitstatus_to_exitcode(ended[1]) == 7, ended
transport.disconnect(target.session_id)
pid = os.fork()
if pid == 0:
    del transport, target
    sys.exit(7)  # with all that the interpreter does at its end
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
transport.connect(PeerInfo(target.session_id, target.regions))
assert transport.write(target.session_id, runs).result(15) == own.nbytes
"""
EXIT = """
offsets = np.arange(0, pool.nbytes, 1 << 12, dtype=np.int64)
runs = Runs(local.name, pool.name, offsets, offsets, np.full(len(offsets), 1 << 12))
for _ in range(20):
    transport.write(session_id, runs)
time.sleep(0.1)
print("writing", flush=True)
sys.exit(3)
"""


def run_script(peer: TransportPeer, ending: str) -> subprocess.CompletedProcess[str]:
    hello = msgspec.json.encode([peer.info.session_id, peer.info.regions]).decode()
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + ending, hello],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_forked_child_is_told_so_and_ends(large: TransportEnds) -> None:
    done = run_script(large.start_peer(), FORK)
    assert done.returncode == 0, done.stderr


def test_a_process_may_end_with_writes_under_way(large: TransportEnds) -> None:
    peer = large.start_peer()
    for _ in range(3):
        done = run_script(peer, EXIT)
        assert (done.returncode, done.stdout) == (3, "writing\n"), done.stderr
