"""Every registered adapter keeps the contract: against fakes, with scripted faults, and for real."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.llama_cpp import LlamaCpp
from backends.ollama import Ollama
from backends.openai import OpenAI
from harness import model, placement, process, registry, synth
from harness.contract import Backend, Prompt, Session, Settings
from harness.errors import Crashed, DoesNotFit, EngineFailed, TimedOut, Unavailable
from harness.model import Model
from harness.testing import engines
from harness.testing.conformance import SETTINGS, Conformance, Subject, generate, our_processes
from harness.testing.script import VARIABLE, Script

# typed, so that mypy holds each of them against the contract
BACKENDS: dict[str, Callable[[], Backend]] = {"llama-cpp": LlamaCpp, "ollama": Ollama, "openai": OpenAI}
ARMS: dict[str, tuple[str, ...]] = {
    "llama-cpp": ("llama-cpp", "llama-cpp@cpu-moe", "llama-cpp@ncmoe=3,b=256,ub=64", "llama-cpp@ngl=99,ctk=q8_0"),
    "ollama": ("ollama", "ollama@cpu-moe", "ollama@ncmoe=3", "ollama@ngl=20,c=2048,t=2", "ollama,fa=off"),
    "openai": ("openai@local",),
}
MISSING: dict[str, dict[str, str]] = {
    "llama-cpp": {"llama-server": "/nowhere/llama-server"},
    "ollama": {"ollama": "/nowhere/ollama"},
    "openai": {"openai": "/nowhere/servers.toml"},
}
STARTING = ("llama-cpp", "ollama")
MIB = 2**20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A small model with experts and a known answer."""
    folder = tmp_path_factory.mktemp("models")
    with cached_in(folder / "cache"):
        return model.load(synth.write(folder / "tiny.gguf", synth.SHAPES["tiny"]))


@contextlib.contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


def last_words(model: Model) -> str:
    """A prompt that a model with a known answer goes on from."""
    key = model.answer_key
    assert key is not None
    return " ".join(key.word(index) for index in range(5))


def test_every_registered_backend_is_tried_here() -> None:
    assert set(registry.backends()) == set(BACKENDS) == set(ARMS) == set(MISSING)


@contextlib.contextmanager
def openai_server(folder: Path, weights: Path) -> Iterator[dict[str, str]]:
    """A fake llama-server that runs already, and the hints that name it."""
    port = process.free_port()
    argv = [str(folder / "engines" / "bin" / "llama-server"), "-m", str(weights), "--port", str(port)]
    with process.start(argv, folder / "server.log", process.engine_environment()) as child:
        deadline = time.monotonic() + 30
        while not any("listening on" in line for line in child.tail()):
            assert child.returncode() is None, child.tail()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        table = folder / "servers.toml"
        table.write_text(f'[local]\nurl = "http://127.0.0.1:{port}"\nmodel = "tiny"\n')
        yield {"openai": str(table)}


class TestAgainstFakes(Conformance):
    @pytest.fixture(scope="class", params=sorted(BACKENDS))
    @classmethod
    def subject(
        cls, request: pytest.FixtureRequest, tiny: Model, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Subject]:
        name: str = request.param
        folder = tmp_path_factory.mktemp(name)
        with contextlib.ExitStack() as stack:
            stack.enter_context(engines.fake(folder))
            hints = stack.enter_context(openai_server(folder, tiny.file.path)) if name == "openai" else {}
            yield Subject(
                backend=BACKENDS[name](),
                model=tiny.file,
                arms=ARMS[name],
                missing=MISSING[name],
                hints=hints,
                prompt=last_words(tiny),
                starts=name in STARTING,
            )


# ── faults that only a fake has ─────────────────────────────────────────────────────────────


@pytest.fixture(params=STARTING)
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """An adapter that starts engines, with fakes in PATH."""
    with engines.fake(tmp_path):
        yield BACKENDS[request.param]()


@contextlib.contextmanager
def opened(
    adapter: Backend, tiny: Model, folder: Path, script: Script, arm: str = "", settings: Settings = SETTINGS
) -> Iterator[Session]:
    os.environ.update(script.environment())
    try:
        hints = {"stand-in": "1"} if settings.stand_in_bytes else {}
        engine = adapter.find(hints)
        with adapter.open(engine, tiny.file, adapter.parse(adapter.name + arm), settings, folder / "log") as session:
            yield session
    finally:
        os.environ[VARIABLE] = "{}"


@pytest.mark.parametrize(
    ("script", "error", "says"),
    [
        (Script(dies_loading="error loading model: unable to allocate CUDA0 buffer"), DoesNotFit, "out of memory"),
        (Script(dies_loading="cudaMalloc failed: out of memory"), DoesNotFit, "out of memory"),
        (Script(dies_loading="error loading model: unknown model architecture: 'x'"), Crashed, "architecture"),
        (Script(dies_loading="error: something nobody has seen", exit_code=3), EngineFailed, "something nobody"),
        (Script(dies_loading="", exit_code=-4), EngineFailed, "SIGILL"),
        (Script(http_error=500), EngineFailed, "scripted error"),
    ],
    ids=["out of memory", "cudaMalloc", "architecture", "unknown text", "SIGILL", "HTTP 500"],
)
def test_an_engine_that_does_not_come_up_is_a_failure_in_one_sentence(
    adapter: Backend, tiny: Model, tmp_path: Path, script: Script, error: type[Exception], says: str
) -> None:
    before = our_processes()
    with pytest.raises(error, match=says) as caught, opened(adapter, tiny, tmp_path, script):
        pass
    assert "\n" not in str(caught.value).strip()
    assert our_processes() == before


def test_an_engine_that_refuses_everything_is_unavailable(adapter: Backend, tiny: Model, tmp_path: Path) -> None:
    script = Script(refuses="Illegal instruction of some kind")
    with pytest.raises(Unavailable), opened(adapter, tiny, tmp_path, script):
        pass


def test_a_model_that_loads_for_ever_is_given_up(
    adapter: Backend, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = our_processes()
    module = sys.modules[type(adapter).__module__]
    monkeypatch.setattr(module, "LOAD_S", 0.3)
    with pytest.raises(TimedOut), opened(adapter, tiny, tmp_path, Script(hangs_loading=True)):
        pass
    assert our_processes() == before


def test_an_engine_that_ignores_sigterm_is_ended_all_the_same(adapter: Backend, tiny: Model, tmp_path: Path) -> None:
    before = our_processes()
    with opened(adapter, tiny, tmp_path, Script(ignores_sigterm=True)):
        pass
    assert our_processes() == before


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (Script(cached=2), "2 prompt tokens came from a cache"),
        (Script(garbage=True), "stream"),
        (Script(decode_time_factor=1.5, itl_s=0.02), "CLOCK_MISMATCH"),
        (Script(ends_after=4), "short answer: 5 of 12 tokens"),
    ],
    ids=["cache", "garbage", "clock", "short"],
)
def test_a_sample_that_is_not_sound_is_seen_through_every_adapter(
    adapter: Backend, tiny: Model, tmp_path: Path, script: Script, says: str
) -> None:
    with opened(adapter, tiny, tmp_path, script) as session:
        assert says in str(generate(session, prompt_of(tiny), 12).invalid)


def test_what_breaks_after_loading_is_seen_through_every_adapter(adapter: Backend, tiny: Model, tmp_path: Path) -> None:
    for script in (Script(error_after=5), Script(no_final=True), Script(dies_after=5)):
        with contextlib.suppress(EngineFailed), opened(adapter, tiny, tmp_path, script) as session:
            assert generate(session, prompt_of(tiny), 12).fault


def test_a_reload_inside_a_request_is_seen(tiny: Model, tmp_path: Path) -> None:
    with engines.fake(tmp_path), opened(Ollama(), tiny, tmp_path, Script(reload_s=0.8)) as session:
        assert "loaded again" in str(generate(session, prompt_of(tiny), 12).invalid)


def test_the_answer_of_a_model_that_knows_it_is_checked(adapter: Backend, tiny: Model, tmp_path: Path) -> None:
    key = tiny.answer_key
    assert key is not None
    prompt = prompt_of(tiny)
    with opened(adapter, tiny, tmp_path, Script()) as session:
        assert generate(session, prompt, 12).text == key.continuation(prompt.text.split()[-1], 12)


def prompt_of(tiny: Model) -> Prompt:
    return Prompt("p", last_words(tiny))


# ── placement, predicted and realised ───────────────────────────────────────────────────────


@pytest.mark.parametrize("arm", ["@cpu-moe", "@ncmoe=0", "@ncmoe=5", "@ngl=7", "@ngl=99", "@cpu"])
def test_every_placement_is_realised_as_predicted(adapter: Backend, tiny: Model, tmp_path: Path, arm: str) -> None:
    """The fake follows llama.cpp's rules, written down a second time."""
    script = Script(devices=(("CUDA0", "a fake card", 12_000),))
    settings = dataclasses.replace(SETTINGS, flash_attention="on", load_mode="none")
    asked = adapter.parse(adapter.name + arm)
    predicted = placement.predict(tiny, asked.placement, settings, True)
    assert predicted is not None
    with opened(adapter, tiny, tmp_path, script, arm, settings) as session:
        realised = session.realised()
    assert realised.buffers is not None
    device = sum(b.bytes for b in realised.buffers if not b.on_host and b.kind in ("weights", "kv"))
    assert device == pytest.approx(predicted.device_bytes, abs=0.03 * MIB)


def test_a_card_that_is_too_small_does_not_fit(adapter: Backend, tiny: Model, tmp_path: Path) -> None:
    script = Script(devices=(("CUDA0", "a tiny card", 8),))
    with pytest.raises(DoesNotFit), opened(adapter, tiny, tmp_path, script, "@ngl=99"):
        pass


def test_a_stand_in_device_takes_weights(adapter: Backend, tiny: Model, tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, stand_in_bytes=2**40)
    before = our_processes()
    with opened(adapter, tiny, tmp_path, Script(), "@ngl=99", settings) as session:
        buffers = session.realised().buffers or ()
    assert any(b.device.startswith("RPC0") and b.kind == "weights" and not b.on_host for b in buffers)
    assert our_processes() == before


# ── the fakes themselves ────────────────────────────────────────────────────────────────────


def test_a_case_changes_only_the_starts_that_it_names(tiny: Model, tmp_path: Path) -> None:
    adapter = LlamaCpp()
    with engines.fake(tmp_path, cases=[{"when": "--n-cpu-moe 3", "words": ["moe"]}]):
        engine = adapter.find({})
        texts = []
        for arm in ("llama-cpp@ncmoe=3", "llama-cpp@ncmoe=2"):
            with adapter.open(engine, tiny.file, adapter.parse(arm), SETTINGS, tmp_path / "log") as session:
                texts.append(generate(session, prompt_of(tiny), 2).text)
    assert texts[0] == " moe moe"
    assert "moe" not in texts[1]


def test_each_start_may_have_a_speed_of_its_own(tiny: Model, tmp_path: Path) -> None:
    """Twenty times apart, so that a busy machine cannot hide it."""
    starts = tmp_path / "starts"
    adapter = LlamaCpp()
    with engines.fake(tmp_path, Script(itl_s=(0.001, 0.02), starts=str(starts))):
        engine = adapter.find({})
        speeds = []
        for _ in range(2):
            with adapter.open(engine, tiny.file, adapter.parse("llama-cpp"), SETTINGS, tmp_path / "log") as session:
                speeds.append(generate(session, prompt_of(tiny), 30).server_decode_tps or 0)
    assert speeds[1] < 51 < speeds[0]
    assert len(starts.read_text().splitlines()) == 2


def test_a_misspelt_key_of_a_script_is_no_silent_default(tmp_path: Path) -> None:
    with engines.fake(tmp_path):
        os.environ[VARIABLE] = '{"itl": 3}'
        with pytest.raises(Unavailable):
            LlamaCpp().find({})


# ── the real ones ───────────────────────────────────────────────────────────────────────────


def real(name: str) -> tuple[dict[str, str], str]:
    """(hints, why not) for a real engine by the name of its subject."""
    if name == "llama-cpp-embedded":
        missing = not importlib.util.find_spec("xllamacpp")
        return {}, "the wheel xllamacpp is not installed: pip install 'llamaduel[embedded]'" if missing else ""
    if name == "llama-cpp-full":
        from backends.install import LlamaCppRecipe

        path = os.environ.get("LLAMADUEL_LLAMA_SERVER") or shutil.which("llama-server") or LlamaCppRecipe().installed()
        return {"llama-server": str(path)}, "" if path else "no full llama.cpp: llamaduel engines install llama-cpp"
    from backends.install import OllamaRecipe

    path = os.environ.get("LLAMADUEL_OLLAMA") or shutil.which("ollama") or OllamaRecipe().installed()
    return {"ollama": str(path)}, "" if path else "no Ollama: llamaduel engines install ollama"


@pytest.mark.engine
class TestAgainstTheRealOnes(Conformance):
    @pytest.fixture(scope="class", params=["llama-cpp-embedded", "llama-cpp-full", "ollama"])
    @classmethod
    def subject(
        cls, request: pytest.FixtureRequest, tiny: Model, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Subject]:
        hints, why_not = real(request.param)
        if why_not:
            pytest.skip(why_not)
        name = "ollama" if request.param == "ollama" else "llama-cpp"
        with contextlib.ExitStack() as stack:
            if request.param == "llama-cpp-embedded":  # hide all others
                stack.enter_context(cached_in(tmp_path_factory.mktemp("cache")))
                path = pytest.MonkeyPatch()
                stack.callback(path.undo)
                path.setenv("PATH", str(Path(sys.executable).parent))
            yield Subject(
                backend=BACKENDS[name](),
                model=tiny.file,
                arms=ARMS[name],
                missing=MISSING[name],
                hints=hints,
                prompt=last_words(tiny),
            )

    def test_the_known_answer_comes_word_for_word(self, subject: Subject, tiny: Model, session: Session) -> None:
        prompt = self.prompt(subject)
        key = tiny.answer_key
        assert key is not None
        assert generate(session, prompt, 40).text == key.continuation(prompt.text.split()[-1], 40)
