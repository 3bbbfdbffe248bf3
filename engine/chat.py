"""Chat messages to a prompt, by the Jinja template that a model brings.

Templates spell control tokens ("<|im_start|>") as text, and users may type the same text. Only the template's spellings
may become control tokens. So before rendering, every string in the messages gets a marker, a character that occurs
nowhere else, inside whatever spells a control token; the rendered prompt is cut at the control tokens that still are
spelled out, and the marker is taken out of the text between them, which is then encoded as plain text.

A template may also put a control token together out of strings that are harmless one by one (it may join, trim or
replace). Therefore, where a message has a character that some control token starts with, a second rendering has the
marker behind each of those. Nothing from a message can start a control token there; where the two renderings differ in
their control tokens, the second one is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from engine.chat_sandbox import ChatEnvironment, TemplateLimitError, TemplateRaisedError
from engine.tokenizer import Tokenizer

Message = Mapping[str, Any]

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_DEPTH = 64
_MARKERS = [chr(code) for code in range(0xE000, 0xF900)]  # private use


class ChatTemplateError(ValueError):
    """The chat template is missing or faulty, or it refuses the messages (the text is then the template's own)."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source, or None where the model has no template.
        bos: what the template gets as `bos_token`; "" when the model has none.
        eos: what it gets as `eos_token`.

    Raises:
        ChatTemplateError: there is no template, or it does not parse.
    """

    def __init__(self, source: str | None, bos: str = "", eos: str = "") -> None:
        if not source:
            raise ChatTemplateError(
                "the model has no chat template; use an instruction-tuned model, or prompt it with plain text (no chat)"
            )
        self._source, self._bos, self._eos = source, bos, eos
        self._environment = ChatEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except TemplateError as problem:
            line = getattr(problem, "lineno", None)
            where = f" in line {line}" if line else ""
            raise ChatTemplateError(f"the chat template does not parse{where}: {_one_line(problem)}") from None
        except RecursionError:
            raise ChatTemplateError("the chat template does not parse: it is nested too deeply") from None

    @classmethod
    def for_tokenizer(cls, source: str | None, tokenizer: Tokenizer) -> ChatTemplate:
        """The template with the tokenizer's own BOS and EOS."""
        bos = "" if tokenizer.bos_id is None else tokenizer.tokens[tokenizer.bos_id]
        eos = tokenizer.tokens[tokenizer.eos_ids[0]] if tokenizer.eos_ids else ""
        return cls(source, bos, eos)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt as text, for people to read. To feed a model use encode(), which keeps users from forging control
        tokens.

        Args:
            messages: each with a `role`, and `content` as a rule.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: further variables of the template (`tools`, `enable_thinking`, ...).

        Raises:
            ChatTemplateError: malformed messages; the template refuses them, fails, or exceeds its bounds.
        """
        _check_messages(messages)
        context = {"tools": None, "documents": None, **_changed(variables, str)}
        context |= {"messages": _changed_messages(messages, str), "add_generation_prompt": add_generation_prompt}
        context |= {"bos_token": self._bos, "eos_token": self._eos}
        self._environment.restart()
        pieces = []
        try:
            for piece in self._template.generate(context):
                self._environment.measure(len(piece))
                pieces.append(piece)
        except TemplateRaisedError as refusal:
            raise ChatTemplateError(_one_line(refusal)) from None
        except TemplateLimitError as problem:
            raise ChatTemplateError(f"the chat template was stopped: {problem}") from None
        except Exception as problem:  # a template can fail in any way that Python can
            kind = "" if isinstance(problem, TemplateError) else f"{type(problem).__name__}: "
            raise ChatTemplateError(f"the chat template failed: {kind}{_one_line(problem)}") from None
        return "".join(pieces)

    def encode(
        self, messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The prompt as token ids.

        A prompt starts with one BOS where the template writes it or the model's tokenizer adds it, and never with two.
        Text in a message never becomes a control token.

        Raises:
            ChatTemplateError: as for render().
        """
        _check_messages(messages)
        spellings = tokenizer.control_spellings
        firsts = {spelling[0] for spelling in spellings}
        texts = [*_strings(messages), *_strings(variables)]
        if not any(c in firsts for text in texts for c in set(text)):
            prompt = self.render(messages, add_generation_prompt=add_generation_prompt, **variables)
            return tokenizer.encode_parts(tokenizer.split_control(prompt), add_eos=False)
        seen = set().union(self._source, *texts)
        marker = next((m for m in _MARKERS if m not in seen), None)
        if marker is None:
            raise ChatTemplateError("the messages use every private-use character; remove some")
        spelled = "|".join(re.escape(s) for s in sorted(spellings, key=len, reverse=True))
        initial = "[" + re.escape("".join(sorted(firsts))) + "]"
        renderings = []
        for pattern in (spelled, initial):
            mark = _Mark(re.compile(pattern), marker)
            marked = {key: _changed(value, mark) for key, value in variables.items()}
            prompt = self.render(
                _changed_messages(messages, mark), add_generation_prompt=add_generation_prompt, **marked
            )
            renderings.append(tokenizer.split_control(prompt))
        lenient, strict = ([part for part in parts if isinstance(part, int)] for parts in renderings)
        return tokenizer.encode_parts(
            (part if isinstance(part, int) else part.replace(marker, "") for part in renderings[lenient != strict]),
            add_eos=False,
        )


class _Mark:
    """Puts a marker behind the first character of every match."""

    def __init__(self, pattern: re.Pattern[str], marker: str) -> None:
        self._pattern, self._marker = pattern, marker

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: match[0][0] + self._marker + match[0][1:], text)


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ChatTemplateError("messages should be a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatTemplateError(
                f"message {i} is {type(message).__name__}; it should be an object with role and content"
            )
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise ChatTemplateError(f"message {i} has role {str(role)[:80]!r}; it should be a word such as 'user'")


def _changed_messages(messages: Sequence[Message], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """A copy of the messages with every text changed. Roles are checked words and stay as they are."""
    return [{k: v if k == "role" else _changed(v, change) for k, v in message.items()} for message in messages]


def _changed(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """A copy of plain data with every string changed, the keys of objects included."""
    if depth > _MAX_DEPTH:
        raise ChatTemplateError(f"the messages are nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(k, change): _changed(v, change, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, change, depth + 1) for item in value]
    raise ChatTemplateError(f"the messages hold a {type(value).__name__}; they should be plain JSON data")


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise ChatTemplateError(f"the messages are nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, depth + 1)


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())
