"""What only root and one user can change, on real files."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.safe.record_directory import allow_user, find_other_writer

pytestmark = pytest.mark.root
USER, OTHER = 23456, 12345


@pytest.fixture
def directory() -> Iterator[Path]:
    """Below /tmp, whose sticky bit keeps its name from others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as text:
        path = Path(text)
        os.chown(path, USER, USER)
        (path / "tree/a").mkdir(parents=True)
        (path / "tree/a/b").write_text("four")
        (path / "tree/c").write_text("")
        yield path


def test_a_directory_as_tmp_is_safe_for_now_but_not_for_the_next_boot(directory: Path) -> None:
    path = directory / "tree/a/b"
    assert find_other_writer((path,), user=USER, sticky=True) is None
    assert find_other_writer((path,), user=USER) == "/tmp can be written by everybody"
    assert find_other_writer((path,), sticky=True) == f"{directory} belongs to user {USER}"
    assert "No such file" in (
        find_other_writer((directory / "none",), user=USER, sticky=True) or ""
    )


def test_a_directory_that_an_access_control_list_opens_to_another_user_is_changeable(
    directory: Path,
) -> None:
    """By its mode, only its group of root's could write there."""
    shared = directory / "tree"
    os.chown(shared, 0, 0)
    shared.chmod(0o770)
    assert find_other_writer((shared,), user=USER, sticky=True) is None
    descriptor = os.open(shared, os.O_RDONLY)
    allow_user(descriptor, OTHER, 7)
    os.close(descriptor)
    assert "access control list" in (find_other_writer((shared,), user=USER, sticky=True) or "")


def test_links_are_followed_as_the_kernel_does(directory: Path) -> None:
    """A link of root's in the directory of another user is another user's choice."""
    others = directory / "others"
    others.mkdir()
    os.chown(others, OTHER, OTHER)
    for name, target in (
        ("direct", others / "x"),
        ("upwards", "tree/a/../../others/x"),
        ("chained", "upwards"),
        ("through", "tree/others/../tree"),
    ):
        (directory / name).symlink_to(target)
    (directory / "tree/others").symlink_to(others)
    (others / "x").write_text("")
    (others / "tree").mkdir()
    for name in ("direct", "upwards", "chained", "through"):
        expected = f"{others} belongs to user {OTHER}"
        assert find_other_writer((directory / name,), user=USER, sticky=True) == expected
    (directory / "ring").symlink_to("ring")
    assert "Too many levels" in (
        find_other_writer((directory / "ring",), user=USER, sticky=True) or ""
    )
    os.lchown(directory / "chained", OTHER, OTHER)
    why = find_other_writer((directory / "chained",), user=USER, sticky=True)
    assert why == f"{directory / 'chained'} belongs to user {OTHER}"
