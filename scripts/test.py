"""Run the tests, from nothing but Python.

    python3 scripts/test.py [--setup-only] [options of pytest]

Sets up .venv with the test tools (once), then runs `.venv/bin/python -m pytest`. Tests that need a
real engine are skipped where there is none: `.venv/bin/llamaduel engines install ollama`.

  --setup-only   stop before the tests
  --             everything after it goes to pytest, as in `scripts/test.py -- -k resume`
"""

import sys

from setup_venv import ROOT, become, plain_endings, set_up, take_flags


def main(options: list[str]) -> None:
    flags = take_flags(options, __doc__ or "", "--setup-only")
    set_up(dev=True)
    if "--setup-only" in flags:
        print("ready: .venv/bin/python -m pytest")
        return
    become("-m", "pytest", "-c", ROOT / "pyproject.toml", *options)


if __name__ == "__main__":
    with plain_endings():
        main(sys.argv[1:])
