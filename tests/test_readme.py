"""The README's Python runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_blocks_run_one_after_the_other():
    assert len(BLOCKS) == 3
    program = "import jax\njax.config.update('jax_platforms', 'cpu')\n" + "\n".join(BLOCKS)
    program += (
        "\nwant = attend(q, k, v).astype(jnp.float32)"
        "\ngap = two_level.astype(jnp.float32) - want"
        "\nassert jnp.linalg.norm(gap) < 0.01 * jnp.linalg.norm(want)"
        "\nassert layer(jnp.ones((1, length, 256)), is_causal=True).shape == (1, length, 256)\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    said = re.search(r"print\(out.shape, out.dtype\)  # (.*)", BLOCKS[0])
    assert said is not None
    assert run.stdout.strip() == said.group(1)


def test_first_block_is_on_the_first_screen():
    before = README[: README.index("```python")]
    assert before.count("\n") + BLOCKS[0].count("\n") < 40
