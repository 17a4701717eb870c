"""Runs kernels that are compiled for an A100 on a newer GPU.

Triton uses Hopper's matrix instructions when it compiles for Hopper, so times on a Hopper GPU do
not carry over to an A100. The driver can assemble PTX of an older GPU for a newer one: a kernel
compiled for an A100 then runs with the A100's instructions (``mma.sync``, ``cp.async``) and tiles.
FlashAttention-2 in torch uses the same instructions, and is timed for comparison.

This shows whether tiles are right, and how many instructions one kernel needs, and how well they
overlap, relative to another kernel. It does not show times of an A100, which has 108 SMs at 1.41
GHz, 40 MB of L2 cache and 2 TB/s, and slower matrix units relative to the rest of the SM.

``benchmarks ampere --compile FOLDER`` needs the CUDA plugin, but no GPU; ``benchmarks ampere
FOLDER`` runs.
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
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
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


def mosaic_times(case: Case) -> tuple[float, float]:
    """Seconds of the sm80 Mosaic GPU kernels, ``(forward, forward and backward)``.

    Mosaic GPU compiles them for the GPU at hand. Told that its architecture is Ampere's, it emits
    the same instructions as for an A100.
    """
    local, spec = mosaic_sm80(), case.request().spec
    of_queries = case.batch, case.length, case.heads, case.head_dim
    of_keys = case.batch, case.length, case.kv_heads, case.head_dim
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = of_queries, of_keys, of_keys, of_queries
    q, k, v, do = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    positions = jnp.arange(case.length, dtype=jnp.int32)

    @jax.jit
    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        inputs = AttentionInputs(QuerySide(q, positions), KVSide(k, v, positions))
        bounds = local.forward_bounds(inputs, spec=spec)
        return local.forward(inputs, bounds, spec=spec, out_dtype=q.dtype)

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, lse = forward(q, k, v)
        delta = jnp.einsum("btnh,btnh->bnt", do, o, preferred_element_type=jnp.float32)
        query = QuerySide(q, positions, do=do, stats=jnp.stack([lse, delta]))
        inputs = AttentionInputs(query, KVSide(k, v, positions))
        bounds = local.backward_bounds(inputs, spec=spec)
        assert local.backward is not None
        return local.backward(inputs, bounds, spec=spec, out_dtype=q.dtype)

    with mock.patch.object(utils, "_infer_arch", return_value=(8, 0)):
        return median_time(lambda: forward(q, k, v)), median_time(lambda: both(q, k, v, do))


def torch_times(case: Case) -> tuple[float, float] | None:
    """Seconds of torch's FlashAttention-2 forward, and with backward; None without torch."""
    try:
        torch: Any = importlib.import_module("torch")
        of_attention: Any = importlib.import_module("torch.nn.attention")
    except ImportError:
        return None
    shape = case.batch, case.heads, case.length, case.head_dim
    q, k, v, do = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=i < 3)
        for i in range(4)
    )

    def forward() -> Any:
        with of_attention.sdpa_kernel(of_attention.SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.is_causal
            )

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
        measured = {"FlashAttention-2": torch_times(case), "mosaic_sm80": mosaic_times(case)}
        for name, times in measured.items():
            if times is None:
                continue
            tera = 2 * matmul_flops(case) / 1e12
            print(
                f"{case.name}: {name} {tera / times[0]:.0f} TFLOP/s forward,"
                f" {3.5 * tera / times[1]:.0f} forward and backward"
            )
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
    (compile_all if args.compile else run_all)(args)


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
    parser.add_argument("folder", type=Path, help="folder of compiled kernels")
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
