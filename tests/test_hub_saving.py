"""What is written of a model: its ``config.json``, its files, and when its folder appears."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import hub_models
import jax.numpy as jnp
import pytest
import safetensors.numpy
from flax import nnx
from meshes import mesh_of

from burst_jax.models import Decoder, DecoderConfig, load, save
from burst_jax.models.hub.config import config_json, read_config


@pytest.fixture
def config_of(tmp_path):
    """Of a model's name and changes to its ``config.json`` the decoder's config."""

    def read(name, change=None, **options):
        written = hub_models.golden(name)["config"] | (change or {})
        (tmp_path / "config.json").write_text(json.dumps(written))
        return read_config(tmp_path, **options)[0]

    return read


def test_how_a_decoder_runs_does_not_change_what_is_written(config_of):
    config = config_of("llama3")
    want = config_json(config, jnp.float32, None)
    running = {
        "remat": "full",
        "mlp_chunks": 2,
        "dtype": jnp.bfloat16,
        "param_dtype": jnp.float16,
    }
    assert config_json(dataclasses.replace(config, **running), jnp.float32, None) == want
    assert want[0] == hub_models.golden("llama3")["config"]


def test_max_length_is_written_of_a_loaded_decoder_too(config_of):
    config = config_of("llama3")
    written, _ = config_json(config, jnp.float32, 4096)
    assert written == hub_models.golden("llama3")["config"] | {"max_position_embeddings": 4096}
    dynamic = config_of("llama_dynamic")
    assert config_json(dynamic, jnp.float32, 256)[0]["max_position_embeddings"] == 256
    for config in (dynamic, dataclasses.replace(dynamic, hub_config=None)):
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
