"""Conversations: their tokens and what counts in the loss, as transformers has them."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import chat_cases
import numpy as np
import pytest
from chat_cases import FOLDER, NAMES, conversations, messages_of, tools_of
from tokenizers import Tokenizer

from burst_jax.data import ChatTemplate, ChatTokens, TokenizerFile

USER = {"role": "user", "content": "the ring"}
ANSWER = {"role": "assistant", "content": "of four"}


def expected(name):
    return json.loads((FOLDER / name / "expected.json").read_text())


def as_lists(sequence):
    return {"tokens": sequence.tokens.tolist(), "mask": sequence.weights.tolist()}


def text_of(tokens, sequence):
    """The text of the tokens that count."""
    return decoded(tokens, sequence.tokens[sequence.weights > 0])


def decoded(tokens, ids):
    return tokens._tokens.tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def with_template(name, template, **variables):
    tokens = TokenizerFile(FOLDER / name / "tokenizer.json", special_tokens=True)
    return ChatTokens(tokens, ChatTemplate(template, variables))


# --- tokens and masks ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_masks_are_those_of_transformers(name):
    """Blocks mark what counts: in a macro, among loop controls, with tools, of a completion."""
    tokens, counted = ChatTokens.of(FOLDER / name), 0
    for record, want in zip(conversations(name), expected(name), strict=True):
        (found,) = tokens.sequences(record, "a line,")
        assert as_lists(found) == want["whole"]
        assert (found.tokens.dtype, found.weights.dtype) == (np.int32, np.float32)
        counted += int(found.weights.sum())
    assert counted > 150


@pytest.mark.parametrize("name", NAMES)
def test_without_blocks_each_answer_counts_once_after_its_own_prompt(name, tmp_path):
    """The masks are those of the blocks. Qwen's template changes answers that others follow."""
    tokens, several = ChatTokens.of(chat_cases.write_plain_folder(name, tmp_path / name)), 0
    for record, want in zip(conversations(name), expected(name), strict=True):
        found = tokens.sequences(record, "a line,")
        several += len(found) - 1
        if name != "qwen":
            assert list(map(as_lists, found)) == [want["whole"]]
        for part in want["parts"]:
            ids, mask = part["tokens"], np.array(part["mask"], bool)
            same = [x for x in found if x.tokens[: len(ids)].tolist() == ids]
            assert sum(x.weights[: len(ids)][mask].all() for x in same) == 1
        total = sum(sum(part["mask"]) for part in want["parts"])
        assert sum(x.weights.sum() for x in found) == total
    assert (several > 3) == (name == "qwen")


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_ends_where_the_answer_begins(name):
    tokens = ChatTokens.of(FOLDER / name)
    for record, want in zip(conversations(name), expected(name), strict=True):
        messages, _ = messages_of(record)
        last = max(i for i, x in enumerate(messages) if x["role"] == "assistant")
        found = tokens.prompt(messages[:last], tools=tools_of(record))
        part = want["parts"][-1]
        assert found.tolist() == part["tokens"][: part["mask"].index(1)]


def test_the_end_of_a_turn_is_what_stops_generation():
    ends = {"llama": "<|eot_id|>", "qwen": "<|im_end|>", "gemma": "<end_of_turn>"}
    for name, end in ends.items():
        tokens = ChatTokens.of(FOLDER / name)
        assert tokens.end_of_turn() == tokens._tokens.tokenizer.token_to_id(end)
    plain = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    assert with_template("qwen", plain).end_of_turn() is None


def test_a_token_that_crosses_a_border_counts_and_so_does_the_end_of_the_turn():
    """The tokenizer joins letters of the prompt and the answer."""
    tokens = with_template("qwen", "{% for m in messages %}{{ m.content }}{% endfor %}")
    parts = ("of t", "he ri", "the ring")
    messages = [{**x, "content": y} for x, y in zip((USER, ANSWER, USER), parts, strict=True)]
    (found,) = tokens.sequences({"messages": messages}, "")
    pieces = [decoded(tokens, [token]) for token in found.tokens]
    assert "".join(pieces) == "".join(parts)
    assert " the" in pieces
    ends = np.cumsum(list(map(len, pieces)))
    starts = ends - list(map(len, pieces))
    np.testing.assert_array_equal(found.weights, (starts < 9) & (ends > 4))
    chats = ChatTokens.of(FOLDER / "qwen")
    (found,) = chats.sequences({"messages": [USER, ANSWER, USER]}, "")
    assert text_of(chats, found) == "of four<|im_end|>\n"


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_completion_as_strings_start_as_a_text_does_and_end_with_eos(name):
    tokens = ChatTokens.of(FOLDER / name)
    peer = Tokenizer.from_file(str(FOLDER / name / "tokenizer.json"))
    eos = {"llama": "<|eot_id|>", "qwen": "<|im_end|>", "gemma": "<eos>"}[name]
    for completion in (" of four", f" of four{eos}"):
        (found,) = tokens.sequences({"prompt": "the ring", "completion": completion}, "")
        assert found.tokens.tolist() == peer.encode(f"the ring of four{eos}").ids
        assert text_of(tokens, found) == f" of four{eos}"
    (found,) = tokens.sequences({"prompt": "", "completion": "the ring"}, "")
    # BOS, or without it the first of the completion, which no token predicts.
    assert found.weights[1:].all()
    assert found.weights[0] == 0


def test_variables_of_a_line_reach_the_template():
    answer = "{% generation %}{{ ' of' if thinks else ' keys' }}{% endgeneration %}"
    tokens = with_template("llama", "{{ messages[0].content }}" + answer)
    for kwargs, want in ((None, " keys"), ({"thinks": True}, " of")):
        record = {"messages": [USER, ANSWER], "chat_template_kwargs": kwargs}
        (found,) = tokens.sequences(record, "")
        assert text_of(tokens, found) == want


def test_blocks_may_hold_blocks_and_the_prompt_of_a_completion():
    nested = "a{% generation %}b{% generation %}c{% endgeneration %}d{% endgeneration %}e"
    assert ChatTemplate(nested).render([USER]) == ("abcde", ((1, 4),))
    assert ChatTemplate("{% generation %}{% endgeneration %}").render([USER]) == ("", ())
    whole = "{% generation %}{{ messages | map(attribute='content') | join }}{% endgeneration %}"
    tokens = with_template("llama", whole)
    (found,) = tokens.sequences({"prompt": [USER], "completion": [ANSWER]}, "")
    assert text_of(tokens, found) == "of four"
    (found,) = tokens.sequences({"messages": [USER, ANSWER]}, "")
    assert found.weights[1:].all()


# --- templates -----------------------------------------------------------------------------------


def written(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


ENTRIES = [
    {"name": "default", "template": "{{ eos_token }}config"},
    {"name": "tool_use", "template": "config, {{ tools | length }} tools"},
]
FILES: list[Any] = [
    ({"tokenizer_config.json": {"chat_template": "one"}}, "one", "one"),
    (
        {"tokenizer_config.json": {"chat_template": ENTRIES, "eos_token": {"content": "</s>"}}},
        "</s>config",
        "config, 1 tools",
    ),
    (
        {"tokenizer_config.json": {"chat_template": "one"}, "chat_template.jinja": "a file"},
        "a file",
        "a file",
    ),
    (
        {"chat_template.jinja": "a file", "additional_chat_templates/tool_use.jinja": "tools"},
        "a file",
        "tools",
    ),
    (
        {"tokenizer_config.json": {"bos_token": None, "extra_special_tokens": {"image": "<i>"}},
         "chat_template.jinja": "{{ bos_token }}{{ image }}"},
        "<i>",
        "<i>",
    ),
]  # fmt: skip


def test_a_template_is_found_where_checkpoints_have_it(tmp_path):
    for index, (files, plain, with_tools) in enumerate(FILES):
        template = ChatTemplate.of(written(tmp_path / str(index), files))
        assert template.render([USER]).text == plain
        assert template.render([USER], tools=[chat_cases.TOOL]).text == with_tools


def test_a_role_that_a_template_names_is_a_role():
    source = "{% for m in messages %}{% if m.role == 'critic' %}no{% endif %}{{ m.content }}"
    tokens = with_template("llama", source + "{% endfor %}")
    critic = {"role": "critic", "content": "of four"}
    (found,) = tokens.sequences({"messages": [USER, critic, ANSWER]}, "")
    assert "noof four" in decoded(tokens, found.tokens)


def test_null_is_no_content_and_reasoning_has_every_name():
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    message = {"role": "assistant", "content": None, "reasoning": "why <b>", "name": "é"}
    assert json.loads(template.render([message]).text) == {
        "role": "assistant", "name": "é", "reasoning": "why <b>", "thinking": "why <b>",
        "reasoning_content": "why <b>",
    }  # fmt: skip
    assert "é" in template.render([message]).text
    assert "<b>" in template.render([message]).text


def test_a_date_in_a_template_is_that_of_now_and_in_the_fingerprint():
    days = [datetime.datetime(2026, 3, day, 12) for day in (1, 1, 2)]
    dated, plain = (
        [ChatTemplate(source, now=now) for now in days]
        for source in ("{{ strftime_now('%d %b %Y') }}", "{{ messages[0].content }}")
    )
    assert [each.render([USER]).text for each in dated] == ["01 Mar 2026"] * 2 + ["02 Mar 2026"]
    first, again, other = (each.fingerprint() for each in dated)
    assert first == again != other
    assert "2026-03-02" in other
    assert len({each.fingerprint() for each in plain}) == 1
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([USER]).text.isdigit()


HOSTILE = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ strftime_now.__self__.year }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ ''.join(range(10 ** 9)) }}",
    "{{ dict.__subclasses__() }}",
    "{% include 'x' %}",
    "{{ raise_exception('as it likes') }}",
    "{{ messages[7].content }}",
    "{% for m in messages %}{{ m.content + 1 }}{% endfor %}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_what_a_template_must_not_do_raises(source):
    with pytest.raises(ValueError, match=r"^the chat template raises \w+(Error|NotFound): "):
        ChatTemplate(source).render([USER])


TEMPLATES: list[Any] = [
    ({}, "has no chat template, neither chat_template.jinja nor chat_template in tokenizer_config"),
    ({"chat_template.jinja": "{% if %}"}, "chat_template.jinja is not a valid template, 'default'"),
    ({"chat_template.jinja": "\n{{ x"}, "not a valid template, 'default', line 2: "),
    ({"tokenizer_config.json": {"chat_template": 5}}, "is 5: it must be a string, or a list of"),
    ({"tokenizer_config.json": {"chat_template": [{"name": "a"}]}}, "it must be a string, or a"),
    (
        {"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "x"}]}},
        "has the templates rag: one must have the name 'default'",
    ),
    ({"tokenizer_config.json": {"eos_token": 7, "chat_template": "x"}}, "has 7 as eos_token: it"),
    ({"tokenizer_config.json": "[]"}, "tokenizer_config.json is []: it must be a JSON object"),
]


def test_bad_templates_raise(tmp_path):
    for index, (files, message) in enumerate(TEMPLATES):
        (tmp_path / str(index)).mkdir()
        with pytest.raises(ValueError, match=re.escape(message)):
            ChatTemplate.of(written(tmp_path / str(index), files))
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8 at byte 3"):
        ChatTemplate.of(tmp_path)
    with pytest.raises(ValueError, match="U\\+FDD0 or U\\+FDD1, which text must not have"):
        ChatTemplate("x").render([{**USER, "content": "\ufdd0"}])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"templates": None}, "templates is None: it must be a string, or a dict of strings by na"),
        ({"templates": {"default": 5}}, "templates is {'default': 5}: it must be a string, or a"),
        ({"special_tokens": ["<s>"]}, "special_tokens is ['<s>']: it must be a dict of strings"),
        ({"special_tokens": {"bos_token": None}}, "special_tokens is {'bos_token': None}: it must"),
        ({"now": "today"}, "now is 'today': it must be a datetime.datetime, or None"),
        ({"name": 5}, "name is 5: it must be a string"),
    ],
)
def test_arguments_of_other_types_raise(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ChatTemplate(**{"templates": "x"} | given)


def test_an_answer_that_is_not_rendered_counts_nothing():
    """Also not the token of what surrounds it."""
    tokens = with_template("qwen", "{% for m in messages %}{{ m.content }}{% endfor %}")
    contents = "of t", "", "he ring", " of four"
    roles = "user", "assistant", "user", "assistant"
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    (found,) = tokens.sequences(line(*messages), "a line,")
    assert text_of(tokens, found) == " of four"
    with pytest.raises(ValueError, match="no token that the assistant writes"):
        tokens.sequences(line(*messages[:3]), "a line,")


def test_a_comment_is_no_block():
    source = "{# {% generation %} #}{% for m in messages %}{{ m.content }}|{% endfor %}"
    (found,) = ChatTemplate(source).answers([USER, ANSWER])
    assert [found.text[a:b] for a, b in found.spans] == [ANSWER["content"] + "|"]


def test_a_template_that_draws_raises():
    source = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ range(99999) | random }}"
    source = (
        source.replace("{{ range", "{% if not add_generation_prompt %}{{ range") + "{% endif %}"
    )
    with pytest.raises(ValueError, match="message 1, the assistant's, in another way each time"):
        ChatTemplate(source).answers([USER, ANSWER])


# --- broken conversations ------------------------------------------------------------------------


def line(*messages, **more):
    return {"messages": list(messages), **more}


BROKEN: list[tuple[Any, str]] = [
    ({"text": "a"}, "a line, has keys ['text'], and neither 'messages' nor 'prompt' and 'completi"),
    ({"conversations": []}, "'conversations' with from and value is another format"),
    ({"prompt": "a"}, "has keys ['prompt'], and neither"),
    ({"prompt": "a", "completion": [ANSWER]}, "both must be strings, or both lists of messages"),
    ({"prompt": [USER], "completion": []}, "and [] as completion: both must be strings, or both"),
    (line(), "a line, has [] as messages: write"),
    ({"messages": "hello"}, "a line, has 'hello' as messages: write"),
    (line(USER, "hello"), "a line, message 1 is 'hello': it must be an object; write"),
    (line({"from": "human"}), "message 0 has keys ['from'] and the role None: it must be a string"),
    (line({"role": "human", "content": "a"}), "message 0 has the role 'human', which the chat te"),
    (
        line({"role": "ai", "content": "a"}),
        "message 0 has the role 'ai', which the chat template do",
    ),
    ({"prompt": "a", "completion": "b", "tools": []}, "a line, has tools, which no template reads"),
    (line({"role": "user"}), "message 0 has None as content: it must be a string, or what the tem"),
    (line({"role": "user", "content": 5}), "message 0 has 5 as content: it must be a string"),
    (line(USER), "a line, has no token that the assistant writes: each conversation needs"),
    (line(USER, ANSWER, tools=[5]), "has [5] under 'tools': it must be a list of JSON schemas"),
    (line(USER, ANSWER, tools="x"), "a line, under 'tools', is not JSON"),
    (line(USER, ANSWER, chat_template_kwargs=[]), "has [] under 'chat_template_kwargs': it must"),
    (line(USER, {**ANSWER, "content": "\ud800"}), "a line, has half of a surrogate pair, which"),
    (line(ANSWER, USER), "a line, cannot be rendered: chat_template in"),
    (
        line(USER, ANSWER, chat_template_kwargs={"tools": []}),
        "a line, has tools under 'chat_template_kwargs', which has a key of its own",
    ),
]


def test_broken_conversations_raise(tmp_path):
    config = json.loads((FOLDER / "gemma" / "tokenizer_config.json").read_text())
    config["chat_template"] = chat_cases.template_of("gemma")
    files = {"tokenizer_config.json": config}
    files["tokenizer.json"] = (FOLDER / "gemma" / "tokenizer.json").read_text()
    tokens = ChatTokens.of(written(tmp_path, files))
    for record, message in BROKEN:
        with pytest.raises(ValueError, match=re.escape(message)):
            tokens.sequences(record, "a line,")
    with pytest.raises(ValueError, match="the conversation, message 0 has None as content"):
        tokens.prompt([{"role": "user"}])
    with pytest.raises(ValueError, match="raises TemplateError: roles must alternate"):
        tokens.sequences(line(ANSWER, USER), "a line,")


def test_a_prompt_that_the_answer_does_not_continue_raises():
    """Without blocks its tokens cannot be told from the prompt's; with them a completion's."""
    plain = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    prompted = with_template("llama", plain + "{{ '<think>' if add_generation_prompt }}")
    message = "writes message 1, the assistant's, with another start than its prompt for generation"
    with pytest.raises(ValueError, match=rf"a line, .*{message}, '.*<think>': put {{% generation"):
        prompted.sequences(line(USER, ANSWER), "a line,")
    marked = "{% generation %}{{ messages | map(attribute='content') | join }}{% endgeneration %}"
    prompted = with_template("llama", marked + "{{ '<think>' if add_generation_prompt }}")
    with pytest.raises(ValueError, match=r"the prompt alone ends with '.*<think>', and the conv"):
        prompted.sequences({"prompt": [USER], "completion": [ANSWER]}, "a line,")


def test_wrong_tokenizers_of_conversations_raise():
    tokens = TokenizerFile(FOLDER / "qwen" / "tokenizer.json")
    with pytest.raises(ValueError, match="too_long is 'drop': use one of 'error', 'cut'"):
        ChatTokens(tokens, None, too_long="drop")  # pyrefly: ignore
    with pytest.raises(ValueError, match="eos_token is '</s>', which TokenizerFile"):
        ChatTokens(tokens, None, eos_token="</s>")
    without = ChatTokens(tokens, None)
    lacking = "has messages, and there is no chat template: add chat_template.jinja to the tokenize"
    with pytest.raises(ValueError, match=f"^a line, {lacking}.* folder, or write prompt and c"):
        without.sequences(line(USER, ANSWER), "a line,")
    for name, call in (
        ("the conversation", lambda: without.prompt([USER])),
        ("a conversation", without.end_of_turn),
    ):
        with pytest.raises(ValueError, match=f"^{name} {lacking}r's folder$"):
            call()
    with pytest.raises(ValueError, match="ends with EOS, and there is no EOS token: add eos_token"):
        without.sequences({"prompt": "a", "completion": "b"}, "a line,")
