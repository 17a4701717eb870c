"""What is written of a model: its ``config.json``, its files, and when its folder appears."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import mesh_of, random_like
from safetensors.numpy import load_file

from burst_jax import ShardingRules
from burst_jax.models import Decoder, DecoderConfig, abstract_decoder, load, save
from burst_jax.models.hf.config import config_json, read_config
from burst_jax.models.hf.save import take_layer


@pytest.fixture
def config_of(tmp_path):
    """The decoder's config of a model, or of another ``config.json``."""

    def read(name, written=None, **options):
        written = hf_models.golden(name)["config"] if written is None else written
        (tmp_path / "config.json").write_text(json.dumps(written))
        return read_config(tmp_path, **options)[0]

    return read


def test_how_a_decoder_runs_does_not_change_what_is_written(config_of):
    config = config_of("llama3")
    want = config_json(config, jnp.float32, None)
    running = {
        "remat": "selective",
        "remat_layers": 1,
        "mlp_chunks": 2,
        "dtype": jnp.bfloat16,
        "param_dtype": jnp.float16,
    }
    assert config_json(dataclasses.replace(config, **running), jnp.float32, None) == want
    assert want[0] == hf_models.golden("llama3")["config"]


@pytest.mark.parametrize("name", [name for name in hf_models.names() if "images" not in name])
def test_a_new_file_has_the_format_of_each_version_of_transformers(config_of, name):
    config = dataclasses.replace(config_of(name), hf_config=None)
    length = None if "dynamic" in name else 1024
    written, _ = config_json(config, jnp.float32, length)
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {
        key: value
        for key, value in written.items()
        if key not in ("rope_theta", "rope_scaling", "rope_local_base_freq")
    }
    assert len(old) < len(written) > len(new)
    for each in (written, old, new):
        found = config_of(name, each).layer_kinds
        assert found == config.layer_kinds


def test_max_length_is_written_of_a_loaded_decoder_too(config_of):
    config = config_of("llama3")
    written, _ = config_json(config, jnp.float32, 4096)
    assert written == hf_models.golden("llama3")["config"] | {"max_position_embeddings": 4096}
    dynamic = config_of("llama_dynamic")
    assert config_json(dynamic, jnp.float32, 256)[0]["max_position_embeddings"] == 256
    for config in (dynamic, dataclasses.replace(dynamic, hf_config=None)):
        with pytest.raises(ValueError, match=r"max_length is 4096.*max_positions=256"):
            config_json(config, jnp.float32, 4096)


@pytest.fixture
def model():
    config = DecoderConfig(vocab_size=8, num_layers=2, embed_dim=8, head_dim=4, mlp_dim=8)
    return Decoder(config, rngs=nnx.Rngs(0), mesh=mesh_of(seq=1))


def test_an_empty_folder_is_replaced_and_a_link_to_it_stays(model, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    save(model, tmp_path / "link", max_length=64)
    assert (tmp_path / "link").is_symlink()
    files = sorted(path.name for path in (tmp_path / "disk").iterdir())
    assert files == ["config.json", "model.safetensors"]
    # As any new folder: not for this user alone.
    (tmp_path / "other").mkdir()
    assert (tmp_path / "disk").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link", "other"]


def test_a_mount_point_is_refused_before_anything_is_written(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    with pytest.raises(ValueError, match=r"disk is a mount point.*choose a folder in it, like"):
        save(model, tmp_path / "disk", max_length=64)
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]


def test_a_complete_model_that_cannot_be_renamed_is_kept(model, tmp_path, monkeypatch):
    """Somebody has put a file there while the model was being written."""
    real = safetensors.numpy.save_file

    def meanwhile(*arguments, **options):
        real(*arguments, **options)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "notes").touch()

    monkeypatch.setattr(safetensors.numpy, "save_file", meanwhile)
    with pytest.raises(OSError, match=r"model cannot be replaced; .* is complete") as raised:
        save(model, tmp_path / "model", max_length=64)
    kept = str(raised.value).split("replaced; ")[1].removesuffix(" is complete")
    assert load(kept, mesh=mesh_of(seq=1)).config.num_layers == 2
    assert (tmp_path / "model" / "notes").exists()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_layer_comes_from_the_stage_that_has_it(kind):
    """And no device ever gets the layers of another stage."""
    mesh = mesh_of(kind, stage=2, fsdp=2)
    stack = np.random.default_rng(0).standard_normal((6, 8, 5)).astype(np.float32)
    stack[1, 0], stack[4, 1] = -0.0, np.nan
    spec = PartitionSpec("stage", "fsdp")
    weight = jax.device_put(stack, NamedSharding(mesh, spec))
    for layer in range(6):
        taken = take_layer(weight, np.int32(layer), mesh=mesh, spec=spec)
        assert {shard.data.shape for shard in taken.addressable_shards} == {(4, 5)}
        # Bit by bit.
        assert np.asarray(taken).tobytes() == stack[layer].tobytes()
    compiled = take_layer.lower(weight, np.int32(0), mesh=mesh, spec=spec).compile().as_text()
    assert compiled is not None
    sent = re.findall(r"= (\S+) (all-\w+|collective-\w+|reduce-\w+)\(", compiled)
    assert [(re.sub(r"\{.*", "", shape), name) for shape, name in sent] == [
        ("u8[4,5,4]", "all-reduce")
    ]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_pipeline_is_saved(tmp_path, kind):
    config = DecoderConfig(vocab_size=8, num_layers=4, embed_dim=8, head_dim=4, mlp_dim=8)
    mesh = mesh_of(kind, stage=2, fsdp=2, seq=1)
    graphdef, shapes = abstract_decoder(config, mesh=mesh, rules=ShardingRules.of(mesh))
    weights = random_like(shapes, 0)
    save(nnx.merge(graphdef, weights), tmp_path / "whole", max_length=64)
    again = load(tmp_path / "whole", mesh=mesh, rules=ShardingRules.of(mesh))
    shards = again.layers.mlp.up.kernel[...].addressable_shards
    assert {shard.data.shape[0] for shard in shards} == {2}
    save(again, tmp_path / "split")
    want, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "split"))
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(found[name], tensor)
    np.testing.assert_array_equal(
        want["model.layers.3.mlp.up_proj.weight"],
        weights["layers"]["mlp"]["up"]["kernel"][...][3].T,
    )
