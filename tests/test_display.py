"""What a person sees while a run goes on: on a terminal of a given width, in a file, and what it costs."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import short_run

from harness import display, walk
from harness.display import draw, show_progress
from harness.load import is_timed
from harness.probe import Progress
from harness.testing import engines
from harness.testing.script import Script

REQUEST = Progress(
    "block 3: llama-cpp@cpu-moe: request 2 of 3", False, 7, 96, 1860.0, "llama-cpp@cpu-moe", 3, 24,
    (("ollama", "52.1"), ("llama-cpp", "53.4"), ("llama-cpp@cpu-moe", "31.0")),
)  # fmt: skip
SEARCH = Progress(
    "search, load 3 of 10 at most: llama-cpp@ncmoe=12: loading", False, arm="llama-cpp@ncmoe=12",
    speeds=(("llama-cpp@ncmoe=4", "DOES_NOT_FIT"), ("llama-cpp@ncmoe=24", "31.2 FITS")),
)  # fmt: skip
PROBE = Progress("probe: ollama: request 3 of 6", False, arm="ollama")
MANY = dataclasses.replace(REQUEST, speeds=tuple((f"llama-cpp@ncmoe={n}", "31.0") for n in range(30)))


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("CI", "NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


class Screen:
    """A terminal: what is written to `slave` comes out as `written`, and as the lines that a person would see."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.master, self.slave = pty.openpty()
        self.resize(columns)
        self.written = ""
        self.done = threading.Event()

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.columns = columns

    def read(self) -> None:
        """Until the other end is closed."""
        with contextlib.suppress(OSError):
            while chunk := os.read(self.master, 65536):
                self.written += chunk.decode()
        self.done.set()

    def lines(self) -> list[str]:
        """Every row, of a terminal that wraps at `columns` and knows what we send: CR, LF, cursor up, erase below."""
        rows, at, column = [""], 0, 0
        plain = re.sub(r"\x1b\[[\d;]*m", "", self.written)
        for sign in re.findall(r"\x1b\[(?:\d*A|J)|[^\x1b]", plain.replace("\r\n", "\n")):
            if sign == "\r":
                column = 0
            elif sign == "\n":
                at, column = at + 1, 0
            elif sign.endswith("A") and sign[0] == "\x1b":
                at -= int(sign[2:-1] or 1)
            elif sign == "\x1b[J":
                rows = [*rows[:at], rows[at][:column]]
            else:
                if column == self.columns:
                    at, column = at + 1, 0
                rows += [""] * (at + 1 - len(rows))
                rows[at] = rows[at][:column].ljust(column) + sign + rows[at][column + 1 :]
                column += 1
            rows += [""] * (at + 1 - len(rows))
        return [row.rstrip() for row in rows]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Screen]]:
    """stderr on a terminal of so many columns; read it after `close`."""
    opened: list[Screen] = []

    def open_(columns: int) -> Screen:
        found = Screen(columns)
        threading.Thread(target=found.read, daemon=True).start()
        monkeypatch.setattr(sys, "stderr", os.fdopen(found.slave, "w", encoding="utf-8"))
        opened.append(found)
        return found

    yield open_
    for each in opened:
        os.close(each.master)


def shown(screen: Screen) -> list[str]:
    """What is left when our end is closed."""
    sys.stderr.close()
    assert screen.done.wait(10)
    return screen.lines()


# ── the lines ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("room", [137, 97, 77, 57, 37, 20])
@pytest.mark.parametrize("progress", [REQUEST, SEARCH, PROBE, MANY, Progress("reading a-model.gguf")])
def test_no_live_line_is_wider_than_the_room(progress: Progress, room: int) -> None:
    lines = draw(progress, room, 3723.0, 12.0)

    assert len(lines) <= 2
    assert max(line.cell_len for line in lines) <= room


def test_at_eighty_columns_all_is_said() -> None:
    far, at = (line.plain for line in draw(REQUEST, 77, 252.0, 3.0))

    for said in ("7/96 loads", "block 3 of ≤24", "4:12", "31 min left", "Ctrl-C stops"):
        assert said in far
    assert at == "llama-cpp@cpu-moe: request 2 of 3, 0:03  tok/s llama-cpp@cpu-moe 31.0"


def test_where_there_is_room_every_speed_is_shown_and_that_stopping_costs_nothing() -> None:
    far, at = (line.plain for line in draw(REQUEST, 137, 252.0, 3.0))

    assert far.endswith("block 3 of at most 24  4:12  about 31 min left  Ctrl-C stops and keeps what there is")
    assert at.endswith("tok/s ollama 52.1, llama-cpp 53.4, llama-cpp@cpu-moe 31.0")


def test_of_many_arms_the_current_one_and_the_reference_show_their_speed() -> None:
    now = dataclasses.replace(MANY, arm="llama-cpp@ncmoe=7", text="block 3: llama-cpp@ncmoe=7: loading")

    assert draw(now, 137, 1.0, 0.0)[1].plain.endswith("tok/s llama-cpp@ncmoe=0 31.0, llama-cpp@ncmoe=7 31.0")


def test_a_search_tells_its_try_and_what_fitted() -> None:
    at, so_far = (line.plain for line in draw(SEARCH, 137, 60.0, 0.0))

    assert at == "1:00  search, load 3 of 10 at most: llama-cpp@ncmoe=12: loading  Ctrl-C stops"
    assert so_far == "tok/s llama-cpp@ncmoe=4 DOES_NOT_FIT, llama-cpp@ncmoe=24 31.2 FITS"


def test_before_there_is_a_plan_nothing_is_said_to_be_kept() -> None:
    (line,) = draw(PROBE, 137, 59.0, 5.0)

    assert line.plain == "0:59  probe: ollama: request 3 of 6, 0:05  Ctrl-C stops"


# ── on a terminal ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("columns", [140, 80, 60, 40])
def test_nothing_stays_of_the_live_lines_and_nothing_wraps(screen: Callable[[int], Screen], columns: int) -> None:
    terminal = screen(columns)
    with show_progress() as watch:
        watch(Progress("2 blocks of 3 loads"))
        for phase in ("loading", "request 1 of 2", "request 2 of 2"):
            watch(dataclasses.replace(REQUEST, text=f"block 3: llama-cpp@cpu-moe: {phase}"))
        watch(dataclasses.replace(REQUEST, text="block 3: llama-cpp: 50 tok/s", lasting=True))
        watch(REQUEST)

    assert shown(terminal) == ["2 blocks of 3 loads", "block 3: llama-cpp: 50 tok/s", "", ""]
    assert "\x1b[?25l" not in terminal.written, "the cursor is never hidden, so nothing can leave it so"


def test_lines_that_a_narrower_terminal_has_wrapped_are_erased_whole(screen: Callable[[int], Screen]) -> None:
    terminal = screen(100)
    with show_progress() as watch:
        watch(REQUEST)
        widths = [line.cell_len for line in draw(REQUEST, 97, 0.0, 0.0)]
        terminal.resize(50)
        watch(REQUEST)

    shown(terminal)
    rows = sum(-(-width // 50) for width in widths)
    assert f"\r\x1b[{rows - 1}A\x1b[J" in terminal.written


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_that_breaks_leaves_a_clean_line(screen: Callable[[int], Screen], error: type[BaseException]) -> None:
    terminal = screen(80)

    def run() -> None:
        with show_progress() as watch:
            watch(REQUEST)
            raise error

    with pytest.raises(error):
        run()

    assert shown(terminal) == [""]


def test_without_colour_no_colour_is_sent(screen: Callable[[int], Screen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = screen(100)
    with show_progress() as watch:
        watch(REQUEST)

    shown(terminal)
    assert "7/96 loads" in terminal.written
    assert not re.search(r"\x1b\[[\d;]*m", terminal.written)


def test_a_hostile_name_moves_nothing(screen: Callable[[int], Screen]) -> None:
    terminal = screen(80)
    with show_progress() as watch:
        watch(dataclasses.replace(REQUEST, arm="a\x1b[2Jb\nc", text="block 3: a\x1b[2Jb\nc: loading"))
        watch(Progress("done \x1b[2J\u202e\r\n[bold]"))

    assert shown(terminal)[0] == "done [2J [bold]"
    assert "\x1b[2J" not in terminal.written


# ── plain lines ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("CI", "true")])
def test_a_terminal_that_cannot_draw_again_gets_plain_lines(
    screen: Callable[[int], Screen], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    terminal = screen(80)
    with show_progress() as watch:
        watch(REQUEST)

    shown(terminal)
    assert terminal.written.startswith("[7/96] block 3: llama-cpp@cpu-moe: request 2 of 3  (about 31 min left;")
    assert "\x1b" not in terminal.written


def test_a_file_gets_a_line_for_each_load_and_not_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with show_progress() as watch:
        for phase in ("loading", "request 1 of 2", "request 2 of 2"):
            watch(dataclasses.replace(REQUEST, text=f"block 3: llama-cpp@cpu-moe: {phase}"))
        watch(dataclasses.replace(REQUEST, text="block 3: llama-cpp@cpu-moe: 50 tok/s", lasting=True))

    assert [line.partition(" (")[0].strip() for line in written.getvalue().splitlines()] == [
        "[7/96] block 3: llama-cpp@cpu-moe: loading",
        "[7/96] block 3: llama-cpp@cpu-moe: 50 tok/s",
    ]


# ── what it costs, and what a run tells ─────────────────────────────────────────────────────


def test_while_a_request_runs_nothing_is_drawn(
    screen: Callable[[int], Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = screen(80)
    waits: list[float] = []
    asked = threading.Event()

    class Changed(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None and threading.current_thread().name == "display":
                waits.append(timeout)
                asked.set()
            return bool(super().wait(10))  # nothing here waits for a clock

    monkeypatch.setattr(threading, "Condition", Changed)
    with show_progress() as watch:
        for text in ("loading", "request 1 of 2", "warming up", "stopping"):
            watch(dataclasses.replace(REQUEST, text=f"block 3: llama-cpp@cpu-moe: {text}"))
            assert asked.wait(10)
            asked.clear()

    shown(terminal)
    timed, free = display.TIMED_TICK_S, display.TICK_S
    assert waits == [free, timed, timed, free]


def test_a_run_tells_its_arms_its_blocks_and_its_speeds(model: Path, tmp_path: Path) -> None:
    told: list[Progress] = []
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        walk.duel(short_run.options(model, tmp_path / "runs"), told.append)

    passing = [each for each in told if not each.lasting and each.block is not None]
    assert {(each.arm, each.block, each.most_blocks) for each in passing} == {
        (arm, block, 2) for arm in ("ollama", "llama-cpp") for block in (1, 2)
    }
    assert passing[0].speeds == ()
    assert passing[0].seconds_left is not None, "the probe has told how long a load takes"
    assert {arm for arm, _ in passing[-1].speeds} == {"ollama", "llama-cpp"}
    assert passing[-1].speeds[0][0] == "ollama", "the reference is first"
    phases = [display.phase_of(each) for each in passing if each.block == 1 and each.arm == "ollama"]
    phases = phases[phases.index("loading") :]  # the model may have to be read before
    assert phases == ["loading", "warming up", "request 1 of 2", "request 2 of 2", "stopping"]
    assert [is_timed(phase) for phase in phases] == [False, True, True, True, False]
    assert told[-1].text == "judging, and writing the report"


def test_rich_is_not_loaded_for_lines_in_a_file() -> None:
    code = (
        "import sys\n"
        "from harness.display import show_progress\n"
        "from harness.probe import Progress\n"
        "with show_progress() as watch: watch(Progress('a'))\n"
        "assert 'rich' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "a\n")
