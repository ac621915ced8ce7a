"""The experiments that are published, and their scripts: what a page says follows from what lies beside it."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from short_run import options

import harness
from harness import model as models
from harness import process, publication, record, registry, synth, telemetry
from harness.display import quiet
from harness.testing import engines
from harness.testing.script import Script

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS, REPORTS = ROOT / "scripts/experiments", ROOT / "reports"
COMMANDS = ("article", "equal_arms", "five_per_cent", "same_placement", "served_token", "telemetry_cost")
RUNS = sorted(path.parent for path in REPORTS.rglob(record.HEADER))
PRIVATE = re.compile(r"/(home|root|tmp|Users|work|mnt|var)/")


@pytest.fixture(autouse=True)
def scripts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> harness.Comparison:
    """The article as the script enters it now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS))
        import article

        return article.replay(tmp_path_factory.mktemp("runs") / "article")


# ── what is published ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: str(folder.relative_to(REPORTS)))
def test_every_published_run_verifies(folder: Path) -> None:
    assert harness.verify(folder) == []


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: str(folder.relative_to(REPORTS)))
def test_a_published_run_names_no_folder_of_the_machine_that_made_it(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            assert not PRIVATE.search(path.read_text("utf-8")), path.name


def test_the_index_of_published_runs_is_the_one_that_they_give() -> None:
    assert publication.index_problems(REPORTS / "README.md") == []


@pytest.mark.parametrize("name", ["equal-arms", "five-per-cent", "same-placement"])
def test_the_page_of_an_experiment_is_what_its_data_say(name: str) -> None:
    script = importlib.import_module(name.replace("-", "_"))
    (folder,) = REPORTS.glob(f"*-{name}")

    assert (folder / "README.md").read_text("utf-8") == script.result(folder)


# ── the article ─────────────────────────────────────────────────────────────────────────────


def test_the_article_entered_as_a_run_is_red_and_ranks_nothing(replayed: harness.Comparison) -> None:
    import article

    assert replayed.state.word == "RED"
    equal = "llama-cpp@ncmoe=40 and llama-cpp@ncmoe=48 are one placement"
    assert replayed.state.reasons[0].startswith(f"{equal}, and yet differ")
    assert {contrast.word for contrast in replayed.judgement.contrasts.values()} == {"NOT_COMPARABLE"}
    report = (replayed.run.folder / "report.md").read_text("utf-8")
    assert f"This run ranks nothing. {equal}" in report
    for row in replayed.rows:
        assert row.decode_tps is not None
        assert row.decode_tps.value == pytest.approx(article.TPS[row.arm], abs=0.005)
        assert re.search(rf"{row.arm} .* {article.TPS[row.arm]:.2f} ", report), "every figure is shown"
    assert harness.verify(replayed.run.folder) == []


def test_the_article_keeps_its_order_and_what_it_does_not_tell_is_unknown(replayed: harness.Comparison) -> None:
    import article

    assert [load.arm for load in replayed.run.loads] == list(article.TPS)
    machine = replayed.header.machine
    assert (machine.cpu, machine.memory_bytes, machine.kernel) == (None, None, None)
    assert "| CPU    | –, – cores" in (replayed.run.folder / "report.md").read_text("utf-8")
    assert any(note.startswith("Reconstructed: each sample") for note in replayed.header.notes)


def test_the_published_article_is_the_one_that_the_script_writes(replayed: harness.Comparison) -> None:
    import article

    (folder,) = REPORTS.glob("*-article-replay")
    published = harness.read(folder)

    assert published.header.plan_digest == replayed.header.plan_digest
    assert published.header.notes == article.NOTES
    assert published.rows == replayed.rows
    assert (folder / "README.md").read_text("utf-8") == article.readme(published)


# ── a run that was moved ─────────────────────────────────────────────────────────────────────


def test_a_stopped_run_verifies_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        folder = harness.duel(options(model, tmp_path / "runs", arms="llama-cpp"), quiet).run.folder
    lines = (folder / record.LINES).read_text("utf-8").splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"kind":"load"' in line)
    (folder / record.LINES).write_text("".join(lines[:last]), "utf-8")
    assert not harness.write_report(folder).finished

    shutil.move(folder, tmp_path / "elsewhere" / folder.name)

    assert harness.verify(tmp_path / "elsewhere" / folder.name) == []


# ── the scripts ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_says_what_it_shows(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXPERIMENTS / f"{name}.py"), "--help"], capture_output=True, text=True, check=True
    )

    assert f"scripts/experiments/{name}.py" in done.stdout


def test_requests_taken_for_replicates_find_a_difference_in_any_decline(tmp_path: Path) -> None:
    import same_placement

    with (tmp_path / "requests.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("arm", "request", "second", "decode_tps", "invalid"))
        for place, arm in enumerate(("one", "the same", "again")):
            table.writerows((arm, n, 20 * place + n, 100 - 0.1 * (20 * place + n), "") for n in range(20))
        table.writerow(("again", 20, 60, 1.0, "CLOCK_MISMATCH"))

    first, second, third = same_placement.welch(tmp_path / "requests.csv")

    assert first.p is None
    assert second.p is not None
    assert second.p < 1e-6
    assert third.requests == 20, "an invalid request counts nowhere"
    assert third.ahead == pytest.approx(-0.04, abs=0.001)


def test_the_burner_ends_with_whoever_started_it() -> None:
    start = """if True:
        import os, subprocess, sys
        argv = [sys.executable, sys.argv[1], "600", str(os.getpid())]
        print(subprocess.Popen(argv, stdout=subprocess.DEVNULL).pid)"""
    argv = [sys.executable, "-c", start, str(EXPERIMENTS / "burn.py")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    deadline = time.monotonic() + 30
    while runs(int(done.stdout)):
        assert time.monotonic() < deadline, "the burner outlived the process that started it"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """A process that ended may wait for somebody to ask how."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ANSWER = [
    b"HTTP/1.1 200 OK\r\n\r\n",
    *(b'data: {"content":"%d","stop":false}\n\n' % number for number in range(5)),
    b'data: {"content":"","stop":true}\n\n',
]


def test_the_proxy_hands_on_every_byte_and_tells_what_it_added(tmp_path: Path) -> None:
    asked: list[bytes] = []

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            asked.append(connection.recv(65536))
            for piece in ANSWER:
                connection.sendall(piece)

    port, log = process.free_port(), tmp_path / "log.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        argv = [EXPERIMENTS / "slow_proxy.py", port, server.getsockname()[1], 1000, log]
        with subprocess.Popen([sys.executable, *map(str, argv)]) as proxy:
            try:
                with connection_to(port, proxy) as client:
                    client.sendall(b"POST /completion HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
                    got = b"".join(iter(lambda: client.recv(65536), b""))
                wait_for(log)
            finally:
                proxy.kill()

    assert got == b"".join(ANSWER)
    assert asked[0].endswith(b"Connection: close\r\n\r\n{}")
    assert '"tokens": 5' in log.read_text()


def connection_to(port: int, child: subprocess.Popen[bytes]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert child.poll() is None
            time.sleep(0.02)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_arms_behind_the_proxy_run_and_their_truth_is_published(model: Path, tmp_path: Path) -> None:
    import five_per_cent

    registry._load.cache_clear()
    try:
        with engines.fake(tmp_path, Script(itl_s=0.004)), five_per_cent.registered():
            runs = {
                name: harness.duel(options(model, tmp_path / name, arms=f"proxied,proxied@us={us}"), quiet)
                for name, us in (("different", 2000), ("equal", 0))
            }
    finally:
        registry._load.cache_clear()
    five_per_cent.publish_both(runs, tmp_path / "published")

    with (tmp_path / "published/proxy.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    drawn = runs["equal"].header.plan
    assert len(rows) == 2 * 2 * drawn.max_blocks * (drawn.warmups + drawn.requests)
    assert {row["tokens"] for row in rows} == {"24"}
    assert "the truth is" in (tmp_path / "published/README.md").read_text("utf-8")
    assert harness.verify(tmp_path / "published/different") == []


# ── what a served token costs ───────────────────────────────────────────────────────────────

BENCH = """#!/bin/sh
echo '{"n_gen": 128, "samples_ns": [64000000, 64000000, 64000000]}'
"""


def write_rounds(folder: Path, fixed_ms: float, entry_ns: float, rounds: int) -> None:
    """Differences on a line; of three rounds one lies above it and one below, by a microsecond."""
    with (folder / "rounds.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("arm", "engine", "shape", "vocabulary", "round", "bench_ms", "server_ms", "client_adds_ms"))
        for vocabulary in (20480, 65536, 151936):
            for number in range(rounds):
                cost_ms = fixed_ms + 1e-6 * entry_ns * vocabulary + (0.001, -0.001, 0.0)[number % 3]
                table.writerow(("llama-cpp", "b1", "tiny-dense", vocabulary, number, 2.0, 2.0 + cost_ms, 0.004))


def test_what_grows_with_the_vocabulary_is_told_from_what_does_not(tmp_path: Path) -> None:
    import served_token

    write_rounds(tmp_path, fixed_ms=0.05, entry_ns=1.5, rounds=3)

    said = served_token.result(tmp_path)

    assert re.search(r"costs llama-server 0\.050 ms \(0\.04\d to 0\.05\d\) whatever the vocabulary", said)
    assert re.search(
        r"and 1\.50 ns \(1\.4\d to 1\.5\d\) for each entry of it \(sampling\), which is 0\.228 ms at 151936", said
    )
    assert re.search(r"\| 65536 +\| 2\.000 +\| 2\.148 +\| 0\.148 \(0\.147 to 0\.149\) +\| 0\.004 ", said)


def test_a_cost_of_nothing_is_not_told_apart_from_zero(tmp_path: Path) -> None:
    import served_token

    write_rounds(tmp_path, fixed_ms=0.0, entry_ns=0.0, rounds=3)

    assert served_token.result(tmp_path).count(", not told apart from zero)") == 2


def test_a_larger_vocabulary_asks_and_answers_the_same(tmp_path: Path) -> None:
    import served_token

    found = []
    for vocabulary in served_token.VOCABULARIES[:2]:
        shape = dataclasses.replace(served_token.shape_of("tiny-dense", None), vocab=vocabulary)
        found.append(models.load(synth.write(tmp_path / "m.gguf", shape, header_only=True)))

    small, large = found
    assert (small.vocab, large.vocab) == served_token.VOCABULARIES[:2]
    assert small.answer_key is not None
    assert small.answer_key == large.answer_key
    assert small.layers == large.layers


def test_every_vocabulary_is_calibrated(tmp_path: Path) -> None:
    import served_token

    given = argparse.Namespace(
        shape="tiny-dense", size=None, arms="llama-cpp", llama_server=None, rounds=2, no_wait=True,
        vocabularies=(20480, 24576),
    )  # fmt: skip
    with engines.fake(tmp_path, Script()) as found:
        (found.bin / "llama-bench").write_text(BENCH)
        (found.bin / "llama-bench").chmod(0o755)
        served_token.measure(given, tmp_path / "out")

    with (tmp_path / "out/rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["vocabulary"], row["round"]) for row in rows] == [
        ("20480", "1"), ("20480", "2"), ("24576", "1"), ("24576", "2"),
    ]  # fmt: skip
    assert {float(row["bench_ms"]) for row in rows} == {0.5}
    assert "medians of 2 rounds" in served_token.result(tmp_path / "out")


# ── what watching costs ─────────────────────────────────────────────────────────────────────


def looks(mode: str, at_least: int) -> tuple[int, int]:
    """How often the machine is looked at before the end of a load, and in all."""
    import telemetry_cost

    seen: list[float] = []

    def read() -> telemetry.Reading:
        seen.append(time.perf_counter())
        return telemetry.Reading(at_s=seen[-1])

    deadline = time.monotonic() + 30
    with telemetry_cost.watched(mode), telemetry.watch(read=read) as watcher:
        while len(seen) < at_least:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if mode == telemetry_cost.WITHOUT:
            watcher._thread.join(30)
            assert not watcher._thread.is_alive()
        before = len(seen)
    watcher.summary()
    return before, len(seen)


def test_a_load_without_telemetry_is_looked_at_only_before_it_and_after_it() -> None:
    assert looks("without", at_least=1) == (1, 2)
    assert looks("with", at_least=2) >= (2, 3)


def test_loads_with_telemetry_and_without_take_turns(model: Path, tmp_path: Path) -> None:
    import telemetry_cost

    with engines.fake(tmp_path, Script(itl_s=0.002)):
        telemetry_cost.measure(options(model, tmp_path, arms="llama-cpp,ollama"), 2, tmp_path / "out")

    with (tmp_path / "out/loads.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["block"], row["arm"], row["telemetry"]) for row in rows] == [
        ("1", "llama-cpp", "with"), ("1", "llama-cpp", "without"), ("1", "ollama", "with"), ("1", "ollama", "without"),
        ("2", "llama-cpp", "without"), ("2", "llama-cpp", "with"), ("2", "ollama", "without"), ("2", "ollama", "with"),
    ]  # fmt: skip
    assert all(row["decode_tps"] for row in rows), [row["failure"] for row in rows]
    assert "- ollama: 2 blocks, no claim; with telemetry / without " in telemetry_cost.result(tmp_path / "out")


def line(block: int, mode: str, tps: float | None, share: str = "") -> dict[str, str]:
    speed = "" if tps is None else str(tps)
    return {
        "arm": "llama-cpp", "engine": "b1", "block": str(block), "telemetry": mode, "decode_tps": speed,
        "watch_share": share, "foreign_cores": "", "failure": "" if tps else "it crashed",
    }  # fmt: skip


def test_only_whole_blocks_are_judged_and_unknown_shares_are_unknown() -> None:
    import telemetry_cost

    lines = []
    for block in range(1, 8):
        lines.append(line(block, "with", 99.0 + 0.01 * (block % 2), share="0.004" if block < 7 else ""))
        lines.append(line(block, "without", None if block == 3 else 100.0, share="0.0"))

    (cost,) = telemetry_cost.costs(lines)

    assert cost.blocks == 7
    assert cost.contrast is not None
    assert (cost.contrast.n, cost.contrast.word) == (6, "SAME")
    assert cost.contrast.ratio == pytest.approx(0.99, abs=0.0002)
    assert cost.watch_share == pytest.approx(0.004)
    assert cost.foreign_cores is None
    (slower,) = telemetry_cost.costs(
        [line(n, m, 90.0 if m == "with" else 100.0) for n in range(6) for m in ("with", "without")]
    )
    assert slower.contrast is not None
    assert slower.contrast.word == "DIFFERENT"
    assert slower.watch_share is None


@pytest.mark.parametrize("name", ["served_token", "telemetry_cost"])
def test_results_of_nothing_are_a_usage_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, "--again", "--out", str(tmp_path)])

    with pytest.raises(SystemExit) as ended:
        program.main()

    assert ended.value.code == 2
    assert "measure first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "lines", "reason"),
    [
        ("served_token", 1, "holds no round, and a line needs two vocabularies"),
        ("served_token", 2, "holds one vocabulary, 20480, and a line needs two"),
        ("telemetry_cost", 1, "holds no load"),
    ],
)
def test_results_of_too_little_are_one_sentence_and_no_page(
    name: str, lines: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = importlib.import_module(name)
    if name == "served_token":
        write_rounds(tmp_path, fixed_ms=0.05, entry_ns=1.5, rounds=1)
        kept = (tmp_path / program.ROWS).read_text().splitlines(keepends=True)[:lines]
        (tmp_path / program.ROWS).write_text("".join(kept))
    else:
        (tmp_path / program.LOADS).write_text(",".join(program.COLUMNS) + "\n")
    monkeypatch.setattr(sys, "argv", [name, "--again", "--out", str(tmp_path)])

    with pytest.raises(SystemExit, match=f"{reason}.*; measure again$"):
        program.main()

    assert not (tmp_path / program.RESULT).exists()
