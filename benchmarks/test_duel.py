"""The main door: `pytest --benchmark-only` compares the arms and prints one table per metric, then the answer."""

from collections.abc import Callable

import pytest

from harness.pytest_plugin import CLOCK

pytestmark = pytest.mark.duel


@pytest.mark.benchmark(group="decode: seconds per token", timer=CLOCK)
def test_decode(replay: Callable[[str], None]) -> None:
    replay("decode")


@pytest.mark.benchmark(group="prefill: seconds for the whole prompt", timer=CLOCK)
def test_prefill(replay: Callable[[str], None]) -> None:
    replay("prefill")


@pytest.mark.benchmark(group="ttft: seconds to the first token", timer=CLOCK)
def test_ttft(replay: Callable[[str], None]) -> None:
    replay("ttft")
