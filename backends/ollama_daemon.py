"""The Ollama that a user runs already: `--ollama attach`, and the one beside ours that holds memory.

Its environment, log and store are its own, so that placement stays unknown there. Nothing of it
is stopped; what we had it load is unloaded, and what we had it create is deleted.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from backends import ollama_store
from backends.llama_http import listens
from backends.ollama_session import UNREACHABLE, OllamaSession, ask, client, has_blob
from harness.contract import Engine, ModelFile
from harness.errors import EngineFailed, Unavailable, UsageError

if TYPE_CHECKING:
    import ollama

PORT = 11434
PORT_OF = {"http": 80, "https": 443}
KEEP_ALIVE = "10m"  # long enough between requests, and it ends if we are killed
LOOK_S = 0.5  # for a daemon that may not be there


def url_of(text: str) -> str:
    """OLLAMA_HOST as Ollama reads it: host, host:port or a URL; 0.0.0.0 is reached over loopback."""
    scheme, given, rest = text.strip().partition("://")
    if not given:
        scheme, rest = "http", text.strip()
    if scheme not in PORT_OF:
        raise UsageError(f"OLLAMA_HOST={text}: the scheme is http or https")
    place = rest.partition("/")[0]
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(place.strip("[]"))
        place = f"[{address}]" if address.version == 6 else str(address)
    try:
        parts = urlsplit(f"//{place}")
        port = parts.port or (PORT_OF[scheme] if given else PORT)
    except ValueError:
        raise UsageError(f"OLLAMA_HOST={text} is no address; write for example 127.0.0.1:{PORT}") from None
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname or "", parts.hostname or "")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def find(allow_remote: bool) -> tuple[str, str]:
    """URL and version of the daemon. Raises Unavailable."""
    url = url_of(os.environ.get("OLLAMA_HOST", ""))
    if not (allow_remote or is_loopback(url)):
        raise Unavailable(f"OLLAMA_HOST names another machine ({url}); unset it, or add --allow-remote")
    try:
        return url, str(ask(f"{url}/api/version")["version"])
    except (*UNREACHABLE, KeyError, TypeError):
        raise Unavailable(
            f"no Ollama answers at {url}; start it by `ollama serve`, or leave out `--ollama attach`"
        ) from None


def beside() -> Iterator[str]:
    """A sentence for each model that a user's daemon holds beside ours; it is left alone."""
    with contextlib.suppress(*UNREACHABLE, UsageError, KeyError, TypeError):
        url = url_of(os.environ.get("OLLAMA_HOST", ""))
        for model in ask(f"{url}/api/ps", timeout_s=LOOK_S)["models"] if is_loopback(url) else ():
            name, device_gib = model["name"], model.get("size_vram", 0) / 2**30
            yield f"the Ollama at {url} holds {name}, {device_gib:.1f} GiB on a device; `ollama stop {name}` frees it"


@contextlib.contextmanager
def attach(
    engine: Engine,
    url: str,
    model: ModelFile,
    options: Mapping[str, Any],
    wait_s: float,
    *,
    because: Mapping[str, str],
    allow_remote: bool,
) -> Iterator[OllamaSession]:
    """The model in that daemon, loaded. Raises Unavailable or EngineFailed."""
    notes = ["attached: placement, flash attention and KV type are the daemon's own and cannot be proven"]
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(client(url, wait_s))
        with _answering(url):
            held = {str(loaded.model) for loaded in daemon.ps().models}
            name, blob = _same_weights(url, daemon, model, allow_remote)
            if name is None:
                name = f"llamaduel-{model.sha256[:12]}:latest"
                blob = stack.enter_context(_copied(url, daemon, name, model))
                notes.append(f"the daemon did not have these weights; it got a copy as {name}, deleted afterwards")
        if name not in held:
            stack.callback(_unload, daemon, name)
        if others := sorted(held - {name}):
            frees = ", ".join(f"`ollama stop {other}`" for other in others)
            notes.append(f"the daemon held other models; {frees} frees them")
        session = OllamaSession(
            engine=engine,
            url=url,
            model=name,
            options=options,
            pids=lambda: _pids(urlsplit(url).port or PORT),
            weights=blob,
            keep_alive=KEEP_ALIVE,
            because=because,
            notes=tuple(notes),
        )
        session.load(wait_s)
        yield session


@contextlib.contextmanager
def _copied(url: str, daemon: ollama.Client, name: str, model: ModelFile) -> Iterator[Path | None]:
    """The weights as a model of that name in the daemon's store, until the block ends; its blob.

    Ollama rewrites what is uploaded and keeps the upload until its next start, so that one is
    deleted here, where this user may.
    """
    uploads: list[str] = []
    blob: Path | None = None
    try:
        for path, digest in ollama_store.digests(model).items():
            if not has_blob(url, digest):
                daemon.create_blob(path)
                uploads.append(f"sha256-{digest}")
        ollama_store.create(daemon, name, model, None)
        blob = next(iter(_layers(ask(f"{url}/api/show", {"model": name}))), None)
        uploads = [upload for upload in uploads if blob is None or blob.name != upload]
        yield blob
    finally:
        with _never_mind():
            daemon.delete(name)
        for upload in uploads:
            with contextlib.suppress(OSError):
                (blob.parent / upload).unlink() if blob else None


def _same_weights(
    url: str, daemon: ollama.Client, model: ModelFile, allow_remote: bool
) -> tuple[str | None, Path | None]:
    """Name and blob of the daemon's model that is our file and nothing else, bit by bit."""
    for listed in daemon.list().models if len(model.shards) <= 1 else ():
        if not listed.model or int(listed.size or 0) < model.size_bytes:
            continue
        shown = ask(f"{url}/api/show", {"model": listed.model})  # Ollama's client drops remote_host
        layers = _layers(shown)
        if len(layers) == 1 and layers[0].name == f"sha256-{model.sha256}":
            if (elsewhere := shown.get("remote_host")) and not allow_remote:
                raise Unavailable(f"{listed.model} runs on {elsewhere}, not here; add --allow-remote, or remove it")
            return listed.model, layers[0]
    return None, None


def _layers(shown: Mapping[str, Any]) -> list[Path]:
    """Weights, projectors and adapters of a model, as its Modelfile names them."""
    lines = str(shown.get("modelfile", "")).splitlines()
    return [Path(line.partition(" ")[2]) for line in lines if line.startswith(("FROM ", "ADAPTER ", "DRAFT "))]


def _unload(daemon: ollama.Client, name: str) -> None:
    with _never_mind():
        daemon.generate(model=name, keep_alive=0)


def _never_mind() -> contextlib.AbstractContextManager[None]:
    """Cleaning up at a daemon that may be gone must not hide why we leave."""
    return contextlib.suppress(*_broken())


@contextlib.contextmanager
def _answering(url: str) -> Iterator[None]:
    """A daemon that breaks off, or says no, is an engine that failed."""
    try:
        yield
    except _broken() as error:
        raise EngineFailed(
            f"the Ollama at {url} broke off ({str(error) or type(error).__name__}); its log says why"
        ) from None


def _broken() -> tuple[type[Exception], ...]:
    """What Ollama's client raises: errors of its own, and those of its transport that it lets through."""
    import httpx
    import ollama

    return (ollama.ResponseError, OSError, http.client.HTTPException, httpx.HTTPError)


def _pids(port: int) -> tuple[int, ...]:
    """The daemon and what it started, if this user may see whose the port is; else none."""
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "serve" in candidate.cmdline() and listens([candidate.pid], port):
                return (candidate.pid, *(child.pid for child in candidate.children(recursive=True)))
    return ()
