"""A run folder: damage is named by its line, a disk that fails by its folder, and one process writes."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import plan, record
from harness.errors import RunRefused
from harness.machine import Machine
from harness.record import Header, LoadRecord, ModelFacts

LOAD = LoadRecord(id="block-1", stage="block", label="A", arm="llama-cpp", started_unix_s=1.0, ended_unix_s=2.0)

MACHINE = Machine(
    cpu="a CPU",
    physical_cores=2,
    logical_cores=2,
    memory_bytes=1 << 30,
    available_bytes=1 << 30,
    system="Linux",
    kernel="6",
    python="3.11",
)


@pytest.fixture
def header() -> Header:
    drawn = plan.make(["ollama", "llama-cpp"], seed=1, prompts_digest="p", weights_digest="w")
    return Header(
        format=record.FORMAT,
        plan=drawn,
        plan_digest=drawn.digest,
        started="2026-01-01T00:00:00+00:00",
        model=ModelFacts(
            name="m",
            file="m.gguf",
            architecture="llama",
            size_bytes=1,
            digest="d",
            sha256="s",
            layers=1,
            expert_layers=0,
            experts=None,
            experts_used=None,
            has_answer_key=False,
        ),
        contenders=(),
        machine=MACHINE,
        options={},
        command="llamaduel run",
        versions={},
    )


@pytest.fixture
def folder(tmp_path: Path, header: Header) -> Path:
    record.create(tmp_path / "run", header)
    return tmp_path / "run"


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_was_written_is_read_back(folder: Path, header: Header) -> None:
    record.append(folder, LOAD)
    run = record.read(folder)
    assert (run.header, run.loads) == (header, (LOAD,))


@pytest.mark.parametrize("line", ["[1]", "1", "null", '"load"', "{}", '{"kind":"load","format":1}', "{", '{"kind":[]}'])
def test_a_line_that_is_no_record_is_damaged(line: str, folder: Path) -> None:
    record.append(folder, LOAD)
    with (folder / record.LINES).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(RunRefused, match=r"samples\.jsonl, line 2 is damaged: ") as raised:
        record.read(folder)
    assert "\n" not in str(raised.value)


NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e308", "1e999", "-1e19", "1" + 400 * "0", "9" * 5000]


@pytest.mark.parametrize("number", NO_NUMBERS, ids=lambda text: text[:9])
def test_a_number_that_nobody_measured_is_damage(number: str, folder: Path) -> None:
    record.append(folder, LOAD)
    path = folder / record.LINES
    path.write_text(path.read_text() * 2)
    path.write_text(
        path.read_text()[::-1].replace('"ended_unix_s":2.0'[::-1], f'"ended_unix_s":{number}'[::-1], 1)[::-1]
    )
    with pytest.raises(RunRefused, match=r"line 2 is damaged: .{1,40} is not a number that a run can hold$") as raised:
        record.read(folder)
    assert number[:40] in str(raised.value)


@pytest.mark.parametrize("number", NO_NUMBERS, ids=lambda text: text[:9])
def test_the_same_in_a_header_is_damage_and_no_other_version(number: str, folder: Path) -> None:
    path = folder / record.HEADER
    path.write_text(path.read_text().replace('"available_bytes": ', f'"available_bytes": {number}, "x": ', 1))
    with pytest.raises(RunRefused, match=r"run\.json is damaged: .{1,40} is not a number that a run can hold$"):
        record.read(folder)


@pytest.mark.parametrize("name", [record.HEADER, record.LINES])
def test_what_is_nested_without_end_is_damage(name: str, folder: Path) -> None:
    (folder / name).write_text("[" * 100_000 + "\n")
    with pytest.raises(RunRefused, match="damaged: it is nested without end"):
        record.read(folder)


def test_a_number_that_could_not_be_read_back_is_not_written(folder: Path) -> None:
    record.append(folder, LOAD)
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.append(folder, dataclasses.replace(LOAD, ended_unix_s=float("nan")))
    assert record.read(folder).loads == (LOAD,)


@pytest.mark.parametrize("line", ["[1]", '{"kind":"lo'])
def test_the_same_without_its_end_is_the_moment_of_a_kill(line: str, folder: Path) -> None:
    record.append(folder, LOAD)
    with (folder / record.LINES).open("a") as file:
        file.write(line)
    assert record.read(folder).loads == (LOAD,)
    record.repair(folder)
    record.append(folder, LOAD)
    assert record.read(folder).loads == (LOAD, LOAD)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda folder, header: record.append(folder, LOAD), r"then go on with `llamaduel run --resume .*run`$"),
        (lambda folder, header: record.create(folder / "other", header), "name another folder with --out"),
    ],
)
def test_a_full_disk_is_one_sentence_with_the_folder(
    write: Callable[[Path, Header], None], says: str, folder: Path, header: Header, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunRefused, match=rf"run.* cannot be written \(No space left on device\); .*{says}"):
        write(folder, header)
    assert record.read(folder).header == header
    assert not (folder / "other" / record.HEADER).exists()


def test_a_folder_that_cannot_be_made_written_or_read_is_named(folder: Path, header: Header, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunRefused, match=r"file/run cannot be written .*; .*--out"):
        record.create(tmp_path / "file" / "run", header)
    (folder / record.LINES).mkdir()
    with pytest.raises(RunRefused, match=r"cannot be written .*; .*--resume"):
        record.append(folder, LOAD)
    with pytest.raises(RunRefused, match=r"cannot be read .*; check its permissions"):
        record.read(folder)


def test_a_name_that_is_not_utf_8_is_one_sentence(header: Header, tmp_path: Path) -> None:
    command = "llamaduel run " + os.fsdecode(b"caf\xe9.gguf")
    with pytest.raises(RunRefused, match=r"'.*caf\?\.gguf.*' is not UTF-8; rename"):
        record.create(tmp_path / "run", dataclasses.replace(header, command=command))
    assert not (tmp_path / "run" / record.HEADER).exists()


HOLD = """
import sys
from pathlib import Path
from harness import record
with record.lock(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def test_a_run_is_written_by_one_process_at_a_time(folder: Path) -> None:
    argv = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(RunRefused, match="is being written by another process; wait for it"), record.lock(folder):
            pass
        other.kill()
    with record.lock(folder):  # however it ended
        pass
    with record.lock(folder):
        assert record.read(folder).loads == ()


def test_a_folder_that_is_not_there_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(RunRefused, match="gone cannot be written"), record.lock(tmp_path / "gone"):
        pass


def test_what_goes_wrong_under_the_lock_is_not_taken_for_its_own(folder: Path) -> None:
    with pytest.raises(BlockingIOError), record.lock(folder):
        raise BlockingIOError
