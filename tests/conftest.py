"""For all tests: nothing depends on the speed of the machine, and the same examples are tried each time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("llamaduel", deadline=None, derandomize=True, database=None)
settings.load_profile("llamaduel")
