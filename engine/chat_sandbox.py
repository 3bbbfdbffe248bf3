"""The Jinja environment that chat templates run in.

A template comes out of a model file, so it is a stranger's program. Jinja's immutable sandbox keeps it away from
attributes and from changing what it is given; on top of that its work is bounded: loop rounds and calls are counted,
and so are the characters of the texts that it makes. What templates may use otherwise is what Hugging Face transformers
gives them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEXT = 1 << 24  # characters of one text
MAX_WORK = 1 << 28  # characters of all the texts that one rendering makes on its way
MAX_STEPS = 1 << 20  # loop rounds of one rendering; a call counts as several
_CALL_STEPS = 8

# What makes long texts or lists out of a number, and no chat template needs.
_REFUSED_METHODS = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"))
_REFUSED_FILTERS = ("batch", "center", "format", "indent", "slice", "urlize", "wordwrap", "xmlattr")


class TemplateLimitError(RuntimeError):
    """A template did more than a chat template has to."""


class TemplateRaisedError(RuntimeError):
    """A template called raise_exception."""


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks what the model said, for training. Here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded(NodeTransformer):
    """Makes loops count their rounds, and `~` a series of additions, which the environment can intercept."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - named after the node
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        first, *rest = (nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes)
        total: nodes.Expr = first
        for part in rest:
            total = nodes.Add(total, part, lineno=node.lineno)
        return total


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one chat template. `restart()` gives a rendering its budget of steps."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.restart()
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self.filters["tojson"] = _to_json
        # A filter that takes the context is never evaluated while compiling, so no round goes uncounted.
        self.filters["_counted"] = pass_context(lambda context, items: self._counted(items))
        self.filters["replace"] = self._replace
        self.filters["join"] = self._join
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]

    def restart(self) -> None:
        """Start counting from zero."""
        self._steps = self._work = 0

    def _step(self, cost: int = 1) -> None:
        self._steps += cost
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"it took more than {MAX_STEPS} steps")

    def _counted(self, items: Iterable[Any]) -> Any:
        if isinstance(items, Sized) and self._steps + len(items) <= MAX_STEPS:
            self._steps += len(items)  # with its length, which the template may ask for
            return items
        return self._counting(items)

    def _counting(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def measure(self, characters: int) -> None:
        """Account for a text of so many characters that is about to be made."""
        self._work += characters
        if characters > MAX_TEXT:
            raise TemplateLimitError(f"it would make a text of {characters} characters; {MAX_TEXT} are allowed")
        if self._work > MAX_WORK:
            raise TemplateLimitError(f"its texts came to {self._work} characters; {MAX_WORK} are allowed")

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        text, old, new = str(text), str(old), str(new)
        rounds = text.count(old)
        self.measure(len(text) + (rounds if count is None else min(rounds, count)) * max(0, len(new) - len(old)))
        return text.replace(old, new, -1 if count is None else count)

    def _join(self, items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        picked = items if attribute is None else map(make_attrgetter(self, attribute), items)
        texts = [str(item) for item in self._counting(picked)]
        self.measure(sum(map(len, texts)) + len(d) * len(texts))
        return str(d).join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounded().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in the sandbox, without the methods of strings that make long ones out of a number."""
        return not (isinstance(obj, str) and attr in _REFUSED_METHODS) and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call for a template: counted, and str.replace measured beforehand."""
        self._step(_CALL_STEPS)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and getattr(obj, "__name__", "") == "replace":
            return self._replace(owner, *args, **kwargs)
        if isinstance(owner, str) and getattr(obj, "__name__", "") == "join" and args:
            return self._join(args[0], owner)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic for a template, refused where the result would be out of proportion."""
        if operator == "+" and _has_length(left) and _has_length(right):
            self.measure(len(left) + len(right))
        elif operator == "*" and (_has_length(left) or _has_length(right)):
            sequence, times = (left, right) if _has_length(left) else (right, left)
            self.measure(len(sequence) * int(times))
        elif operator == "**":
            self.measure(abs(int(right)) * max(1, abs(int(left)).bit_length()))
        elif operator == "%" and isinstance(left, str):
            raise TemplateLimitError("% formatting is not available; use ~ to join texts")
        return super().call_binop(context, operator, left, right)


def _has_length(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _raise_exception(message: Any) -> None:
    raise TemplateRaisedError(str(message))


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """JSON as the models were trained on it: no escapes for HTML or for other scripts."""
    if indent is not None and not 0 <= indent <= 16:
        raise TemplateLimitError(f"tojson has indent={indent}; it should be within 0..16")
    return json.dumps(value, ensure_ascii=False, indent=indent)
