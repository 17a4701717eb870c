"""Fine-tunes a checkpoint with LoRA by ``train_lm.py`` and compares its export with transformers.

- The held-out loss that the script reports, of weights and adapters on a ring, is the loss of the
  exported folder by transformers.
- The exported folder, loaded on all devices, has transformers' logits in float32, and in bfloat16
  is as close to them as transformers in bfloat16.
- Generation settings and chat template are those of the original.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model_folder
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from peer import Peer, stop_settings

import burst_jax
from burst_jax.models import load

sys.path.insert(0, str(model_folder.ROOT / "examples"))
import run_batches
import run_options

# float32 in another order of summation.
FLOAT32_RMS = 1e-4
# Of transformers' own error in bfloat16.
BFLOAT16_FACTOR = 1.5
# Difference of two losses in nats: the merged weights are rounded to 16 bits. Training moves the
# loss by more than LEARNED.
SAME_LOSS, LEARNED = 0.01, 0.1


def relative_rms(x: np.ndarray, truth: np.ndarray) -> float:
    """Root mean square of the difference, relative to that of ``truth``."""
    return float(np.sqrt(np.mean((x - truth) ** 2) / np.mean(truth**2)))


def train(options: list[str]) -> None:
    """Runs the script; raises RuntimeError with its exit status."""
    command = [sys.executable, str(model_folder.ROOT / "examples" / "train_lm.py"), *options]
    print(f"$ {shlex.join(command)}", flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        raise RuntimeError(f"train_lm.py ended with exit status {status}")


def held_out(options: list[str]) -> Any:
    """The held-out sequences that the script evaluated, one batch ``[B, T + 1]`` with ids."""
    args, _ = run_options.parse_args(options)
    run = run_options.prepare(args)
    with run_batches.make_loader(args, run, run.held_out) as loader:
        return next(loader)


def loss_by_peer(peer: Peer, rows: np.ndarray, segment_ids: np.ndarray) -> float:
    """Mean loss of the next token in each document, each in a call of its own."""
    total = count = 0
    for row, ids in zip(rows, segment_ids, strict=True):
        for document in np.unique(ids[ids != 0]):
            tokens = row[ids == document]
            if len(tokens) < 2:
                continue
            logits = peer.logits(tokens[:-1]).astype(np.float64)
            top = logits.max(-1, keepdims=True)
            lse = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
            total += float((lse - logits[np.arange(len(logits)), tokens[1:]]).sum())
            count += len(logits)
    return total / count


def ring_logits(folder: Path, ids: np.ndarray, dtype: str) -> np.ndarray:
    """float32 ``[T, V]`` of one sequence, by the folder loaded on all devices."""
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("seq",), axis_types=(AxisType.Auto,))
    model = load(
        folder, mesh=mesh, rules=burst_jax.ShardingRules.of(mesh), layout="zigzag",
        dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype), **model_folder.attention_for(dtype),
    )  # fmt: skip
    graphdef, params = nnx.split(model)
    at = burst_jax.positions("zigzag", len(ids), n)

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return model.unembed(model(tokens, at)).astype(jnp.float32)

    logits = run(params, jnp.asarray(np.asarray(ids, np.int32)[None, at]))
    found = np.empty(logits.shape[1:], np.float32)
    found[at] = np.asarray(logits[0])
    return found


def check_logits(folder: Path, ids: np.ndarray) -> dict[str, float]:
    """Compares logits in float32 and bfloat16; raises AssertionError."""
    truth = Peer(folder).logits(ids)
    allowed = BFLOAT16_FACTOR * relative_rms(Peer(folder, "bfloat16").logits(ids), truth)
    with jax.default_matmul_precision("highest"):
        float32 = relative_rms(ring_logits(folder, ids, "float32"), truth)
    bfloat16 = relative_rms(ring_logits(folder, ids, "bfloat16"), truth)
    print(f"logits: float32 {float32:.1e}, bfloat16 {bfloat16:.1e} of at most {allowed:.1e}")
    if not float32 <= FLOAT32_RMS:
        raise AssertionError(f"float32 logits differ by {float32:.1e}, at most {FLOAT32_RMS:.0e}")
    if not bfloat16 <= allowed:
        raise AssertionError(f"bfloat16 logits differ by {bfloat16:.1e}, at most {allowed:.1e}")
    return {"float32 logits": float32, "bfloat16 logits": bfloat16}


def check_loss(options: list[str], out: Path, original: Path, tuned: Path) -> float:
    """Compares the script's held-out loss with transformers'; raises AssertionError."""
    reported = json.loads((out / "summary.json").read_text())["ring"]["nll"]
    rows = held_out(options)
    before, after = (
        loss_by_peer(Peer(folder), rows["rows"], rows["segment_ids"])
        for folder in (original, tuned)
    )
    print(f"loss: {before:.4f} before, {after:.4f} after; train_lm.py says {reported:.4f}")
    if not before - after > LEARNED:
        raise AssertionError(f"the loss fell from {before:.4f} to {after:.4f} only")
    if not abs(after - reported) <= SAME_LOSS:
        raise AssertionError(f"train_lm.py reports a loss of {reported:.4f}, not {after:.4f}")
    return abs(after - reported)


def check_settings(original: Path, tuned: Path) -> None:
    """Compares generation settings and chat templates; raises AssertionError."""
    want, found = stop_settings(original), stop_settings(tuned)
    different = {k: (want.get(k), found.get(k)) for k in want if want.get(k) != found.get(k)}
    if different:
        raise AssertionError(f"the export has other generation settings: {different}")


def main(argv: list[str] | None = None) -> int:
    """Makes the model, fine-tunes and compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="an empty folder")
    parser.add_argument("--small", action="store_true", help="sizes for CPUs")
    args = parser.parse_args(argv)
    size = model_folder.SMALL if args.small else model_folder.Size()
    original = model_folder.write_model(args.out / "original", size)
    text = model_folder.write_texts(args.out / "text")
    length = 256 if args.small else 4096
    options = shlex.split(
        f"--model {original} --data {text} --out {args.out / 'run'} --seq-len {length} --batch 2 "
        "--lora-rank 8 --lora-alpha 16 --lr 1e-2 --steps 30 --eval-batches 1 --sample-tokens 0 "
        "--checkpoint-every 0"
    )
    train(options)  # As users do.
    model_folder.compile_quickly()
    tuned = args.out / "run" / "model"
    figure = {"loss off by": check_loss(options, args.out / "run", original, tuned)}
    ids = np.random.default_rng(0).integers(3, model_folder.VOCABULARY, length // 2)
    figure |= check_logits(tuned, ids)
    check_settings(original, tuned)
    print(f"figure: {json.dumps({name: float(f'{x:.1e}') for name, x in figure.items()})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
