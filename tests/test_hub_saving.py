"""What is written of a model: its ``config.json``, its files, and when its folder appears."""

from __future__ import annotations

import dataclasses
import json

import hub_models
import jax.numpy as jnp
import pytest

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
