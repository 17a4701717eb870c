"""Models that transformers made: loaded, run on every kind of mesh, and saved again."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from typing import Any

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType
from meshes import assert_close, mesh_of, random_like
from safetensors.numpy import load_file, save_file

from burst_jax import ShardingRules
from burst_jax.layouts.permutation import from_layout
from burst_jax.models import (
    Decoder,
    DecoderConfig,
    LayerKind,
    Llama3Rope,
    Rope,
    abstract_decoder,
    load,
    save,
)
from burst_jax.training import chunked_cross_entropy, make_batch, next_token_loss, place_batch

NAMES = hf_models.names()
# Of logits' errors relative to the largest logit. Rounding makes up to 7e-6.
LIMIT = 5e-5
LENGTH, SPLIT = hf_models.LENGTH, hf_models.SPLIT


@pytest.fixture
def folder(tmp_path):
    """Of a model's name the folder that has it."""
    return lambda name: hf_models.write_folder(name, tmp_path / name)


@functools.cache
def rows(num_shards, rows=2):
    """A row of one document, and one of two; both are padded, to whole blocks and one more."""
    padded = LENGTH + 16 - LENGTH % 16 + 16 * num_shards
    tokens = np.zeros((rows, padded + 1), np.int32)
    segments = np.zeros((rows, padded + 1), np.int32)
    tokens[:, :LENGTH], segments[:, :LENGTH] = hf_models.TOKENS, 1
    segments[1::2, SPLIT:LENGTH] = 2
    return tokens, segments


def logits(model, layout, count=2):
    """Logits of :func:`rows` in natural order, ``[count, T, V]``."""
    mesh, rules = dict(model.options)["mesh"], model.rules
    n = mesh.shape["seq"]
    tokens, segments = rows(n, count)
    batch = make_batch(tokens, layout=layout, num_shards=n, segment_ids=segments)
    placed = place_batch(batch, mesh, batch_axis=rules.batch_axes, seq_axis="seq")
    graphdef, state = nnx.split(model)

    @quick_jit
    def run(state, batch):
        model = nnx.merge(graphdef, state)
        return model(batch["inputs"], batch["positions"], batch["segment_ids"])

    with jax.set_mesh(mesh):
        hidden = run(state, placed)
    # On one device: what is split over Explicit axes would have to be made whole first.
    whole = jax.tree.map(np.asarray, jax.device_get((hidden, model.head_kernel())))
    found = np.asarray(whole[0] @ whole[1])
    cap = model.config.final_soft_cap
    found = found if cap is None else cap * np.tanh(found / cap)
    return from_layout(found, layout, n)


def errors(name, model, layout, count=2):
    """The largest errors of logits, relative to the largest one, by transformers' numbers."""
    found, want = logits(model, layout, count), hf_models.golden(name)
    pairs = [(row[hf_models.KEPT], want["row"]) for row in found[::2]]
    # The base of dynamic RoPE is that of the longest row, which the second document alone is not.
    if "dynamic" not in name:
        second = found[1, SPLIT:LENGTH][hf_models.KEPT_SECOND]
        pairs += [(found[1][hf_models.KEPT[:9]], want["row"][:9]), (second, want["second"])]
    return [np.abs(got - truth).max() / np.abs(truth).max() for got, truth in pairs]


MESHES = {
    "1": ({"seq": 1}, "contiguous"),
    "seq2": ({"seq": 2}, "striped"),
    "seq4": ({"seq": 4}, "zigzag"),
    "fsdp2-seq2": ({"fsdp": 2, "seq": 2}, "striped"),
    "tensor2-seq2": ({"tensor": 2, "seq": 2}, "contiguous"),
    "fsdp2-seq2-tensor2": ({"fsdp": 2, "seq": 2, "tensor": 2}, "zigzag"),
    "seq8": ({"seq": 8}, "striped"),
    "data2-seq4": ({"data": 2, "seq": 4}, "contiguous"),
}


def load_on(folder, mesh, layout, kind=AxisType.Auto, **options):
    mesh = mesh_of(kind, **mesh)
    rules = ShardingRules.of(mesh)
    return load(folder, mesh=mesh, rules=rules, layout=layout, dtype=jnp.float32, **options)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("gemma3_types", "fsdp2-seq2-tensor2"), ("llama3_tied", "seq2"), ("qwen2_window", "1")]
    + [
        # Each mesh has models of several families, and each family several meshes.
        pytest.param(name, list(MESHES)[number % 8], marks=pytest.mark.slow)
        for number, name in enumerate(NAMES)
    ],
)
def test_logits_are_those_of_transformers(folder, name, mesh):
    sizes, layout = MESHES[mesh]
    model = load_on(folder(name), sizes, layout)
    assert max(errors(name, model, layout)) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "llama_bias"])
def test_logits_over_explicit_axes(folder, name):
    model = load_on(folder(name), {"fsdp": 2, "seq": 2}, "zigzag", AxisType.Explicit)
    assert max(errors(name, model, "zigzag")) < LIMIT


@pytest.mark.slow
def test_logits_of_a_pipeline(folder):
    path = folder("gemma3_types")
    model = load_on(path, {"stage": 2, "fsdp": 2, "seq": 2}, "zigzag")
    shards = model.layers.mlp.up.kernel[...].addressable_shards
    assert {shard.data.shape[0] for shard in shards} == {2}
    assert max(errors("gemma3_types", model, "zigzag", count=8)) < LIMIT


def test_a_pipeline_refuses_stages_that_differ(folder):
    # Six kinds in a period, four layers in a stage.
    model = load_on(folder("gemma3"), {"stage": 2, "seq": 1}, "contiguous")
    tokens, positions = jnp.zeros((2, 8), jnp.int32), np.arange(8, dtype=np.int32)
    with pytest.raises(NotImplementedError, match="8 layers in 2 stages: each stage must"):
        jax.eval_shape(model, tokens, positions)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama2", {"norm_epsilon": 1e-4}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama3", {"layer_pattern": (LayerKind(None, Rope(500000.0)),)}),
                ("llama3", {"layer_pattern": (LayerKind(None, Llama3Rope(500000.0)),)}),
                ("llama_dynamic", {"layer_pattern": (LayerKind(),)}),
                ("llama_yarn", {"layer_pattern": (LayerKind(),)}),
                ("mistral", {"layer_pattern": (LayerKind(101),)}),
                ("gemma2", {"layer_pattern": (LayerKind(), LayerKind(100))}),
                ("gemma2", {"attention_scale": None}),
                ("gemma2_caps", {"logits_soft_cap": 3.1}),
                ("qwen3", {"norm_offset": 0.01}),
                ("gemma3_types", {"activation": "gelu"}),
            )
        ),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else case,
)
def test_logits_tell_each_option(folder, name, change):
    """The logits that are kept would show an option that is left out, or a little wrong."""
    mesh = mesh_of(seq=1)
    options = {"mesh": mesh, "rules": ShardingRules.of(mesh)}
    model = load(folder(name), dtype=jnp.float32, **options)
    # Beside the change nothing else: first it is made with no change.
    wrong = model.with_attention(dataclasses.replace(model.config, **change), **options)
    assert max(errors(name, wrong, "contiguous")) > LIMIT


def test_loss_and_gradient_with_a_tied_embedding():
    """The loss takes the embedding's transpose, split as the embedding is."""
    mesh = mesh_of(fsdp=2, seq=2, tensor=2)
    config = DecoderConfig(num_layers=1, vocab_size=32, embed_dim=16, tie_embeddings=True)
    graphdef, shapes = abstract_decoder(config, mesh=mesh, rules=ShardingRules.of(mesh))
    weights = random_like(shapes, 0)
    _, spec = nnx.merge(graphdef, weights).head_sharding()
    assert spec == jax.P(("fsdp", "seq"), ("tensor",))
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((2, 8, 16)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 32, (2, 8)), jnp.int32)

    def chunked(weights):
        kernel = nnx.merge(graphdef, weights).head_kernel()
        axes = {"seq_axis": "seq", "batch_axis": "fsdp", "vocab_axis": "tensor"}
        return chunked_cross_entropy(
            hidden, kernel, targets, mesh=mesh, kernel_spec=spec, chunk_size=3, **axes
        )[0]

    def whole(weights):
        log_probs = jax.nn.log_softmax(hidden @ weights["embedding"][...].T)
        return -jnp.sum(jnp.take_along_axis(log_probs, targets[..., None], -1))

    got, want = (quick_jit(jax.value_and_grad(f))(weights) for f in (chunked, whole))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    got, want = (grads["embedding"].get_value() for _, grads in (got, want))
    assert_close([got], [want], 1e-5)


def test_the_loss_has_the_soft_cap_of_the_logits():
    mesh = mesh_of(seq=2)
    # A cap that bends these logits by more than the test's limit.
    config = DecoderConfig(num_layers=1, vocab_size=32, embed_dim=16, final_soft_cap=0.05)
    rules = ShardingRules.of(mesh)
    model = Decoder(config, rngs=nnx.Rngs(0), mesh=mesh, rules=rules, layout="zigzag")
    tokens = np.random.default_rng(0).integers(0, 32, (1, 33))
    batch = place_batch(make_batch(tokens, layout="zigzag", num_shards=2), mesh, batch_axis=None)
    logits = model.unembed(model(batch["inputs"], batch["positions"]))
    log_probs = jax.nn.log_softmax(logits)
    want = -jnp.sum(jnp.take_along_axis(log_probs, batch["targets"][..., None], -1))
    got, count = next_token_loss(model, batch, chunk_size=5)
    assert count == 32
    np.testing.assert_allclose(got, want, rtol=1e-5)
    uncapped = model.with_attention(
        dataclasses.replace(config, final_soft_cap=None), mesh=mesh, rules=rules, layout="zigzag"
    )
    assert abs(next_token_loss(uncapped, batch)[0] / want - 1) > 1e-4


def read(folder):
    """All tensors of a folder, and its ``config.json``."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "gemma2" else pytest.mark.slow)
        for name in NAMES
        if name != "gemma3_images"  # Of which only a part is saved, see the next test.
    ],
)
def test_saving_gives_the_same_folder(folder, tmp_path, name):
    """From a mesh that splits everything: what transformers computes of it is the same, too."""
    sizes, layout = MESHES["fsdp2-seq2-tensor2"]
    model = load_on(folder(name), sizes, layout)
    save(model, tmp_path / "saved", max_file_bytes=30000)
    found, config = read(tmp_path / "saved")
    want = hf_models.tensors(name)
    assert config == hf_models.golden(name)["config"]
    assert found.keys() == want.keys()
    for tensor, value in want.items():
        np.testing.assert_array_equal(found[tensor], value)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == want.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in want.values())
    assert not list(tmp_path.glob(".*"))
    # The config of a decoder that was not loaded is written anew, and says the same.
    config = dataclasses.replace(model.config, hf_config=None)
    model.config = config
    save(model, tmp_path / "written", max_length=None if "dynamic" in name else 1024)
    again = load_on(tmp_path / "written", {"seq": 1}, "contiguous").config
    kinds = config.layer_kinds
    assert dataclasses.replace(again, hf_config=None, layer_pattern=kinds) == config


def test_of_a_model_with_images_the_language_model_is_read(folder, tmp_path):
    model = load_on(folder("gemma3_images"), {"seq": 1}, "contiguous")
    save(model, tmp_path / "saved")
    found, config = read(tmp_path / "saved")
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["model_type"] == "gemma3_text"
    stored = hf_models.tensors("gemma3_images")
    prefix = "language_model."
    want = {name.removeprefix(prefix): x for name, x in stored.items() if name.startswith(prefix)}
    assert found.keys() == want.keys() != stored.keys()
    for tensor, value in want.items():
        np.testing.assert_array_equal(found[tensor], value)
    # A newer order of the names' parts.
    newer = {f"model.{prefix}{name.removeprefix('model.')}": x for name, x in want.items()}
    path = folder("gemma3_images")
    save_file(newer | {"model.vision_tower.probe": np.zeros(2)}, path / "model.safetensors")
    again = load_on(path, {"seq": 1}, "contiguous")
    np.testing.assert_array_equal(again.embedding[...], model.embedding[...])
    assert again.config == model.config


def test_dtypes_of_files_weights_and_computation(folder, tmp_path):
    path = folder("qwen3")
    save(load_on(path, {"seq": 1}, "contiguous"), tmp_path / "half", dtype=jnp.bfloat16)
    found, config = read(tmp_path / "half")
    assert config["dtype"] == "bfloat16"
    want = hf_models.tensors("qwen3")["model.norm.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["model.norm.weight"], want)
    mesh = mesh_of(seq=1)
    model = load(tmp_path / "half", mesh=mesh)
    assert model.config.dtype == model.config.param_dtype == jnp.bfloat16
    assert model.embedding[...].dtype == jnp.bfloat16
    options: Any = {"param_dtype": jnp.float32, "remat": "selective", "remat_layers": 1}
    model = load(tmp_path / "half", mesh=mesh, **options)
    assert model.config.dtype == jnp.bfloat16
    assert (model.config.remat, model.config.remat_layers) == ("selective", 1)
    np.testing.assert_array_equal(model.final_norm.scale[...], want.astype(np.float32))


def test_a_new_decoder_is_saved_as_the_family_that_computes_it(tmp_path):
    """Today's defaults are Qwen 3; what no family computes is refused."""
    config = DecoderConfig(vocab_size=16, num_layers=2, embed_dim=16, head_dim=8, mlp_dim=24)
    mesh = mesh_of(seq=1)
    graphdef, shapes = abstract_decoder(config, mesh=mesh)
    model = nnx.merge(graphdef, random_like(shapes, 0))
    with pytest.raises(ValueError, match=r"max_length is None: config.json says a number"):
        save(model, tmp_path / "new")
    save(model, tmp_path / "new", max_length=4096)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["model_type"] == "qwen3"
    again = load(tmp_path / "new", mesh=mesh)
    assert again.config.qk_norm
    for got, want in zip(
        jax.tree.leaves(nnx.state(again)), jax.tree.leaves(nnx.state(model)), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(FileExistsError, match=r"new exists: choose a folder that does not"):
        save(model, tmp_path / "new", max_length=4096)
    model.config = dataclasses.replace(config, post_norms=True)
    with pytest.raises(NotImplementedError, match="no family of models"):
        save(model, tmp_path / "other", max_length=4096)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="max_file_bytes is 0"):
        save(model, tmp_path / "other", max_length=4096, max_file_bytes=0)


def test_the_folder_appears_when_it_is_complete(folder, tmp_path, monkeypatch):
    """A write that fails leaves neither the folder nor what was written of it."""
    model = load_on(folder("llama2"), {"seq": 1}, "contiguous")

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save(model, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["llama2"]


def test_without_safetensors_the_message_says_what_to_install(folder, monkeypatch):
    path = folder("llama2")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'burst-jax\[models\]'"):
        load(path, mesh=mesh_of(seq=1))


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        (
            "llama2",
            {"model_type": "mamba"},
            NotImplementedError,
            "model_type 'mamba': there are llama",
        ),
        (
            "llama2",
            {"text_config": {}, "model_type": "llava"},
            NotImplementedError,
            "its language model",
        ),
        ("llama2", {"vocab_size": None}, ValueError, "lacks vocab_size"),
        ("llama2", {"attention_dropout": 0.1}, NotImplementedError, "attention_dropout is 0.1 and"),
        (
            "llama2",
            {"new_trick": 1},
            NotImplementedError,
            r"new_trick is 1, and unknown.*ignore=\('new",
        ),
        (
            "llama2",
            {"hidden_act": "relu"},
            NotImplementedError,
            "hidden_act is 'relu': there are silu",
        ),
        ("llama2", {"rope_scaling": {"type": "longrope"}}, NotImplementedError, "type 'longrope'"),
        (
            "llama2",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "offset": 1}},
            NotImplementedError,
            "'linear' has offset",
        ),
        ("llama2", {"rope_scaling": {"type": "linear"}}, ValueError, "'linear' lacks factor"),
        ("llama2", {"rope_scaling": {"type": "linear", "factor": "2"}}, ValueError, "be a number"),
        ("llama2", {"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor is"),
        ("gemma3_types", {"layer_types": ["full_attention"]}, ValueError, "it needs 4 entries"),
        ("gemma3_types", {"sliding_window": None}, ValueError, "sliding_window is null"),
        ("gemma2", {"use_bidirectional_attention": True}, NotImplementedError, "must be False"),
        ("qwen3", {"dtype": "float8"}, NotImplementedError, "dtype 'float8': pass dtype="),
    ],
)
def test_configs_that_are_refused(folder, name, change, error, message):
    path = folder(name)
    config = hf_models.golden(name)["config"] | change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        load(path, mesh=mesh_of(seq=1))
