"""``--mesh`` and ``--batch`` of the command lines."""

from __future__ import annotations

import jax
import pytest
from meshes import mesh_of

from burst_jax.parallel.mesh_option import batch_of_option, mesh_of_option, one_device


def test_meshes():
    devices = jax.devices()
    for text, sizes in (
        (None, {"seq": 8}),
        ("seq=1", {}),
        ("fsdp=2,seq=4", {"fsdp": 2, "seq": 4}),
        ("tensor=3", {"tensor": 3}),
    ):
        mesh = mesh_of_option(text)
        assert {name: size for name, size in mesh.shape.items() if size > 1} == sizes
        assert mesh.axis_names == ("data", "fsdp", "stage", "seq", "tensor")
        assert list(mesh.devices.flat) == devices[: mesh.size]
        assert one_device(mesh).devices.flat[0] == devices[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq=0", "--mesh is 'seq=0': its axes are data, fsdp, stage, seq, tensor, of size 1 or"),
        ("seq=-2", "its axes are data, fsdp, stage, seq, tensor, of size 1 or more"),
        ("fsdp=0,seq=9", "of size 1 or more"),
        ("rows=2", "its axes are data, fsdp, stage, seq, tensor, of size 1 or more"),
        ("seq=2,seq=2", "it names an axis twice; give each one size"),
        ("seq", "write it like fsdp=2,seq=4"),
        ("seq=1.0", "write it like fsdp=2,seq=4"),
        ("fsdp=3,seq=3", "it needs 9 devices, there are 8; use for example seq=8"),
        (f"seq={10**30}", f"it needs {10**30} devices, there are 8"),
    ],
)
def test_wrong_meshes(text, message):
    with pytest.raises(ValueError, match=message):
        mesh_of_option(text)


def test_batches():
    mesh = mesh_of(data=2, fsdp=2, stage=1, seq=2, tensor=1)
    assert (batch_of_option(None, mesh), batch_of_option(8, mesh)) == (4, 8)
    for batch in (0, -4, 6):
        with pytest.raises(ValueError, match=f"--batch is {batch}: use a multiple of 4, like 4"):
            batch_of_option(batch, mesh)
