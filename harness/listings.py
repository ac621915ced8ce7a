"""Tables for a terminal of what is known without a run: a model, the arms of a plan, engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.words import NONE, memory, plain


def inspect_table(found: Mapping[str, Any]) -> str:
    """What `inspect` knows, for a terminal."""
    experts = NONE
    if found["experts"]:
        experts = f"{found['experts_used']} of {found['experts']} a token, in {found['expert_layers']} layers"
    facts = [
        ("model", found["name"]),
        ("architecture", f"{found['arch']}, {found['type'] or NONE}"),
        ("layers", found["layers"]),
        ("experts", experts),
        ("weights", memory(found["weights_bytes"])),
        ("read per decoded token", memory(found["bytes_per_token"])),
        ("trained context", found["context_train"] or NONE),
    ]
    first: dict[str, str] = {}
    rows = []
    for each in found["placements"]:
        same = first.setdefault(each["class"], each["placement"])
        words = each["words"] if same == each["placement"] else f"= {same}"
        rows.append((each["placement"], words, memory(each["device_bytes"]), memory(each["host_bytes"])))
    headers = ("placement", "where", f"device at {found['context']} tokens", "host")
    return f"{_lined((), facts)}\n\n{_lined(headers, rows)}"


def preview_table(found: Mapping[str, Any]) -> str:
    """What `plan` knows, for a terminal."""
    rows = [
        (
            each["arm"],
            each["placement"],
            memory(each["predicted_device_bytes"]),
            memory(each["predicted_host_bytes"]),
            f"= {each['alias_of']}" if each["alias_of"] else each["status"],
            each["engine"] or NONE,
        )
        for each in found["arms"]
    ]
    headers = ("arm", "placement", "device", "host", "status", "engine")
    reasons = dict.fromkeys(each["reason"] for each in found["arms"] if each["reason"] and not each["alias_of"])
    fewest, most = found["loads"]["fewest"], found["loads"]["most"]
    many = f"{most} loads" if fewest == most else f"{fewest} to {most} loads"
    told = f"{many} after one of each arm as a probe, which says how many minutes." if most else "Nothing can run."
    return "\n\n".join([_lined(headers, rows), *map(plain, reasons), told])


def engines_table(found: Mapping[str, Any]) -> str:
    """What `engines list` knows, for a terminal."""
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
            _lined(("backend", "engine", "from", "path"), engines),
            *missing,
            _lined(("llamaduel engines install", "in the cache", "what"), recipes),
        ]
    )


def _lined(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    from tabulate import tabulate

    shown = [[plain(cell) for cell in row] for row in rows]
    return str(tabulate(shown, headers, tablefmt="simple" if headers else "plain", disable_numparse=True))
