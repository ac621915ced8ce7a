"""A run on disk: a folder with a header and one line per sample and per load.

The header is written before the first block and never changed. Lines are appended and synced
one by one, so that a run killed at any moment can be read, and continued. Everything a report
says is computed from these two files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.contract import Engine, Realised, Settings, is_measurable
from harness.energy import Idle, Spent
from harness.errors import RunRefused
from harness.gates import PageCache, Thermal
from harness.machine import Machine
from harness.measure import Sample
from harness.physics import HostProbe
from harness.placement import Predicted
from harness.plan import ArmStatus, Plan
from harness.telemetry import Quiet, Settled, Telemetry

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORMAT = 1  # of both files; 1: the first
DIGITS = 40  # of a number, in words
HEADER, LINES, LOCK = "run.json", "samples.jsonl", "run.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One arm as it stood when block 1 began: what it is, and whether it can run."""

    arm: str
    status: ArmStatus
    placement: str  # in words
    settings: Settings
    engine: Engine | None = None
    predicted: Predicted | None = None
    like: Predicted | None = None  # where the engine chose: the placement of ours that is nearest to its choice
    command: str | None = None  # what a person pastes
    weights_digest: str | None = None  # of the file that this engine loaded
    realised: Realised | None = None  # as the probe saw it

    @property
    def device_kinds(self) -> frozenset[str]:
        """Kinds of the devices that the engine sees: CUDA, Vulkan, RPC; empty where it does not say."""
        devices = self.engine.devices if self.engine else ()
        return frozenset(device.name.rstrip("0123456789") for device in devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Of the model, what a report needs."""

    name: str
    file: str
    architecture: str
    size_bytes: int
    digest: str
    sha256: str
    layers: int
    expert_layers: int
    experts: int | None
    experts_used: int | None
    has_answer_key: bool
    device_weights_bytes: int | None = None  # with all layers on a device


@dataclass(frozen=True, slots=True)
class SearchLoad:
    """One candidate of a search as it was tried. Its speed is in the samples and in no report."""

    arm: str
    status: ArmStatus
    cell: str  # how it sat in device memory: FITS, TIGHT, SPILLED, DOES_NOT_FIT or UNKNOWN
    loads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How the arms of a run were picked: the values of one number, tried one load each."""

    over: str  # "ncmoe", "ngl", "ub"
    candidates: tuple[str, ...]  # one arm for each placement, least on the host first
    refused: tuple[str, ...]  # values that cannot fit and were not tried
    tried: tuple[SearchLoad, ...]  # in order
    chosen: tuple[str, ...]  # best first
    elsewhere: dict[str, dict[str, str]]  # of each chosen arm, what gives the same placement on another engine
    command: str  # repeats the search
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """`run.json`. The plan holds no private fact, and `plan_digest` is over it alone."""

    format: int
    plan: Plan
    plan_digest: str
    started: str  # ISO 8601 with zone
    model: ModelFacts
    contenders: tuple[Contender, ...]
    machine: Machine
    options: dict[str, Any]
    command: str
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    search: Search | None = None
    host_probe: HostProbe | None = None  # of memory; None: not needed, or it could not run


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """One engine start. `stage` is search, probe, burn-in or block; only blocks are analysed."""

    id: str
    stage: str
    label: str
    arm: str
    block: int = 0
    attempt: int = 0
    position: int = 0
    started_unix_s: float
    ended_unix_s: float
    failure: ArmStatus | None = None
    realised: Realised | None = None
    weights_digest: str | None = None  # of the file that the engine loaded; None: it cannot be read
    telemetry: Telemetry | None = None
    quiet: Quiet | None = None
    settled: Settled | None = None
    cache: PageCache | None = None
    thermal: Thermal | None = None
    gpu_energy: Spent | None = None  # of the measured answers, first token to last
    cpu_energy: Spent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    """A line of kind `sitting`: the run began, or went on, and who held GPU memory then, in sentences."""

    started_unix_s: float
    foreign_gpu: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLine:
    """A line of kind `sample`: written at once, before its load has ended."""

    load: str
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as read back. `samples` holds them by load id, those of unfinished loads too."""

    folder: Path
    header: Header
    loads: tuple[LoadRecord, ...] = ()
    idle: tuple[Idle, ...] = ()  # the machine at rest, before the blocks and after them
    sittings: tuple[Sitting, ...] = ()
    samples: dict[str, tuple[Sample, ...]] = field(default_factory=dict)

    @property
    def rest_gpu_w(self) -> tuple[float, ...]:
        """What the GPUs drew at rest, look by look."""
        return tuple(each.gpu_w for each in self.idle if each.gpu_w is not None)

    @property
    def rest_cpu_w(self) -> tuple[float, ...]:
        """What the CPU packages drew at rest."""
        return tuple(each.cpu_w for each in self.idle if each.cpu_w is not None)

    def samples_of(self, load: LoadRecord) -> tuple[Sample, ...]:
        """The measured samples of a load, its warm-ups left out."""
        return tuple(sample for sample in self.samples.get(load.id, ()) if not sample.warmup)


Line = LoadRecord | SampleLine | Idle | Sitting
KINDS: dict[str, type[Line]] = {"load": LoadRecord, "sample": SampleLine, "idle": Idle, "sitting": Sitting}
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type) -> TypeAdapter[Any]:
    """pydantic's reader and writer of a record, built once: that takes a while."""
    if kind not in _ADAPTERS:
        from pydantic import TypeAdapter

        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def to_json(value: Any) -> Any:
    """A record as plain JSON data; unknown stays null."""
    return _adapter(type(value)).dump_python(value, mode="json")


@contextlib.contextmanager
def _refusing(folder: Path, verb: str, next_step: str) -> Iterator[None]:
    """What the system says of a disk, as a RunRefused."""
    try:
        yield
    except OSError as error:
        raise RunRefused(f"{folder} cannot be {verb} ({error.strerror or error}); {next_step}") from error
    except UnicodeEncodeError as error:
        name = error.object.encode(errors="replace").decode()[max(0, error.start - 40) : error.end + 20]
        raise RunRefused(f"{folder} cannot be {verb}: {name!r} is not UTF-8; rename what is called so") from None


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Nobody else writes to this run while the block runs. Raises RunRefused if somebody does.

    The lock goes with the process, however it ends; the empty file stays.
    """
    import fcntl

    with contextlib.ExitStack() as stack:
        with _refusing(folder, "written", "check its permissions, or name another folder"):
            file = stack.enter_context((folder / LOCK).open("ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunRefused(f"{folder} is being written by another process; wait for it") from None
        except OSError:
            pass  # some network file systems have no locks, and a run there is still a run
        yield


def repair(folder: Path) -> None:
    """Cut off the half of a line that a kill left, so that the next one starts on its own. Raises RunRefused."""
    path = folder / LINES
    with _refusing(folder, "written", "check its permissions"):
        if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)


def exists(folder: Path) -> bool:
    """Whether a run has begun here: its header is written."""
    return (folder / HEADER).exists()


def resuming(folder: object) -> str:
    """The command that goes on with a run, as it is typed."""
    return f"llamaduel run --resume {shlex.quote(str(folder))}"


def create(folder: Path, header: Header) -> None:
    """Make the folder and write its header, synced. Raises RunRefused, also if it holds a run already."""
    text = json.dumps(to_json(header), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with _refusing(folder, "written", "free some room, or name another folder with --out"):
        if exists(folder):
            raise RunRefused(
                f"{folder} holds a run already; go on with it by `{resuming(folder)}`, or name another folder"
            )
        (folder / "engines").mkdir(parents=True, exist_ok=True)
        partial = folder / f"{HEADER}.partial"
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(folder / HEADER)


def append(folder: Path, record: Line) -> None:
    """One line, on disk when this returns. Raises RunRefused."""
    kind = next(word for word, kind in KINDS.items() if isinstance(record, kind))
    line = {"format": FORMAT, "kind": kind, **to_json(record)}
    text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
    with (
        _refusing(folder, "written", f"make room or give the disk back, then go on with `{resuming(folder)}`"),
        (folder / LINES).open("ab") as file,
    ):
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Run:
    """The run in a folder. A last line cut in the middle is left out. Raises RunRefused."""
    with _refusing(folder, "read", "check its permissions and its disk"):
        return _read(folder)


def _read(folder: Path) -> Run:
    path = folder / HEADER
    if not path.is_file():
        raise RunRefused(f"{folder} holds no run: there is no {HEADER} in it; name a folder that `llamaduel run` made")
    try:
        header = _adapter(Header).validate_python(_parsed(path.read_bytes()))
    except _Damaged as error:
        raise RunRefused(f"{path} is damaged: {error}") from None
    except ValueError as error:
        raise RunRefused(f"{path} cannot be read ({_first_line(error)}); it was written by another version") from None
    if header.format != FORMAT:
        raise RunRefused(f"{path} has format {header.format}; this version reads {FORMAT}")
    loads: list[LoadRecord] = []
    idle: list[Idle] = []
    sittings: list[Sitting] = []
    samples: dict[str, list[Sample]] = {}
    for record in _lines(folder / LINES):
        if isinstance(record, LoadRecord):
            loads.append(record)
        elif isinstance(record, Idle):
            idle.append(record)
        elif isinstance(record, Sitting):
            sittings.append(record)
        else:
            samples.setdefault(record.load, []).append(record.sample)
    return Run(
        folder=folder,
        header=header,
        loads=tuple(loads),
        idle=tuple(idle),
        sittings=tuple(sittings),
        samples={load: tuple(found) for load, found in samples.items()},
    )


def _lines(path: Path) -> Iterable[Line]:
    if not path.exists():
        return
    text = path.read_bytes()
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            data = _parsed(line)
            kind = KINDS[data.pop("kind")]
            if data.pop("format") != FORMAT:
                raise RunRefused(f"{path}, line {number}: another format than {FORMAT}")
            yield _adapter(kind).validate_python(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if line.endswith(b"\n"):
                raise RunRefused(f"{path}, line {number} is damaged: {_first_line(error)}") from None
            return  # the moment of a kill: this sample never was


class _Damaged(ValueError):
    """JSON that this module does not write."""


def _parsed(text: bytes) -> Any:
    """JSON data whose numbers can be reckoned with. Raises ValueError.

    A line holds hundreds of numbers: they are read without a call for each, and only a line that has one beyond
    reason is read again, for its spelling.
    """
    try:
        with contextlib.suppress(ValueError):
            if _is_measurable(data := json.loads(text, parse_constant=_number)):
                return data
        return json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_integer)
    except RecursionError:
        raise _Damaged("it is nested without end") from None


def _is_measurable(data: Any) -> bool:
    """Of all numbers in it."""
    if isinstance(data, dict):
        return all(map(_is_measurable, data.values()))
    if not isinstance(data, list):
        return not isinstance(data, int | float) or is_measurable(data)
    if data and set(map(type, data)) == {int}:
        return is_measurable(min(data)) and is_measurable(max(data))
    return all(map(_is_measurable, data))


def _number(text: str) -> float:
    if not is_measurable(number := float(text)):
        raise _Damaged(f"{text[:DIGITS]} is not a number that a run can hold")
    return number


def _integer(text: str) -> int:
    _number(text)  # before it is read: Python takes its time over very long ones
    return int(text)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
