"""Whole runs, from options to report: real processes and real HTTP of engines that only pretend (S12, S16, X1)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import test_measure
from short_run import options

from harness import model as models
from harness import record, synth, terminal
from harness.display import quiet
from harness.measure import Sample
from harness.options import Options
from harness.preview import preview_run
from harness.probe import Progress
from harness.testing import engines
from harness.testing.script import VARIABLE, Script
from harness.walk import duel, read, verify
from truth.scripted import Moment, Runs, blocks_by_line, clocks, jitter, kill_at, lines_of, stamped
from truth.table import Attained

CARD = Script(devices=(("CUDA0", "a card", 8000),))


# ── S12: the article, replayed ──────────────────────────────────────────────────────────────


def test_the_articles_four_arms_are_two_before_anything_is_loaded(tmp_path: Path, attained: Attained) -> None:
    """40 layers with experts, as in the article; narrow ones, for a plan must not depend on this machine's memory."""
    narrow = dataclasses.replace(synth.SHAPES["qwen3.5-35b-a3b"], experts=16, experts_used=2, vocab=4096)
    starts = tmp_path / "starts"
    with engines.fake(tmp_path, dataclasses.replace(CARD, starts=str(starts))):
        header = synth.write(tmp_path / "article.gguf", narrow, header_only=True)
        arms = ",".join(f"llama-cpp@ncmoe={number}" for number in (48, 44, 40, 36))
        found = preview_run(Options(model=str(header), arms=arms), quiet)

    assert [(arm["status"], arm["alias_of"]) for arm in found["arms"]] == [
        ("OK", None),
        ("ALIAS", "llama-cpp@ncmoe=48"),
        ("ALIAS", "llama-cpp@ncmoe=48"),
        ("OK", None),
    ]
    assert not starts.exists(), "nothing was loaded"
    distinct = sum(arm["status"] == "OK" for arm in found["arms"])
    attained("S12", "N = 48, 44, 40, 36 of 40 expert layers, planned: distinct arms", distinct, "=", 2, "")


def test_the_article_run_without_merging_is_red_and_shows_its_loads_in_time_order(
    model: Path, tmp_path: Path, attained: Attained
) -> None:
    """Equal speed, but for a machine that halves it in the course of some ten loads."""
    layers = len(models.load(model).expert_layers)
    numbers = (layers + 2, layers + 1, layers, layers - 1)

    def decaying(moment: Moment, sample: Sample) -> Sample:
        loads = len(numbers) + 1  # the twin
        done = loads * (moment.job.block - 1) + moment.job.position
        bonus = math.log(2) * math.exp(-done / 6) if moment.job.stage == "block" else 0.0
        return stamped(sample, bonus + jitter(moment, 0.010, 0.015))

    arms = ",".join(f"llama-cpp@ncmoe={number}" for number in numbers)
    # By the scripted clock a load takes 24 s and more: time for six blocks, and not for eight.
    given = options(model, tmp_path / "runs", arms=arms, preset="confirm", budget=14.5, out_tokens=96)
    with engines.fake(tmp_path, CARD), clocks(decaying):
        found = duel(given, quiet, merge_aliases=False)

    assert found.judgement.n == 6
    assert [row.status.alias_of for row in found.rows] == [None] * 4
    different = sum(contrast.word == "DIFFERENT" for contrast in found.judgement.contrasts.values())
    attained("S12", "run without merging, ×2 decay: DIFFERENT", different, "=", 0, "")
    attained("S12", "run without merging, ×2 decay: RED", found.state.word == "RED", "=", 1, "")
    report = (found.run.folder / "report.md").read_text()
    _, table = report.split("## Every load in time order")
    minutes = [float(cell) for cell in re.findall(r"^\| ([\d.]+) +\| \d", table.split("\n## ")[0], re.MULTILINE)]
    assert minutes == sorted(minutes)
    attained("S12", "its loads in the report, in time order", len(minutes), "=", 6 * 5, "")
    assert "ranks nothing" in report


# ── S16: what does not count ────────────────────────────────────────────────────────────────

KILL = "kill"
FAULTS: tuple[tuple[str, str, dict[str, Any]], ...] = (  # arm, reason, what the engine does
    ("ollama", "25 tokens came, 24 were asked for", {"counts_off": 1}),
    ("llama-cpp", "scripted error", {"error_after": 3}),  # in a reply that began with 200
    ("llama-cpp", "5 prompt tokens came from a cache", {"cached": 5}),
    ("ollama", "the model was loaded again during the request", {"reload_s": 0.6}),
    ("llama-cpp", "CLOCK_MISMATCH: the engine claims", {"decode_time_factor": 3.0}),
    ("ollama", "CLOCK_MISMATCH: the engine claims", {"decode_time_factor": 1e-5}),  # above any ceiling
    ("llama-cpp", "SIGKILL", {KILL: "request 2"}),
)


class Saboteur:
    """Watches a run and spoils one load with each fault, so that its block is run again: at most two in a block."""

    def __init__(self, script: Path) -> None:
        self.script, self.pending = script, list(FAULTS)
        self.spoiled: Counter[str] = Counter()
        self.kills_at = ""
        self._write({})

    def _write(self, change: dict[str, Any]) -> None:
        self.kills_at = change.get(KILL, "")
        self.script.write_text(json.dumps({"itl_s": 0.004} | {key: change[key] for key in change if key != KILL}))

    def __call__(self, progress: Progress) -> None:
        found = re.fullmatch(r"(block \d+): (.*): (loading|request \d+) ?.*", progress.text)
        if found is None:
            return
        block, arm, doing = found.groups()
        if doing == "loading":
            self._spoil(block, arm)
        elif doing == self.kills_at:
            for engine in engines_of(os.getpid()):
                engine.kill()

    def _spoil(self, block: str, arm: str) -> None:
        if not self.pending and not self.spoiled[block]:
            raise KeyboardInterrupt  # the blocks of all faults are complete
        fault = next((each for each in self.pending if each[0] == arm), None) if self.spoiled[block] < 2 else None
        if fault is not None:
            self.pending.remove(fault)
            self.spoiled[block] += 1
        self._write(fault[2] if fault else {})


def engines_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if any(word.endswith("llama-server") for word in child.cmdline())]


def test_every_reason_not_to_count_is_listed_and_no_sample_is_lost(
    model: Path, tmp_path: Path, attained: Attained
) -> None:
    saboteur = Saboteur(tmp_path / "script.json")
    with engines.fake(tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(saboteur.script))
        found = duel(options(model, tmp_path / "runs", arms="llama-cpp,ollama", preset="confirm"), saboteur)
    assert not saboteur.pending

    drawn, report = terminal.table(found), (found.run.folder / "report.md").read_text()
    for told in (" ".join(drawn.split()), report.replace("\\", "")):
        missing = [reason for _, reason, _ in FAULTS if reason not in told]
        assert not missing, told
    attained("S16", "kinds of fault injected, and listed with their reason", len(FAULTS), "=", 7, "")
    assert found.twin is not None
    rows = [*found.rows, found.twin]
    measured = [sample for load in found.run.loads if load.stage == "block" for sample in found.run.samples_of(load)]
    lost = len(measured) - sum(row.samples for row in rows)
    attained("S16", f"n in the table, less than the {len(measured)} samples run by", lost, "=", 0, "")
    invalid = sum(sample.invalid is not None for sample in measured)
    assert sum(row.invalid_samples for row in rows) == sum(sum(row.invalid_reasons.values()) for row in rows) == invalid
    assert invalid >= 6 * found.header.plan.requests, "the load that was killed has none to show"
    assert verify(found.run.folder) == []


def test_being_slow_or_fast_never_decides_whether_a_sample_counts(attained: Attained) -> None:
    test_measure.test_being_slow_or_fast_never_decides_whether_a_sample_counts()  # fails at the first that changes
    attained("S16", "samples whose stamps and timings are scaled by 0.2 to 5: validity changes", 0, "=", 0, "")


# ── X1: from end to end ─────────────────────────────────────────────────────────────────────


def test_a_run_of_fake_engines_finds_what_is_true_and_survives_kill_9(
    model: Path, tmp_path: Path, attained: Attained
) -> None:
    """Ollama and llama.cpp as fast, and llama.cpp with its experts on the CPU at 0.8 times their speed."""
    starts = tmp_path / "starts"
    arms = "llama-cpp@ngl=99,ollama,llama-cpp@cpu-moe"
    with engines.fake(tmp_path, dataclasses.replace(CARD, starts=str(starts))):
        runs = Runs("fakes", tmp_path / "runs", model=model, arms=arms, seed=1)
        assert runs.begin("whole") == [0]
        started = len(starts.read_text().splitlines())
        whole = read(runs.find("whole"))
        blocks = blocks_by_line(whole.run)
        kill = kill_at(blocks.index(4) + 7, "half", blocks)
        assert runs.begin("killed", kills={"killed": kill}) == [-signal.SIGKILL]
        before = (runs.find("killed") / record.LINES).read_bytes()
        assert runs.resume("killed") == [0]
    killed = read(runs.find("killed"))

    words = {whole.row(arm).arm: whole.row(arm).contrast for arm in arms.split(",")[1:]}
    equal, slower = words.values()
    assert equal is not None
    assert slower is not None
    assert whole.judgement.twin is not None
    right = [equal.word == "SAME", slower.word == "DIFFERENT", whole.judgement.twin.contrast.word == "SAME"]
    attained("X1", "verdicts on two arms and the twin that are right", sum(right), "=", 3, "")
    attained("X1", "ratio found where 0.8 is true, off by", abs(slower.ratio / 0.8 - 1), "≤", 0.01)
    assert whole.state.word == "GREEN", whole.state.reasons
    n, k = whole.judgement.n, 3
    attained("X1", f"engine starts in n = {n} blocks of 3 arms and a twin", started - k, "=", n * (k + 1), "")
    assert (runs.find("killed") / record.LINES).read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    one, other = lines_of(whole.run), lines_of(killed.run)
    apart = sum(a != b for a, b in zip(one, other, strict=True))
    attained("X1", "kill -9 and resume: lines that differ in more than times", apart, "=", 0, "")
    assert verify(killed.run.folder) == []
