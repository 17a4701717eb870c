"""Conversations, chat templates and tokenizers in the style of three model families.

The templates are the project's own. ``make_golden_chats.py`` stores what transformers makes of
them.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from trained_tokenizers import trained_tokenizer

FOLDER = Path(__file__).parents[1] / "golden_chats"
NAMES = ("llama", "qwen", "gemma")
SPECIAL = {
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "gemma": ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
}
TEXT = "the ring of four"
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a < b?", "parameters": {"type": "object"}},
}
_WORDS = (
    *("the", "ring", "of", " four", "devices", "sends", "keys\n", "and", "  values", "\n\nto"),
    *("é", "漢字", "🌀", "naïve", "x = 3;", "don't", "<b>", "&", "\t", "end."),
)


def template_of(name: str) -> str:
    return (FOLDER / name / "chat_template.jinja").read_text()


def without_blocks(template: str) -> str:
    """The template without its ``{% generation %}`` tags."""
    return re.sub(r"\{%(-?) (?:end)?generation (-?)%\}", r"{%\1 set _ = 0 \2%}", template)


def write_plain_folder(name: str, folder: Path) -> Path:
    """A golden folder with a template without ``{% generation %}`` tags."""
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text((FOLDER / name / file).read_text())
    (folder / "chat_template.jinja").write_text(without_blocks(template_of(name)))
    return folder


def conversations(name: str) -> list[dict[str, Any]]:
    """Drawn ones: several turns, system prompts, reasoning, tools, prompt and completion."""
    draw = random.Random(name)

    def text() -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randrange(1, 9)))

    records = []
    for index in range(10):
        messages: list[dict[str, Any]] = []
        if index % 2:
            messages.append({"role": "system", "content": text()})
        for _ in range(draw.randrange(1, 4)):
            messages.append({"role": "user", "content": text()})
            messages.append({"role": "assistant", "content": text()})
            if draw.random() < 0.5:
                key = draw.choice(["reasoning_content", "thinking", "reasoning"])
                messages[-1][key] = draw.choice([text(), None])
        record: dict[str, Any] = {"messages": messages}
        if index == 9:
            record = {"prompt": messages[:-1], "completion": messages[-1:]}
        elif index % 3 == 2:
            messages.append({"role": "user", "content": text()})
        elif index % 3 == 1 and name != "gemma":
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": index}}}
            messages[-1:] = [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": text()},
                messages[-1],
            ]
            record["tools"] = [TOOL] if index % 2 else json.dumps([TOOL])
        records.append(record)
    return records


def messages_of(record: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """All messages, and the index of the first that is no prompt."""
    if "messages" in record:
        return record["messages"], 0
    return record["prompt"] + record["completion"], len(record["prompt"])


def tools_of(record: dict[str, Any]) -> Any:
    tools = record.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


def make_tokenizer(name: str) -> Tokenizer:
    """One of about 350 tokens, in the style of a family."""
    texts = [json.dumps(record, ensure_ascii=False) for record in conversations(name)]
    if name == "gemma":
        return _with_bytes(texts)
    tokenizer = trained_tokenizer(texts, 350, SPECIAL[name])
    if name == "qwen":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return tokenizer
    bos = SPECIAL[name][0]
    begins = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), begins])
    return tokenizer


def with_eos(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with a post-processor that also ends texts."""
    pair = "<bos> $A <eos>", "<bos> $A <eos> <bos> $B <eos>"
    tokenizer.post_processor = processors.TemplateProcessing(*pair, [("<bos>", 2), ("<eos>", 1)])
    return tokenizer


def _with_bytes(texts: list[str]) -> Tokenizer:
    """Spaces are letters, and letters that are no tokens are bytes, as in sentencepiece."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    special = [*SPECIAL["gemma"], *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 90,
        special_tokens=[AddedToken(token, normalized=False) for token in special],
        limit_alphabet=70,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][: len(SPECIAL["gemma"])]
    made["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(made))
    begins = "<bos> $A", "<bos> $A <bos> $B", [("<bos>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(*begins)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer
