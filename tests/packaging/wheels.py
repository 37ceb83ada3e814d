"""A wheel of the package, and what the container's build is given."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """Those of the Containerfile, each with its text, continued lines joined."""
    text = (ROOT / "containers" / "Containerfile").read_text()
    kept = "\n".join(line for line in text.split("\n") if not line.startswith("#"))
    joined = re.sub(r"\\\n", "", kept)
    pairs = (line.partition(" ") for line in joined.split("\n") if line.strip())
    return [(word, rest) for word, _, rest in pairs]


def copied() -> list[str]:
    """What the container's build sees of the repository."""
    texts = [rest for word, rest in instructions() if word == "COPY"]
    return [one for rest in texts if not rest.startswith("--from") for one in rest.split()[:-1]]


def build_wheel(source: Path, directory: Path) -> None:
    """Build the wheel of a source tree into a directory."""
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            *options,
            "--wheel-dir",
            str(directory),
            str(source),
        ],
        check=True,
    )
