"""Prompts: real text of several kinds, the same for every arm, no two of them alike in their first token.

Engines keep what they have read and skip it next time, some of them always. So every prompt begins, before
anything that a chat template puts there, with a word of its own that is one token of the model's vocabulary.
The template is applied here, once, so that engines get raw text. Answers are asked for at length.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import shapes
from harness.contract import Prompt
from harness.errors import UsageError, nearest
from harness.model import Model

if TYPE_CHECKING:
    from jinja2 import Template

SHORT = 128  # tokens; up to here a prompt is one that needs no text beside it
MARGIN = 64  # tokens that a template may add
TIGHTEST = 0.6  # of the room: lengths are estimates, and a small vocabulary needs more tokens
PROSE = 4.4  # characters a token, about
STRIDE = 37  # words of a known answer between the prompts that end in them
FURTHER = "Further papers, from another folder:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A prompt is `task`, passages up to the wanted length, `ask`; or one of `short`."""

    name: str
    task: str = ""
    ask: str = ""
    short: tuple[str, ...] = ()
    passages: tuple[str, ...] = ()
    characters_per_token: float = PROSE


@dataclass(frozen=True, slots=True)
class PromptSet:
    """`digest` is over the content: two sets with one digest give the same prompts."""

    kinds: tuple[Kind, ...]
    digest: str

    def for_request(
        self,
        model: Model,
        index: int,
        *,
        tokens: int = 512,
        room: int | None = None,
        kind: str | None = None,
        thinking: bool = False,
    ) -> Prompt:
        """The prompt of this number, about `tokens` long and never longer than `room`. Kinds take turns.

        For a model with a known answer it ends in a word of that answer. Under a model that puts a token of
        its own before every text (`add_bos`), that one is all that two prompts share. Raises UsageError if
        there is no room.
        """
        chosen = self._kind(index, kind)
        message = self._message(chosen, index // (1 if kind else len(self.kinds)), tokens, room)
        if model.answer_key is not None:
            message = f"{message} {model.answer_key.word(STRIDE * index)}"
        openers = model.openers or tuple(word.capitalize() for word in shapes.words())
        text = f"{openers[index % len(openers)]}\n\n{_apply(model, message, thinking)[0]}"
        return Prompt(f"{chosen.name}-{tokens}-{index}", text, chosen.name)

    def expected(self, model: Model, prompt: Prompt, tokens: int) -> str | None:
        """The exact text that a right engine writes after this prompt; None for a model that nobody knows."""
        if model.answer_key is None:
            return None
        return model.answer_key.continuation(prompt.text.rpartition(" ")[2], tokens)

    def _kind(self, index: int, name: str | None) -> Kind:
        if name is None:
            return self.kinds[index % len(self.kinds)]
        names = {kind.name: kind for kind in self.kinds}
        if name not in names:
            raise UsageError(f"there are no prompts of the kind {name!r}; {nearest(name, names)}")
        return names[name]

    def _message(self, kind: Kind, turn: int, tokens: int, room: int | None) -> str:
        wanted = tokens if room is None else min(tokens, int((room - MARGIN) * TIGHTEST))
        if wanted < 16:
            raise UsageError(f"the context leaves {room} tokens for the prompt; raise --context or lower --out-tokens")
        text = wanted - MARGIN / 2 - (len(kind.task) + len(kind.ask)) / PROSE
        if kind.short and (tokens <= SHORT or text < SHORT / 2 or not kind.passages):
            return _cut(kind.short[turn % len(kind.short)], int(wanted * kind.characters_per_token))
        return f"{kind.task}\n\n{self._passages(kind, turn, text)}\n\n{kind.ask}"

    def _passages(self, kind: Kind, turn: int, tokens: float) -> str:
        """Text of about this length: the kind's own, each turn from another place on, then the others'; then again."""
        at = self.kinds.index(kind)
        own, *others = (*self.kinds[at:], *self.kinds[:at])
        start = turn % len(own.passages)
        ordered = [(own, passage) for passage in (*own.passages[start:], *own.passages[:start])]
        for other in others:
            ordered += [(other, passage) for passage in (FURTHER, *other.passages) if other.passages]
        chosen: list[str] = []
        for source, passage in cycle(ordered):
            piece = _cut(passage, max(int(tokens * source.characters_per_token), 80))
            chosen.append(piece)
            tokens -= len(piece) / source.characters_per_token
            if tokens < SHORT / 8:
                break
        return "\n\n".join(chosen)


def load(path: Path | None = None) -> PromptSet:
    """The prompts of a TOML file, or the built-in ones. Raises UsageError."""
    try:
        text = (path or resources.files("harness") / "data" / "prompts.toml").read_text("utf-8")
        kinds = tuple(_kind(item) for item in tomllib.loads(text).get("kind", []))
    except OSError as error:
        raise UsageError(f"the prompts {path} cannot be read ({error.strerror}); check the path") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is no prompt set ({error}); take the built-in prompts.toml as a pattern") from error
    if not kinds:
        raise UsageError(f"{path} holds no [[kind]]; take the built-in prompts.toml as a pattern")
    content = json.dumps([asdict(kind) for kind in kinds], sort_keys=True, ensure_ascii=False)
    return PromptSet(kinds, hashlib.sha256(content.encode()).hexdigest())


def template_problem(model: Model) -> str | None:
    """Why this model's prompts are plain text although it has a chat template; None if all is well."""
    return _apply(model, "Hello.", False)[1]


def _kind(item: Mapping[str, Any]) -> Kind:
    texts = {key: tuple(_text(text) for text in item.get(key, ())) for key in ("short", "passages")}
    if not any(texts.values()):
        raise ValueError(f"the kind {item.get('name', '')!r} has neither short prompts nor passages")
    return Kind(
        name=_text(item["name"]) if "name" in item else "text",
        task=_text(item.get("task", "")),
        ask=_text(item.get("ask", "")),
        characters_per_token=float(item.get("characters_per_token", PROSE)),
        **texts,
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value.strip()


def _cut(text: str, characters: int) -> str:
    """The beginning of a text, up to the end of a sentence or a line; an open block of code is closed."""
    if len(text) <= characters:
        return text
    end = max(text.rfind(". ", 0, characters) + 1, text.rfind("\n", 0, characters))
    piece = text[: end if end > characters // 2 else characters].rstrip()
    return f"{piece}\n```" if piece.count("```") % 2 else piece


# ── chat templates ──────────────────────────────────────────────────────────────────────────


def _apply(model: Model, message: str, thinking: bool) -> tuple[str, str | None]:
    """The message as the model's template has it, or plain with the reason why."""
    if model.chat_template is None:
        return message, None
    messages: Sequence[Mapping[str, str]] = [{"role": "user", "content": message}]
    try:
        # The BOS token is the engine's to add, in front of everything.
        text = _compile(model.chat_template).render(
            messages=messages,
            add_generation_prompt=True,
            enable_thinking=thinking,
            bos_token="",
            eos_token=model.eos,
            tools=None,
            documents=None,
        )
    except Exception as error:  # whatever a template from elsewhere does
        return message, f"the chat template of {model.name} fails ({error}), so its prompts are plain text"
    if message not in text:
        return message, f"the chat template of {model.name} loses the message, so its prompts are plain text"
    return (text.removeprefix(model.bos) if model.add_bos else text), None


@cache
def _compile(template: str) -> Template:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = datetime(2025, 1, 1).strftime  # one day for ever: prompts must not change
    return environment.from_string(template)


def _raise(reason: str) -> None:
    raise ValueError(reason)
