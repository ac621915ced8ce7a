"""The arm grammar: what is written can be read again, and what cannot be read names what can."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.arms import CHOICES, KNOBS, MOST_SWEPT, NUMBERS, apply_knobs, parse_arms, read_arm
from harness.contract import Arm, Placement, Settings
from harness.errors import UsageError, nearest
from harness.registry import backend

PLACEMENTS = ("cpu", "cpu-moe", "ncmoe=N", "ngl=N")
numbers = st.integers(0, 999_999)
placements = st.one_of(
    st.just(Placement()),
    st.sampled_from(["cpu", "cpu-moe"]).map(Placement),
    st.builds(Placement, st.sampled_from(["ncmoe", "ngl"]), numbers),
)
hosts = st.from_regex(r"[a-z][a-z0-9-]{0,8}:[1-9][0-9]{0,3}", fullmatch=True)


def value_of(knob: str) -> st.SearchStrategy[str]:
    if knob in NUMBERS:
        return st.integers(1, 10**6).map(str)
    if knob == "depth":
        return st.integers(0, 10**6).map(str)
    if knob in CHOICES:
        return st.sampled_from(sorted(CHOICES[knob]))
    return st.lists(hosts, min_size=1, max_size=3).map("+".join)


@st.composite
def arms(draw: st.DrawFn) -> Arm:
    knobs = draw(st.lists(st.sampled_from(sorted(KNOBS)), unique=True))
    return Arm("llama-cpp", draw(placements), tuple(sorted((knob, draw(value_of(knob))) for knob in knobs)))


@given(arms())
def test_an_arm_that_is_written_can_be_read_again(arm: Arm) -> None:
    assert read_arm(str(arm), "llama-cpp", PLACEMENTS, KNOBS) == arm
    assert backend("llama-cpp").parse(str(arm)) == arm


@given(st.lists(arms(), min_size=1, max_size=4, unique=True))
def test_a_list_of_arms_that_is_written_can_be_read_again(listed: list[Arm]) -> None:
    assert parse_arms(",".join(map(str, listed))) == tuple(listed)
    assert parse_arms(" , ".join(map(str, listed)).replace(",", " , ")) == tuple(listed)


@given(arms(), st.randoms())
def test_the_order_of_knobs_makes_no_difference(arm: Arm, random: object) -> None:
    pieces = [f"{key}={value}" for key, value in arm.knobs]
    random.shuffle(pieces)  # type: ignore[attr-defined]
    head = str(Arm(arm.backend, arm.placement))
    assert read_arm(",".join([head, *pieces]), "llama-cpp", PLACEMENTS, KNOBS) == arm


@given(st.text(max_size=40))
def test_any_text_is_an_arm_or_a_usage_error(text: str) -> None:
    found: tuple[Arm, ...] = ()
    says = ""
    try:
        found = parse_arms(text)
    except UsageError as error:
        says = str(error)
    assert bool(found) != bool(says)


letters = st.sampled_from("abcdefghijklmnopqrstuvwxyz-")


@st.composite
def misspelt(draw: st.DrawFn, words: list[str]) -> tuple[str, str]:
    """(a word, the same with one letter wrong)."""
    word = draw(st.sampled_from(words))
    at = draw(st.integers(0, len(word) - 1))
    wrong = word[:at] + draw(letters) + word[at + draw(st.integers(0, 1)) :]
    assume(wrong not in words and not wrong.startswith("-"))
    return word, wrong


@given(misspelt(["cpu-moe", "ncmoe", "ngl", "cpu"]))
def test_a_misspelt_placement_is_told_the_known_ones(pair: tuple[str, str]) -> None:
    word, wrong = pair
    with pytest.raises(UsageError, match=r"no placement|takes") as caught:
        backend("llama-cpp").parse(f"llama-cpp@{wrong}=3" if word in ("ngl", "ncmoe") else f"llama-cpp@{wrong}")
    assert word in str(caught.value)


@given(misspelt(sorted(KNOBS)))
def test_a_misspelt_knob_is_told_the_known_ones(pair: tuple[str, str]) -> None:
    word, wrong = pair
    with pytest.raises(UsageError, match="no knob") as caught:
        backend("llama-cpp").parse(f"llama-cpp,{wrong}=3")
    assert word in str(caught.value)


@given(misspelt(["llama-cpp", "ollama", "openai"]))
def test_a_misspelt_engine_is_told_the_known_ones(pair: tuple[str, str]) -> None:
    word, wrong = pair
    with pytest.raises(UsageError, match="no engine") as caught:
        parse_arms(f"{wrong}@cpu")
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an empty arm"),
        ("ollama,", "an empty arm"),
        ("llama", "did you mean 'ollama'?"),
        ("lama-cpp", "did you mean 'llama-cpp'?"),
        ("c=4096", "no engine 'c'"),
        ("llama-cpp@", "nothing after '@'"),
        ("llama-cpp@cpumoe", "did you mean 'cpu-moe'?"),
        ("llama-cpp@ngl", "ngl takes a number, as in ngl=20"),
        ("llama-cpp@ngl=-1", "a whole number from 0 to 999999"),
        ("llama-cpp@ngl=1e3", "a whole number from 0 to 999999"),
        ("llama-cpp@cpu=3", "no placement 'cpu=3'"),
        ("llama-cpp,zz=1", "no knob 'zz'"),
        ("llama-cpp,c", "no engine 'c'"),
        ("llama-cpp,c=", "needs a value"),
        ("llama-cpp,c=0", "a whole number above 0"),
        ("llama-cpp,c=1,c=2", "given twice"),
        ("llama-cpp,fa=yes", "known: auto, off, on"),
        ("llama-cpp,ctk=q8", "did you mean 'q8_0'?"),
        ("ollama,ollama", "arm ollama is given twice"),
        ("ollama,lm=mmap", "ollama has no knob 'lm'"),
        ("ollama,depth=deep", "'deep' is not a number of tokens; write it like 0, 4096 or 16k"),
        ("llama-cpp@ncmoe=4/", "ncmoe takes a whole number"),
        ("llama-cpp,ctk=f16/q8", "did you mean 'q8_0'?"),
        ("llama-cpp@ncmoe=4/4", "arm llama-cpp@ncmoe=4 is given twice"),
        ("llama-cpp@ncmoe=0..9/0", "at least 1"),
        ("llama-cpp@ncmoe=0..5000", f"5001 arms; at most {MOST_SWEPT}"),
    ],
)
def test_what_cannot_be_taken_is_named_with_its_remedy(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_arms(text)
    assert says in str(caught.value)


@given(numbers, st.integers(0, 150), st.integers(1, 60), st.booleans())
def test_a_sweep_is_its_numbers_in_order(first: int, width: int, step: int, falling: bool) -> None:
    last = max(0, first - width) if falling else min(999_999, first + width)
    swept = range(first, last - 1, -step) if falling and last < first else range(first, last + 1, step)
    found = parse_arms(f"llama-cpp@ncmoe={first}..{last}/{step}")
    assert [arm.placement.n for arm in found] == list(swept)


def test_sweeps_multiply_and_stand_among_other_arms() -> None:
    found = parse_arms("ollama,llama-cpp@ncmoe=0..4/4,ub=64..128/64,llama-cpp@cpu")
    assert list(map(str, found)) == [
        "ollama",
        "llama-cpp@ncmoe=0,ub=64",
        "llama-cpp@ncmoe=0,ub=128",
        "llama-cpp@ncmoe=4,ub=64",
        "llama-cpp@ncmoe=4,ub=128",
        "llama-cpp@cpu",
    ]


def test_a_list_is_an_arm_for_each_of_its_values() -> None:
    found = parse_arms("llama-cpp@ncmoe=48/40,ctk=f16/q8_0,ollama,depth=0/4k")
    assert list(map(str, found)) == [
        "llama-cpp@ncmoe=48,ctk=f16",
        "llama-cpp@ncmoe=48,ctk=q8_0",
        "llama-cpp@ncmoe=40,ctk=f16",
        "llama-cpp@ncmoe=40,ctk=q8_0",
        "ollama,depth=0",
        "ollama,depth=4096",
    ]


def test_a_depth_is_of_the_prompts_so_every_engine_takes_it() -> None:
    for name in ("ollama", "llama-cpp", "openai@box"):
        assert apply_knobs(parse_arms(f"{name},depth=16k")[0], Settings()).depth == 16384
    assert apply_knobs(parse_arms("ollama")[0], Settings(depth=512)).depth == 512


def test_knobs_lie_on_top_of_the_settings_of_the_run() -> None:
    arm = parse_arms("llama-cpp,c=2048,ub=64,ctk=q8_0,fa=off,t=3,rpc=a:1+b:2,lm=none")[0]
    assert apply_knobs(arm, Settings()) == Settings(
        context=2048,
        ubatch=64,
        kv_k="q8_0",
        flash_attention="off",
        threads=3,
        rpc=("a:1", "b:2"),
        load_mode="none",
    )
    assert apply_knobs(parse_arms("llama-cpp")[0], Settings(context=7)) == Settings(context=7)


@given(st.text(max_size=10), st.sets(st.text(min_size=1, max_size=8), max_size=6))
def test_the_hint_names_every_known_word(word: str, known: set[str]) -> None:
    hint = nearest(word, known)
    assert all(each in hint for each in known)
