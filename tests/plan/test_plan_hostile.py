"""Hostile files of the planner's command line; see support/hostile.py."""

from __future__ import annotations

import json

import hostile
import numpy as np
from hostile import check, check_all

from burst_jax.plan.__main__ import main


class Ended(ValueError):
    """The command ended with an error: its message."""


def planned(capsys, *options):
    """Runs the command; raises Ended with its one line on stderr."""
    code = 0
    try:
        main(["--length", "4K", "--gpus-per-host", "2", *options])
    except SystemExit as end:
        code = end.code
    lines = capsys.readouterr().err.splitlines()
    assert (code, len(lines)) in ((0, 0), (2, 1)), lines
    if code:
        raise Ended(lines[0])


def valid_and_special(file, content, call):
    """The results of the valid content, and of what is no regular file."""
    file.write_bytes(content)
    yield check("valid", call)
    with hostile.special_files(file) as found:
        for name in found:
            yield check(f"a {name}", call, (file.name,), rejected=True)


def test_block_masks(tmp_path, capsys):
    file = tmp_path / "mask.npy"

    def call():
        planned(capsys, "--block-mask", str(file))

    def results():
        for case in hostile.array_cases():
            file.write_bytes(case.content)
            yield check(case.name, call, ((file.name, "--block-mask"),), rejected=True)
        mask = hostile.saved(np.eye(4, dtype=bool))
        for end in range(0, len(mask), 7):
            file.write_bytes(mask[:end])
            yield check(f"{end} bytes", call, (file.name,), rejected=True)
        rng = np.random.default_rng(0)
        for draw in range(300):
            changed = bytearray(mask)
            for at in rng.integers(0, len(mask), rng.integers(1, 4)):
                changed[at] = rng.integers(0, 256)
            file.write_bytes(changed)
            yield check(f"draw {draw}", call, ((file.name, "--block-mask"),))
        for wrong in ([[1, 0]], [[1.0]], True, [], [[[[True]]]], [["a"]], [[True] * 3] * 4):
            file.write_bytes(hostile.saved(np.array(wrong)))
            yield check(f"{wrong}", call, ("--block-mask has ",), rejected=True)
        yield from valid_and_special(file, mask, call)

    with hostile.unchanged(tmp_path, file):
        check_all(results(), 350)


def test_documents(tmp_path, capsys):
    file = tmp_path / "lengths.json"
    wrong = set(hostile.VALUES) - {"missing"}

    def call():
        planned(capsys, "--documents", str(file))

    def results():
        valid = [[900, 300], [1200]]
        rules = {"0": wrong - {"empty", "list"}, "0.1": wrong, "1.0": wrong}
        rules = {f"batch.{path}": each for path, each in rules.items()}
        for case in hostile.json_cases({"batch": valid}, rules):
            file.write_bytes(case.content[len('{"batch": ') : -1])
            yield check(case.name, call, ((file.name, "batch"),), rejected=case.rejected)
        for case in hostile.text_cases(json.dumps(valid).encode()):
            file.write_bytes(case.content)
            yield check(case.name, call, ((file.name, "batch"),), rejected=True)
        yield from valid_and_special(file, json.dumps(valid).encode(), call)

    with hostile.unchanged(tmp_path, file):
        check_all(results(), 80)
