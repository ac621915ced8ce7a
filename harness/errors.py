"""Every error that llamaduel raises on purpose.

    DuelError
    ├── UsageError       what was typed cannot be taken; names the nearest valid word
    ├── ModelError       the file is not a model that can be measured
    ├── RunRefused       nothing was measured, and why
    │   ├── Regression   what the baseline measured does not run any more
    │   └── Interrupted  what it needs went away while it ran
    ├── Unavailable      an engine, or a placement of it, cannot be had here; how to get it
    └── EngineFailed     an engine was started and did not do its work
        ├── DoesNotFit   out of memory, in loading or in a request: a result, not an accident
        ├── Crashed      the process ended by itself
        └── TimedOut     it did not answer in time

Each message is one sentence with the next step in it, for it is printed as it stands.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DuelError(Exception):
    """Base of all; `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(DuelError):
    exit_code = 2


class ModelError(DuelError):
    pass


class RunRefused(DuelError):
    pass


class Regression(RunRefused):
    exit_code = 4


class Interrupted(RunRefused):
    """Where something was measured before, `reason` is told again with the way to go on."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; start it again")
        self.reason = reason


class Unavailable(DuelError):
    pass


class EngineFailed(DuelError):
    pass


class DoesNotFit(EngineFailed):
    pass


class Crashed(EngineFailed):
    pass


class TimedOut(EngineFailed):
    pass


def nearest(word: str, valid: Iterable[str]) -> str:
    """Half a sentence that names the closest valid word, then all of them."""
    known = sorted(valid)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known) or 'none'}"
