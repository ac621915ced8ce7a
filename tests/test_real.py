"""The whole walk on real engines: Ollama and llama.cpp, embedded and full, and a stand-in device.

No test here asserts a speed. What is asserted is what the engines did: their output against the
known answer, where their buffers were, which weights they loaded, and that nothing is left running.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness import edge, process, synth
from harness.compare import Comparison
from harness.contract import Engine
from harness.display import quiet
from harness.errors import Unavailable
from harness.options import DEFAULT_ARMS, collect
from harness.plan import Status
from harness.probe import Progress, Watch
from harness.registry import backend
from harness.walk import duel, find_best, verify

pytestmark = pytest.mark.engine
TEXT_MODEL = "LLAMADUEL_TEXT_MODEL"
MEASURED = {Status.OK, Status.UNSTABLE}  # a stalled machine makes clocks disagree; what the engines did still holds


def found(name: str, **hints: str) -> Engine:
    """The engine that a run would find, or a skip that says how to get it."""
    given = {"llama-server": os.environ.get("LLAMADUEL_LLAMA_SERVER"), "ollama": os.environ.get("LLAMADUEL_OLLAMA")}
    try:
        engine = backend(name).find({key: value for key, value in given.items() if value} | hints)
    except Unavailable as error:
        pytest.skip(f"this machine has no such engine: {error}")
    if "stand-in" in hints and not engine.rpc:
        pytest.skip(f"{engine} sees no stand-in device; `llamaduel engines install llama-cpp` gets one that does")
    return engine


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    synth.synthesize(path, size="96MiB")
    return path


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    mine = [each.pid for each in psutil.process_iter() if process._environ(each).get(process.OWNER) == process.owner()]
    assert mine == []


def measured(model: Path, out: Path, watch: Watch = quiet, **changes: str | None) -> Comparison:
    """A quick run; the environment may name engines, as for a person."""
    given: dict[str, str | None] = {
        "model": str(model),
        "arms": DEFAULT_ARMS,
        "preset": "quick",
        "no_wait": "1",
        "out": str(out),
        "out_tokens": "32",
        "prompt_tokens": "128",
        "context": "1024",
        "seed": "1",
    }
    return duel(collect(given | changes), watch)


def test_all_default_arms_on_a_stand_in_device(moe: Path, tmp_path: Path) -> None:
    found("llama-cpp", **{"stand-in": "1"})
    found("ollama", **{"stand-in": "1"})

    comparison = measured(moe, tmp_path, stand_in="all")

    rows = {row.arm: row for row in comparison.rows}
    assert {row.status.word for row in comparison.rows} <= MEASURED
    assert len({row.weights_digest for row in comparison.rows} - {None}) == 1
    assert all(row.output_ok for row in comparison.rows), "every sample is the known answer"
    whole, split = rows["llama-cpp@ngl=99"], rows["llama-cpp@cpu-moe"]
    for row in (whole, split):
        assert row.realised_device_bytes == pytest.approx(row.predicted_device_bytes, rel=0.01)
    assert (split.realised_device_bytes or 0) < 0.7 * (whole.realised_device_bytes or 0)
    (ollama,) = (each for each in comparison.header.contenders if each.arm == "ollama")
    assert ollama.realised is not None
    assert "--model" in ollama.realised.argv, "Ollama's child was caught with its command line"
    assert (rows["ollama"].realised_device_bytes or 0) > 0, "it offloaded by itself"
    assert verify(comparison.run.folder) == []


def test_a_small_stand_in_device_refuses_what_does_not_fit_and_splits_the_rest(moe: Path, tmp_path: Path) -> None:
    found("llama-cpp", **{"stand-in": "1"})
    found("ollama", **{"stand-in": "1"})

    comparison = measured(moe, tmp_path, stand_in="64MiB")

    rows = {row.arm: row for row in comparison.rows}
    assert rows["llama-cpp@ngl=99"].status.word is Status.DOES_NOT_FIT
    for arm in ("ollama", "llama-cpp"):
        assert rows[arm].status.word in MEASURED, rows[arm].status
        assert 0 < (rows[arm].realised_device_bytes or 0) < 64 << 20, "a part of it is on the device"
        assert (rows[arm].realised_host_bytes or 0) > 0
        assert rows[arm].output_ok


def test_the_search_stays_inside_a_small_stand_in_device(moe: Path, tmp_path: Path) -> None:
    found("llama-cpp", **{"stand-in": "1"})

    given = {
        "model": str(moe),
        "preset": "quick",
        "no_wait": "1",
        "out": str(tmp_path),
        "stand_in": "72MiB",
        "out_tokens": "32",
    }
    comparison = find_best(
        collect(given | {"arms": "llama-cpp@ncmoe=0..99", "prompt_tokens": "128", "context": "1024", "seed": "1"}),
        quiet,
    )

    search = comparison.header.search
    assert search is not None
    assert search.refused, "what cannot fit is not loaded"
    assert len(search.candidates) > 2
    assert sum(each.loads for each in search.tried) <= edge.MOST_LOADS
    assert {each.status.word for each in search.tried} <= MEASURED
    assert {row.arm for row in comparison.rows} == set(search.chosen)
    for row in comparison.rows:
        assert 0 < (row.realised_device_bytes or 0) <= 72 << 20
        assert row.realised_device_bytes == pytest.approx(row.predicted_device_bytes, rel=0.01)
    assert verify(comparison.run.folder) == []


def test_the_embedded_engine_serves_both_arms(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found("ollama")
    ollama = found("ollama").path
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("LLAMADUEL_LLAMA_SERVER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no full build in it

    comparison = measured(moe, tmp_path / "runs", ollama=str(ollama))

    rows = {row.arm: row for row in comparison.rows}
    assert "xllamacpp" in (rows["llama-cpp"].engine or "")
    assert rows["llama-cpp"].output_ok
    assert rows["ollama"].output_ok
    assert rows["llama-cpp@cpu-moe"].status.word is Status.ALIAS


def test_a_real_text_model_gives_both_engines_the_same_prompts(tmp_path: Path) -> None:
    if not os.environ.get(TEXT_MODEL):
        pytest.skip(f"{TEXT_MODEL} names no model; .ci/run gets one")
    found("ollama")

    comparison = measured(Path(os.environ[TEXT_MODEL]), tmp_path, arms="ollama,llama-cpp", out_tokens=None)

    assert {row.status.word for row in comparison.rows} <= MEASURED
    tokens: dict[str, set[int | None]] = {}
    for samples in comparison.run.samples.values():
        for sample in samples:
            assert sample.usage is not None
            tokens.setdefault(sample.prompt_id, set()).add(sample.usage.prompt_tokens)
    assert all(len(counts) == 1 for counts in tokens.values()), "the template was applied once, by us"
    assert all(row.invalid_samples == 0 or row.invalid_reasons for row in comparison.rows)


@pytest.mark.parametrize("victim", ["server", "runner"])
def test_an_engine_killed_in_a_block_repeats_the_block(moe: Path, tmp_path: Path, victim: str) -> None:
    found("ollama")
    killed: list[int] = []

    def kill_once(progress: Progress) -> None:
        if not killed and "block 1: ollama: request" in progress.text:
            ours = [p for p in psutil.process_iter() if process._environ(p).get(process.OWNER) == process.owner()]
            (server,) = (each for each in ours if each.parent() == psutil.Process())
            runners = [each for each in ours if each != server and "--model" in each.cmdline()]
            target = server if victim == "server" else runners[0]
            killed.append(target.pid)
            target.send_signal(signal.SIGKILL)

    comparison = measured(moe, tmp_path, kill_once, arms="ollama,llama-cpp")

    assert killed
    assert comparison.judgement.n == 2
    assert comparison.repeated_loads > 0
    failed = [load.id for load in comparison.run.loads if load.failure]
    failed += [load for load, samples in comparison.run.samples.items() if any(each.invalid for each in samples)]
    assert failed, "what broke stays in the file"
    assert comparison.row("llama-cpp").status.word in MEASURED
