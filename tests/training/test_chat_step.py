"""The loss of a training step on conversations: of the assistant's tokens alone."""

from __future__ import annotations

import json
import random
import re
import shlex
from typing import Any

import generate
import hf_models
import jax.numpy as jnp
import numpy as np
import optax
import perplexity
import pytest
import run_options
import train_lm
from flax import nnx
from implementations import QUICK
from llama_by_formula import LlamaByFormula
from meshes import make_mesh
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from train_lm_runs import error_of

from burst_jax.data import ChatTokens, Loader, check_chats, open_corpus
from burst_jax.models import load
from burst_jax.training import make_batch, make_train_step, place_batch

LETTERS = [chr(ord("a") + i) for i in range(26)] + [str(i) for i in range(10)]
SPECIAL = ["<u>", "<a>", "<e>"]
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<a>' }}{% generation %}{{ message.content + '<e>' }}{% endgeneration %}
    {%- else %}
        {{- '<u>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<a>' }}{% endif %}"""


def drawn_chats(count):
    """Conversations of letters: ``[[(role, text), ...], ...]``, all different."""
    draw, found = random.Random(0), []
    for _ in range(count):
        texts = ["".join(draw.choices(LETTERS, k=draw.randrange(2, 9))) for _ in range(4)]
        roles = ("user", "assistant") * 2
        found.append(list(zip(roles, texts, strict=True))[: draw.choice([2, 4])])
    return found


def by_hand(chat):
    """Token ids of a conversation, and which of them count."""
    ids, counts = [], []
    for role, text in chat:
        answers = role == "assistant"
        start, end = SPECIAL.index("<a>" if answers else "<u>"), [2] * answers
        own = [3 + LETTERS.index(letter) for letter in text] + end
        ids += [start, *own]
        counts += [0] + [int(answers)] * len(own)
    return tuple(ids), counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 64 tokens, which are letters, its template, and conversations."""
    path = hf_models.write_folder("llama2", tmp_path_factory.mktemp("chat") / "model")
    made = Tokenizer(models.WordLevel({x: i for i, x in enumerate(SPECIAL + LETTERS)}, "<u>"))
    made.add_special_tokens(SPECIAL)
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    lines = [
        {"messages": [{"role": role, "content": text} for role, text in chat]}
        for chat in drawn_chats(40)
    ]
    (path / "chats.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def dense_loss(folder, rows, segment_ids):
    """The mean over the batch of what counts, each conversation computed alone, in float64."""
    masks = dict(map(by_hand, drawn_chats(40)))
    peer, total, count = LlamaByFormula(folder), 0.0, 0
    peer.config["rope_parameters"] = {"rope_theta": peer.config["rope_theta"]}
    for row, ids in zip(rows, segment_ids, strict=True):
        for segment in range(1, ids.max() + 1):
            tokens = row[ids == segment]
            logits = np.asarray(peer.logits(tokens[:-1]), np.float64)
            logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            mask = np.array(masks[tuple(tokens.tolist())])[1:]
            total -= (logs[np.arange(len(mask)), tokens[1:]] * mask).sum()
            count += mask.sum()
    return total / count, count


def test_the_loss_of_a_step_is_the_dense_one_of_what_the_assistant_writes(folder):
    corpus, tokens = open_corpus(folder / "chats.jsonl", chats=True), ChatTokens.of(folder)
    assert check_chats(corpus, tokens, seq_len=64).conversations == 40
    with Loader(corpus, seq_len=64, batch=2, tokens=tokens) as loader:
        rows: Any = next(loader)
    want, count = dense_loss(folder, rows["rows"], rows["segment_ids"])
    assert 20 < count < rows["rows"].size / 1.5
    layout, batch = make_batch(**rows, layout="balanced", num_shards=4)
    mesh = make_mesh(data=2, seq=4)
    model = load(folder, mesh=mesh, batch_axis="data", layout=layout, dtype=jnp.float32)
    graphdef, params = nnx.split(model)
    step = make_train_step(graphdef, optax.sgd(0.1), compiler_options=QUICK)
    placed = place_batch(batch, mesh, batch_axis="data")
    _, _, metrics = step(params, optax.sgd(0.1).init(params), placed)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


def test_the_perplexity_of_chats_is_that_of_what_the_assistant_writes(folder, tmp_path, capsys):
    """Over all conversations, packed, on four devices; and of windows of 4 targets each."""
    pairs = [by_hand(chat) for chat in drawn_chats(40)]
    rows = [np.array(ids, np.int32) for ids, _ in pairs]
    want, count = dense_loss(folder, rows, [np.ones_like(row) for row in rows])
    words = ["--model", str(folder), "--data", str(folder / "chats.jsonl"), "--chat"]
    given = [*words, "--dtype=float32", "--seq-len=96", "--mesh=data=2,seq=2", "--packed"]
    assert perplexity.main([*given, f"--out={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert f"40 conversations of {sum(map(len, rows)):,} tokens, of which the assistant" in printed
    found = json.loads((tmp_path / "perplexity.json").read_text())["mesh"]
    assert found["tokens"] == count
    np.testing.assert_allclose(found["nll"], want, rtol=1e-5)
    # The same tokens count where each is in a window, whatever the windows' lengths.
    args, _ = perplexity.parse_args([*words, "--seq-len=4", "--stride=3"])
    perplexity.prepare(args)
    parts = list(perplexity.all_windows(args, 64))
    assert sum(part.weights.sum() for part in parts) == count
    assert all(len(part.tokens) <= 5 and part.weights.any() for part in parts)
    with pytest.raises(SystemExit, match="2"):
        perplexity.main([*words[:-1], "--chat-date=2026-03-01"])
    assert "--chat-date needs --chat" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        perplexity.main([*words, f"--data={folder / 'tokenizer.json'}"])
    assert "error: " in capsys.readouterr().err


def options(folder, out, *more):
    return [
        f"--model={folder}", f"--data={folder / 'chats.jsonl'}", f"--out={out}", "--chat",
        "--mesh=data=2,seq=2", "--seq-len=64", "--batch=2", "--eval-batches=1", "--dtype=float32",
        "--lr=1e-3", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_train_lm_fine_tunes_on_conversations_and_generate_answers(folder, tmp_path, capsys):
    given = options(folder, tmp_path / "out", "--steps=2", "--checkpoint-every=1")
    assert train_lm.main(given) == 0
    printed = capsys.readouterr().out
    counts = [sum(by_hand(chat)[1]) for chat in drawn_chats(40)]
    tokens = [len(by_hand(chat)[0]) for chat in drawn_chats(40)]
    assert (
        f"40 conversations of {sum(tokens):,} tokens, of which the assistant writes "
        f"{sum(counts):,}; the longest has {max(tokens)}; training reads each about "
        f"{2 * 2 * 64 / 0.95 / sum(tokens):.1f} times\n"
    ) in printed
    found = re.search(
        r"perplexity of (\d+) tokens that the assistant writes \(2 held-out conversations, read "
        r"(\S+) times\), in float32:",
        printed,
    )
    assert found is not None
    _, held_out = open_corpus(folder / "chats.jsonl", chats=True).split(0.05)
    written = sum(sum(by_hand(drawn_chats(40)[i])[1]) for i in held_out.documents)
    assert found[2] == f"{int(found[1]) / written:.1f}"
    assert "[sample starts]" not in printed
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    train, _ = open_corpus(folder / "chats.jsonl", chats=True).split(0.05)
    with Loader(train, seq_len=64, batch=2, tokens=ChatTokens.of(folder)) as loader:
        rows: Any = next(loader)
    want, count = dense_loss(folder, rows["rows"], rows["segment_ids"])
    np.testing.assert_allclose(records[0]["loss"], want, rtol=1e-5)
    assert records[0]["targets"] == count
    words = f"--model {tmp_path / 'out/model'} --chat --system ab --prompt cd --max-new-tokens 5"
    assert generate.main(shlex.split(f"{words} --dtype float32 --mesh seq=2")) == 0
    assert "prompts of 7 tokens" in capsys.readouterr().err


def test_options_of_conversations_that_cannot_be_used(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_lm, "train", lambda *_: pytest.fail("trained"))
    given, plain = options(folder, tmp_path / "out", "--steps=1"), [f"--model={folder}"]
    broken = tmp_path / "broken.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": "ab"}]}), "{}"] * 20
    broken.write_text("\n".join(lines))
    cases = [
        ([*plain, "--long-chats=cut"], "--long-chats needs --chat"),
        ([*plain, "--chat-date=2026-03-01"], "--chat-date needs --chat"),
        ([*plain, "--chat"], "--chat needs --data: JSON lines of conversations"),
        (["--chat", f"--data={broken}"], "--chat needs a chat template: give --model, or --token"),
        ([*given, "--packing=split"], "--packing is split, which cuts conversations anywhere"),
        ([*given, "--sample-tokens=5"], "--sample-tokens is 5: a sample continues a text; for ans"),
        ([*given, "--chat-date=today"], "argument --chat-date: 'today': it must be a date like"),
        ([*given, f"--data={broken}"], "40 of 40 conversations cannot be used:\n"),
        ([*given, f"--data={broken}"], "broken.jsonl, line 1, has no token that the assistant"),
        ([*given, f"--data={broken}"], "\nand 35 more\n"),
        ([*given, "--seq-len=16"], " tokens, and a sequence 17: use a longer --seq-len, remove"),
        ([*given, "--seq-len=16"], "or cut such conversations with --long-chats cut"),
    ]
    for words, message in cases:
        assert message in error_of(words, capsys)
    cut = [*given, "--seq-len=16", "--long-chats=cut", "--chat-date=2026-03-01"]
    args, _ = run_options.parse_args(cut)
    run = run_options.prepare(args)
    assert "the assistant writes" in run.about
    assert isinstance(run.tokens, ChatTokens)
    assert run.tokens.too_long == "cut"


def test_a_chat_s_prompts_are_rendered(folder, capsys):
    given = ["--model", str(folder), "--chat", "--prompt", "cd"]
    for more, want in (([], "<u>cd<a>"), (["--system", "ab"], "<u>ab<u>cd<a>")):
        args, _ = generate.parse_args([*given, *more])
        (ids,), tokenizer, ends = generate.prompts_of(args)
        assert ends == [SPECIAL.index("<e>")]
        assert tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == want
    with pytest.raises(SystemExit, match="2"):
        generate.main(["--model", str(folder), "--prompt", "cd", "--system", "ab"])
    assert "--system needs --chat" in capsys.readouterr().err
