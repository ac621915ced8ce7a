"""Tables for a terminal of what is known without a run: a model, the arms of a plan, engines."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from harness.words import NONE, count, memory, plain

DEVICE = "The device holds weights and context; what it computes in comes besides, about."
WIDE = 200  # a file or a pipe has no width: nothing is left out
PROSE = 120  # columns of a sentence, at most
SCREEN = 40  # lines, at most, of what is to be seen at once
WORD = 4  # columns of the longest of ok, warn, fail
COLOURS = {"ok": 32, "warn": 33, "fail": 31}
FACT = 24  # columns of the name of a fact
CLASS_WORDS = {
    "dense_ffn": "dense feed-forward", "other": "router, norms, other", "mtp": "multi-token prediction",
}  # fmt: skip
SHARES = {
    "device_bytes": "device", "device_weights_bytes": "weights", "device_context_bytes": "context",
    "device_compute_bytes": "compute", "host_bytes": "host",
}  # fmt: skip
READ = "host a token"
# What a narrow table leaves out, the more the narrower: words, and what the other columns tell too.
NARROW = (
    ("where",), ("where", "context"), ("where", "context", "weights"), ("where", "context", "weights", "compute"),
    ("where", "context", "weights", "compute", READ),
)  # fmt: skip


def inspect_table(found: Mapping[str, Any], width: int | None = None) -> str:
    """What `inspect` knows, for a terminal. Where it is narrow, less important columns go first."""
    width = width or _width()
    classes = found["tensor_classes"]
    unit = _Unit([each["bytes"] for each in classes])
    tied = {"embedding": "embedding, also head"} if all(each["class"] != "head" for each in classes) else {}
    tensors = [
        (
            (CLASS_WORDS | tied).get(each["class"], each["class"].replace("_", " ")),
            unit.show(each["bytes"]),
            unit.show(each["bytes_per_token"]),
            _mix(each["types"]),
        )
        for each in classes
    ]
    unit = _Unit([each["device_bytes"] or each["device_weights_bytes"] for each in found["placements"]])
    first: dict[str, str] = {}
    places = []
    for each in found["placements"]:
        same = first.setdefault(each["class"], each["placement"])
        where = each["words"] if same == each["placement"] else f"= {same}"
        sizes = (unit.show(each[name]) for name in (*SHARES, "host_bytes_per_token"))
        places.append((each["placement"], *sizes, where))
    return "\n\n".join(
        [
            "\n".join(_fact(name, value, width) for name, value in _facts(found)),
            _lined(("tensors", unit.name, "read a token", "types"), tensors, right=(1, 2)),
            *(_prose(note, width) for note in found["notes"]),
            _fitting(("placement", *SHARES.values(), READ, "where"), places, ((), (READ,), *NARROW), width),
            _prose(
                f"{unit.name} at a context of {found['context']} tokens, its cache in f16. {DEVICE} What a token reads "
                "on the host is what it mostly waits for.",
                width,
            ),
        ]
    )


def _fact(name: str, value: object, width: int) -> str:
    indent = " " * FACT
    return f"{name:<{FACT}}" + _prose(str(value), width, indent).removeprefix(indent)


def _facts(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    experts = NONE
    if found["experts"]:
        shared = f" and {found['experts_shared']} shared" if found["experts_shared"] else ""
        experts = f"{found['experts_used']} of {found['experts']}{shared} a token, in {found['expert_layers']} layers"
    files = count(len(found["shards"]), "file")
    layers = str(found["layers"])
    if found["expert_layers"] and found["leading_dense_layers"]:
        layers += f", the first {found['leading_dense_layers']} without experts".replace(" 1 ", " ")
    if found["mtp_blocks"]:
        layers += f"; {count(found['mtp_blocks'], 'block')} more for multi-token prediction"
    facts: list[tuple[str, object]] = [
        ("model", found["name"]),
        ("architecture", f"{found['arch']}, {found['type'] or NONE}"),
        ("layers", layers),
        ("attention", _attention(found["attention_layers"])),
        ("experts", experts),
        ("weights", f"{memory(found['weights_bytes'])}, in {files} of {memory(found['file_bytes'])}"),
        ("read per decoded token", memory(found["bytes_per_token"])),
        ("context memory", _context(found)),
        ("trained context", found["context_train"] or NONE),
    ]
    return [*facts, *([("weights digest", found["weights_digest"][:16])] if found["weights_digest"] else [])]


def _attention(layers: Mapping[str, Any] | None) -> str:
    """ "full in 10 layers, recurrent in 30"."""
    if layers is None:
        return NONE
    kinds = {
        "full": "full",
        "window": f"over a window of {layers['window_tokens']} tokens",
        "latent": "latent (MLA)",
        "recurrent": "recurrent",
        "none": "without memory of its own",
    }
    told = [f"{words} in {layers[kind]}" for kind, words in kinds.items() if layers[kind]]
    return ", ".join([f"{told[0]} layers", *told[1:]])


def _context(found: Mapping[str, Any]) -> str:
    """ "20.0 KiB a token and 62.8 MiB of states: 143 MiB at 4096 tokens"."""
    if found["context_bytes"] is None:
        return NONE
    told = [
        f"{memory(found['context_bytes_per_token'])} a token" if found["context_bytes_per_token"] else "",
        f"{memory(found['window_bytes'])} in windows" if found["window_bytes"] else "",
        f"{memory(found['states_bytes'])} of states" if found["states_bytes"] else "",
    ]
    parts = " and ".join(part for part in told if part)
    return f"{parts}: {memory(found['context_bytes'])} at {found['context']} tokens"


def _mix(types: Mapping[str, int]) -> str:
    """ "Q4_K 55 %, Q6_K 45 %": types by their share of the bytes, those of half a per cent and more."""
    total = sum(types.values()) or 1
    shares = {name: 100 * size / total for name, size in types.items()}
    return ", ".join(
        name if share > 99.5 else f"{name} {share:.0f} %" for name, share in shares.items() if share >= 0.5
    )


def preview_table(found: Mapping[str, Any], width: int | None = None) -> str:
    """What `plan` knows, for a terminal. Where it is narrow, less important columns go first."""
    width = width or _width()
    unit = _Unit([each["predicted_device_bytes"] or each["predicted_host_bytes"] for each in found["arms"]])
    rows = [
        (
            each["arm"],
            *(unit.show(None if each["alias_of"] else each[f"predicted_{name}"]) for name in SHARES),
            status := f"= {each['alias_of']}" if each["alias_of"] else each["status"],
            each["placement"] if status == "OK" else status,
        )
        for each in found["arms"]
    ]
    engines = dict.fromkeys(each["engine"] for each in found["arms"] if each["engine"])
    reasons: dict[str, list[str]] = {}
    for each in found["arms"]:
        if each["reason"] and not each["alias_of"]:
            reasons.setdefault(each["reason"], []).append(each["arm"])
    table = _fitting(("arm", *SHARES.values(), "status", "where"), rows, (("status",), *NARROW), width)
    told = [
        f"Memory in {unit.name}. {DEVICE}",
        *([f"Engines: {', '.join(engines)}."] if engines else []),
        *found["notes"],
        *(f"{', '.join(arms)}: {reason}" for reason, arms in reasons.items()),
        _duration(found),
    ]
    return "\n\n".join([table, *(_prose(text, width) for text in told)])


def _duration(found: Mapping[str, Any]) -> str:
    fewest, most = found["loads"]["fewest"], found["loads"]["most"]
    if not most:
        return "Nothing can run."
    loads = f"{most} loads" if fewest == most else f"{fewest} to {most} loads"
    if (minutes := found["minutes"]) is None:
        return f"{loads} after one of each arm as a probe, which says how many minutes."
    low, high = round(minutes["fewest"]), round(minutes["most"])
    span = f"{max(1, high)}" if low == high else f"{low} to {high}"
    return f"{loads} after one of each arm as a probe: about {span} min, by the loads of {minutes['from']}."


def engines_table(found: Mapping[str, Any], width: int | None = None) -> str:
    """What `engines list` knows, for a terminal. Where it is narrow, every path has a line of its own."""
    width = width or _width()
    engines = [
        (each["backend"], each["engine"], each["from"], each["path"])
        if each["found"]
        else (each["backend"], NONE, NONE, NONE)
        for each in found["engines"]
    ]
    recipes = [(each["name"], each["installed"] or "not installed", each["summary"]) for each in found["recipes"]]
    missing = [f"{each['backend']}: {plain(each['next'])}" for each in found["engines"] if not each["found"]]
    return "\n\n".join(
        [
            _lined_or_stacked(("backend", "engine", "from", "path"), engines, width),
            *(_prose(text, width) for text in missing),
            _lined_or_stacked(("llamaduel engines install", "in the cache", "what"), recipes, width),
        ]
    )


def _lined_or_stacked(headers: Sequence[str], rows: Sequence[Sequence[object]], width: int) -> str:
    """A table, or where that is too wide each row as a paragraph; a path is never broken."""
    drawn = _lined(headers, rows)
    if max(map(len, drawn.splitlines())) <= width:
        return drawn
    lines = [headers[0], "-" * len(headers[0])]
    for first, *others in rows:
        lines += [plain(first), *(_prose(str(cell), width, "  ") for cell in others if cell not in (None, NONE))]
    return "\n".join(lines)


def doctor_table(found: Mapping[str, Any], width: int | None = None, *, colour: bool | None = None) -> str:
    """What `doctor` knows, for a terminal: the word of each finding first. `colour` None: as the terminal wants it.

    One screen: if need be with next steps on the same line, then with short lines for what is well, then without them.
    """
    width = min(width or _width(), PROSE)
    colour = _coloured() if colour is None else colour
    findings: list[Mapping[str, Any]] = found["findings"]
    ill = [each for each in findings if each["level"] in ("warn", "fail")]
    drawn, left_out = _findings(findings, width, joined=False, shortened=False), 0
    for shown, shortened in ((findings, False), (findings, True), (ill, True)):
        if len(drawn) >= SCREEN:
            drawn, left_out = _findings(shown, width, joined=True, shortened=shortened), len(findings) - len(shown)
    fails = sum(each["level"] == "fail" for each in ill)
    said = f"{count(fails, 'thing')} to mend before a run" if fails else "nothing stands against a run"
    more = f"; {left_out} lines of what is well are left out, --json has them" if left_out else ""
    drawn += _prose(f"{said}, {count(len(ill) - fails, 'warning')}{more}", width).splitlines()
    if not colour:
        return "\n".join(drawn)
    paint = re.compile(r"^(ok|warn|fail)\b")
    return "\n".join(paint.sub(lambda word: f"\x1b[{COLOURS[word[1]]}m{word[1]}\x1b[0m", line) for line in drawn)


def _findings(findings: Sequence[Mapping[str, Any]], width: int, *, joined: bool, shortened: bool) -> list[str]:
    """Word, topic where it begins, fact; below it "→" and the next step."""
    topic_width = max((len(each["topic"]) for each in findings), default=0)
    indent = " " * (WORD + topic_width + 4)
    lines: list[str] = []
    before = None
    for each in findings:
        word = NONE if each["level"] == "unknown" else each["level"]
        topic = "" if each["topic"] == before else each["topic"]
        before = each["topic"]
        fact, step = plain(each["fact"]), plain(each["next"] or "")
        if step and joined:
            fact, step = f"{fact} → {step}", ""
        if shortened and each["level"] in ("ok", "unknown"):
            fact = textwrap.shorten(fact, width - len(indent), placeholder=" …")
        told = _prose(fact, width, indent).removeprefix(indent)
        lines += f"{word:<{WORD}}  {topic:<{topic_width}}  {told}".splitlines()
        lines += _prose(f"→ {step}", width, indent).splitlines() if step else []
    return lines


def _coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _Unit:
    """One unit for a whole column of sizes, so that its numbers can be compared at sight."""

    def __init__(self, sizes: Sequence[int | None]) -> None:
        self.name = "GiB" if max((size or 0 for size in sizes), default=0) >= 1 << 30 else "MiB"

    def show(self, size: int | None) -> str:
        if not size:
            return NONE if size is None else "0"
        value = size / (1 << (30 if self.name == "GiB" else 20))
        return f"{value:.2f}" if value >= 0.005 else "<0.01"


def _prose(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        plain(text),
        min(width, PROSE),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE


def _fitting(
    headers: Sequence[str], rows: Sequence[Sequence[str]], hides: Iterable[Collection[str]], width: int
) -> str:
    """The table without columns of which nothing is known, and without the first of `hides` with which it fits."""
    known = [at for at, name in enumerate(headers) if {row[at] for row in rows} - {NONE}]
    drawn = ""
    for hidden in hides:
        kept = [at for at in known if headers[at] not in hidden]
        right = [place for place, at in enumerate(kept) if headers[at] in (*SHARES.values(), READ)]
        drawn = _lined([headers[at] for at in kept], [[row[at] for at in kept] for row in rows], right)
        if max(map(len, drawn.splitlines())) <= width:
            break
    return drawn


def _lined(headers: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[int] = ()) -> str:
    """Columns two spaces apart, under a rule if they have headers; those in `right` are numbers."""
    lines = [[plain(cell) for cell in row] for row in ([headers, *rows] if headers else rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if headers:
        lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
