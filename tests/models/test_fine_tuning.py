"""Fine-tuning of Hugging Face checkpoints."""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import inspect
import json
import math
import shutil
import typing
from pathlib import Path
from typing import Any

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
import perplexity
import plain_model
import pytest
import train_lm
from data_files import write_tokenizer
from flax import nnx
from implementations import QUICK, quick_jit
from meshes import make_mesh, mesh_of
from safetensors.numpy import save_file

from burst_jax import ShardingRules
from burst_jax.data import TokenizerFile, open_corpus
from burst_jax.models import (
    Decoder,
    DecoderConfig,
    Lora,
    load,
    load_adapter,
    load_config,
    merge_lora,
    save,
)
from burst_jax.training import (
    init_train_state,
    make_batch,
    make_optimizer,
    make_train_step,
    place_batch,
)
from burst_jax.training.checkpoint_files import read_record

OPTIMIZER = optax.adam(1e-3)
ROWS, LENGTH = 2, 48


def rows(step):
    """Two packed sequences of two documents, with padding at the end of one."""
    tokens = np.random.default_rng(step).integers(0, hf_models.VOCAB, (ROWS, LENGTH + 1))
    segments = np.ones((ROWS, LENGTH + 1), np.int32)
    segments[0, 17:], segments[1, 40:] = 2, 0
    return tokens, segments


def ring_losses(folder, mesh, steps):
    rules = ShardingRules.of(mesh)
    model = load(folder, dtype=jnp.float32, mesh=mesh, rules=rules, layout="zigzag")
    graphdef, params, state = init_train_state(
        model.config, OPTIMIZER, mesh, 0, rules=rules, layout="zigzag", params=nnx.state(model)
    )
    step = make_train_step(graphdef, OPTIMIZER, compiler_options=QUICK)
    losses = []
    for index in range(steps):
        tokens, segments = rows(index)
        shards = mesh.shape["seq"]
        batch = make_batch(tokens, segment_ids=segments, layout="zigzag", num_shards=shards)
        placed = place_batch(batch, mesh, batch_axis=rules.batch_axes)
        params, state, metrics = step(params, state, placed)
        losses.append(float(metrics["loss"]))
    return losses


def plain_losses(folder, steps):
    """The same steps by the formulas, in float64, on one device, with all logits at once."""
    theta = load_config(folder).layer_ropes[0].theta
    state = nnx.state(load(folder, mesh=make_mesh(), dtype=jnp.float32))
    numbers = plain_model.float64(nnx.to_pure_dict(state))
    positions = np.tile(np.arange(LENGTH), (ROWS, 1))

    def loss(weights, tokens, segments):
        inputs, ids = tokens[:, :-1], segments[:, :-1]
        keep = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] != 0)
        keep &= jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        hidden = plain_model.decoder(weights, inputs, positions, keep, theta)
        counts = ((ids == segments[:, 1:]) & (ids != 0)).astype(jnp.float64)
        logits = hidden @ weights["embedding"].T  # This model ties the two.
        return plain_model.cross_entropy(logits, tokens[:, 1:], counts) / counts.sum()

    @quick_jit
    def step(weights, state, tokens, segments):
        value, gradients = jax.value_and_grad(loss)(weights, tokens, segments)
        updates, state = OPTIMIZER.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    losses = []
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        weights = jax.tree.map(jnp.asarray, numbers)
        state = OPTIMIZER.init(weights)
        for index in range(steps):
            weights, state, value = step(weights, state, *map(jnp.asarray, rows(index)))
            losses.append(float(value))
    return losses


def test_a_loaded_model_takes_the_steps_of_a_plain_one(tmp_path):
    folder = hf_models.write_folder("qwen3", tmp_path / "model")
    got, want = ring_losses(folder, mesh_of(fsdp=2, seq=2), 3), plain_losses(folder, 3)
    np.testing.assert_allclose(got, want, rtol=2e-5)


def test_weights_of_another_decoder_raise(tmp_path):
    mesh = mesh_of(seq=2)
    model = load(hf_models.write_folder("qwen3", tmp_path / "model"), mesh=mesh, dtype=jnp.float32)
    other = dataclasses.replace(model.config, mlp_dim=2 * model.config.mlp_dim)
    weights = nnx.state(model)
    with pytest.raises(
        ValueError, match=r"params.*'mlp'.* is float32 .*, but config requires float32"
    ):
        init_train_state(other, OPTIMIZER, mesh, 0, layout="zigzag", params=weights)
    wide = dataclasses.replace(model.config, param_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"is float32 .*, but config requires bfloat16"):
        init_train_state(wide, OPTIMIZER, mesh, 0, layout="zigzag", params=weights)


# More than LONG tokens of text, padded to ROW, which eight devices divide.
LONG, ROW = 2**15, 2**15 + 256


def library_text(tokenizer_path):
    """A text of just over LONG tokens, and a tokenizer trained on it: Python's standard library."""
    modules: Any = argparse, typing, inspect
    text = "".join(Path(module.__file__).read_text() for module in modules)
    tokens = TokenizerFile(write_tokenizer(tokenizer_path, text))
    lines = text.splitlines(keepends=True)

    def size(count):
        return len(tokens.encode("".join(lines[:count]).encode()))

    return "".join(lines[: bisect.bisect_left(range(len(lines)), LONG + 1, key=size)])


@pytest.mark.slow  # attention over 32,768 tokens, five times forward and twice backward
def test_a_long_text_from_checkpoint_to_checkpoint(tmp_path):
    """Loaded, evaluated on a ring of eight and on one device, trained, saved and loaded again."""
    # Here execution takes longer than compilation.
    jax.config.update("jax_disable_most_optimizations", False)
    mesh = mesh_of(seq=8)
    options: Any = {"mesh": mesh, "rules": ShardingRules.of(mesh), "layout": "zigzag"}
    folder, tuned, path = tmp_path / "model", tmp_path / "tuned", tmp_path / "text.txt"
    config = DecoderConfig(
        vocab_size=400, num_layers=1, embed_dim=16, num_heads=1, num_kv_heads=1, head_dim=8,
        mlp_dim=32,
    )  # fmt: skip
    save(Decoder(config, rngs=nnx.Rngs(0), **options), folder, max_length=ROW)
    path.write_text(library_text(folder / "tokenizer.json"))

    def evaluate(folder, *more):
        out = ["--data", str(path), "--seq-len", str(ROW), "--mesh", "seq=8", "--dtype", "float32"]
        out += ["--model", str(folder), "--out", str(tmp_path)]
        assert perplexity.main([*out, *more]) == 0
        return json.loads((tmp_path / "perplexity.json").read_text())

    before = evaluate(folder, "--check")
    values = [before[devices]["perplexity"] for devices in ("mesh", "one_device")]
    np.testing.assert_allclose(*values, rtol=1e-5)

    model = load(folder, **options)
    tokens = TokenizerFile(folder / "tokenizer.json")
    (ids,) = perplexity.documents(open_corpus(path), tokens)
    assert LONG < len(ids) <= ROW
    assert before["mesh"]["tokens"] == len(ids) - 1
    row, segments, _ = perplexity.sequence([perplexity.Window(ids, len(ids) - 1)], ROW)
    made = make_batch(row[None], segment_ids=segments[None], layout="zigzag", num_shards=8)
    batch = place_batch(made, mesh, rules=options["rules"])
    optimizer = make_optimizer(3e-3, steps=10, warmup_steps=0)
    graphdef, params, state = init_train_state(
        model.config, optimizer, seed=0, params=nnx.state(model), **options
    )
    step, losses = make_train_step(graphdef, optimizer), []
    for _ in range(2):
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[0], before["mesh"]["nll"], rtol=1e-5)

    save(nnx.merge(graphdef, params), tuned)
    shutil.copy(folder / "tokenizer.json", tuned)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(load(tuned, **options)), params)
    after = evaluate(tuned)["mesh"]["nll"]
    assert losses[0] > losses[1] > after


def arguments(folder, tmp_path, *more):
    return [
        f"--model={folder}", f"--data={tmp_path / 'ids.npy'}", f"--out={tmp_path / 'out'}",
        "--mesh=fsdp=2,seq=2", "--seq-len=256", "--batch=2", "--steps=2", "--eval-batches=1",
        "--sample-tokens=0", "--dtype=float32", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_train_lm_fine_tunes_and_exports(tmp_path):
    folder = hf_models.write_folder("qwen3", tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    np.save(tmp_path / "ids.npy", np.tile(hf_models.TOKENS, 12))
    assert train_lm.main(arguments(folder, tmp_path, "--lr=1e-2")) == 0
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    exported = tmp_path / "out" / "model"
    assert (exported / "tokenizer.json").read_text() == "{}"
    before, after = (
        nnx.state(load(each, mesh=make_mesh(), dtype=jnp.float32)) for each in (folder, exported)
    )
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before, after)
    assert all(0 < change < 0.1 for change in jax.tree.leaves(moved))


LORA = ["--lora-rank=4", "--lora-alpha=8", "--lora-targets=query|up", "--lr=1e-2"]


@pytest.mark.slow
def test_train_lm_trains_adapters_and_resumes(tmp_path, capsys):
    """Two steps in two runs are two steps in one; checkpoints do not contain the base."""
    folder = hf_models.write_folder("qwen3", tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    np.save(tmp_path / "ids.npy", np.tile(hf_models.TOKENS, 12))
    every = "--checkpoint-every=1"
    assert train_lm.main(arguments(folder, tmp_path, *LORA, every)) == 0
    assert "M adapter weights, on query, up\n" in capsys.readouterr().out
    whole, out = tmp_path / "whole", tmp_path / "out"
    out.rename(whole)
    # The same run, but killed after its first step.
    shutil.copytree(whole / "checkpoints" / "1", out / "checkpoints" / "1")
    more = [*LORA, every, "--lora-export=adapter"]
    assert train_lm.main(arguments(folder, tmp_path, *more)) == 0
    assert "resuming from step 1" in capsys.readouterr().out
    last = [(run / "metrics.jsonl").read_text().splitlines()[-1] for run in (whole, out)]
    assert [json.loads(line)["step"] for line in last] == [2, 2]
    assert json.loads(last[0])["loss"] == json.loads(last[1])["loss"]
    record = read_record(out / "checkpoints" / "2").arrays
    sizes = [math.prod(shape) for shape, _ in record.values()]
    count = dataclasses.replace(load_config(folder), lora=Lora(4, 8.0, "query|up"))
    assert sum(sizes) == 3 * count.num_adapter_params + 2  # Weights, two moments, two counts.
    merged, base = (load(each, mesh=make_mesh()) for each in (whole / "model", folder))
    adapted = load_adapter(base, out / "adapter")
    assert (out / "adapter" / "tokenizer.json").exists()
    differences = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), nnx.state(merged), nnx.state(merge_lora(adapted))
    )
    assert max(jax.tree.leaves(differences)) < 1e-6
    moved = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), nnx.state(merged), nnx.state(base)
    )
    assert sum(change > 0 for change in jax.tree.leaves(moved)) == 2

    weights = hf_models.tensors("qwen3")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(SystemExit, match="2"):
        train_lm.main(arguments(folder, tmp_path, *more))
    error = capsys.readouterr().err
    assert f"--model is {folder}, whose weights have changed: the adapters in" in error
    other = folder.rename(tmp_path / "other")
    with pytest.raises(SystemExit, match="2"):
        train_lm.main(arguments(other, tmp_path, *more))
    assert f"--model is {other}: the run of the checkpoints in" in capsys.readouterr().err


def test_adapters_need_a_model(capsys):
    with pytest.raises(SystemExit, match="2"):
        train_lm.main(["--lora-rank=8"])
    message = "--lora-rank is 8: LoRA adapts an existing model; give --model"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lora-alpha=8"], "--lora-alpha needs --lora-rank"),
        (["--lora-export=adapter"], "--lora-export needs --lora-rank"),
        (["--lora-rank=0"], "--lora-rank is 0: it must be at least 1"),
        (["--lora-rank=8", "--lora-alpha=0"], "--lora-alpha is 0.0: it must be positive, and fin"),
        (["--lora-rank=8", "--lora-targets=q"], "targets is 'q': it matches none of query (q_proj"),
        (["--layers=2"], "--layers is given with --model, which defines it: leave it out"),
        (["--tokenizer=x"], "--tokenizer is x, but --data already holds tokens"),
        (
            ["--mesh=stage=2"],
            "--model has 3 layers: --mesh shards them over stage=2, but 2 does not divide 3; use "
            "another --mesh\n",
        ),
        (["--mesh=tensor=3"], "--model has 4 query heads: --mesh shards them over tensor=3"),
        (
            ["--out={tmp}"],
            "--model is {tmp}/model, where the result goes: use another --out than {tmp}",
        ),
    ],
)
def test_mistakes_with_a_model(tmp_path, capsys, more, message):
    folder = hf_models.write_folder("qwen3", tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.tile(hf_models.TOKENS, 12))
    with pytest.raises(SystemExit, match="2"):
        train_lm.main([each.format(tmp=tmp_path) for each in arguments(folder, tmp_path, *more)])
    assert message.format(tmp=tmp_path) in capsys.readouterr().err
