"""What is private goes, in every spelling; what a report is about stays to the letter."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.plan import public
from harness.redaction import Private, is_secret, learn, redact, redact_data, redact_known

MACHINE_ID = "0123456789abcdef0123456789abcdef"
KNOWN = Private(
    homes=("/home/zaphod", "/root", "/srv/people/al ice"),
    folders=("/srv/my models", "/build/duel", "C:\\Users\\Zaphod B\\models", "../secret plans"),
    users=("zaphod", "Zaphod Beeblebrox", "al", "root", "max"),
    hosts=("heartofgold", "tower.corp.example.com", "gpu", "ip-10-0-0-7"),
    secrets=("s3cr3tvalue",),
    serials=(MACHINE_ID,),
    kept=("zaphod-tiny 7B", "zaphod-tiny.gguf"),
)
DIGEST = "95edb29aeabf5bf85d440fd5535b97ef190284f6110da4d4156ee3307a16a77c"


@pytest.mark.parametrize(
    ("text", "public"),
    [
        # paths
        ("/home/zaphod/models/x.gguf", "x.gguf"),
        ("/opt/llama.cpp/bin/llama-server -m /a/model.gguf --port 4", "llama-server -m model.gguf --port 4"),
        ("--model=/a/model.gguf", "--model=model.gguf"),
        ("'/a/model.gguf'", "'model.gguf'"),
        ("'--model=/mnt/My Disk/x.gguf'", "'--model=x.gguf'"),
        ("/srv/my models/x.gguf is read", "x.gguf is read"),
        ("/srv/my\\ models/x.gguf is read", "x.gguf is read"),
        ("file:///srv/my%20models/x.gguf", "x.gguf"),
        ("file:///mnt/disk/x.gguf", "x.gguf"),
        ("/srv/people/al ice/x/y", "y"),
        ("~/models/model.gguf", "model.gguf"),
        ("~ford/models/model.gguf", "model.gguf"),
        ("$HOME/private/x and ${HOME}/private/y", "x and y"),
        ("PATH=/usr/bin:/home/zaphod/bin:/opt/x/sbin", "PATH=bin:bin:sbin"),
        ("-I/home/zaphod/include -L/opt/x/lib", "-Iinclude -Llib"),
        ("cc -O2 >/data/x/log 2>/data/y/err", "cc -O2 >log 2>err"),
        ("cwd=/build/duel", "cwd=duel"),
        ("HOME=/home/zaphod", "HOME=~"),
        ("in /home/ford is nothing", "in ~ is nothing"),
        ("ford@box:/export/models/x", "ford@box:x"),
        ("/dev/shm/plans/x", "x"),
        ("'../secret plans/x.gguf'", "'x.gguf'"),
        ("C:\\Users\\Zaphod B\\models\\x.gguf", "x.gguf"),
        ("D:\\Program Files\\engine\\llama-server.exe -m", "llama-server.exe -m"),
        ("E:/models/x.gguf", "x.gguf"),
        ("\\\\wsl$\\Ubuntu\\home\\ford\\x.gguf", "x.gguf"),
        ("\\\\wsl.localhost\\Ubuntu\\srv\\x.gguf", "x.gguf"),
        ("/mnt/c/Users/ford/x.gguf", "x.gguf"),
        ("/Volumes/Ford’s SSD/models/x.gguf", "x.gguf"),
        ("/data/Ford's models/x.gguf and more", "x.gguf and more"),
        ("open /mnt/Ünïcode Nutzer/größe/x.gguf failed", "open x.gguf failed"),
        ("/media/ford/USB DISK/x.gguf", "x.gguf"),
        ("/data/x I/O error", "x I/O error"),
        ("?path=%2Fhome%2Fzaphod%2Fx.gguf&n=1", "?path=x.gguf&n=1"),
        ("C%3A%5CUsers%5Cford%5Cx.gguf", "x.gguf"),
        ("%2Fhome%2Fford", "~"),
        # behind what ends in a letter and is none
        ("exit\\n/data/x/y", "exit\\ny"),
        ("\\tzaphod\\r\\n10.1.2.3", "\\t<user>\\r\\n<address>"),
        ("\x1b[32mzaphod\x1b[0m \x1b[1;31m/data/x/y", "\x1b[32m<user>\x1b[0m \x1b[1;31my"),
        ("\\u001b[32mzaphod\\u001b[0m", "\\u001b[32m<user>\\u001b[0m"),
        ("a\\nC:\\Users\\ford\\x.gguf", "a\\nx.gguf"),
        ("org%2Fzaphod%2Fx", "org%2F<user>%2Fx"),
        ("Zaphod%20Beeblebrox, zaphod_beeblebrox", "<user>, <user>"),
        # names
        ("zaphod's models", "<user>'s models"),
        ("my_zaphod_models, ZAPHOD", "my_<user>_models, <user>"),
        ("by Zaphod Beeblebrox", "by <user>"),
        ("on heartofgold.local", "on <host>"),
        ("on tower.corp.example.com and tower", "on <host> and <host>"),
        ("ip-10-0-0-7", "<host>"),
        ("user=max, login: al", "user=<user>, login: <user>"),
        ("al@heartofgold", "<user>@<host>"),
        # addresses
        ("192.168.1.5:50052", "<address>:50052"),
        ("fe80::1%eth0 and 2001:db8::5", "<address>%eth0 and <address>"),
        ("::ffff:10.0.0.9", "::ffff:<address>"),
        ("12:34:56:78:9a:bc", "<address>"),
        ("a.b+c@mail.example.org", "<address>"),
        ("http://nas.lan:8080/x", "http://<host>:8080/x"),
        ("at nas.lan:80, ci.acme.corp, fords-MacBook.local.", "at <host>:80, <host>, <host>."),
        ("a.internal b.home c.intranet d.localdomain", "<host> <host> <host> <host>"),
        ("version 10.0.0.5:80", "version <address>:80"),
        ("llama-cpp,rpc=10.0.0.5:1+box:2,ub=64", "llama-cpp,rpc=<2>,ub=64"),
        # keys and serials
        ("OPENAI_API_KEY=abc123 HF_TOKEN:hf", "OPENAI_API_KEY=<key> HF_TOKEN:<key>"),
        ("sk-abcdefghijklmnopqrstuvwx", "<key>"),
        ("hf_abcdefghijklmnopqrstuvwx", "<key>"),
        ("ghp_abcdefghijklmnopqrstuvwx", "<key>"),
        ("Authorization: Bearer abcdefghijk", "Authorization: Bearer <key>"),
        ("https://me:word@github.com/a?api_key=x&b=1", "https://<key>@github.com/a?api_key=<key>&b=1"),
        ("api_key=hush", "api_key=<key>"),
        ('"api_key":"hush"', '"api_key":"<key>"'),
        ('{\\"api_key\\": \\"hush\\"}', '{\\"api_key\\": \\"<key>\\"}'),
        ("x-api-key: hush", "x-api-key: <key>"),
        ("password: hush, token=abcdefgh", "password: <key>, token=<key>"),
        ("aws_secret_access_key = wJalr/bPx", "aws_secret_access_key = <key>"),
        ("--api-key hush --port 1", "--api-key <key> --port 1"),
        ("it was s3cr3tvalue", "it was <key>"),
        ("GPU-1a2b3c4d-1111-2222-3333-1234567890ab", "<serial>"),
        (f"id {MACHINE_ID}", "id <serial>"),
        ("/dev/disk/by-id/nvme-S4X9NX0", "<serial>"),
        ("Serial Number: S4X9NX0", "Serial Number: <serial>"),
    ],
)
def test_what_is_private_goes(text: str, public: str) -> None:
    counts: Counter[str] = Counter()

    assert redact(text, KNOWN, counts) == public
    assert counts.total() > 0, "and it is told"
    assert redact(public, KNOWN) == public


@pytest.mark.parametrize(
    "text",
    [
        DIGEST,
        f"sha256-{DIGEST}",
        "7 tok/s, I/O, a / b, 10/20",
        "http://127.0.0.1:80/v1/completions",
        "https://github.com/ggml-org/llama.cpp/pull/16391",
        "/api/ps: 100 % on the GPU",
        "[GIN-debug] POST   /api/generate             --> github.com/ollama/ollama/server.(*Server)",
        "2026/11/30 - 10:27:15 | 200 | 127.0.0.1 | POST     \"/api/generate\"",
        "/etc/llama.cpp/config.ini applies; > /dev/null 2>&1 < /dev/null",
        "0.0.0.0:11434, [::1]:8080, ::1, 127.0.1.1",
        "version 12.8.0.38, driver 580.95.05, b11549",
        "1.12.123.104 I slot print_timing: id  0",
        "std::vector, 0000:01:00.0, 10:27:15",
        "<|im_start|></s> // a comment </think>",
        "max tokens, user prompt, root cause, gpu memory, ollama, llama-cpp",
        "llama-cpp@cpu-1a22abbf7e3.log",
        "llama-cpp,rpc=<2>,ub=64",
        "zaphod-tiny 7B",
        "$PWD/duel.XXXXXX $d/bin/ollama",
        "n_ctx_train = 32768, TOKENS: 128, EOS_TOKEN=2",
        "hf:ORG/REPO:FILE ollama:library/qwen3",
        "CUDA Version: 12.8.0.38, cuDNN 9.1.0.70, driver 25.0.1.2, gcc 13.2.0.1, gcc (GCC) 13.2.0.1, v10.0.1.2",
        "EOS token = 151645 '<|im_end|>', token: hello, tokens=7, n_tokens: 5, key: general.name",
        '"api_key": null, "password": "", api key of nobody',
        "threading.local() at localhost.localdomain and host.docker.internal",
        "loaded x.gguf CPU/GPU; 100%ab; {{a}}\\n/no_think\\n</tools>",
    ],
)  # fmt: skip
def test_what_a_report_is_about_stays(text: str) -> None:
    counts: Counter[str] = Counter()

    assert redact(text, KNOWN, counts) == text
    assert counts == {}


@pytest.mark.parametrize("name", ["root", "user", "gpu", "llama", "ollama", "localhost", "ubuntu", "runner", "42"])
def test_a_name_that_everybody_has_destroys_no_text(name: str) -> None:
    text = f"the {name} of {name}: {name}@{name} and {name} tok/s"

    assert redact(text, Private(users=(name,), hosts=(name,))) == text


@pytest.mark.parametrize("name", ["a", "ed", "max", "mark", "block"])
def test_a_short_or_usual_word_is_a_name_only_where_it_must_be_one(name: str) -> None:
    private = learn(Private(users=(name,)), {"block": 1, "block_count": {"block": ""}})

    assert redact(f"{name} {name}s; user={name}", private) == f"{name} {name}s; user=<user>"
    assert redact(f"/home/{name}", private) == "~"
    assert redact(f"/home/{name}/x", private) == "x"


def test_a_run_gives_away_whose_machine_it_was() -> None:
    header = {
        "plan": {"preset": "confirm", "settings": [["kind", "matched"]]},
        "model": {"name": "m", "file": "/mnt/big disk/m.gguf"},
        "options": {"model": "../../plans of mine/m.gguf"},
        "contenders": [{"settings": {"rpc": ["marvin:50052", "127.0.0.1:1"]}}],
        "command": "/home/trillian/bin/llamaduel run",
    }
    private = learn(Private(), header, ["loaded from C:\\Users\\Tricia McMillan\\x.dll"])

    told = "trillian at marvin, Tricia McMillan: '../../plans of mine/m.gguf', /mnt/big disk/m.gguf too"
    assert redact(told, private) == "<user> at <host>, <user>: 'm.gguf', m.gguf too"
    assert "confirm" in private.common


def test_a_folder_with_a_space_gives_away_those_above_it_and_whose_they_are() -> None:
    header = {"model": {"name": "m", "file": "/data/Tricia McMillan/models/m.gguf"}}
    log = "open /mnt/c/Users/Ford Prefect/x.dll\nopen /mnt/c/Users/arthur dent/y\nopen /Volumes/my disk/a b/z"
    private = learn(Private(), header, [log])

    assert redact("/data/Tricia McMillan/ollama and /data/Tricia McMillan", private) == "ollama and <folder>"
    assert redact("tricia_mcmillan, Ford Prefect, Arthur Dent", private) == "<user>, <user>, <user>"
    assert redact("/mnt/c/Users/Ford Prefect and /mnt/c/Users/arthur dent/q", private) == "~ and q"
    assert redact("/Volumes/my disk/q and /Volumes/my disk", private) == "q and <folder>"


def test_what_stands_between_two_paths_is_no_name() -> None:
    private = learn(Private(), {}, ["/home/ford is at 3 tok/s; /home/arthur and /home/ford/x"])

    assert set(private.users) == {"ford", "arthur"}


@pytest.mark.parametrize("name", ["ryzen", "rtx", "nvidia", "ngl", "ncmoe", "moe", "ctk", "q8_0", "linux", "fastllm"])
def test_what_everybody_has_in_a_machine_or_an_arm_is_nobodys_name(name: str) -> None:
    header = {
        "machine": {"cpu": "AMD Ryzen 9 7950X", "gpus": [{"name": "NVIDIA GeForce RTX 3060"}], "system": "Linux 6"},
        "contenders": [{"engine": {"product": "fastLLM"}}],
        "plan": {"arms": ["llama-cpp@ncmoe=3,ctk=q8_0"]},
    }
    private = learn(Private(users=(name,), hosts=(name,)), header)

    text = f"{name} AMD Ryzen 9, GeForce RTX 3060, nvidia, llama-cpp@ncmoe=3,ctk=q8_0, ngl, moe, fastLLM"
    assert redact(text, private) == text
    assert redact(f"/home/{name}/x of /home/{name}", private) == "x of ~"
    if name != "linux":
        assert redact(f"user={name} host={name}", private) == "user=<user> host=<host>"


def test_a_machine_that_is_called_like_its_owner_makes_no_word_public() -> None:
    header = {"machine": {"cpu": "zaphod of /home/zaphod/x", "gpus": []}}

    assert redact("zaphod", learn(Private(users=("zaphod",)), header)) == "<user>"


def test_what_a_value_is_follows_from_its_key() -> None:
    data = {
        "file": "/data/a b/c d.gguf",
        "argv": [
            "/opt/x y/llama-server",
            "--api-key",
            "hush",
            "--model=/data/a b/c d.gguf",
            "ORG/REPO",
            "{{a}} / {{b}}",
        ],
        "text": "open /usr/bin/python as zaphod",
        "versions": {"cuda": "12.8.0.38"},
        "api_key": "hush",
        "prompt_tokens": 9,
        "chunk_ns": [1, 2, 3],
        "elsewhere": {"llama-cpp,rpc=box:1": {"/opt/x/y": None}},
    }
    counts: Counter[str] = Counter()

    assert redact_data(data, KNOWN, counts) == {
        "file": "c d.gguf",
        "argv": ["llama-server", "--api-key", "<key>", "--model=c d.gguf", "ORG/REPO", "{{a}} / {{b}}"],
        "text": "open /usr/bin/python as <user>",
        "versions": {"cuda": "12.8.0.38"},
        "api_key": "<key>",
        "prompt_tokens": 9,
        "chunk_ns": [1, 2, 3],
        "elsewhere": {"llama-cpp,rpc=<1>": {"y": None}},
    }
    assert counts == {"path": 4, "key": 2, "user": 1, "host": 1}


def test_an_arm_is_written_as_its_plan_writes_it() -> None:
    arm = "llama-cpp,rpc=10.0.0.5:1+box:2,ub=64"

    assert redact(arm, KNOWN) == public(arm)
    assert public(public(arm)) == public(arm)


def test_variables_that_hold_keys_are_told_by_their_names() -> None:
    assert all(map(is_secret, ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "MY_PASSWORD")))
    assert not any(map(is_secret, ("KEYBOARD", "TOKENIZERS_PARALLELISM", "PATH", "SSH_AUTH_SOCK")))


# ── whatever the text ───────────────────────────────────────────────────────────────────────

PIECES = st.sampled_from(
    [
        *KNOWN.homes, *KNOWN.folders, *KNOWN.users, *KNOWN.hosts, *KNOWN.secrets, *KNOWN.serials, *KNOWN.kept,
        "/", "\\", ":", "'", '"', " ", "=", "@", ".", "~", "<", ">", "<user>", "<key>", "<2>", ",rpc=", "a:1", "+",
        "-I", "//",
        "/x/y", "C:\\", "http://", "file://", "10.0.0.5", "::1", "fe80::1", "12:34:56:78:9a:bc", "Bearer ",
        "abcdefghij", "?key=", "TOKEN=", "$HOME", "user=", "a b", "é", "\n", "%20", "/dev/", "/api/", "machine-id: ",
        DIGEST, "10:27:15", "\\n", "\x1b[32m", "%2F", "password: ", "nas.lan", "Version: ", "A B/",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join)


@given(TEXTS)
def test_twice_is_once(text: str) -> None:
    counts: Counter[str] = Counter()
    once = redact(text, KNOWN)

    assert redact(once, KNOWN, counts) == once
    assert counts == {}
    assert redact_known(redact_known(text, KNOWN), KNOWN) == redact_known(text, KNOWN)


@given(TEXTS, st.sampled_from([" ", "\n", ", ", "(", "'", '"', "=", ":"]), TEXTS)
def test_nobody_is_named_wherever_it_stands(before: str, sign: str, after: str) -> None:
    strict = dataclasses.replace(KNOWN, kept=())
    for word in ("/home/zaphod", "zaphod", "heartofgold", "s3cr3tvalue"):
        text = redact(f"{before}{sign}{word} {after}", strict)

        assert re.search(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", text) is None, text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_numbers_and_shape_of_data_stay(data: object) -> None:
    redacted = redact_data(data, KNOWN)

    assert _shape(redacted) == _shape(data)
    assert json.dumps(redacted)


def _shape(value: object) -> object:
    if isinstance(value, dict):
        return [_shape(each) for each in value.values()]
    if isinstance(value, list):
        return list(map(_shape, value))
    return str if isinstance(value, str) else value


@given(
    st.integers(0, 2**64),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text("0123456789abcdef", min_size=64, max_size=64),
)
def test_numbers_and_digests_are_none_of_its_business(whole: int, part: float, digest: str) -> None:
    text = f"{whole} {part} b{whole} {digest} {part:.2f}× ({part:.3f}–{part:.3f})"

    assert redact(text, KNOWN) == text


def test_what_else_ran_on_the_machine_is_not_told() -> None:
    counts: Counter[str] = Counter()
    notes = [
        "diary of Zoe (pid 4242) holds 600 MiB of NVIDIA H200 as the run began",
        "a process (pid 7) holds an unknown amount of 1: NVIDIA H200 as the run began",
        "programs that cannot be seen from here hold 600 MiB of NVIDIA H200 as the run began",
    ]

    assert redact_data({"notes": notes}, Private(), counts)["notes"] == [
        "another program holds 600 MiB of NVIDIA H200 as the run began",
        "another program holds an unknown amount of 1: NVIDIA H200 as the run began",
        notes[2],
    ]
    assert counts == {"program": 2}
