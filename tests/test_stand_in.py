"""The stand-in device: started before the engine, gone after it, and of the size that was asked for."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from backends import stand_in
from backends.llama_cpp import LlamaCpp
from harness import model as models
from harness import process, synth
from harness.contract import Settings
from harness.errors import Crashed, Unavailable
from harness.testing import engines
from harness.testing.conformance import our_processes

MIB = 1024 * 1024


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[engines.Engines]:
    with engines.fake(tmp_path) as found:
        yield found


def test_fit_is_told_to_leave_all_but_the_size_of_the_card(fakes: engines.Engines, tmp_path: Path) -> None:
    memory = psutil.virtual_memory().total
    with stand_in.start(fakes.llama_server, 512 * MIB, tmp_path / "log") as device:
        assert device.fit_target_mib == pytest.approx((memory - 512 * MIB) / MIB, abs=1)
        host, _, port = device.endpoint.partition(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), timeout=5).close()
        assert "-t 1" in " ".join(device.child.process.cmdline())
    assert not our_processes()


def test_a_card_larger_than_the_memory_needs_no_margin(fakes: engines.Engines, tmp_path: Path) -> None:
    with stand_in.start(fakes.llama_server, psutil.virtual_memory().total * 2, tmp_path / "log") as device:
        assert device.fit_target_mib == 0


def test_it_is_gone_after_an_error_too(fakes: engines.Engines, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), stand_in.start(fakes.llama_server, MIB, tmp_path / "log"):
        raise ZeroDivisionError
    assert not our_processes()


def test_without_an_rpc_server_beside_the_engine_there_is_none(fakes: engines.Engines, tmp_path: Path) -> None:
    (fakes.bin / "ggml-rpc-server").unlink()
    with (
        pytest.raises(Unavailable, match="llamaduel engines install llama-cpp"),
        stand_in.start(fakes.llama_server, MIB, tmp_path / "log"),
    ):
        pass


def test_an_rpc_server_is_found_beside_the_program_that_a_link_points_to(
    fakes: engines.Engines, tmp_path: Path
) -> None:
    link = tmp_path / "llama-server"
    link.symlink_to(fakes.llama_server)
    assert stand_in.program(link) == fakes.bin / "ggml-rpc-server"


def test_a_taken_port_is_tried_again_on_another(
    fakes: engines.Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [int(taken.getsockname()[1]), process.free_port()]
        free = ports[1]
        monkeypatch.setattr(process, "free_port", lambda: ports.pop(0))
        with stand_in.start(fakes.llama_server, MIB, tmp_path / "log") as device:
            assert device.endpoint == f"127.0.0.1:{free}"


def test_one_that_never_starts_is_a_failure_with_its_reason(fakes: engines.Engines, tmp_path: Path) -> None:
    broken = fakes.bin / "ggml-rpc-server"
    broken.write_text("#!/bin/sh\necho 'error: this is broken' >&2\nexit 3\n")
    with (
        pytest.raises(Crashed, match="this is broken"),
        stand_in.start(fakes.llama_server, MIB, tmp_path / "log"),
    ):
        pass


def test_an_engine_without_rpc_is_named(fakes: engines.Engines, tmp_path: Path) -> None:
    fakes.llama_server.write_text("#!/bin/sh\necho 'error: invalid argument: --rpc' >&2\nexit 1\n")
    with (
        pytest.raises(Unavailable, match="does not see the stand-in device"),
        stand_in.start(fakes.llama_server, MIB, tmp_path / "log"),
    ):
        pass
    assert not our_processes()


def test_a_session_owns_its_stand_in_and_says_when_it_has_ended(fakes: engines.Engines, tmp_path: Path) -> None:
    shape = synth.scaled(synth.SHAPES["tiny"], 24 * MIB)
    file = models.load(synth.write(tmp_path / "tiny.gguf", shape)).file
    backend = LlamaCpp()
    settings = Settings(context=1024, flash_attention="off", stand_in_bytes=16 * MIB)
    arm = backend.parse("llama-cpp@ncmoe=3")
    with backend.open(backend.find({"stand-in": "1"}), file, arm, settings, tmp_path / "log") as session:
        server, device = session.realised().pids
        assert {server, device} == our_processes()
        assert "ggml-rpc-server" in " ".join(psutil.Process(device).cmdline())
        assert session.death() is None
        os.kill(device, signal.SIGKILL)
        assert "stand-in device ended" in str(session.death())
    assert not our_processes()
