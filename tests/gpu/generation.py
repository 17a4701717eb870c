"""Generates with a KV cache sharded over all devices, and compares the tokens with transformers'.

Greedy tokens in float32 are equal, after prompts that lead to no near tie. In bfloat16 every token
is the most probable one by transformers, up to the error of transformers' own bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model_folder
import numpy as np
from jax.sharding import AxisType
from peer import Peer

import burst_jax
from burst_jax.models import load
from burst_jax.serving import Generator

# The most probable token leads by this at every step, relative to the largest logit; rounding in
# float32 moves logits by a tenth of it at most.
MARGIN = 1e-3
SEEDS = 20
# Of the largest error of transformers' own bfloat16.
BFLOAT16_FACTOR = 3.0


def clear_prompt(peer: Peer, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A prompt of random tokens after which no two tokens nearly tie, and the tokens."""
    for seed in range(SEEDS):
        rng = np.random.default_rng((length, seed))
        prompt = rng.integers(3, model_folder.VOCABULARY, length).astype(np.int32)
        tokens, lead = peer.greedy(prompt, count)
        if lead > MARGIN:
            return prompt, tokens
    raise RuntimeError(f"each of {SEEDS} prompts of {length} tokens leads to a near tie")


def generated(folder: Path, prompts: list[np.ndarray], count: int, dtype: str) -> np.ndarray:
    """int32 ``[B, count]``: a batch of prompts, prefilled in chunks."""
    mesh = jax.make_mesh((jax.device_count(),), ("seq",), axis_types=(AxisType.Auto,))
    options: Any = {"mesh": mesh, "rules": burst_jax.ShardingRules.of(mesh), "layout": "zigzag"}
    options |= model_folder.attention_for(dtype)
    model = load(folder, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype), **options)
    longest = max(map(len, prompts))
    # Two chunks: the first has no cache to read.
    server = Generator(
        model, max_length=longest + count, batch=len(prompts), prefill_chunk=-(-longest // 2)
    )
    return np.stack(list(server.generate(prompts, count)), axis=1)


def check_bfloat16(folder: Path, prompts: list[np.ndarray], tokens: np.ndarray) -> float:
    """The largest lead that transformers gives another token, over what is allowed."""
    peers = Peer(folder), Peer(folder, "bfloat16")
    worst = 0.0
    for prompt, row in zip(prompts, tokens, strict=True):
        ids = np.concatenate([prompt, row[:-1]])
        truth, low = (peer.logits(ids)[len(prompt) - 1 :] for peer in peers)
        behind = truth.max(-1) - truth[np.arange(len(row)), row]
        worst = max(worst, float(behind.max() / (BFLOAT16_FACTOR * np.abs(low - truth).max())))
    return worst


def main(argv: list[str] | None = None) -> int:
    """Makes the model, generates and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="an empty folder")
    parser.add_argument("--small", action="store_true", help="sizes for CPUs")
    args = parser.parse_args(argv)
    model_folder.compile_quickly()
    size = model_folder.SMALL if args.small else model_folder.Size()
    folder = model_folder.write_model(args.out / "model", size)
    lengths, count = ((300, 170), 8) if args.small else ((4001, 2300), 64)
    began, peer = time.monotonic(), Peer(folder)

    def log(what: str) -> None:
        print(f"{what}: {time.monotonic() - began:.0f} s since the start", flush=True)

    prompts, want = zip(*(clear_prompt(peer, n, count) for n in lengths), strict=True)
    log("tokens by transformers")
    with jax.default_matmul_precision("highest"):
        found = generated(folder, list(prompts), count, "float32")
    log("float32")
    for row, (expected, got) in enumerate(zip(want, found, strict=True)):
        if not np.array_equal(expected, got):
            at = int(np.flatnonzero(expected != got)[0])
            raise AssertionError(
                f"sequence {row}: float32 token {at} is {got[at]}, by transformers {expected[at]}"
            )
    low = generated(folder, list(prompts), count, "bfloat16")
    log("bfloat16")
    worst = check_bfloat16(folder, list(prompts), low)
    if not worst <= 1:
        raise AssertionError(f"a bfloat16 token is behind the best by {worst:.2f} of the allowed")
    figure = {"equal tokens": found.size, "bfloat16 lead over allowed": round(worst, 2)}
    print(f"figure: {json.dumps(figure)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
