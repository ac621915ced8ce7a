"""llama-bench beside a server arm, on the same binary and model, in milliseconds a token.

The two do not do the same work: a server samples, turns tokens into text and sends them. The
difference is therefore given in time per token, never as a ratio; the runs alternate, and llama-bench
starts at the depth that the prompt gives the server, for attention costs more the more there is to read.
What our own client adds is told beside it: the same requests by our clock, less the server's.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from typing_extensions import TypedDict

from harness.contract import Arm, Engine, ModelFile, Settings
from harness.errors import RunRefused, Unavailable, UsageError
from harness.load import run_load
from harness.measure import Sample
from harness.options import Options
from harness.plan import Status
from harness.probe import Progress, Watch, find_field, job_of, on_gpus, read_arm, require_weights, task
from harness.registry import backend

ROUNDS = 3
OUT_TOKENS = 128
MOST_CLIENT_MS = 0.02  # a token, that our client may add


class Bench(Protocol):
    """What a backend offers besides its contract, if its engine has a benchmark of its own."""

    def require_bench(self, engine: Engine, settings: Settings) -> Path:
        """Its program, before anything is loaded. Raises Unavailable if there is none for these settings."""
        ...

    def bench(
        self, engine: Engine, model: ModelFile, arm: Arm, settings: Settings, tokens: int, depth: int, log: Path
    ) -> tuple[float, ...]:
        """Seconds per token after `depth` others, one per repetition. Raises Unavailable or EngineFailed."""
        ...


class Calibrated(TypedDict):
    """A calibration as scripts read it: a value per round, medians over the rounds, and the most that is accepted."""

    arm: str
    engine: str
    depth: int
    out_tokens: int
    bench_ms: list[float]
    server_ms: list[float]
    difference_ms: float
    told_apart: bool
    client_adds_ms: list[float]
    client_adds_median_ms: float
    client_limit_ms: float
    client_accepted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Milliseconds a token, one value per round; the server's from its own clock."""

    arm: str
    engine: str
    depth: int  # tokens in the context before the first timed one, on both sides
    out_tokens: int
    bench_ms: tuple[float, ...]
    server_ms: tuple[float, ...]
    client_adds_ms: tuple[float, ...]  # by our clock, less the server's, over the same requests

    @property
    def differences_ms(self) -> tuple[float, ...]:
        """What a served token costs beyond a benched one, by round."""
        return tuple(a - b for a, b in zip(self.server_ms, self.bench_ms, strict=True))

    @property
    def difference_ms(self) -> float:
        return statistics.median(self.differences_ms)

    @property
    def told_apart(self) -> bool:
        """All rounds agree on which of the two is slower."""
        return not _straddles(self.differences_ms)

    @property
    def client_adds_median_ms(self) -> float:
        """What our client adds to a served token."""
        return statistics.median(self.client_adds_ms)

    @property
    def client_accepted(self) -> bool:
        return self.client_adds_median_ms <= MOST_CLIENT_MS

    def sentence(self) -> str:
        rounds = f"in {len(self.bench_ms)} rounds of {self.out_tokens} tokens after {self.depth}"
        costs = _cost(self.differences_ms, "llama-bench is the slower one")
        adds = _cost(self.client_adds_ms, "the server's clock is the slower one")
        verdict = "at most" if self.client_accepted else "too much, for at most"
        return (
            f"{self.arm} on {self.engine}: llama-bench {statistics.median(self.bench_ms):.3f} ms a token, "
            f"the server {statistics.median(self.server_ms):.3f} ms; a served token costs {costs} "
            f"({_range(self.differences_ms)} {rounds}). Our client adds {adds} "
            f"({_range(self.client_adds_ms)}; {verdict} {MOST_CLIENT_MS:g} ms is accepted)."
        )

    def to_json(self) -> Calibrated:
        return Calibrated(
            arm=self.arm,
            engine=self.engine,
            depth=self.depth,
            out_tokens=self.out_tokens,
            bench_ms=list(self.bench_ms),
            server_ms=list(self.server_ms),
            difference_ms=self.difference_ms,
            told_apart=self.told_apart,
            client_adds_ms=list(self.client_adds_ms),
            client_adds_median_ms=self.client_adds_median_ms,
            client_limit_ms=MOST_CLIENT_MS,
            client_accepted=self.client_accepted,
        )


def calibrate(options: Options, watch: Watch, rounds: int = ROUNDS) -> Calibration:
    """Alternate llama-bench and the server on one arm. Raises DuelError."""
    arms = options.arms if options.arms != Options().arms else "llama-cpp"
    field = find_field(dataclasses.replace(options, arms=arms), watch)
    require_weights(field.model)
    contender, *others = field.contenders
    if others:
        raise UsageError(
            f"calibrate takes one arm, and --arms names {len(field.contenders)}; name the one to calibrate"
        )
    if contender.status.word is not Status.OK or contender.engine is None:
        raise Unavailable(f"{contender.arm} cannot run: {contender.status.reason or contender.status.word}")
    arm, engine = read_arm(contender), contender.engine
    if not hasattr(backend(arm.backend), "require_bench"):
        raise Unavailable(f"{arm.backend} has no benchmark of its own; calibrate an arm of llama-cpp")
    bench = cast("Bench", backend(arm.backend))
    bench.require_bench(engine, contender.settings)
    bench_ms: list[float] = []
    server_ms: list[float] = []
    client_adds_ms: list[float] = []
    depth = 0
    with (
        tempfile.TemporaryDirectory() as name,
        on_gpus(field, options, Path(name) / "ballast.log", watch) as field,
    ):
        folder = Path(name)
        for round_ in range(rounds):
            tasks = [task(field, contender, index, OUT_TOKENS, options, warmup=index == 0) for index in range(3)]
            load, samples = run_load(
                dataclasses.replace(job_of(field, contender, "probe", tasks), label="server", attempt=round_),
                folder,
                {},
                lambda text: watch(Progress(f"server: {text}", lasting=False)),
                wait=not options.no_wait,
            )
            if load.failure is not None:
                raise RunRefused(f"{contender.arm} did not run: {load.failure.reason}")
            timed = timed_ms(samples)
            if not timed:
                why = next((each.invalid for each in samples if each.invalid), "the engine has no clock of its own")
                raise RunRefused(f"{contender.arm} gave no valid sample: {why}")
            server_ms.append(statistics.median(server for _, server in timed))
            client_adds_ms.append(statistics.median(client - server for client, server in timed))
            depth = max(each.prompt_tokens or 0 for each in samples)
            watch(Progress(f"llama-bench, round {round_ + 1} of {rounds}", lasting=False))
            log = folder / f"bench-{round_}.log"
            seconds = bench.bench(engine, field.model.file, arm, contender.settings, OUT_TOKENS, depth, log)
            if field.ballast is not None:
                field.ballast.require()
            bench_ms.append(1000 * statistics.median(seconds))
    return Calibration(
        arm=contender.arm,
        engine=str(engine),
        depth=depth,
        out_tokens=OUT_TOKENS,
        bench_ms=tuple(bench_ms),
        server_ms=tuple(server_ms),
        client_adds_ms=tuple(client_adds_ms),
    )


def timed_ms(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Milliseconds a token of each request that counts, by our clock and by the server's."""
    speeds = [(each.decode_tps, each.server_decode_tps) for each in samples if not each.warmup and not each.invalid]
    return [(1000 / client, 1000 / server) for client, server in speeds if client and server]


def _straddles(values: Sequence[float]) -> bool:
    return min(values) <= 0 <= max(values)


def _cost(values: Sequence[float], less: str) -> str:
    """The median with what it amounts to, where that is not a cost: `less` is said of values that are all below 0."""
    median = statistics.median(values)
    words = ", not told apart from zero" if _straddles(values) else f", {less}" if median < 0 else ""
    return f"{_signed(median)} ms{words}"


def _range(values: Sequence[float]) -> str:
    return f"{_signed(min(values))} to {_signed(max(values))}"


def _signed(milliseconds: float) -> str:
    return f"{round(milliseconds, 3) + 0.0:+.3f}".replace("-", "−")  # no nought below nought
