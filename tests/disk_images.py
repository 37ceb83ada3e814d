"""Disk images that qemu-img makes."""

import shutil
import subprocess
from pathlib import Path

import pytest


def image(path: Path, *words: str) -> Path:
    """A qcow2 image that qemu-img makes. words: more options, in front of the file's name."""
    if shutil.which("qemu-img") is None:
        pytest.skip("needs qemu-img")
    argv = ("qemu-img", "create", "-q", "-u", "-f", "qcow2", *words, str(path), "1M")
    subprocess.run(argv, check=True)
    return path
