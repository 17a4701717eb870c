"""``benchmarks decode``: checked tiles, and bytes read per second."""

from __future__ import annotations

from typing import Any

import interpreted_sm80
import jax.numpy as jnp

from benchmarks import decode
from benchmarks.__main__ import main

OPTIONS = (
    "--lengths 100 --batch 1 --queries 3 --heads 4 --kv-heads 2 --head-dim 16 "
    "--block-kv 64 --stages 3 2 --splits 1"
)


def test_every_right_tile_is_timed(capsys, monkeypatch):
    seconds, kernel = 1e-7, decode.attend_by_kernel

    def wrong_with_two_stages(*arrays, **options):
        found = kernel(*arrays, **options)
        factor = jnp.where(options["config"].stages == 2, 1.1, 1)
        return found._replace(total=factor * found.total)

    monkeypatch.setattr(decode, "attend_by_kernel", wrong_with_two_stages)
    monkeypatch.setattr(decode, "require_gpus", lambda *_: None)
    monkeypatch.setattr(decode, "_CALLS", 1)
    monkeypatch.setattr(decode, "median_time", lambda _: seconds)
    attend: Any = decode._attend
    attend.clear_cache()  # Traces of the compiled kernel.
    with interpreted_sm80.interpreted():
        main(["decode", *OPTIONS.split()])
    head, *rows, wrong = capsys.readouterr().out.splitlines()
    assert head == "100 keys, 4 / 2 heads, 3 queries"
    assert [row.split("us  ")[1] for row in rows] == [
        "copy, read and written", "XLA's matmuls", "block_kv 64 stages 3 splits 1",
    ]  # fmt: skip
    read = 2 * 100 * 2 * 16 * 2 / seconds / 1e9
    assert [row.split()[0] for row in rows] == [f"{x:.0f}" for x in (2 * read, read, read)]
    assert "GB/s" not in wrong
    assert "block_kv 64 stages 2 splits 1: wrong by 0.09" in wrong
