"""Compares the ways to split one attention over a cluster: ``python -m burst_jax.plan``."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from burst_jax.bench.results import replacing
from burst_jax.plan import GPUS, plan

_UNITS = {"": 1, "K": 2**10, "M": 2**20}


def tokens(text: str) -> int:
    """A number of tokens: 65536, 64K, 1M."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens: 65536, 64K, 1M")
    return int(found.group(1)) * _UNITS[found.group(2)]


def main(arguments: list[str] | None = None) -> None:
    """Prints the plan."""
    parser = argparse.ArgumentParser(
        prog="python -m burst_jax.plan", description="Compares the ways to split one attention."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--length", type=tokens, help="tokens: 65536, 64K, 1M")
    what.add_argument(
        "--measured", action="store_true", help="instead: measured rings beside the model's"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--gpu", default="h200", choices=sorted(GPUS))
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--gpus-per-host", type=int, default=8)
    parser.add_argument(
        "--host-link", type=float, default=50.0, help="GB/s of one GPU to another host"
    )
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--window", type=tokens, help="local_window_size, to the left")
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write all of it here, too, with the recommended mesh and arguments; - is stdout",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    if args.measured:
        if args != parser.parse_args(["--measured"]):
            parser.error("--measured takes no other option: the runs are as they are")
        from burst_jax.plan import measured  # It needs the benchmark, which a plan does not.

        print("\n\n".join(map(measured.table, measured.load())))
        return
    try:
        found = plan(
            length=args.length,
            batch=args.batch,
            num_heads=args.heads,
            num_kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            gpu=args.gpu,
            hosts=args.hosts,
            gpus_per_host=args.gpus_per_host,
            host_link=args.host_link,
            is_causal=not args.full,
            local_window_size=None if args.window is None else (args.window, 0),
        )
    except ValueError as error:
        raise SystemExit(str(error)) from error
    text = json.dumps(found.record(), indent=1, allow_nan=False)
    if args.json == Path("-"):
        print(text)
        return
    if args.json is not None:
        try:
            with replacing(args.json) as file:
                file.write_text(text + "\n")
        except OSError as error:
            raise SystemExit(f"--json: {error}") from error
    print(found)


if __name__ == "__main__":
    main()
