"""Prompts: unique from the first token, of the wanted length, with the template applied once and for all arms."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from harness import model, prompts, shapes, synth
from harness.errors import UsageError
from harness.model import Model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("synthetic")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return model.load(synth.write(folder / "m.gguf", synth.SHAPES["tiny"], header_only=True))


@pytest.fixture
def real(synthetic: Model) -> Model:
    """A model that nobody knows the answer of, with a common chat template."""
    return dataclasses.replace(synthetic, answer_key=None, chat_template=CHATML, name="real")


@pytest.fixture
def built_in() -> prompts.PromptSet:
    return prompts.load()


def count(text: str) -> int:
    """Tokens under the shipped tokenizer, about: it never joins across words, digits or signs."""
    order = model.ranks(shapes.merges())
    words = re.findall(r" ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\d|\s+(?!\S)|\s+", text)
    return sum(len(model.pieces(word.replace(" ", "Ġ").replace("\n", "Ċ"), order)) for word in words)


def test_no_two_prompts_share_their_first_token(built_in: prompts.PromptSet, real: Model) -> None:
    texts = [built_in.for_request(real, index).text for index in range(500)]
    first = [re.split(r"\s", text, maxsplit=1)[0] for text in texts]
    assert len(set(first)) == 500
    assert set(first) <= set(real.openers)


def test_the_common_head_of_a_template_comes_after_what_is_unique(built_in: prompts.PromptSet, real: Model) -> None:
    text = built_in.for_request(real, 0).text
    assert text.startswith(f"{real.openers[0]}\n\n<|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_prompts_are_unique_even_where_the_vocabulary_is_closed(built_in: prompts.PromptSet, real: Model) -> None:
    closed = dataclasses.replace(real, openers=())
    texts = {built_in.for_request(closed, index).text.split()[0] for index in range(500)}
    assert len(texts) == 500


def test_one_index_gives_one_prompt(built_in: prompts.PromptSet, real: Model) -> None:
    again = prompts.load()
    for index in (0, 1, 77):
        assert built_in.for_request(real, index) == again.for_request(real, index)
    ids = {built_in.for_request(real, index, tokens=tokens).id for index in range(50) for tokens in (64, 512)}
    assert len(ids) == 100


def test_kinds_take_turns_and_one_can_be_asked_for(built_in: prompts.PromptSet, real: Model) -> None:
    kinds = [built_in.for_request(real, index).kind for index in range(5)]
    assert kinds == ["chat", "code", "summary", "story", "chat"]
    only = [built_in.for_request(real, index, kind="code") for index in range(4)]
    assert {prompt.kind for prompt in only} == {"code"}
    assert len({prompt.text.partition("\n")[2] for prompt in only}) == 4
    with pytest.raises(UsageError, match="did you mean 'story'"):
        built_in.for_request(real, 0, kind="stories")


@pytest.mark.parametrize("kind", ["chat", "code", "summary", "story"])
@pytest.mark.parametrize("tokens", [256, 512, 2048, 6000])
def test_prompts_are_about_as_long_as_wanted(
    kind: str, tokens: int, built_in: prompts.PromptSet, synthetic: Model
) -> None:
    lengths = [count(built_in.for_request(synthetic, turn, tokens=tokens, kind=kind).text) for turn in range(5)]
    assert sum(lengths) / 5 == pytest.approx(tokens, rel=0.15)


def test_short_prompts_stand_by_themselves(built_in: prompts.PromptSet, real: Model) -> None:
    for index in range(20):
        assert 30 < count(built_in.for_request(real, index, tokens=64).text) < 128


@pytest.mark.parametrize("room", [150, 400, 900, 1500])
def test_a_prompt_never_takes_more_than_its_room(room: int, built_in: prompts.PromptSet, real: Model) -> None:
    for index in range(20):
        assert count(built_in.for_request(real, index, tokens=2048, room=room).text) <= room


def test_no_room_is_a_usage_error(built_in: prompts.PromptSet, real: Model) -> None:
    with pytest.raises(UsageError, match="leaves 60 tokens for the prompt; raise --context or lower --out-tokens"):
        built_in.for_request(real, 0, room=60)


# ── models with a known answer ──────────────────────────────────────────────────────────────


def test_a_prompt_ends_in_a_word_whose_answer_is_known(built_in: prompts.PromptSet, synthetic: Model) -> None:
    key = synthetic.answer_key
    assert key is not None
    lasts = []
    for index in range(200):
        prompt = built_in.for_request(synthetic, index, tokens=64 if index % 2 else 512)
        last = prompt.text.split()[-1]
        assert prompt.text.endswith(f" {last}")
        assert built_in.expected(synthetic, prompt, 40) == key.continuation(last, 40)
        lasts.append(last)
    assert len(set(lasts)) == 200


def test_nobody_knows_the_answer_of_a_real_model(built_in: prompts.PromptSet, real: Model) -> None:
    assert built_in.expected(real, built_in.for_request(real, 0), 40) is None


# ── chat templates ──────────────────────────────────────────────────────────────────────────


def text_under(template: str | None, real: Model, **kept: object) -> str:
    changed = dataclasses.replace(real, chat_template=template, **kept)  # type: ignore[arg-type]
    return prompts.load().for_request(changed, 0, tokens=64).text.partition("\n\n")[2]


def test_a_model_without_a_template_gets_plain_text(real: Model) -> None:
    text = text_under(None, real)
    assert text == prompts.load().kinds[0].short[0]
    assert prompts.template_problem(dataclasses.replace(real, chat_template=None)) is None


def test_thinking_is_off_unless_asked_for(built_in: prompts.PromptSet, real: Model) -> None:
    assert "</think>" in built_in.for_request(real, 0).text
    assert "</think>" not in built_in.for_request(real, 0, thinking=True).text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for %}", "Expected"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("Hello.", None),
        ("nothing of the message", "loses the message"),
    ],
)
def test_a_template_that_fails_gives_plain_text_and_a_reason(template: str, reason: str | None, real: Model) -> None:
    problem = prompts.template_problem(dataclasses.replace(real, chat_template=template))
    if reason is None:
        assert problem is None
        return
    assert problem is not None
    assert reason in problem
    assert problem.endswith("so its prompts are plain text")
    assert text_under(template, real) == prompts.load().kinds[0].short[0]


def test_the_leading_token_is_left_to_the_engine_that_adds_it(real: Model) -> None:
    template = "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
    assert text_under(template, real, bos="<s>", add_bos=True).startswith("[INST]")
    assert text_under(f"<s>{template}", real, bos="<s>", add_bos=True).startswith("[INST]")
    assert text_under(f"<s>{template}", real, bos="<s>", add_bos=False).startswith("<s>[INST]")


def test_a_template_that_writes_the_date_writes_the_same_one_for_ever(real: Model) -> None:
    assert text_under("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}", real).startswith("01 Jan 2025 ")


def test_templates_have_what_they_expect_of_their_host(real: Model) -> None:
    template = """
    {%- for message in messages %}
        {%- if message.role == 'system' %}{% continue %}{% endif %}
        {{- {'a': 'é'} | tojson }}{{ message['content'] | trim }}{{ eos_token }}
    {%- endfor %}
    """
    assert text_under(template, real).startswith('{"a": "é"}')


# ── prompt files ────────────────────────────────────────────────────────────────────────────


def test_the_digest_is_over_the_content_alone(tmp_path: Path, built_in: prompts.PromptSet) -> None:
    text = (resources.files("harness") / "data" / "prompts.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text("# mine\n" + text)
    assert prompts.load(path).digest == built_in.digest
    path.write_text(text.replace("walnut", "cherry"))
    assert prompts.load(path).digest != built_in.digest


def test_prompts_of_ones_own_may_be_whole_or_in_passages(tmp_path: Path, real: Model) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[kind]]\nname = "mine"\nshort = ["Write a long poem about tea."]\n')
    assert "Write a long poem about tea." in prompts.load(path).for_request(real, 0).text
    path.write_text('[[kind]]\npassages = ["One sentence. And one more that is a little longer than that."]\n')
    text = prompts.load(path).for_request(real, 0, tokens=600).text
    assert text.count("One sentence.") > 10


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("[[kind]", "no prompt set"),
        ("x = 1", r"holds no \[\[kind\]\]"),
        ('[[kind]]\nname = "a"', "neither short prompts nor passages"),
        ("[[kind]]\nshort = [1]", "1 is no text"),
        ("kind = 3", "no prompt set"),
        ('[[kind]]\nshort = ["a"]\ncharacters_per_token = "x"', "no prompt set"),
    ],
)
def test_a_bad_prompt_file_is_one_sentence(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=says) as raised:
        prompts.load(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_built_in_prompts_ask_for_much_and_never_repeat_themselves() -> None:
    with (resources.files("harness") / "data" / "prompts.toml").open("rb") as file:
        kinds = tomllib.load(file)["kind"]
    texts = [text for kind in kinds for text in (*kind["short"], *kind["passages"])]
    assert len(set(texts)) == len(texts) == 40
    assert sum(len(text) for kind in kinds for text in kind["passages"]) > 2048 * 4
    assert all(text.isascii() for text in texts)
