"""Hugging Face checkpoints: logits on every kind of mesh against those of transformers."""

from __future__ import annotations

import dataclasses
import functools
import json

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_models import SPLIT, kept, kept_second
from implementations import quick_jit
from jax.sharding import AxisType
from meshes import assert_close, mesh_of, random_like

from burst_jax import ShardingRules
from burst_jax.models import (
    Auxiliary,
    Decoder,
    DecoderConfig,
    abstract_decoder,
    load,
    load_config,
    save,
)
from burst_jax.models.hf.families import FAMILIES
from burst_jax.models.hf.family import LAYER, NAMES, Family
from burst_jax.training import make_batch, next_token_loss, place_batch

# Of logits' errors relative to the largest logit. Rounding makes up to 7e-6.
LIMIT = 5e-5
SLOW, AUTO = pytest.mark.slow, AxisType.Auto


@functools.cache
def packed(name, num_shards, batch):
    """Sequences of one document and of two; both padded, to whole blocks and one more."""
    row = hf_models.row(name)
    count = len(row)
    length = count + 16 - count % 16 + 16 * num_shards
    tokens = np.zeros((batch, length + 1), np.int32)
    segments = np.zeros((batch, length + 1), np.int32)
    tokens[:, :count], segments[:, :count] = row, 1
    segments[1::2, SPLIT:count] = 2
    return tokens, segments


def error(name, model, layout, program=quick_jit):
    """The largest error of logits, relative to the largest one, by transformers' logits."""
    mesh = dict(model.options)["mesh"]
    n = mesh.shape["seq"]
    tokens, segments = packed(name, n, 8 if model.rules.stage else 2)
    made = make_batch(
        tokens, layout=layout, num_shards=n, segment_ids=segments,
        local_window_sizes=model.config.local_window_sizes,
        linear_attention=model.config.has_linear_attention,
    )  # fmt: skip
    placed = place_batch(made, mesh, batch_axis=model.rules.batch_axes, seq_axis="seq")
    graphdef, state = nnx.split(model)

    @program
    def run(state, batch):
        model = nnx.merge(graphdef, state)
        given = (batch.get(key) for key in ("inputs", "positions", "segment_ids"))
        return model(*given, document_tables=batch.get("document_tables"))

    with jax.set_mesh(mesh):
        hidden = run(state, placed)
    # On the host: arrays sharded over Explicit axes would have to be gathered first.
    hidden, kernel = jax.tree.map(np.asarray, jax.device_get((hidden, model.head_kernel())))
    found, cap = np.asarray(hidden @ kernel), model.config.final_soft_cap
    in_layout = found if cap is None else cap * np.tanh(found / cap)
    # Natural order: a token's position is its index.
    rows, places = np.nonzero(made["segment_ids"])
    positions = np.broadcast_to(made["positions"], made["segment_ids"].shape)[rows, places]
    found = np.full((len(tokens), tokens.shape[1], in_layout.shape[-1]), np.nan, np.float32)
    found[rows, positions] = in_layout[rows, places]
    count = len(hf_models.row(name))
    whole, second, want = kept(count), kept_second(count), hf_models.golden(name)
    pairs = [(sequence[whole], want["row"]) for sequence in found[::2]]
    # Dynamic RoPE's base is that of the longest sequence, not of the second document.
    if "dynamic" not in name:
        pairs += [(found[1][whole[:9]], want["row"][:9])]
        pairs += [(found[1, SPLIT:count][second], want["second"])]
    # NumPy's maximum, unlike Python's, is NaN if any of them is.
    return np.max([np.abs(got - truth).max() / np.abs(truth).max() for got, truth in pairs])


# The others are parts of these, or tests/serving/test_serving.py generates with them, or
# test_hf_hybrids.py trains and saves them.
VARIANTS = (
    *("gemma3_images", "llama2", "llama3_tied", "llama_bias", "llama_linear", "llama_yarn"),
    *("mistral_full", "qwen2_window", "qwen2_yarn", "qwen3_bias"),
)


def load_on(folder, sizes, layout, kind=AUTO, **options):
    mesh = mesh_of(kind, **sizes)
    rules = ShardingRules.of(mesh)
    return load(folder, mesh=mesh, rules=rules, layout=layout, dtype=jnp.float32, **options)


@pytest.mark.parametrize(
    ("name", "sizes", "layout", "kind"),
    [
        ("gemma3_types", {"fsdp": 2, "seq": 2, "tensor": 2}, "zigzag", AUTO),
        pytest.param("llama_dynamic", {"seq": 2}, "striped", AUTO, marks=SLOW),
        ("qwen3_moe", {"fsdp": 2, "seq": 2, "tensor": 2}, "zigzag", AUTO),
        ("gpt_oss", {"expert": 2, "seq": 2}, "striped", AUTO),
        ("kimi_linear", {"fsdp": 2, "seq": 2, "tensor": 2}, "zigzag", AUTO),
        pytest.param("mixtral", {"seq": 1}, "contiguous", AUTO, marks=SLOW),
        pytest.param("mixtral", {"seq": 4, "tensor": 2}, "zigzag", AxisType.Explicit, marks=SLOW),
        pytest.param("gemma2", {"fsdp": 2, "seq": 2}, "striped", AxisType.Explicit, marks=SLOW),
        pytest.param("qwen3_moe_window", {"data": 2, "seq": 2}, "striped", AUTO, marks=SLOW),
        pytest.param("gemma3_types", {"stage": 2, "fsdp": 2, "seq": 2}, "zigzag", AUTO, marks=SLOW),
        pytest.param("qwen3_next", {"expert": 2, "seq": 2}, "balanced:376", AUTO, marks=SLOW),
        pytest.param("qwen3_5", {"data": 2, "seq": 4}, "zigzag", AxisType.Explicit, marks=SLOW),
        pytest.param("olmo_hybrid", {"tensor": 4, "seq": 2}, "zigzag", AUTO, marks=SLOW),
        *(pytest.param(name, {"seq": 1}, "contiguous", AUTO, marks=SLOW) for name in VARIANTS),
    ],
)
def test_logits_and_the_saved_checkpoint_are_those_of_transformers(
    tmp_path, name, sizes, layout, kind, program
):
    model = load_on(hf_models.write_folder(name, tmp_path / "model"), sizes, layout, kind)
    assert error(name, model, layout, program) < LIMIT
    if name == "gemma3_images":  # Only a part of it is saved: tests/models/test_hf_files.py.
        return
    save(model, tmp_path / "saved", max_file_bytes=30000)
    found, config = hf_models.read_folder(tmp_path / "saved")
    want = hf_models.tensors(name)
    assert config == hf_models.golden(name)["config"]
    assert found.keys() == want.keys()
    for tensor, array in want.items():
        np.testing.assert_array_equal(found[tensor], array)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == want.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in want.values())
    # Files are half full at least, on average.
    sizes = [path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors")]
    assert 15000 < sum(sizes) / len(sizes) < max(sizes) < 35000
    assert not list(tmp_path.glob(".*"))
    # The config of a decoder that was not loaded has another text, and is the same.
    model.config = config = dataclasses.replace(model.config, hf_config=None)
    save(model, tmp_path / "written", max_length=None if "dynamic" in name else 1024)
    again = load_config(tmp_path / "written", dtype=jnp.float32)
    assert dataclasses.replace(again, hf_config=None, layer_pattern=config.layer_kinds) == config


def test_stages_that_differ_raise(tmp_path):
    # Six kinds in a period, four layers in a stage.
    folder = hf_models.write_folder("gemma3", tmp_path)
    model = load_on(folder, {"stage": 2, "seq": 1}, "contiguous")
    tokens, positions = jnp.zeros((2, 8), jnp.int32), np.arange(8, dtype=np.int32)
    with pytest.raises(NotImplementedError, match="8 layers in 2 stages: each stage must"):
        jax.eval_shape(model, tokens, positions)


def test_wrong_logits_are_noticed(tmp_path):
    folder = hf_models.write_folder("llama2", tmp_path)
    model = load_on(folder, {"seq": 1}, "contiguous")
    wrong = dataclasses.replace(model.config, norm_epsilon=1e-4)
    model = model.with_attention(wrong, **model.arguments)
    assert error("llama2", model, "contiguous") > LIMIT


def test_a_new_dense_family_is_one_definition(tmp_path, monkeypatch):
    """Other tensor names, a bias and a soft cap under keys of its own: saved and loaded."""
    qwen = FAMILIES["qwen3"]
    keys = {"attention_out_bias": "out_bias", "logit_cap": "final_soft_cap"}
    toy = Family(
        "toy",
        "ToyForCausalLM",
        {key: value for key, value in qwen.defaults.items() if key != "attention_bias"}
        | {"attention_out_bias": False, "logit_cap": None},
        {"qk_norm": False},
        names={**NAMES, ("layers", "mlp", "up", "kernel"): LAYER + "ffn.w3.weight"},
        keys=keys,
        ignored=("toy_version",),
    )
    monkeypatch.setitem(FAMILIES, "toy", toy)
    mesh, path = mesh_of(seq=1), tmp_path / "toy"
    config = DecoderConfig(
        num_layers=2, vocab_size=16, embed_dim=16, mlp_dim=24, qk_norm=False, out_bias=True,
        final_soft_cap=7.0,
    )  # fmt: skip
    graphdef, shapes = abstract_decoder(config, mesh=mesh)
    weights = random_like(shapes, 0)
    save(nnx.merge(graphdef, weights), path, max_length=64)
    tensors, written = hf_models.read_folder(path)
    assert (written["model_type"], written["logit_cap"]) == ("toy", 7.0)
    assert tensors["model.layers.1.ffn.w3.weight"].shape == (24, 16)
    (path / "config.json").write_text(json.dumps(written | {"toy_version": 3}))
    again = load(path, mesh=mesh)
    assert (again.config.out_bias, again.config.final_soft_cap) == (True, 7.0)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), weights)


def test_the_loss_of_a_tied_head_with_a_soft_cap(monkeypatch):
    """It reads the embedding's transpose, sharded as the embedding is."""
    mesh = mesh_of(fsdp=2, seq=2, tensor=2)
    config = DecoderConfig(
        num_layers=1, vocab_size=32, embed_dim=16, tie_embeddings=True, final_soft_cap=2.0
    )
    graphdef, shapes = abstract_decoder(config, mesh=mesh, rules=ShardingRules.of(mesh))
    weights = random_like(shapes, 0)
    _, spec = nnx.merge(graphdef, weights).head_sharding()
    assert spec == jax.P(("fsdp", "seq"), ("tensor",))
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((2, 16, 16)), jnp.float32)
    result = hidden, Auxiliary(None, {})
    monkeypatch.setattr(Decoder, "with_auxiliary", lambda self, *_, **__: result)
    batch = place_batch(make_batch(rng.integers(0, 32, (2, 17))), mesh, batch_axis="fsdp")

    def chunked(weights):
        return next_token_loss(nnx.merge(graphdef, weights), batch, chunk_size=3)[0]

    def whole(weights):
        logits = 2 * jnp.tanh(hidden @ weights["embedding"][...].T / 2)
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits, -1) - picked)

    got, want = (quick_jit(jax.value_and_grad(f))(weights) for f in (chunked, whole))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    got, want = (grads["embedding"].get_value() for _, grads in (got, want))
    assert_close([got], [want], 1e-5)
