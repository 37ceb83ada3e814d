"""Links: where a path of a host leads, resolved by its own links and not by this kernel's."""

from collections.abc import Callable, Sequence

MAX_LINKS = 40
"""Links followed in one path before it counts as a loop. Source: MAXSYMLINKS of the kernel."""


def follow(
    folder: str,
    names: Sequence[str],
    target_of: Callable[[str], str | None],
    is_there: Callable[[str], bool],
) -> str | None:
    """The real path of names below a real folder; None where nothing is there, or a loop.

    target_of: a link's target, None where the path is no link. Too many ".." end at the top. Links
    are counted over the whole path, as the kernel does: links that each name the next one twice
    would otherwise cost 2^n steps.
    """
    real = folder
    pending = list(reversed(names))
    links_left = MAX_LINKS
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
        if name == "..":
            real = real.rpartition("/")[0] or "/"
            continue
        path = join(real, name)
        target = target_of(path)
        if target is None:
            if not is_there(path):
                return None
            real = path
            continue
        if links_left == 0:
            return None
        links_left -= 1
        if target.startswith("/"):
            real = "/"
        pending += reversed(target.split("/"))
    return real


def join(folder: str, name: str) -> str:
    """A name below a folder, the top included."""
    return f"{folder}{name}" if folder == "/" else f"{folder}/{name}"
