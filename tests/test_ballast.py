"""Every engine sees a card of the size asked for, and the memory is back however the harness ends.

The driver is a small library in C over files (tests/fake_cuda.c): real processes share its cards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from harness import ballast, process
from harness.ballast import MIB
from harness.errors import DuelError, Interrupted, RunRefused, Unavailable, UsageError
from harness.testing.conformance import our_processes

GIB = 1 << 30
SOURCE = Path(__file__).with_name("fake_cuda.c")
CONTEXT = 100 * MIB  # as in fake_cuda.c, and so are these
RESERVED = 300 * MIB
TOTAL = 8 * GIB

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None,
    reason="the driver in these tests is built by a C compiler, and found as on Linux",
)


def compiled(folder: Path, *flags: str) -> Path:
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", *flags, "-o", folder / ballast.LIBRARY, SOURCE], check=True)
    return folder


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the library."""
    return compiled(tmp_path_factory.mktemp("driver"))


@dataclass(frozen=True)
class Cuda:
    """The machine's cards, and what goes wrong on them."""

    folder: Path
    library: Path

    def show(self, *cards: str) -> None:
        (self.folder / "cards").write_text("".join(f"{card}\n" for card in cards))

    def fail(self, function: str, code: int) -> None:
        """From now on; -1 never answers."""
        (self.folder / "faults").write_text(f"{function} {code}\n")

    def free(self, card: int = 0) -> int:
        """What a process without a context finds free."""
        asked = ctypes.CDLL(str(self.library / ballast.LIBRARY)).fake_free_bytes
        asked.restype = ctypes.c_uint64
        return int(asked(card))


@pytest.fixture
def cuda(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """One card of 8 GiB."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    monkeypatch.setenv("FAKE_CUDA", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = Cuda(folder, driver)
    found.show("Fake 8|8192|0|0")
    yield found
    assert not our_processes()


OTHER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
codes = [cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), int(sys.argv[1]))]
codes += [cuda.cuCtxSetCurrent(context), cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(sys.argv[2])))]
print(codes, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another_program(size: int, card: int = 0) -> Iterator[None]:
    """It holds `size` bytes, and its context."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OTHER, str(card), str(size)], stdin=pipe, stdout=pipe) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"[0, 0, 0, 0]\n"
        yield


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def refusal(limits: tuple[int, ...], log: Path) -> DuelError:
    with pytest.raises(DuelError) as raised, ballast.hold(limits, log):
        pytest.fail("nothing refused it")
    assert "\n" not in str(raised.value)
    return raised.value


# ── what is held ────────────────────────────────────────────────────────────────────────────


def test_a_card_is_made_as_small_as_asked_for(cuda: Cuda, tmp_path: Path) -> None:
    with ballast.hold((3 * GIB,), tmp_path / "log") as held:
        assert held.cards == (
            ballast.Card(
                uuid="GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
                name="Fake 8",
                total_bytes=TOTAL,
                free_bytes=3 * GIB,
                held_bytes=TOTAL - 3 * GIB - RESERVED - CONTEXT,
            ),
        )
        assert held.limits == (3 * GIB,)
        assert cuda.free() == 3 * GIB
    assert cuda.free() == TOTAL - RESERVED


@pytest.mark.parametrize("limit", [256 * MIB, 1_234_567_890, 7 * GIB + 5, TOTAL - RESERVED - CONTEXT])
def test_a_limit_between_two_pages_is_met_as_nearly_as_pages_go(limit: int, cuda: Cuda, tmp_path: Path) -> None:
    with ballast.hold((limit,), tmp_path / "log"):
        assert 0 <= cuda.free() - limit < 2 * MIB


def test_a_limit_just_above_what_is_free_is_near_enough(cuda: Cuda, tmp_path: Path) -> None:
    free = TOTAL - RESERVED - CONTEXT
    with ballast.hold((free + 64 * MIB,), tmp_path / "log") as held:
        assert (held.cards[0].free_bytes, held.cards[0].held_bytes) == (free, 0)


def test_one_limit_holds_for_every_card(cuda: Cuda, tmp_path: Path) -> None:
    cuda.show("Fake 8|8192|0|0", "Fake 4|4096|0|0")
    with ballast.hold((2 * GIB,), tmp_path / "log") as held:
        assert held.limits == (2 * GIB, 2 * GIB)
        assert [(card.name, card.free_bytes, card.total_bytes) for card in held.cards] == [
            ("Fake 8", 2 * GIB, 8 * GIB),
            ("Fake 4", 2 * GIB, 4 * GIB),
        ]
        assert len({card.uuid for card in held.cards}) == 2
        assert (cuda.free(0), cuda.free(1)) == (2 * GIB, 2 * GIB)


def test_every_card_may_have_a_limit_of_its_own(cuda: Cuda, tmp_path: Path) -> None:
    cuda.show("Fake 8|8192|0|0", "Fake 4|4096|0|0")
    with ballast.hold((5 * GIB, 1 * GIB), tmp_path / "log") as held:
        assert held.limits == (5 * GIB, 1 * GIB)
        assert (cuda.free(0), cuda.free(1)) == (5 * GIB, 1 * GIB)
    assert cuda.free(1) == 4 * GIB - RESERVED


def test_a_card_that_is_hidden_from_engines_is_left_alone(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.show("Fake 8|8192|0|0", "Fake 4|4096|0|0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with ballast.hold((2 * GIB,), tmp_path / "log") as held:
        assert [card.name for card in held.cards] == ["Fake 4"]
        assert (cuda.free(0), cuda.free(1)) == (8 * GIB - RESERVED, 2 * GIB)


@pytest.mark.parametrize(
    "extra",
    [
        "(bytes >= 1024 * MIB ? 16 * MIB : 0)",  # tables for a large block
        "(made == 40 ? 512 * MIB : 0)",  # gone from the card while the last blocks are taken
    ],
)
def test_what_is_taken_beyond_the_blocks_is_made_up_for(
    extra: str, cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled(tmp_path, f"-DEXTRA={extra}")))
    limit = TOTAL - RESERVED - CONTEXT - 2 * GIB - 16 * MIB
    with ballast.hold((limit,), tmp_path / "log"):
        assert abs(cuda.free() - limit) <= 4 * MIB


def test_a_driver_without_the_newer_name_of_a_call_does_too(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled(tmp_path, "-DOLD")))
    with ballast.hold((2 * GIB,), tmp_path / "log") as held:
        assert held.cards[0].uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_what_a_start_of_python_prints_is_no_answer(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello {}')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with ballast.hold((2 * GIB,), tmp_path / "log") as held:
        assert held.adjust()[0].free_bytes == 2 * GIB


# ── what others do meanwhile ────────────────────────────────────────────────────────────────


def test_adjusting_gives_room_back_that_another_program_took(cuda: Cuda, tmp_path: Path) -> None:
    with ballast.hold((3 * GIB,), tmp_path / "log") as held:
        before = held.cards[0]
        with another_program(1200 * MIB):
            assert cuda.free() == 3 * GIB - 1300 * MIB
            (after,) = held.adjust()
            assert cuda.free() == after.free_bytes == 3 * GIB
            assert after.held_bytes == before.held_bytes - 1300 * MIB
            assert held.cards == (after,)
        assert cuda.free() == 3 * GIB + 1300 * MIB
        assert held.adjust() == (before,)
        assert cuda.free() == 3 * GIB


def test_adjusting_an_unchanged_card_changes_nothing(cuda: Cuda, tmp_path: Path) -> None:
    with ballast.hold((3 * GIB + 7,), tmp_path / "log") as held:
        before = held.cards
        assert held.adjust() == held.adjust() == before


def test_adjusting_acts_on_the_card_that_changed(cuda: Cuda, tmp_path: Path) -> None:
    cuda.show("Fake 8|8192|0|0", "Fake 4|4096|0|0")
    with ballast.hold((2 * GIB, 1 * GIB), tmp_path / "log") as held, another_program(500 * MIB, card=1):
        before = held.cards
        after = held.adjust()
        assert after[0] == before[0]
        assert after[1].held_bytes == before[1].held_bytes - 600 * MIB
        assert (cuda.free(0), cuda.free(1)) == (2 * GIB, 1 * GIB)


def test_a_limit_that_others_took_is_refused_and_met_again_when_they_are_gone(cuda: Cuda, tmp_path: Path) -> None:
    with ballast.hold((5 * GIB,), tmp_path / "log") as held:
        with another_program(4 * GIB):
            with pytest.raises(Interrupted, match=r"lacks 1524 MiB for .* `llamaduel doctor` names; start it again$"):
                held.adjust()
            assert held.cards[0].free_bytes == 5 * GIB  # as last told
        assert held.adjust()[0].free_bytes == cuda.free() == 5 * GIB


# ── what is refused, and the next step ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("12GiB", (12 * GIB,)),
        ("12GiB,8GiB", (12 * GIB, 8 * GIB)),
        ("256MiB, 0.5GiB", (256 * MIB, 512 * MIB)),
    ],
)
def test_limits_are_sizes_with_commas_between_them(text: str, limits: tuple[int, ...]) -> None:
    assert ballast.limits_of(text) == limits


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write it like"),
        ("12GiB,", "write it like"),
        ("12GiB;8GiB", "write it like"),
        ("12", "write 12GiB"),
        ("8GiB,255MiB", "255 MiB of GPU memory hold no engine; name at least 256 MiB"),
    ],
)
def test_what_is_no_limit_is_answered_with_one(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ballast.limits_of(text)


def test_without_a_driver_the_stand_in_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ballast.LIBRARY).write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, Unavailable)
    assert str(error).startswith("no CUDA driver here (")
    assert "use --stand-in=SIZE" in str(error)
    assert not our_processes()


def test_the_stub_of_a_toolkit_is_no_driver(cuda: Cuda, tmp_path: Path) -> None:
    cuda.fail("cuInit", ballast.STUB_LIBRARY)
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, Unavailable)
    assert "only its stub" in str(error)
    assert "use --stand-in=SIZE" in str(error)


def test_a_driver_without_a_call_is_to_be_updated(cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("-DcuMemFree_v2=cuMemFree", "-DcuMemAlloc_v2=cuMemAlloc")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled(tmp_path, *flags)))
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, Unavailable)
    assert "the CUDA driver here has no cuMemAlloc_v2; update it, or use --stand-in=SIZE" in str(error)


def test_a_driver_that_shows_no_gpu_is_asked_about_by_nvidia_smi(cuda: Cuda, tmp_path: Path) -> None:
    cuda.show()
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, Unavailable)
    assert "CUDA shows no GPU here" in str(error)
    assert "see whether `nvidia-smi` shows one, or use --stand-in=SIZE" in str(error)


def test_a_gpu_that_is_hidden_is_said_to_be(cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, Unavailable)
    assert "CUDA_VISIBLE_DEVICES='' may hide it, or use --stand-in=SIZE" in str(error)


@pytest.mark.parametrize("cards", [1, 2])
def test_as_many_limits_as_cards_or_one(cards: int, cuda: Cuda, tmp_path: Path) -> None:
    cuda.show(*["Fake 8|8192|0|0"] * cards)
    error = refusal((GIB,) * 3, tmp_path / "log")
    assert isinstance(error, UsageError)
    assert f"names 3 sizes and CUDA shows {cards} GPU" in str(error)
    assert "name one size for every GPU or one for each" in str(error)


def test_a_limit_beyond_the_card_names_both(cuda: Cuda, tmp_path: Path) -> None:
    cuda.show("Fake 8|8192|0|0", "Fake 4|4096|0|0")
    error = refusal((6 * GIB,), tmp_path / "log")
    assert isinstance(error, UsageError)
    assert "--vram-limit=6GiB is more than Fake 4 has (4096 MiB); name less" in str(error)


def test_memory_that_others_hold_is_counted_and_a_smaller_limit_proposed(cuda: Cuda, tmp_path: Path) -> None:
    with another_program(3 * GIB):
        error = refusal((5000 * MIB,), tmp_path / "log")
        assert isinstance(error, RunRefused)
        assert "Fake 8 lacks 380 MiB for --vram-limit=5000MiB, because other programs and the driver" in str(error)
        assert "end those that `llamaduel doctor` names, or name at most 4620MiB for it" in str(error)
        with ballast.hold((4620 * MIB,), tmp_path / "log") as held:
            assert held.cards[0].held_bytes == 0


def test_no_limit_is_proposed_that_holds_no_engine(cuda: Cuda, tmp_path: Path) -> None:
    with another_program(TOTAL - RESERVED - 2 * CONTEXT - 200 * MIB):
        error = refusal((GIB,), tmp_path / "log")
        assert str(error).endswith("end those that `llamaduel doctor` names")


def test_a_gpu_on_the_machine_s_own_memory_is_not_held(cuda: Cuda, tmp_path: Path) -> None:
    cuda.show("Fake Orin|8192|1|0")
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, Unavailable)
    assert "Fake Orin has no memory of its own" in str(error)
    assert "use --stand-in=SIZE" in str(error)


def test_a_gpu_that_one_process_alone_may_use_is_not_held(cuda: Cuda, tmp_path: Path) -> None:
    cuda.show("Fake 8|8192|0|3")
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, Unavailable)
    assert "'exclusive process', in which a ballast shuts every engine out" in str(error)
    assert "`sudo nvidia-smi -c DEFAULT`" in str(error)


def test_a_driver_that_gives_no_memory_away_is_said_to(cuda: Cuda, tmp_path: Path) -> None:
    cuda.fail("cuMemAlloc_v2", ballast.OUT_OF_MEMORY)
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, RunRefused)
    assert "Fake 8 has 6768 MiB more free than --vram-limit=1GiB" in str(error)
    assert "try a larger limit, or run without --vram-limit" in str(error)


def test_a_driver_that_gives_what_it_has_not_is_no_card_to_hold(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled(tmp_path, "-DEXTRA=-bytes")))  # no block takes anything
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, RunRefused)
    assert "Fake 8 has 6768 MiB more free than --vram-limit=1GiB" in str(error)


@pytest.mark.parametrize(
    ("function", "code", "says"),
    [
        ("cuInit", 999, "CUDA_ERROR_UNKNOWN (999) for this machine"),
        ("cuDeviceGetCount", 803, "an error without a name (803) for this machine"),
        ("cuDeviceGet", 999, "CUDA_ERROR_UNKNOWN (999) for GPU 0"),
        ("cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY (2) for Fake 8"),
        ("cuMemGetInfo_v2", 999, "CUDA_ERROR_UNKNOWN (999) for Fake 8"),
        ("cuMemAlloc_v2", 999, "CUDA_ERROR_UNKNOWN (999) for Fake 8"),
    ],
)
def test_other_errors_go_by_the_driver_s_name_and_number(
    function: str, code: int, says: str, cuda: Cuda, tmp_path: Path
) -> None:
    cuda.fail(function, code)
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, RunRefused)
    assert says in str(error)
    assert "see what `llamaduel doctor` and `nvidia-smi` say of it, or run without --vram-limit" in str(error)


def test_an_error_while_adjusting_is_told_too(cuda: Cuda, tmp_path: Path) -> None:
    with ballast.hold((GIB,), tmp_path / "log") as held, another_program(300 * MIB):
        cuda.fail("cuMemFree_v2", 999)
        with pytest.raises(RunRefused, match=r"CUDA_ERROR_UNKNOWN \(999\) for Fake 8"):
            held.adjust()


@pytest.mark.parametrize("function", ["cuInit", "cuMemAlloc_v2"])
def test_a_driver_that_never_answers_is_given_up(
    function: str, cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ballast, "ANSWER_S", 0.2)
    cuda.fail(function, -1)
    error = refusal((GIB,), tmp_path / "log")
    assert isinstance(error, RunRefused)
    assert "has not answered the ballast for 0.2 s; see whether `nvidia-smi` answers" in str(error)
    assert str(error).endswith("restart the machine if it does not; start it again")


def test_a_driver_that_stops_answering_while_adjusting_is_given_up_for_good(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ballast.hold((GIB,), tmp_path / "log") as held:
        monkeypatch.setattr(ballast, "ANSWER_S", 0.2)
        cuda.fail("cuMemGetInfo_v2", -1)
        with pytest.raises(RunRefused, match=r"has not answered .* start it again"):
            held.adjust()
        with pytest.raises(RunRefused, match=r"the ballast is gone \(SIGKILL\)"):
            held.adjust()


# ── however it ends ─────────────────────────────────────────────────────────────────────────


def test_the_child_is_marked_as_ours_and_as_no_engine_and_hears_no_terminal(cuda: Cuda, tmp_path: Path) -> None:
    with ballast.hold((GIB,), tmp_path / "log"):
        (pid,) = our_processes()
        assert psutil.Process(pid).environ()[process.ASIDE] == "1"
        assert os.getsid(pid) == pid
    assert process.ASIDE not in os.environ


def test_an_exception_in_the_block_gives_the_memory_back(cuda: Cuda, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ballast.hold((GIB,), tmp_path / "log"):
        raise ZeroDivisionError
    assert cuda.free() == TOTAL - RESERVED


@pytest.mark.parametrize("name", [signal.SIGKILL, signal.SIGTERM])
def test_a_ballast_killed_from_outside_is_missed(name: signal.Signals, cuda: Cuda, tmp_path: Path) -> None:
    with ballast.hold((GIB,), tmp_path / "log") as held:
        (pid,) = our_processes()
        os.kill(pid, name)
        for _ in range(2):
            with pytest.raises(RunRefused) as raised:
                held.adjust()
            assert f"the ballast is gone ({name.name}), so engines would see the whole GPU" in str(raised.value)
            assert str(raised.value).endswith("; start it again")
        assert cuda.free() == TOTAL - RESERVED


def test_a_ballast_that_cannot_start_is_told_with_its_reason(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process._start_guard()  # while Python is still found
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no module named ctypes' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    error = refusal((GIB,), tmp_path / "ballast.log")
    assert isinstance(error, Interrupted)
    assert "the ballast is gone (exited with code 1: no module named ctypes), so" in str(error)


HARNESS = """
import signal, sys, time
from pathlib import Path
from harness import ballast, process

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell without job control starts children deaf to it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup to this one
with ballast.hold(ballast.limits_of("3GiB"), Path(sys.argv[1])) as held:
    print(process.owner(), held.cards[0].free_bytes, flush=True)
    if sys.stdin.readline():
        held.adjust()
    time.sleep(600)
"""


@contextlib.contextmanager
def harness_that_holds(cuda: Cuda, log: Path) -> Iterator[subprocess.Popen[str]]:
    """A harness of its own, which adjusts at a line; once it ended, all it started is gone and the card free."""
    argv, pipe = [sys.executable, "-c", HARNESS, str(log)], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1) as started:
        assert started.stdout is not None
        mark, free = started.stdout.readline().split()
        assert int(free) == cuda.free() == 3 * GIB
        below = psutil.Process(started.pid).children(recursive=True)
        assert [each for each in below if each.environ().get(process.OWNER) == mark]
        try:
            yield started
            started.communicate(timeout=60)
        finally:
            started.kill()
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below))
    assert cuda.free() == TOTAL - RESERVED


@pytest.mark.parametrize("name", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_however_the_harness_ends_the_memory_is_free_again(name: signal.Signals, cuda: Cuda, tmp_path: Path) -> None:
    with harness_that_holds(cuda, tmp_path / "log") as started:
        started.send_signal(name)
    assert started.returncode == -name
    assert (tmp_path / "log").read_text() == ""


def test_a_harness_killed_while_its_driver_hangs_leaves_nothing(cuda: Cuda, tmp_path: Path) -> None:
    with harness_that_holds(cuda, tmp_path / "log") as started:
        cuda.fail("cuMemGetInfo_v2", -1)
        assert started.stdin is not None
        started.stdin.write("\n")
        until((cuda.folder / "hangs").exists)
        started.kill()


def test_the_end_of_its_pipe_alone_ends_the_child(cuda: Cuda, tmp_path: Path) -> None:
    argv = process.python(f"from harness.ballast import main; main([{GIB}])")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline().startswith(b'{"cards": [{')
            assert cuda.free() == GIB
            child.stdin.close()
            assert child.wait(60) == 0
        finally:
            child.kill()
    assert cuda.free() == TOTAL - RESERVED


def test_importing_it_loads_no_library_of_numbers() -> None:
    code = "import sys, harness.ballast; print({'numpy', 'scipy', 'pynvml', 'torch', 'requests'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_module_of_the_same_name_where_we_were_started_is_not_taken_for_ours(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harness.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "json.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    with ballast.hold((2 * GIB,), tmp_path / "log") as held:
        assert held.cards[0].free_bytes == 2 * GIB
