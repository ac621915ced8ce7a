"""`hf:` references against a small hub on loopback, through the real huggingface_hub.

Each command runs in a process of its own, for its client reads where the hub and its cache are when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness import cli, download, synth
from harness.errors import ModelError, UsageError

REPO, COMMIT, OLDER = "acme/tiny-GGUF", "a" * 40, "b" * 40
Q4, Q8, SPLIT = "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "big/big-BF16-{:05d}-of-00002.gguf"
MAIN = "import sys; from harness.cli import main; sys.exit(main())"


@dataclass
class Hub:
    """What the hub holds by revision, how it misbehaves, and all that it was asked."""

    home: Path
    files: dict[str, dict[str, bytes]]
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER})
    sizes: dict[str, int] = field(default_factory=dict)  # as the list tells them, where that is not the truth
    gated: bool = False
    status: int = 0  # of every answer, in place of the right one
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def typed(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr of a command in an empty folder, with this hub and a cache of its own."""
        kept = {name: value for name, value in os.environ.items() if not re.match(r"HF_|LLAMADUEL_|HUGGING", name)}
        told = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.home / "hf"), "XDG_CACHE_HOME": str(self.home / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *arguments],
            env=kept | told | environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def inspected(self, ref: str, **environment: str) -> dict[str, Any]:
        code, out, err = self.typed("inspect", ref, "--json", **environment)
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    def refused(self, ref: str, **environment: str) -> str:
        """The one sentence that a reference ends in."""
        code, out, err = self.typed("inspect", ref, "--json", **environment)
        assert (code, out) == (1, ""), err
        assert "Traceback" not in err
        return err.strip().splitlines()[-1]

    def fetched(self) -> list[str]:
        """Files whose bytes were sent, in order."""
        return [
            path.partition("/resolve/")[2].partition("/")[2]
            for method, path in self.asked
            if method == "GET" and "/resolve/" in path
        ]

    def blobs(self) -> list[Path]:
        return [path for path in (self.home / "hf/hub").rglob("blobs/*") if path.suffix != ".incomplete"]


class Answers(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append((self.command, path))
        if self.hub.status:
            return self.say(self.hub.status, b"{}")
        if listed := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self.list_files(listed[1], listed[2] or "main")
        if named := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.send_file(*named.groups())
        return self.say(404, b"{}")

    def found(self, repo: str, revision: str) -> bool:
        if repo != REPO:
            self.say(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in (*self.hub.commits, *self.hub.commits.values()):
            self.say(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def list_files(self, repo: str, revision: str) -> None:
        if self.found(repo, revision):
            commit = self.hub.commits.get(revision, revision)
            files = [
                {"rfilename": name, "size": self.hub.sizes.get(name, len(data)), "blobId": "0" * 40}
                for name, data in self.hub.files[commit].items()
            ]
            self.say(200, json.dumps({"id": repo, "sha": commit, "siblings": files}).encode())

    def send_file(self, repo: str, revision: str, name: str) -> None:
        if not self.found(repo, revision):
            return None
        if self.hub.gated:
            return self.say(403, b"{}", {"X-Error-Code": "GatedRepo"})
        commit = self.hub.commits.get(revision, revision)
        if (data := self.hub.files[commit].get(name)) is None:
            return self.say(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        etag = hashlib.sha256(data).hexdigest()
        return self.say(200, data, {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "X-Linked-Size": str(len(data))})

    def say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def header(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model of some hundred kilobytes: a whole header, and few weights."""
    path = tmp_path_factory.mktemp("hub") / "tiny.gguf"
    synth.synthesize(path, size="24MiB", header_only=True)
    with path.open("rb") as file:  # what is left out is a hole of zeros
        return file.read()


@pytest.fixture
def hub(tmp_path: Path, header: bytes) -> Iterator[Hub]:
    files = {
        Q4: header,
        Q8: header + b"\0",
        "mmproj-tiny-F16.gguf": b"GGUF",
        "README.md": b"# tiny",
        "config.json": b"{}",
    }
    shared = Hub(tmp_path, {COMMIT: files, OLDER: {Q4: header + b"\0\0"}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (Answers,), {"hub": shared}))
    shared.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield shared
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# ── what is fetched ─────────────────────────────────────────────────────────────────────────


def test_a_file_is_fetched_once_into_the_cache_of_the_client_and_used_as_it_lies(hub: Hub) -> None:
    first = hub.inspected(f"hf:{REPO}:{Q4}")
    before = list(hub.asked)
    again = hub.inspected(f"hf:{REPO}:{Q4}")

    assert Path(first["file"]).name == Q4
    assert Path(first["file"]).resolve() in [path.resolve() for path in hub.blobs()]
    assert len(hub.blobs()) == 1, "there is one copy"
    assert hub.fetched() == [Q4]
    assert again == first
    assert hub.asked == before, "what is there is not asked for again"


def test_without_a_terminal_there_is_no_bar(hub: Hub) -> None:
    _, _, err = hub.typed("inspect", f"hf:{REPO}:{Q4}")

    assert "\r" not in err
    assert "%|" not in err
    assert all(line.startswith(("asking ", "fetching ")) for line in err.splitlines()), err


@pytest.mark.parametrize("word", ["Q4_K_M", "q4_k_m"])
def test_a_quantization_names_the_only_file_that_has_it(hub: Hub, word: str) -> None:
    assert Path(hub.inspected(f"hf:{REPO}:{word}")["file"]).name == Q4


def test_a_repository_with_one_model_needs_no_file_name(hub: Hub) -> None:
    assert Path(hub.inspected(f"hf:{REPO}@v1")["file"]).name == Q4


def test_a_revision_names_other_weights(hub: Hub) -> None:
    newest, older = (Path(hub.inspected(f"hf:{REPO}{at}:{Q4}")["file"]) for at in ("", f"@{OLDER}"))

    assert older.stat().st_size == newest.stat().st_size + 2
    assert OLDER in str(older)


def test_all_parts_of_a_split_model_come_by_the_name_of_any(hub: Hub, tmp_path: Path) -> None:
    from gguf import GGUFWriter

    for number in range(2):
        path = tmp_path / f"{number}.gguf"
        writer = GGUFWriter(path, "qwen3moe")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        hub.files[COMMIT][SPLIT.format(number + 1)] = path.read_bytes()

    for ref in (SPLIT.format(2), "BF16"):
        hub.typed("inspect", f"hf:{REPO}:{ref}")

    assert hub.fetched() == [SPLIT.format(1), SPLIT.format(2)]


@pytest.mark.parametrize("command", ["plan", "run", "find"])
def test_every_command_that_takes_a_model_takes_one_from_a_hub(hub: Hub, command: str) -> None:
    code, out, err = hub.typed(command, f"hf:{REPO}:{Q4}", "--arms", "llama-cpp@ncmoe=0/1", "--llama-server=/nowhere")

    assert hub.fetched() == [Q4], err
    if command == "plan":
        assert (code, out.count("UNAVAILABLE") > 0) == (0, True), err
    else:
        assert "has no weights" in err


def test_pytest_takes_one_too(hub: Hub) -> None:
    (hub.home / "test_duel.py").write_text(
        "import pytest\n@pytest.mark.duel\ndef test_decode(arm, replay): replay('decode')\n"
    )
    argv = ["-m", "pytest", "-p", "no:cacheprovider", "--benchmark-only", "--duel-arms=llama-cpp", "test_duel.py"]
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(hub.home / "hf"), "XDG_CACHE_HOME": str(hub.home / "cache")}
    done = subprocess.run(
        [sys.executable, *argv, f"--duel-model=hf:{REPO}:{Q4}"],
        env=os.environ | environment, cwd=hub.home, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert hub.fetched() == [Q4], done.stdout + done.stderr
    assert "has no weights" in done.stdout


# ── without a network ───────────────────────────────────────────────────────────────────────


def test_offline_the_cache_is_used_without_asking(hub: Hub) -> None:
    hub.inspected(f"hf:{REPO}:Q4_K_M")
    hub.asked.clear()

    by_file = hub.inspected(f"hf:{REPO}:{Q4}", HF_HUB_OFFLINE="1")
    by_word = hub.inspected(f"hf:{REPO}:Q4_K_M", HF_HUB_OFFLINE="1")
    unreachable = hub.inspected(f"hf:{REPO}:Q4_K_M", HF_ENDPOINT="http://127.0.0.1:9")

    assert by_file == by_word == unreachable
    assert hub.asked == []


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids to ask; unset it, or name a file here"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "127.0.0.1:9 cannot be reached"),
    ],
)
@pytest.mark.parametrize("name", [Q4, "Q4_K_M"])
def test_offline_without_a_copy_is_one_sentence(hub: Hub, environment: dict[str, str], says: str, name: str) -> None:
    said = hub.refused(f"hf:{REPO}:{name}", **environment)

    assert says in said
    assert "is not in" in said


def test_what_the_cache_lacks_is_told_with_what_it_has(hub: Hub) -> None:
    hub.inspected(f"hf:{REPO}:{Q4}")

    assert Q4 in hub.refused(f"hf:{REPO}:Q8_0", HF_HUB_OFFLINE="1")


# ── what cannot be had ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("hf:acme/nothing:x.gguf", "shows no model acme/nothing to this account; check its name, or log in"),
        (f"hf:{REPO}@v9:{Q4}", "has no revision 'v9'; name a branch, a tag or a commit"),
        (f"hf:{REPO}:tiny-Q4_K_L.gguf", f"did you mean '{Q4}'?"),
        (f"hf:{REPO}:Q5_K_M", f"no GGUF file with 'Q5_K_M' in its name; known: {Q4}, {Q8}"),
        (f"hf:{REPO}", f"is 2 models; name one: {Q4}, {Q8}"),
    ],
)
def test_what_is_not_there_is_one_sentence_with_what_is(hub: Hub, ref: str, says: str) -> None:
    assert says in hub.refused(ref)
    assert hub.fetched() == []


def test_a_gated_model_says_where_its_terms_are(hub: Hub) -> None:
    hub.gated = True

    assert f"accept its terms at {hub.url}/{REPO}, then log in by `hf auth login`" in hub.refused(f"hf:{REPO}:{Q4}")


@pytest.mark.parametrize(("status", "says"), [(401, "hf auth login"), (403, "hf auth login"), (500, "try again later")])
def test_a_hub_that_refuses_is_told_with_its_number(hub: Hub, status: int, says: str) -> None:
    hub.status = status
    said = hub.refused(f"hf:{REPO}:{Q4}")

    assert says in said
    assert f"HTTP {status}" in said or status == 401  # which is also how a hub hides what one may not see


def test_a_full_disk_is_told_before_anything_is_fetched(hub: Hub) -> None:
    hub.sizes[Q4] = 1 << 60
    said = hub.refused(f"hf:{REPO}:{Q4}")

    assert re.search(r"needs .* GiB in .*, whose disk has .* free; free some, or set HF_HOME", said), said
    assert hub.fetched() == []


@pytest.mark.parametrize(
    "ref", ["hf:", "hf:acme", "hf:acme/a:b:c", "hf:acme/a:", "hf:acme/a:../x.gguf", "hf:a b/c:x.gguf"]
)
def test_a_malformed_reference_says_how_to_write_one(ref: str) -> None:
    with pytest.raises(UsageError, match="write hf:ORG/REPO:FILE"):
        download.parse(ref)


def test_without_the_client_one_sentence_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    code = cli.main(["inspect", f"hf:{REPO}:{Q4}"])
    out, err = capsys.readouterr()

    assert (code, out) == (1, "")
    assert f"`{sys.executable} -m pip install 'huggingface-hub>=1.1'`" in err
    assert "pip install 'llamaduel[hf]'" in err


# ── which file is meant ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("files", "name", "chosen"),
    [
        (["x-Q4_K_M.gguf", "x-IQ4_K_M.gguf", "x-Q4_K_M_L.gguf"], "Q4_K_M", ["x-Q4_K_M.gguf"]),
        (["x.gguf", "mmproj-x.gguf", "x-mmproj-F16.gguf", "imatrix.gguf"], None, ["x.gguf"]),
        (["x-00002-of-00002.gguf", "x-00001-of-00002.gguf"], None, ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]),
        (["x.GGUF", "y.bin"], None, ["x.GGUF"]),
    ],
)  # fmt: skip
def test_a_word_means_the_one_model_that_has_it(files: list[str], name: str | None, chosen: list[str]) -> None:
    assert download._chosen(download.Wanted(REPO, "main", name), files, REPO) == chosen


def test_a_word_that_several_models_have_names_them() -> None:
    wanted = download.Wanted(REPO, "main", "Q4_K_M")
    with pytest.raises(ModelError, match=r"is 2 models; name one: a/x-Q4_K_M.gguf, a/x-UD-Q4_K_M.gguf"):
        download._chosen(wanted, ["a/x-Q4_K_M.gguf", "a/x-UD-Q4_K_M.gguf"], REPO)
