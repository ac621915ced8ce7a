"""Make the pictures of the documents: a terminal during a run and after it, and a report in a browser.

    .venv/bin/python scripts/screenshots.py FOLDER [--out docs/pictures] [-- OPTIONS OF llamaduel run]

FOLDER is a run folder with a report, for the pages. The terminal shows a run of its own, of the synthetic model by
`--preset quick`; what follows `--` goes to it, as in `-- --model=FILE.gguf --arms=ollama,llama-cpp`. tmux and
Chromium must be on PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from harness.page import page

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, ROWS = 100, 32
FRAME_S = 0.5
LONGEST_S = 1800.0
SPEED = re.compile(r"\d t(ok)?/s")  # a frame worth keeping shows one
SIZE = (1120, 1480)  # of a page, in pixels
COLOURS = 48  # of its picture: text on one ground needs no more
MOST_BYTES = 600_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LOCAL_FONT = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'


class Stopped(Exception):
    """A picture cannot be made; the message is one sentence with the next step."""


def found(*names: str) -> str:
    """The first of these programs that is on PATH. Raises Stopped."""
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise Stopped(f"{names[0]} is not on PATH; install it, as in `apt-get install {names[0]}`")
    return path


# ── a terminal ──────────────────────────────────────────────────────────────────────────────


def film(options: list[str]) -> tuple[str, str]:
    """What a terminal shows in the middle of a run and after it, with its colours. Raises Stopped."""
    command = shlex.join(["llamaduel", "run", *options])
    with tempfile.TemporaryDirectory() as folder, terminal(Path(folder), command) as tmux:
        frames: list[str] = []
        began_s = time.monotonic()
        while tmux("display-message", "-p", "#{pane_dead}").strip() != "1":
            if time.monotonic() - began_s > LONGEST_S:
                raise Stopped(f"`{command}` takes longer than {LONGEST_S / 60:.0f} minutes; take a smaller model")
            frames.append(tmux("capture-pane", "-e", "-p"))
            time.sleep(FRAME_S)
        after = tmux("capture-pane", "-e", "-p")
        if tmux("display-message", "-p", "#{pane_dead_status}").strip() != "0":
            raise Stopped(f"`{command}` failed; run it by hand to see why")
    with_speeds = [frame for frame in frames if SPEED.search(frame)] or frames
    return with_speeds[2 * len(with_speeds) // 3], re.sub(r"\n.*Pane is dead.*", "", after)


@contextlib.contextmanager
def terminal(folder: Path, command: str) -> Iterator[Tmux]:
    """A terminal of its own that runs the command as if it were typed, and stays when it has ended."""
    tmux = Tmux(found("tmux"), f"llamaduel-{os.getpid()}")
    typed = f"printf '$ %s\\n' {shlex.quote(command)}; {command}"
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "TMUX")}
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment |= {"PATH": path, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "HISTFILE": ""}
    size = ("-x", str(COLUMNS), "-y", str(ROWS))
    stays = ("set-option", "-g", "remain-on-exit", "on", ";", "set-option", "-g", "remain-on-exit-format", "", ";")
    try:
        tmux(*stays, "new-session", "-d", *size, "-c", str(folder), "sh", "-c", typed, environment=environment)
        yield tmux
    finally:
        with contextlib.suppress(Stopped):
            tmux("kill-server")


class Tmux:
    """One server on a socket of our own: nobody's sessions are touched."""

    def __init__(self, path: str, socket: str) -> None:
        self._argv = [path, "-L", socket, "-f", os.devnull]

    def __call__(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run([*self._argv, *arguments], capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise Stopped(f"tmux does not work here ({done.stderr.strip()}); try `tmux new-session`")
        return done.stdout


def draw(frame: str, title: str) -> str:
    """A frame as SVG, without an address in it that a reader's browser would ask for fonts."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text.from_ansi(frame.rstrip()), soft_wrap=True)
    code = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    code = code.replace("Fira Code, monospace", LOCAL_FONT).replace("arial", "system-ui, sans-serif")
    drawn = console.export_svg(title=title, code_format=code, unique_id=f"llamaduel-{title.split()[0]}")
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)


# ── a page ──────────────────────────────────────────────────────────────────────────────────


def photograph(html: Path, picture: Path, *, dark: bool) -> None:
    """A page as a browser shows it to who likes it so. Raises Stopped."""
    from PIL import Image

    browser = found(*BROWSERS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        shot = Path(profile) / "shot.png"
        argv = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
            f"--user-data-dir={profile}/profile", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={shot}", html.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if not shot.exists():
            raise Stopped(f"{browser} makes no picture ({done.stderr.strip()[-200:]}); start it by hand")
        with Image.open(shot) as image:
            image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a run folder with a report")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", metavar="DIR", help="docs/pictures")
    parser.epilog = "What follows -- goes to `llamaduel run`."
    ours = list(takewhile(lambda word: word != "--", sys.argv[1:]))
    given, of_run = parser.parse_args(ours), sys.argv[len(ours) + 2 :]
    report = given.folder / "report.md"
    if not report.is_file():
        raise Stopped(f"{given.folder} has no report.md; write it by `llamaduel report {given.folder}`")
    for names in (("tmux",), BROWSERS):
        found(*names)
    given.out.mkdir(parents=True, exist_ok=True)
    charts = {f"charts/{path.name}": path.read_text("utf-8") for path in given.folder.glob("charts/*.svg")}
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "report.html"
        html.write_text(page(report.read_text("utf-8"), charts), "utf-8")
        for shade in ("light", "dark"):
            photograph(html, given.out / f"report-{shade}.png", dark=shade == "dark")
    during, after = film([*of_run, "--preset=quick"])
    for name, frame in (("during", during), ("after", after)):
        (given.out / f"terminal-{name}.svg").write_text(draw(frame, f"{name} a run"), "utf-8")
    made = sorted(given.out.iterdir())
    for path in made:
        print(f"{path.stat().st_size / 1000:7.1f} kB  {path}")
    whole = sum(path.stat().st_size for path in made)
    if whole > MOST_BYTES:
        raise Stopped(f"the pictures have {whole / 1000:.0f} kB and may have {MOST_BYTES / 1000:.0f}; show less")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run is stopped on the way out
    try:
        main()
    except Stopped as error:
        sys.exit(f"screenshots: {error}")
