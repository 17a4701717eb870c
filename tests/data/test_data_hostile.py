"""Hostile data: JSON lines, arrays, offsets, texts and tokenizers; see support/hostile.py."""

from __future__ import annotations

import json
import random

import chat_cases
import data_files
import hostile
import numpy as np
import pytest
from hostile import check, check_all

from burst_jax.data import (
    ByteTokens,
    ChatTemplate,
    ChatTokens,
    TokenizerFile,
    check_chats,
    open_corpus,
    save_tokens,
)
from burst_jax.data import tokens as tokens_module
from burst_jax.data.chunks import Chunks


def read(path, **options):
    """All of a corpus."""
    corpus = open_corpus(path, **options)
    tokens = ByteTokens() if corpus.reader.is_text else None
    chunks = Chunks(corpus, tokens, None, length=1 << 20, stride=1 << 20)
    for index in range(len(chunks)):
        chunks[index]


LIMIT = 2**63 - 1
OFFSETS = [
    *([0], [], [0, 4], [1, 3], [0, 2, 1, 3], [0, -1, 3], [-1, 3], [0, 2**40, 3]),
    # Differences of these wrap to positive numbers.
    [0, LIMIT, -LIMIT - 1, -1, 3],
]
IDS = [[-1], [2**31], [-(2**63)], [[1, 2], [3, -4]]]


def test_arrays(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    file, offsets = folder / "a.npy", folder / "a.offsets.npy"

    def results():
        for case in hostile.array_cases():
            file.write_bytes(case.content)
            yield check(case.name, lambda: read(folder), ("data",), rejected=True)
        for ids in IDS:
            file.write_bytes(hostile.saved(np.array(ids)))
            yield check(f"ids {ids}", lambda: read(folder), ("a.npy", "data"), rejected=True)
        file.write_bytes(hostile.saved(np.full(3, 2**64 - 1, np.uint64)))
        yield check("unsigned ids", lambda: read(folder), ("a.npy",), rejected=True)
        file.write_bytes(hostile.saved(np.arange(3)))
        for wrong in OFFSETS:
            offsets.write_bytes(hostile.saved(np.array(wrong, np.int64)))
            yield check(f"offsets {wrong}", lambda: read(folder), (offsets.name,), rejected=True)
        offsets.write_bytes(hostile.saved(np.array([0, 2**64 - 1, 3], np.uint64)))
        yield check("unsigned offsets", lambda: read(folder), (offsets.name,), rejected=True)
        for path, call in ((file, lambda: read(file)), (offsets, lambda: read(folder))):
            with hostile.special_files(path) as found:
                for name in found:
                    wanted = (path.name,) if name != "folder" else ()
                    yield check(f"{path.name} is a {name}", call, wanted, rejected=True)

    with hostile.unchanged(tmp_path, file, offsets):
        check_all(results(), 50)


def test_json_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    valid = {"text": "some text", "id": 1}

    def results():
        # "Missing" and "null" are not text, either.
        texts = {"text": set(hostile.VALUES) - {"text", "escapes", "long"}}
        cases = [*hostile.json_cases(valid, texts), *hostile.text_cases(json.dumps(valid).encode())]
        for case in cases:
            if case.name in ("a key twice", "empty", "byte order mark"):
                continue
            content = case.content.replace(b"\n", b" ")
            file.write_bytes(content + b"\n" + content)
            names = (f"{file.name}, line ", *case.names)
            yield check(case.name, lambda: read(file), names, rejected=case.rejected)
        many = {f"key \x1b[31m {index}": 0 for index in range(9000)}
        file.write_text(json.dumps(many))
        yield check("many keys", lambda: read(file), (file.name,), rejected=True)
        file.write_text(json.dumps({"text": "a"}))
        yield check("a key with escapes", lambda: read(file, key="\x1b[2J"), rejected=True)
        with hostile.special_files(file) as found:
            for name in found:
                yield check(name, lambda: read(file), ("a.jsonl",), rejected=name != "folder")

    check_all(results(), 40)


def test_chats(tmp_path):
    """Whatever a line holds, it is encoded or its file, line and key are named."""
    file = tmp_path / "a.jsonl"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    valid = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [call]},
        ],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"x": 1},
    }
    never = set(hostile.VALUES)
    fields = {
        "messages": never,
        "messages.0": never - {"missing"},
        "messages.0.role": never,
        "messages.0.content": never - {"text", "escapes", "long", "list", "empty"},
        "messages.1.content": (),
        "messages.1.tool_calls": (),
        "messages.1.tool_calls.0.function": (),
        "tools": never - {"missing", "null", "empty"},
        "tools.0": never - {"missing", "object"},
        "chat_template_kwargs": never - {"missing", "null", "object"},
    }
    also = {"messages.0": ("message 0",), "tools.0": ("tools",)}
    # A template that names an error of its own, not the key.
    also |= {path: ("cannot be rendered",) for path in fields if "tool_calls" in path}
    also |= dict.fromkeys(
        ("messages.0.content", "messages.1.content"), also["messages.1.tool_calls"]
    )

    tokens = ChatTokens.of(chat_cases.FOLDER / "llama")

    def use():
        check_chats(open_corpus(file, chats=True), tokens, seq_len=1 << 16)

    def results():
        cases = [*hostile.json_cases(valid, fields, also)]
        for case in [*cases, *hostile.text_cases(json.dumps(valid).encode())]:
            if case.name in ("a key twice", "empty", "byte order mark"):
                continue
            file.write_bytes(case.content.replace(b"\n", b" "))
            names = () if "surrogate" in case.name else case.names
            names = ("a.jsonl, line 1", *names)
            yield check(case.name, use, names, rejected=case.rejected)
        with hostile.special_files(file) as found:
            for name in found:
                yield check(name, use, ("a.jsonl",), rejected=name != "folder")

    check_all(results(), 120)


def test_chat_templates(tmp_path):
    config, template = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.jinja"
    valid = {"chat_template": [{"name": "default", "template": "x"}], "bos_token": {"content": "a"}}
    never = set(hostile.VALUES)
    texts = {"text", "escapes", "long"}
    fields = {
        "chat_template": never - texts,
        "chat_template.0": never,
        "chat_template.0.name": never,
        "chat_template.0.template": never - texts,
        "bos_token": never - texts - {"missing", "null", "true"},
        "bos_token.content": never - texts - {"missing", "null", "true"},
    }
    also = dict.fromkeys(fields, ("chat_template", "bos_token"))

    def use():
        ChatTemplate.of(tmp_path).render([{"role": "user", "content": "a"}])

    def results():
        config.write_text(json.dumps(valid))
        for case in [
            *hostile.json_cases(valid, fields, also),
            *hostile.text_cases(json.dumps(valid).encode()),
        ]:
            config.write_bytes(case.content)
            # A template of half a character is text without a token.
            rejected = case.rejected and "surrogate" not in case.name
            yield check(case.name, use, (config.name, *case.names), rejected=rejected)
        config.write_text(json.dumps(valid))
        template.write_text("x")
        for path in (config, template):
            with hostile.special_files(path) as found:
                for name in found:
                    yield check(f"{path.name} is a {name}", use, (path.name,), rejected=True)

    check_all(results(), 120)


def test_tokenizers(tmp_path):
    file = data_files.write_tokenizer(tmp_path / "tokenizer.json", "one two three " * 99)
    valid = json.loads(file.read_text())
    fields = dict.fromkeys(("version", "model.merges", "added_tokens", "decoder"), ())
    fields |= {"model": hostile.VALUES, "model.vocab": hostile.VALUES}

    def use():
        tokens = TokenizerFile(file)
        tokens.decode(tokens.encode(b"one two"))

    def results():
        cases = [*hostile.json_cases(valid, fields), *hostile.text_cases(file.read_bytes())]
        for case in cases:
            file.write_bytes(case.content)
            rejected = case.rejected and case.name != "a key twice"
            yield check(case.name, use, (file.name,), rejected=rejected)
        with hostile.special_files(file) as found:
            for name in found:
                yield check(name, use, (file.name,), rejected=True)

    check_all(results(), 150)


def test_names_with_escapes_are_escaped(tmp_path):
    for index, content in enumerate((b"{", b'{"text": 5}', b"{}")):
        folder = data_files.write(tmp_path / str(index), {"\x1b[31mred\n.jsonl": content})
        with pytest.raises(ValueError, match=r"\\x1b\[31mred\\n.jsonl, line 1"):
            open_corpus(folder)


def test_long_texts_are_encoded_in_parts(tmp_path, monkeypatch):
    """The tokens are those of the whole text, where it has lines or spaces to end parts at."""
    words = random.Random(0)
    lines = [" ".join("".join(words.choices("etaon", k=4)) for _ in range(9)) for _ in range(300)]
    texts = ["\n".join(lines), " ".join(lines), "é" * 9000, ""]
    tokens = TokenizerFile(data_files.write_tokenizer(tmp_path / "tokenizer.json", texts[0]))
    whole = [tokens.encode(text.encode()) for text in texts]
    monkeypatch.setattr(tokens_module, "_PART", 5000)
    longest = []

    class Watched:
        def encode_batch_fast(self, parts, **options):
            longest.extend(map(len, parts))
            return real.encode_batch_fast(parts, **options)

    real, tokens.tokenizer = tokens.tokenizer, Watched()
    for text, want in zip(texts[:2], whole[:2], strict=True):
        np.testing.assert_array_equal(tokens.encode(text.encode()), want)
    assert real.decode(tokens.encode(texts[2].encode()).tolist()) == texts[2]
    assert len(tokens.encode(b"")) == 0
    assert max(longest) <= 5000


def test_saving_tokens_touches_no_other_file(tmp_path):
    text = open_corpus(data_files.write(tmp_path / "text", {"a.txt": "some text"}))
    out = tmp_path / "out"
    data_files.write(out, {f"t.npy.{end}": "the user's" for end in ("raw", "part", "offsets")})
    with hostile.unchanged(tmp_path, out / "t.npy", out / "t.offsets.npy"):
        assert len(save_tokens(text, ByteTokens(), out / "t.npy")) == 1
        assert (out / "t.npy").is_file()
    (out / "folder.npy").mkdir()
    with (
        hostile.unchanged(tmp_path),
        pytest.raises(ValueError, match=r"folder.npy is a folder: it must be a regular file"),
    ):
        save_tokens(text, ByteTokens(), out / "folder.npy")
