"""Build hook: compiles the probe with the machine's C++ compiler and installs it beside homenode.

Without a compiler, or with HOMENODE_NO_PROBE=1, the package is built without the probe and says so:
planning and proving need none.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProbeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds native/'s homenode-probe to the wheel's scripts; the wheel is then for one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or os.environ.get("HOMENODE_NO_PROBE") == "1":
            return
        compiler = os.environ.get("CXX", "c++")
        make = shutil.which("make")
        if make is None or shutil.which(compiler) is None:
            missing = "make" if make is None else compiler
            print(f"homenode: no {missing}: built without homenode-probe", file=sys.stderr)
            return
        out = Path(self.root) / "build" / "probe"
        jobs = str(os.cpu_count() or 1)
        subprocess.run(
            [make, "-C", str(Path(self.root) / "native"), "-j", jobs, f"OUT={out}"], check=True
        )
        build_data["shared_scripts"] = {str(out / "homenode-probe"): "homenode-probe"}
        # For guests; some distributions have the static C++ library in a package of its own.
        command = [make, "-C", str(Path(self.root) / "native"), "-j", jobs, f"OUT={out}", "static"]
        if subprocess.run(command, check=False).returncode == 0:
            static = out / "homenode-probe-static"
            build_data["shared_scripts"][str(static)] = "homenode-probe-static"
        else:
            print("homenode: no static libraries: built without the probe for guests",
                  file=sys.stderr)  # fmt: skip
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"


def _platform() -> str:
    from packaging.tags import platform_tags

    return next(iter(platform_tags()))
