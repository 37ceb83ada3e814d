"""Build hook: tags the wheel with the oldest glibc that has all symbols of the probe."""

import platform
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TagHook(BuildHookInterface):  # type: ignore[type-arg]
    """Sets manylinux_MAJOR_MINOR_MACHINE, as package indexes require (PEP 600)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        program = Path(self.root) / "../../build/probe/homenode-probe"
        symbols = re.findall(rb"GLIBC_(\d+)\.(\d+)", program.read_bytes())
        major, minor = max((int(major), int(minor)) for major, minor in symbols)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{major}_{minor}_{platform.machine()}"
