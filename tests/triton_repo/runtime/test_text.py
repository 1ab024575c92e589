"""Tokenizer folders: encoding, chat templates (H07), end tokens (S04), bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import LIMITS
from tokenizer_samples import byte_fallback, byte_level, metaspace, word_piece
from tokenizers import Tokenizer

from enginebay.triton_repo.runtime.chat_template import ChatTemplate
from enginebay.triton_repo.runtime.request import RequestError
from enginebay.triton_repo.runtime.text import TextTokenizer

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {{- '[' ~ message.role ~ ']' ~ message.content ~ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 11]}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_encode_adds_special_tokens_where_asked(folder: Path) -> None:
    tokenizer = TextTokenizer(folder)
    ids = tokenizer.encode("hello")
    assert ids[0] == 0
    assert tokenizer.encode("hello", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "hello"


def test_h07_one_bos(folder: Path) -> None:
    """The template writes <s>, and the tokenizer would add one too."""
    ids = TextTokenizer(folder).chat([{"role": "user", "content": "hi"}])
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_h07_null_content_and_parts(folder: Path) -> None:
    tokenizer = TextTokenizer(folder)
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A"}, "B"]},
    ]
    text = tokenizer.decode(tokenizer.chat(messages))
    assert text == "[system]be kind\n[assistant]\n[assistant]AB\n[assistant]"
    text = tokenizer.decode(tokenizer.chat(messages[:1], add_generation_prompt=False))
    assert text == "[system]be kind\n"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ([{"role": "wizard", "content": "x"}], "unknown role wizard"),
        ([{"content": "x"}], "role"),
        (["hi"], "role"),
        ([{"role": "user", "content": 7}], "content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_h07_malformed_and_refused_messages(folder: Path, messages: list, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        TextTokenizer(folder).chat(messages)


def test_templates_are_sandboxed() -> None:
    message = [{"role": "user", "content": "x"}]
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ range(1000000000) | list }}",
    ):
        with pytest.raises(RequestError, match="template"):
            ChatTemplate(attack, {}).render(message)


def test_template_extras() -> None:
    """What published templates use beside plain Jinja."""
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.index == 1 %}{% break %}{% endif %}{% endfor %}"
        "{{ tools | tojson(indent=None) }}{{ enable_thinking }}{{ strftime_now('%Y') | length }}"
    )
    messages = [{"role": "user", "content": "é"}] * 2
    text = ChatTemplate(source, {}).render(messages, tools=[{"name": "wé"}], enable_thinking=False)
    assert text == 'é[{"name": "wé"}]False4'


def test_a_template_that_does_not_compile_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="chat template does not compile"):
        TextTokenizer(folder)


def test_template_inside_the_tokenizer_config(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TextTokenizer(folder)
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": ""}])) == "D"


def test_without_a_template_chat_says_so(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    tokenizer = TextTokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_s04_end_tokens_come_from_every_source(folder: Path) -> None:
    assert TextTokenizer(folder).eos_ids == {2, 11, 1}  # 1 is the tokenizer's </s>
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert TextTokenizer(folder).eos_ids == {7, 1}


def test_h01_empty_prompts(folder: Path) -> None:
    """The tokenizer adds a BOS, so "" is a prompt; without it there are no tokens."""
    tokenizer = TextTokenizer(folder)
    assert tokenizer.encode("") == (0,)
    with pytest.raises(RequestError, match="no tokens"):
        tokenizer.encode("", add_special_tokens=False)


def test_h03_lone_surrogates(folder: Path) -> None:
    with pytest.raises(RequestError, match="character 2 is a lone surrogate"):
        TextTokenizer(folder).encode("ab\ud800")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer_config.json", "[", "tokenizer_config.json"),
        ("generation_config.json", "[]", "generation_config.json"),
        ("generation_config.json", '{"eos_token_id": ["x"]}', "eos_token_id"),
        ("tokenizer_config.json", "[" * 200_000, r"tokenizer_config\.json: not valid JSON"),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, content: str, words: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        TextTokenizer(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("token", [600, 99999, 10**23])
def test_end_tokens_outside_the_model_are_refused(folder: Path, file: str, token: int) -> None:
    """The sampler would index the logits with them."""
    limits = replace(LIMITS, vocab_size=600)
    (folder / file).write_text(json.dumps({"eos_token_id": [599, token]}))
    with pytest.raises(ValueError, match=rf"{file}: end token {token} .* 600 tokens"):
        TextTokenizer(folder, limits)
    (folder / file).write_text(json.dumps({"eos_token_id": [599]}))
    assert 599 in TextTokenizer(folder, limits).eos_ids


def test_a_negative_end_token_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": -1}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id -1"):
        TextTokenizer(folder)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace, word_piece])
def test_what_cannot_fit_is_refused_before_it_is_encoded(
    folder: Path, make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    made.save(str(folder / "tokenizer.json"))
    tokenizer = TextTokenizer(folder, replace(LIMITS, vocab_size=10_000, max_sequence=16))
    # The text of 16 tokens always passes, whichever they are.
    for token in sorted(made.get_vocab().values()):
        tokenizer._check_length(made.decode([token] * 16, skip_special_tokens=False))
    most = 16 * tokenizer._token_bytes
    tokenizer._check_length("a" * most)
    monkeypatch.setattr(tokenizer, "_tokenizer", None)  # not asked
    with pytest.raises(RequestError, match=rf"text: {most + 1} bytes; the 16 tokens .* {most} bytes"):
        tokenizer.encode("a" * (most + 1))


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        TextTokenizer(tmp_path)


def test_truncation_in_the_file_does_not_cut_prompts(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert 10 < len(TextTokenizer(folder).encode("one two three four five six seven")) < 50
