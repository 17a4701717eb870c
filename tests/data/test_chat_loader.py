"""Packed conversations: each token that the assistant writes counts once, wherever it is."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any, cast

import chat_cases
import chex
import jax
import numpy as np
import pytest
from chat_cases import FOLDER
from data_files import loader_of, taken, write
from meshes import make_mesh
from tokenizers import Tokenizer, models, pre_tokenizers

from burst_jax.data import (
    ByteTokens,
    ChatTemplate,
    ChatTokens,
    TokenizerFile,
    check_chats,
    open_corpus,
    rows_of_process,
    save_tokens,
)
from burst_jax.training import make_batch, place_batch

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- ' <a> ' }}{% generation %}{{ message.content + ' <e>' }}{% endgeneration %}
    {%- else %}
        {{- ' <u> ' + message.content }}
    {%- endif %}
{%- endfor %}"""
COMMON = [f"u{index}" for index in range(50)]


def make_chats(folder, count, seed=0, most=7):
    """Conversations whose answers have words of their own; their tokenizer; the words' ids."""
    draw, words, lines = random.Random(seed), 0, []
    for _ in range(count):
        messages = []
        for _ in range(draw.choice([1, 1, 1, 2, 4])):
            said = " ".join(draw.choices(COMMON, k=draw.randrange(1, 9)))
            own = draw.randrange(1, most)
            answer = " ".join(f"w{index}" for index in range(words, words + own))
            words += own
            messages += [
                {"role": "user", "content": said},
                {"role": "assistant", "content": answer},
            ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    vocabulary = ["<u>", "<a>", "<e>", *COMMON, *(f"w{index}" for index in range(words))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, "<u>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    half = len(lines) // 2
    write(folder / "chats", {"a.jsonl": "".join(lines[:half]), "b.jsonl": "".join(lines[half:])})
    ids = np.arange(len(vocabulary) - words, len(vocabulary))
    return open_corpus(folder / "chats", chats=True), folder / "tokenizer.json", ids.tolist()


def tokens_of(file, **options: Any):
    return ChatTokens(TokenizerFile(file), ChatTemplate(TEMPLATE), **options)


def counted(batch, mesh=None):
    """How often each token id counts as a target: on the devices of a mesh, if there is one."""
    if mesh is None:
        made = make_batch(**batch)
        return Counter(made["targets"][made["weights"] > 0].tolist())
    _, made = make_batch(**batch, layout="balanced", num_shards=mesh.shape["seq"])
    placed = place_batch(made, mesh, batch_axis="data")
    found: Counter[int] = Counter()
    pairs = (placed[name].addressable_shards for name in ("targets", "weights"))
    for targets, weights in zip(*pairs, strict=True):
        assert targets.device == weights.device
        assert targets.replica_id == 0
        found.update(np.asarray(targets.data)[np.asarray(weights.data) > 0].tolist())
    return found


def test_each_token_of_5000_conversations_counts_once_on_a_mesh_and_after_any_step(tmp_path):
    corpus, file, own = make_chats(tmp_path, 5000)
    tokens, mesh = tokens_of(file), make_mesh(data=2, seq=4)
    options: Any = {"seq_len": 256, "batch": 4, "epochs": 1, "tokens": tokens}
    states, whole = [], []
    with loader_of(corpus, **options) as loader:
        states.append(json.dumps(loader.get_state()))
        for batch in loader:
            whole.append(batch)
            states.append(json.dumps(loader.get_state()))
    assert len(whole) > 30
    assert whole[0]["rows"].shape == whole[0]["weights"].shape == (4, 257)
    assert whole[0]["weights"].dtype == np.float32
    found = sum((counted(batch, mesh) for batch in whole), Counter())
    turns = found.pop(2)  # The ends of turns.
    assert found == Counter(own)
    assert turns == sum(line.count('"assistant"') for line in _lines(tmp_path))
    steps = random.Random(1).sample(range(len(whole) - 1), 4)
    for step in (0, *steps, len(whole) - 1):
        with loader_of(corpus, **options) as again:
            again.set_state(json.loads(states[step]))
            rest = list(again) if step == max(steps) else [next(again)]
        for got, want in zip(rest, whole[step:], strict=False):
            chex.assert_trees_all_equal(got, want, strict=True)
        assert step != max(steps) or len(rest) == len(whole) - step


def _lines(folder):
    return [line for file in (folder / "chats").iterdir() for line in file.read_text().split("\n")]


def test_processes_load_their_own_sequences_of_conversations(tmp_path):
    corpus, file, own = make_chats(tmp_path, 150)
    options: Any = {"seq_len": 70, "batch": 6, "epochs": 2, "tokens": tokens_of(file)}
    whole = taken(loader_of(corpus, **options))
    for process in range(3):
        rows = rows_of_process(6, process, 3)
        part = taken(loader_of(corpus, rows=rows, **options))
        for got, want in zip(part, whole, strict=True):
            chex.assert_trees_all_equal(got, jax.tree.map(lambda x: x[list(rows)], want))  # noqa: B023
    found = sum(map(counted, whole), Counter())
    assert found.pop(2) > 300
    assert found == Counter(dict.fromkeys(own, 2))


@pytest.mark.parametrize("seq_len", [5, 9, 16])
def test_long_conversations_are_cut_if_asked_to_and_each_token_counts_once(tmp_path, seq_len):
    corpus, file, own = make_chats(tmp_path, 60, most=20)
    options: Any = {"seq_len": seq_len, "epochs": 1, "batch": 3}
    tokens = tokens_of(file, too_long="cut")
    found = Counter()
    for batch in taken(loader_of(corpus, tokens=tokens, **options)):
        found += counted(batch)
        for row, ids in zip(batch["weights"], batch["segment_ids"], strict=True):
            # No segment is without a token that counts.
            assert all(row[ids == x][1:].any() for x in range(1, ids.max() + 1))
    assert found.pop(2) > 60
    assert found == Counter(own)
    message = r"[ab]\.jsonl, line \d+, has \d+ tokens, and a sequence \d+: use a longer seq_len"
    with pytest.raises(ValueError, match=message):
        taken(loader_of(corpus, tokens=tokens_of(file), **options))


def test_an_answer_that_others_change_is_a_sequence_of_its_own(tmp_path):
    """Qwen's template without blocks: the loader's sequences are those of ChatTokens."""
    tokens = ChatTokens.of(chat_cases.write_plain_folder("qwen", tmp_path / "qwen"))
    records = chat_cases.conversations("qwen")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    corpus = open_corpus(tmp_path / "chats.jsonl", chats=True)
    want = [each for x in records for each in tokens.sequences(x, "")]
    counts = check_chats(corpus, tokens, seq_len=400)
    assert counts == (
        len(records), len(want), sum(len(x.tokens) for x in want),
        sum(x.weights.sum() for x in want), max(len(x.tokens) for x in want),
    )  # fmt: skip
    assert counts.sequences > counts.conversations
    found = []
    for batch in taken(loader_of(corpus, seq_len=400, epochs=1, tokens=tokens)):
        for *arrays, ids in zip(batch["rows"], batch["weights"], batch["segment_ids"], strict=True):
            found += [
                [x[ids == segment].tolist() for x in arrays] for segment in range(1, ids.max() + 1)
            ]
    assert sorted(found) == sorted([x.tokens.tolist(), x.weights.tolist()] for x in want)


def test_a_conversation_of_many_sequences_resumes_in_each_of_them(tmp_path):
    tokens = ChatTokens.of(chat_cases.write_plain_folder("qwen", tmp_path / "qwen"))
    messages = [
        {"role": role, "content": str(turn)} for turn in range(40) for role in ("user", "assistant")
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    corpus = open_corpus(tmp_path / "chats.jsonl", chats=True)
    options: Any = {"seq_len": 900, "batch": 1, "epochs": 1, "tokens": tokens, "prefetch": 0}
    with loader_of(corpus, **options) as loader:
        states = [loader.get_state() for batch in loader]
        whole = len(states)
    assert whole > 10
    for step in (0, whole // 3, whole - 2, whole - 1):
        with loader_of(corpus, **options) as again:
            again.set_state(states[step])
            assert again.step == step + 1
            assert (next(again, None) is None) == (step == whole - 1)


# --- errors --------------------------------------------------------------------------------------


def test_one_pass_names_the_lines_that_are_wrong(tmp_path):
    good = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    lines = ['{"messages": []}', "", "no json", good, *["{}"] * 5]
    corpus = open_corpus(write(tmp_path, {"a.jsonl": "\n".join(lines)}) / "a.jsonl", chats=True)
    with pytest.raises(ValueError, match="8 of 8 conversations cannot be used:\n") as raised:
        check_chats(corpus, ChatTokens.of(FOLDER / "llama"), seq_len=8)
    found = str(raised.value).splitlines()
    assert [re.findall(r"a\.jsonl, line (\d+), ", line) for line in found[1:-1]] == [
        ["1"], ["3"], ["4"], ["5"], ["6"],
    ]  # fmt: skip
    assert "has [] as messages: write" in found[1]
    assert "is not JSON (Expecting value" in found[2]
    assert found[-1] == "and 3 more"


def test_a_missing_template_is_named_once(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [json.dumps({"messages": chat})] * 7 + ["{}"]
    corpus = open_corpus(write(tmp_path, {"a.jsonl": "\n".join(lines)}) / "a.jsonl", chats=True)
    tokens = ChatTokens(TokenizerFile(FOLDER / "llama" / "tokenizer.json"), None)
    with pytest.raises(ValueError, match="8 of 8 conversations cannot be used:\n") as raised:
        check_chats(corpus, tokens, seq_len=8)
    first, second, more = str(raised.value).splitlines()[1:]
    assert "a.jsonl, line 1, has messages, and there is no chat template: add chat_tem" in first
    assert "a.jsonl, line 8, has keys [], and neither" in second
    assert more == "and 6 more"


def test_conversations_and_their_tokenizer_go_together(tmp_path):
    chats = write(tmp_path, {"a.jsonl": '{"messages": [{}]}\n', "t.txt": "text", "b.jsonl": "[]"})
    corpus = open_corpus(chats / "a.jsonl", chats=True)
    text, tokens = open_corpus(chats / "t.txt"), ChatTokens.of(FOLDER / "llama")
    need = "conversations need ChatTokens, and ChatTokens need conversations, open_corpus(path, ch"
    calls: list[tuple[Any, str]] = [
        (lambda: loader_of(corpus), f"tokens is None, and corpus Corpus({chats}/a.jsonl"),
        (lambda: loader_of(corpus, tokens=ByteTokens()), need),
        (lambda: loader_of(text, tokens=tokens), need),
        (
            lambda: loader_of(corpus, tokens=tokens, packing="split"),
            "packing is 'split', which cut",
        ),
        (lambda: check_chats(text, tokens, seq_len=8), "1 documents): open it with open_corpus(pa"),
        (lambda: check_chats(corpus, tokens, seq_len=0), "seq_len is 0: it must be an integer"),
        (lambda: save_tokens(corpus, cast(Any, tokens), tmp_path / "x.npy"), "loss weights cannot"),
        (lambda: open_corpus(chats / "t.txt", chats=True), "t.txt holds text: conversations are J"),
        (lambda: open_corpus(chats=True), "chats is True, and path None: name a file of JSON lin"),
        (lambda: open_corpus(chats / "b.jsonl", chats=True), "line 1, is list: each line must be"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert corpus.reader.read(0, 0, 0) == b'{"messages": [{}]}'


def test_states_know_their_template_and_other_states_are_as_before(tmp_path):
    corpus, file, _ = make_chats(tmp_path, 20)
    one = loader_of(corpus, seq_len=64, tokens=tokens_of(file))
    state = one.get_state()
    one.close()
    tokens = ChatTokens(TokenizerFile(file), ChatTemplate(TEMPLATE + " "))
    for other in (tokens, tokens_of(file, too_long="cut")):
        with (
            loader_of(corpus, seq_len=64, tokens=other) as loader,
            pytest.raises(ValueError, match=r"the state was saved with tokens .*, chat template "),
        ):
            loader.set_state(state)
    text = open_corpus(write(tmp_path / "text", {"a.txt": "some text " * 9}))
    with loader_of(text, tokens=TokenizerFile(file)) as loader:
        options = loader.get_state()["options"]
        assert list(options) == [
            "documents", "tokens", "seq_len", "batch", "packing", "seed", "epochs",
        ]  # fmt: skip
        assert re.fullmatch("tokenizer [0-9a-f]{32}, separator None", options["tokens"])
        assert set(next(loader)) == {"rows", "segment_ids"}
