"""Saving Hugging Face checkpoints: tensors, files, and when the folder appears."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import mesh_of, random_like
from safetensors.numpy import load_file, save_file

from burst_jax import ShardingRules
from burst_jax.models import Decoder, DecoderConfig, abstract_decoder, load, save
from burst_jax.models.hf.save import take_layer

ONE = mesh_of(seq=1)


@pytest.fixture
def model():
    config = DecoderConfig(vocab_size=8, num_layers=2, embed_dim=8, head_dim=4, mlp_dim=8)
    return Decoder(config, rngs=nnx.Rngs(0), mesh=ONE)


def read(folder):
    """All tensors of a checkpoint, and its ``config.json``."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found, json.loads((folder / "config.json").read_text())


def assert_equal(found, want):
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(found[name], tensor)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "gemma2" else pytest.mark.slow)
        for name in hf_models.names()
        if name != "gemma3_images"  # Only a part of it is saved, see the next test.
    ],
)
def test_saving_gives_the_same_checkpoint(tmp_path, name):
    """From a mesh that shards everything."""
    mesh = mesh_of(fsdp=2, seq=2, tensor=2)
    folder = hf_models.write_folder(name, tmp_path / name)
    model = load(folder, mesh=mesh, rules=ShardingRules.of(mesh), dtype=jnp.float32)
    save(model, tmp_path / "saved", max_file_bytes=30000)
    found, config = read(tmp_path / "saved")
    want = hf_models.tensors(name)
    assert config == hf_models.golden(name)["config"]
    assert_equal(found, want)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == want.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in want.values())
    assert not list(tmp_path.glob(".*"))
    # The config of a decoder that was not loaded is written anew and agrees.
    model.config = config = dataclasses.replace(model.config, hf_config=None)
    save(model, tmp_path / "written", max_length=None if "dynamic" in name else 1024)
    again = load(tmp_path / "written", mesh=ONE, dtype=jnp.float32).config
    assert dataclasses.replace(again, hf_config=None, layer_pattern=config.layer_kinds) == config


def test_the_language_model_of_a_model_with_images(tmp_path):
    folder = hf_models.write_folder("gemma3_images", tmp_path / "images")
    model = load(folder, mesh=ONE, dtype=jnp.float32)
    save(model, tmp_path / "saved")
    found, config = read(tmp_path / "saved")
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["model_type"] == "gemma3_text"
    stored = hf_models.tensors("gemma3_images")
    prefix = "language_model."
    want = {name.removeprefix(prefix): x for name, x in stored.items() if name.startswith(prefix)}
    assert len(want) < len(stored)
    assert_equal(found, want)
    # A newer order of the names' parts.
    newer = {f"model.{prefix}{name.removeprefix('model.')}": x for name, x in want.items()}
    save_file(newer | {"model.vision_tower.probe": np.zeros(2)}, folder / "model.safetensors")
    again = load(folder, mesh=ONE, dtype=jnp.float32)
    np.testing.assert_array_equal(again.embedding[...], model.embedding[...])
    assert again.config == model.config


def test_dtypes_of_tensors_weights_and_computation(tmp_path):
    folder = hf_models.write_folder("qwen3", tmp_path / "model")
    save(load(folder, mesh=ONE, dtype=jnp.float32), tmp_path / "half", dtype=jnp.bfloat16)
    found, config = read(tmp_path / "half")
    assert config["dtype"] == "bfloat16"
    want = hf_models.tensors("qwen3")["model.norm.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["model.norm.weight"], want)
    model = load(tmp_path / "half", mesh=ONE)
    assert model.config.dtype == model.config.param_dtype == jnp.bfloat16
    assert model.embedding[...].dtype == jnp.bfloat16
    options: Any = {"param_dtype": jnp.float32, "remat": "selective", "remat_layers": 1}
    model = load(tmp_path / "half", mesh=ONE, **options)
    assert model.config.dtype == jnp.bfloat16
    assert (model.config.remat, model.config.remat_layers) == ("selective", 1)
    np.testing.assert_array_equal(model.final_norm.scale[...], want.astype(np.float32))


def test_a_new_decoder_is_saved_as_the_family_with_its_architecture(model, tmp_path):
    """The defaults are Qwen 3's; a config that no family can express raises."""
    with pytest.raises(ValueError, match=r"max_length is None: config.json has a number"):
        save(model, tmp_path / "new")
    save(model, tmp_path / "new", max_length=4096)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["model_type"] == "qwen3"
    again = load(tmp_path / "new", mesh=ONE)
    assert again.config.qk_norm
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    with pytest.raises(FileExistsError, match=r"new exists: choose a folder that does not"):
        save(model, tmp_path / "new", max_length=4096)
    model.config = dataclasses.replace(model.config, post_norms=True)
    with pytest.raises(NotImplementedError, match="no model family"):
        save(model, tmp_path / "other", max_length=4096)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="max_file_bytes is 0"):
        save(model, tmp_path / "other", max_length=4096, max_file_bytes=0)


def test_an_empty_folder_is_replaced_and_a_link_to_it_stays(model, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    save(model, tmp_path / "link", max_length=64)
    assert (tmp_path / "link").is_symlink()
    files = sorted(path.name for path in (tmp_path / "disk").iterdir())
    assert files == ["config.json", "model.safetensors"]
    # With the mode of any new folder.
    (tmp_path / "other").mkdir()
    assert (tmp_path / "disk").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link", "other"]


def test_a_failed_save_leaves_nothing(model, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save(model, tmp_path / "saved", max_length=64)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    assert not list(tmp_path.iterdir())
    (tmp_path / "disk").mkdir()
    with pytest.raises(ValueError, match=r"disk is a mount point.*choose a folder in it, like"):
        save(model, tmp_path / "disk", max_length=64)
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]


def test_a_complete_model_that_cannot_be_renamed_is_kept(model, tmp_path, monkeypatch):
    """A file has appeared in the folder during the write."""
    real = safetensors.numpy.save_file

    def meanwhile(*arguments, **options):
        real(*arguments, **options)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "notes").touch()

    monkeypatch.setattr(safetensors.numpy, "save_file", meanwhile)
    with pytest.raises(OSError, match=r"model cannot be replaced; .* is complete") as raised:
        save(model, tmp_path / "model", max_length=64)
    kept = str(raised.value).split("replaced; ")[1].removesuffix(" is complete")
    assert load(kept, mesh=ONE).config.num_layers == 2
    assert (tmp_path / "model" / "notes").exists()


def test_a_layer_is_sent_by_the_stage_that_has_it():
    """No device ever receives the layers of another stage."""
    mesh = mesh_of(AxisType.Explicit, stage=2, fsdp=2)
    stack = np.random.default_rng(0).standard_normal((6, 8, 5)).astype(np.float32)
    stack[1, 0], stack[4, 1] = -0.0, np.nan
    spec = PartitionSpec("stage", "fsdp")
    weight = jax.device_put(stack, NamedSharding(mesh, spec))
    for layer in range(6):
        taken = take_layer(weight, np.int32(layer), mesh=mesh, spec=spec)
        assert {shard.data.shape for shard in taken.addressable_shards} == {(4, 5)}
        assert np.asarray(taken).tobytes() == stack[layer].tobytes()
    compiled = take_layer.lower(weight, np.int32(0), mesh=mesh, spec=spec).compile().as_text()
    assert compiled is not None
    sent = re.findall(r"= (\S+) (all-\w+|collective-\w+|reduce-\w+)\(", compiled)
    found = [(re.sub(r"\{.*", "", shape), name) for shape, name in sent]
    assert found == [("u8[4,5,4]", "all-reduce")]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_pipeline_is_saved(tmp_path, kind):
    config = DecoderConfig(vocab_size=8, num_layers=4, embed_dim=8, head_dim=4, mlp_dim=8)
    mesh = mesh_of(kind, stage=2, fsdp=2, seq=1)
    rules = ShardingRules.of(mesh)
    graphdef, shapes = abstract_decoder(config, mesh=mesh, rules=rules)
    weights = random_like(shapes, 0)
    save(nnx.merge(graphdef, weights), tmp_path / "whole", max_length=64)
    again = load(tmp_path / "whole", mesh=mesh, rules=rules)
    shards = again.layers.mlp.up.kernel[...].addressable_shards
    assert {shard.data.shape[0] for shard in shards} == {2}
    save(again, tmp_path / "sharded")
    want, found = (read(tmp_path / name)[0] for name in ("whole", "sharded"))
    assert_equal(found, want)
    up = weights["layers"]["mlp"]["up"]["kernel"][...][3]
    np.testing.assert_array_equal(want["model.layers.3.mlp.up_proj.weight"], up.T)
