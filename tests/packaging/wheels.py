"""A wheel of the package, built without the probe."""

import os
import subprocess
import sys
from pathlib import Path


def build_wheel(source: Path, folder: Path) -> None:
    """Build the wheel of a source tree into a folder."""
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(source)],
        check=True,
        env={**os.environ, "HOMENODE_NO_PROBE": "1"},
    )
