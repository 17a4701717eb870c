"""Hostile records and loader states: an answer, or an error that names the file and the
key, within a second; nothing outside of the given folders changes."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
from data_files import loader_of, write_arrays
from hostile import VALUES, Case, check, check_all, json_cases, special_files, text_cases, unchanged

from burst_jax.data import merge_states, open_corpus
from burst_jax.json_files import parse
from burst_jax.training import Checkpoints
from burst_jax.training.checkpoint_files import read_record

X = {"x": jnp.ones(8)}
ALL = frozenset(VALUES)
# All but a count, which may be 0.
COUNTS = ALL - {"zero", "huge"}
# Names of files that are not within a checkpoint, or not one file's name there.
OUTSIDE = (
    "../secret", "../../run/1/record.json", "/etc/hostname", "d/../../secret", "..", "d/..", "",
    "./_METADATA", "d//x", "_METADATA/", "//etc/hostname", "_METADATA\0",
)  # fmt: skip


def signed(content: bytes) -> bytes:
    """A record with its hash, as somebody writes it who means harm."""
    return content + b"\n" + hashlib.blake2b(content + b"\n").hexdigest().encode() + b"\n"


def test_records(tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "secret").write_text("mine")
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, X, {"arguments": {}})
    record = folder / "1" / "record.json"
    content = record.read_bytes()
    valid = json.loads(content.splitlines()[0])

    def cases():
        rejected = {
            "arrays": ALL,
            "arrays.x": ALL,
            "arrays.x.0": ALL,
            "arrays.x.0.0": ALL,
            "arrays.x.1": ALL,
            "extra": {"missing", "digits", "deep-list"},
            "files": ALL,
            "files._METADATA": ALL - {"missing"},
            "files._METADATA.0": ALL,
            "files._METADATA.1": ALL,
        }
        also = {path: path.split(".") for path in rejected}
        yield from (*json_cases(valid, rejected, also), *text_cases(json.dumps(valid).encode()))
        for name in OUTSIDE:
            files = {**valid["files"], name: valid["files"]["_METADATA"]}
            text = json.dumps(valid | {"files": files}).encode()
            yield Case(f"files has {name!r}", text, (("no path within",),), True)

    def results():
        for case in cases():
            record.write_bytes(signed(case.content))
            names = (str(folder / "1"), *case.names)
            with Checkpoints(folder) as reader:
                restore = partial(reader.restore, X)
                yield check(case.name, restore, names, rejected=case.rejected)
        for case in text_cases(content):  # Without a hash.
            record.write_bytes(case.content)
            with Checkpoints(folder) as reader:
                yield check(case.name, partial(reader.restore, X), (str(record.parent),))
        record.write_bytes(content)
        for path in (record, folder / "1" / "manifest.ocdbt"):
            with special_files(path) as names:
                for name in names:
                    wanted = (str(folder / "1"), path.name)
                    restore = partial(Checkpoints(folder).restore, X)
                    yield check(f"{path.name}: {name}", restore, wanted, rejected=True)

    with unchanged(tmp_path, record):
        check_all(results(), at_least=270)
    # Neither is what such a record names removed.
    files = {**read_record(folder / "1").files, "notes/../../../secret": (4, "")}
    record.write_bytes(signed(json.dumps(valid | {"files": files}).encode()))
    written = folder / "2", folder / ".checkpoints.lock"  # The lock names its owner.
    with unchanged(tmp_path, *written), Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(2, X)


@pytest.mark.parametrize("packing", ["first_fit", "split"])
def test_states_of_a_loader(tmp_path, packing):
    corpus = open_corpus(write_arrays(tmp_path / "arrays"))
    with loader_of(corpus, batch=2, packing=packing, prefetch=0) as loader:
        for _ in range(3):
            next(loader)
        valid = loader.get_state()
        after = next(loader)["rows"]
        rejected = {
            **dict.fromkeys(("options", "options.seed", "rows", "rows.0"), ALL - {"zero"}),
            "version": ALL - {"true"},
            "step": COUNTS,
        }

        def add(path: str, value: Any) -> None:
            if isinstance(value, dict):
                rejected[path] = ALL
                for key, each in value.items():
                    add(f"{path}.{key}", each)
            elif isinstance(value, list | tuple):
                rejected[path] = ALL
                for index, each in enumerate(value):
                    add(f"{path}.{index}", each)
            else:
                rejected[path] = COUNTS - ({"negative"} if "slices" in path else set())

        add("rows.0", valid["rows"]["0"])
        also = {path: path.split(".") for path in rejected}

        def use(content: bytes) -> None:
            state = parse(content, "state")
            merge_states([state])
            loader.set_state(state)
            next(loader)

        cases = (*json_cases(valid, rejected, also), *text_cases(json.dumps(valid).encode()))
        check_all(
            (
                check(case.name, partial(use, case.content), ("state", *case.names),
                      rejected=case.rejected)
                for case in cases
            ),
            at_least=200,
        )  # fmt: skip
        loader.set_state(valid)
        assert (next(loader)["rows"] == after).all()
