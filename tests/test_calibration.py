"""llama-bench beside a server: what a served token costs, and what our client adds to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from short_run import options

import harness
from harness import calibration
from harness.calibration import Calibration
from harness.cli import main
from harness.contract import Usage
from harness.display import quiet
from harness.errors import RunRefused, Unavailable, UsageError
from harness.measure import Sample
from harness.testing import engines
from harness.testing.script import Script

BENCH = """#!/bin/sh
echo '{"n_gen": 128, "samples_ns": [512000000, 512000000, 512000000]}'
"""
BENCH_MS, SERVED_S = 4.0, 0.002


def calibrated(differences: tuple[float, ...], client: tuple[float, ...] = (0.001, 0.002, 0.003)) -> Calibration:
    return Calibration(
        arm="llama-cpp",
        engine="llama.cpp b1",
        depth=500,
        out_tokens=128,
        bench_ms=(BENCH_MS,) * len(differences),
        server_ms=tuple(BENCH_MS + each for each in differences),
        client_adds_ms=client,
    )


def fake_calibration(model: Path, folder: Path, script: Script, rounds: int = 1) -> Calibration:
    with engines.fake(folder, script) as found:
        (found.bin / "llama-bench").write_text(BENCH)
        (found.bin / "llama-bench").chmod(0o755)
        return harness.calibrate(options(model, folder, arms="llama-cpp"), quiet, rounds)


def test_a_build_without_llama_bench_is_told_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    told: list[str] = []
    with engines.fake(tmp_path, Script()), pytest.raises(Unavailable, match=r"no llama-bench beside .*engines install"):
        harness.calibrate(options(model, tmp_path, arms="llama-cpp"), lambda each: told.append(each.text))

    assert not [text for text in told if "loading" in text]


def test_two_arms_are_too_many(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script()), pytest.raises(UsageError, match="takes one arm, and --arms names 2"):
        harness.calibrate(options(model, tmp_path, arms="llama-cpp,llama-cpp@cpu"), quiet)


# ── in words ────────────────────────────────────────────────────────────────────────────────


def test_a_cost_that_every_round_shows_is_said_without_reserve() -> None:
    found = calibrated((0.03, 0.05, 0.04))

    assert found.told_apart
    assert "a served token costs +0.040 ms (+0.030 to +0.050 in 3 rounds of 128 tokens after 500)" in found.sentence()


@pytest.mark.parametrize("differences", [(-0.02, -0.01, 0.005), (0.0, 0.0, 0.0)])
def test_rounds_that_straddle_zero_are_not_told_apart_from_it(differences: tuple[float, ...]) -> None:
    found = calibrated(differences)

    assert not found.told_apart
    assert " ms, not told apart from zero (" in found.sentence().split("Our client")[0]


def test_a_cost_below_zero_is_put_into_words() -> None:
    found = calibrated((-0.03, -0.05, -0.04))

    assert found.told_apart
    assert "costs −0.040 ms, llama-bench is the slower one (−0.050 to −0.030 in" in found.sentence()


def test_what_the_client_adds_is_held_against_what_is_accepted() -> None:
    little, much = calibrated((0.1,) * 3), calibrated((0.1,) * 3, client=(0.02, 0.03, 0.04))

    assert (little.client_adds_median_ms, little.client_accepted) == (0.002, True)
    assert "Our client adds +0.002 ms (+0.001 to +0.003; at most 0.02 ms is accepted)" in little.sentence()
    assert not much.client_accepted
    assert "Our client adds +0.030 ms (+0.020 to +0.040; too much, for at most 0.02 ms" in much.sentence()


# ── measured ────────────────────────────────────────────────────────────────────────────────


def sample(client_s: float, server_s: float, **changes: Any) -> Sample:
    """Eleven tokens, ten of them in a window that two clocks see."""
    stamps = tuple(round(1e9 * (0.1 + client_s * step / 10)) for step in range(11))
    usage = Usage(generated_tokens=11, decode_s=server_s, prefill_s=0.1, prompt_tokens=5, cached_tokens=0)
    return Sample(prompt_id="p", max_tokens=11, sent_ns=0, chunk_ns=stamps, status=200, usage=usage, **changes)


def test_the_client_is_set_beside_the_server_over_the_requests_that_count() -> None:
    samples = [
        sample(0.100, 0.040, warmup=True),
        sample(0.101, 0.100),
        sample(0.104, 0.102),
        sample(0.500, 0.100),  # the clocks disagree
        sample(0.500, 0.500, fault="the wire broke"),
    ]

    timed = calibration.timed_ms(samples)

    assert timed == [pytest.approx((10.1, 10.0)), pytest.approx((10.4, 10.2))]


def test_every_round_sets_both_beside_each_other(model: Path, tmp_path: Path) -> None:
    found = fake_calibration(model, tmp_path, Script(itl_s=SERVED_S), rounds=2)

    assert found.bench_ms == (BENCH_MS, BENCH_MS)
    assert len(found.server_ms) == len(found.client_adds_ms) == 2
    assert min(found.server_ms) > 0


def test_a_server_without_valid_samples_is_refused_with_the_reason(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunRefused, match="gave no valid sample: CLOCK_MISMATCH"):
        fake_calibration(model, tmp_path, Script(itl_s=SERVED_S, decode_time_factor=0.5))


def test_json_holds_the_medians_beside_the_rounds(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = calibrated((-0.02, 0.03, 0.01))
    monkeypatch.setattr(harness, "calibrate", lambda *_: found, raising=False)

    assert main(["calibrate", str(model), "--json"]) == 0

    printed = json.loads(capsys.readouterr().out)
    assert printed["difference_ms"] == pytest.approx(0.01)
    assert printed["told_apart"] is False
    assert printed["client_adds_ms"] == [0.001, 0.002, 0.003]
    assert printed["client_adds_median_ms"] == 0.002
    assert (printed["client_limit_ms"], printed["client_accepted"]) == (calibration.MOST_CLIENT_MS, True)
