"""Servers of the OpenAI dialect: what they say is read, what they do not say stays unknown."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.openai import OpenAI, Server
from harness import process, synth
from harness.contract import Chunk, ModelFile, Prompt, Settings, Usage
from harness.errors import EngineFailed, Unavailable, UsageError
from harness.measure import measure
from harness.testing.conformance import model_file
from harness.testing.script import Script

PROMPT = Prompt("p", "how it began: the")


@pytest.fixture
def weights(tmp_path: Path) -> ModelFile:
    path = tmp_path / "unseen.gguf"
    path.write_bytes(b"the server has its own")
    return model_file(path)


def table(folder: Path, text: str) -> dict[str, str]:
    path = folder / "servers.toml"
    path.write_text(text, encoding="utf-8")
    return {"openai": str(path)}


@contextmanager
def serving(argv: list[str], folder: Path, script: Script | None = None) -> Iterator[int]:
    """A server that answers; its port."""
    port = process.free_port()
    environment = process.engine_environment((script or Script()).environment())
    with process.start([*argv, "--port", str(port)], folder / "server.log", environment) as child:
        deadline = time.monotonic() + 60
        while "listening on" not in "\n".join(child.tail()):
            assert child.returncode() is None, child.tail()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield port


def fake(*flags: str) -> list[str]:
    return [sys.executable, "-m", "harness.testing.llama_server", "-m", "none.gguf", *flags]


# ── the table ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not toml", "no table of servers"),
        ("[a]\nmodel = 'm'", "'url'"),
        ("[a]\nurl = 'http://127.0.0.1:1'\nmodel = 'm'\nport = 3", "'port'"),
        ("[a]\nurl = 'https://127.0.0.1:1'\nmodel = 'm'", "no http:// address"),
        ("[a]\nurl = 'http://192.168.1.5:1'\nmodel = 'm'", "not on this machine; add --allow-remote"),
    ],
)
def test_a_table_that_cannot_be_used_says_why(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(Unavailable) as caught:
        OpenAI().find(table(tmp_path, text))
    assert says in str(caught.value)


def test_without_a_table_it_says_how_to_write_one() -> None:
    with pytest.raises(Unavailable, match="give it by --openai FILE"):
        OpenAI().find({})


def test_another_machine_needs_a_word(tmp_path: Path) -> None:
    hints = table(tmp_path, "[a]\nurl = 'http://192.168.1.5:1'\nmodel = 'm'")
    assert OpenAI().find(hints | {"allow-remote": "1"}).origin == "attached"


@pytest.mark.parametrize("text", ["openai", "openai@", "openai@a b", "openai@a=3", "ollama@a"])
def test_an_arm_names_a_server(text: str) -> None:
    with pytest.raises(UsageError):
        OpenAI().parse(text)


def test_an_unknown_server_is_told_the_known_ones(tmp_path: Path, weights: ModelFile) -> None:
    adapter = OpenAI()
    engine = adapter.find(table(tmp_path, "[vllm]\nurl = 'http://127.0.0.1:1'\nmodel = 'm'"))
    arm = adapter.parse("openai@vlm")
    with (
        pytest.raises(Unavailable, match="did you mean 'vllm'"),
        adapter.open(engine, weights, arm, Settings(), tmp_path / "log"),
    ):
        pass


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path, weights: ModelFile) -> None:
    adapter = OpenAI()
    engine = adapter.find(table(tmp_path, f"[a]\nurl = 'http://127.0.0.1:{process.free_port()}'\nmodel = 'm'"))
    with (
        pytest.raises(Unavailable, match="start it first"),
        adapter.open(engine, weights, adapter.parse("openai@a"), Settings(), tmp_path / "log"),
    ):
        pass


def test_the_command_is_the_request_that_is_measured(tmp_path: Path, weights: ModelFile) -> None:
    adapter = OpenAI()
    adapter.find(table(tmp_path, "[a]\nurl = 'http://127.0.0.1:9'\nmodel = 'm'\nheaders = {X-Key = 'its'}"))
    words = shlex.split(adapter.command(adapter.parse("openai@a"), weights, Settings()))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:9/v1/completions"]
    assert "-HX-Key: its" in words
    assert json.loads(words[-1])["stream_options"] == {"include_usage": True}


# ── the dialect ─────────────────────────────────────────────────────────────────────────────


def event(**data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode()


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        (b": keep-alive", None),
        (b"data: [DONE]", None),
        (b"data:[DONE]", None),
        (b"event: message", None),
        (event(choices=[{"text": " a"}]), Chunk(" a")),
        (event(choices=[{"text": "[DONE]", "finish_reason": None}]), Chunk("[DONE]")),
        (event(choices=[{"text": " a"}], usage=None), Chunk(" a")),
        (event(choices=[{"text": " a"}], usage={"completion_tokens": 3}), Chunk(" a", 3)),
        (event(choices=[{"text": "", "finish_reason": "length"}]), Usage(stop="length")),
        (
            event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 9, "prompt_tokens_details": None}),
            Usage(prompt_tokens=5, generated_tokens=9),
        ),
        (
            event(
                choices=[{"text": "", "finish_reason": "stop"}],
                usage={"prompt_tokens": 5, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}},
            ),
            Usage(prompt_tokens=5, generated_tokens=9, cached_tokens=0, stop="stop"),
        ),
    ],
)
def test_a_line_means_text_or_counts_or_nothing(line: bytes, meaning: Chunk | Usage | None) -> None:
    assert Server("http://127.0.0.1:1", "m").read(line) == meaning


def test_an_error_object_is_a_failure() -> None:
    with pytest.raises(EngineFailed, match="out of patience"):
        Server("http://127.0.0.1:1", "m").read(event(error={"message": "out of patience"}))


# ── a server that runs ──────────────────────────────────────────────────────────────────────


def test_what_such_a_server_tells_is_measured_and_the_rest_is_unknown(tmp_path: Path, weights: ModelFile) -> None:
    adapter = OpenAI()
    with serving(fake(), tmp_path, Script(buffers=())) as port:
        engine = adapter.find(table(tmp_path, f"[a]\nurl = 'http://127.0.0.1:{port}'\nmodel = 'm'"))
        with adapter.open(engine, weights, adapter.parse("openai@a"), Settings(), tmp_path / "log") as session:
            sample = measure(session, PROMPT, 24)
            realised = session.realised()
    assert sample.fault is None
    assert sample.text.startswith(" quick brown fox naïve")
    assert sample.usage == Usage(prompt_tokens=4, cached_tokens=0, generated_tokens=24, stop="length")
    assert sample.ttft_s
    assert sample.server_decode_tps is None
    assert sample.prefill_tps is None
    assert (realised.weights, realised.buffers, realised.pids, realised.load_s) == (None, None, (), None)
    assert realised.notes


def test_a_key_is_sent(tmp_path: Path, weights: ModelFile) -> None:
    adapter = OpenAI()
    with serving(fake("--api-key", "secret"), tmp_path, Script(buffers=())) as port:
        head = f"[a]\nurl = 'http://127.0.0.1:{port}'\nmodel = 'm'\n"
        arm = adapter.parse("openai@a")
        engine = adapter.find(table(tmp_path, head))
        with (
            pytest.raises(Unavailable, match="401"),
            adapter.open(engine, weights, arm, Settings(), tmp_path / "log"),
        ):
            pass
        engine = adapter.find(table(tmp_path, head + "headers = { Authorization = 'Bearer secret' }"))
        with adapter.open(engine, weights, arm, Settings(), tmp_path / "log") as session:
            assert measure(session, PROMPT, 3).fault is None


@pytest.mark.engine
def test_a_real_llama_server_is_measured_through_its_openai_door(tmp_path: Path) -> None:
    if not importlib.util.find_spec("xllamacpp"):
        pytest.skip("the wheel xllamacpp is not installed: pip install 'llamaduel[embedded]'")
    model = model_file(synth.write(tmp_path / "tiny.gguf", synth.SHAPES["tiny"]))
    adapter = OpenAI()
    argv = [sys.executable, "-m", "backends.embedded_server", "-m", str(model.path), "-c", "512", "-t", "1", "-np", "1"]
    with serving(argv, tmp_path) as port:
        engine = adapter.find(table(tmp_path, f"[a]\nurl = 'http://127.0.0.1:{port}'\nmodel = 'tiny'"))
        with adapter.open(engine, model, adapter.parse("openai@a"), Settings(), tmp_path / "log") as session:
            sample = measure(session, PROMPT, 64)
    # a stalled machine hands many lines over at once, and without an engine's clock such a sample proves nothing
    assert sample.invalid is None or "pieces" in sample.invalid
    assert sample.usage is not None
    assert sample.usage.generated_tokens == 64
    assert sample.usage.cached_tokens == 0
    assert sample.usage.stop == "length"
    assert len(sample.chunk_ns) == 64
    assert sample.decode_tps
