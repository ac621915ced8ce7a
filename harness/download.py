"""Models that lie on a hub, fetched into the cache of its own client.

`hf:ORG/REPO:FILE.gguf` names one file, `hf:ORG/REPO:Q4_K_M` and `hf:ORG/REPO` the only model of that kind there; the
parts of a split model come together. A file that the cache holds is used as it lies and nobody is asked, so that two
runs of one reference are of the same weights; `@REVISION` after the repository names others. Such a reference is
itself the wish to fetch: it needs no --allow-remote, which is about engines that compute elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.contract import Say
from harness.errors import ModelError, RunRefused, Unavailable, UsageError, nearest
from harness.sizes import format_bytes

PREFIX = "hf:"
ENDING = ".gguf"
MAIN = "main"
REFERENCE = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<name>[^:]+))?", re.ASCII)
PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
NO_MODEL = re.compile(r"(^|/)(mmproj|imatrix)|[-_.](mmproj|imatrix)[-_.]", re.IGNORECASE)  # beside a model, in GGUF too
ANSWER_S = 15.0  # for the list of files
SPARE = 256 << 20  # left free on the disk
SHOWN = 12  # candidates in a sentence
TOLD_S = 0.5  # between two words on how far it is


@dataclass(frozen=True, slots=True)
class Wanted:
    """A reference in its parts. `name` is a file of the repository, or what its name must have; None: any."""

    repo: str
    revision: str
    name: str | None

    def __str__(self) -> str:
        at = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{PREFIX}{self.repo}{at}" + (f":{self.name}" if self.name else "")

    @property
    def is_file(self) -> bool:
        return self.name is not None and self.name.lower().endswith(ENDING)


def is_reference(text: str) -> bool:
    """Whether it means a model on a hub; a file that is called so is named `./hf:…`."""
    return text.startswith(PREFIX)


def parse(text: str) -> Wanted:
    """Raises UsageError."""
    found = REFERENCE.fullmatch(text)
    if found is None or ".." in text:
        raise UsageError(
            f"{text!r} names no model on a hub; write hf:ORG/REPO:FILE.gguf, or hf:ORG/REPO@REVISION:FILE.gguf"
        )
    return Wanted(found["repo"], found["revision"] or MAIN, found["name"])


def fetch(text: str, say: Say) -> Path:
    """The first file of a model on a hub, all its parts in the cache of huggingface_hub.

    `say` hears now and then how far it is. Raises UsageError, ModelError, Unavailable without huggingface_hub,
    RunRefused if the disk is too small.
    """
    wanted = parse(text)
    if wanted.is_file and (lying := _cached(wanted, _parts_by_name(wanted.name or ""))):
        return lying[0]
    sizes = _sizes(wanted, say)
    if sizes is None:  # nobody answers: what lies here must do
        here = _lying(wanted)
        parts = _chosen(wanted, here, f"the cache of {_host()}, which cannot be reached,")
        return here[parts[0]]
    parts = _chosen(wanted, sizes, wanted.repo)
    if lying := _cached(wanted, parts):
        return lying[0]
    _check_room(wanted, {part: sizes[part] for part in parts if not _cached(wanted, [part])})
    paths = [_download(wanted, part, say) for part in parts]
    return paths[0]


# ── which files ─────────────────────────────────────────────────────────────────────────────


def _parts_by_name(file: str) -> list[str]:
    """All parts of a split model by the name of any of them; one file is its only part."""
    if (found := PART.fullmatch(file)) is None:
        return [file]
    count = int(found["count"])
    return [f"{found['stem']}-{number:05d}-of-{found['count']}{file[-len(ENDING) :]}" for number in range(1, count + 1)]


def _chosen(wanted: Wanted, files: Iterable[str], where: str) -> list[str]:
    """The parts of the one model that is meant. Raises ModelError, which names the candidates."""
    known = sorted(name for name in files if name.lower().endswith(ENDING))
    if wanted.is_file:
        parts = _parts_by_name(wanted.name or "")
        if missing := [part for part in parts if part not in known]:
            raise ModelError(f"{where} has no file {missing[0]!r}; {_candidates(wanted, known, missing[0])}")
        return parts
    models = {_parts_by_name(name)[0]: _parts_by_name(name) for name in known if not NO_MODEL.search(name)}
    fitting = [name for name in models if wanted.name is None or _has_word(name, wanted.name)]
    if len(fitting) == 1:
        return models[fitting[0]]
    if not fitting:
        what = f"no GGUF file with {wanted.name!r} in its name" if wanted.name else "no GGUF file"
        raise ModelError(f"{where} has {what}; {_candidates(wanted, list(models), wanted.name)}")
    raise ModelError(f"{wanted} is {len(fitting)} models; name one: {_listed(fitting)}")


def _has_word(file: str, word: str) -> bool:
    """`Q4_K_M` is in `x-Q4_K_M.gguf` and not in `x-IQ4_K_M.gguf` or `x-Q4_K_M_L.gguf`."""
    return re.search(rf"(?<![a-z0-9_]){re.escape(word)}(?![a-z0-9_])", file, re.IGNORECASE) is not None


def _candidates(wanted: Wanted, models: Sequence[str], word: str | None) -> str:
    if not models:
        return f"look at what {_page(wanted)} has, and name a repository with GGUF files"
    return nearest(word, models) if word and len(models) <= SHOWN else f"it has {_listed(models)}"


def _listed(models: Sequence[str]) -> str:
    more = f" and {len(models) - SHOWN} more" if len(models) > SHOWN else ""
    return ", ".join(models[:SHOWN]) + more


# ── the cache of huggingface_hub ────────────────────────────────────────────────────────────


def _hub() -> Any:
    """Its module, with the parts that are used. Raises Unavailable, which says how to get it."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ModuleNotFoundError:
        raise Unavailable(
            f"a model from a hub needs huggingface_hub: `{sys.executable} -m pip install 'huggingface-hub>=1.1'` "
            "gets it, as does `pip install 'llamaduel[hf]'`"
        ) from None
    return huggingface_hub


def _cached(wanted: Wanted, parts: Sequence[str]) -> list[Path]:
    """Where the parts lie in the cache; empty unless all do."""
    hub = _hub()
    with _in_words(wanted):
        found = [hub.try_to_load_from_cache(wanted.repo, part, revision=wanted.revision) for part in parts]
    paths = [Path(path) for path in found if isinstance(path, str)]
    return paths if len(paths) == len(parts) else []


def _lying(wanted: Wanted) -> dict[str, Path]:
    """Every file of this revision in the cache, by its name in the repository."""
    store = _cache() / f"models--{wanted.repo.replace('/', '--')}"
    commit = wanted.revision
    with contextlib.suppress(OSError):
        commit = (store / "refs" / wanted.revision).read_text().strip()
    root = store / "snapshots" / commit
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


def _cache() -> Path:
    return Path(_hub().constants.HF_HUB_CACHE)


def _host() -> str:
    return str(_hub().constants.ENDPOINT).partition("://")[2] or "the hub"


def _page(wanted: Wanted) -> str:
    return f"{_hub().constants.ENDPOINT}/{wanted.repo}"


def _check_room(wanted: Wanted, sizes: Mapping[str, int | None]) -> None:
    """Before anything is fetched. Raises RunRefused."""
    needed = sum(size or 0 for size in sizes.values())
    cache = _cache().absolute()
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed + SPARE:
        raise RunRefused(
            f"{wanted} needs {format_bytes(needed)} in {cache}, whose disk has {format_bytes(free)} free; "
            "free some, or set HF_HOME to a folder on another disk"
        )


# ── the hub ─────────────────────────────────────────────────────────────────────────────────


def _sizes(wanted: Wanted, say: Say) -> dict[str, int | None] | None:
    """The files of the repository in bytes; None if the hub cannot be reached and something of it lies here."""
    hub = _hub()
    say(f"asking {_host()} for {wanted.repo}")
    try:
        with _in_words(wanted):
            info = hub.HfApi().model_info(wanted.repo, revision=wanted.revision, files_metadata=True, timeout=ANSWER_S)
    except _Unreachable:
        if any(name.lower().endswith(ENDING) for name in _lying(wanted)):
            return None
        raise
    return {each.rfilename: each.size for each in info.siblings or ()}


def _download(wanted: Wanted, part: str, say: Say) -> Path:
    hub = _hub()
    with _in_words(wanted):
        return Path(hub.hf_hub_download(wanted.repo, part, revision=wanted.revision, tqdm_class=_bar(part, say)))


def _bar(part: str, say: Say) -> type[Any]:
    """The progress bar of huggingface_hub, told in words; what turns that off turns these off."""
    base: Any = _hub().utils.tqdm

    class Told(base):  # type: ignore[misc]  # it has no types
        monitor_interval = 0  # no thread beside the download

        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given | {"file": io.StringIO(), "mininterval": TOLD_S, "disable": False})

        def display(self, *_: Any, **__: Any) -> None:
            told = self.format_dict
            whole = f" of {format_bytes(told['total'])}" if told["total"] else ""
            speed = f", {format_bytes(int(told['rate']))}/s" if told["rate"] else ""
            say(f"fetching {part}: {format_bytes(int(told['n']))}{whole}{speed}")

    return Told


class _Unreachable(Unavailable):
    """Nobody answered; what the cache has may do."""


@contextlib.contextmanager
def _in_words(wanted: Wanted) -> Iterator[None]:
    """What the client raises, as one sentence of ours. Its transport's errors differ by version: the rest is those."""
    errors = _hub().errors
    try:
        yield
    except errors.HFValidationError:
        raise UsageError(f"{wanted.repo!r} is no name that a hub has; write hf:ORG/REPO:FILE.gguf") from None
    except errors.GatedRepoError:
        raise Unavailable(
            f"{wanted.repo} is gated: accept its terms at {_page(wanted)}, then log in by `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(
            f"{wanted.repo} has no revision {wanted.revision!r}; name a branch, a tag or a commit of {_page(wanted)}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{_host()} shows no model {wanted.repo} to this account; check its name, or log in by `hf auth login` "
            "if it is private"
        ) from None
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _Unreachable(_silence(wanted, error.__cause__ or error)) from None
        raise ModelError(f"{wanted} is not there any more; look at what {_page(wanted)} has") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        next_step = "log in by `hf auth login`" if status in (401, 403) else "try again later, or name a file here"
        raise Unavailable(f"{_host()} answers HTTP {status} for {wanted.repo}; {next_step}") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunRefused(
                f"the disk of {_cache()} is full; free some, or set HF_HOME to a folder on another disk"
            ) from None
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise RunRefused(
                f"{_cache()} cannot be written ({error.strerror}); set HF_HOME to a folder of yours"
            ) from None
        raise _Unreachable(_silence(wanted, error)) from None


def _silence(wanted: Wanted, error: BaseException) -> str:
    if _hub().constants.HF_HUB_OFFLINE:
        name = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), "a setting")
        return f"{wanted} is not in {_cache()} and {name} forbids to ask; unset it, or name a file here"
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
    return (
        f"{wanted} is not in {_cache()} and {_host()} cannot be reached ({reason}); "
        "connect this machine, or name a file here"
    )
