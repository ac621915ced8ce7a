"""Long context: how deep an answer begins is a matter of the prompts, equal on all arms of one depth."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import short_run

from harness import walk
from harness.compare import Comparison
from harness.curve import curves
from harness.display import quiet
from harness.errors import UsageError
from harness.plan import Status
from harness.testing import engines
from harness.testing.script import Script

options = partial(short_run.options, arms="ollama,llama-cpp,llama-cpp,depth=1024/2k", out_tokens=16)


def prompt_tokens(comparison: Comparison, arm: str) -> set[int | None]:
    return {
        sample.usage.prompt_tokens
        for load in comparison.run.loads
        if load.stage == "block" and load.arm == arm
        for sample in comparison.run.samples_of(load)
        if sample.usage is not None
    }


def test_each_arm_answers_at_its_own_depth_in_one_context_that_holds_the_deepest(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        comparison = walk.duel(options(model, tmp_path / "runs"), quiet)

    rows = {row.arm: row for row in comparison.rows}
    assert {row.status.word for row in rows.values()} <= {Status.OK, Status.UNSTABLE}
    for arm, depth in (("llama-cpp", 0), ("llama-cpp,depth=1024", 1024), ("llama-cpp,depth=2048", 2048)):
        found = [tokens or 0 for tokens in prompt_tokens(comparison, arm)]
        assert min(found) > 0.4 * depth, (arm, found)  # the fake counts words
    assert prompt_tokens(comparison, "ollama") == prompt_tokens(comparison, "llama-cpp")
    contexts = {each.settings.context for each in comparison.header.contenders}
    assert len(contexts) == 1
    assert min(each or 0 for each in contexts) > 1.15 * 2048
    assert walk.verify(comparison.run.folder) == []


def test_a_depth_for_all_arms_is_an_option(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        comparison = walk.duel(options(model, tmp_path / "runs", arms="ollama,llama-cpp", depth=1024), quiet)

    for arm in ("ollama", "llama-cpp"):
        assert all((tokens or 0) > 400 for tokens in prompt_tokens(comparison, arm))
    assert "--depth=1024" in comparison.header.command


def test_depths_are_a_curve(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        comparison = walk.duel(options(model, tmp_path / "runs", arms="llama-cpp,depth=0/512/1k"), quiet)

    (curve,) = curves(comparison)
    assert curve.over == "depth"
    assert [point.label for point in curve.points] == ["0", "512", "1024"]
    assert (comparison.run.folder / "charts" / "depth-light.svg").is_file()


def test_a_context_that_cannot_hold_the_depth_is_told_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    given = options(model, tmp_path / "runs", arms="llama-cpp,llama-cpp,c=512,depth=1024")
    with pytest.raises(UsageError, match="does not hold its prompts of 1088; raise c"):
        walk.duel(given, quiet)
