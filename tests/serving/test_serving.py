"""Generation from a cache that is split over the sequence, beside whole attention."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_tiers
from flax import nnx
from implementations import quick_jit
from meshes import mesh_of
from served_models import (
    CONFIG,
    LIKE_GEMMA,
    LIKE_GPT,
    VOCAB,
    WINDOWS,
    WITH_BIASES,
    Watched,
    models,
    prompts_of,
)

from burst_jax import ShardingRules
from burst_jax.models import Decoder, YarnRope, add_lora, load
from burst_jax.serving import Generator
from burst_jax.serving.attention import Parts, Scores, decode_attention, products
from burst_jax.serving.cache import EMPTY, Room, Slots
from burst_jax.serving.sampling import Sampling
from burst_jax.serving.steps import At
from pallas_kernels.pallas_triton.decode import partial_attention


def case(sizes, layout, lengths, new, *, chunk=None, extend=None, split=False, **config):
    return locals()


CASES = [
    case({"seq": 4}, "zigzag", [90, 33], 40, chunk=30, extend=13, layer_pattern=WINDOWS),
    case({"seq": 1}, "contiguous", [21], 3, rope=YarnRope(10000.0, factor=4.0, old_positions=16)),
    case({"data": 2, "seq": 2, "tensor": 2}, "striped", [37, 9], 20, extend=11, **LIKE_GEMMA),
    # Three devices divide neither four heads nor 50 hidden features.
    case({"seq": 3}, "zigzag", [50], 60, extend=31, split=True, mlp_dim=50, **WITH_BIASES),
    case({"seq": 2, "tensor": 4}, "zigzag", [50], 8, chunk=30, extend=40, split=True, **LIKE_GPT),
    case({"fsdp": 2, "seq": 4}, "striped:2", [3, 1], 3, split=True),
]


def case_id(case):
    mesh = "x".join(f"{name}{size}" for name, size in case["sizes"].items())
    return f"{mesh}-{case['layout']}-{'_'.join(map(str, case['lengths']))}"


def whole_attention(model, length):
    """``(row's tokens) -> logits`` of the last one, by attention over all of them."""
    graphdef, params = nnx.split(model)

    @quick_jit
    def logits(params, tokens, last):
        model = nnx.merge(graphdef, params)
        hidden = model(tokens, jnp.arange(length, dtype=jnp.int32), (tokens >= 0).astype(jnp.int32))
        return model.unembed(hidden[0, last])

    def of_row(row):
        # What comes later is padding.
        tokens = np.full((1, length), -1, np.int32)
        tokens[0, : len(row)] = row
        return np.asarray(logits(params, jnp.asarray(tokens), len(row) - 1))

    return of_row


@pytest.mark.parametrize("case", in_tiers(CASES, case_id, CASES[:2]))
def test_each_step_is_whole_attention(case):
    config = dataclasses.replace(CONFIG, **case["config"])
    one, model = models(config, case["sizes"], case["layout"])
    room = max(case["lengths"]) + 2 * case["new"]
    if case["extend"]:
        room += case["extend"] + 32  # For padding of the second prompt.
    server = Watched(
        model, max_length=room, batch=len(case["lengths"]), prefill_chunk=case["chunk"],
        split_weights=case["split"],
    )  # fmt: skip
    prompts = prompts_of(case["lengths"])
    rows, ends = [list(prompt) for prompt in prompts], []

    def go_on(prompts, **options):
        for tokens in server.generate(prompts, case["new"], **options):
            ends.append([len(row) for row in rows])
            for row, token in zip(rows, tokens, strict=True):
                row.append(int(token))

    go_on(prompts)
    if case["extend"]:
        more = prompts_of([case["extend"]] * len(rows), seed=1)
        for row, prompt in zip(rows, more, strict=True):
            row.extend(prompt)
        go_on(more, extend=True)
    expected = whole_attention(one, 2 * (room // 2 + 1))
    assert len(ends) == len(server.logits)
    checked = range(0, len(ends), max(1, len(ends) // 12))
    for step in {*checked, 0, case["new"] - 1, len(ends) - 1}:
        for row, end in enumerate(ends[step]):
            want = expected(rows[row][:end])
            got = server.logits[step][row]
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
            assert rows[row][end] == got.argmax()


@functools.lru_cache
def server():
    model = models(CONFIG, {"seq": 2}, "zigzag")[1]
    return Generator(model, max_length=64, batch=2)


def generated(prompts, count, **options):
    return np.stack(list(server().generate(prompts, count, **options)))


PROMPTS = prompts_of([9, 5])


def test_a_second_call_forgets_the_first():
    first = generated(PROMPTS, 5)
    generated(prompts_of([20, 20], 3), 3)
    np.testing.assert_array_equal(generated(PROMPTS, 5), first)


def test_a_generation_that_is_dropped_leaves_a_cache_that_holds_what_was_shown():
    whole = generated(PROMPTS, 8)
    stream = server().generate(PROMPTS, 8)
    shown = [next(stream) for _ in range(3)]
    stream.close()
    np.testing.assert_array_equal(shown, whole[:3])
    rest = generated([[int(token)] for token in prompts_of([2], 5)[0]], 4, extend=True)
    asked = [
        [*prompt, *(int(x) for x in np.stack(shown)[:, row]), int(prompts_of([2], 5)[0][row])]
        for row, prompt in enumerate(PROMPTS)
    ]
    np.testing.assert_array_equal(rest, generated(asked, 4))


def test_a_row_ends_with_a_stop_token():
    whole = generated(PROMPTS, 8)
    stop = int(whole[2, 0])
    with_stop = generated(PROMPTS, 8, stop_tokens=[stop])
    for row in range(2):
        found = np.flatnonzero(whole[:, row] == stop)
        end = found[0] + 1 if found.size else 8
        kept = with_stop[:end, row]
        np.testing.assert_array_equal(kept, whole[:end, row][: len(kept)])
        assert (with_stop[end:, row] == -1).all()
    assert len(with_stop) <= 8


def test_random_tokens_depend_on_the_seed_and_not_on_the_mesh():
    options: Any = {"temperature": 1.5, "top_k": 20, "top_p": 0.9}
    got = generated(PROMPTS, 6, seed=3, **options)
    np.testing.assert_array_equal(generated(PROMPTS, 6, seed=3, **options), got)
    assert (generated(PROMPTS, 6, seed=4, **options) != got).any()
    other = Generator(models(CONFIG, {"data": 2}, "contiguous")[1], max_length=64, batch=2)
    same = np.stack(list(other.generate(PROMPTS, 6, seed=3, **options)))
    np.testing.assert_array_equal(same, got)


def test_sampling_keeps_what_it_says():
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]))

    def drawn(**options):
        choose = jax.jit(Sampling(temperature=1.0, **options).choose)
        key = jax.random.key(0)
        return np.stack([choose(logits, key, jnp.full(2, length)) for length in range(400)])

    assert set(drawn(top_k=2)[:, 0]) == {0, 1}
    assert set(drawn(top_k=2)[:, 1]) == {2, 3}
    assert set(drawn(top_p=0.65)[:, 0]) == {0, 1}
    assert set(drawn(top_p=0.75)[:, 1]) == {1, 2, 3}
    shares = np.bincount(drawn()[:, 0], minlength=4) / 400
    np.testing.assert_allclose(shares, [0.4, 0.3, 0.2, 0.1], atol=0.08)


def test_a_ring_buffer_keeps_the_window():
    room = Room.of(100, 10_000, 4)
    assert room.is_ring
    assert room.slots == 25
    places = jnp.arange(500)
    device, slot = (np.asarray(x) for x in room.slot(places))
    assert device.max() == 3
    for last in range(room.slots * 4, 500):
        taken = {(int(device[p]), int(slot[p])) for p in range(last - 99, last + 1)}
        assert len(taken) == 100
    assert not Room.of(100, 100, 4).is_ring


def test_queries_that_see_nothing_are_zero():
    q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4))
    slots = Slots(jnp.full(3, EMPTY), jnp.zeros((1, 3), jnp.int32))
    out = decode_attention(q, k, k, slots, jnp.int32(5), jnp.int32(3), ())
    np.testing.assert_array_equal(out, jnp.zeros((1, 1, 2, 4)))


@pytest.mark.parametrize(
    ("shape", "value_dim", "window", "soft_cap", "splits", "scale"),
    [((2, 1, 4, 2, 16), 16, None, None, 4, -0.2), ((2, 3, 4, 1, 24), 8, 30, 5.0, 3, 0.2)],
)
def test_the_kernel_makes_what_two_products_make(shape, value_dim, window, soft_cap, splits, scale):
    rng = np.random.default_rng(0)
    (batch, length, heads, kv_heads, dim), capacity, used = shape, 100, 70

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, k = normal(batch, length, heads, dim), normal(batch, capacity, kv_heads, dim)
    v = normal(batch, capacity, kv_heads, value_dim)
    present = (rng.random((batch, capacity)) < 0.8) & (np.arange(capacity) < used)
    slots = Slots(jnp.asarray(rng.permutation(capacity), jnp.int32), jnp.asarray(present, int))
    last, scores = jnp.int32(capacity - 10), Scores(scale, soft_cap, window)
    want = products(q, k, v, slots, last, scores)
    got = partial_attention(
        q, k, v, slots.places, slots.present.astype(jnp.int32), last, jnp.int32(used),
        scale=scale, logits_soft_cap=soft_cap, window=window, splits=splits, block_kv=16,
        interpret=True,
    )  # fmt: skip
    got = Parts(*got).merged()
    np.testing.assert_allclose(got.attention(None), want.attention(None), atol=1e-6)
    lse = [x.most + jnp.log(x.total) for x in (got, want)]
    np.testing.assert_allclose(lse[0], lse[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_devices_that_exchange_heads_serve_the_same(split):
    rules = ShardingRules(data=None, fsdp=None, seq="a", tensor=None)
    axes: Any = {"rules": rules} if split else {"seq_axis": "a"}
    options: Any = axes | {"ulysses_axis": "b", "layout": "zigzag"}
    mesh = mesh_of(a=2, b=2)
    model = models(CONFIG, {"seq": 1}, "contiguous")[0].with_attention(mesh=mesh, **options)
    server = Generator(model, max_length=64, batch=2, prefill_chunk=5, split_weights=split)
    got = np.stack(list(server.generate(PROMPTS, 6)))
    np.testing.assert_array_equal(got, generated(PROMPTS, 6))


def as_any(x: Any) -> Any:
    return x


TOO_LONG = prompts_of([60, 5])
MISTAKES = {
    "count": (lambda: generated(PROMPTS[:1], 3), "1 prompts for a batch of 2: pass one for each"),
    "empty": (lambda: generated([[1], []], 3), "prompt 1 has shape (0,): it must be one token id"),
    "dtype": (lambda: generated([[1], [0.5]], 3), "prompt 1 has dtype float64: token ids are int"),
    "ids": (lambda: generated([[1], [VOCAB]], 3), "the vocabulary has 0 to 47"),
    "long": (lambda: generated(TOO_LONG, 9), "the cache takes 64 a row; make a Generator with a"),
    "none": (lambda: generated(PROMPTS, 0), "max_new_tokens is 0: it must be"),
    "stop": (lambda: generated(PROMPTS, 3, stop_tokens=[99]), "stop_tokens has 99: the vocabulary"),
    "stops": (
        lambda: generated(PROMPTS, 3, stop_tokens=as_any(3)),
        "stop_tokens is 3: pass a list",
    ),
    "text": (
        lambda: generated("text", 3),
        "prompts is a str: pass a list with the token ids of ea",
    ),
    "texts": (lambda: generated(["a", "b"], 3), "prompt 0 is a str: pass its token ids, which the"),
    "flat": (
        lambda: generated([1, 2], 3),
        "prompts holds single numbers: pass a list of rows, lik",
    ),
    "ragged": (lambda: generated([[1, [2]], [3]], 3), "prompt 0 is no list of token ids ("),
    "cold": (lambda: Sampling(-1.0), "temperature is -1.0: it must be 0, or finite and at least"),
    "tiny": (lambda: Sampling(1e-40), "temperature is 1e-40: it must be 0, or finite and at least"),
    "word": (lambda: Sampling(as_any("hot")), "temperature is 'hot': it must be a number"),
    "top_k": (lambda: Sampling(1.0, top_k=0), "top_k is 0: it must be"),
    "top_p": (lambda: Sampling(1.0, top_p=1.5), "top_p is 1.5: it must be above 0 and at most 1"),
    "greedy": (
        lambda: Sampling(top_k=3),
        "top_k is 3, top_p None, and temperature is 0, which tak",
    ),
    "seed": (lambda: generated(PROMPTS, 3, seed=-1), "seed is -1: it must be"),
    "model": (lambda: Generator(as_any(3), max_length=8), "model is a int: it must be a Decoder"),
    "length": (lambda: Generator(server_model(), max_length=0), "max_length is 0: it must be"),
    "rows": (
        lambda: Generator(models(CONFIG, {"data": 2}, "contiguous")[1], max_length=8, batch=3),
        "batch is 3, and 2 devices along ('data',) share its rows: use a multiple of 2",
    ),
    "split": (
        lambda: Generator(
            models(CONFIG, {"seq": 1}, "zigzag")[0], max_length=8, split_weights=True
        ),
        "split_weights is True, and the model has no rules, which say that weights are split: load",
    ),
    "lora": (
        lambda: Generator(add_lora(server_model(), 2), max_length=8),
        "has adapters that are not merged: burst_jax.models.merge_lora(model) merges them",
    ),
}


def without_rules():
    return Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=mesh_of(seq=2))


def server_model():
    return models(CONFIG, {"seq": 2}, "zigzag")[1]


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_two_generations_do_not_share_a_cache():
    first, ended = server().generate(PROMPTS, 5), server().generate(PROMPTS, 1)
    next(first)
    next(ended)
    with pytest.raises(ValueError, match="another call of generate has begun, and the cache is"):
        next(first)
    # What needs the cache no more may end.
    generated(PROMPTS, 2)
    with pytest.raises(StopIteration):
        next(ended)


def test_what_was_checked_is_checked_again_when_work_begins():
    generated(PROMPTS, 2)
    late = server().generate([[1], [2]], 50, extend=True)
    generated([[3], [4]], 20, extend=True)
    with pytest.raises(ValueError, match="prompt 0 has 1 tokens after 32 in the cache"):
        next(late)


def test_a_program_that_fails_takes_the_cache_with_it(monkeypatch):
    generated(PROMPTS, 2)

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(server()._steps, "prefill", fail)
        with pytest.raises(KeyboardInterrupt):
            generated([[1], [2]], 2, extend=True)
    with pytest.raises(ValueError, match="the cache is empty, as it is after a call that failed"):
        generated([[1], [2]], 2, extend=True)
    assert len(generated(PROMPTS, 2)) == 2


def greedy(rows, count):
    """For each row ``count`` tokens more, each from a cache that holds the row alone."""
    alone = Generator(server_model(), max_length=64)
    return [[int(t[0]) for t in alone.generate([row], count)] for row in rows]


def test_rows_that_end_apart_go_on_from_what_was_shown():
    whole = generated(PROMPTS, 6)
    stop = int(whole[1, 0])
    shown = generated(PROMPTS, 6, stop_tokens=[stop])
    rows = [
        [*prompt, *(int(token) for token in shown[:, row] if token >= 0)]
        for row, prompt in enumerate(PROMPTS)
    ]
    assert len(rows[0]) - len(PROMPTS[0]) < len(rows[1]) - len(PROMPTS[1])
    # Prompts that differ in length, too.
    more = [[5, 6, 7], [8]]
    got = generated(more, 4, extend=True)
    asked = [[*row, *prompt] for row, prompt in zip(rows, more, strict=True)]
    np.testing.assert_array_equal(got.T, greedy(asked, 4))


def test_a_document_takes_many_questions():
    generated(PROMPTS, 2)
    for _ in range(6):
        generated([[1], [2]], 2, extend=True)
    with pytest.raises(ValueError, match="make a Generator w"):
        [generated([[1], [2]], 1, extend=True) for _ in range(20)]


def test_options_that_decoding_would_ignore_are_refused():
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=mesh_of(seq=1), local_window_size=(5, 0))
    with pytest.raises(NotImplementedError, match="has the option local_window_size: decoding kno"):
        Generator(model, max_length=8)


def test_with_windows_rows_are_extended_by_as_many_tokens_each():
    config = dataclasses.replace(CONFIG, layer_pattern=WINDOWS)
    windows = Generator(models(config, {"seq": 2}, "zigzag")[1], max_length=64, batch=2)
    list(windows.generate(PROMPTS, 2))
    with pytest.raises(NotImplementedError, match="the model has windows, and rows would have pad"):
        windows.generate([[1], [1, 2]], 2, extend=True)


def test_an_empty_cache_is_not_extended():
    server().reset()
    with pytest.raises(ValueError, match="extend is True and the cache is empty"):
        generated(PROMPTS, 2, extend=True)


OF_TRANSFORMERS: dict[str, Any] = {
    "llama3": ({"tensor": 2, "seq": 2}, "contiguous", None),
    "llama_dynamic": ({"seq": 1}, "contiguous", None),
    "mistral": ({"data": 2, "seq": 2, "tensor": 2}, "zigzag", 300),
    "qwen2_window": ({"seq": 4}, "striped", 200),
    "qwen3": ({"seq": 2}, "zigzag", 250),
    "gemma2_caps": ({"seq": 8}, "zigzag", None),
    "gemma3_types": ({"seq": 4, "tensor": 2}, "zigzag", None),
}


@pytest.mark.parametrize("name", in_tiers(list(OF_TRANSFORMERS), lambda name: name, ["llama3"]))
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    sizes, layout, chunk = OF_TRANSFORMERS[name]
    mesh = mesh_of(**sizes)
    rules = ShardingRules.of(mesh)
    folder = hf_models.write_folder(name, tmp_path / name)
    model = load(folder, mesh=mesh, rules=rules, layout=layout, dtype=jnp.float32)
    want = hf_models.golden(name)
    # No near tie: what rounding moves cannot change a token.
    assert want["margins"].min() > hf_models.MARGIN
    prompts, count = hf_models.prompts(want["seeds"]), hf_models.GENERATED
    max_length = max(map(len, prompts)) + count
    server = Watched(model, max_length=max_length, batch=len(prompts), prefill_chunk=chunk)
    got = np.stack(list(server.generate(prompts, count)), 1)
    np.testing.assert_array_equal(got, want["tokens"])
    for at, step in enumerate(hf_models.KEPT_STEPS):
        logits = want["step_logits"][:, at]
        largest = np.abs(logits).max(-1, keepdims=True)
        assert (np.abs(server.logits[step] - logits) < hf_models.MARGIN / 20 * largest).all()


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_step_sends_no_weight_and_as_much_at_any_length_and_updates_the_cache_in_place(split):
    sent, model = [], server_model()
    server: Any = None
    for max_length in (64, 1024):
        server = Generator(model, max_length=max_length, batch=2, split_weights=split)
        steps = server._steps
        cache = steps.allocate()
        at = At(*map(np.int32, (3, 0, 3, 4)))
        tokens, going = jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32)
        lowered = steps._decode.lower(steps, steps.model.weights, cache, tokens, going, at)
        program = lowered.compile()
        text = program.as_text()
        assert text is not None
        kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
        sent.append(sorted(re.findall(rf"= (.+?) (?:{kinds})(?:-start)?\(", text)))
        mine = sum(x.nbytes for x in jax.tree.leaves(cache)) // 2
        memory: Any = program.memory_analysis()
        assert memory.alias_size_in_bytes >= mine
    assert sent[0] == sent[1]
    config, rows, devices = CONFIG, 2, 2
    # One exchange of partial results a layer.
    results = devices * rows * config.num_heads * (config.head_dim + 2)
    numbers, exchanges = config.num_layers * results, config.num_layers
    if split:
        # Besides, queries with keys and values, and what attention and feed-forward part add; and
        # the embedding, and the logits. No weight.
        projected = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        numbers += config.num_layers * rows * (projected + 2 * config.embed_dim)
        numbers += rows * (config.embed_dim + config.vocab_size)
        exchanges += 3 * config.num_layers + 2
    assert len(sent[0]) == exchanges
    shapes = [shape for text in sent[0] for shape in re.findall(r"\w+\[([\d,]*)\]", text)]
    assert sum(np.prod([int(size) for size in shape.split(",")]) for shape in shapes) == numbers
    for weight in jax.tree.leaves(server._steps.model.weights):
        if weight.ndim > 1:
            here = weight.addressable_shards[0].data
            assert here.nbytes == weight.nbytes // (devices if split else 1)
