"""Makes ``tests/golden_chats`` with transformers: tokens and masks of conversations.

No test imports this: it needs transformers, in an environment of its own::

    python3 -m venv /tmp/peer
    /tmp/peer/bin/pip install transformers jinja2
    /tmp/peer/bin/python tests/support/make_golden_chats.py
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import chat_cases
import tokenizers
import transformers  # pyrefly: ignore (in an environment of its own)

NAMED = {
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen": {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "gemma": {
        "bos_token": {"content": "<bos>", "special": True, "__type": "AddedToken"},
        "eos_token": "<eos>",
        "add_bos_token": True,
        "add_eos_token": False,
    },
}


def write_folder(name: str) -> Path:
    """Tokenizer and config next to the template."""
    folder = chat_cases.FOLDER / name
    made = json.loads(chat_cases.make_tokenizer(name).to_str())
    (folder / "tokenizer.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED[name]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
    return folder


def encoded(tokenizer: Any, messages: Any, tools: Any) -> dict[str, list[int]]:
    """Token ids of a conversation, and which of them the assistant writes."""
    found = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return {"tokens": list(found["input_ids"]), "mask": list(found["assistant_masks"])}


def expected(tokenizer: Any, record: dict[str, Any]) -> dict[str, Any]:
    """A conversation whole, its prompt for generation, and up to each of its answers."""
    messages, first = chat_cases.messages_of(record)
    tools = chat_cases.tools_of(record)
    whole, parts = encoded(tokenizer, messages, tools), []
    for index in range(first, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        part = encoded(tokenizer, messages[: index + 1], tools)
        prompt = tokenizer.apply_chat_template(
            messages[:index], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert part["tokens"][: len(prompt)] == prompt
        part["mask"][: len(prompt)] = [0] * len(prompt)
        parts.append(part)
        if index == first and first:  # Of a completion.
            assert whole["tokens"][: len(prompt)] == prompt
            whole["mask"][: len(prompt)] = [0] * len(prompt)
    return {"whole": whole, "parts": parts}


def added() -> list[Any]:
    """What a text's tokens are, whatever ``tokenizer_config.json`` specifies."""
    found = []
    names = [(name, False) for name in chat_cases.NAMES] + [("gemma", True)]
    flags = (None, False, True)
    for (name, more), bos, eos in itertools.product(names, flags, flags):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED[name]}
        for key, adds in (("add_bos_token", bos), ("add_eos_token", eos)):
            config.pop(key, None)
            config |= {} if adds is None else {key: adds}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            tokenizer = tokenizers.Tokenizer.from_file(f"{chat_cases.FOLDER / name}/tokenizer.json")
            if more:
                tokenizer = chat_cases.with_eos(tokenizer)
            tokenizer.save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            ids = list(tokenizer(chat_cases.TEXT)["input_ids"])
            found.append([name, more, bos, eos, ids])
    return found


def main() -> None:
    """Writes all folders and their expectations."""
    for name in chat_cases.NAMES:
        tokenizer = transformers.AutoTokenizer.from_pretrained(write_folder(name))
        rows = [expected(tokenizer, record) for record in chat_cases.conversations(name)]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        (chat_cases.FOLDER / name / "expected.json").write_text(f"[{lines}]\n")
    lines = ",\n".join(json.dumps(row) for row in added())
    (chat_cases.FOLDER / "special_tokens.json").write_text(f"[{lines}]\n")


if __name__ == "__main__":
    main()
