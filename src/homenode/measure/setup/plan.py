"""Setup plan: the commands that build pinned GPU tools for the GPUs of a machine.

Sources are pinned by the sha256 of their archive, or by a commit; each tool is built for the
machine's own GPUs and nothing else. Everything lies below one prefix.
"""

from collections.abc import Collection, Iterator
from enum import StrEnum

from msgspec import Struct

from homenode.errors import UsageError


class Vendor(StrEnum):
    """Whose GPUs."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"


class ToolSource(Struct, frozen=True):
    """One tool at one version. program: what is installed; the build leaves
    it in build/.

    url: of an archive with this sha256, or of a git repository at this commit. folder: what the
    archive unpacks to. needs: programs, packages: their names on Debian and what has no program.
    """

    name: str
    version: str
    vendor: Vendor
    url: str
    folder: str
    program: str
    needs: tuple[str, ...]
    packages: str
    sha256: str | None = None
    commit: str | None = None


class SetupStep(Struct, frozen=True):
    """One command. input: for its standard input. tool: whose step it is.

    fetches: from the network, maybe through a proxy.
    """

    tool: str
    argv: tuple[str, ...]
    timeout_s: float
    input: str | None = None
    fetches: bool = False


class SetupPlan(Struct, frozen=True):
    """steps in order. installs: programs below the prefix. lacks: what keeps a tool from being
    built, in words; there: tools that are there already."""

    prefix: str
    steps: tuple[SetupStep, ...]
    installs: tuple[str, ...]
    lacks: tuple[str, ...]
    there: tuple[str, ...]


# Sums of the archives: Spack's recipes of these tools, 2026.
SOURCES: tuple[ToolSource, ...] = (
    ToolSource(
        "nvbandwidth",
        "0.9",
        Vendor.NVIDIA,
        "https://github.com/NVIDIA/nvbandwidth/archive/refs/tags/v0.9.tar.gz",
        "nvbandwidth-0.9",
        "nvbandwidth",
        ("curl", "tar", "cmake", "c++", "nvcc"),
        "cmake g++ libboost-program-options-dev, CUDA with its bin on PATH",
        sha256="552e7b2595c4b95ab1da86ba002f239185d247b2fb9929ed3cb9dc7f57bcd67c",
    ),
    ToolSource(
        "nccl-tests",
        "2.17.6",
        Vendor.NVIDIA,
        "https://github.com/NVIDIA/nccl-tests/archive/v2.17.6.tar.gz",
        "nccl-tests-2.17.6",
        "all_reduce_perf",
        ("curl", "tar", "make", "c++", "nvcc"),
        "make g++ libnccl-dev, CUDA with its bin on PATH",
        sha256="38974e70342150ede0e3fb8fd24bfe60ccbde90fa20241716ba8bb338e6b61a0",
    ),
    ToolSource(
        "rccl-tests",
        "07e3a21",
        Vendor.AMD,
        "https://github.com/ROCm/rccl-tests.git",
        "rccl-tests-07e3a21",
        "all_reduce_perf",
        ("git", "cmake", "hipcc"),
        "git cmake hipcc rccl-dev rocm-cmake",
        commit="07e3a2196ec100581439934729ac7ce9e905321a",
    ),
    ToolSource(
        "TransferBench",
        "7.2.3",
        Vendor.AMD,
        "https://github.com/ROCm/TransferBench/archive/refs/tags/rocm-7.2.3.tar.gz",
        "TransferBench-rocm-7.2.3",
        "TransferBench",
        ("curl", "tar", "cmake", "hipcc"),
        "cmake hipcc libnuma-dev rocm-cmake hsa-rocr-dev",
        sha256="e36fb3943359f38c15a27bb692a91d669186005b70ea7d877af6a6580fc2c790",
    ),
)

NEEDED = frozenset(need for source in SOURCES for need in source.needs) | {"sha256sum", "install"}
"""Programs to look for before a plan is made."""

_FETCH_S, _BUILD_S, _SHORT_S = 600.0, 3600.0, 60.0


def setup_plan(
    vendor: Vendor,
    architectures: tuple[str, ...],
    installed: Collection[str],
    prefix: str,
    sources: tuple[ToolSource, ...] = SOURCES,
    cuda_home: str | None = None,
) -> SetupPlan:
    """The plan for a machine. architectures: of its GPUs ("90"; "gfx942").

    installed: programs that can be run there, of NEEDED and of the tools themselves. cuda_home:
    where nvcc's CUDA lies; None = where makefiles look by themselves, /usr/local/cuda. Raises
    UsageError for a prefix that is no absolute path of plain characters.
    """
    if not is_plain(prefix):
        raise UsageError(
            f"--prefix {prefix}: expected an absolute path of letters, digits and ._-+"
        )
    if cuda_home is not None and not is_plain(cuda_home):
        cuda_home = None
    mine = [source for source in sources if source.vendor is vendor]
    there = tuple(source.program for source in mine if source.program in installed)
    lacks: list[str] = []
    steps: list[SetupStep] = []
    installs: list[str] = []
    for source in mine:
        if source.program in there:
            continue
        missing = [need for need in source.needs if need not in installed]
        if missing:
            lacks.append(f"{source.name}: needs {', '.join(missing)} (packages: {source.packages})")
            continue
        steps += _steps(source, architectures, prefix, cuda_home)
        installs.append(f"{prefix}/bin/{source.program}")
    return SetupPlan(prefix, tuple(steps), tuple(installs), tuple(lacks), there)


def is_plain(path: str) -> bool:
    """CMake and make take paths apart at blanks and dollars, whoever quotes them."""
    plain = all(c.isalnum() or c in "/._-+" for c in path)
    return path.startswith("/") and plain and "/../" not in f"{path}/"


def _steps(
    source: ToolSource, architectures: tuple[str, ...], prefix: str, cuda_home: str | None
) -> Iterator[SetupStep]:
    work = f"{prefix}/share/homenode/src"
    tree = f"{work}/{source.folder}"

    def step(timeout_s: float, *argv: str, input: str | None = None) -> SetupStep:
        return SetupStep(source.name, argv, timeout_s, input, timeout_s == _FETCH_S)

    # What a killed setup left: half of an object file that make takes for whole, locks of git.
    yield step(_SHORT_S, "rm", "-rf", "--one-file-system", tree)
    yield step(_SHORT_S, "mkdir", "-p", work, f"{prefix}/bin")
    if source.sha256 is not None:
        archive = f"{tree}.tar.gz"
        fetch = ("curl", "--fail", "--location", "--retry", "3", "--silent", "--show-error")
        yield step(_FETCH_S, *fetch, "--proto", "=https", "--output", archive, source.url)
        yield step(
            _SHORT_S, "sha256sum", "--check", "--strict", input=f"{source.sha256}  {archive}\n"
        )
        yield step(_SHORT_S, "tar", "-xzf", archive, "-C", work, "--no-same-owner")
    else:
        commit = str(source.commit)
        yield step(_SHORT_S, "git", "init", "--quiet", tree)
        yield step(
            _FETCH_S, "git", "-C", tree, "fetch", "--quiet", "--depth", "1", source.url, commit
        )
        yield step(
            _SHORT_S,
            "git",
            "-C",
            tree,
            "-c",
            "advice.detachedHead=false",
            "checkout",
            "--quiet",
            commit,
        )
    for argv in _build(source, architectures, tree, cuda_home):
        yield step(_BUILD_S, *argv)
    # A full disk leaves a part of a file: not under the program's name, nor where it could be run.
    part = f"{prefix}/share/homenode/{source.program}.part"
    yield step(_SHORT_S, "install", "-m", "755", f"{tree}/build/{source.program}", part)
    yield step(_SHORT_S, "mv", "-f", "-T", part, f"{prefix}/bin/{source.program}")


def _build(
    source: ToolSource, architectures: tuple[str, ...], tree: str, cuda_home: str | None
) -> Iterator[tuple[str, ...]]:
    if source.name == "nccl-tests":
        code = " ".join(f"-gencode=arch=compute_{one},code=sm_{one}" for one in architectures)
        where = () if cuda_home is None else (f"CUDA_HOME={cuda_home}",)
        yield ("make", "-C", tree, "-j", "4", f"NVCC_GENCODE={code}", *where)
        return
    names = ";".join(architectures)
    is_nvidia = source.vendor is Vendor.NVIDIA
    target = f"-DCMAKE_CUDA_ARCHITECTURES={names}" if is_nvidia else f"-DGPU_TARGETS={names}"
    rocm = () if is_nvidia else ("-DCMAKE_PREFIX_PATH=/opt/rocm", "-DCMAKE_CXX_COMPILER=hipcc")
    yield ("cmake", "-S", tree, "-B", f"{tree}/build", "-DCMAKE_BUILD_TYPE=Release", target, *rocm)
    yield ("cmake", "--build", f"{tree}/build", "--parallel", "4")
