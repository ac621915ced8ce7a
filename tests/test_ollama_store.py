"""Ollama's store: reading a user's, and making one of ours by link."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends import ollama_store
from harness.contract import ModelFile
from harness.errors import EngineFailed, ModelError, Unavailable


def manifest(store: Path, name: str, *layers: tuple[str, bytes]) -> None:
    """A model as `ollama pull` leaves it; layers are (last word of the media type, content)."""
    listed = []
    for kind, content in layers:
        digest = hashlib.sha256(content).hexdigest()
        blob = store / "blobs" / f"sha256-{digest}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        listed.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    path = store / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "layers": listed}))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    manifest(store, "registry.ollama.ai/library/qwen3/8b", ("model", b"qwen"), ("template", b"{{ . }}"))
    manifest(store, "registry.ollama.ai/library/tiny/latest", ("model", b"tiny"))
    manifest(store, "registry.ollama.ai/someone/own/latest", ("model", b"own"))
    manifest(store, "hf.co/unsloth/Qwen3-30B-A3B-GGUF/Q4_K_M", ("model", b"moe"))
    return store


# ── a user's store ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("qwen3:8b", b"qwen"),
        ("tiny", b"tiny"),
        ("tiny:latest", b"tiny"),
        ("someone/own", b"own"),
        ("registry.ollama.ai/library/qwen3:8b", b"qwen"),
        ("hf.co/unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M", b"moe"),
        ("HF.co/Unsloth/qwen3-30b-a3b-gguf:q4_k_m", b"moe"),
    ],
)
def test_a_name_leads_to_the_blob_with_its_weights(store: Path, name: str, content: bytes) -> None:
    blob = ollama_store.resolve(name, [store], asked=True)
    assert blob is not None
    assert blob.read_bytes() == content
    assert blob.name == f"sha256-{hashlib.sha256(content).hexdigest()}"


def test_the_first_store_that_has_the_model_wins(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    manifest(other, "registry.ollama.ai/library/tiny/latest", ("model", b"another tiny"))
    blob = ollama_store.resolve("tiny", [tmp_path / "none", other, store], asked=True)
    assert blob is not None
    assert blob.read_bytes() == b"another tiny"


def test_a_name_that_is_nowhere_is_none_unless_it_was_asked_for(store: Path) -> None:
    assert ollama_store.resolve("qwen3:9b", [store], asked=False) is None


def test_a_missing_model_names_the_nearest_and_how_to_get_it(store: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean 'qwen3:8b'\?.*tiny:latest.*`ollama pull qwen3:9b`"):
        ollama_store.resolve("qwen3:9b", [store], asked=True)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b/c/d", "", "/abs/path.gguf", "x:", "a b"])
def test_what_cannot_be_a_name_is_looked_up_nowhere(store: Path, name: str) -> None:
    assert ollama_store.resolve(name, [store], asked=False) is None


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([("template", b"t")], "no GGUF on this machine"),
        ([("model", b"a"), ("model", b"b")], "made of 2 files"),
        ([("model", b"a"), ("adapter", b"b")], "adapter"),
    ],
)
def test_a_model_that_is_no_single_file_says_so(store: Path, layers: Sequence[tuple[str, bytes]], words: str) -> None:
    manifest(store, "registry.ollama.ai/library/odd/latest", *layers)
    with pytest.raises(ModelError, match=words):
        ollama_store.resolve("odd", [store], asked=False)


def test_a_blob_that_is_gone_says_so(store: Path) -> None:
    (store / "blobs" / f"sha256-{hashlib.sha256(b'tiny').hexdigest()}").unlink()
    with pytest.raises(ModelError, match="is missing; run `ollama pull tiny`"):
        ollama_store.resolve("tiny", [store], asked=True)


def test_a_damaged_manifest_says_so(store: Path) -> None:
    (store / "manifests/registry.ollama.ai/library/tiny/latest").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        ollama_store.resolve("tiny", [store], asked=True)


def test_the_stores_of_a_user_begin_with_the_one_that_the_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("OLLAMA_MODELS", "/big/disk")
    assert [str(store) for store in ollama_store.user_stores()] == [
        "/big/disk",
        "/home/somebody/.ollama/models",
        "/usr/share/ollama/.ollama/models",
    ]
    monkeypatch.delenv("OLLAMA_MODELS")
    assert str(ollama_store.user_stores()[0]) == "/home/somebody/.ollama/models"


# ── a store of ours ─────────────────────────────────────────────────────────────────────────


def model_of(*paths: Path) -> ModelFile:
    size = sum(path.stat().st_size for path in paths)
    return ModelFile(paths[0], paths, "qwen3moe", size, ollama_store.sha256(paths[0]), "digest")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"GGUF and the rest")
    return path


def test_a_linked_model_resolves_to_the_same_file_without_a_copy(weights: Path, tmp_path: Path) -> None:
    store = tmp_path / "models"
    assert ollama_store.link(store, "mine", model_of(weights)) == "hard link"
    blob = ollama_store.resolve("mine", [store], asked=True)
    assert blob is not None
    assert blob.samefile(weights)
    assert blob.name == f"sha256-{ollama_store.sha256(weights)}"


def test_every_digest_in_the_manifest_is_that_of_its_blob(weights: Path, tmp_path: Path) -> None:
    store = tmp_path / "models"
    ollama_store.link(store, "mine", model_of(weights))
    listed = json.loads((store / "manifests/registry.ollama.ai/library/mine/latest").read_text())
    for layer in (listed["config"], *listed["layers"]):
        blob = store / "blobs" / layer["digest"].replace(":", "-")
        assert f"sha256:{ollama_store.sha256(blob)}" == layer["digest"]
        assert blob.stat().st_size == layer["size"]


def test_where_no_hard_link_can_be_made_a_symbolic_one_is(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_disk(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", another_disk)
    store = tmp_path / "models"
    assert ollama_store.link(store, "mine", model_of(weights)) == "symbolic link"
    blob = ollama_store.resolve("mine", [store], asked=True)
    assert blob is not None
    assert blob.is_symlink()
    assert blob.read_bytes() == weights.read_bytes()


def test_a_symbolic_link_as_model_is_followed(weights: Path, tmp_path: Path) -> None:
    named = tmp_path / "named.gguf"
    named.symlink_to(weights.name)
    ollama_store.link(tmp_path / "models", "mine", model_of(named))
    blob = ollama_store.resolve("mine", [tmp_path / "models"], asked=True)
    assert blob is not None
    assert not blob.is_symlink()
    assert blob.samefile(weights)


def test_a_store_is_there_whole_or_not_at_all(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full_disk)
    monkeypatch.setattr(os, "symlink", full_disk)
    with pytest.raises(Unavailable, match=r"No space left on device.*XDG_CACHE_HOME"):
        ollama_store.link(tmp_path / "models", "mine", model_of(weights))
    assert not (tmp_path / "models").exists()


def test_shards_become_blobs_without_a_model(weights: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.gguf"
    second.write_bytes(b"GGUF, part two")
    store = tmp_path / "models"
    ollama_store.link(store, "mine", model_of(weights, second))
    assert {path.name for path in (store / "blobs").iterdir()} == {
        f"sha256-{ollama_store.sha256(path)}" for path in (weights, second)
    }
    assert ollama_store.models(store) == {}


# ── a copy by Ollama ────────────────────────────────────────────────────────────────────────


class Client:
    """Of Ollama's client, `create`."""

    def __init__(self, *steps: str, error: str | None = None) -> None:
        self.steps, self.error = steps, error
        self.asked: dict[str, Any] = {}

    def create(self, **asked: Any) -> Any:
        import ollama

        self.asked = asked
        yield from (SimpleNamespace(status=step) for step in self.steps)
        if self.error:
            raise ollama.ResponseError(self.error)


def test_all_shards_are_named_with_their_digests(weights: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.gguf"
    second.write_bytes(b"GGUF, part two")
    client = Client("parsing GGUF", "success")
    ollama_store.create(client, "mine", model_of(weights, second), tmp_path)  # type: ignore[arg-type]
    assert client.asked["files"] == {path.name: f"sha256:{ollama_store.sha256(path)}" for path in (weights, second)}


def test_a_copy_that_the_disk_cannot_take_is_refused_before_it_starts(weights: Path, tmp_path: Path) -> None:
    client = Client("success")
    huge = ModelFile(weights, (weights, weights), "x", 1 << 60, "0" * 64, "digest")
    with pytest.raises(Unavailable, match="GiB free; free some space"):
        ollama_store.create(client, "mine", huge, tmp_path)  # type: ignore[arg-type]
    assert client.asked == {}


def test_an_ollama_without_llama_quantize_says_how_to_get_it(weights: Path, tmp_path: Path) -> None:
    client = Client("parsing GGUF", error="llama-quantize unavailable: not found")
    with pytest.raises(Unavailable, match="`llamaduel engines install llama-cpp`"):
        ollama_store.create(client, "mine", model_of(weights), tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("client", [Client("parsing GGUF"), Client("parsing GGUF", error="no room")])
def test_a_copy_that_does_not_end_well_is_a_failure(client: Client, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"cannot take weights\.gguf"):
        ollama_store.create(client, "mine", model_of(weights), tmp_path)  # type: ignore[arg-type]
