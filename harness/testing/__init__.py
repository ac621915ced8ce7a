"""For those who write adapters: engines that only pretend, and a suite that every adapter runs.

`engines.fake(...)` puts executables named like the real ones into a folder: real processes that
speak the real wire format over real HTTP, at a speed and with faults that a test chooses.
`conformance` holds the behaviour that the harness relies on.
"""
