"""The workflow in docs/github-actions.md is one, asks for little, and every command in it is taken."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from harness import cli

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs/github-actions.md").read_text("utf-8")
yaml = pytest.importorskip("yaml")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    (text,) = blocks("yaml")
    found: dict[Any, Any] = yaml.safe_load(text)
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands(workflow: dict[Any, Any]) -> list[str]:
    lines = [line for step in steps(workflow) for line in step.get("run", "").splitlines()]
    lines += [line for block in blocks("sh") for line in block.splitlines()]
    return [part.strip() for line in lines for part in re.split(r"; (?:do )?", line)]


def test_the_workflow_has_jobs_of_steps_that_can_be_told_apart(workflow: dict[Any, Any]) -> None:
    assert workflow[True], "YAML 1.1 reads `on` as true, GitHub does not"
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert job["timeout-minutes"] <= 120
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        assert all("name" in step for step in job["steps"] if "run" in step)


def test_it_asks_for_no_more_than_reading(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())
    assert "pull_request" not in workflow[True], "forks would run on the self-hosted machine"
    checkouts = [step for step in steps(workflow) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_every_action_is_pinned(workflow: dict[Any, Any]) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+|[\w-]+/[\w-]+@[0-9a-f]{40}", each) for each in used), used


def test_what_was_measured_is_kept_also_when_the_gate_fails(workflow: dict[Any, Any]) -> None:
    for job in workflow["jobs"].values():
        (kept,) = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
        assert kept["if"] == "always()"
        assert "runs/" in kept["with"]["path"]


def test_every_command_of_ours_is_taken_by_the_parser(
    workflow: dict[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = [found[1] for line in commands(workflow) if (found := re.match(r"(?:\.venv/bin/)?llamaduel (.+)", line))]
    assert len(ours) >= 5
    refused = []
    for command in ours:
        words = shlex.split(command.partition(" > ")[0], comments=True)
        try:
            cli._parsed(words)
        except SystemExit:
            refused.append((command, capsys.readouterr().err))
    assert refused == []


def test_every_option_of_pytest_is_one(workflow: dict[Any, Any], pytestconfig: pytest.Config) -> None:
    lines = [line for line in commands(workflow) if " -m pytest " in line]
    assert lines
    for line in lines:
        words = shlex.split(line.partition(" -m pytest ")[2])
        for word in words:
            if word.startswith("--"):
                pytestconfig.getoption(word.partition("=")[0])  # ValueError, if there is none
            else:
                assert (ROOT / word).exists()


def test_every_script_and_its_options_are_there(workflow: dict[Any, Any]) -> None:
    for line in commands(workflow):
        with contextlib.suppress(ValueError):
            if found := re.match(r"python3 (scripts/\S+)(.*)", line):
                text = (ROOT / found[1]).read_text("utf-8")
                assert all(option in text for option in found[2].split()), line


def test_what_the_cache_is_keyed_by_is_there(workflow: dict[Any, Any]) -> None:
    (cache,) = [step for step in steps(workflow) if "actions/cache@" in step.get("uses", "")]
    patterns = re.findall(r"'([^']+)'", cache["with"]["key"])
    assert patterns
    assert all(list(ROOT.glob(pattern)) for pattern in patterns)


def test_the_exit_codes_are_those_of_the_command_line() -> None:
    told = {int(code): meaning for code, meaning in re.findall(r"^\| (\d) \| ([^|]+) \|", DOCUMENT, re.MULTILINE)}
    assert sorted(told) == [0, 1, 2, cli.RED, cli.REGRESSION]
    assert "RED" in told[cli.RED]
    assert "regression" in told[cli.REGRESSION]
