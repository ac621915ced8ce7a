"""Executables named `llama-server`, `ollama` and `ggml-rpc-server` that are fakes, for PATH.

    with engines.fake(tmp_path, Script(itl_s=0.002)) as found:
        ...  # PATH, the fake's script and an empty cache are set; found.ollama is a path

Adapters run against them unmodified: real processes, real signals, real HTTP.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness.testing.script import Script

PROGRAMS = {"llama-server": "llama_server", "ggml-rpc-server": "rpc_server"}


@dataclass(frozen=True, slots=True)
class Engines:
    """Where they lie. Ollama's own runner is in `lib/ollama` beside `bin`, as with the real one."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def llama_server(self) -> Path:
        return self.bin / "llama-server"

    @property
    def ollama(self) -> Path:
        return self.bin / "ollama"


def install(folder: Path, *, runner: bool = True, rpc: bool = True) -> Engines:
    """Write the executables. Without `runner` Ollama has none of its own; `rpc`: they take devices over RPC."""
    engines = Engines(folder)
    for name, module in PROGRAMS.items():
        if rpc or module != "rpc_server":
            _write(engines.bin / name, f"from harness.testing.{module} import main; main()")
    _write(engines.ollama, "from harness.testing.ollama import main; main(program=__file__)")
    if runner:
        beside = folder / "lib" / "ollama"
        _write(beside / "llama-server", "from harness.testing.llama_server import main; main()")
        if rpc:
            _write(beside / "ggml-rpc-server", "from harness.testing.rpc_server import main; main()")
            (beside / "libggml-rpc.so").touch()
    return engines


def _write(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    root = Path(harness.__file__).parent.parent
    path.write_text(f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(root)!r}); {code}\n", encoding="utf-8")
    path.chmod(0o755)


@contextlib.contextmanager
def fake(
    folder: Path,
    script: Script | None = None,
    *,
    cases: Iterable[Mapping[str, Any]] = (),
    runner: bool = True,
    rpc: bool = True,
) -> Iterator[Engines]:
    """Fakes first in PATH, their script, and a cache of their own, until the block ends."""
    engines = install(folder / "engines", runner=runner, rpc=rpc)
    changed = {
        "PATH": f"{engines.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        **(script or Script()).environment(cases),
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield engines
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
