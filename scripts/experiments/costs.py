"""What the tool itself costs: the time of `--help`, of a report from 10 000 samples, and the megabytes it installs.

    .venv/bin/python scripts/experiments/costs.py

A run without an engine is written first: seven arms, 24 blocks, 60 requests a load, answers of 128 tokens. Times are
the least of a few, in processes of their own, imports counted. The engines and the test tools are not in the size.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import played_run  # noqa: E402

from harness import record  # noqa: E402
from harness.record import SampleLine  # noqa: E402

ARMS = ("llama-cpp", "ollama", *(f"llama-cpp@ncmoe={n}" for n in (0, 8, 16, 24, 32)))
BLOCKS, REQUESTS, TOKENS, TIMES = 24, 60, 128, 5
MB = 10**6
CALL = "import sys; from harness.cli import main; sys.exit(main())"


def write_run(folder: Path) -> int:
    """A run that nobody measured; how many samples it has."""
    header = played_run.a_header(
        *map(played_run.contender, ARMS), max_blocks=BLOCKS, requests=REQUESTS, out_tokens=TOKENS
    )
    run = played_run.played(header, {arm: 50.0 - 3 * number for number, arm in enumerate(ARMS)}, noise=0.05)
    record.create(folder, header)
    for load in run.loads:
        for sample in run.samples[load.id]:
            record.append(folder, SampleLine(load=load.id, sample=sample))
        record.append(folder, load)
    return sum(map(len, run.samples.values()))


def seconds(*argv: str) -> float:
    """The least of a few."""
    found = []
    for _ in range(TIMES):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", CALL, *argv], cwd=ROOT, check=True, capture_output=True)
        found.append(time.perf_counter() - began)
    return min(found)


def installed(name: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """A package and all that it needs here, without extras."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen:
        return
    seen.add(key)
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # for another system or Python
        return
    yield found
    for text in found.requires or ():
        if "extra ==" not in text:
            yield from installed(re.split(r"[ ;<>=!~\[(]", text, maxsplit=1)[0], seen)


def size_bytes(package: metadata.Distribution) -> int:
    paths = (Path(str(file.locate())) for file in package.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        samples = write_run(folder)
        print(f"--help: {seconds('--help'):.2f} s")
        print(f"report from {samples} samples of {TOKENS} tokens: {seconds('report', str(folder)):.2f} s")
    sizes = {str(each.name): size_bytes(each) for each in installed("llamaduel", set())}
    largest = ", ".join(f"{name} {sizes[name] / MB:.0f}" for name in sorted(sizes, key=lambda name: -sizes[name])[:5])
    total = sum(sizes.values())
    print(f"installed without engines: {total / MB:.0f} MB ({largest})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
