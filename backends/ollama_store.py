"""Ollama's store of models: read a user's, and put a GGUF into one of ours without copying it.

A store is `blobs/sha256-<hex>` and `manifests/<host>/<namespace>/<model>/<tag>`; a manifest lists
layers by digest. One hard link, a config blob and a manifest make a model that Ollama loads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.contract import ModelFile
from harness.errors import EngineFailed, ModelError, Unavailable, UsageError, nearest

if TYPE_CHECKING:
    import ollama

REGISTRY, LIBRARY, TAG = "registry.ollama.ai", "library", "latest"
WEIGHTS = "application/vnd.ollama.image.model"
ADAPTER = "application/vnd.ollama.image.adapter"
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:\d+)?")  # a host may have a port
SPARE = 1.05  # a copy may not fill the disk to the last byte


def user_stores() -> tuple[Path, ...]:
    """Where a user's models may be: the variable, the home, the Linux service's account."""
    named = os.environ.get("OLLAMA_MODELS")
    places = [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    return tuple(dict.fromkeys([Path(named), *places] if named else places))


def models(store: Path) -> dict[str, Path]:
    """The manifests of a store by the name that a person types, `qwen3:8b`."""
    root = store / "manifests"
    found = {}
    with contextlib.suppress(OSError):
        for path in sorted(root.glob("*/*/*/*")):
            if path.is_file() and not path.name.startswith("."):
                found[_short(*path.relative_to(root).parts)] = path
    return found


def resolve(name: str, stores: Iterable[Path], *, asked: bool) -> Path | None:
    """The weights of a model in one of the stores.

    A name that is nowhere is None, or ModelError if it was `asked` for as a model of Ollama's; none at all, UsageError.
    ModelError too for a model that is there but has no single GGUF.
    """
    if asked and not name.strip():
        raise UsageError("'ollama:' names no model; write ollama:NAME, one of those that `ollama list` shows")
    stores = tuple(stores)
    parts = _parts(name)
    for store in stores if parts else ():
        if parts and (manifest := _manifest(store, parts)):
            return _weights(name, store, manifest)
    if not asked:
        return None
    known = [model for store in stores for model in models(store)]
    closed = [str(store) for store in stores if _is_closed(store)]
    hint = f"; {' and '.join(closed)} cannot be read by this user" if closed else ""
    meant = nearest(_short(*parts) if parts else name, known)
    raise ModelError(f"Ollama has no model {name!r} here ({meant}){hint}; `ollama pull {name}` gets it")


def _parts(name: str) -> tuple[str, ...] | None:
    """host, namespace, model, tag; None if it cannot be the name of a model."""
    path, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", TAG)
    given = path.split("/")
    if not 1 <= len(given) <= 3:
        return None
    parts = (*(REGISTRY, LIBRARY)[: 3 - len(given)], *given, tag)
    return parts if all(PART.fullmatch(part) for part in parts) else None


def _short(host: str, namespace: str, model: str, tag: str) -> str:
    before = "" if (host, namespace) == (REGISTRY, LIBRARY) else f"{namespace}/"
    return f"{'' if host == REGISTRY else host + '/'}{before}{model}:{tag}"


def _manifest(store: Path, parts: tuple[str, ...]) -> Path | None:
    """Case does not matter to Ollama, so not here either."""
    place = store / "manifests"
    for part in parts:
        try:
            entries = {entry.name: entry for entry in place.iterdir()}
        except OSError:
            return None
        folded = {entry_name.casefold(): entry for entry_name, entry in entries.items()}
        if not (match := entries.get(part) or folded.get(part.casefold())):
            return None
        place = match
    return place


def _weights(name: str, store: Path, manifest: Path) -> Path:
    try:
        layers = json.loads(manifest.read_text())["layers"]
        files = [layer["digest"] for layer in layers if layer["mediaType"] == WEIGHTS]
        adapters = [layer for layer in layers if layer["mediaType"] == ADAPTER]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the manifest {manifest} cannot be read ({error}); run `ollama pull {name}` again") from None
    if adapters:
        raise ModelError(f"{name} has an adapter on top of its weights, which one GGUF cannot show; name a plain model")
    if not files:
        raise ModelError(f"{name} has no GGUF on this machine (a cloud or MLX model); name one that `ollama pull` got")
    if len(files) > 1:
        raise ModelError(f"{name} is made of {len(files)} files; give the GGUF itself, its first shard if it is split")
    blob = store / "blobs" / str(files[0]).replace(":", "-")
    if not os.access(blob, os.R_OK):
        state = "cannot be read by this user" if blob.exists() else "is missing"
        raise ModelError(f"the weights of {name} ({blob}) {state}; run `ollama pull {name}` as yourself")
    return blob


def _is_closed(store: Path) -> bool:
    return store.is_dir() and not os.access(store / "manifests", os.R_OK | os.X_OK)


def link(store: Path, name: str, model: ModelFile) -> str:
    """Make a store with one model in it; how the weights got there, in words.

    A split model gets its shards as blobs and no manifest: `create` has Ollama merge them.
    Raises Unavailable if the disk takes neither kind of link.
    """
    partial = store.with_name(f"{store.name}.partial")
    blobs = partial / "blobs"
    blobs.mkdir(parents=True)
    try:
        ways = {_link(path, blobs / f"sha256-{digest}") for path, digest in digests(model).items()}
    except OSError as error:
        raise Unavailable(
            f"{store.parent} takes no link to the model ({error.strerror}); set XDG_CACHE_HOME to a folder that does"
        ) from None
    if len(model.shards) <= 1:
        place = partial / "manifests" / REGISTRY / LIBRARY / name / TAG
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(_manifest_of(model, blobs)))
    partial.rename(store)
    return " and ".join(sorted(ways))


def _link(weights: Path, blob: Path) -> str:
    try:
        blob.hardlink_to(weights.resolve())
    except OSError:  # another disk, or a file that is not ours
        blob.symlink_to(weights.resolve())
        return "symbolic link"
    return "hard link"


def _manifest_of(model: ModelFile, blobs: Path) -> Mapping[str, Any]:
    family = model.architecture
    config = {"model_format": "gguf", "model_family": family, "model_families": [family]}
    text = json.dumps(config | {"architecture": "amd64", "os": "linux"}).encode()
    digest = hashlib.sha256(text).hexdigest()
    (blobs / f"sha256-{digest}").write_bytes(text)
    return {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "digest": f"sha256:{digest}",
            "size": len(text),
        },
        "layers": [{"mediaType": WEIGHTS, "digest": f"sha256:{model.sha256}", "size": model.path.stat().st_size}],
    }


def digests(model: ModelFile) -> dict[Path, str]:
    """sha256 of every file of the model; `ModelFile` has only that of the first."""
    rest = model.shards[1:] if model.shards else ()
    return {model.path: model.sha256} | {path: sha256(path) for path in rest}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def create(client: ollama.Client, name: str, model: ModelFile, disk: Path | None) -> None:
    """Have Ollama make a model of files whose blobs it has already; it writes them anew as one.

    `disk` is a place on the disk it writes to, if known. Raises Unavailable or EngineFailed.
    """
    import ollama

    needed = int(model.size_bytes * SPARE)
    if disk and (free := shutil.disk_usage(disk).free) < needed:
        raise Unavailable(
            f"Ollama would copy the model, {needed / 2**30:.1f} GiB, and {disk} has {free / 2**30:.1f} GiB free; "
            "free some space, or merge the shards elsewhere with `llama-gguf-split --merge`"
        )
    files = {path.name: f"sha256:{digest}" for path, digest in digests(model).items()}
    last = None
    try:
        for step in client.create(model=name, files=files, stream=True):
            last = step.status
    except ollama.ResponseError as error:
        if "llama-quantize" in error.error and "unavailable" in error.error:
            raise Unavailable(
                "this Ollama has no llama-quantize beside its runner, which it needs to take these files; "
                "run `llamaduel engines install llama-cpp`, or merge shards with `llama-gguf-split --merge`"
            ) from None
        raise EngineFailed(f"Ollama cannot take {model.path.name}: {error.error}") from None
    if last != "success":
        raise EngineFailed(f"Ollama cannot take {model.path.name}: its last word was {last!r}; its log says why")
