"""Conversations as token ids, with a loss weight for each token: the assistant's alone count."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np

from burst_jax.data.chat_template import ChatTemplate, Message, Rendered, has_chat_template
from burst_jax.data.readers import kind_of
from burst_jax.data.special_tokens import CONFIG, read_config, special_tokens_of
from burst_jax.data.tokens import TokenizerFile
from burst_jax.errors import first_of, shown
from burst_jax.json_files import parse

TooLong = Literal["error", "cut"]
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# What a template reads of a line, or of how it is rendered.
_OWN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"}
_FORMATS = (
    'write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": '
    '"..."}]}, or {"prompt": ..., "completion": ...}'
)


class MissingTemplate(ValueError):
    """Messages without a chat template: the same for every line that has some."""


class ChatSequence(NamedTuple):
    """A conversation, or its part up to an answer.

    Attributes:
      tokens: int32 ``[n]``, token ids.
      weights: float32 ``[n]``, the weight of predicting each token: 1 if the assistant writes it,
        else 0. It is 0 for the first token, which nothing predicts.
    """

    tokens: np.ndarray
    weights: np.ndarray


class ChatTokens:
    """The tokenizer of conversations, JSON lines with one of::

        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
        {"prompt": [{"role": "user", ...}, ...], "completion": [{"role": "assistant", ...}, ...]}
        {"prompt": "Once upon", "completion": " a time"}

    Messages are rendered by the chat template, and what the assistant writes counts in the loss: in
    every message of the assistant, or only in those of ``completion``. The template writes all
    special tokens. A line may also have ``tools``, a list of JSON schemas or its JSON text, and
    ``chat_template_kwargs``, further variables of the template.

    Strings need no template: the text is that of ``prompt``, ``completion`` and the EOS token of
    ``tokenizer_config.json``, after the special tokens that ``tokens`` adds to every text, and
    ``completion`` and EOS count.

    A text is encoded once, as a whole. A token counts if it has at least a character that the
    assistant writes, as in transformers' ``return_assistant_tokens_mask``; so a token that crosses
    the border to the prompt counts. The end-of-turn token is the assistant's, with what the
    template writes after it in the same message: it is what ends an answer in generation. See
    :meth:`ChatTemplate.answers` for templates without ``{% generation %}`` blocks, and for those
    that change earlier messages: their conversations become several sequences. Text of a message
    that is spelled like a special token becomes that token, as in transformers.

    Args:
      tokens: the tokenizer, with ``special_tokens=True`` for texts to start as in generation.
      template: the chat template, or None if all lines have strings.
      eos_token: the token that ends a ``completion`` that is a string.
      too_long: what happens to conversations of more than ``seq_len + 1`` tokens: ``"error"``, or
        ``"cut"`` into sequences that each start with the last token of the previous one; the later
        ones lack the context before. Sequences without a token that counts are dropped.

    Attributes:
      vocab_size: ids are below it.
      too_long: the argument.

    Raises:
      ValueError: too_long is unknown, or the vocabulary lacks the EOS token.
    """

    is_bytes = False
    separator_id: int | None = None

    def __init__(
        self,
        tokens: TokenizerFile,
        template: ChatTemplate | None,
        *,
        eos_token: str | None = None,
        too_long: TooLong = "error",
    ):
        if too_long not in get_args(TooLong):
            raise ValueError(
                f"too_long is {too_long!r}: use one of {', '.join(map(repr, get_args(TooLong)))}"
            )
        if eos_token is not None and tokens.tokenizer.token_to_id(eos_token) is None:
            raise ValueError(f"eos_token is {eos_token!r}, which {tokens!r} lacks: use its own")
        self._tokens, self._template, self._eos = tokens, template, eos_token
        self.too_long: TooLong = too_long
        self.vocab_size = tokens.vocab_size

    @classmethod
    def of(
        cls,
        folder: str | Path,
        *,
        tokens: TokenizerFile | None = None,
        now: datetime.datetime | None = None,
        too_long: TooLong = "error",
    ) -> Self:
        """The tokenizer and template of a Hugging Face checkpoint.

        Args:
          folder: the checkpoint, or another folder with ``tokenizer.json`` and
            ``tokenizer_config.json``, and usually ``chat_template.jinja``.
          tokens: the tokenizer, if it is another than that of ``tokenizer.json``.
          now: as for :class:`ChatTemplate`.
          too_long: as for the class.

        Raises:
          ValueError: as :class:`TokenizerFile`, :class:`ChatTemplate` and the class.
        """
        folder = Path(folder)
        if tokens is None:
            tokens = TokenizerFile(folder / "tokenizer.json", special_tokens=True)
        template = ChatTemplate.of(folder, now=now) if has_chat_template(folder) else None
        eos = special_tokens_of(read_config(folder), str(folder / CONFIG)).get("eos_token")
        return cls(tokens, template, eos_token=eos, too_long=too_long)

    def __repr__(self) -> str:
        return f"ChatTokens({self._tokens!r}, {self._template!r})"

    def encode(self, text: bytes) -> np.ndarray:
        """int32 ``[tokens]`` of a text that is no conversation."""
        return self._tokens.encode(text)

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids ``[tokens]``."""
        return self._tokens.decode(ids)

    def fingerprint(self) -> str:
        """A hash of the tokenizer and the template, and the options."""
        template = "no chat template" if self._template is None else self._template.fingerprint()
        parts = (
            self._tokens.fingerprint(),
            template,
            f"EOS {self._eos!r}",
            f"too_long {self.too_long!r}",
        )
        return ", ".join(parts)

    def prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> np.ndarray:
        """int32 ``[tokens]``: a conversation and the start of the assistant's next message.

        Raises:
          ValueError: there is no template, or messages are not valid, or the template raises.
        """
        name, template = "the conversation,", self._with_template("the conversation")
        _check_messages(messages, name, template)
        text = template.render(messages, tools=tools, add_generation_prompt=True).text
        return self._encoded(Rendered(text, ()), name).tokens

    def end_of_turn(self) -> int | None:
        """The last special token of an answer, at which generation stops; None if it has none.

        Raises:
          ValueError: there is no template, or it has no conversation of a question and an answer.
        """
        self._with_template("a conversation")
        chat = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        answer = self.sequences({"messages": chat}, "a conversation of two messages,")[-1]
        added = self._tokens.tokenizer.get_added_tokens_decoder()
        special = [index for index, token in added.items() if token.special]
        ends = answer.tokens[(answer.weights > 0) & np.isin(answer.tokens, special)]
        return int(ends[-1]) if len(ends) else None

    def sequences(self, record: Mapping[str, Any], name: str) -> list[ChatSequence]:
        """The sequences of a conversation, each with a token that counts.

        Args:
          record: the object of a JSON line.
          name: where it is from, for messages.

        Raises:
          ValueError: it is no conversation, the template raises, or no token counts.
        """
        prompt, completion = record.get("prompt"), record.get("completion")
        strings = isinstance(prompt, str) and isinstance(completion, str)
        if strings and record.get("messages") is None:
            for key in ("tools", "chat_template_kwargs"):
                if record.get(key) is not None:
                    raise ValueError(
                        f"{name} has {key}, which no template reads: prompt and completion are "
                        "strings; write messages"
                    )
            found = [self._completion(str(prompt), str(completion), name)]
        else:
            found = self._conversation(record, name)
        for each in found:
            each.weights[:1] = 0
        found = [each for each in found if each.weights.any()]
        if not found:
            raise ValueError(
                f"{name} has no token that the assistant writes: each conversation needs a message "
                'with the role "assistant" that the template renders, after at least one token'
            )
        return found

    def _conversation(self, record: Mapping[str, Any], name: str) -> list[ChatSequence]:
        messages, first = _messages_of(record, name)
        _check_messages(messages, name, self._template)
        template = self._with_template(name, ", or write prompt and completion as strings")
        variables = record.get("chat_template_kwargs")
        if variables is not None and not isinstance(variables, dict):
            raise ValueError(
                f"{name} has {shown(variables)} under 'chat_template_kwargs': it must be an object"
            )
        if own := _OWN_VARIABLES.intersection(variables or ()):
            raise ValueError(
                f"{name} has {first_of(own)} under 'chat_template_kwargs', which has a key of its "
                "own, or follows from what is rendered: remove it there"
            )
        tools = _tools_of(record, name)
        try:
            texts = template.answers(messages, tools=tools, variables=variables, first=first)
        except ValueError as error:
            raise ValueError(f"{name} cannot be rendered: {error}") from None
        return [self._encoded(text, name) for text in texts]

    def _completion(self, prompt: str, completion: str, name: str) -> ChatSequence:
        if self._eos is None:
            raise ValueError(
                f"{name} has a completion, which ends with EOS, and there is no EOS token: add "
                f"eos_token to {CONFIG}, or pass eos_token="
            )
        text = prompt + completion
        text += "" if completion.endswith(self._eos) else self._eos
        tokens, weights = self._encoded(Rendered(text, ((len(prompt), len(text)),)), name)
        prefix = np.array(self._tokens.prefix_ids, np.int32)
        weights = np.concatenate([np.zeros(len(prefix), np.float32), weights])
        return ChatSequence(np.concatenate([prefix, tokens]), weights)

    def _encoded(self, rendered: Rendered, name: str) -> ChatSequence:
        try:
            rendered.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} has half of a surrogate pair, which UTF-8 cannot encode ({error.reason}): "
                "write the whole pair"
            ) from None
        tokens, offsets = self._tokens.encode_with_offsets(rendered.text)
        weights = np.zeros(len(tokens), np.float32)
        for start, end in rendered.spans:
            weights[(offsets[:, 0] < end) & (offsets[:, 1] > start)] = 1
        return ChatSequence(tokens, weights)

    def _with_template(self, name: str, other_remedy: str = "") -> ChatTemplate:
        if self._template is None:
            raise MissingTemplate(
                f"{name} has messages, and there is no chat template: add chat_template.jinja to "
                f"the tokenizer's folder{other_remedy}"
            )
        return self._template


def _messages_of(record: Mapping[str, Any], name: str) -> tuple[list[Any], int]:
    """The messages of a line, and the index of the first that is no prompt."""
    record = {key: value for key, value in record.items() if value is not None}
    if "messages" in record:
        return record["messages"], 0
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list) and completion:
            return prompt + completion, len(prompt)
        raise ValueError(
            f"{name} has {shown(prompt)} as prompt and {shown(completion)} as completion: both "
            "must be strings, or both lists of messages"
        )
    other = ""
    if isinstance(record.get("conversations"), list):
        other = "; 'conversations' with from and value is another format, to be converted"
    raise ValueError(
        f"{name} has {kind_of(record)}, and neither 'messages' nor 'prompt' and 'completion': "
        f"{_FORMATS}{other}"
    )


def _check_messages(messages: Any, name: str, template: ChatTemplate | None) -> None:
    """Raises ValueError unless ``messages`` are objects with a known role and a content."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"{name} has {shown(messages)} as messages: {_FORMATS}")
    for index, message in enumerate(messages):
        which = f"{name} message {index}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{which} is {shown(message)}: it must be an object; {_FORMATS}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise ValueError(
                f"{which} has {kind_of(message)} and the role {shown(role)}: it must be a string, "
                f"one of {first_of(_ROLES, 9)}"
            )
        # Templates leave out messages of a role that they do not know.
        if role not in _ROLES and not (template is not None and template.knows_role(role)):
            raise ValueError(
                f"{which} has the role {shown(role)}, which the chat template does not name: use "
                f"one of {first_of(_ROLES, 9)}"
            )
        lacks = content is None and not message.get("tool_calls")
        if lacks or not isinstance(content, (str, list, type(None))):
            raise ValueError(
                f"{which} has {shown(content)} as content: it must be a string, or what the "
                "template reads in a list; only a message with tool_calls may have none"
            )


def _tools_of(record: Mapping[str, Any], name: str) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = parse(tools, f"{name} under 'tools',")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"{name} has {shown(tools)} under 'tools': it must be a list of JSON schemas, objects"
        )
    return tools
