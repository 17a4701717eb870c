"""Generation with a sequence-sharded KV cache, compared with attention over whole sequences."""

from __future__ import annotations

import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import Any, ClassVar

import decoders
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
    NORMS_AFTER_BIASES,
    VOCAB,
    WITH_BIASES,
    WITH_EXPERTS,
    Watched,
    models,
    prompts_of,
)

from burst_jax import ShardingRules
from burst_jax.models import FeedForward, Lora, YarnRope, load
from burst_jax.serving import Generator
from burst_jax.serving.cache import EMPTY, CacheCapacity, SlotMetadata
from burst_jax.serving.decode_attention import decode_attention
from burst_jax.serving.sampling import Sampling


def case(sizes, layout, lengths, new, chunk=None, extend=None, split=False, expert=None, **config):
    return locals()


CASES = [
    case({"seq": 3}, "zigzag", [59, 33], 6, chunk=30, extend=30, **NORMS_AFTER_BIASES),
    case({"data": 2, "seq": 2, "tensor": 2}, "striped", [37, 9], 20, extend=11, **LIKE_GEMMA),
    # Three devices divide neither 4 heads nor 50 hidden features.
    case(
        {"seq": 3}, "striped:2", [3], 60, extend=31, split=True, num_layers=1, mlp_dim=50,
        **WITH_BIASES, rope=YarnRope(10000.0, factor=4.0, old_positions=16),
    ),
    case(
        {"seq": 4, "tensor": 2}, "zigzag", [50], 8, split=True, expert="seq",
        **WITH_EXPERTS | LIKE_GPT,
    ),
    case({"data": 2, "seq": 2}, "zigzag", [13, 6], 3, expert=("seq", "data"), **WITH_EXPERTS),
]  # fmt: skip


def case_id(case):
    mesh, lengths = (f"{name}{size}" for name, size in case["sizes"].items()), case["lengths"]
    return f"{'x'.join(mesh)}-{case['layout']}-{'_'.join(map(str, lengths))}"


def whole_attention(model, sequences, program):
    """Logits after each token, by the decoder's attention on one device."""
    length = max(map(len, sequences))
    tokens = np.zeros((len(sequences), length), np.int32)
    segments = np.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], segments[row, : len(sequence)] = sequence, 1
    graphdef, params = nnx.split(model)

    @program
    def logits(params):
        model = nnx.merge(graphdef, params)
        return model.unembed(model(tokens, np.arange(length, dtype=np.int32), segments))

    return np.asarray(logits(params))


@pytest.mark.parametrize("case", in_tiers(CASES, case_id, [CASES[0], CASES[4]]))
def test_each_step_equals_whole_attention(case, program):
    config = dataclasses.replace(CONFIG, **case["config"])
    one, model = models(config, case["sizes"], case["layout"], case["expert"])
    batch, new, extend = len(case["lengths"]), case["new"], case["extend"]
    max_length = max(case["lengths"]) + 2 * new + (extend + 32 if extend else 0)
    server = Watched(
        model, max_length=max_length, batch=batch, prefill_chunk=case["chunk"],
        split_weights=case["split"], program=program,
    )  # fmt: skip
    prompts = prompts_of(case["lengths"])
    sequences, ends = [list(prompt) for prompt in prompts], []

    def generate(prompts, **options):
        for tokens in server.generate(prompts, new, **options):
            ends.append([len(sequence) for sequence in sequences])
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.append(int(token))

    generate(prompts)
    if extend:
        if "layer_pattern" in case["config"] and batch > 1:
            with pytest.raises(NotImplementedError, match="has windows, and sequences would have"):
                server.generate([[1], *[[1, 2]] * (batch - 1)], 2, extend=True)
        more = prompts_of([extend] * batch, seed=1)
        for sequence, prompt in zip(sequences, more, strict=True):
            sequence.extend(prompt)
        generate(more, extend=True)
    expected = whole_attention(one, sequences, program)
    for ends_of_step, logits in zip(ends, server.logits, strict=True):
        for row, (end, got) in enumerate(zip(ends_of_step, logits, strict=True)):
            want = expected[row, end - 1]
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
            assert sequences[row][end] == got.argmax()


ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)


def server_model(**sizes):
    return models(ONE_LAYER, sizes or {"seq": 2}, "zigzag")[1]


@functools.lru_cache
def server():
    return Generator(server_model(), max_length=64, batch=2)


def generated(prompts, count, **options):
    return np.stack(list(server().generate(prompts, count, **options)))


PROMPTS = prompts_of([9, 5])


@pytest.mark.slow
def test_a_dropped_generation_can_be_extended_from_the_returned_tokens():
    whole = generated(PROMPTS, 8)
    stream = server().generate(PROMPTS, 8)
    returned = np.stack([next(stream) for _ in range(3)])
    stream.close()
    np.testing.assert_array_equal(returned, whole[:3])
    assert_continued(returned.T, [[3], [7]])


def test_sequences_end_with_a_stop_token_and_can_be_extended():
    whole = generated(PROMPTS, 8)
    stops = [int(whole[2, 0]), VOCAB - 1]
    with_stop = generated(PROMPTS, 8, stop_tokens=stops)
    ends = [int(np.argmax(np.append(np.isin(want, stops), True))) + 1 for want in whole.T]
    ends = np.minimum(ends, 8)
    assert len(with_stop) == max(ends)
    assert ends[0] != ends[1]
    kept = [tokens[:end] for tokens, end in zip(with_stop.T, ends, strict=True)]
    for tokens, want, got in zip(kept, whole.T, with_stop.T, strict=True):
        np.testing.assert_array_equal(tokens, want[: len(tokens)])
        assert (got[len(tokens) :] == -1).all()
    assert_continued(kept, [[5, 6, 7], [8]])  # Of different lengths, too.


def test_a_step_copies_its_numbers_to_the_devices_only_if_a_sequence_has_ended(monkeypatch):
    copied, put = [], server()._steps.put

    def counted(array, *spec):
        copied.append(array.shape)
        return put(array, *spec)

    monkeypatch.setattr(server()._steps, "put", counted)
    whole = generated(PROMPTS, 8)
    assert copied.count((2 + 4,)) == 1
    # After the end of the longest sequence the length of the longest one stays.
    for sequence, copies in ((1, 2), (0, 6)):
        copied.clear()
        generated(PROMPTS, 8, stop_tokens=[int(whole[2, sequence])])
        assert copied.count((2 + 4,)) == copies, sequence


def assert_continued(returned, more):
    """The cache's sequences are the prompts and what was returned."""
    rest = generated(more, 4, extend=True)
    asked = [[*PROMPTS[i], *returned[i], *more[i]] for i in range(2)]
    np.testing.assert_array_equal(rest, generated(asked, 4))


def test_random_tokens_depend_on_the_seed_but_not_on_the_mesh():
    options: Any = {"temperature": 1.5, "top_k": 20, "top_p": 0.9}
    got = generated(PROMPTS, 6, seed=3, **options)
    np.testing.assert_array_equal(generated(PROMPTS, 6, seed=3, **options), got)
    assert (generated(PROMPTS, 6, seed=4, **options) != got).any()
    other = Generator(server_model(data=2), max_length=64, batch=2)
    same = np.stack(list(other.generate(PROMPTS, 6, seed=3, **options)))
    np.testing.assert_array_equal(same, got)


def test_top_k_and_top_p():
    ramp = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]))

    def drawn(temperature=1.0, logits=ramp, **options):
        sampling, key = Sampling(temperature, **options), jax.random.key(0)
        every = jax.vmap(lambda length: sampling.choose(logits, key, jnp.full(2, length)))
        return np.asarray(jax.jit(every)(jnp.arange(400))).T

    assert [set(row) for row in drawn(top_k=2)] == [{0, 1}, {2, 3}]
    assert set(drawn(top_p=0.65)[0]) == {0, 1}
    assert set(drawn(top_p=0.75)[1]) == {1, 2, 3}
    # Exactly 1/2, 1/2, 0 and 0, and yet ordered: the first token suffices for 1/2.
    halves = jnp.asarray([[0.0, -1e-9, -200.0, -200.0]] * 2)
    assert set(drawn(top_p=0.5, logits=halves)[0]) == {0}
    assert set(drawn(top_p=0.501, logits=halves)[0]) == {0, 1}
    shares = np.bincount(drawn()[0], minlength=4) / 400
    np.testing.assert_allclose(shares, [0.4, 0.3, 0.2, 0.1], atol=0.08)
    # Square roots of the probabilities, normalized.
    shares = np.bincount(drawn(2.0)[0], minlength=4) / 400
    np.testing.assert_allclose(shares, [0.33, 0.28, 0.23, 0.16], atol=0.05)
    # Equal logits, but other random numbers for each sequence.
    assert (np.diff(drawn(logits=ramp[:1].repeat(2, 0)), axis=0) != 0).mean() > 0.3


def test_a_ring_buffer_holds_the_window():
    capacity = CacheCapacity.of(100, 10_000, 4)
    assert capacity.is_ring_buffer
    assert capacity.slots == 25
    device, slot = (np.asarray(x) for x in capacity.slot(jnp.arange(500)))
    assert device.max() == 3
    for last in range(capacity.slots * 4, 500):
        taken = {(int(device[p]), int(slot[p])) for p in range(last - 99, last + 1)}
        assert len(taken) == 100
    assert not CacheCapacity.of(100, 100, 4).is_ring_buffer


def test_fully_masked_queries_are_zero():
    q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4))
    slots = SlotMetadata(jnp.full(3, EMPTY), jnp.zeros((1, 3), jnp.int32))
    attend = quick_jit(lambda: decode_attention(q, k, k, slots, jnp.int32(5), jnp.int32(3), ()))
    out = attend()
    np.testing.assert_array_equal(out, jnp.zeros((1, 1, 2, 4)))


@pytest.mark.slow
def test_a_ulysses_axis():
    rules = ShardingRules(data=None, fsdp=None, seq="a", tensor=None)
    options: Any = {"rules": rules, "ulysses_axis": "b", "layout": "zigzag"}
    model = server_model().with_attention(mesh=mesh_of(a=2, b=2), **options)
    server = Generator(model, max_length=64, batch=2, prefill_chunk=5, split_weights=True)
    got = np.stack(list(server.generate(PROMPTS, 6)))
    np.testing.assert_array_equal(got, generated(PROMPTS, 6))


def as_any(x: Any) -> Any:
    return x


MISTAKES = [
    (lambda: generated(PROMPTS[:1], 3), "1 prompts for a batch of 2: pass one per sequence"),
    (lambda: generated([[1], []], 3), "prompt 1 has shape (0,): it must be one token id"),
    (lambda: generated([[1], [0.5]], 3), "prompt 1 has dtype float64: token ids are int"),
    (lambda: generated([[1], [VOCAB]], 3), "the vocabulary has 0 to 47"),
    (lambda: generated("text", 3), "prompts is a str: pass a list with the token ids of ea"),
    (lambda: generated(["a", "b"], 3), "prompt 0 is a str: pass the token ids from the mo"),
    (lambda: generated([1, 2], 3), "prompts holds single numbers: pass a list of prompts"),
    (lambda: generated([[1, [2]], [3]], 3), "prompt 0 is not a list of token ids ("),
    (lambda: generated(prompts_of([60, 5]), 9), "the cache holds 64 per sequence; make a G"),
    (lambda: generated(PROMPTS, 0), "max_new_tokens is 0: it must be"),
    (lambda: generated(PROMPTS, 3, seed=-1), "seed is -1: it must be"),
    (lambda: generated(PROMPTS, 3, stop_tokens=[0, VOCAB]),
     "stop_tokens has 48: the vocabulary has the ids 0 to 47"),
    (lambda: generated(PROMPTS, 3, stop_tokens=as_any(3)), "stop_tokens is 3: pass a list"),
    (lambda: Sampling(-1.0), "temperature is -1.0: it must be 0, or finite and at least"),
    (lambda: Sampling(1e-40), "temperature is 1e-40: it must be 0, or finite and at least"),
    (lambda: Sampling(as_any("hot")), "temperature is 'hot': it must be a number"),
    (lambda: Sampling(1.0, top_k=0), "top_k is 0: it must be"),
    (lambda: Sampling(1.0, top_p=1.5), "top_p is 1.5: it must be above 0 and at most 1"),
    (lambda: Sampling(top_k=3), "top_k is 3, top_p None, and temperature is 0, which is"),
    (lambda: Generator(as_any(3), max_length=8), "model is a int: it must be a Decoder"),
    (lambda: Generator(server_model(), max_length=0), "max_length is 0: it must be"),
    (lambda: Generator(server_model(data=2), max_length=8, batch=3),
     "batch is 3, and it is sharded over 2 devices along ('data',): use a multiple of 2"),
    (lambda: Generator(without_rules(), max_length=8, split_weights=True),
     "split_weights is True, and the model has no rules to shard weights by: load it with rules"),
    (lambda: Generator(with_adapters(), max_length=8),
     "the model has LoRA adapters: merge them first, by burst_jax.models.merge_lora(model)"),
    (lambda: Generator(without_rules(layout="balanced:8"), max_length=8),
     "layout is 'balanced:8', which places the documents of a training batch, and prompts have "
     "none: serve model.with_attention(**model.arguments | {'layout': 'zigzag'})"),
]  # fmt: skip
UNSUPPORTED = [
    (lambda: Generator(without_rules(local_window_size=(5, 0)), max_length=8),
     "has the option local_window_size: decoding sup"),
    (lambda: Generator(models(CONFIG, {"stage": 2, "seq": 1}, "zigzag")[1], max_length=8),
     "have a stage axis, 'stage': serving does not"),
]  # fmt: skip


def without_rules(**options):
    return decoders.with_drawn_weights(ONE_LAYER, mesh=mesh_of(seq=1), **options)


def with_adapters():
    return decoders.with_drawn_weights(
        dataclasses.replace(ONE_LAYER, lora=Lora(2)), mesh=mesh_of(seq=1)
    )


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [(ValueError, *each) for each in MISTAKES] + [(NotImplementedError, *x) for x in UNSUPPORTED],
)
def test_mistakes(error, call, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_the_remedy_for_a_balanced_layout():
    model = without_rules(layout="balanced:8")
    Generator(model.with_attention(**model.arguments | {"layout": "zigzag"}), max_length=8)


def test_a_cache_larger_than_the_free_memory_raises(monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2**30, "bytes_in_use": 2**30 - 9})
    monkeypatch.setattr(server()._steps, "mesh", SimpleNamespace(local_devices=[device]))
    message = (
        "a cache of batch 2 and max_length 64 needs 0.0 GiB on each device, and .* has 0.0 GiB"
    )
    with pytest.raises(ValueError, match=message):
        server()._check_memory()


def test_two_generations_do_not_share_a_cache():
    first, ended = server().generate(PROMPTS, 5), server().generate(PROMPTS, 1)
    next(first)
    next(ended)
    with pytest.raises(ValueError, match="another call of generate has taken over the cache"):
        next(first)
    # A generation that needs the cache no more may end.
    generated(PROMPTS, 2)
    with pytest.raises(StopIteration):
        next(ended)


def test_the_space_is_checked_again_when_prefill_starts():
    generated(PROMPTS, 2)
    late = server().generate([[1], [2]], 50, extend=True)
    generated([[3], [4]], 20, extend=True)
    with pytest.raises(ValueError, match="prompt 0 has 1 tokens after 32 in the cache"):
        next(late)


def test_a_failed_program_clears_the_cache_and_an_empty_one_is_not_extended(monkeypatch):
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
    server().reset()
    with pytest.raises(ValueError, match="extend is True and the cache is empty"):
        generated(PROMPTS, 2, extend=True)


def test_a_cache_can_be_extended_until_it_is_full():
    assert len(generated(PROMPTS, 55)) == 55  # 9 + 55 are max_length.
    generated(PROMPTS, 2)
    for _ in range(6):
        generated([[1], [2]], 2, extend=True)
    with pytest.raises(ValueError, match="slots on each device, padding included, and the cache"):
        [generated([[1], [2]], 1, extend=True) for _ in range(20)]


# tests/models/test_hf_models.py has whole sequences of every other family.
TRANSFORMERS_CASES: dict[str, Any] = {
    "llama3": ({"tensor": 2, "seq": 2}, "contiguous"),
    "gemma3_types": ({"data": 2, "seq": 2, "tensor": 2}, "zigzag"),
    "olmo_hybrid": ({"seq": 2, "tensor": 2}, "zigzag"),
    "kimi_linear": ({"seq": 2, "tensor": 2}, "zigzag"),
}


@pytest.mark.parametrize("name", in_tiers(list(TRANSFORMERS_CASES), lambda name: name, ["llama3"]))
def test_greedy_tokens_equal_transformers(name, tmp_path):
    sizes, layout = TRANSFORMERS_CASES[name]
    mesh = mesh_of(**sizes)
    rules = ShardingRules.of(mesh)
    folder = hf_models.write_folder(name, tmp_path / name)
    model = load(folder, mesh=mesh, rules=rules, layout=layout, dtype=jnp.float32)
    want = hf_models.golden(name)
    # No near ties, so that rounding cannot change a token.
    assert want["margins"].min() > hf_models.MARGIN
    prompts, count = hf_models.prompts(want["seeds"]), hf_models.GENERATED
    max_length = max(map(len, prompts)) + count
    server = Watched(model, max_length=max_length, batch=len(prompts))
    got = np.stack(list(server.generate(prompts, count)), 1)
    np.testing.assert_array_equal(got, want["tokens"])
    for at, step in enumerate(hf_models.KEPT_STEPS):
        logits = want["step_logits"][:, at]
        largest = np.abs(logits).max(-1, keepdims=True)
        assert (np.abs(server.logits[step] - logits) < hf_models.MARGIN / 20 * largest).all()


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "sharded"])
def test_collectives_of_a_step(split):
    """No weights, independent of the cache length; and the cache is updated in place."""
    sent, model, (batch, devices) = [], server_model(), (2, 2)
    server: Any = None
    for max_length in (64, 1024):
        server = Generator(model, max_length=max_length, batch=batch, split_weights=split)
        steps = server._steps
        cache = steps.allocate()
        tokens, numbers = jnp.zeros(batch, jnp.int32), jnp.array([1, 1, 3, 0, 3, 4], jnp.int32)
        program = steps.decode.lower(steps.model.leaves, cache, tokens, numbers).compile()
        kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
        found = re.findall(rf"= (.+?) (?:{kinds})(?:-start)?\(", str(program.as_text()))
        sent.append(sorted(found))
        memory: Any = program.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(cache)) // 2
    assert sent[0] == sent[1]
    config = model.config
    # One all-gather of partial results per layer.
    count, size = 1, devices * batch * config.num_heads * (config.head_dim + 2)
    if split:
        # Also the projections, the outputs of attention and feed-forward, embedding and logits.
        projected = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        size += batch * (projected + 3 * config.embed_dim + config.vocab_size)
        count += 5
    assert len(sent[0]) == count
    shapes = re.findall(r"\w+\[([\d,]*)\]", " ".join(sent[0]))
    assert sum(np.prod([int(n) for n in shape.split(",")]) for shape in shapes) == size
    matrices = [x for x in jax.tree.leaves(server._steps.model.weights) if x.ndim > 1]
    parts = devices if split else 1
    assert all(x.addressable_shards[0].data.nbytes == x.nbytes // parts for x in matrices)


class Routed(FeedForward):
    """One of a user's own, whose weights are named like those of a mixture of experts."""

    weight_axes: ClassVar[Any] = {
        ("router", "kernel"): ("embed", None),
        ("up", "kernel"): ("embed", None),
    }

    def __init__(self, config, *, out_init, hidden_axis=None, rngs):
        del out_init
        self.router, self.up = (
            nnx.Linear(config.embed_dim, config.embed_dim, use_bias=False, rngs=rngs)
            for _ in range(2)
        )
        self.hidden_axis = hidden_axis

    def __call__(self, x, *, keeps_products):
        del keeps_products
        return self.up(x) * jax.nn.sigmoid(self.router(x))

    @classmethod
    def num_matmul_params(cls, config):
        return 2 * config.embed_dim**2


def test_a_feed_forward_of_ones_own_is_served():
    """Its router is as it was: one of a mixture is fused with the gate, and transposed."""
    config = dataclasses.replace(CONFIG, num_layers=1, feed_forward=Routed)
    model = models(config, {"seq": 1}, "contiguous")[0]
    (prompt,) = prompts_of([9])
    server = Watched(model, max_length=16, batch=1)
    tokens = [int(token[0]) for token in server.generate([prompt], 3)]
    sequence = jnp.asarray([[*prompt, *tokens]], jnp.int32)
    hidden = model(sequence, jnp.arange(sequence.shape[1], dtype=jnp.int32))[0]
    want = hidden @ model.head.kernel[...]
    for i, logits in enumerate(server.logits):
        np.testing.assert_allclose(logits[0], want[len(prompt) - 1 + i], rtol=1e-4, atol=1e-5)
