"""Chat templates of Hugging Face checkpoints: conversations as text, and the assistant's parts."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from burst_jax.data.special_tokens import CONFIG, read_config, special_tokens_of
from burst_jax.errors import first_of, optional, printable, shown
from burst_jax.json_files import read_bounded

type Message = Mapping[str, Any]

FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
# Bytes of a template.
_MAX_TEMPLATE = 1 << 22
# A template with blocks around what the assistant writes.
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
# Names under which messages have the assistant's reasoning; templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_REMEDY = (
    f"put {{% generation %}} and {{% endgeneration %}} around what the assistant writes in {FILE}"
)


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
      text: the text, with the special tokens that the template writes.
      spans: ``(start, end)`` of each part that the assistant writes, in characters, ascending.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A jinja2 template that writes conversations as text, as in transformers.

    It runs in jinja2's immutable sandbox, because templates come from the same sources as weights.
    It has ``messages``, ``tools``, ``add_generation_prompt``, the special tokens by their names
    (``bos_token``), ``raise_exception``, ``strftime_now``, the filter ``tojson``, loop controls and
    ``{% generation %}`` blocks. Keys of messages whose value is null are left out.

    Args:
      templates: the template; or several by their names, of which ``"tool_use"`` is used for
        conversations with tools, if there is one, and ``"default"`` for all others.
      special_tokens: further variables of every conversation, like ``{"bos_token": "<s>"}``.
      now: the time of ``strftime_now``, for templates that write the date; None is the current
        time. Rendering with another date gives other tokens.
      name: where the template is from, for messages.

    Raises:
      ImportError: jinja2 is not installed.
      ValueError: a template is not valid, or there is none for conversations without tools; an
        argument of another type.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: datetime.datetime | None = None,
        name: str = "the chat template",
    ):
        self._jinja2 = optional("jinja2", user="ChatTemplate", extra="chat")
        self._sandbox = importlib.import_module("burst_jax.data.jinja_environment")
        self._name = printable(name)
        _check_types(templates, special_tokens, now, name)
        now = datetime.datetime.now() if now is None else now
        environment = self._sandbox.make_environment(now)
        sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        if "default" not in sources:
            raise ValueError(
                f"{self._name} has the templates {first_of(sources)}: one must have the name "
                f"'default'; save the one to use as {FILE}"
            )
        self._sources, self._compiled = sources, {}
        for key, source in sources.items():
            try:
                self._compiled[key] = environment.from_string(source)
            except self._jinja2.TemplateSyntaxError as error:
                raise ValueError(
                    f"{self._name} is not a valid template, {key!r}, line {error.lineno}: "
                    f"{printable(error.message)}"
                ) from None
        self._tokens = dict(special_tokens or {})
        contents: list[Any] = [sources, self._tokens]
        if any("strftime_now" in source for source in sources.values()):
            contents.append(now.date().isoformat())
        text = json.dumps(contents, sort_keys=True)
        self._date = f" on {contents[2]}" if len(contents) > 2 else ""
        self._digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @classmethod
    def of(cls, folder: str | Path, *, now: datetime.datetime | None = None) -> Self:
        """The template of a Hugging Face checkpoint.

        It is ``chat_template.jinja``, with further ones in ``additional_chat_templates``, or else
        ``chat_template`` in ``tokenizer_config.json``, a string or a list of named ones.

        Args:
          folder: the checkpoint, or another folder with these files.
          now: as for the class.

        Raises:
          ValueError: there is no template, or one that is not valid.
        """
        folder = Path(folder)
        config = read_config(folder)
        tokens = special_tokens_of(config, str(folder / CONFIG))
        found = _template_files(folder)
        if found:
            return cls(found, tokens, now=now, name=str(folder / FILE))
        name = f"chat_template in {folder / CONFIG}"
        templates = config.get("chat_template")
        if templates is None:
            raise ValueError(
                f"{printable(folder)} has no chat template, neither {FILE} nor chat_template in "
                f"{CONFIG}: base models have none; add the file {FILE}, or use data that needs no "
                "template, with prompt and completion as strings"
            )
        if isinstance(templates, list):
            pairs = [x for x in templates if isinstance(x, dict)]
            templates = {str(x.get("name")): x.get("template") for x in pairs}
        texts = templates.values() if isinstance(templates, dict) else [templates]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"{printable(name)} is {shown(templates)}: it must be a string, or a list of "
                'objects like {"name": "default", "template": "..."}'
            )
        return cls(templates, tokens, now=now, name=name)

    def __repr__(self) -> str:
        return f"ChatTemplate({self._name})"

    def fingerprint(self) -> str:
        """A hash of the template and the special tokens; the date if the template writes it."""
        return f"chat template {self._digest}{self._date}"

    def marks_answers(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether the template has ``{% generation %}`` blocks around what the assistant writes."""
        source = _COMMENT.sub("", self._sources[self._which(tools)])
        return _GENERATION.search(source) is not None

    def knows_role(self, role: str) -> bool:
        """Whether a template has the role as a string."""
        strings = (f"'{role}'", f'"{role}"')
        return any(each in source for source in self._sources.values() for each in strings)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """A conversation as text; the spans are those of ``{% generation %}`` blocks.

        Args:
          messages: objects with ``role`` and ``content``, and whatever else the template reads.
          tools: descriptions of functions, JSON schemas.
          add_generation_prompt: whether the text ends with the start of the assistant's next
            message, a prompt for generation.
          variables: further variables of the template, like ``{"enable_thinking": False}``.

        Raises:
          ValueError: the template raises, or the conversation has characters U+FDD0 or U+FDD1.
        """
        return self._rendered(
            self._given(messages, tools, variables), tools, add_generation_prompt, variables
        )

    def _given(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] | None,
    ) -> list[dict[str, Any]]:
        """The messages as templates read them.

        Raises:
          ValueError: they have a character that marks blocks.
        """
        given = [_normalized(message) for message in messages]
        if self._sandbox.MARKS.search(_strings([given, tools, variables])):
            raise ValueError("it has a character U+FDD0 or U+FDD1, which text must not have")
        return given

    def _rendered(
        self,
        given: list[dict[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> Rendered:
        """:meth:`render` of what :meth:`_given` returned, or of its start."""
        try:
            marked = self._compiled[self._which(tools)].render(
                {
                    **self._tokens,
                    **(variables or {}),
                    "messages": given,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # Whatever a template does.
            raise ValueError(
                f"{self._name} raises {type(error).__name__}: {printable(error)[:200]}"
            ) from None
        return _without_marks(marked, self._sandbox.START, self._sandbox.MARKS)

    def answers(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        first: int = 0,
    ) -> list[Rendered]:
        """Texts in which each of the assistant's messages is in the context that it has in use.

        A template with ``{% generation %}`` blocks gives one text, with these blocks as spans.
        Without them, a message is what the conversation up to it has after the same conversation
        without it, rendered with the prompt for generation: its end-of-turn token is in the span.

        Some templates change a message when others follow, as Qwen 3's, which drops the reasoning
        of earlier turns. A message that is changed in the whole conversation has its span in a
        further text, which ends with it. Nothing is known about what a template makes of earlier
        messages, so without blocks it renders every start of the conversation: the time is
        quadratic in the number of messages, 2 to 4 s for 1,000 of 40 words on one core.

        Args:
          messages: the conversation.
          tools: as for :meth:`render`.
          variables: as for :meth:`render`.
          first: index of the first message that is an answer; earlier ones are a prompt.

        Returns:
          Texts with at least a span each; none if there is nothing that the assistant writes.

        Raises:
          ValueError: as :meth:`render`; or a prompt is not how the conversation starts.
        """

        given = self._given(messages, tools, variables)

        def render(count: int, prompt: bool = False) -> Rendered:
            return self._rendered(given[:count], tools, prompt, variables)

        if self.marks_answers(tools):
            whole = render(len(messages))
            if not first:
                return [whole] if whole.spans else []
            follows = messages[first].get("role") == "assistant"
            return _after(render(first, follows).text, whole)
        turns = [i for i, x in enumerate(messages) if x.get("role") == "assistant" and i >= first]
        whole = render(len(messages)).text
        spans, changed = [], {}
        for i in turns:
            before, after = render(i, True).text, render(i + 1).text
            if not after.startswith(before):
                raise ValueError(
                    f"{self._name} writes message {i}, the assistant's, with another start than "
                    f"its prompt for generation, {shown(before[-40:])}: {_REMEDY}"
                )
            if whole.startswith(after):
                spans.append((len(before), len(after)))
            else:
                changed[i] = len(before), after
        if changed and (last := max(changed)) == turns[-1]:
            again = whole if last + 1 == len(messages) else render(last + 1).text
            if again != changed[last][1]:
                raise ValueError(
                    f"{self._name} writes message {last}, the assistant's, in another way each "
                    "time: a template must write the same text for the same messages"
                )
        found = [(whole, spans)]
        while changed:
            _, text = changed[max(changed)]
            here = [i for i, (_, after) in changed.items() if text.startswith(after)]
            ends = [(before, len(after)) for before, after in map(changed.pop, here)]
            found.append((text, ends))
        kept = [(text, tuple((a, b) for a, b in ends if a < b)) for text, ends in found]
        return [Rendered(text, ends) for text, ends in kept if ends]

    def _which(self, tools: Sequence[Any] | None) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._sources else "default"


def _check_types(templates: Any, special_tokens: Any, now: Any, name: Any) -> None:
    """Raises ValueError unless the arguments of :class:`ChatTemplate` have its types."""

    def is_strings(value: Any) -> bool:
        given = isinstance(value, Mapping)
        return given and all(isinstance(x, str) for pair in value.items() for x in pair)

    for argument, value, valid, types in (
        (
            "templates", templates, isinstance(templates, str) or is_strings(templates),
            "a string, or a dict of strings by name",
        ),
        (
            "special_tokens", special_tokens, special_tokens is None or is_strings(special_tokens),
            'a dict of strings like {"bos_token": "<s>"}, or None',
        ),
        (
            "now", now, now is None or isinstance(now, datetime.datetime),
            "a datetime.datetime, or None",
        ),
        ("name", name, isinstance(name, str), "a string"),
    ):  # fmt: skip
        if not valid:
            raise ValueError(f"{argument} is {shown(value)}: it must be {types}")


def has_chat_template(folder: str | Path) -> bool:
    """Whether :meth:`ChatTemplate.of` finds a template in a folder."""
    folder = Path(folder)
    return bool(_template_files(folder)) or read_config(folder).get("chat_template") is not None


def _template_files(folder: Path) -> dict[str, str]:
    """The contents of a folder's template files, by their names."""
    path = folder / FILE
    files = {"default": path} if path.is_symlink() or path.exists() else {}
    files |= {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    found = {}
    for name, path in files.items():
        try:
            found[name] = read_bounded(path, _MAX_TEMPLATE).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{printable(path)} is not UTF-8 at byte {error.start}") from None
    return found


def _normalized(message: Message) -> dict[str, Any]:
    """A message without nulls, its reasoning under each name that templates read."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in _REASONING if key in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _without_marks(marked: str, start: str, marks: re.Pattern[str]) -> Rendered:
    """The text without marks, and the ranges between them; a block in a block is part of it."""
    parts, spans, length, opened, depth = [], [], 0, 0, 0
    kinds = [*marks.findall(marked), None]
    for part, kind in zip(marks.split(marked), kinds, strict=True):
        parts.append(part)
        length += len(part)
        if kind == start:
            opened = opened if depth else length
            depth += 1
        elif kind is not None:
            depth -= 1
            if not depth and length > opened:
                spans.append((opened, length))
    return Rendered("".join(parts), tuple(spans))


def _after(prompt: str, whole: Rendered) -> list[Rendered]:
    """The whole text with its spans after the prompt, which it starts with."""
    if not whole.text.startswith(prompt):
        raise ValueError(
            f"the prompt alone ends with {shown(prompt[-40:])}, and the conversation does not "
            "start with it: write all of it under 'messages'"
        )
    spans = tuple((max(a, len(prompt)), b) for a, b in whole.spans if b > len(prompt))
    return [Rendered(whole.text, spans)] if spans else []


def _strings(value: Any) -> str:
    """Everything in a JSON value as one text."""
    return json.dumps(value, ensure_ascii=False, default=str)
