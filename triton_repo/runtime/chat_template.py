"""Chat templates: Jinja in a sandbox, as Hugging Face tokenizer folders carry them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from enginebay.triton_repo.runtime.request import RequestError

Message = Mapping[str, Any]


class RefusalError(Exception):
    """What a template raises by `raise_exception`."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; for rendering it is its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. ValueError where the source is not a template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text, special tokens included. RequestError where messages are malformed or refused."""
        context = {
            **self._special_tokens,
            **variables,
            "messages": [_normal(index, message) for index, message in enumerate(messages)],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except RefusalError as error:
            raise RequestError(f"messages: the chat template refuses them: {error}") from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise RequestError(f"messages: the chat template fails on them: {error}") from error


def _normal(index: int, message: Message) -> dict[str, Any]:
    """A message whose content is text: null is "", text parts are joined."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}]: a message is an object with a 'role'")
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list | tuple):
        content = "".join(_part_text(index, number, part) for number, part in enumerate(content))
    elif not isinstance(content, str):
        raise RequestError(
            f"messages[{index}].content: {type(content).__name__} is neither text nor a list of text parts"
        )
    return {**message, "content": content}


def _part_text(index: int, number: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"messages[{index}].content[{number}]: a part of type {kind!r}; this model takes text parts only"
    )


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **_: object) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> None:
    raise RefusalError(message)
