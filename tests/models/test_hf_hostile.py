"""Hostile checkpoints: configs, safetensors files, indices and adapters; see support/hostile.py."""

from __future__ import annotations

import json
import struct

import hf_models
import hostile
import pytest
from hostile import INTEGERS, NEVER, NUMBERS, check, check_all
from meshes import mesh_of

from burst_jax.models import load, load_adapter, load_config
from burst_jax.models.decoder import abstract_decoder
from burst_jax.models.hf.config import read_config
from burst_jax.models.hf.files import TensorFiles
from burst_jax.models.hf.load import check_tensors
from burst_jax.models.hf.tensors import tensor_shapes, weights_of

ONE = mesh_of(seq=1)
INDEX = "model.safetensors.index.json"
# Rules of keys that may be null or missing, have any text or be a JSON object.
TEXTS = NEVER | {"true", "negative", "fraction", "huger", "list", "object"}
BOOLEANS = (INTEGERS - {"true"}) | {"huge"}
OBJECTS = BOOLEANS | {"true"}
LLAMA = {
    "vocab_size": INTEGERS | {"missing", "null"},
    "hidden_size": INTEGERS | {"missing", "null"},
    "intermediate_size": INTEGERS | {"missing", "null"},
    "num_hidden_layers": INTEGERS | {"missing", "null", "huge"},
    "num_attention_heads": INTEGERS | {"missing", "null"},
    "num_key_value_heads": INTEGERS | {"huge"},
    "head_dim": INTEGERS,
    "max_position_embeddings": INTEGERS | {"null"},
    "rms_norm_eps": NUMBERS | {"null"},
    "rope_theta": NUMBERS,
    "tie_word_embeddings": BOOLEANS,
    "attention_bias": BOOLEANS,
    "hidden_act": TEXTS | {"null", "text", "escapes", "long", "surrogate"},
    "model_type": TEXTS | {"missing", "null", "text", "escapes", "long", "surrogate"},
    "dtype": TEXTS | {"text", "escapes", "long", "surrogate"},
    "rope_scaling": OBJECTS,
    "unknown": set(hostile.VALUES) - {"missing"},
}
ALSO = {"hidden_act": ("activation",), "head_dim": ("head_dim",)}
SCALED = {
    "rope_scaling.rope_type": TEXTS | {"text", "escapes", "long", "surrogate"},
    "rope_scaling.factor": NUMBERS | {"missing", "null"},
    "rope_scaling.low_freq_factor": NUMBERS,
    "rope_scaling.original_max_position_embeddings": INTEGERS,
    "rope_scaling.rope_theta": NUMBERS,
    "rope_scaling.truncate": set(hostile.VALUES) - {"missing", "null"},
}
TYPES = ["full_attention", "sliding_attention"] * 4
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
GEMMA = {
    "sliding_window": INTEGERS,
    "layer_types": OBJECTS | {"list"},
    "layer_types.0": OBJECTS | {"list", "missing"},
    "query_pre_attn_scalar": NUMBERS,
    "final_logit_softcapping": NUMBERS,
    "rope_local_base_freq": NUMBERS,
    "sliding_window_pattern": INTEGERS,
    "rope_parameters": OBJECTS,
}


@pytest.fixture
def path(tmp_path):
    return hf_models.write_folder("llama2", tmp_path / "llama2")


def configs(name, changes, fields):
    valid = hf_models.golden(name)["config"] | changes
    return hostile.json_cases(valid, fields, ALSO)


def test_configs(path):
    file = path / "config.json"
    cases = [
        *configs("llama2", {}, LLAMA),
        *configs("llama2", {"rope_scaling": LLAMA3}, SCALED),
        *configs("gemma3", {"layer_types": TYPES}, GEMMA),
        *hostile.text_cases(file.read_bytes()),
    ]

    def results():
        for case in cases:
            file.write_bytes(case.content)
            yield check(
                case.name, lambda: load_config(path), ("config.json", *case.names),
                rejected=case.rejected,
            )  # fmt: skip
        file.write_text(json.dumps(hf_models.golden("llama2")["config"]))
        with hostile.special_files(file) as found:
            for name in found:
                yield check(name, lambda: load_config(path), ("config.json",), rejected=True)

    check_all(results(), 500)


def header(tensors):
    """The bytes of a safetensors file with this header and 16 bytes of data."""
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HEADERS = {
    "x.dtype": set(hostile.VALUES),
    "x.shape": set(hostile.VALUES) - {"list", "empty"},
    "x.shape.0": set(hostile.VALUES),
    "x.data_offsets": set(hostile.VALUES),
    "x.data_offsets.0": set(hostile.VALUES) - {"zero"},
    "x.data_offsets.1": set(hostile.VALUES),
    "x": set(hostile.VALUES),
    "__metadata__": set(),
    "\x1b[31mred": set(hostile.VALUES),
}
MANY = {f"model.extra.{index}": A | {"shape": [0], "data_offsets": [0, 0]} for index in range(9000)}
FILES = {
    "a length of 0": bytes(8),
    "a length of 2**64 - 1": b"\xff" * 8 + b"{}",
    "a length beyond the file": struct.pack("<Q", 1 << 20) + b"{}",
    "a length of a gigabyte": struct.pack("<Q", 1 << 30) + bytes(1000),
    "a length without its end": b"\x01\x02",
    "many tensors": header({"x": A} | MANY),
    "data behind the last tensor": header({"x": A}) + bytes(8),
    "data that is missing": header({"x": A})[:-1],
    "a pickle": b"\x80\x04\x95",
    "a zip file": b"PK\x03\x04" + bytes(100),
}


def test_safetensors(path):
    """Headers and bodies."""
    file = path / "model.safetensors"
    config, family, _ = read_config(path)
    weights = weights_of(abstract_decoder(config, mesh=ONE)[1], family, config)

    def read():
        check_tensors(path, TensorFiles(path), tensor_shapes(weights), ())

    def results():
        cases = [
            *hostile.json_cases({"x": A}, HEADERS),
            *(case for case in hostile.text_cases(b'{"x": {"dtype": "F32"}}')),
        ]
        for case in cases:
            file.write_bytes(header(case.content))
            yield check(case.name, read, ("llama2",), rejected=True)
        for name, content in FILES.items():
            file.write_bytes(content)
            yield check(name, read, ("llama2",), rejected=True)
        with hostile.special_files(file) as found:
            for name in found:
                yield check(name, lambda: load(path, mesh=ONE), (file.name,), rejected=True)

    with hostile.unchanged(path.parent, file):
        check_all(results(), 200)


PLACES = {
    "weight_map": set(hostile.VALUES),
    "weight_map.a": set(hostile.VALUES),
    "weight_map.\x1b[31mred": set(hostile.VALUES) - {"missing"},
}
NAMES = [
    *("../llama2/model.safetensors", "/etc/passwd", "..", ".", "a/b", "a\\..\\b", "", "a\0b"),
    *("model\n.safetensors", "\x1b[2J.safetensors", "x" * 300, "config.json", "\ud800"),
]


def test_indices(path):
    """Whatever an index contains, no file outside of its folder is opened."""
    file = path / INDEX
    (path / "model.safetensors").unlink()
    (path.parent / "outside.safetensors").write_bytes(header({"a": A}))
    valid = {"weight_map": {"a": "x.safetensors"}}
    (path / "x.safetensors").write_bytes(header({"a": A}))

    def results():
        many = {f"model.extra.{index}": "x.safetensors" for index in range(9000)}
        names = [{"weight_map": {"a": name}} for name in NAMES]
        contents = [json.dumps(index).encode() for index in (*names, {"weight_map": many})]
        cases = [
            *hostile.json_cases(valid, PLACES),
            *hostile.text_cases(json.dumps(valid).encode()),
            *(hostile.Case(repr(text[:60]), text, (), True) for text in contents),
        ]
        for case in cases:
            file.write_bytes(case.content)
            yield check(case.name, lambda: TensorFiles(path), ("llama2",), rejected=case.rejected)
        file.write_text(json.dumps(valid))
        for entry in (file, path / "x.safetensors"):
            with hostile.special_files(entry) as found:
                for name in found:
                    yield check(name, lambda: TensorFiles(path), ("llama2",), rejected=True)

    check_all(results(), 100)


ADAPTER = {
    "peft_type": TEXTS | {"missing", "null", "text", "escapes", "long"},
    "r": INTEGERS | {"missing", "null"},
    "lora_alpha": NUMBERS | {"missing", "null"},
    "bias": {"true", "negative", "text", "escapes", "list", "object"},
    "rank_pattern": {"object", "list", "text"},
    "init_lora_weights": {"text", "escapes", "list", "object", "infinity"},
}


def test_adapters(path, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    file = folder / "adapter_config.json"
    (folder / "adapter_model.safetensors").write_bytes(header({"x.q_proj.lora_A.weight": A}))
    model = load(path, mesh=ONE)
    valid = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}

    def results():
        text = json.dumps(valid).encode()
        for case in (*hostile.json_cases(valid, ADAPTER), *hostile.text_cases(text)):
            file.write_bytes(case.content)
            # A valid config is of another adapter than the tensors.
            names = (file.name, case.names[0]) if case.rejected and case.names else ("adapter",)
            yield check(case.name, lambda: load_adapter(model, folder), names, rejected=True)
        file.write_bytes(text)
        for entry in sorted(folder.iterdir()):
            with hostile.special_files(entry) as found:
                for name in found:
                    yield check(
                        name, lambda: load_adapter(model, folder), (entry.name,), rejected=True
                    )

    check_all(results(), 150)


@pytest.mark.parametrize("key", [key for key in LLAMA if key.endswith(("size", "layers", "heads"))])
def test_huge_models_are_compared_with_their_tensors(path, key):
    """The largest valid sizes end, too: with what is missing."""
    config = json.loads((path / "config.json").read_text())
    most = 10_000 if key == "num_hidden_layers" else 2**31 - 4
    (path / "config.json").write_text(json.dumps(config | {key: most}))
    assert not check(key, lambda: load(path, mesh=ONE), (str(path),), rejected=True)
