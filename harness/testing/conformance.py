"""What the harness relies on, as tests that every adapter runs.

    class TestMine(Conformance):
        @pytest.fixture(scope="class")
        @classmethod
        def subject(cls):
            return Subject(backend=Mine(), arms=("mine", "mine@cpu"), model=..., missing={"mine": "/nowhere"})

Faults are real ones: processes are killed, files are no models. An adapter for servers that run
already starts nothing; its subject says so, and what cannot be tried there is skipped.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from harness import process
from harness.contract import (
    Arm,
    Backend,
    Chunk,
    Engine,
    ModelFile,
    Prompt,
    Realised,
    Request,
    Session,
    Settings,
    Usage,
)
from harness.errors import EngineFailed, Unavailable, UsageError
from harness.measure import Sample, Timeouts, measure

LOOPBACK = {"127.0.0.1", "::1", "localhost"}
NEXT_STEP = re.compile(r"`[^`]+`|--[a-z]")  # a command or an option to type
SETTINGS = Settings(context=1024, threads=1, flash_attention="off", load_mode="none")
HEADS = cycle(
    ("Apple", "Bird", "City", "Door", "East", "Fire", "Green", "Hill", "Iron", "June", "King", "Lake", "Moon")
)
PATIENCE = Timeouts(first_s=120, gap_s=60, total_s=300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One adapter, and what it needs to be tried here."""

    backend: Backend
    model: ModelFile
    arms: tuple[str, ...]  # texts that it takes; the first one is loaded
    missing: Mapping[str, str]  # hints with which there is no engine
    hints: Mapping[str, str] = field(default_factory=dict)
    settings: Settings = SETTINGS
    prompt: str = "the quick brown"
    starts: bool = True  # False: it speaks to a server that runs already

    def needs_start(self) -> None:
        if not self.starts:
            pytest.skip(f"{self.backend.name} starts no process and loads no file")


class Recorder:
    """A session that notes what it read."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.read_so_far: list[tuple[bytes, Chunk | Usage | None]] = []

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        return self.session.request(prompt, max_tokens)

    def read(self, line: bytes) -> Chunk | Usage | None:
        item = self.session.read(line)
        self.read_so_far.append((line, item))
        return item

    def settle(self, usage: Usage) -> Usage:
        return self.session.settle(usage)

    def realised(self) -> Realised:
        return self.session.realised()

    def count_tokens(self, text: str) -> int | None:
        return self.session.count_tokens(text)

    def death(self) -> str | None:
        return self.session.death()


def generate(session: Session, prompt: Prompt, max_tokens: int) -> Sample:
    return measure(session, prompt, max_tokens, timeouts=PATIENCE)


def our_processes() -> set[int]:
    """Every process that this harness started, or that one of those started, and that still runs."""
    found = set()
    for each in psutil.process_iter():
        try:
            if each.environ().get(process.OWNER) == process.owner() and each.status() != psutil.STATUS_ZOMBIE:
                found.add(each.pid)
        except (psutil.Error, OSError):
            continue
    return found


class Conformance:
    """Subclass it with a fixture `subject`."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, subject: Subject) -> Engine:
        return subject.backend.find(subject.hints)

    @pytest.fixture(scope="class")
    @classmethod
    def arm(cls, subject: Subject) -> Arm:
        return subject.backend.parse(subject.arms[0])

    @pytest.fixture(scope="class")
    @classmethod
    def session(
        cls, subject: Subject, engine: Engine, arm: Arm, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Recorder]:
        log = tmp_path_factory.mktemp("session") / "engine.log"
        with subject.backend.open(engine, subject.model, arm, subject.settings, log) as session:
            yield Recorder(session)

    def prompt(self, subject: Subject) -> Prompt:
        """As in a run, each one differs from all before it from the first token on."""
        head = next(HEADS)
        return Prompt(head, f"{head} {subject.prompt}")

    # ── what can be known before anything is started ────────────────────────────────────────

    def test_has_a_name_that_an_arm_can_begin_with(self, subject: Subject) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9.-]*", subject.backend.name)

    def test_arms_survive_being_written_and_read_again(self, subject: Subject) -> None:
        for text in subject.arms:
            arm = subject.backend.parse(text)
            assert arm.backend == subject.backend.name
            assert subject.backend.parse(str(arm)) == arm

    def test_an_arm_of_another_engine_is_a_usage_error(self, subject: Subject) -> None:
        with pytest.raises(UsageError):
            subject.backend.parse("no-such-engine")

    def test_an_unknown_knob_is_a_usage_error_that_names_the_known_ones(self, subject: Subject) -> None:
        with pytest.raises(UsageError, match="no knob 'zz'"):
            subject.backend.parse(f"{subject.arms[0]},zz=1")

    def test_a_missing_engine_is_unavailable_and_says_how_to_get_it(self, subject: Subject) -> None:
        with pytest.raises(Unavailable) as caught:
            subject.backend.find(subject.missing)
        assert NEXT_STEP.search(str(caught.value)), f"no next step in: {caught.value}"

    def test_finding_leaves_nothing_running(self, subject: Subject) -> None:
        before = our_processes()
        engine = subject.backend.find(subject.hints)
        assert str(engine)
        assert our_processes() <= before

    def test_an_unknown_model_name_is_no_file(self, subject: Subject) -> None:
        assert subject.backend.resolve("no-such-model-anywhere") is None

    @pytest.mark.usefixtures("engine")
    def test_the_command_can_be_pasted(self, subject: Subject, arm: Arm) -> None:
        words = shlex.split(subject.backend.command(arm, subject.model, subject.settings))
        assert words
        assert not subject.starts or any(str(subject.model.path) in word for word in words)

    # ── a session ───────────────────────────────────────────────────────────────────────────

    def test_text_comes_first_and_usage_last(self, subject: Subject, session: Recorder) -> None:
        session.read_so_far.clear()
        sample = generate(session, self.prompt(subject), 8)
        kinds = [type(item) for _, item in session.read_so_far if item is not None]
        assert sample.fault is None
        assert sample.text
        assert kinds[0] is Chunk
        assert kinds[-1] is Usage
        assert Chunk not in kinds[kinds.index(Usage) :]

    def test_the_number_of_tokens_is_honoured_and_counted(self, subject: Subject, session: Recorder) -> None:
        for max_tokens in (1, 5, 12):
            sample = generate(session, self.prompt(subject), max_tokens)
            assert sample.fault is None
            assert sample.usage is not None
            assert sample.usage.generated_tokens == max_tokens
            assert sample.usage.stop in ("length", None)
            assert len(sample.chunk_ns) <= max_tokens

    def test_the_prompt_is_counted_and_none_of_it_comes_from_a_cache(self, subject: Subject, session: Recorder) -> None:
        for _ in range(2):
            prompt = self.prompt(subject)
            counted = session.count_tokens(prompt.text)
            sample = generate(session, prompt, 4)
            assert sample.usage is not None
            assert sample.usage.prompt_tokens
            assert sample.usage.prompt_tokens == counted or counted is None
            assert not sample.usage.cached_tokens

    def test_greedy_decoding_gives_the_same_text_twice(self, subject: Subject, session: Recorder) -> None:
        prompt = self.prompt(subject)
        once, _, again = (generate(session, each, 8) for each in (prompt, self.prompt(subject), prompt))
        assert once.text
        assert once.text == again.text

    def test_the_prompt_is_sent_as_it_stands_to_this_machine(self, session: Recorder) -> None:
        text = "A line\nwith “quotes” and 東京"
        request = session.request(Prompt("p", text), 3)
        assert urlsplit(request.url).hostname in LOOPBACK
        assert text in json.loads(request.body).values()

    def test_reading_a_line_is_pure(self, subject: Subject, session: Recorder) -> None:
        generate(session, self.prompt(subject), 4)
        noted = list(session.read_so_far)
        assert [session.session.read(line) for line, _ in noted] == [item for _, item in noted]

    def test_what_was_realised_can_be_checked(self, subject: Subject, session: Recorder) -> None:
        realised = session.realised()
        assert realised.engine
        subject.needs_start()
        assert realised.argv
        assert realised.pids
        assert set(realised.pids) <= our_processes()
        assert realised.weights is not None
        assert realised.weights.stat().st_size == subject.model.path.stat().st_size

    def test_a_living_engine_has_no_cause_of_death(self, session: Recorder) -> None:
        assert session.death() is None

    # ── the end ─────────────────────────────────────────────────────────────────────────────

    def test_nothing_is_left_running(self, subject: Subject, engine: Engine, arm: Arm, tmp_path: Path) -> None:
        before = our_processes()
        with subject.backend.open(engine, subject.model, arm, subject.settings, tmp_path / "engine.log") as session:
            assert not subject.starts or our_processes() > before
            assert generate(session, self.prompt(subject), 2).fault is None
        assert our_processes() == before

    def test_nothing_is_left_running_after_an_error_in_the_block(
        self, subject: Subject, engine: Engine, arm: Arm, tmp_path: Path
    ) -> None:
        before = our_processes()
        with (
            pytest.raises(ZeroDivisionError),
            subject.backend.open(engine, subject.model, arm, subject.settings, tmp_path / "engine.log"),
        ):
            raise ZeroDivisionError
        assert our_processes() == before

    def test_an_engine_that_dies_in_mid_stream_is_a_failure_with_a_reason(
        self, subject: Subject, engine: Engine, arm: Arm, tmp_path: Path
    ) -> None:
        subject.needs_start()
        before = our_processes()
        with subject.backend.open(engine, subject.model, arm, subject.settings, tmp_path / "engine.log") as session:
            computes = psutil.Process(session.realised().pids[-1])
            calls = count()

            def clock() -> int:
                """The clock of `measure`, which kills the engine once some text has come."""
                if next(calls) == 12:
                    computes.kill()
                return time.perf_counter_ns()

            sample = measure(session, self.prompt(subject), 800, clock=clock, timeouts=PATIENCE)
            assert sample.invalid
            assert sample.fault
            assert session.death()
        assert our_processes() == before

    def test_a_file_that_is_no_model_is_a_failure_in_one_sentence(
        self, subject: Subject, engine: Engine, arm: Arm, tmp_path: Path
    ) -> None:
        subject.needs_start()
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"this is no model at all" * 1000)
        model = dataclasses.replace(subject.model, path=broken, shards=(broken,), size_bytes=broken.stat().st_size)
        model = dataclasses.replace(model, sha256="0" * 64, digest="0" * 64)
        before = our_processes()
        with (
            pytest.raises(EngineFailed) as caught,
            subject.backend.open(engine, model, arm, subject.settings, tmp_path / "engine.log"),
        ):
            pass
        assert str(caught.value)
        assert "\n" not in str(caught.value).strip()
        assert our_processes() == before


def model_file(path: Path, sha256: str = "", digest: str = "") -> ModelFile:
    """The contract's record of a file of one part."""
    return ModelFile(path, (path,), "", path.stat().st_size, sha256, digest)
