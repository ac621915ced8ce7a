"""`pytest --benchmark-only`: the plan runs once, interleaved; then every test replays what it measured.

pytest-benchmark receives one round per load, through a clock that advances by measured times, so
that its table, JSON, `--benchmark-save`, `-compare` and `-compare-fail` all work. Our comparison
table follows its own.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import harness

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from harness import Changes, Comparison

OPTIONS = pytest.StashKey["harness.Options"]()
DUEL = pytest.StashKey["harness.Comparison | Exception"]()
CHANGES = pytest.StashKey["harness.Changes | None"]()


class ReplayClock:
    """A timer in seconds that stands still until `advance`: pytest-benchmark times our measurements, not us."""

    __name__ = "replayed load times"

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


CLOCK = ReplayClock()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("llamaduel", "llamaduel: engines and placements compared")
    harness.declare(group.addoption, prefix="--duel-")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "duel: a benchmark that replays the run of the plan; needs --benchmark-only")


def _options(config: pytest.Config) -> harness.Options:
    """Read when they are needed: a wrong one must not stop the tests of somebody else's project."""
    if OPTIONS not in config.stash:
        given = {name[5:]: value for name, value in vars(config.option).items() if name.startswith("duel_")}
        config.stash[OPTIONS] = harness.collect(given, folder=config.rootpath, prefix="--duel-")
    return config.stash[OPTIONS]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --benchmark-only the tests of this repository are not even read: they need the test tools."""
    only = bool(config.getoption("benchmark_only", False))
    return True if only and collection_path == config.rootpath / "tests" else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per arm and metric, before anything runs; the ids are the arms' own names."""
    if metafunc.definition.get_closest_marker("duel") and "arm" in metafunc.fixturenames:
        try:
            arms = [str(arm) for arm in harness.parse_arms(_options(metafunc.config).arms)]
        except harness.DuelError as error:
            pytest.exit(harness.plain(error), returncode=error.exit_code)
        metafunc.parametrize("arm", arms, ids=arms)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --benchmark-only nothing else is listed, without it no engine is started."""
    only = bool(config.getoption("benchmark_only", False))
    dropped = [item for item in items if (item.get_closest_marker("duel") is None) == only]
    if only and any(item not in dropped for item in items) and _is_distributed(config):
        raise pytest.UsageError("benchmarks measure one at a time: run them without pytest-xdist (-n)")
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=dropped)


def _is_distributed(config: pytest.Config) -> bool:
    return bool(getattr(config.option, "numprocesses", None)) or hasattr(config, "workerinput")


@pytest.fixture(scope="session")
def duel(request: pytest.FixtureRequest) -> Comparison:
    """The comparison, measured at the first use. What stops it stops every benchmark, in one sentence."""
    stash = request.config.stash
    if DUEL not in stash:
        with _uncaptured(request.config), harness.show_progress() as watch:
            try:
                comparison = harness.duel(_options(request.config), watch)
                stash[CHANGES] = harness.changes_since_baseline(comparison)
                stash[DUEL] = comparison
            except (harness.DuelError, OSError) as error:
                stash[DUEL] = error
    result = stash[DUEL]
    if isinstance(result, Exception):
        code = result.exit_code if isinstance(result, harness.DuelError) else 1
        pytest.exit(f"nothing was compared: {harness.plain(result)}", returncode=code)
    if not result.finished:
        pytest.exit(f"stopped; go on with --duel-resume={shlex.quote(str(result.run.folder))}", returncode=130)
    return result


@contextlib.contextmanager
def _uncaptured(config: pytest.Config) -> Iterator[None]:
    """Progress reaches the terminal while a fixture runs."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        print(flush=True)  # noqa: T201 – leaves pytest's own line
        yield


@pytest.fixture
def replay(duel: Comparison, arm: str, benchmark: BenchmarkFixture, pytestconfig: pytest.Config) -> Any:
    """`replay("decode")` hands the arm's loads to pytest-benchmark, one round each."""

    def hand_over(metric: str) -> None:
        row = duel.row(arm)
        rounds = row.rounds(metric)
        problem = _problem(pytestconfig.stash.get(CHANGES, None), arm)
        if not rounds:
            assert problem is None, problem
            pytest.skip(row.why_not or f"no load of {arm} has a valid {metric} value")
        benchmark.extra_info.update(harness.row_json(row))
        waiting = iter(rounds)
        benchmark.pedantic(  # type: ignore[no-untyped-call]
            lambda: CLOCK.advance(next(waiting)), rounds=len(rounds), iterations=1
        )
        assert duel.state.word != "RED", "this run ranks nothing: " + "; ".join(duel.state.reasons)
        assert problem is None, problem

    return hand_over


def _problem(changes: Changes | None, arm: str) -> str | None:
    """Why this arm does not pass --duel-fail-on-regression, in a sentence: it lost speed, or nothing can be told."""
    if changes is None:
        return None
    if not changes.decided:
        return harness.undecided(changes)
    lost = (each for each in changes.changes if each.arm == arm and each.regression)
    return next(map(harness.change_sentence, lost), None)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    result = config.stash.get(DUEL, None)
    if result is None or isinstance(result, Exception):
        return
    terminalreporter.section("llamaduel")
    terminalreporter.write_line(harness.table(result))
    changes = config.stash.get(CHANGES, None)
    harness.append_summary(lambda line: print(line, file=sys.stderr), result, changes)  # noqa: T201
    if changes is not None:
        terminalreporter.section("llamaduel: since the baseline")
        terminalreporter.write_line(harness.changes_table(changes))
