"""What of a run tells more about a person than about a machine, and how it is taken out.

Pure: who and where somebody is comes in as `Private`, to which a run adds what it gives away itself (`learn`). An
absolute path becomes the name at its end, all else a word in angle brackets. Doing it twice changes nothing more.
Numbers, builds and digests are none of its business, and how a model is called stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

from harness import registry
from harness.arms import CHOICES, KNOBS
from harness.errors import RunRefused


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Accounts and machines that are called as everybody's are: nothing is told by them.
NOBODY = _words(
    """root user users admin administrator guest nobody default public shared ubuntu debian fedora arch centos alpine
    linux darwin macos windows wsl docker podman container runner build builder ci github gitlab vscode jovyan
    codespace ec2-user opc azureuser pi home tmp work dev test tester demo local localhost localdomain host hostname
    server machine computer desktop laptop pc workstation gpu cpu cuda rocm vulkan metal rpc llama llama-cpp
    llama-server ollama llamaduel gguf model models bench benchmark python none null true false linuxbrew conda"""
)
# Names of people and machines that are words as well, and stand in logs and reports.
WORDS = _words(
    """max min will mark bill rich art may june april august grace hope joy sky ray gene chip dash page chase drew guy
    rob sue pat miles frank dean lane reed cole heath cliff dale glen rose ivy iris ruby pearl faith star king prince
    ace bit byte core fast slow speed token tokens decode prefill cache graph graphs main master node client
    auto moe expert experts ngl ncmoe layer layers offload context batch ubatch threads tensor split"""
)
JOINS = _words("and or is in to at of on by from for with not as has was the a an into via")  # between two paths
SHORT = 3  # letters; a shorter name is too often part of something else
FILES = "gguf|safetensors|bin|log|jsonl?|md|txt|csv|html|svg|py|sh|toml|so|exe|c|cc|cpp|cu|h|hpp|go|tar|gz|zip|ya?ml"
KNOWN_SITES = re.compile(
    r"host\.docker\.internal|metadata\.google\.internal|localhost\.localdomain"
    r"|(?:.+\.)?(?:localhost|github\.com|githubusercontent\.com|huggingface\.co|hf\.co|ollama\.(?:com|ai)|pypi\.org"
    r"|python\.org|nvidia\.com|w3\.org|json-schema\.org|apache\.org|opensource\.org)",
    re.I,
)
# ── where a value stands ──
WHOLE_PATHS = _words("file path weights model prompts llama_server ollama openai resume out fail_on_regression argv")
EVIDENCE = _words("text expected")  # what an engine wrote: paths and addresses in it are nobody's
VERSIONS = _words("version versions driver kernel libc python cpu")  # four numbers and dots are no address
SECRET_NAME = (  # whole, in any case
    r"(?:(?:[\w-]*[_-])?(?:api[_-]?key|key|token|secret|passwd|credentials?|authorization)|[\w-]*password)"
)
_SECRET_KEY = re.compile(
    r"(?:.*[_-])?(?:api[_-]?key|(?:access|auth|hf|bearer)[_-]token|secret(?:[_-]key)?|password|passwd|credentials?"
    r"|authorization)",
    re.I,
)
_SECRET_FLAG = re.compile(r"--?(?:api-key|hf-token|token|password|secret|ssl-key-file|api-key-file)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """What is known of the person and of the machine. Everything else is told by its form."""

    homes: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()  # absolute, or as they were typed
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # with their domain, if it is known
    secrets: tuple[str, ...] = ()
    serials: tuple[str, ...] = ()
    common: frozenset[str] = frozenset()  # words of the run's own format
    kept: tuple[str, ...] = ()  # how the model and its file are called


Rule = tuple[str, "re.Pattern[str]", Callable[["re.Match[str]"], str]]


def redact(text: str, private: Private, counts: Counter[str] | None = None) -> str:
    """The text without what is private. `counts` gets how many of a kind were replaced."""
    return _apply(_rules(private)[0], text, counts)


def redact_known(text: str, private: Private, counts: Counter[str] | None = None) -> str:
    """Only what is known of this person and machine."""
    return _apply(_known(private), text, counts)


def redact_data(value: Any, private: Private, counts: Counter[str] | None = None, key: str = "") -> Any:
    """JSON data without what is private; what a value is follows from its key too."""
    if isinstance(value, str):
        if key and _SECRET_KEY.fullmatch(key):
            return _counted(value, "<key>" if value else value, "key", counts)
        if key in EVIDENCE:
            return redact_known(value, private, counts)
        if key in VERSIONS:
            return _apply(_rules(private)[1], value, counts)
        if key in WHOLE_PATHS:
            value = _counted(value, _end_of(value, key, private), "path", counts)
        return redact(value, private, counts)
    if isinstance(value, Mapping):
        return {
            redact(name, private, counts): redact_data(each, private, counts, key if key in VERSIONS else name)
            for name, each in value.items()
        }
    if isinstance(value, list):
        if value and isinstance(value[0], int | float):
            return value  # stamps, by the thousand
        flags = [None, *value]
        return [
            redact_data(each, private, counts, "api_key" if _takes_secret(flag) else key)
            for flag, each in zip(flags, value, strict=False)
        ]
    return value


def is_secret(variable: str) -> bool:
    """Whether an environment variable is called as those that hold a key."""
    return re.fullmatch(SECRET_NAME, variable, re.I) is not None


def learn(private: Private, header: Mapping[str, Any], texts: Iterable[str] = ()) -> Private:
    """`private` with what a run's header (as JSON) and its other texts give away: folders, users, hosts."""
    folders, users, homes = (dict.fromkeys(each) for each in (private.folders, private.users, private.homes))
    hosts, common = dict.fromkeys(private.hosts), {*private.common, *_grammar(), *_public_words(header)}
    told = list(texts)
    for key, value in _strings(header):
        if re.fullmatch(r"[a-z][a-z0-9_]*", key):  # a field, and no text that somebody wrote
            common.update(key.split("_"))
        if key in WHOLE_PATHS and _is_path(value, key) and (folder := _split(value)[0]):
            folders[folder] = None
            for above in _telling(folder):
                folders[above] = None
                users.update(dict.fromkeys(_people(above)))
        if key == "rpc" and (name := _host_of(value)):
            hosts[name] = None
        told.append(value)
    for folder in (*private.folders, *private.homes):
        for above in _telling(folder):
            folders[above] = None
            users.update(dict.fromkeys(_people(above)))
    for text in told:
        for home, name in _owners(text):
            users[name] = None
            if " " in name:
                homes[home] = None
        folders.update((found[0], None) for found in _VOLUME.finditer(text))
    drawn, model = header.get("plan") or {}, header.get("model") or {}
    for _, value in _strings({key: drawn.get(key) for key in ("preset", "settings")}):
        common.add(value.lower())
    kept = [str(model.get("name", "")), _split(str(model.get("file", "")))[1]]
    return dataclasses.replace(
        private,
        homes=tuple(homes),
        folders=tuple(folders),
        users=tuple(users),
        hosts=tuple(hosts),
        common=frozenset(common),
        kept=tuple(dict.fromkeys((*private.kept, *filter(None, kept)))),
    )


@lru_cache(1)
def _grammar() -> frozenset[str]:
    """The words that an arm may be written with."""
    words = {*KNOBS, *KNOBS.values(), *(choice for choices in CHOICES.values() for choice in choices)}
    with contextlib.suppress(RunRefused):  # an adapter that cannot be loaded has no words
        words.update(registry.backends())
    return frozenset(part for word in words for part in _parts(word))


def _public_words(header: Mapping[str, Any]) -> set[str]:
    """What engines, processors and systems are called. A text with something private in it is no such name."""
    machine, model = header.get("machine") or {}, header.get("model") or {}
    arms = [str(arm) for arm in (header.get("plan") or {}).get("arms") or ()]
    told = [*_strings({key: machine.get(key) for key in ("cpu", "gpus", "visible_gpus", "system")})]
    told += [("", str(model.get("architecture")))]
    told += [
        ("", str(engine.get("product")))
        for each in header.get("contenders") or ()
        if isinstance(each, Mapping) and isinstance(engine := each.get("engine"), Mapping)
    ]
    names = {part for _, text in told if redact(text, Private()) == text for part in _parts(text)}
    return names | {part for arm in arms for word in re.findall(r"[@,]([\w-]+)=", arm) for part in _parts(word)}


def _parts(text: str) -> set[str]:
    """The words of a text, whole and without what joins them."""
    whole = text.lower().split()
    return {*whole, *(part for word in whole for part in re.split(r"[\W_]+", word) if part)}


def _telling(folder: str) -> list[str]:
    """A folder and those above it whose own names hold a space or a letter of another alphabet than a program's."""
    found = []
    while (above := _split(folder))[0] and above[1]:
        if re.search(r"\S \S|[^\x00-\x7f]", above[1]):
            found.append(folder)
        folder = above[0]
    return found


def _people(folder: str) -> list[str]:
    """Whom a folder seems to be called after: `Jane Doe`, `Jane's disk`."""
    name = _split(folder)[1]
    if owner := re.match(r"([^\W\d_a-z][^\W\d_]{2,})['’]s\b", name):
        return [owner[1]]
    words = name.split()
    return [name] if 2 <= len(words) <= 3 and all(word.isalpha() and word[0].isupper() for word in words) else []


def _standing(name: str, private: Private) -> str:
    """Where a name is replaced: everywhere; only beside what makes it a name; nowhere, for it is everybody's."""
    low = name.lower()
    if not name or low in NOBODY or not re.search(r"[^\W\d_]", name):
        return "nowhere"
    if len(name) < SHORT or low in WORDS or low in private.common:
        return "beside"
    return "everywhere"


# ── data ────────────────────────────────────────────────────────────────────────────────────


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text with the key that it stands under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name, ""
            yield from _strings(each, name)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each, key)


def _takes_secret(flag: Any) -> bool:
    return isinstance(flag, str) and _SECRET_FLAG.fullmatch(flag) is not None


def _counted(old: str, new: str, kind: str, counts: Counter[str] | None) -> str:
    if counts is not None and new != old:
        counts[kind] += 1
    return new


def _is_path(value: str, key: str = "") -> bool:
    """Whether a value where paths stand is one; `ollama:NAME`, `hf:ORG/REPO`, URLs and other arguments are none."""
    if key == "argv" and not _ABSOLUTE.match(value):
        return False
    bare = re.fullmatch(r"[\w+.-]{2,}:(?![/\\](?![/\\])).*", value, re.S) is None
    return bare and "\n" not in value and ("/" in value or "\\" in value) and not _KEPT_PATH.match(value)


_ABSOLUTE = re.compile(r"[/~\\]|[A-Za-z]:[/\\]")


def _split(path: str) -> tuple[str, str]:
    """Folder and last name, by either slash."""
    parts = re.split(r"(?:/|\\(?![ ()&'\"]))+(?=[^/\\])", path.rstrip("/\\"))
    last = parts[-1] if parts else ""
    return path.rstrip("/\\")[: len(path.rstrip("/\\")) - len(last)].rstrip("/\\"), last


def _end_of(value: str, key: str, private: Private) -> str:
    """The name at the end of a path that is the whole value; an option's `--model=` stays before it."""
    found = re.fullmatch(r"(?P<flag>--?[\w-]+=)?(?P<path>(?:file://)?(?:[/~\\]|[A-Za-z]:[/\\]).*)", value, re.S)
    flag, path = (found["flag"] or "", found["path"]) if found else ("", value)
    if not _is_path(path, key) and not path.startswith("file://"):
        return value
    if path.rstrip("/\\") in private.homes or _AT_HOME.fullmatch(path):
        return f"{flag}~"
    return flag + (_split(path)[1] or path)


def _host_of(endpoint: str) -> str:
    host = re.sub(r":\d+$", "", endpoint)
    return "" if re.fullmatch(r"[\d.:\[\]]*|localhost|<.*", host) else host


_NAME = r"[^/\s'\"\\:;,|<>()\[\]]+"
_MORE = rf"(?: (?!(?:{'|'.join(sorted(JOINS))}) ){_NAME})"  # of a name of several words: a slash closes it
_OWNER = re.compile(
    rf"(?:/(?:var/)?home|/Users|/(?:run/)?media|/mnt/[a-z]/Users)/(?P<one>{_NAME}{_MORE}{{1,2}}(?=/[^\s/])|{_NAME})"
    r"|[A-Za-z]:[\\/]+(?:Users|Documents and Settings)[\\/]+(?P<two>[^\\/:*?\"'<>|\n]+)(?=[\\/])"
)
_VOLUME = re.compile(rf"(?:/Volumes|/(?:run/)?media/{_NAME})/{_NAME}{_MORE}{{1,3}}(?=/[^\s/])")


def _owners(text: str) -> list[tuple[str, str]]:
    """The home folders that are named, and whose they are."""
    return [(found[0], name) for found in _OWNER.finditer(text) if (name := found["one"] or found["two"])]


# ── rules ───────────────────────────────────────────────────────────────────────────────────


def _apply(rules: Iterable[Rule], text: str, counts: Counter[str] | None) -> str:
    """All rules, until nothing changes. Each replacement takes signs away that no rule puts back, so it ends."""
    while True:
        before = text
        text = _once(rules, text, counts)
        if _ESCAPED.search(text):  # `\nzaphod` is the name at the start of a line, and no name that begins with n
            text = _once(rules, _ESCAPED.sub(rf"\g<0>{_BORDER}", text), counts).replace(_BORDER, "")
        if text == before:
            return text


def _once(rules: Iterable[Rule], text: str, counts: Counter[str] | None) -> str:
    for kind, pattern, new in rules:

        def put(found: re.Match[str], kind: str = kind, new: Callable[..., str] = new) -> str:
            return _counted(found[0], new(found), kind, counts)

        text = pattern.sub(put, text)
    return text


# What ends in a letter or a digit and is none: escapes of strings, of URLs, and the colours of a terminal.
_ESCAPED = re.compile(
    r"(?:\x1b|\\(?:u00|x)1[Bb]|\\033|\\e)\[[\d;?]*[A-Za-z]|\\(?:[nrtbfv]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4})|%[0-9A-Fa-f]{2}"
)
_BORDER = "\ufdd0"  # a sign that stands for nothing, and is in no text


# One sign of a name in a path: what ends a name is a space that is not escaped, a quote, a slash, or a separator of
# a list before the next path.
_SIGN = r"(?:\\[ ()&'\"]|[^\s/\\'\"`,:;=|<>&(]|[,:;=|<>&(](?![/\\~]))"
_LEFT = r"(?:(?<![\w./~\\>})-])|(?<=-[IL])(?<!\w-[IL])|(?<=\s>)|(?<=\s[12&]>))"
_KEPT_PATH = re.compile(r"/(?:api|v1|proc|sys|etc|dev(?!/(?:shm|disk)/))/")  # of servers, and of every Linux alike
_AT_HOME = re.compile(r"(?:/(?:var/)?home|/Users|/mnt/[a-z]/Users|[A-Za-z]:[\\/]+Users)[\\/]+[^\\/]+[\\/]*")


def _last(found: re.Match[str]) -> str:
    path = found["path"]
    if _AT_HOME.fullmatch(path):
        return f"{found['before']}~{found['after']}"
    return f"{found['before']}{_split(path)[1] or path}{found['after']}"


def _path(pattern: str, before: str = "", after: str = "", flags: int = 0) -> Rule:
    return "path", re.compile(f"(?P<before>{before})(?P<path>{pattern})(?P<after>{after})", flags), _last


def _spaced(found: re.Match[str]) -> str:
    """The name at the end of a path with folders of several words."""
    words = found[0].split(" ")
    if any(re.search(rf"\.(?:{FILES})$", word) for word in words[:-1]):
        return found[0]  # a file, and after it another word
    return _last(found)


def _decoded(found: re.Match[str]) -> str:
    """The name at the end of a path as a URL has it, still so written."""
    path = unquote(found["path"])
    if _KEPT_PATH.match(path):
        return found[0]
    if _AT_HOME.fullmatch(path):
        return "~"
    return next(part for part in reversed(re.split("%2[Ff]|%5[Cc]", found["path"])) if part)


# A folder of several words: each begins like a name, or the first says whose it is.
_WORDS = rf"(?:{_SIGN}|(?<=[^\W\d_])'(?=s ))+(?:(?: |\\040)[^\W\d_a-z](?:{_SIGN})+|(?<=['’]s) (?:{_SIGN})+){{0,4}}"
_PATHS: tuple[Rule, ...] = (
    (
        "path",
        re.compile(
            r"(?:(?<![\w.%-])|(?<=%[0-9A-F]{2}))"
            r"(?P<path>(?:[A-Za-z]%3[Aa])?(?:(?:%2[Ff]|%5[Cc])+(?:[\w.~+@=-]|%(?!2[Ff]|5[Cc])[0-9A-Fa-f]{2})+){2,}(?:%2[Ff])*)"
        ),
        _decoded,
    ),
    _path(r"(?i:\bfile:/+)[^\s'\"<>]+"),
    # Quoted, so spaces belong to it; an option may stand before it inside the quotes.
    *(
        _path(
            rf"(?!{_KEPT_PATH.pattern})(?:/(?![/\s])|~/)[^{sign}\n]*/[^{sign}\n/]+",
            before=rf"{sign}(?:--?[\w-]+=)?",
            after=sign,
        )
        for sign in ("'", '"')
    ),
    _path(
        r"[A-Za-z]:[\\/]+(?:[^\\/:*?\"'<>|\n]+[\\/]+)*[^\\/:*?\"'<>|\s]+|\\\\(?:\\\\)?(?=[\w.$-])"
        r"(?:[^\\/:*?\"'<>|\n]+[\\/]+)+[^\\/:*?\"'<>|\s]+",
        before=r"(?:(?<![\w\\])file:///|(?<![\w\\>]))",
    ),
    _path(
        rf"(?:~[\w.-]*|\$HOME|\$\{{HOME\}}|%USERPROFILE%|%HOMEPATH%)(?:[\\/]+{_SIGN}+)+[\\/]*",
        before=r"(?<![\w/.~\\-])",
    ),
    (
        "path",
        re.compile(
            rf"(?P<before>{_LEFT})(?P<path>(?!{_KEPT_PATH.pattern})/(?!/)(?:{_WORDS}/+)*"
            rf"(?=[^/\n]* ){_WORDS}/+(?:{_WORDS}/+)*(?:{_SIGN})*)(?P<after>)"
        ),
        _spaced,
    ),
    _path(
        rf"(?!{_KEPT_PATH.pattern})(?:(?<!:)/{{2,}}|/(?!/))(?:(?:{_SIGN})+/+)+(?:{_SIGN})*",
        before=_LEFT,
    ),
)


def _word(word: str) -> Callable[[re.Match[str]], str]:
    return lambda _: word


def _after(word: str) -> Callable[[re.Match[str]], str]:
    """The part before it stays."""
    return lambda found: f"{found['before']}{word}"


_IS = r"(?:\\?[\"'])?\s*[=:]\s*(?:\\?[\"'])?"
_VALUE = r"(?!<|(?:null|none|true|false|bearer|basic|digest)\b|-?[\d.]+(?![\w-]))[^\s\"',;&<>\\\])}]"
_KEYS: tuple[Rule, ...] = (
    (
        "key",
        re.compile(
            r"(?<![\w-])(?:sk-[\w-]{16,}|(?:hf|api)_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
            r"|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|nvapi-[\w-]{16,}"
            r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        _word("<key>"),
    ),
    ("key", re.compile(r"(?i)(?P<before>\b(?:bearer|basic)\s+)(?!<key>)[\w.~+/=-]{8,}"), _after("<key>")),
    ("key", re.compile(r"(?P<before>://)(?!<key>@)[^\s/@'\"<>]+(?=@)"), _after("<key>")),
    (
        "key",
        re.compile(
            rf"(?i)(?P<before>[?&](?:{SECRET_NAME}|sig|signature|auth)=)(?!<key>)[^\s&'\"#<>]+",
        ),
        _after("<key>"),
    ),
    (
        "key",
        re.compile(
            r"(?P<before>(?<![\w-])--?(?:api-key|hf-token|token|password|secret)(?:=|\s+))(?!<key>)[^\s'\"<>-]\S*"
        ),
        _after("<key>"),
    ),
    (
        "key",
        re.compile(
            r"(?P<before>\b(?:[A-Z0-9]+_)*(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)[=:])"
            r"(?!<key>|\d+\b)[^\s\]\"',;<>]+"
        ),
        _after("<key>"),
    ),
    (
        "key",
        re.compile(
            rf"(?i)(?P<before>(?<![\w-])(?:[\w-]*[_-])?(?:api[ _-]?key|access[_-]?key"
            rf"|secret(?:[_-]?(?:access[_-]?)?key)?|passw(?:or)?d|passphrase|credentials?|authorization|(?:access|auth|bearer|hf|refresh|session)[_-]?token)"
            rf"{_IS}){_VALUE}+"
        ),
        _after("<key>"),
    ),
    # Of a model the tokens are words and numbers; what grants access is longer, or stands in an assignment.
    ("key", re.compile(rf"(?P<before>(?<![\w-])token(?:=[\"']?|\\?[\"']:\s*\\?[\"'])){_VALUE}{{6,}}"), _after("<key>")),
    ("key", re.compile(rf"(?P<before>(?<![\w-])[Tt]oken:\s+){_VALUE}{{16,}}"), _after("<key>")),
)
_HEX = "[0-9A-Fa-f]"
_SERIALS: tuple[Rule, ...] = (
    ("serial", re.compile(r"(?P<before>/dev/disk/by-\w+/)(?!<)[^\s'\"]+"), _after("<serial>")),
    (
        "serial",
        re.compile(rf"(?<![\w-])(?:(?:GPU|MIG)-)?{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}(?![\w-])"),
        _word("<serial>"),
    ),
    (
        "serial",
        re.compile(r"(?i)(?P<before>\b(?:machine[-_ ]?id|serial(?:[-_ ]?(?:number|no))?)\s*[:=]\s*\"?)(?!<)[\w-]{4,}"),
        _after("<serial>"),
    ),
)
# What else ran on the machine: a note names it with its pid, as `preflight.Foreign` says it.
_PROGRAMS: tuple[Rule, ...] = (
    (
        "program",
        re.compile(r"\A.{1,200}? \(pid \d+\) holds (?=.* as (?:the run began|it went on)\Z)", re.S),
        _word("another program holds "),
    ),
)


def _ip(found: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(found[0])
    except ValueError:
        return found[0]
    everybody = address.is_loopback or address.is_unspecified or found[0] == "255.255.255.255"
    return found[0] if everybody else "<address>"


_VERSION = re.compile(
    r"(?i)(?<![^\W_])(?:versions?|release|driver|cuda|cudnn|nccl|rocm|hip|gcc|g\+\+|clang|g?libc|toolkit|firmware|vbios|v)"
    r"(?:[ _-]version)?[\"']?(?: \([^()]*\))?[\s:=(\"'/-]{1,3}$|\bb\d{4,} \($"
)


def _ip4(found: re.Match[str]) -> str:
    """An address, unless a word before it says that the four numbers are a version; none has a port."""
    start, end = found.span()
    is_version = _VERSION.search(found.string[max(0, start - 40) : start]) and found.string[end : end + 1] != ":"
    return found[0] if is_version else _ip(found)


def _site(found: re.Match[str]) -> str:
    host = found["host"].rstrip(".")
    return found[0] if re.fullmatch(r"[\d.]+", host) or KNOWN_SITES.fullmatch(host) else f"{found['before']}<host>"


_ADDRESSES: tuple[Rule, ...] = (
    (
        "e-mail",
        re.compile(rf"(?i)(?<![\w.+-])[\w.+-]+@(?:[\w-]+\.)+(?!(?:{FILES})\b)[a-z]{{2,}}(?![\w-])"),
        _word("<address>"),
    ),
    (
        "host",
        re.compile(
            r"(?<=,rpc=)(?:\[[^\]\s]+\]|[^\s,;'\"+<>\[\]:]+)(?::\d+)?(?:\+(?:\[[^\]\s]+\]|[^\s,;'\"+<>\[\]:]+)(?::\d+)?)*"
        ),
        lambda found: f"<{len(found[0].split('+'))}>",  # as the plan has it
    ),
    (
        "host",
        re.compile(
            r"(?i)(?P<before>\b(?:https?|wss?|tcp|ssh|ftps?|sftp|git|grpcs?|smb|nfs)://(?:<key>@)?)"
            r"(?P<host>[^\W_](?:[\w.-]*\w)?)"
        ),
        _site,
    ),
    (
        "host",
        re.compile(
            r"(?i)(?P<before>(?<![\w.-]))(?P<host>[^\W_](?:[\w-]*\.)(?:[\w-]+\.)*"
            r"(?:lan|corp|local|internal|home|intranet|localdomain|home\.arpa|ts\.net))(?![\w(-]|\.\w)"
        ),
        _site,
    ),
    (
        "address",
        re.compile(
            rf"(?<![\w:-])(?:{_HEX}{{2}}:){{5}}{_HEX}{{2}}(?![\w:-])|(?<![\w-])(?=[\d-]*[A-Fa-f])(?:{_HEX}{{2}}-){{5}}{_HEX}{{2}}(?![\w-])"
        ),
        _word("<address>"),
    ),
    (
        "address",
        re.compile(
            rf"(?<![\w:.])(?=[A-Fa-f:]*\d)(?:{_HEX}{{1,4}})?(?::{{1,2}}{_HEX}{{1,4}}){{1,7}}(?:::)?(?![\w:]|\.\d)"
            rf"|(?<![\w:.])(?=[A-Fa-f]*\d){_HEX}{{1,4}}(?::{_HEX}{{1,4}})*::(?![\w:]|\.\d)"
        ),
        _ip,
    ),
    (
        "address",
        re.compile(
            r"(?i)(?<![^\W_])(?<!\d\.)"
            r"(?!\d+\.\d\d\.\d{3}\.\d{3} [IWED] )"  # minutes to microseconds, as llama.cpp begins a line of its log
            r"(?:\d{1,3}\.){3}\d{1,3}(?![^\W_]|\.\d)"
        ),
        _ip4,
    ),
)


@lru_cache(8)
def _rules(private: Private) -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
    """All rules; and all but the one that takes `12.8.0.38` for an address."""
    before = (*_PROGRAMS, *_exact(private), *_KEYS, *_SERIALS, *_folders(private), *_PATHS, *_ADDRESSES[:-1])
    names = _names(private)
    return (*before, _ADDRESSES[-1], *names), (*before, *names)


@lru_cache(8)
def _known(private: Private) -> tuple[Rule, ...]:
    return (*_exact(private), *_folders(private), *_names(private))


def _any(words: Iterable[str]) -> str:
    """The longest first, so that none hides another."""
    return "|".join(map(re.escape, sorted(set(words), key=lambda word: (-len(word), word))))


def _exact(private: Private) -> tuple[Rule, ...]:
    found = (("key", private.secrets), ("serial", private.serials))
    return tuple((kind, re.compile(_any(words)), _word(f"<{kind}>")) for kind, words in found if any(words))


def _folders(private: Private) -> tuple[Rule, ...]:
    """Folders that are known, however they are spelled: these may hold spaces, so they are matched as they are."""
    spelled: dict[str, str] = {}
    for folder in (*private.homes, *private.folders):
        end = folder.rstrip("/\\")
        if not end or end in (".", "..", "~"):
            continue
        last = _split(end)[1] or end
        alone = "~" if end in {home.rstrip("/\\") for home in private.homes} else last
        if alone != "~" and re.search(r"\S \S|[^\x00-\x7f]", last):
            alone = "<folder>"
        ascii_ = json.dumps(end)[1:-1]
        for text in (end, quote(end), re.sub(r"([ ()&'\"])", r"\\\1", end), ascii_, end.replace("\\", "/")):
            spelled.setdefault(text, alone)
    if not spelled:
        return ()
    left = rf"(?:\b[Ff]ile:(?://(?:localhost)?)?|{_LEFT})"
    pattern = re.compile(
        rf"{left}(?P<folder>{_any(spelled)})(?P<rest>(?:[\\/]+(?:{_SIGN})+)*)(?P<end>[\\/]*)(?![\w-]|\.\w)"
    )

    def end_of(found: re.Match[str]) -> str:
        if not found["rest"]:
            absolute = re.match(r"[/\\~]|[A-Za-z]:", found["folder"])
            return spelled[found["folder"]] if absolute or found["end"] else found[0]
        return _split(found["rest"])[1] or found["rest"]

    return (("path", pattern, end_of),)


def _names(private: Private) -> tuple[Rule, ...]:
    """Users and hosts. One that is a short or a usual word is replaced only where it must be a name."""
    rules: list[Rule] = []
    kept = _any(name for name in private.kept if len(name) >= SHORT) or "(?!)"
    for kind, names in (("host", private.hosts), ("user", private.users)):
        by: dict[str, set[str]] = {"everywhere": set(), "beside": set(), "nowhere": set()}
        for name in names:
            by[_standing(name, private)].add(name)
            if kind == "host":
                short = name.split(".")[0]
                by[_standing(short, private)].add(short)
        domain = rf"(?:\.(?!(?:{FILES})(?![\w-]))[a-z][a-z0-9-]*)*" if kind == "host" else ""
        if by["everywhere"]:
            spelled = _any(by["everywhere"]).replace("\\ ", r"(?:\\?[ _.+-]|%20)")
            pattern = rf"(?<![^\W_])(?:(?P<kept>{kept})|(?:{spelled}){domain})(?![^\W_])"
            rules.append((kind, re.compile(pattern, re.I), _unless_kept(f"<{kind}>")))
        if by["beside"]:
            word = rf"(?:{_any(by['beside'])})"
            told = "user(?:name)?|login|logname|owner" if kind == "user" else "host(?:name)?|node"
            beside = (
                rf"(?P<before>(?<![^\W_])(?:{told})\s*[=:]\s*[\"']?){word}(?![^\W_])"
                if kind == "user"
                else rf"(?P<before>(?<![^\W_])(?:{told})\s*[=:]\s*[\"']?|(?<=[^\W_]@)|(?<=>@)){word}(?![^\W_]|=)"
            )
            rules.append((kind, re.compile(beside, re.I), _after(f"<{kind}>")))
            if kind == "user":
                rules.append((kind, re.compile(rf"(?<![^\W_]){word}(?=@(?:<host>|[\w-]+:))", re.I), _word("<user>")))
    return tuple(rules)


def _unless_kept(word: str) -> Callable[[re.Match[str]], str]:
    return lambda found: found[0] if found["kept"] is not None else word
