"""Runs kernels that are compiled for an A100 on a newer GPU.

Triton uses Hopper's matrix instructions when it compiles for Hopper, so times on a Hopper GPU do
not carry over to an A100. The driver can assemble PTX of an older GPU for a newer one: a kernel
compiled for an A100 then runs with the A100's instructions (``mma.sync``, ``cp.async``) and tiles.
FlashAttention-2 in torch uses the same instructions, and is timed for comparison.

This shows whether tiles are right, and how many instructions one kernel needs, and how well they
overlap, relative to another kernel. It does not show times of an A100, which has 108 SMs at 1.41
GHz, 40 MB of L2 cache and 2 TB/s, and slower matrix units relative to the rest of the SM.

``benchmarks ampere`` times the Mosaic kernels, which are compiled on the spot. Triton kernels are
compiled before: ``benchmarks ampere --compile FOLDER`` needs the CUDA plugin, but no GPU;
``benchmarks ampere FOLDER`` runs them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import utils
from jax.extend.core import Literal

import burst_jax
from benchmarks.command_line import require_gpus
from benchmarks.driver import Driver, Kernel, Launch
from benchmarks.kernels import Case
from pallas_kernels import AttentionInputs, KVSide, QuerySide, mosaic_sm80, triton
from pallas_kernels.pallas_triton.configs import TritonConfig, triton_configs
from pallas_kernels.timing import median_time, relative_error

# Number of matmuls over T, S and H in each kernel.
MATMULS = {"forward": 2, "dq": 3, "dkv": 4}


CASES = (
    Case("full", 1, 16384, 32, 32, 128, False),
    Case("causal", 1, 16384, 32, 32, 128, True),
    Case("causal, 32/8 heads", 1, 16384, 32, 8, 128, True),
    Case("full, head dim 64", 4, 4096, 32, 32, 64, False),
    Case("causal, head dim 64", 4, 4096, 32, 32, 64, True),
)
# Timed next to FlashAttention-2 only.
FURTHER = (
    Case("full, 4K", 1, 4096, 32, 32, 128),
    Case("causal, 4K", 1, 4096, 32, 32, 128, True),
    Case("causal, head dim 96", 1, 16384, 32, 32, 96, True),
    Case("causal, head dim 256", 1, 16384, 16, 16, 256, True),
    Case("causal, head dims (192, 128)", 1, 16384, 32, 32, 192, True, value_dim=128),
    Case("window 4096 of 64K, 32/8 heads", 1, 65536, 32, 8, 128, True, window=4096),
    Case("8 documents, causal", 1, 16384, 32, 32, 128, True, documents=8),
)
# A newer GPU runs them, too.
SM80 = dataclasses.replace(mosaic_sm80(), unavailable=lambda platform, compute_capability: None)


def matmul_flops(case: Case) -> float:
    """FLOPs of one matmul."""
    return case.flops() / 2


def default_config(case: Case, kernel: str) -> TritonConfig:
    """The default tile config for an A100."""
    lengths, spec = (case.length, case.length), case.request().spec
    configs = triton_configs(8.0, case.head_dim, jnp.bfloat16, *lengths, spec, False)
    return getattr(configs, kernel)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel with a tile config."""

    case: Case
    kernel: str
    config: TritonConfig

    @classmethod
    def of_key(cls, key: str) -> Candidate:
        """The candidate of a key."""
        found = re.fullmatch(r"case(\d+)-(\w+)-(\d+x\d+x\d+x\d+)", key)
        assert found is not None, key
        return cls(CASES[int(found[1])], found[2], tiles(found[3].replace("x", ",")))

    @property
    def tiles(self) -> str:
        """The tile config as a word."""
        return "x".join(str(int(x)) for x in dataclasses.astuple(self.config)[:4])

    @property
    def key(self) -> str:
        """The name of its files."""
        return f"case{CASES.index(self.case)}-{self.kernel}-{self.tiles}"

    def run(self) -> Callable[..., Any]:
        """The kernel as a function of its inputs and bounds, with bfloat16 results."""
        implementation = triton(config=self.config)
        forward = self.kernel == "forward"
        kernel = getattr(implementation, "forward" if forward else f"backward_{self.kernel}")
        return functools.partial(kernel, spec=self.case.request().spec, out_dtype=jnp.bfloat16)

    def with_bounds(self, inputs: AttentionInputs) -> tuple[AttentionInputs, Any]:
        """The inputs and their bounds for the tile config."""
        implementation = triton(config=self.config)
        forward = self.kernel == "forward"
        of = implementation.forward_bounds if forward else implementation.backward_bounds
        return inputs, of(inputs, spec=self.case.request().spec)


def inputs_of(case: Case) -> AttentionInputs:
    """Random inputs of a case, with plausible lse and delta for the backward."""
    keys = jax.random.split(jax.random.key(0), 6)
    wide = (case.batch, case.length, case.heads, case.head_dim)
    narrow = (case.batch, case.length, case.kv_heads, case.head_dim)
    q, do = (jax.random.normal(key, wide, jnp.bfloat16) for key in keys[:2])
    k, v = (jax.random.normal(key, narrow, jnp.bfloat16) for key in keys[2:4])
    stats = jax.random.normal(keys[4], (2, case.batch, case.heads, case.length))
    positions = jnp.arange(case.length, dtype=jnp.int32)
    stats += jnp.array([10.0, 0.0])[:, None, None, None]
    query = QuerySide(q, positions, do=do, stats=stats)
    return AttentionInputs(query, KVSide(k, v, positions))


class Compiler:
    """Compiles for an A100, and saves the PTX.

    XLA calls ptxas from its CUDA folder. Each compilation has a CUDA folder of its own, whose ptxas
    saves the PTX and then calls the real one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        assembler = shutil.which("ptxas") or _packaged_assembler()
        if assembler is None:
            raise SystemExit(
                "benchmarks ampere --compile needs ptxas: pip install 'burst-jax[cuda13]'"
            )
        self._assembler = assembler
        description = resources.files(burst_jax) / "gpu_targets" / "a100.txtpb"
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=description.read_text(), topology="1x1x1"
        )
        mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("one",))
        self._mesh = mesh

    def compile(self, candidate: Candidate) -> str:
        """Writes the PTX and the launch of a candidate; returns registers and spills."""
        with tempfile.TemporaryDirectory() as temporary:
            here = Path(temporary)
            script = here / "bin" / "ptxas"
            script.parent.mkdir()
            script.write_text(
                "#!/bin/sh\n"
                f'if [ "$2" = -o ] && grep -q "entry burst_" "$1"; then cp "$1" {here}/kernel.ptx\n'
                f'  exec {self._assembler} -v "$@" 2> {here}/log\nfi\n'
                f'exec {self._assembler} "$@"\n'
            )
            script.chmod(0o755)
            whole = jax.NamedSharding(self._mesh, jax.P())
            shapes = jax.eval_shape(lambda: candidate.with_bounds(inputs_of(candidate.case)))
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes
            )
            options: dict[str, Any] = {
                "xla_gpu_cuda_data_dir": temporary,
                "xla_dump_to": str(here / "dump"),
                "xla_gpu_autotune_level": 0,
            }
            with jax.set_mesh(self._mesh):
                traced = jax.jit(candidate.run()).trace(*shapes)
                traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)
            (thunks,) = (here / "dump").glob("*.thunk_sequence.txt")
            launch = _launch_of(thunks.read_text())
            (self._folder / f"{candidate.key}.json").write_text(
                json.dumps(dataclasses.asdict(launch))
            )
            shutil.copy(here / "kernel.ptx", self._folder / f"{candidate.key}.ptx")
            return _registers((here / "log").read_text())


def _packaged_assembler() -> str | None:
    """The ptxas of the CUDA plugin's packages."""
    try:
        import nvidia
    except ImportError:
        return None
    found = (Path(folder) / "cu13" / "bin" / "ptxas" for folder in nvidia.__path__)
    return next((str(path) for path in found if path.exists()), None)


def _launch_of(thunks: str) -> Launch:
    """The launch of the kernel in XLA's thunk sequence."""
    pattern = r"burst_\w+ grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), .*shared_memory: (\d+)"
    found = re.search(pattern, thunks)
    assert found is not None, thunks
    *grid, threads, shared = map(int, found.groups())
    return Launch((grid[0], grid[1], grid[2]), threads, shared)


def _registers(log: str) -> str:
    """Registers and spilled bytes from the output of ptxas."""
    spills = re.search(r"(\d+) bytes spill stores", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert spills is not None, log
    assert registers is not None, log
    return f"{registers[1]} registers, {spills[1]} bytes spilled"


def kernel_call(run: Callable[..., Any], *arguments: Any) -> tuple[list, list, Any]:
    """``(operands, result types, call)`` of a function's only ``pallas_call``.

    The operations before it are evaluated.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    closed = jax.make_jaxpr(lambda *leaves: run(*jax.tree.unflatten(treedef, leaves)))(*leaves)
    return next(_evaluate(closed.jaxpr, closed.consts, leaves))


def _evaluate(jaxpr: Any, consts: Any, args: Any) -> Iterator[tuple[list, list, Any]]:
    """Evaluates a jaxpr up to its ``pallas_call``."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        given = [x.val if isinstance(x, Literal) else values[x] for x in equation.invars]
        if equation.primitive.name == "pallas_call":
            params = equation.primitive.get_bind_params(equation.params)
            native = functools.partial(equation.primitive.bind, **params)
            results = [x.aval for x in equation.outvars]
            yield given, results, jax.jit(native)
            return
        if equation.primitive.name in ("jit", "pjit"):
            inner = equation.params["jaxpr"]
            yield from _evaluate(inner.jaxpr, inner.consts, given)
            return
        params = equation.primitive.get_bind_params(equation.params)
        made = equation.primitive.bind(*given, **params)
        made = made if equation.primitive.multiple_results else [made]
        values.update(zip(equation.outvars, made, strict=True))


class Runner:
    """Times the candidates of a folder, checked against Triton's own compilation for this GPU."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._driver = folder, Driver()
        self.inputs = functools.lru_cache(inputs_of)
        self._native = functools.lru_cache(self._run_natively)

    def _run_natively(self, case: Case, kernel: str) -> tuple[list[jax.Array], float]:
        """Results and seconds of a kernel with the A100's tiles, compiled for this GPU."""
        given, _, call = self._call(Candidate(case, kernel, default_config(case, kernel)))
        made = call(*given)
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        return made, median_time(lambda: call(*given))

    def _call(self, candidate: Candidate) -> tuple[list, list, Any]:
        bounded = jax.jit(candidate.with_bounds)(self.inputs(candidate.case))
        return kernel_call(candidate.run(), *bounded)

    def prepare(self, candidate: Candidate) -> tuple[Kernel, list, list]:
        """The assembled kernel, its operands and the types of its results."""
        launch = Launch(**json.loads((self._folder / f"{candidate.key}.json").read_text()))
        ptx = (self._folder / f"{candidate.key}.ptx").read_text()
        (name,) = re.findall(r"\.entry (\w+)\(", ptx)
        kernel = Kernel(self._driver, ptx, name, launch.as_on_an_a100(self._driver.shared))
        return kernel, *self._call(candidate)[:2]

    def measure(self, candidate: Candidate, kernel: Kernel, given: list, results: list) -> str:
        """A line of the table."""
        want, native = self._native(candidate.case, candidate.kernel)
        self._driver.enter()
        errors = [relative_error(*pair) for pair in zip(kernel(given, results), want, strict=True)]
        if max(errors) > 1e-2:
            return f"wrong: relative errors {errors}"
        seconds = kernel.seconds(given, results)
        tera = MATMULS[candidate.kernel] * matmul_flops(candidate.case) / 1e12
        return (
            f"{seconds * 1e3:8.3f} ms {tera / seconds:6.0f} TFLOP/s"
            f" {kernel.registers} registers, {kernel.local_bytes} bytes spilled;"
            f" default tiles compiled for this GPU {tera / native:.0f} TFLOP/s"
        )


def sm80_attention(case: Case, **options: Any) -> Callable[..., jax.Array]:
    """:func:`burst_jax.local_attention` of a case, on the sm80 kernels."""
    ids = case.segment_ids()
    segments = {} if ids is None else {"query_segment_ids": ids, "key_value_segment_ids": ids}
    options = {**case.options, **segments, **case.per_head(), **options}
    return functools.partial(burst_jax.local_attention, implementation=SM80, **options)


def arrays_of(case: Case) -> tuple[jax.Array, ...]:
    """Random q, k, v and dO of a case, bfloat16."""
    value_dim = case.value_dim or case.head_dim
    shapes = (
        (case.heads, case.head_dim),
        (case.kv_heads, case.head_dim),
        (case.kv_heads, value_dim),
        (case.heads, value_dim),
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(
        jax.random.normal(key, (case.batch, case.length, *shape), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )


def sm80_times(case: Case, **options: Any) -> tuple[float, float]:
    """Seconds of the sm80 kernels, ``(forward, forward and backward)``.

    Mosaic GPU compiles them for the GPU at hand. Told that its architecture is Ampere's, it emits
    the same instructions as for an A100.
    """
    attend, (*qkv, do) = sm80_attention(case, **options), arrays_of(case)

    @jax.jit
    def both(do: jax.Array, *qkv: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, *qkv)
        return out, vjp(do)

    forward = jax.jit(attend)
    with as_ampere():
        return median_time(lambda: forward(*qkv)), median_time(lambda: both(do, *qkv))


def as_ampere() -> Any:
    """A context in which Mosaic GPU compiles for an A100."""
    return mock.patch.object(utils, "_infer_arch", return_value=(8, 0))


def carry_shares(case: Case) -> tuple[float, float]:
    """A ring step's time relative to a call of its own, ``(forward, backward)``.

    A step merges its result with the carry; its gradients are added to given ones.
    """
    (q, k, v, do), spec = arrays_of(case), case.request().spec
    positions = jnp.arange(case.length, dtype=jnp.int32)
    inputs = AttentionInputs(QuerySide(q, positions), KVSide(k, v, positions))
    backward = SM80.backward
    assert backward is not None
    with as_ampere():
        bounds, tables = (
            jax.jit(functools.partial(of, spec=spec))(inputs)
            for of in (SM80.forward_bounds, SM80.backward_bounds)
        )
        forward = jax.jit(functools.partial(SM80.forward, spec=spec))
        carried = jax.jit(functools.partial(SM80.forward, spec=spec), donate_argnums=2)
        _, lse = carry = forward(inputs, bounds)
        stats = jnp.stack([lse, jnp.zeros_like(lse)])
        with_do = inputs._replace(query=inputs.query._replace(do=do, stats=stats))
        fresh = jax.jit(functools.partial(backward, spec=spec))
        added = jax.jit(functools.partial(backward, spec=spec), donate_argnums=(2, 3))
        dq, dkv, _ = fresh(with_do, tables)
        sums = dq, dkv

        def step() -> Any:
            nonlocal carry
            carry = carried(inputs, bounds, carry)
            return carry

        def backward_step() -> Any:
            nonlocal sums
            sums = added(with_do, tables, *sums)[:2]
            return sums

        times = [
            median_time(call)
            for call in (
                step,
                lambda: forward(inputs, bounds),
                backward_step,
                lambda: fresh(with_do, tables),
            )
        ]
    return times[0] / times[1], times[2] / times[3]


def torch_times(case: Case) -> tuple[float, float] | None:
    """Seconds of torch's FlashAttention-2 forward, and with backward; None without torch.

    It pads values that are narrower than keys, as it does not support them.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    length = case.length
    q, k, v, do = (
        torch.randn(case.batch * length, heads, case.head_dim, dtype=torch.bfloat16, device="cuda")
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    for x in (q, k, v):
        x.requires_grad_()
    ids = case.segment_ids()
    row = [length] if ids is None else np.bincount(ids[0])[1:].tolist()
    sizes = row * case.batch
    ends = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32, device="cuda")
    window = {} if case.window is None else {"window_size_left": case.window - 1}
    if window:
        window["window_size_right"] = 0

    def forward() -> Any:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, max(sizes), max(sizes), 0.0, case.is_causal, False, **window
        )[0]

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), do)

    return _torch_seconds(torch, forward), _torch_seconds(torch, both)


def _torch_seconds(torch: Any, call: Callable[[], Any]) -> float:
    """Seconds of a call: the median of five rounds of ten."""
    times = []
    for _ in range(6):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(10):
            call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e4)
    return sorted(times[1:])[2]


def print_rates(cases: Sequence[Case]) -> None:
    """Prints the rates of the sm80 kernels and of FlashAttention-2, one after the other."""
    print("TFLOP/s forward / forward and backward: mosaic_sm80; FlashAttention-2; ratio")
    for case in cases:
        measured = []
        for times_of in (sm80_times, torch_times):
            try:
                measured.append(times_of(case))
            except Exception as error:  # Continue with the others.
                print(f"{case.name}: failed: " + " ".join(str(error).split())[:200])
                measured.append(None)
        tera = case.flops() / 1e12
        ours, theirs = (
            None if times is None else (tera / times[0], 3.5 * tera / times[1])
            for times in measured
        )
        line = "; ".join("-" if x is None else f"{x[0]:.0f} / {x[1]:.0f}" for x in (ours, theirs))
        if ours is not None and theirs is not None:
            line += f"; {ours[0] / theirs[0]:.3f} / {ours[1] / theirs[1]:.3f}"
        print(f"{case.name}: {line}", flush=True)


def print_costs() -> None:
    """Prints what modifiers and a ring's carry cost relative to the causal case."""
    case = CASES[1]
    plain = sm80_times(case)
    print("time relative to causal, forward / forward and backward")
    for name, options in modifiers(case).items():
        times = sm80_times(case, **options)
        print(f"{name}: {times[0] / plain[0]:.3f} / {times[1] / plain[1]:.3f}", flush=True)
    print("a ring step relative to a call of its own, forward / backward")
    for case in CASES:
        forward, backward = carry_shares(case)
        print(f"{case.name}: {forward:.3f} / {backward:.3f}", flush=True)


def modifiers(case: Case) -> dict[str, dict[str, Any]]:
    """Arguments of attention by name, each of which alone modifies the case."""
    ids = np.ones((case.batch, case.length), np.int32)
    both = dataclasses.replace(case, sinks=True, slopes=True).per_head()
    return {
        "nothing": {},
        "sinks": {"sink_logits": both["sink_logits"]},
        "ALiBi": {"alibi_slopes": both["alibi_slopes"]},
        "segment ids": {"query_segment_ids": ids, "key_value_segment_ids": ids},
        "prefix of 512": {"prefix_lengths": np.full(case.batch, 512, np.int32)},
        "soft cap": {"logits_soft_cap": 30.0},
        "dropout": {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
    }


def candidates(args: argparse.Namespace) -> list[Candidate]:
    """Every kernel of every case, with the default config and the given ones."""
    return [
        Candidate(CASES[case], kernel, config)
        for case in args.cases
        for kernel in args.kernels
        for config in dict.fromkeys([default_config(CASES[case], kernel), *args.configs])
    ]


def compile_all(args: argparse.Namespace) -> None:
    """Compiles all candidates for an A100 into the folder, in parallel."""
    # The plugin calls ptxas only without nvJitLink, which must be set before it starts.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_libnvjitlink=false"
    # Without a GPU the CUDA platform must not be initialized.
    jax.config.update("jax_platforms", "cpu")
    args.folder.mkdir(parents=True, exist_ok=True)
    compiler, wanted = Compiler(args.folder), candidates(args)

    def compile_one(candidate: Candidate) -> str:
        try:
            return compiler.compile(candidate)
        except Exception as error:  # Some configs do not fit.
            return "failed: " + " ".join(str(error).split())[:100]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for candidate, log in zip(wanted, pool.map(compile_one, wanted), strict=True):
            print(f"{_label(candidate)} {log}", flush=True)


def _label(candidate: Candidate) -> str:
    """The first columns of a line."""
    mark = "*" if candidate.config == default_config(candidate.case, candidate.kernel) else " "
    return f"{f'{candidate.case.name}, {candidate.kernel}':29}{candidate.tiles:>13}{mark}"


def run_all(args: argparse.Namespace) -> None:
    """Times the folder's kernels of the selected cases."""
    found = [Candidate.of_key(path.stem) for path in sorted(args.folder.glob("case*.json"))]
    cases = [CASES[case] for case in args.cases]
    found = [c for c in found if c.case in cases and c.kernel in args.kernels]
    if not found:
        raise SystemExit(f"{args.folder} has no kernels for these cases: run with --compile first")
    require_gpus("benchmarks ampere")
    runner = Runner(args.folder)
    for case in {c.case: None for c in found}:
        runner.inputs(case)
    print_rates(list({c.case: None for c in found}))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        prepared = {c: pool.submit(runner.prepare, c) for c in found}
    print("*: default tiles")
    for candidate, future in prepared.items():
        try:
            line = runner.measure(candidate, *future.result())
        except Exception as error:  # Continue with the others.
            line = "failed: " + " ".join(str(error).split())[:100]
        print(f"{_label(candidate)} {line}", flush=True)


def run(args: argparse.Namespace) -> None:
    """The command."""
    if args.folder is not None:
        (compile_all if args.compile else run_all)(args)
        return
    if args.compile:
        raise SystemExit("benchmarks ampere --compile needs a folder to write to")
    require_gpus("benchmarks ampere")
    print_rates(CASES + FURTHER)
    print_costs()


def tiles(text: str) -> TritonConfig:
    """A tile config from the command line."""
    try:
        block_q, block_kv, warps, stages = map(int, text.split(","))
        return TritonConfig(block_q, block_kv, warps, stages)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: Q,KV,WARPS,STAGES ({error})") from error


def add_command(commands: Any) -> None:
    """Adds ``ampere`` to the benchmarks' command line."""
    parser = commands.add_parser("ampere", help=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, nargs="?",
        help="folder of compiled Triton kernels; without it, the Mosaic kernels' rates and costs",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="compile; needs no GPU")
    parser.add_argument(
        "--cases", nargs="+", type=int, default=list(range(len(CASES))), metavar="I",
        choices=range(len(CASES)),
        help="; ".join(f"{i}: {case.name}" for i, case in enumerate(CASES)),
    )  # fmt: skip
    parser.add_argument("--kernels", nargs="+", default=list(MATMULS), choices=list(MATMULS))
    parser.add_argument(
        "--configs", nargs="+", type=tiles, default=[], metavar="Q,KV,WARPS,STAGES",
        help="configs in addition to the default",
    )  # fmt: skip
    parser.set_defaults(run=run)
