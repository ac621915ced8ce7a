"""What a token costs in llama-server beyond llama-bench, split into what is fixed and what grows with the vocabulary.

    .venv/bin/python scripts/experiments/served_token.py [--arms ARM] [--llama-server PATH] [--out FOLDER]
    .venv/bin/python scripts/experiments/served_token.py --again --out FOLDER

Models of one shape and several vocabularies are written, and each is calibrated on the same engine and placement
(`llamaduel calibrate`: both alternate, and the server is timed by its own clock). The vocabulary only adds entries
that never win, so prompts and answers are the same ones. A line through the differences gives a (HTTP, streaming,
scheduling; milliseconds a token) and b (sampling; nanoseconds an entry). With a GPU take --arms llama-cpp@ngl=99.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
from harness import shapes, synth
from harness.calibration import MOST_CLIENT_MS, ROUNDS, Calibration
from harness.errors import UsageError, nearest
from harness.sizes import parse_size
from harness.words import NONE, markdown_table

SHAPE = "tiny-dense"  # without experts, of which random tokens choose others than text does
ARM = "llama-cpp"
VOCABULARIES = (20480, 65536, 151936, 262144)  # the shipped tokenizer has a little less than the first
LEVEL = 0.95
ROWS, RESULT = "rounds.csv", "README.md"
COLUMNS = ("arm", "engine", "shape", "vocabulary", "round", "bench_ms", "server_ms", "client_adds_ms")


# ── measure ─────────────────────────────────────────────────────────────────────────────────


def shape_of(name: str, size: str | None) -> shapes.Shape:
    """A known shape, at this file size if one is given. Raises UsageError."""
    if name not in shapes.SHAPES:
        raise UsageError(f"there is no shape {name!r}; {nearest(name, shapes.SHAPES)}")
    return shapes.SHAPES[name] if size is None else shapes.scaled(shapes.SHAPES[name], parse_size(size))


def calibrate(shape: shapes.Shape, vocabulary: int, given: argparse.Namespace) -> Calibration:
    """A model of this shape and vocabulary, written, calibrated and removed. Raises DuelError."""
    with tempfile.TemporaryDirectory(prefix="served-token-") as folder, harness.show_progress() as watch:
        path = synth.write(Path(folder) / f"vocabulary-{vocabulary}.gguf", dataclasses.replace(shape, vocab=vocabulary))
        options = harness.Options(
            model=str(path), arms=given.arms, llama_server=given.llama_server, no_wait=given.no_wait
        )
        return harness.calibrate(options, watch, given.rounds)


def rows_of(shape: shapes.Shape, vocabulary: int, found: Calibration) -> Iterable[tuple[object, ...]]:
    values = zip(found.bench_ms, found.server_ms, found.client_adds_ms, strict=True)
    for number, (bench_ms, server_ms, client_adds_ms) in enumerate(values, 1):
        times = (f"{bench_ms:.6f}", f"{server_ms:.6f}", f"{client_adds_ms:.6f}")
        yield (found.arm, found.engine, shape.name, vocabulary, number, *times)


def measure(given: argparse.Namespace, out: Path) -> None:
    """A line for each round of each vocabulary goes into `out`, as soon as it is known."""
    shape = shape_of(given.shape, given.size)
    out.mkdir(parents=True, exist_ok=True)
    with (out / ROWS).open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for vocabulary in given.vocabularies:
            table.writerows(rows_of(shape, vocabulary, calibrate(shape, vocabulary, given)))
            file.flush()


# ── what was found ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Round:
    """Milliseconds a token: benched, served by the server's clock, and what our client adds to that."""

    vocabulary: int
    bench_ms: float
    server_ms: float
    client_adds_ms: float

    @property
    def difference_ms(self) -> float:
        return self.server_ms - self.bench_ms


@dataclass(frozen=True)
class Estimate:
    """A coefficient of the line with its interval, which is unknown where there are too few rounds."""

    value: float
    half_width: float | None

    def text(self, unit: str, digits: int) -> str:
        if self.half_width is None:
            return f"{self.value:.{digits}f} {unit} ({NONE})"
        low, high = self.value - self.half_width, self.value + self.half_width
        zero = "" if low > 0 or high < 0 else ", not told apart from zero"
        return f"{self.value:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f}{zero})".replace("-", "−")


def fit(rounds: Sequence[Round]) -> tuple[Estimate, Estimate]:
    """a in milliseconds a token, b in nanoseconds an entry: least squares over all rounds, t intervals."""
    from scipy.special import stdtrit
    from scipy.stats import linregress

    line = linregress([each.vocabulary for each in rounds], [each.difference_ms for each in rounds])
    freedom = len(rounds) - 2
    t = float(stdtrit(freedom, (1 + LEVEL) / 2)) if freedom else None
    return (
        Estimate(float(line.intercept), None if t is None else t * float(line.intercept_stderr)),
        Estimate(1e6 * float(line.slope), None if t is None else 1e6 * t * float(line.stderr)),
    )


def result(folder: Path) -> str:
    """What the rounds in this folder say, in Markdown. Raises UsageError where they say nothing."""
    with (folder / ROWS).open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    rounds = [
        Round(int(line["vocabulary"]), *(float(line[name]) for name in ("bench_ms", "server_ms", "client_adds_ms")))
        for line in lines
    ]
    sizes = sorted({each.vocabulary for each in rounds})
    if len(sizes) < 2:
        what = f"one vocabulary, {sizes[0]}" if sizes else "no round"
        raise UsageError(f"{folder / ROWS} holds {what}, and a line needs two vocabularies; measure again")
    cells = []
    for size in sizes:
        mine = [each for each in rounds if each.vocabulary == size]
        bench_ms, server_ms, difference_ms, adds_ms = (
            statistics.median(getattr(each, name) for each in mine)
            for name in ("bench_ms", "server_ms", "difference_ms", "client_adds_ms")
        )
        least, most = (pick(each.difference_ms for each in mine) for pick in (min, max))
        difference = f"{_ms(difference_ms)} ({_ms(least)} to {_ms(most)})"
        cells.append((size, _ms(bench_ms), _ms(server_ms), difference, _ms(adds_ms)))
    fixed, grows = fit(rounds)
    largest = sizes[-1]
    heads = ("vocabulary", "llama-bench ms", "server ms", "difference ms", "client adds ms")
    first = lines[0]
    adds = statistics.median(each.client_adds_ms for each in rounds)
    return f"""# What a served token costs beyond a benched one

A token costs llama-server {fixed.text("ms", 3)} whatever the vocabulary (HTTP, streaming, scheduling),
and {grows.text("ns", 2)} for each entry of it (sampling), which is {_ms(grows.value * largest / 1e6)} ms at {largest}.

{markdown_table(heads, cells)}

Milliseconds a token, medians of {len(rounds) // len(sizes)} rounds, the least and the most of the difference beside it;
{first["arm"]} on {first["engine"]}, models of the shape {first["shape"]}. Intervals of the two coefficients are 95 %,
over all rounds. Our client adds {_ms(adds)} ms by the median of all rounds; at most {MOST_CLIENT_MS:g} is accepted.
Computed from `{ROWS}` by `scripts/experiments/served_token.py`.
"""


def _ms(value: float) -> str:
    return f"{round(value, 3) + 0.0:.3f}".replace("-", "−")


# ── command line ────────────────────────────────────────────────────────────────────────────


def whole_numbers(text: str) -> tuple[int, ...]:
    found = tuple(sorted({int(word) for word in text.split(",")}))
    if len(found) < 2 or found[0] < 4096:
        raise argparse.ArgumentTypeError("takes two or more sizes of at least 4096, with commas between")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", metavar="PATH", help="with llama-bench beside it (as llamaduel finds it)")
    parser.add_argument("--arms", default=ARM, metavar="ARM", help=f"engine and placement ({ARM})")
    parser.add_argument("--shape", default=SHAPE, metavar="SHAPE", help=f"as `llamaduel synth --like` ({SHAPE})")
    parser.add_argument("--size", metavar="SIZE", help="scale the shape to about this file size, as in 800MiB")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"of each vocabulary ({ROUNDS})")
    parser.add_argument(
        "--vocabularies", type=whole_numbers, default=VOCABULARIES, metavar="N,N,…", help="entries of each model"
    )
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where every round and the result are written")
    parser.add_argument("--again", action="store_true", help="only the result, from the rounds in --out")
    given = parser.parse_args()
    if given.again and given.out is None:
        parser.error("--again reads the rounds of --out FOLDER; name it")
    if given.again and not (given.out / ROWS).is_file():
        parser.error(f"there is no {given.out / ROWS} to read again; measure first")
    if given.rounds < 1:
        parser.error("--rounds is 1 or more")
    with tempfile.TemporaryDirectory(prefix="served-token-") as scratch:
        out = given.out or Path(scratch)
        try:
            if not given.again:
                measure(given, out)
            text = result(out)
        except harness.DuelError as error:
            raise SystemExit(str(error)) from None
        (out / RESULT).write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    main()
