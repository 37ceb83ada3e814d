"""What is built once for all tests of packages: a wheel without the probe."""

import shutil
from pathlib import Path

import pytest

from tests.packaging.wheels import build_wheel, copied

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The /src of the container's build: what it sees of the repository."""
    directory = tmp_path_factory.mktemp("src")
    for source in copied():
        if (ROOT / source).is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, directory / source, ignore=left_out)
        else:
            shutil.copy(ROOT / source, directory)
    return directory


@pytest.fixture(scope="session")
def wheel(context: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    build_wheel(context, directory)
    (path,) = directory.glob("homenode-*.whl")
    return path
