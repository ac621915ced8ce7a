"""What may be said about speeds: pure statistics, no file, no clock, no printing.

Every input is a natural log of a speed, one value per load, and every claim is about a ratio.
Two arms are compared by a paired t interval over blocks; drift, spread and a second copy of the
reference (the twin) decide whether the run may claim anything at all.

Functions on arrays work along the last axis, so that simulations with a known truth run the
very code that judges a real run; the records around them hold plain numbers for one run.
numpy and scipy are imported where they are used: they take longer to load than `--help` may.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float64]
    Flags: TypeAlias = NDArray[np.bool_]

Word: TypeAlias = Literal["SAME", "DIFFERENT", "INCONCLUSIVE", "NOT_COMPARABLE", "SCREENING"]
StateWord: TypeAlias = Literal["GREEN", "AMBER", "RED", "SCREENING"]

LOOKS = (6, 8, 10, 12, 16, 20, 24)  # blocks after which a run may stop
LOOK_ALPHA = 0.0125  # error at one look; over all looks false differences stay below 5 % (tests/truth)
CHANGE_ALPHA = 0.005  # of two runs; whichever two looks they ended at, false changes stay below 5 % (tests/truth)
FEWEST_BLOCKS = LOOKS[0]  # fewer: numbers without claims
MARGIN = 0.03  # differences within it count as the same
WIDEST = 0.05  # an interval wider than ± this is worth another look
POWER = 0.8
TWIN_ALPHA, TWIN_RED_ALPHA, TWIN_RED_OFF = 0.05, 0.01, 0.01
DRIFT_P = 0.025  # of each of the two tests
PERMUTATIONS = 399
WARM_UP_P = 0.01
CALM_MAD = 0.035  # below it the loads are calm enough for the narrow spread limit
NARROW, WIDE = 0.12, 0.30
MANY_BLOCKS = 16  # from here on two far loads are no sign of a lottery
MOST_BLOCKS = 1000  # beyond it no number of blocks is worth naming
FOR_ONE_ROW = "of this arm alone, not for comparing rows"


# ── levels ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Level:
    """Error allowed at one look at one contrast, and the words for what it amounts to in all."""

    alpha: float
    words: str


def level(looks: int = len(LOOKS), contrasts: int = 1, look_alpha: float = LOOK_ALPHA) -> Level:
    """The level of each of `contrasts` claims (Bonferroni), valid at any of the looks."""
    if looks < 1:
        return Level(0.05, "95 %, no claim")
    alpha = look_alpha / max(contrasts, 1)
    # The schedule holds 95 % by simulation; any other is only promised what the sum of its errors leaves.
    joint = 0.95 if look_alpha <= LOOK_ALPHA and looks <= len(LOOKS) else max(0.0, 1 - look_alpha * looks)
    claims = f" and {_count(contrasts, 'contrast')}" if contrasts else ""  # one arm alone has none
    return Level(alpha, f"joint {_percent(joint)} over {_count(looks, 'look')}{claims}")


def change_level(arms: int) -> Level:
    """The level of the change of each of `arms` arms from one run to another (Bonferroni).

    A repeated interval for two runs: each may have ended at any of its looks, so it holds for every pair of them.
    """
    return Level(
        CHANGE_ALPHA / max(arms, 1), f"joint 95 % over the looks of both runs and {_count(max(arms, 1), 'change')}"
    )


# ── two arms ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Paired:
    """A t decision, for any number of runs at once: arrays of one shape, in log units."""

    mean: Array
    half_width: Array  # of the interval at level 1 - alpha
    same_half_width: Array  # of the interval at level 1 - 2·alpha, which is the two one-sided tests
    same: Flags
    differs: Flags  # the interval leaves out equality

    @property
    def settled(self) -> Flags:
        """Decided, and narrow enough to be worth printing: a run stops where all its contrasts are."""
        import numpy as np

        return np.asarray((self.same | self.differs) & (self.half_width <= np.log1p(WIDEST)))


def paired(differences: Array, alpha: float, margin: float = MARGIN) -> Paired:
    """The decision about log ratios per block, shape (…, n) with n ≥ 2."""
    n = differences.shape[-1]
    mean = differences.mean(axis=-1)
    error = differences.std(axis=-1, ddof=1) / math.sqrt(n)
    return _decided(mean, _t(1 - alpha / 2, n - 1) * error, _t(1 - alpha, n - 1) * error, margin)


def changed(before: Array, after: Array, alpha: float, margin: float = MARGIN) -> Paired:
    """The same decision about the change of a mean log ratio between two runs, shapes (…, n) and (…, m).

    Nothing pairs blocks of two runs, and the runs may be differently noisy: Welch's t.
    """
    import numpy as np
    from scipy.special import stdtrit

    n, m = before.shape[-1], after.shape[-1]
    first, second = before.var(axis=-1, ddof=1) / n, after.var(axis=-1, ddof=1) / m
    noise = np.maximum(first + second, np.finfo(float).tiny)
    # Welch and Satterthwaite; two runs without any noise have freedom to spare.
    freedom = 1 / np.maximum((first / noise) ** 2 / (n - 1) + (second / noise) ** 2 / (m - 1), 1 / (n + m - 2))
    mean = after.mean(axis=-1) - before.mean(axis=-1)
    half, same_half = (stdtrit(freedom, p) * np.sqrt(noise) for p in (1 - alpha / 2, 1 - alpha))
    return _decided(mean, half, same_half, margin)


def _decided(mean: Array, half: Array, same_half: Array, margin: float) -> Paired:
    import numpy as np

    return Paired(
        mean=mean,
        half_width=half,
        same_half_width=same_half,
        same=np.abs(mean) + same_half < math.log1p(margin),
        differs=np.abs(mean) > half,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """How the first arm's speed stands to the second's. A bound that cannot be had is None.

    `low` and `high` hold at `level`. `attained_margin` is the smallest margin within which the two
    are shown to be the same. `detectable` is the smallest difference found in 4 of 5 such runs,
    `blocks_needed` the blocks in all with which one as large as the margin would be.
    """

    word: Word
    n: int
    ratio: float
    low: float | None = None
    high: float | None = None
    level: str
    margin: float
    half_width: float | None = None
    attained_margin: float | None = None
    detectable: float | None = None
    blocks_needed: int | None = None
    reason: str = ""

    @property
    def differs(self) -> bool:
        """The interval leaves out 1."""
        return self.low is not None and self.high is not None and (self.low > 1 or self.high < 1)

    @property
    def ahead(self) -> float | None:
        """How far the faster arm is ahead, where one is: 0.02 is 2 %. The first if `ratio` > 1."""
        claims = self.differs and self.word in ("SAME", "DIFFERENT") and not self.reason
        return max(self.ratio, 1 / self.ratio) - 1 if claims else None

    @property
    def settled(self) -> bool:
        return self.word in ("SAME", "DIFFERENT") and self.half_width is not None and self.half_width <= WIDEST

    def sentence(self, first: str, second: str) -> str:
        """The verdict in one line; never a ratio without its interval, unless that says nothing."""
        leader = first if self.ratio > 1 else second
        ratio = f"{self.ratio:.3g}×" if self.ratio <= 1000 else "over 1000×"
        if (bounds := telling(self.low, self.high)) is not None:
            digits = _digits(self.half_width)
            ratio = f"{_times(self.ratio, digits)}× ({_times(bounds[0], digits)}–{_times(bounds[1], digits)})"
        match self.word:
            case "SAME" if self.ahead is not None:
                head = f"SAME within ±{_percent(self.margin)}, {leader} ahead by {_percent(self.ahead)}"
            case "SAME":
                head = f"SAME within ±{_percent(self.margin)}"
            case "DIFFERENT":
                return f"DIFFERENT: {first} runs at {ratio} the speed of {second}"
            case "INCONCLUSIVE" if self.reason:
                head = f"not told apart: {self.reason}"
            case "INCONCLUSIVE" if self.attained_margin is not None:
                head = f"not told apart: within {_percent(self.attained_margin)}"
            case "NOT_COMPARABLE":
                head = f"not comparable: {self.reason}"
            case _:
                head = f"{_count(self.n, 'block')}, no claim"
        return f"{head}; {first} / {second} {ratio}"


def contrast(first: Sequence[float], second: Sequence[float], level: Level | float, margin: float = MARGIN) -> Contrast:
    """Compare log speeds of the same blocks. Fewer than 6 blocks give numbers and no claim."""
    import numpy as np

    if isinstance(level, float):
        level = Level(level, f"{100 * (1 - level):.4g} %")
    if len(first) != len(second) or not first:
        raise ValueError(f"a contrast takes the same blocks of both arms, not {len(first)} and {len(second)}")
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    n = len(differences)
    if n == 1:
        return Contrast(word="SCREENING", n=1, ratio=math.exp(differences[0]), level=level.words, margin=margin)
    test = paired(differences, level.alpha, margin)
    mean, half = float(test.mean), float(test.half_width)
    deviation = float(differences.std(ddof=1))
    word: Word = "SAME" if test.same else "DIFFERENT" if test.differs else "INCONCLUSIVE"
    needed = blocks_needed(deviation, level.alpha, margin)
    if word == "INCONCLUSIVE" and needed is not None:
        needed = max(needed, n + 2)  # this run has shown that n were not enough
    return Contrast(
        word=word if n >= FEWEST_BLOCKS else "SCREENING",
        n=n,
        ratio=math.exp(mean),
        low=_exp(mean - half),
        high=_exp(mean + half),
        level=level.words,
        margin=margin,
        half_width=_exp(half) - 1,
        attained_margin=_exp(abs(mean) + float(test.same_half_width)) - 1,
        detectable=_exp(_effort(level.alpha, n) * deviation / math.sqrt(n)) - 1,
        blocks_needed=needed,
    )


def blocks_needed(deviation: float, alpha: float, margin: float = MARGIN) -> int | None:
    """Blocks (whole pairs) that find a difference of `margin` in 4 of 5 runs; None beyond all reason."""
    for n in range(FEWEST_BLOCKS, MOST_BLOCKS + 1, 2):
        if _effort(alpha, n) * deviation / math.sqrt(n) <= math.log1p(margin):
            return n
    return None


def _effort(alpha: float, n: int) -> float:
    """Standard errors between nothing and a difference that is found with the wanted power."""
    return _t(1 - alpha / 2, n - 1) + _t(POWER, n - 1)


# ── one arm ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Interval:
    """A speed with its interval. `note` says what it must not be used for."""

    value: float
    low: float | None
    high: float | None
    n: int
    note: str = FOR_ONE_ROW


MOST_TELLING = 10.0  # between the ends of an interval that says anything


def telling(low: float | None, high: float | None) -> tuple[float, float] | None:
    """The ends of an interval that is worth printing: that of two loads may reach from nothing to everything."""
    return (low, high) if low is not None and high is not None and high <= MOST_TELLING * low else None


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Geometric mean of the loads of one arm (logs in, speed out), t interval over loads."""
    n = len(values)
    if not n:
        raise ValueError("an interval takes at least one load")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(math.exp(mean), None, None, 1)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    half = _t((1 + level) / 2, n - 1) * error
    return Interval(math.exp(mean), _exp(mean - half), _exp(mean + half), n)


@dataclass(frozen=True, slots=True)
class Variance:
    """Standard deviations of log speed: of requests inside a load, and of loads of an arm."""

    within_load: float | None
    between_loads: float | None


def variance(arms: Mapping[str, Sequence[Sequence[float]]]) -> Variance:
    """Components from log speeds of the valid requests, per arm and load.

    σw² is the mean variance inside loads; σb² what the load means vary beyond σw²/m, not below 0.
    Needs two requests in a load and two loads of an arm.
    """
    inside = [_variance(load) for loads in arms.values() for load in loads if len(load) > 1]
    within = math.fsum(inside) / len(inside) if inside else None
    between, freedom = 0.0, 0
    for loads in arms.values():
        filled = [load for load in loads if load]
        if len(filled) > 1:
            requests = math.fsum(1 / len(load) for load in filled) / len(filled)  # 1/m, where m varies
            total = _variance([math.fsum(load) / len(load) for load in filled])
            between += (len(filled) - 1) * (total - (within or 0.0) * requests)
            freedom += len(filled) - 1
    return Variance(
        within_load=None if within is None else math.sqrt(within),
        between_loads=None if within is None or not freedom else math.sqrt(max(0.0, between / freedom)),
    )


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Whether the first measured request of a load still lags. `residue` 0.02: it is 2 % slower."""

    residue: float
    p: float
    n: int

    @property
    def adequate(self) -> bool:
        return self.p >= WARM_UP_P


def warm_up(loads: Sequence[Sequence[float | None]]) -> WarmUp | None:
    """Compare the first request with the mean of the rest, over all loads of all arms.

    Log speeds in the order of the requests, None where one is invalid. None for fewer than 3 loads.
    """
    import numpy as np

    lags = []
    for first, *rest in (load for load in loads if load):
        valid = [value for value in rest if value is not None]
        if first is not None and valid:
            lags.append(math.fsum(valid) / len(valid) - first)
    if len(lags) < 3:
        return None
    mean, p = slow_start(np.asarray(lags))
    return WarmUp(residue=-math.expm1(-float(mean)), p=float(p), n=len(lags))


def slow_start(lags: Array) -> tuple[Array, Array]:
    """Mean lag of first requests behind the rest of their load, and its one-sided p; shape (…, loads)."""
    n = lags.shape[-1]
    mean = lags.mean(axis=-1)
    return mean, _t_above(mean, lags.std(axis=-1, ddof=1) / math.sqrt(n), n - 1)


# ── is the run sound ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Trend:
    """Drift tests for any number of runs at once; slopes in log units a minute."""

    slope: Array
    half_width: Array  # 95 %
    p_slope: Array
    p_steps: Array

    @property
    def flagged(self) -> Flags:
        return (self.p_slope < DRIFT_P) | (self.p_steps < DRIFT_P)


def trend(values: Array, minutes: Array, seed: int) -> Trend:
    """Does speed change with time? Log values and their times, shape (…, arms, blocks).

    Each arm is centred on its mean, so that all loads serve as one series. Two tests: a straight
    line (t with N - arms - 1 degrees of freedom), and steps (largest cumulative sum against
    permutations of the series, whose order `seed` fixes).
    """
    import numpy as np

    arms, blocks = values.shape[-2:]
    loads = arms * blocks
    centred = (values - values.mean(axis=-1, keepdims=True)).reshape(*values.shape[:-2], loads)
    times = np.broadcast_to(minutes, values.shape).reshape(centred.shape)
    order = np.argsort(times, axis=-1, kind="stable")
    series, times = np.take_along_axis(centred, order, -1), np.take_along_axis(times, order, -1)

    times = times - times.mean(axis=-1, keepdims=True)
    moment = (times**2).sum(axis=-1)
    slope = (times * series).sum(axis=-1) / moment
    freedom = loads - arms - 1
    left = ((series - slope[..., None] * times) ** 2).sum(axis=-1)
    error = np.sqrt(left / freedom / moment)

    def steps(run: Array) -> Array:
        return np.asarray(np.abs(np.cumsum(run, axis=-1)).max(axis=-1))

    seen = steps(series) * (1 - 1e-12)  # the same sums in another order are no smaller
    # RandomState, because its stream is frozen: a verdict must not change with the version of numpy.
    random = np.random.RandomState(seed % 2**32)
    beaten = np.ones(series.shape[:-1])
    for _ in range(PERMUTATIONS):
        beaten += steps(series[..., random.permutation(loads)]) >= seen
    return Trend(
        slope=slope,
        half_width=_t(0.975, freedom) * error,
        p_slope=2 * _t_above(np.abs(slope), error, freedom),
        p_steps=beaten / (PERMUTATIONS + 1),
    )


@dataclass(frozen=True, slots=True)
class Drift:
    """Change of speed with time over all loads. `per_minute` 0.01 is 1 % faster each minute."""

    per_minute: float
    half_width: float
    p_slope: float
    p_steps: float
    block_minutes: float

    @property
    def flagged(self) -> bool:
        return self.p_slope < DRIFT_P or self.p_steps < DRIFT_P

    @property
    def per_block(self) -> float:
        return self.per_minute * self.block_minutes


def drift(values: Sequence[Sequence[float]], minutes: Sequence[Sequence[float]], seed: int) -> Drift | None:
    """Drift over the loads of all arms: log values and start times, per arm and block.

    None where there are too few loads to tell, or no time passed.
    """
    import numpy as np

    logs, times = np.asarray(values, dtype=float), np.asarray(minutes, dtype=float)
    if logs.ndim != 2 or logs.shape[1] < 2 or logs.size - logs.shape[0] < 2 or not np.ptp(times):
        return None
    tests = trend(logs, times, seed)
    starts = np.sort(times.min(axis=0))
    return Drift(
        per_minute=float(tests.slope),
        half_width=float(tests.half_width),
        p_slope=float(tests.p_slope),
        p_steps=float(tests.p_steps),
        block_minutes=float(np.median(np.diff(starts))),  # the median, because a resumed run has a gap
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """Loads far off the median of their arm; `needed` of them make an arm UNSTABLE."""

    limit: float  # 0.12 is 12 %
    mad: float  # 1.4826·MAD of all loads about their arm's mean, log units
    far: Mapping[str, int]
    needed: int

    @property
    def unstable(self) -> tuple[str, ...]:
        return tuple(label for label, count in self.far.items() if count >= self.needed)


def far_needed(blocks: int) -> int:
    """Two, and three of many: with heavy tails the second comes by chance in 15 % of honest arms of 24 loads."""
    return 2 if blocks < MANY_BLOCKS else 3


def far_loads(values: Array) -> tuple[Array, Array, Array]:
    """Loads beyond the limit per arm, the limit, and the robust spread; shape (…, arms, blocks).

    A fixed limit would call most honest sessions on a restless machine unstable, so it widens
    with the spread of all loads.
    """
    import numpy as np

    off = values - np.median(values, axis=-1, keepdims=True)
    # About the mean, for about their median few loads look calmer than they are.
    centred = (values - values.mean(axis=-1, keepdims=True)).reshape(*values.shape[:-2], -1)
    middle = np.median(centred, axis=-1, keepdims=True)
    mad = 1.4826 * np.median(np.abs(centred - middle), axis=-1)
    limit = np.where(mad <= CALM_MAD, NARROW, WIDE)
    return (np.abs(off) > np.log1p(limit)[..., None, None]).sum(axis=-1), limit, mad


def spread(values: Mapping[str, Sequence[float]]) -> Spread:
    """Log values per arm, the same blocks of each."""
    import numpy as np

    logs = np.asarray(list(values.values()), dtype=float)
    far, limit, mad = far_loads(logs)
    counts = {label: int(count) for label, count in zip(values, far, strict=True)}
    return Spread(float(limit), float(mad), counts, far_needed(logs.shape[-1]))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The ratio when any one mirrored pair of blocks is left out: from `low` to `high`."""

    low: float
    high: float

    @property
    def range(self) -> float:
        return self.high / self.low - 1


def without_one_pair(differences: Array) -> tuple[Array, Array]:
    """Smallest and largest mean log ratio with one pair of blocks left out; shape (…, n), n even, n ≥ 4."""
    n = differences.shape[-1]
    pairs = differences.reshape(*differences.shape[:-1], n // 2, 2).sum(axis=-1)
    left = (differences.sum(axis=-1)[..., None] - pairs) / (n - 2)
    return left.min(axis=-1), left.max(axis=-1)


def leave_out(first: Sequence[float], second: Sequence[float]) -> LeftOut | None:
    """None for fewer than two whole pairs."""
    import numpy as np

    n = len(first) // 2 * 2
    if n < 4:
        return None
    low, high = without_one_pair(np.asarray(first[:n], dtype=float) - np.asarray(second[:n], dtype=float))
    return LeftOut(math.exp(low), math.exp(high))


@dataclass(frozen=True, slots=True)
class Twin:
    """The second copy of the reference against the first: the noise floor of the run."""

    contrast: Contrast  # at its own 95 %
    low: float | None  # of the 99 % interval
    high: float | None
    biased: bool


def twin(copy: Sequence[float], reference: Sequence[float], margin: float = MARGIN) -> Twin:
    """Log speeds of the same blocks of both copies."""
    import numpy as np

    test = contrast(copy, reference, TWIN_ALPHA, margin)
    if test.n < 2:
        return Twin(test, None, None, biased=False)
    differences = np.asarray(copy, dtype=float) - np.asarray(reference, dtype=float)
    wide = paired(differences, TWIN_RED_ALPHA, margin)
    mean, half = float(wide.mean), float(wide.half_width)
    return Twin(test, _exp(mean - half), _exp(mean + half), biased=bool(biased(differences)))


def biased(differences: Array) -> Flags:
    """Two copies of one arm that cannot be one arm: 99 % interval beyond equality, and off by over 1 %."""
    import numpy as np

    test = paired(differences, TWIN_RED_ALPHA)
    return test.differs & (np.abs(test.mean) > math.log1p(TWIN_RED_OFF))


# ── the run as a whole ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class State:
    """GREEN and AMBER rank; RED and SCREENING do not. Each reason is a sentence."""

    word: StateWord
    reasons: tuple[str, ...] = ()

    @property
    def ranks(self) -> bool:
        return self.word in ("GREEN", "AMBER")


def state(
    n: int,
    *,
    twin: Twin | None,
    drift: Drift | None = None,
    unstable: Mapping[str, str] | None = None,
    left_out: Mapping[str, LeftOut | None] | None = None,
    aliases: Mapping[str, Contrast] | None = None,
    disturbed: int = 0,
    doubts: Sequence[str] = (),
    margin: float = MARGIN,
) -> State:
    """What a run of `n` blocks may claim.

    `unstable`: arms of a contrast that are, and why. `left_out` and `aliases` by the name of the
    pair; aliases are arms known to be one placement. `disturbed`: loads kept although other
    programs were busy; `doubts`: sentences on what else should not be.
    """
    red = [f"{name} is unstable: {why}." for name, why in (unstable or {}).items()]
    amber: list[str] = []
    torn = False  # equal things too far apart for any noise: one block is enough to see it
    if twin is not None and twin.biased and twin.low is not None and twin.high is not None:
        off = f"{twin.contrast.ratio:.3f}× (99 %: {twin.low:.3f}–{twin.high:.3f})"
        red.append(f"Two copies of the reference differ, {off}, so something beside the arms decides.")
    elif twin is None:
        amber.append("No second copy of the reference ran, so the noise floor is not known.")
    elif twin.contrast.word not in ("SAME", "SCREENING"):
        attained = _beside(twin.contrast.attained_margin or 0.0, margin)
        amber.append(f"Two copies of the reference are the same only within {attained}, not {_percent(margin)}.")
    by_chance = n < FEWEST_BLOCKS and drift is not None and drift.p_slope >= DRIFT_P  # a line through two blocks
    if drift is not None and abs(drift.per_block) > margin and not by_chance:
        red.append(
            f"Speed drifts by {_signed(drift.per_block)} during one block ({_signed(drift.per_minute)} a minute), "
            f"more than the margin of {_percent(margin)}."
        )
    elif drift is not None and drift.p_slope < DRIFT_P:
        amber.append(
            f"Speed drifts by {_signed(drift.per_minute)} ± {_percent(drift.half_width)} a minute "
            f"(p = {drift.p_slope:.2g})."
        )
    elif drift is not None and drift.flagged:
        amber.append(f"Speed changes over the run in more than noise (cumulative sum, p = {drift.p_steps:.2g}).")
    for name, pair in (aliases or {}).items():
        apart = abs(math.log(pair.ratio))
        beyond_noise = apart > math.log1p(WIDE)
        torn |= beyond_noise
        if pair.word == "DIFFERENT" or beyond_noise:
            red.append(f"{name} are one placement, and yet differ by {_percent(math.expm1(apart))}.")
    for name, out in (left_out or {}).items():
        if out is not None and out.range > margin:
            amber.append(f"{name} moves by {_percent(out.range)} when one pair of blocks is left out.")
    amber += doubts
    if disturbed:
        amber.append(f"{_count(disturbed, 'load')} ran while other programs were busy.")
    if n < FEWEST_BLOCKS and not torn:
        few = f"{_count(n, 'block')}: fewer than {FEWEST_BLOCKS}, so there are numbers and no claims."
        return State("SCREENING", (few, *red, *amber))
    if red:
        return State("RED", (*red, *amber))
    if amber:
        return State("AMBER", tuple(amber))
    return State("GREEN", ("No drift, and two copies of the reference are the same within the margin.",))


def temper(verdict: Contrast, state: State, twin: Twin | None) -> Contrast:
    """The verdict as the state of its run allows it.

    RED takes every claim back. In AMBER nobody is ahead by less than the noise floor, the
    half-width of the twin's interval.
    """
    if state.word == "RED":
        return dataclasses.replace(verdict, word="NOT_COMPARABLE", reason="the run is RED and ranks nothing")
    floor = twin.contrast.half_width if twin is not None else None
    if state.word != "AMBER" or floor is None or verdict.ahead is None or verdict.ahead >= floor:
        return verdict
    return dataclasses.replace(
        verdict,
        word="INCONCLUSIVE" if verdict.word == "DIFFERENT" else verdict.word,
        reason=f"less than the noise floor of ±{_percent(floor)} that the second copy of the reference shows",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All that a run may say, ready to be printed. Contrasts are already tempered by the state."""

    n: int
    state: State
    contrasts: Mapping[tuple[str, str], Contrast]
    left_out: Mapping[tuple[str, str], LeftOut | None]
    twin: Twin | None
    drift: Drift | None
    spread: Spread | None


def judge(
    values: Mapping[str, Sequence[float]],
    minutes: Mapping[str, Sequence[float]],
    contrasts: Sequence[tuple[str, str]],
    *,
    level: Level,
    seed: int,
    reference: str | None = None,
    twin_label: str | None = None,
    margin: float = MARGIN,
    unstable: Mapping[str, str] | None = None,
    aliases: Sequence[tuple[str, str]] = (),
    disturbed: int = 0,
    doubts: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> Judgement:
    """Judge a run from log speeds and start times, per arm and block; all arms have the same blocks.

    A contrast with an arm that has no values is left out: its row has a reason already.
    `unstable` adds arms that are so for another cause than spread; `names` are for the reasons.
    """
    shown = {label: (names or {}).get(label, label) for label in values}
    n = len(next(iter(values.values()), ()))
    if not n:
        none = State("SCREENING", ("No complete block, so there is nothing to compare.",))
        return Judgement(n=0, state=none, contrasts={}, left_out={}, twin=None, drift=None, spread=None)
    pairs = [pair for pair in contrasts if pair[0] in values and pair[1] in values]
    raw = {(a, b): contrast(values[a], values[b], level, margin) for a, b in pairs}
    out = {(a, b): leave_out(values[a], values[b]) for a, b in pairs}
    floor = None
    if twin_label is not None and reference is not None and {twin_label, reference} <= values.keys():
        floor = twin(values[twin_label], values[reference], margin)
    moving = drift(list(values.values()), [minutes[label] for label in values], seed)
    scatter = spread(values)
    compared = {label for pair in pairs for label in pair} | {reference, twin_label}
    loose = {
        shown[label]: f"{scatter.far[label]} of {n} loads are more than {_percent(scatter.limit)} off its median"
        for label in scatter.unstable
        if label in compared
    }
    loose |= {shown[label]: why for label, why in (unstable or {}).items() if label in compared and label in shown}
    verdict = state(
        n,
        twin=floor,
        drift=moving,
        unstable=loose,
        left_out={f"{shown[a]} / {shown[b]}": found for (a, b), found in out.items()},
        aliases={
            f"{shown[a]} and {shown[b]}": contrast(values[a], values[b], level, margin)
            for a, b in aliases
            if a in values and b in values
        },
        disturbed=disturbed,
        doubts=doubts,
        margin=margin,
    )
    return Judgement(
        n=n,
        state=verdict,
        contrasts={pair: temper(found, verdict, floor) for pair, found in raw.items()},
        left_out=out,
        twin=floor,
        drift=moving,
        spread=scatter,
    )


# ── small things ────────────────────────────────────────────────────────────────────────────


def _t(p: float, freedom: int) -> float:
    """Quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, p))


def _t_above(estimate: Array, error: Array, freedom: int) -> Array:
    """Chance of a t above estimate/error. No estimate over no error is no evidence: 1/2."""
    import numpy as np
    from scipy.special import stdtr

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(estimate == 0, 0.0, estimate / error)
    found: Any = stdtr(freedom, -ratio)
    return np.asarray(found, dtype=float)


def _exp(log: float) -> float:
    """exp without an overflow error: two blocks at a strict level may span any ratio."""
    return math.exp(min(log, 700.0))


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _percent(share: float) -> str:
    """0.031 → "3.1 %"; digits as far as they mean something."""
    value = 100 * share
    digits = 0 if abs(value) >= 20 else 1 if abs(value) >= 0.95 else 2
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


def _beside(share: float, other: float) -> str:
    """With as many digits as tell it from the other: "3.04 %" beside "3 %"."""
    texts = (_percent(share), *(f"{100 * share:.{digits}f} %" for digits in (2, 3, 4)))
    return next((text for text in texts if text != _percent(other)), texts[-1])


def _signed(share: float) -> str:
    return ("+" if share > 0 else "−" if share < 0 else "") + _percent(abs(share))


def _digits(half_width: float | None) -> int:
    """Decimals that an interval of this width supports: two figures of its width, two at least."""
    if not half_width:
        return 3
    return min(4, max(2, 1 - math.floor(math.log10(half_width))))


def _times(ratio: float, digits: int) -> str:
    if ratio > 1000:
        return "over 1000"
    return "0" if ratio < 0.001 else f"{ratio:.{digits}f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
