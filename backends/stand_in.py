"""A stand-in for a GPU: llama.cpp's own RPC server on this machine, on one thread.

To `-ngl`, `--cpu-moe`, KV placement and `--fit` it is a discrete device, so that every placement
can be tried and proven without a GPU. It never refuses memory and its speed means nothing; the
size of the card exists only as the margin that `--fit` is told to leave free.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backends.llama_failure import read_failure
from backends.llama_http import listens
from backends.llama_log import MIB, listed_devices
from harness import process
from harness.errors import Crashed, TimedOut, Unavailable

NAMES = ("ggml-rpc-server", "rpc-server")  # newest first
USUAL = "127.0.0.1:50052"  # where it listens if it is told nothing
START_S = 20.0
TRIES = 3  # a port may be taken between our look and its bind


@dataclass(frozen=True, slots=True)
class StandIn:
    """A running stand-in device. `fit_target_mib` is what `--fit` must leave free of it."""

    endpoint: str
    fit_target_mib: int
    child: process.Child


def program(server: Path) -> Path | None:
    """The RPC server that was built with this llama-server, if it was."""
    folders = (server.parent, server.resolve().parent)
    return next((path for folder in folders for name in NAMES if (path := folder / name).is_file()), None)


@contextlib.contextmanager
def start(server: Path, memory_bytes: int, log: Path) -> Iterator[StandIn]:
    """A device of `memory_bytes` until the block ends. Raises Unavailable or EngineFailed."""
    binary = program(server)
    if binary is None:
        raise Unavailable(
            f"no ggml-rpc-server beside {server}, so there is no stand-in device; "
            "run `llamaduel engines install llama-cpp`"
        )
    with contextlib.ExitStack() as stack:
        for left in reversed(range(TRIES)):
            port = process.free_port()
            argv = (str(binary), "-H", "127.0.0.1", "-p", str(port), "-t", "1")
            child = stack.enter_context(process.start(argv, log, process.engine_environment()))
            if _accepts(child, port):
                break
            if not left:
                failure = read_failure(child.tail())
                said = failure.line if failure else process.explain_exit(child.returncode() or 0)
                raise Crashed(f"the stand-in device did not start ({said}); its log is {log.name}")
        endpoint = f"127.0.0.1:{port}"
        spare = _free_bytes(server, endpoint) - memory_bytes
        yield StandIn(endpoint, max(0, spare) // MIB, child)


def _accepts(child: process.Child, port: int) -> bool:
    """Wait until it listens; False if it ended. It is not connected to, for it serves one client at a time."""
    deadline = time.monotonic() + START_S
    while child.returncode() is None:
        if listens([child.pid], port):
            return True
        if time.monotonic() > deadline:
            raise TimedOut(f"the stand-in device did not listen within {START_S:g} s; its log is {child.log.name}")
        time.sleep(0.02)
    return False


def _free_bytes(server: Path, endpoint: str) -> int:
    """Memory of the device as `--fit` will see it."""
    argv = [str(server), "--rpc", endpoint, "--list-devices"]
    done = subprocess.run(
        argv, env=process.engine_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    for device in listed_devices(done.stdout.splitlines()):
        if endpoint in device.description and device.free_bytes is not None:
            return device.free_bytes
    raise Unavailable(
        f"{server} does not see the stand-in device (no RPC in this build?); run `llamaduel engines install llama-cpp`"
    )
