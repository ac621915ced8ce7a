"""A run folder for strangers: nothing private in any byte, the same numbers, and all or nothing on the disk."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from played_run import OTHER, REFERENCE, a_header, contender, later, played, written
from short_run import options

import harness
from harness import publication, record, walk
from harness.cli import main
from harness.display import quiet
from harness.errors import RunRefused
from harness.machine import Machine
from harness.page import page
from harness.plan import ArmStatus, Status
from harness.record import Header, LoadRecord, Run, Search, SearchLoad
from harness.redaction import Private
from harness.testing import engines
from harness.testing.script import Script

HOME, USER, HOST = "/srv/people/zaphod beeblebrox", "zaphod", "heartofgold"
SECRET, UUID = "betelgeuse-five-1979", "GPU-1a2b3c4d-1111-2222-3333-1234567890ab"
KNOWN = f"{HOME}/plans/x.gguf by {USER} on {HOST}.galaxy.example with {SECRET} in '{HOME}'"
PLANTED = f"{KNOWN} /home/trillian/y, trillian@mail.example.org 12:34:56:78:9a:bc {UUID} sk-abcdefghijklmnopqrstu"
PRIVATE = (
    *(HOME, "beeblebrox", "plans/", USER, HOST, "galaxy.example", SECRET, "trillian", "12:34:56", "1a2b3c4d"),
    *("sk-abc", "10.11.12.13"),
)
STRUCTURE = frozenset(  # texts that another text refers to
    [
        "arm",
        "label",
        "id",
        "load",
        "stage",
        "word",
        "weights_digest",
        "digest",
        "sha256",
        "started",
        "alias_of",
        "origin",
    ]
)


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody with a name, a host and a token, in a folder of their own."""
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setenv("LOGNAME", USER)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(socket, "gethostname", lambda: f"{HOST}.galaxy.example")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(played(a_header()), tmp_path / "run")


def bytes_of(folder: Path) -> str:
    texts = [f"{path.relative_to(folder)}\n{path.read_text('utf-8')}" for path in folder.rglob("*") if path.is_file()]
    assert texts
    return "\n".join(texts)


def name_of(into: Path) -> Path:
    (folder,) = (path for path in into.iterdir() if path.is_dir())
    return folder


# ── nothing private ─────────────────────────────────────────────────────────────────────────


def filled(kind: Any, name: str = "") -> Any:
    """A value of any type of a record with something private in every text of it."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return filled(next(each for each in inside if each is not type(None)), name)
    if origin is tuple:
        return (filled(inside[0], name),) if inside[-1] is ... else tuple(filled(each, name) for each in inside)
    if origin is not None and issubclass(origin, Mapping):
        return {PLANTED: filled(inside[1], name)}
    if kind in (str, Any):
        return PLANTED
    if kind is Path:
        return Path(HOME) / "plans of mine/x.gguf"
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(
            **{each.name: filled(hints[each.name], each.name) for each in dataclasses.fields(kind)}
        )
    if issubclass(kind, enum.Enum):
        return next(iter(kind))
    return kind(1)


def planted(record_: Any, **kept: Any) -> Any:
    """A record with something private in every field that nothing refers to."""
    hints = typing.get_type_hints(type(record_))
    free = {each.name for each in dataclasses.fields(record_)} - STRUCTURE - kept.keys()
    return dataclasses.replace(record_, **{name: filled(hints[name]) for name in free}, **kept)


def a_private_run() -> Run:
    calm = played(a_header())
    header = calm.header
    contenders = tuple(
        planted(each, status=each.status, settings=each.settings, predicted=None, like=None)
        for each in header.contenders
    )
    lost = planted(contender("llama-cpp@cpu"), status=ArmStatus(Status.CRASHED, PLANTED), predicted=None, like=None)
    assert lost.realised is not None
    header = dataclasses.replace(
        header,
        contenders=(*contenders, lost),
        machine=filled(Machine),
        model=dataclasses.replace(header.model, file=f"{HOME}/plans of mine/m.gguf", name="m", architecture=PLANTED),
        options={"model": f"{HOME}/plans of mine/m.gguf", "no_wait": True, "prompts": PLANTED, "llama_server": KNOWN},
        command=f"llamaduel run --model='{HOME}/plans of mine/m.gguf' {PLANTED}",
        versions={"llamaduel": "0.1.0", "other": KNOWN},
        notes=(PLANTED, "seen at 10.11.12.13:50052"),
        search=Search(
            over="ncmoe",
            candidates=(REFERENCE, OTHER),
            refused=(PLANTED,),
            tried=(SearchLoad(OTHER, ArmStatus(Status.DOES_NOT_FIT, PLANTED), "DOES_NOT_FIT"),),
            chosen=(REFERENCE,),
            elsewhere={REFERENCE: {"other": PLANTED}},
            command=PLANTED,
            notes=(PLANTED,),
        ),
    )
    loads, samples = [], {}
    for load in calm.loads:
        numbers = {
            each.name: getattr(load, each.name)
            for each in dataclasses.fields(LoadRecord)
            if isinstance(getattr(load, each.name), int | float)
        }
        loads.append(planted(load, failure=None, quiet=None, settled=None, telemetry=None, **numbers))
        samples[load.id] = tuple(
            dataclasses.replace(each, prompt_id=PLANTED, text=KNOWN, expected=KNOWN) for each in calm.samples[load.id]
        )
    return dataclasses.replace(calm, header=header, loads=tuple(loads), samples=samples)


def test_what_is_planted_in_every_text_is_in_no_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(a_private_run(), tmp_path / "run")
    (folder / "engines/block-1.log").write_text(f"loading\n{PLANTED}\nserver on 10.11.12.13:8080\n", encoding="utf-8")
    before = bytes_of(folder)
    assert before.count(USER) > 300
    assert all(word in before for word in PRIVATE), "or nothing is shown"

    assert main(["publish", str(folder), "--into", "reports", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    after = bytes_of(tmp_path / "reports")
    assert [word for word in PRIVATE if word in after] == []
    assert {"path", "user", "host", "key", "address", "serial", "e-mail"} <= found["replaced"].keys()
    assert harness.verify(Path(found["folder"])) == []
    schema = json.loads(
        (Path(__file__).resolve().parent.parent / "schemas/publish.output.schema.json").read_text("utf-8")
    )
    assert list(Draft202012Validator(schema).iter_errors(found)) == []


def test_its_plan_and_its_numbers_are_those_that_were_measured(run: Path, tmp_path: Path) -> None:
    published = publication.publish(run, tmp_path / "reports")

    before, after = walk.read(run), walk.read(published.folder)
    assert after.header.plan_digest == before.header.plan.digest
    assert after.judgement == before.judgement
    assert published.folder.name == "2026-01-01-a-card-m"
    assert published.state == after.state.word
    assert sorted(path.name for path in published.folder.iterdir()) == sorted(
        path.name for path in run.iterdir() if path.name not in (record.LOCK, "engines")
    )


def test_what_is_published_can_be_published_again_and_stays_the_same(run: Path, tmp_path: Path) -> None:
    header = json.loads((run / record.HEADER).read_text("utf-8"))
    header["notes"] = [PLANTED]
    (run / record.HEADER).write_text(json.dumps(header), encoding="utf-8")
    once = publication.publish(run, tmp_path / "reports")
    again = publication.publish(once.folder, tmp_path / "others")

    assert once.replaced
    assert again.replaced == {}
    assert bytes_of(again.folder) == bytes_of(once.folder)


def test_a_run_made_in_a_home_with_spaces_names_nothing_of_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "Arthur Dent"
    (home / "my models").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    weights = home / "my models/tiny one.gguf"
    weights.symlink_to(model)
    with engines.fake(home, Script(itl_s=0.002)):
        folder = harness.duel(options(weights, home / "my runs", arms="llama-cpp"), quiet).run.folder
    assert list((folder / "engines").glob("*.log"))

    published = publication.publish(folder, tmp_path / "reports").folder

    after = bytes_of(published)
    assert "Arthur" not in after
    assert str(tmp_path) not in after
    assert "my models" not in after
    assert list((published / "engines").glob("*.log"))
    assert walk.read(published).header.command.count("tiny one.gguf") <= 1


def test_a_plan_with_a_name_in_it_is_refused(tmp_path: Path) -> None:
    header = a_header(contender(REFERENCE), contender(f"openai@{HOST}"))
    folder = written(played(header, {f"openai@{HOST}": 40.0}), tmp_path / "run")

    with pytest.raises(RunRefused, match="its plan says 'openai@<host>' in clear"):
        publication.publish(folder, tmp_path / "reports")

    assert not (tmp_path / "reports").exists()


def test_hosts_of_an_arm_are_numbers_as_in_its_plan(tmp_path: Path) -> None:
    arm = "llama-cpp,rpc=10.11.12.13:50052+marvin:50052"
    header = a_header(contender(REFERENCE), contender(arm))
    folder = written(played(header, {"llama-cpp,rpc=<2>": 40.0}), tmp_path / "run")
    published = walk.read(publication.publish(folder, tmp_path / "reports").folder)

    assert [row.arm for row in published.rows] == [REFERENCE, "llama-cpp,rpc=<2>"]
    assert "marvin" not in bytes_of(published.run.folder)


def test_a_model_called_like_its_owner_keeps_its_name_and_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = a_header()
    header = dataclasses.replace(header, model=dataclasses.replace(header.model, name=f"{USER}-tiny"))
    written(played(header), tmp_path / "run")

    assert main(["publish", "run"]) == 0

    assert "The model's own name holds a user or host name and was kept." in capsys.readouterr().out
    assert walk.read(name_of(tmp_path / "reports")).header.model.name == f"{USER}-tiny"


def test_what_would_be_judged_otherwise_without_its_words_is_refused(tmp_path: Path) -> None:
    found = played(a_header())
    last = found.loads[-1].id  # whose answers are wrong, but for letters that go
    wrong = tuple(dataclasses.replace(each, text=USER.title(), expected=USER) for each in found.samples[last])
    folder = written(dataclasses.replace(found, samples=dict(found.samples) | {last: wrong}), tmp_path / "run")

    with pytest.raises(RunRefused, match="is judged otherwise"):
        publication.publish(folder, tmp_path / "reports")

    assert not (tmp_path / "reports").exists()


def test_a_run_that_is_being_measured_is_refused(run: Path, tmp_path: Path) -> None:
    with record.lock(run), pytest.raises(RunRefused, match="written by another process"):
        publication.publish(run, tmp_path / "reports")

    assert not (tmp_path / "reports").exists()


# ── what may be shown ───────────────────────────────────────────────────────────────────────


def test_a_red_run_is_refused_and_shown_anyway_as_red(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(played(a_header(), twin=1.5), tmp_path / "run")
    assert walk.read(folder).state.word == "RED"

    assert main(["publish", "run"]) == 1
    assert "is RED and ranks nothing" in capsys.readouterr().err
    assert not (tmp_path / "reports").exists()

    assert main(["publish", "run", "--anyway"]) == 0
    assert ": RED: ranks nothing" in capsys.readouterr().out
    head = (name_of(tmp_path / "reports") / walk.REPORT).read_text("utf-8").splitlines()[:6]
    assert any("RED" in line or "ranks nothing" in line for line in head)
    assert "| **RED: ranks nothing** |" in (tmp_path / "reports/README.md").read_text("utf-8")


def test_a_stopped_run_and_one_of_few_blocks_say_what_they_are(run: Path, tmp_path: Path) -> None:
    lines = (run / record.LINES).read_text("utf-8").splitlines(keepends=True)
    (run / record.LINES).write_text("".join(lines[:30]) + '{"format":1,"kind":"sam', encoding="utf-8")

    published = publication.publish(run, tmp_path / "reports")

    assert published.state == "SCREENING, stopped"
    assert harness.verify(published.folder) == []


# ── all or nothing ──────────────────────────────────────────────────────────────────────────


def test_what_is_there_is_not_written_over(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", "run", "--name", "one"]) == 0
    before = bytes_of(tmp_path / "reports")

    assert main(["publish", "run", "--name", "one"]) == 1

    assert "2026-01-01-one is there already and is not written over" in capsys.readouterr().err
    assert bytes_of(tmp_path / "reports") == before
    assert main(["publish", "run", "--name", "../two"]) == 2
    assert main(["publish", "run", "--name", f"of-{USER}"]) == 2
    assert sorted(path.name for path in (tmp_path / "reports").iterdir()) == ["2026-01-01-one", "README.md"]


@pytest.mark.parametrize("step", ["write_report", "verify"])
def test_what_fails_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(walk, step, full)

    assert main(["publish", "run", "--into", "a/b"]) == 1

    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_copy_that_still_names_somebody_is_not_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = json.loads((run / record.HEADER).read_text("utf-8"))
    header["notes"] = [KNOWN]
    (run / record.HEADER).write_text(json.dumps(header), encoding="utf-8")
    monkeypatch.setattr(publication, "redact_data", lambda value, *_: value)

    with pytest.raises(RunRefused, match="still holds 1 key"):
        publication.publish(run, tmp_path / "reports")

    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize(("sign", "left"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1)])
def test_a_kill_in_the_middle_leaves_no_report(run: Path, tmp_path: Path, sign: int, left: int) -> None:
    (tmp_path / "reports").mkdir()
    code = """
        import time
        from harness import walk
        from harness.cli import main
        def verify(folder):
            print("here", flush=True)
            time.sleep(600)
        walk.verify = verify
        raise SystemExit(main(["publish", "run"]))
    """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        child.send_signal(sign)

    assert len(list((tmp_path / "reports").iterdir())) == left, "nothing can tidy up after SIGKILL but the next one"
    assert publication.run_folders(tmp_path / "reports") == []
    deadline = time.monotonic() + 30
    while True:
        publication.publish(run, tmp_path / "reports", name=f"at-{time.monotonic_ns()}")
        if not list((tmp_path / "reports").glob(f"{publication.UNFINISHED}*")):
            break
        assert time.monotonic() < deadline


def test_what_cannot_be_read_or_written_is_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").touch()
    (run / "engines/odd.log").mkdir()

    assert main(["publish", "nowhere"]) == 1
    assert "holds no run" in capsys.readouterr().err
    assert main(["publish", "run", "--into", "a file"]) == 1
    assert "a file" in capsys.readouterr().err
    (run / record.LINES).rename(run / "other")
    (run / record.LINES).mkdir()
    assert main(["publish", "run"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert not (tmp_path / "reports").exists()


# ── logs ────────────────────────────────────────────────────────────────────────────────────


def test_a_long_log_keeps_its_ends_and_says_what_it_lost(run: Path, tmp_path: Path) -> None:
    lines = [f"line {number} of {HOME}/plans/x" for number in range(100_000)]
    (run / "engines/long.log").write_text("\n".join(lines), encoding="utf-8")
    (run / "engines/one line.log").write_text("/srv/people/zaphod " * 100_000, encoding="utf-8")
    (run / "engines/not text.log").write_bytes(b"\xff\xfe\0" * 10)
    folder = publication.publish(run, tmp_path / "reports").folder

    text = (folder / "engines/long.log").read_text("utf-8")
    assert len(text) < publication.LOG_BYTES
    assert text.startswith("line 0 of x\n")
    assert text.endswith("line 99999 of x")
    assert "of this log are left out here" in text
    assert len((folder / "engines/one_line.log").read_text("utf-8")) < 100, "half a name is none"
    assert (folder / "engines/not_text.log").exists()


def test_many_logs_are_small_together_and_short_ones_whole(run: Path, tmp_path: Path) -> None:
    for number in range(60):
        (run / f"engines/block-{number}.log").write_text("a line of a log\n" * (10 if number % 2 else 10_000))
    folder = publication.publish(run, tmp_path / "reports").folder

    logs = sorted((folder / "engines").iterdir())
    assert len(logs) == 60
    assert sum(path.stat().st_size for path in logs) <= publication.LOGS_BYTES + 60 * 100
    assert (folder / "engines/block-1.log").read_text() == "a line of a log\n" * 10


def test_links_are_not_followed_out_of_a_run_or_out_of_the_reports(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the ultimate question")
    (run / "engines/linked.log").symlink_to(tmp_path / "secret")
    (tmp_path / "link").symlink_to(run)

    folder = publication.publish(tmp_path / "link", tmp_path / "reports").folder
    (tmp_path / "reports/elsewhere").symlink_to(run)

    assert "ultimate" not in bytes_of(folder)
    assert publication.run_folders(tmp_path / "reports") == [folder]
    assert publication.run_folders(tmp_path / "link") == [tmp_path / "link"]


# ── the index, and the check of all ─────────────────────────────────────────────────────────


def a_name(header: Header, name: str) -> Header:
    return dataclasses.replace(header, model=dataclasses.replace(header.model, name=name))


def test_the_index_is_newest_first_and_keeps_what_stands_around(tmp_path: Path) -> None:
    into = tmp_path / "reports"
    into.mkdir()
    text = f"# Ours\r\n\r\nbefore\r\n\r\n{publication.BEGIN}\r\nold\r\n{publication.END}\r\n\r\nafter"
    (into / "README.md").write_bytes(text.encode())
    written(played(a_name(a_header(), "the first")), into / "2026-01-01-first")
    written(played(a_name(later(), "a|b <i>*c*")), into / "an experiment/deep (er)")

    assert publication.rebuild_index(into) == ()
    new = (into / "README.md").read_bytes().decode()
    rows = [line for line in new.splitlines() if line.startswith("| 2026")]
    assert new.startswith(f"# Ours\r\n\r\nbefore\r\n\r\n{publication.BEGIN}\r\n")
    assert new.endswith(f"{publication.END}\r\n\r\nafter\r\n")
    assert "old" not in new
    assert [row.split(" | ")[0] for row in rows] == ["| 2026-01-02", "| 2026-01-01"]
    assert "| a\\|b &lt;i&gt;\\*c\\* |" in rows[0]
    assert "](an%20experiment/deep%20%28er%29/report.md) |" in rows[0]
    assert "| a card | GREEN | [" in rows[1]

    assert publication.rebuild_index(into) == ()
    assert (into / "README.md").read_bytes().decode() == new


def test_a_readme_without_markers_gets_them_and_broken_ones_are_refused(run: Path, tmp_path: Path) -> None:
    into = tmp_path / "reports"
    into.mkdir()
    (into / "README.md").write_text("# Ours", encoding="utf-8")
    publication.publish(run, into)
    publication.rebuild_index(into)
    new = (into / "README.md").read_text("utf-8")
    assert new.startswith(f"# Ours\n\n{publication.BEGIN}\n\n| date |")

    (into / "README.md").write_text(new.replace(publication.END, ""), encoding="utf-8")
    with pytest.raises(RunRefused, match="needs one line"):
        publication.rebuild_index(into)


def test_a_damaged_folder_is_named_and_stops_no_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "reports"
    folder = publication.publish(run, into).folder
    (into / "broken").mkdir()
    (into / "broken/run.json").write_text("{")

    assert main(["publish", "--into", "reports"]) == 1

    assert "broken is in no index" in capsys.readouterr().err
    assert f"]({folder.name}/report.md)" in (into / "README.md").read_text("utf-8")


def test_all_published_runs_and_their_index_are_verified_at_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        assert main(["publish", "run", "--name", name]) == 0
    capsys.readouterr()
    assert main(["verify", "reports"]) == 0
    assert "2 runs: plan and every number of each report are reproduced" in capsys.readouterr().out

    index = tmp_path / "reports/README.md"
    index.write_text(index.read_text("utf-8").replace("GREEN", "GOLDEN"), encoding="utf-8")
    assert main(["verify", "reports"]) == 1
    assert "its table is not the one that the folders give" in capsys.readouterr().out
    assert main(["publish"]) == 0

    report = tmp_path / "reports/2026-01-01-two/report.md"
    report.write_text(report.read_text("utf-8").replace("GREEN", "GOLDEN"), encoding="utf-8")
    capsys.readouterr()
    assert main(["verify", "reports", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["verified"]
    assert all("2026-01-01-two" in problem for problem in found["problems"])
    assert main(["verify", "reports"]) == 1
    assert "1 of 2 runs cannot be reproduced" in capsys.readouterr().out


def test_a_bad_folder_is_a_line_and_stops_no_other(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two", "three", "four"):
        assert main(["publish", "run", "--name", name]) == 0
    into = tmp_path / "reports"
    one, two, three = (into / f"2026-01-01-{name}" for name in ("one", "two", "three"))
    (one / walk.REPORT).unlink()
    (one / walk.REPORT).mkdir()
    (two / record.HEADER).write_bytes(b"\xff")
    verify = walk.verify

    def broken(folder: Path) -> list[str]:
        if folder.name == three.name:
            raise KeyError("seed")
        return verify(folder)

    monkeypatch.setattr(walk, "verify", broken)
    capsys.readouterr()

    assert main(["verify", "reports"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [sum(line.startswith(f"reports/{each.name}:") for line in out) for each in (one, two, three)] == [1, 1, 1]
    assert "reports/2026-01-01-three: it cannot be judged: KeyError ('seed')" in out
    assert out[-1] == "reports: 3 of 4 runs cannot be reproduced"


def test_a_folder_that_cannot_be_looked_into_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", "run", "--name", "one"]) == 0
    (tmp_path / "reports/locked").mkdir()
    scan = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    capsys.readouterr()

    assert main(["verify", "reports"]) == 1
    assert "reports/locked: it cannot be read" in capsys.readouterr().out
    assert main(["publish"]) == 1
    assert "reports/locked is in no index: it cannot be read" in capsys.readouterr().err


def test_a_folder_of_runs_without_an_index_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", "run", "--name", "one"]) == 0
    capsys.readouterr()
    assert main(["verify", "reports"]) == 0
    assert capsys.readouterr().out.endswith(
        "1 run: plan and every number of its report are reproduced; its index too\n"
    )
    assert main(["publish", "run", "--name", "two"]) == 0
    index = tmp_path / "reports/README.md"
    for text in ("# Ours\n", f"```\n{publication.BEGIN}\n{publication.END}\n```\n", None):
        index.unlink() if text is None else index.write_text(text, encoding="utf-8")
        capsys.readouterr()
        assert main(["verify", "reports"]) == 0
        assert "of each report are reproduced; no index was checked" in capsys.readouterr().out


def test_markers_in_a_fence_of_code_are_text(run: Path, tmp_path: Path) -> None:
    into = tmp_path / "reports"
    into.mkdir()
    fenced = f"# Ours\n\n````md\n```\n{publication.BEGIN}\n{publication.END}\n````\n"
    (into / "README.md").write_text(fenced, encoding="utf-8")

    publication.rebuild_index(into)
    publication.rebuild_index(into)

    assert (into / "README.md").read_text("utf-8").startswith(f"{fenced}\n{publication.BEGIN}\n\n| date")


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (f"{publication.BEGIN}\n{publication.BEGIN}\n{publication.END}\n".encode(), "needs one line"),
        (b"\xff\xfe", "is not UTF-8"),
        (None, "is a folder and no index"),
    ],
)
def test_with_a_broken_index_nothing_is_published(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], index: bytes | None, told: str
) -> None:
    readme = tmp_path / "reports/README.md"
    readme.parent.mkdir()
    readme.mkdir() if index is None else readme.write_bytes(index)

    assert main(["publish", "run"]) == 1

    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert [path.name for path in readme.parent.iterdir()] == ["README.md"]


def test_charts_of_another_matplotlib_verify_and_that_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    charts = {f"charts/{path.name}": path for path in (run / "charts").glob("*.svg")}
    for path in charts.values():
        text = path.read_text("utf-8")
        path.write_text(text.replace('data-matplotlib="', 'data-matplotlib="0.', 1), encoding="utf-8")
    texts = {name: path.read_text("utf-8") for name, path in charts.items()}
    (run / walk.PAGE).write_text(page((run / walk.REPORT).read_text("utf-8"), texts), encoding="utf-8")

    assert main(["verify", "run"]) == 0
    assert re.search(r"; charts drawn by matplotlib 0\.[\d.]+ were compared within", capsys.readouterr().out)

    text = texts["charts/ratios-light.svg"].replace("</svg>", '<text x="9" y="9">9x faster</text></svg>')
    charts["charts/ratios-light.svg"].write_text(text, encoding="utf-8")
    assert main(["verify", "run"]) == 1
    assert "charts/ratios-light.svg is not the chart" in capsys.readouterr().out


def test_what_lies_beside_a_report_and_every_byte_of_it_is_checked(run: Path) -> None:
    for name in ("charts/more-light.svg", "charts/note.txt", "evil.html", "engines/evil.SVG"):
        (run / name).write_text("<svg/>", encoding="utf-8")
        assert walk.verify(run) == [f"{name} is no part of this report; remove it"]
        (run / name).unlink()
    for name in (walk.REPORT, walk.PAGE):
        whole = (run / name).read_bytes()
        for changed in (whole.replace(b"\n", b"\r\n"), whole.rstrip(b"\n"), whole + b"\n", whole + b"\xff"):
            (run / name).write_bytes(changed)
            assert walk.verify(run)
        (run / name).write_bytes(whole)
    assert walk.verify(run) == []


def test_nothing_is_deleted_or_written_through_a_link_out_of_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/holiday.svg").write_text("sun")
    (run / "charts").rename(tmp_path / "charts")
    (run / "charts").symlink_to(tmp_path / "pictures")

    assert main(["report", "run"]) == 1
    assert "leads out of run by a link, and nothing is written there; remove the link" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["holiday.svg"]

    (run / "charts").unlink()
    (tmp_path / "diary").write_text("dear")
    (run / f"{walk.REPORT}.partial").symlink_to(tmp_path / "diary")
    assert main(["report", "run"]) == 1
    assert (tmp_path / "diary").read_text() == "dear"


def test_two_logs_whose_names_become_one_are_both_kept(run: Path, tmp_path: Path) -> None:
    for name in ("a b.log", "a_b.log", "A_B.log"):
        (run / "engines" / name).write_text(name, encoding="utf-8")

    folder = publication.publish(run, tmp_path / "reports").folder

    logs = list((folder / "engines").iterdir())
    assert sorted(path.read_text("utf-8") for path in logs) == ["A_B.log", "a b.log", "a_b.log"]
    assert len({path.name.lower() for path in logs}) == 3


def test_what_is_about_a_run_needs_one_and_an_index_needs_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["publish", "--name", "x"])
    assert left.value.code == 2
    assert "none is named" in capsys.readouterr().err

    assert main(["publish"]) == 1
    assert "there is no folder reports with published runs; publish one first" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_meanwhile_and_a_link_to_nothing_have_their_sentences(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dead").symlink_to(tmp_path / "nothing")
    assert main(["publish", "run", "--into", "dead"]) == 1
    assert "dead is a link to nothing" in capsys.readouterr().err

    verify = walk.verify

    def slow(folder: Path) -> list[str]:
        (tmp_path / "reports/2026-01-01-one/charts").mkdir(parents=True)
        return verify(folder)

    monkeypatch.setattr(walk, "verify", slow)
    assert main(["publish", "run", "--name", "one"]) == 1
    assert "2026-01-01-one is there already and is not written over" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["2026-01-01-one"]


@pytest.mark.parametrize("user", ["moe", "ngl"])
def test_a_user_who_is_called_like_a_word_of_an_arm_can_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    monkeypatch.setenv("LOGNAME", user)
    folder = written(played(a_header()), tmp_path / "run")

    published = publication.publish(folder, tmp_path / "reports").folder

    assert [row.arm for row in walk.read(published).rows] == [row.arm for row in walk.read(folder).rows]


@pytest.mark.parametrize(
    ("machine", "name", "slug"),
    [
        (
            "Intel(R) Core(TM) i7-9700K CPU @ 3.60GHz",
            "Qwen3.5-35B-A3B Q4_K_M",
            "intel-core-i7-9700k-qwen3.5-35b-a3b-q4-k-m",
        ),
        ("AMD Ryzen 9 7950X 16-Core Processor", "x" * 60, f"amd-ryzen-9-7950x-{'x' * 60}"),
        (
            None,
            "a model with a very long name that nobody would want in a folder",
            "a-model-with-a-very-long-name-that",
        ),
    ],
)
def test_a_folder_is_called_by_machine_and_model_in_whole_words(machine: str | None, name: str, slug: str) -> None:
    header = a_name(a_header(), name)
    header = dataclasses.replace(header, machine=dataclasses.replace(header.machine, cpu=machine, gpus=()))

    assert publication._slug(header, Private()) == slug


def test_help_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["publish", "--help"])

    assert "without what is private" in " ".join(capsys.readouterr().out.split())
    assert os.environ["HOME"] == HOME
