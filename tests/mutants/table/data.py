"""Faults of burst_jax/data."""

# ruff: noqa: E501 (code as it is there)

CHATS = "tests/data/test_chats.py -k"
CHAT_LOADER = "tests/data/test_chat_loader.py -k"
SPECIAL_TOKENS = "tests/data/test_special_tokens.py -k"
CHAT_TEMPLATE = "burst_jax/data/chat_template.py"

MUTANTS = [
    ("burst_jax/data/corpus.py", "if not str(path):", "if False:", "tests/data/test_data_errors.py -k bad_files"),
    ("burst_jax/data/chunks.py", "enumerate(text[:4])", "enumerate(text[:3])",
     "tests/data/test_data.py -k cuts"),
    ("burst_jax/data/chunks.py", "high >= limit", "high > limit", "tests/data/test_data_errors.py"),
    ("burst_jax/data/corpus.py", "min(max(1, round(len(self) * held_out)), len(self) - 1)",
     "max(1, round(len(self) * held_out))", "tests/data/test_data.py"),
    ("burst_jax/data/packing.py", "self._ended = [False] * len(self._parents)\n        for stream", "for stream", "tests/data/test_data.py -k resume"),
    ("burst_jax/data/packing.py", "range(0, len(tokens) - 1, length - 1)",
     "range(0, len(tokens), length - 1)", "tests/data/test_data.py"),
    ("burst_jax/data/chunks.py", "sizes[chunks.document_of(index)] += len",
     "sizes[chunks.document_of(index)] = len", "tests/data/test_data.py -k saved"),
    ("burst_jax/data/packing.py", "self._dropped = 0 if parts else self._dropped + 1",
     "self._dropped += not parts", "tests/data/test_data_errors.py"),
    ("burst_jax/data/readers.py", "np.uint8) == ord(\"\\n\")) + at", "np.uint8) == ord(\"\\n\"))",
     "tests/data/test_data.py -k json"),
    ("burst_jax/data/chats.py", "(offsets[:, 0] < end) & (offsets[:, 1] > start)",
     "(offsets[:, 0] < end) & (offsets[:, 0] >= start)", f"{CHATS} crosses"),
    ("burst_jax/data/chats.py", "\"\" if completion.endswith(self._eos) else self._eos", "self._eos",
     f"{CHATS} as_strings"),
    ("burst_jax/data/chats.py", "each.weights[:1] = 0", "pass", f"{CHATS} as_strings"),
    (CHAT_TEMPLATE, "(max(a, len(prompt)), b) for", "(a, b) for", f"{CHATS} may_hold"),
    (CHAT_TEMPLATE, "opened = opened if depth else length", "opened = length", f"{CHATS} may_hold"),
    (CHAT_TEMPLATE, "if text.startswith(after)]", "if True]", f"{CHATS} without_blocks"),
    (CHAT_TEMPLATE, "return \"tool_use\" if", "return \"default\" if", f"{CHATS} is_found_where"),
    (CHAT_TEMPLATE, "contents.append(now.date().isoformat())", "pass", f"{CHATS} date"),
    ("burst_jax/data/jinja_environment.py", "isinstance(name, str) and name.startswith(\"_\")", "False",
     f"{CHATS} must_not_do"),
    ("burst_jax/data/chunks.py", "starts = begin == start < stop", "starts = start == 0", f"{SPECIAL_TOKENS} once"),
    ("burst_jax/data/packing.py", "part[\"weights\"][1:].any()", "part[\"weights\"].any()", f"{CHAT_LOADER} are_cut"),
    ("burst_jax/data/special_tokens.py", "text[-1] + 1", "text[-1] + 2", f"{SPECIAL_TOKENS} transformers"),
    ("examples/perplexity.py", "new[: counted - start] = 0", "", "tests/project/test_hf_examples.py -k windows_and"),
]  # fmt: skip
