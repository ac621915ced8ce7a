"""The one table of options, and where a value may come from."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.options import WHOLE, Options, collect, declare


def parse(*arguments: str) -> Options:
    parser = argparse.ArgumentParser()
    declare(parser.add_argument)
    given = {name[5:]: value for name, value in vars(parser.parse_args(arguments)).items()}
    return collect(given, environment={}, folder=Path("/nowhere"))


def test_the_command_line_wins_over_the_environment_and_that_over_the_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.llamaduel]\nmargin = "5%"\nseed = 3\ncontext = 1024\n')
    environment = {"LLAMADUEL_MARGIN": "4%", "LLAMADUEL_SEED": "7"}

    found = collect({"margin": "2%"}, environment, tmp_path)

    assert (found.margin, found.seed, found.context) == (0.02, 7, 1024)


def test_every_option_has_a_flag_and_a_help_text() -> None:
    flags: list[str] = []

    def add(flag: str, **keywords: object) -> None:
        flags.append(flag)
        assert keywords["help"]

    declare(add, prefix="--duel-")

    assert flags == ["--duel-" + field.name.replace("_", "-") for field in dataclasses.fields(Options)]


def test_a_bare_stand_in_is_as_large_as_the_machine() -> None:
    assert parse("--stand-in").stand_in == WHOLE
    assert parse("--stand-in=2GiB").stand_in == "2GiB"
    assert parse().stand_in is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--margin", "lots"), "--margin 'lots': takes a percentage"),
        (("--margin", "0.03"), "write 3% for three per cent"),
        (("--margin", "0.4%"), "from 0.5% to less than 100%"),
        (("--margin", "100%"), "from 0.5% to less than 100%"),
        (("--out-tokens", "1"), "--out-tokens '1': takes at least 8 tokens"),
        (("--out-tokens", "0"), "takes a whole number above 0"),
        (("--budget", "9" * 400), "takes a time"),
        (("--model", ""), "--model '': must not be blank"),
        (("--out", " "), "--out ' ': must not be blank"),
        (("--prompts", "caf\udce9.toml"), "is not UTF-8 and cannot be recorded; rename it"),
        (("--preset", "quik"), "did you mean 'quick'?"),
        (("--budget", "soon"), "takes a time"),
        (("--context", "0"), "takes a whole number above 0"),
        (("--contrast", "ollama"), "ARM:ARM"),
        (("--seed", "-1"), "whole number"),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_taken(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(*arguments[:1], *arguments[1:]) if not arguments[1].startswith("-") else parse("=".join(arguments))

    assert text in str(error.value)


def test_the_least_that_is_taken_is_taken() -> None:
    assert parse("--margin", "0.5").margin == 0.005
    assert parse("--out-tokens", "8").out_tokens == 8


def test_an_error_names_the_flag_as_it_was_typed() -> None:
    with pytest.raises(UsageError, match=r"^--duel-out-tokens '1': takes"):
        collect({"out_tokens": "1"}, {}, Path("/nowhere"), prefix="--duel-")
    with pytest.raises(UsageError, match=r"^LLAMADUEL_OUT_TOKENS '1': takes"):
        collect({}, {"LLAMADUEL_OUT_TOKENS": "1"}, Path("/nowhere"), prefix="--duel-")


@pytest.mark.parametrize(
    "text",
    ["tool = 3", "tool = [1]", "[tool]\nllamaduel = 5", "[tool]\nllamaduel = 'x'", "[[tool.llamaduel]]\nseed = 1"],
)
def test_what_is_no_table_of_options_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text + "\n")
    with pytest.raises(UsageError, match=r"^pyproject\.toml in this folder holds .* where the table") as raised:
        collect({}, {}, tmp_path)
    assert "\n" not in str(raised.value)


def test_a_list_in_the_project_file_is_what_it_would_be_on_the_command_line(tmp_path: Path) -> None:
    lists = 'arms = ["ollama", "llama-cpp@cpu-moe,ub=256"]\ncontrast = ["ollama:llama-cpp", "llama-cpp:ollama"]\n'
    (tmp_path / "pyproject.toml").write_text(f"[tool.llamaduel]\n{lists}")

    found = collect({}, {}, tmp_path)

    assert found.arms == "ollama,llama-cpp@cpu-moe,ub=256"
    assert found.contrast == ("ollama:llama-cpp", "llama-cpp:ollama")


@pytest.mark.parametrize("text", ['out = ["a", "b"]', "margin = { percent = 3 }", "arms = { ollama = 1 }", "arms = []"])
def test_a_value_that_no_command_line_could_hold_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.llamaduel]\n{text}\n")
    with pytest.raises(UsageError, match=r"\[tool\.llamaduel\] \w+ .*(takes one value|must not be blank)"):
        collect({}, {}, tmp_path)


def test_an_unknown_name_in_the_project_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.llamaduel]\nmargn = 3\n")

    with pytest.raises(UsageError, match="did you mean 'margin'"):
        collect({}, {}, tmp_path)


def test_a_broken_project_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.llamaduel\n")

    with pytest.raises(UsageError, match=r"pyproject\.toml in this folder cannot be read"):
        collect({}, {}, tmp_path)


def test_times_are_minutes_unless_they_say_otherwise() -> None:
    assert parse("--budget", "20").budget == 20
    assert parse("--budget", "90s").budget == 1.5
    assert parse("--budget", "1h").budget == 60
