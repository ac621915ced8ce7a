"""llama-bench beside a server arm, on the same binary and model, in milliseconds a token.

The two do not do the same work: a server samples, turns tokens into text and sends them. The
difference is therefore given in time per token, never as a ratio; the runs alternate, and llama-bench
starts at the depth that the prompt gives the server, for attention costs more the more there is to read.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from harness.contract import Arm, Engine, ModelFile, Settings
from harness.errors import RunRefused, Unavailable
from harness.load import run_load
from harness.options import Options
from harness.plan import Status
from harness.probe import Progress, Watch, find_field, job_of, read_arm, require_weights, task
from harness.registry import backend

ROUNDS = 3
OUT_TOKENS = 128


class Bench(Protocol):
    """What a backend offers besides its contract, if its engine has a benchmark of its own."""

    def bench(
        self, engine: Engine, model: ModelFile, arm: Arm, settings: Settings, tokens: int, depth: int, log: Path
    ) -> tuple[float, ...]:
        """Seconds per token after `depth` others, one per repetition. Raises Unavailable or EngineFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Milliseconds a token, one value per round; the server's from its own clock."""

    arm: str
    engine: str
    depth: int  # tokens in the context before the first timed one, on both sides
    out_tokens: int
    bench_ms: tuple[float, ...]
    server_ms: tuple[float, ...]

    @property
    def difference_ms(self) -> float:
        """What a served token costs beyond a benched one."""
        return statistics.median(a - b for a, b in zip(self.server_ms, self.bench_ms, strict=True))

    def sentence(self) -> str:
        low, high = _range(a - b for a, b in zip(self.server_ms, self.bench_ms, strict=True))
        return (
            f"{self.arm} on {self.engine}: llama-bench {statistics.median(self.bench_ms):.3f} ms a token, "
            f"the server {statistics.median(self.server_ms):.3f} ms; a served token costs {self.difference_ms:+.3f} ms "
            f"({low:+.3f} to {high:+.3f} in {len(self.bench_ms)} rounds of {self.out_tokens} tokens after {self.depth})"
        )


def calibrate(options: Options, watch: Watch) -> Calibration:
    """Alternate llama-bench and the server on one arm. Raises DuelError."""
    arms = options.arms if options.arms != Options().arms else "llama-cpp"
    field = find_field(dataclasses.replace(options, arms=arms), watch)
    require_weights(field.model)
    contender = field.contenders[0]
    if contender.status.word is not Status.OK or contender.engine is None:
        raise Unavailable(f"{contender.arm} cannot run: {contender.status.reason or contender.status.word}")
    arm, engine = read_arm(contender), contender.engine
    if not hasattr(backend(arm.backend), "bench"):
        raise Unavailable(f"{arm.backend} has no benchmark of its own; calibrate an arm of llama-cpp")
    bench = cast("Bench", backend(arm.backend))
    bench_ms: list[float] = []
    server_ms: list[float] = []
    depth = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for round_ in range(ROUNDS):
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
            rates = [each.server_decode_tps for each in samples if not each.warmup and each.server_decode_tps]
            if not rates:
                raise RunRefused(f"{contender.arm} gave no valid sample: {samples[-1].invalid}")
            server_ms.append(1000 / statistics.median(rates))
            depth = max(each.prompt_tokens or 0 for each in samples)
            watch(Progress(f"llama-bench, round {round_ + 1} of {ROUNDS}", lasting=False))
            log = folder / f"bench-{round_}.log"
            seconds = bench.bench(engine, field.model.file, arm, contender.settings, OUT_TOKENS, depth, log)
            bench_ms.append(1000 * statistics.median(seconds))
    return Calibration(
        arm=contender.arm,
        engine=str(engine),
        depth=depth,
        out_tokens=OUT_TOKENS,
        bench_ms=tuple(bench_ms),
        server_ms=tuple(server_ms),
    )


def _range(values: object) -> tuple[float, float]:
    found = list(cast("list[float]", values))
    return min(found), max(found)
