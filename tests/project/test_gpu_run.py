"""``make gpu``: its script on processes that pass, fail and hang, and its parts on CPU devices."""

from __future__ import annotations

import concurrent.futures
import json
import time
from pathlib import Path

import drawn_rings
import pytest
import ring_draws
import run_parts as gpu_run

SCRIPT = Path(__file__).parents[1] / "gpu" / "run_parts.py"
HOPPER = {"count": 2, "platform": "gpu", "kind": "H100", "capability": "9.0", "jax": "0.12"}
AMPERE = HOPPER | {"kind": "A100", "capability": "8.0"}


def part(name, *codes, limit=60.0, **options):
    return gpu_run.Part(name, [["-c", code] for code in codes], limit, **options)


def run(tmp_path, *parts, limit=60.0, jobs=2):
    """The exit status and the lines."""
    lines = []
    status = gpu_run.run_parts(
        parts, out=tmp_path, jobs=jobs, limit=limit, small=True, write=lines.append
    )
    return status, lines


def test_every_part_has_a_line_with_its_figures(tmp_path):
    figures = ({"rings": 3, "error": 0.5}, {"rings": 4, "error": 0.25})
    adds = [f"print('figure: {json.dumps(each)}')" for each in figures]
    trains = "print('  relative difference 1.5e-06')"
    local = "print('drawn calls: %d right (mosaic_sm90 38), 1 wrong, 1 not started in time, 9 s')"
    locals_ = [local.replace("%d", str(right)) for right in (30, 8)]
    status, lines = run(
        tmp_path, part("rings", *adds), part("training", trains), part("local", *locals_)
    )
    assert status == gpu_run.PASSED
    found = {line.split()[0]: line for line in lines}
    assert len(lines) == len(found) == 3
    assert "passed" in found["rings"]
    assert found["rings"].endswith(" s  7 rings, error 0.5")
    assert found["training"].endswith(" s  1 comparisons, perplexities differ by 1.5e-06")
    assert found["local"].endswith(" s  40 programs, 2 wrong")


def test_a_failed_part_shows_its_end_and_stops_no_other(tmp_path):
    fails = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit('what is wrong')"
    status, lines = run(tmp_path, part("bad", "pass", fails), part("good", "pass"), jobs=1)
    assert status == gpu_run.FAILED
    assert [line.split()[:2] for line in lines if line[0] != " "] == [
        ["good", "passed"], ["bad", "failed"],  # Second processes start last.
    ]  # fmt: skip
    at = lines.index("  exit status 1; the end of its output:")
    shown = lines[at + 1 : at + 41]
    assert shown[0] == "  | 61"
    assert shown[-1] == "  | what is wrong"
    # All of it is kept.
    assert (tmp_path / "bad_1.log").read_text().startswith("0\n1\n")


def test_a_part_and_its_children_end_at_their_limit(tmp_path):
    child = tmp_path / "child"
    hangs = (
        "import subprocess, sys, time; print('began', flush=True)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    start = time.monotonic()
    status, lines = run(tmp_path, part("hangs", hangs, limit=3), part("good", "pass"))
    assert time.monotonic() - start < 30
    assert status == gpu_run.FAILED
    assert lines[-2:] == ["  ended after 3 s, its limit; the end of its output:", "  | began"]
    state = Path(f"/proc/{child.read_text()}/status")

    def is_dead():
        """Also as a zombie that its new parent has not collected."""
        try:
            return "State:\tZ" in state.read_text()
        except OSError:
            return True

    # A process that has been killed ends when it is scheduled next.
    end = time.monotonic() + 30
    while not is_dead() and time.monotonic() < end:
        time.sleep(0.05)
    assert is_dead()


def test_what_the_whole_run_has_no_time_for_is_a_failure(tmp_path):
    sleeps = "import time; time.sleep(600)"
    status, lines = run(tmp_path, part("first", sleeps), part("second", "pass"), limit=2, jobs=1)
    assert status == gpu_run.FAILED
    assert [line.split()[1] for line in lines if line[0] != " "] == ["failed", "failed"]
    assert (
        "  the time of the whole run was over before it could start: second_0.log; the end of"
        in ("\n".join(lines))
    )


def test_drawn_programs_fill_the_time_and_must_be_enough(tmp_path):
    """The option ends them in time; processes that would start too late are no failure."""
    draws = (
        "import sys; option, minutes = sys.argv[-2:]; assert option == '--minutes'\n"
        "assert 0.7 < float(minutes) < 1.1, minutes\n"
        'print(\'figure: {"rings": 2, "wrong": 0}\')'
    )
    enough, few = (
        part(name, draws, draws, least={"rings": n}, draws=True)
        for name, n in (("enough", 4), ("few", 5))
    )
    limit = 124.0  # Programs start in the first half.
    status, lines = run(tmp_path, enough, few, limit=limit, jobs=4)
    assert status == gpu_run.FAILED
    found = {line.split()[0]: line for line in lines}
    assert found["enough"].split()[1] == "passed", lines
    assert found["enough"].endswith(" s  4 rings, 0 wrong")
    assert found["few"].split()[1] == "failed"
    assert "  only 4 of at least 5 rings: set --limit for more time" in lines
    status, lines = run(tmp_path, part("late", "raise SystemExit(1)", draws=True), limit=60)
    assert (status, lines[0].split()[1]) == (gpu_run.PASSED, "passed")
    status, lines = run(tmp_path, part("late", "pass", draws=True, least={"rings": 1}), limit=60)
    assert status == gpu_run.FAILED
    assert lines[1].startswith("  only 0 of at least 1 rings")


def test_processes_share_the_numbers_of_draws(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: drawn_rings.take(tmp_path / "next"), range(100)))
    assert sorted(found) == list(range(100))


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_the_rings_that_must_run_have_every_layout_and_mask(tmp_path, devices):
    parts = gpu_run.parts_of(HOPPER, tmp_path, False, 3)
    least = {part.least["rings"] for part in parts if part.name.startswith("rings")}
    assert least == {9}
    drawn = [ring_draws.draw_ring("mosaic_sm90", i, devices) for i in range(9)]
    assert {ring.layout for ring in drawn} == set(ring_draws.LAYOUTS)
    assert {ring.mask for ring in drawn} == set(ring_draws.MASKS)


def test_a_part_that_cannot_run_is_no_silent_pass(tmp_path):
    lacks = part("peer", "pass", needs=("json", "no_such_package"))
    status, lines = run(tmp_path, lacks, part("good", "pass"))
    assert status == gpu_run.NOT_RUN == 3
    assert "peer                         not run: needs no_such_package (pip install them)" in lines
    assert any(line.startswith("good") and "passed" in line for line in lines)
    # A failure is worse, in any order.
    bad = part("bad", "raise SystemExit(3)")
    assert run(tmp_path, lacks, bad)[0] == run(tmp_path, bad, lacks)[0] == gpu_run.FAILED


def test_the_parts_of_each_gpu(tmp_path):
    def names(devices):
        return [each.name for each in gpu_run.parts_of(devices, tmp_path, False, 3)]

    others = ["fine-tuning with LoRA", "generation"]
    # What users run comes first: few processes run at once.
    first = ["training", *others, "decoding kernels"]

    def of_kernels(*families):
        rings = [f"rings, {family}" for family in families]
        kinds = ("local calls", "linear attention")
        return rings + [f"{kind}, {family}" for family in families for kind in kinds]

    assert names(HOPPER) == first + of_kernels("mosaic_sm90", "mosaic_sm80")
    assert names(AMPERE) == first + of_kernels("mosaic_sm80")
    for each in gpu_run.parts_of(HOPPER, tmp_path, False, 3):
        assert all(Path(command[0]).exists() or command[0] == "-m" for command in each.commands)
        assert each.draws or 0 < each.limit < 450
        assert len(each.commands) == (3 if each.draws else 1)


def test_processes_share_a_gpu_s_memory(tmp_path):
    env = gpu_run.environment(False, 0.07)
    assert (env["XLA_PYTHON_CLIENT_PREALLOCATE"], env["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == (
        "false", "0.070",
    )  # fmt: skip
    shows = "import os; print('figure: {\"cpus\": %s}' % os.environ['JAX_NUM_CPU_DEVICES'])"
    assert run(tmp_path, part("env", shows))[1][0].endswith("4 cpus")


def test_mistakes(tmp_path, capsys, monkeypatch):
    """No GPU, and no part of that name."""
    out = ["--out", str(tmp_path / "out")]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpu_run.main(out) == gpu_run.MISUSED
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: JAX finds no GPU here, but cpu: install jax[cuda13], or")
    # Another process has no need to find the devices again.
    monkeypatch.setattr(gpu_run, "find_devices", lambda _: HOPPER | {"platform": "cpu"})
    for options, message in (
        (["--small", "nothing"], "no part has ['nothing'] in its name: training, fine-tuning"),
        (["--jobs", "0"], "--jobs is 0, --limit 450: both must be positive"),
    ):
        with pytest.raises(SystemExit, match="2"):
            gpu_run.main([*options, *out])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_rings_and_training_on_cpu_devices(tmp_path, capsys):
    """The parts that need no further package, in their smallest form."""
    options = ["--small", "--limit", "900", "--out", str(tmp_path / "out"), "rings", "training"]
    assert gpu_run.main(options) == gpu_run.PASSED, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 x cpu, JAX ")
    assert {line.split()[0] for line in lines[1:-1]} == {"rings,", "training"}
    assert lines[-1].startswith("all passed, ")
    assert next(line for line in lines if line.startswith("rings")).count(" 3 rings, 0 wrong") == 1
