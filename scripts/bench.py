"""Compare Ollama and llama.cpp on this machine, from nothing but Python.

    python3 scripts/bench.py [--setup-only] [--embedded-only] [options of pytest and llamaduel]

Sets up .venv (once, about 500 MB), builds Ollama into the cache where there is none and no GPU
(once, about 2 minutes), then runs the benchmark: `.venv/bin/python -m pytest --benchmark-only`.

  --setup-only      stop before the benchmark
  --embedded-only   build nothing; Ollama is measured only if it is here already
  --                everything after it goes to pytest, as in `scripts/bench.py -- -k decode`

`.venv/bin/llamaduel run --help` lists the options of a run; here they begin with --duel-, as in
--duel-model=FILE.gguf.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setup_venv import PYTHON, ROOT, Stopped, become, plain_endings, set_up, take_flags

OFFICIAL = "`curl -fsSL https://ollama.com/install.sh | sh`"


def given(program: str, options: list[str]) -> bool:
    """Whether the person has this program, or names one."""
    name = program.replace("-", "_").upper()
    named = any(option.startswith(f"--duel-{program}") for option in options)
    return named or bool(shutil.which(program) or os.environ.get(f"LLAMADUEL_{name}"))


def get_ollama() -> None:
    """Build it where no GPU is seen; on a GPU the official one is the one to measure."""
    if sys.platform == "darwin":
        print("no Ollama here: install its app (ollama.com/download); going on without it", flush=True)
    elif has_gpu():
        print(f"no Ollama here: with a GPU take the official one, {OFFICIAL}; going on without it", flush=True)
    elif not run([str(PYTHON.with_name("llamaduel")), "engines", "install", "ollama"]):
        raise Stopped("Ollama could not be built; without it: `python3 scripts/bench.py --embedded-only`")


def run(argv: list[str]) -> bool:
    """Whether the command succeeds; its progress is on standard error, its result is not shown."""
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as child:
        try:
            return child.wait() == 0
        except KeyboardInterrupt:  # it got the signal too, and tidies up
            child.wait()
            raise


def has_gpu() -> bool:
    """A GPU that Ollama would use: NVIDIA, AMD, or NVIDIA behind WSL2."""
    nvidia = any(Path("/dev").glob("nvidia[0-9]*"))
    return nvidia or Path("/dev/kfd").exists() or Path("/usr/lib/wsl/lib/libcuda.so.1").exists()


def try_embedded_engine() -> None:
    """Fails where the CPU or a library of the system is not enough for it."""
    argv = [str(PYTHON), "-m", "backends.embedded_server", "--list-devices"]
    tried = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if tried.returncode:
        said = (tried.stderr.strip().splitlines() or [f"it ended with {tried.returncode}"])[-1]
        raise Stopped(f"the embedded engine does not start: {said.removeprefix('error: ')}")


def main(options: list[str]) -> None:
    flags = take_flags(options, __doc__ or "", "--setup-only", "--embedded-only")
    set_up(dev=False)
    if not given("llama-server", options):
        try_embedded_engine()
    if "--embedded-only" not in flags and not given("ollama", options):
        get_ollama()
    if "--setup-only" in flags:
        print("ready: .venv/bin/python -m pytest --benchmark-only")
        return
    tests = [] if any(".py" in option for option in options) else [ROOT / "benchmarks"]
    become("-m", "pytest", "--benchmark-only", "-c", ROOT / "pyproject.toml", *tests, *options)


if __name__ == "__main__":
    with plain_endings():
        main(sys.argv[1:])
