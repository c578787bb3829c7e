import shutil
import subprocess

import pytest

from fluxcb.logging import Value


@pytest.fixture
def log():
    """Return a function that logs numbers `(step, epoch, name, value)` to a backend, put at `100 + step` seconds."""

    def log(backend, *puts):
        for step, epoch, name, value in puts:
            backend.log(name, Value(value), step=step, epoch=epoch, seconds=100.0 + step)

    return log


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder on a disk of 64 KiB, and a function that makes the disk read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        return subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode == 0

    if not shutil.which("mount") or not mount("-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        pytest.skip("no disk can be mounted here")
    try:
        yield folder, lambda: mount("-o", "remount,ro")
    finally:
        subprocess.run(["umount", str(folder)], check=True)
