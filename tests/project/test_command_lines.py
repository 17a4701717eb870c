"""Command lines: wrong options end with 2 and one line that names them."""

from __future__ import annotations

import re

import compare_runs
import draw_ring
import generate
import linen_model
import perplexity
import pytest
import run_options

from benchmarks import __main__ as benchmarks
from burst_jax.plan import __main__ as plan
from burst_jax.verify import __main__ as verify

NUMBERS = ("", "x", "-1", "1.5", "nan", "1e9", "9" * 5000, "\x1b[31m7", "99999999999")
FRACTIONS = ("", "x", "-1", "nan", "inf", "1e999", "\x1b[31m7")
MESHES = (
    "", "seq", "seq=", "=2", "seq=0", "seq=-1", "seq=99999999999", "seq=1e3", "seq=1,seq=1", ",",
    "outer=2", "\x1b[31m=2", "seq=2,", "fsdp=3,seq=3", "x" * 5000, "seq=" + "9" * 5000,
)  # fmt: skip
CHOICES = ("", "x", "\x1b[31m")
PATHS = ("", "nowhere", "{tmp}/file/x", "x" * 5000, "\x1b[31m")
MODEL = {
    "--model": PATHS, "--mesh": MESHES, "--batch": ("0", "3", *NUMBERS), "--seq-len": NUMBERS,
    "--layout": ("striped:0", *CHOICES), "--dtype": CHOICES, "--implementation": CHOICES,
}  # fmt: skip


def prepare(given):
    """train_lm.py up to its training."""
    args, parser = run_options.parse_args(given)
    try:
        run_options.prepare(args)
    except (ValueError, OSError, NotImplementedError) as error:
        parser.error(str(error))


# Its own axes. Adapters need a model: test_fine_tuning.py.
TRAIN: dict[str, tuple[str, ...]] = {
    "--mesh": ("bogus=2", "seq=2;tensor=2", *(mesh for mesh in MESHES if mesh != "outer=2"))
}
for names, values in (
    (run_options.AT_LEAST_1, ("0", *NUMBERS)),
    (run_options.AT_LEAST_0, NUMBERS),
    (("lr", "stall_timeout"), ("0", "", "x", "-1", "nan", "inf")),
):
    for name in map(run_options.flag, names):
        if name != "--lora-rank":
            TRAIN[name] = (*TRAIN.get(name, ()), *values)
for name, most in run_options.AT_MOST.items():
    TRAIN[run_options.flag(name)] += (str(most + 1),)
NAMED = ("--tokenizer", "--model", "--out", "--checkpoint-dir")
SIZES = {f"--{name}": NUMBERS for name in ("lengths", "layers")}
OUTPUTS = {"--png": ("x", "x.json")}
# Program: (main, options that are right, option -> values that are wrong).
PROGRAMS = {
    "generate": (
        generate.main,
        ["--model={tmp}", "--prompt=x", "--mesh=seq=2"],
        {name: values for name, values in MODEL.items() if name not in ("--batch", "--seq-len")}
        | dict.fromkeys(("--max-new-tokens", "--top-k", "--seed", "--prefill-chunk"), NUMBERS)
        | dict.fromkeys(("--temperature", "--top-p"), FRACTIONS)
        | {"--top-p": ("2", *FRACTIONS), "--adapter": PATHS, "--prompt-file": PATHS},
    ),
    "perplexity": (
        perplexity.main,
        ["--model={tmp}", "--data={tmp}", "--mesh=data=2"],
        MODEL | {"--stride": NUMBERS, "--adapter": PATHS, "--out": ("", "{tmp}/file/x")},
    ),
    "verify": (
        verify.main,
        ["--model={tmp}", "--mesh=data=2", "--json={tmp}/report.json"],
        MODEL
        | {"--seq-len": ("7", "1025", *NUMBERS), "--seed": NUMBERS}
        | {"--json": ("", "{tmp}", "{tmp}/file/x", "x" * 5000)},
    ),
    "plan": (
        plan.main,
        ["--length=64K"],
        dict.fromkeys(("--hosts", "--gpus-per-host", "--batch", "--heads", "--kv-heads"), NUMBERS)
        | dict.fromkeys(("--length", "--window", "--chunk"), ("0", "9G", *NUMBERS))
        | {"--host-link": ("0", *FRACTIONS), "--gpu": CHOICES, "--moments": CHOICES}
        | {"--block-mask": PATHS, "--model": ("gpt", "{tmp}"), "--json": ("{tmp}/file/x", "{tmp}")},
    ),
    "train": (benchmarks.main, ["train"], SIZES | {"--steps": NUMBERS, "--shape": CHOICES}),
    "serve": (benchmarks.main, ["serve"], SIZES | {"--new": NUMBERS, "--strategies": CHOICES}),
    "decode": (benchmarks.main, ["decode"], dict.fromkeys(("--queries", "--splits"), NUMBERS)),
    "kernels": (benchmarks.main, ["kernels"], {"--cases": NUMBERS, **OUTPUTS}),
    "ring": (benchmarks.main, ["ring"], {"--strategies": CHOICES, **OUTPUTS}),
    "loss": (benchmarks.main, ["loss"], {"--tokens": NUMBERS, "--dtype": CHOICES}),
    "plot": (benchmarks.main, ["plot", "{tmp}/file"], {"OUT.png": ("x",)}),
    "compare_runs": (compare_runs.main, ["{tmp}"], {"": ("nowhere", "x" * 5000)}),
    "draw_ring": (draw_ring.main, [], {"": ("{tmp}/file/x", "x" * 5000)}),
    "train_lm": (
        prepare,
        ["--data={tmp}/file", "--out={tmp}/out", "--mesh=seq=2", "--seq-len=64"],
        TRAIN | {"--data": PATHS, **dict.fromkeys(NAMED, ("",))},
    ),
    "linen_model": (linen_model.main, [], {"--steps": ("0", *NUMBERS)}),
}  # fmt: skip
# As errors of the library name an option, or what it misses.
ALIASES = {
    "--model": "config.json|model is", "--length": "length is", "--out": "file/x",
    "--data": "--data is|too long", "": "metrics.jsonl|file/x|too long",
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_wrong_options(program, tmp_path, capsys):
    (tmp_path / "file").write_text("some text\n" * 3000)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}')
    before = sorted(tmp_path.rglob("*"))
    main, right, wrong = PROGRAMS[program]
    cases = [(name, value) for name, values in wrong.items() for value in values]
    if not {"", "OUT.png"} & set(wrong):  # Those miss another option then.
        cases += [("--no-such\x1b[31m", "1"), ("--la", "x")]
    failed = []
    for name, value in cases:
        value = value.replace("{tmp}", str(tmp_path))
        given = [x.replace("{tmp}", str(tmp_path)) for x in right]
        given += [f"{name}={value}"] if name.startswith("--") else [value]
        try:
            main(given)
            code = None
        except SystemExit as end:
            code = end.code
        except Exception as error:
            code = error
        lines = capsys.readouterr().err.splitlines()
        shown = value.encode("unicode_escape").decode()[:100]
        named = f"{re.escape(name.partition('\x1b')[0])}|{ALIASES.get(name, '-')}"
        if code != 2 or len(lines) != 1 or shown not in lines[0] or not re.search(named, lines[0]):
            failed.append(f"{name}={value[:20]!r}: {code!r}, {[line[:300] for line in lines]}")
    assert not failed, "\n".join(failed)
    assert sorted(tmp_path.rglob("*")) == before
