"""A run folder made fit to be shown to strangers, the index of all that were, and the check that they still hold.

What is published is a copy: header, samples and logs without what is private (see `redaction`), and the report
written again from them. It must judge as the original does and verify, or nothing is left of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import getpass
import json
import os
import re
import shlex
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness import process, record, walk
from harness.answer import answer
from harness.compare import Comparison
from harness.errors import DuelError, RunRefused, UsageError
from harness.facts import Shown
from harness.record import Header
from harness.redaction import Private, is_secret, learn, redact, redact_data, redact_known
from harness.sizes import format_bytes
from harness.words import NONE, count, markdown, plain

LOGS, INDEX = "engines", "README.md"
LOG_BYTES, LEAST_LOG_BYTES, LOGS_BYTES = 200_000, 8_000, 1_000_000  # of one log at most and at least, of all
SECRET_LETTERS = 8  # a shorter value of a variable may be any word
BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"
UNFINISHED = ".publishing-"  # and who is at it
SAYS_LITTLE = 40  # letters of a sentence that needs the next one
MACHINE_LETTERS, MODEL_LETTERS = 24, 40  # of a folder's name
HEADING = f"""# Published runs

{BEGIN}
{END}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """`replaced` counts what was taken out, by kind. `named` tells that the model's name holds a name and stays."""

    folder: Path
    state: str
    replaced: Mapping[str, int]
    named: bool = False


@dataclass(frozen=True, slots=True)
class Verified:
    """One published folder, or the index of them; without problems all of it is reproduced."""

    folder: Path
    problems: tuple[str, ...]
    drawn_elsewhere: tuple[str, ...] = ()  # other matplotlibs, whose charts are compared nearly


def published_text(done: Published | None, into: Path) -> str:
    """For a terminal: where it lies, what was replaced, what to do next."""
    if done is None:
        return f"{into / INDEX}: the table is the one that the folders give"
    replaced = ", ".join(f"{number} × {kind}" for kind, number in done.replaced.items()) or "nothing"
    lines = [f"{done.folder}: {done.state}", f"Replaced as private: {replaced}; listed in {into / INDEX}."]
    if done.named:
        lines.append("The model's own name holds a user or host name and was kept.")
    look = " and ".join(str(done.folder / name) for name in (walk.REPORT, record.HEADER))
    lines += [
        f"Look at {look} once before you push them.",
        f"Next: git add {shlex.quote(str(done.folder))} {shlex.quote(str(into / INDEX))}",
    ]
    return "\n".join(lines)


def published_json(done: Published | None, into: Path, damaged: Sequence[str]) -> Shown:
    """The same for scripts."""
    return {
        "folder": str(done.folder) if done else None,
        "state": done.state if done else None,
        "replaced": dict(done.replaced) if done else {},
        "index": str(into / INDEX),
        "damaged": list(damaged),
    }


# ── one run ─────────────────────────────────────────────────────────────────────────────────


def publish(folder: Path, into: Path, *, name: str | None = None, anyway: bool = False) -> Published:
    """Copy a run into `into`, under its date and `name` (else machine and model). Raises DuelError, and leaves nothing.

    A RED run is published only `anyway`. One that was stopped is published as what it is.
    """
    with _on_disk():
        header = record.read(folder).header
        private = learn(_here(folder), json.loads((folder / record.HEADER).read_bytes()))
        _require_index(into)
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(f"--name {name!r} is no name of a folder; use letters, digits, dots and dashes")
    slug = name or _slug(header, private) or "run"
    return publish_as(folder, into / f"{_date(header)}-{slug}", anyway=anyway)


def publish_as(folder: Path, target: Path, *, anyway: bool = False) -> Published:
    """Copy a run to this very folder, which must not exist. Raises DuelError, and leaves nothing."""
    with _on_disk(), _undisturbed(folder):
        before = walk.read(folder)
        if before.state.word == "RED" and not anyway:
            raise RunRefused(
                f"{folder} is RED and ranks nothing ({before.state.reasons[0].rstrip('.')}); measure again, or show it "
                "as what it is with --anyway"
            )
        if os.path.lexists(target):
            raise _taken(target)
        counts: Counter[str] = Counter()
        with _staging(target) as copy:
            private = _copy(folder, copy, counts)
            if not _judged_alike(copy, before):
                raise RunRefused(
                    f"{folder} cannot be published: without its private words it is judged otherwise, so rename what "
                    "is called like a person, a host or a folder of yours, and measure again"
                )
            after = walk.write_report(copy)
            if problems := [*walk.verify(copy), *_left(copy, private)]:
                raise RunRefused(f"{folder} cannot be published as it is: {'; '.join(problems[:3])}")
            if redact(target.name, private) != target.name:
                raise UsageError(
                    f"the folder's name {target.name!r} names a person or a machine; give another by --name"
                )
            try:
                copy.rename(target)
            except OSError as error:  # another one was faster
                raise (_taken(target) if os.path.lexists(target) else error) from None
    strict = dataclasses.replace(private, kept=())
    kept = redact(before.header.model.name, strict) != redact(before.header.model.name, private)
    return Published(folder=target, state=_state(after), replaced=dict(sorted(counts.items())), named=kept)


def _taken(target: Path) -> RunRefused:
    return RunRefused(f"{target} is there already and is not written over; name another with --name")


@contextlib.contextmanager
def _on_disk() -> Iterator[None]:
    """What the system says of a disk, as a RunRefused."""
    try:
        yield
    except OSError as error:
        raise RunRefused(
            f"{error.filename or 'the folder'} cannot be read or written ({error.strerror or error}); check "
            "permissions, and that the disk has room"
        ) from error


@contextlib.contextmanager
def _undisturbed(folder: Path) -> Iterator[None]:
    """Nobody writes to the run meanwhile; one that cannot be locked is an archive."""
    path = folder / record.LOCK
    with record.lock(folder) if os.access(path, os.W_OK) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A folder beside the target, gone again unless it was renamed; so are those whose process was killed."""
    into = target.parent
    _require_no_dead_link(into)
    made = [path for path in (into, *into.parents) if not path.exists()]
    into.mkdir(parents=True, exist_ok=True)
    for left in into.glob(f"{UNFINISHED}*"):
        mark = left.name.removeprefix(UNFINISHED)
        if mark == process.owner() or not process.is_alive(mark):
            shutil.rmtree(left, ignore_errors=True)
    copy = into / f"{UNFINISHED}{process.owner()}"
    try:
        copy.mkdir()
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        with contextlib.suppress(OSError):  # a folder that holds something stays
            for path in made:
                path.rmdir()


def _copy(folder: Path, copy: Path, counts: Counter[str]) -> Private:
    """Header, samples and logs without what is private; what that was. Raises RunRefused."""
    header = json.loads((folder / record.HEADER).read_bytes())
    logs = _logs(folder)
    private = learn(_here(folder), header, logs.values())
    _require_public(folder, header["plan"], private)
    header = {
        key: value if key == "plan" else redact_data(value, private, counts, key) for key, value in header.items()
    }
    (copy / record.HEADER).write_text(json.dumps(header, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    source = folder / record.LINES
    with (copy / record.LINES).open("w", encoding="utf-8") as lines:
        for line in source.read_bytes().splitlines(keepends=True) if source.exists() else ():
            with contextlib.suppress(ValueError):  # the half line of a kill: whole ones were read before
                found = redact_data(json.loads(line), private, counts)
                lines.write(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n")
    if logs:
        (copy / LOGS).mkdir()
    taken: set[str] = set()
    for name, text in logs.items():
        public = stem = re.sub(r"[^A-Za-z0-9.@=-]+", "_", redact(name, private))
        number = 1
        while public.lower() in taken:  # two names may be one without what is private, or without capitals
            number += 1
            public = f"{stem.removesuffix('.log')}-{number}.log"
        taken.add(public.lower())
        (copy / LOGS / public).write_text(redact(text, private, counts), encoding="utf-8")
    return private


def _require_public(folder: Path, plan: Any, private: Private) -> None:
    """A plan is what was hashed before the run: it can only be shown as it is."""
    for text in _texts(plan):
        if (public := redact(text, private)) != text:
            raise RunRefused(
                f"{folder} cannot be published: its plan says {public!r} in clear, and its digest would not hold "
                "without; give the arm another name, and measure again"
            )


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts(each)]


def _logs(folder: Path) -> dict[str, str]:
    """The engines' logs by name, so much of each that all are small. A link leads elsewhere and is none."""
    inside = folder / LOGS
    if not inside.is_dir():
        return {}
    paths = [path for path in sorted(inside.glob("*.log")) if path.is_file() and not path.is_symlink()]
    most, left = LOG_BYTES, LOGS_BYTES
    for number, size in enumerate(sorted(path.stat().st_size for path in paths)):
        most = left // (len(paths) - number)  # what short ones leave, long ones have
        left -= min(size, most)
    return {path.name: _ends(path, max(LEAST_LOG_BYTES, min(LOG_BYTES, most))) for path in paths}


def _ends(path: Path, most: int) -> str:
    """A log, cut between two lines far from its beginning and end where it is longer than `most` bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= most:
            return file.read().decode(errors="replace")
        head = file.read(3 * most // 4).rpartition(b"\n")[0]  # what was loaded, and where to
        file.seek(size - most // 4)
        tail = file.read().partition(b"\n")[2]  # half a line could hold half a name
    left_out = f"… {format_bytes(size - len(head) - len(tail))} of this log are left out here …"
    return "\n".join((head.decode(errors="replace"), left_out, tail.decode(errors="replace")))


def _judged_alike(copy: Path, before: Comparison) -> bool:
    try:
        return bool(_numbers(walk.read(copy)) == _numbers(before))
    except RunRefused:  # its loads do not follow its plan any more
        return False


def _numbers(comparison: Comparison) -> Any:
    """All that a run is judged by, without words."""
    rows = [
        (row.status.word, row.decode_tps, row.prefill_tps, row.ttft_s, row.output_ok, row.samples, row.invalid_samples)
        for row in comparison.rows
    ]
    contrasts = {
        pair: (found.word, found.ratio, found.low, found.high) for pair, found in comparison.judgement.contrasts.items()
    }
    return comparison.state.word, comparison.judgement.n, comparison.finished, contrasts, rows


def _left(copy: Path, private: Private) -> list[str]:
    """What is still private in the bytes of a copy. The report is prose of ours: there only folders and keys count."""
    places = tuple(folder for folder in private.folders if folder.startswith("/"))
    prose = dataclasses.replace(private, folders=places, users=(), hosts=())
    problems = []
    for path in sorted(path for path in copy.rglob("*") if path.is_file()):
        is_data = path.name in (record.HEADER, record.LINES) or path.parent.name == LOGS
        counts: Counter[str] = Counter()
        redact_known(path.read_text(encoding="utf-8", errors="replace"), private if is_data else prose, counts)
        problems += [f"{path.relative_to(copy)} still holds {count(number, kind)}" for kind, number in counts.items()]
    return problems


def _here(folder: Path) -> Private:
    """Who and where we are."""
    homes, users, hosts = {str(Path.home())}, {os.environ.get("SUDO_USER", "")}, {socket.gethostname()}
    with contextlib.suppress(KeyError, OSError, ImportError):
        users.add(getpass.getuser())
    with contextlib.suppress(KeyError, ImportError):
        import pwd

        account = pwd.getpwuid(os.getuid())
        homes.add(account.pw_dir)
        users.update((account.pw_name, *([full] if " " in (full := account.pw_gecos.split(",")[0]) else [])))
    hosts.add(os.environ.get("HOSTNAME", ""))
    folders = {str(path) for each in (Path.cwd(), folder, folder.parent) for path in (each.absolute(), each.resolve())}
    homes |= {str(Path(home).resolve()) for home in homes if home}
    users |= {Path(home).name for home in homes}
    secrets = {
        value
        for name, value in os.environ.items()
        if is_secret(name) and len(value) >= SECRET_LETTERS and not value.isdigit()
    }
    serials = {text for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id") if (text := _line(Path(path)))}
    return Private(
        homes=tuple(sorted(homes - {"", "/"})),
        folders=tuple(sorted(folders - {"/"})),
        users=tuple(sorted(users - {""})),
        hosts=tuple(sorted(hosts - {""})),
        secrets=tuple(sorted(secrets)),
        serials=tuple(sorted(serials)),
    )


def _line(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


# ── names ───────────────────────────────────────────────────────────────────────────────────


def _date(header: Header) -> str:
    """The day on which the run began, where it ran."""
    found = re.match(r"\d{4}-\d{2}-\d{2}", header.started)
    return found[0] if found else "undated"


def _slug(header: Header, private: Private) -> str:
    """Machine and model, as far as whole words fit."""
    machine = header.machine.gpus[0].name if header.machine.gpus else header.machine.cpu or ""
    machine = re.sub(r"\((?:R|TM|C)\)|\b(?:CPU|GPU|Processor|\d+-Core)\b|@.*|\bwith .*", " ", machine, flags=re.I)
    texts = ((machine, MACHINE_LETTERS), (header.model.name, MODEL_LETTERS))
    parts = [_whole_words(redact(text, private), letters) for text, letters in texts]
    return "-".join(part for part in parts if part)


def _whole_words(text: str, letters: int) -> str:
    """Lower case and dashes. A first word that is too long stays whole."""
    words = re.findall(r"[a-z0-9]+(?:\.[0-9][a-z0-9]*)*", text.lower())
    kept: list[str] = []
    for word in words:
        if kept and len("-".join([*kept, word])) > letters:
            break
        kept.append(word)
    return "-".join(kept)


def _machine(header: Header) -> str:
    gpus = Counter(gpu.name for gpu in header.machine.gpus)
    words = [name if number == 1 else f"{number} × {name}" for name, number in gpus.items()]
    sizes = {each.settings.stand_in_bytes for each in header.contenders} - {None}
    words = words or [header.machine.cpu or NONE]
    words += [f"stand-in device of {format_bytes(size)}" for size in sorted(filter(None, sizes))]
    limits = {each.settings.device_limit_bytes for each in header.contenders} - {None}
    words += [f"held to {format_bytes(size)}" for size in sorted(filter(None, limits))]
    return ", ".join(words)


def _state(comparison: Comparison) -> str:
    word = comparison.state.word
    return word + ("" if comparison.finished else ", stopped") + (": ranks nothing" if word == "RED" else "")


def _said(comparison: Comparison) -> str:
    """How the answer begins: its first sentence, and the next where that says little; of a RED run why it is RED."""
    if comparison.state.word == "RED":
        return plain(comparison.state.reasons[0])
    sentences = re.split(r"(?<=[.!?])\s+", plain(answer(comparison)))
    said = sentences.pop(0)
    while sentences and len(said) < SAYS_LITTLE:
        said = f"{said} {sentences.pop(0)}"
    return said


# ── all of them ─────────────────────────────────────────────────────────────────────────────


def run_folders(into: Path, unread: list[Path] | None = None) -> list[Path]:
    """Every run folder below, and `into` itself if it is one; hidden folders and links are none.

    `unread` gets the folders that cannot be looked into.
    """
    found = []

    def keep(error: OSError) -> None:
        if unread is not None:
            unread.append(Path(error.filename))

    for folder, inner, files in os.walk(into, onerror=keep):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        if record.HEADER in files and not (Path(folder) / record.HEADER).is_symlink():
            found.append(Path(folder))
    return found


def rebuild_index(into: Path) -> tuple[str, ...]:
    """Write the table of all runs below into its README.md, between the markers. Sentences on what is damaged.

    Raises RunRefused, before anything is written, where the markers are broken.
    """
    with _on_disk():
        _require_no_dead_link(into)
        if not into.is_dir():
            raise RunRefused(
                f"there is no folder {into} with published runs; publish one first: llamaduel publish RUN --into {into}"
            )
        path = (into / INDEX).resolve()
        text = _index_text(into)
        table, damaged = _index(into)
        new = _between(path, text, table)
        if new != text or not path.exists():
            partial = path.with_name(f".{path.name}.{process.owner()}-{threading.get_ident()}.partial")
            partial.write_bytes(new.encode())
            partial.replace(path)
    return damaged


def _index_text(into: Path) -> str:
    """What an index says now, or how a new one begins. Raises RunRefused."""
    path = into / INDEX
    if path.is_dir():
        raise RunRefused(f"{path} is a folder and no index; move it away")
    try:
        return path.resolve().read_bytes().decode() if path.exists() else HEADING
    except UnicodeDecodeError:
        raise RunRefused(f"{path} is not UTF-8; save it as UTF-8, or delete it for a new index") from None


def _require_index(into: Path) -> None:
    """The index must be one that a row can be added to, before a run is copied beside it. Raises RunRefused."""
    _require_no_dead_link(into)
    _between(into / INDEX, _index_text(into), "")


def _require_no_dead_link(into: Path) -> None:
    for path in (into, *into.parents, into / INDEX):
        if path.is_symlink() and not path.exists():
            raise RunRefused(f"{path} is a link to nothing; remove it, or make what it leads to")


def _markers(lines: Sequence[str]) -> tuple[list[int], list[int]]:
    """The lines that begin and end a table; in a fence of code they are text."""
    begins: list[int] = []
    ends: list[int] = []
    fence = ""
    for number, line in enumerate(map(str.strip, lines)):
        if fence:
            fence = "" if line.startswith(fence) and not line.strip(fence[0]) else fence
        elif found := re.match(r"`{3,}(?=[^`]*$)|~{3,}", line):
            fence = found[0]
        elif line in (BEGIN, END):
            (begins if line == BEGIN else ends).append(number)
    return begins, ends


def _between(path: Path, text: str, table: str) -> str:
    """The text with the table between its markers; both are added at the end where there are none."""
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.splitlines()
    begins, ends = _markers(lines)
    if not begins and not ends:
        lines = [*lines, *([""] if lines and lines[-1].strip() else []), BEGIN, END]
        begins, ends = [len(lines) - 2], [len(lines) - 1]
    if not (len(begins) == len(ends) == 1 and begins < ends):
        raise RunRefused(f"{path} needs one line {BEGIN} and after it one line {END}; put them right")
    kept = [*lines[: begins[0] + 1], "", *table.splitlines(), "", *lines[ends[0] :]]
    return newline.join(kept) + newline


def _index(into: Path) -> tuple[str, tuple[str, ...]]:
    """The table, newest first, and a sentence on each folder that cannot be read."""
    rows: list[tuple[float, str, str]] = []
    unread: list[Path] = []
    folders = run_folders(into, unread)
    damaged = [f"{folder} is in no index: it cannot be read" for folder in unread]
    for folder in folders:
        try:
            comparison = walk.read(folder)
            began = datetime.datetime.fromisoformat(comparison.header.started)
            row = _row(comparison, folder.relative_to(into))
        except Exception as error:  # whatever stands in one folder, the others have their rows
            damaged.append(f"{folder} is in no index: {_told(error)}")
            continue
        utc = began if began.tzinfo else began.replace(tzinfo=datetime.UTC)
        rows.append((-utc.timestamp(), str(folder), row))
    head = ["| date | model | machine | state | answer |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *(row for _, _, row in sorted(rows))]), tuple(damaged)


def _told(error: Exception) -> str:
    """An error in words; one that nobody wrote for a reader is told with its kind."""
    said = plain(error)
    return said if isinstance(error, DuelError) and said else f"{type(error).__name__}{said and f' ({said})'}"


def _row(comparison: Comparison, place: Path) -> str:
    header, state = comparison.header, _state(comparison)
    link = f"[{markdown(_said(comparison))}]({quote((place / walk.REPORT).as_posix())})"
    loud = f"**{state}**" if state.startswith("RED") else state
    cells = (_date(header), markdown(header.model.name), markdown(_machine(header)), loud, link)
    return f"| {' | '.join(cells)} |"


def verify_all(folder: Path) -> tuple[Verified, ...]:
    """Every run below a folder, and its index if it has one between markers. Raises RunRefused if there is no run."""
    with _on_disk():
        unread: list[Path] = []
        folders = run_folders(folder, unread)
        if not folders and not unread:
            raise RunRefused(
                f"{folder} holds no run: there is no {record.HEADER} in it or below; name what `llamaduel run` made"
            )
        found = [_verified_run(each) for each in folders]
        found += [Verified(each, ("it cannot be read; check permissions",)) for each in unread]
        readme = folder / INDEX
        if readme.is_file() and any(_markers(readme.read_text(encoding="utf-8", errors="replace").splitlines())):
            found.append(_verified(readme, index_problems))
    return tuple(found)


def outcome(checked: Sequence[Verified]) -> str:
    """What the verification came to, in a sentence."""
    runs = [each for each in checked if each.folder.name != INDEX]
    failed = sum(bool(each.problems) for each in runs)
    versions = sorted({version for each in runs for version in each.drawn_elsewhere})
    nearly = f"; charts drawn by matplotlib {', '.join(versions)} were compared within a tolerance" if versions else ""
    if failed:
        return f"{failed} of {count(len(runs), 'run')} cannot be reproduced{nearly}"
    if len(checked) == 1:
        return f"plan and every number of the report are reproduced{nearly}"
    alone = len(runs) == 1
    index = f"{'its' if alone else 'their'} index {'is not' if checked[-1].problems else 'too'}"
    index = index if len(runs) < len(checked) else "no index was checked"
    report = "its report" if alone else "each report"
    return f"{count(len(runs), 'run')}: plan and every number of {report} are reproduced; {index}{nearly}"


def _verified_run(folder: Path) -> Verified:
    found = _verified(folder, walk.verify)
    with contextlib.suppress(OSError):
        return dataclasses.replace(found, drawn_elsewhere=walk.drawn_elsewhere(folder))
    return found


def _verified(folder: Path, check: Callable[[Path], list[str]]) -> Verified:
    try:
        return Verified(folder, tuple(check(folder)))
    except DuelError as error:
        return Verified(folder, (plain(error),))
    except OSError as error:
        where = error.filename or folder
        return Verified(folder, (f"{where} cannot be read ({error.strerror or error}); check permissions",))
    except Exception as error:  # whatever stands in one folder, the others are checked
        return Verified(folder, (f"it cannot be judged: {_told(error)}",))


def index_problems(readme: Path) -> list[str]:
    """Whether the table of an index is the one that its folders give."""
    text = _index_text(readme.parent)
    table, _ = _index(readme.parent)
    if _between(readme, text, table) == text:
        return []
    return [f"its table is not the one that the folders give; `llamaduel publish --into {readme.parent}` writes it"]
