"""Manifest: what a capture says of itself, in manifest.json at its top."""

from msgspec import Struct

from homenode import formats

MANIFEST = "manifest.json"
KIND = "snapshot"


class Manifest(Struct, frozen=True):
    """What is in a capture and what is not. No time and no host name: equal hosts, equal files.

    homenode:     version of the program that wrote it.
    redacted:     names, serials and addresses are pseudonyms.
    files, links: how many there are.
    commands:     tools whose output is in it.
    absent:       globs of the contents table that matched nothing on the host.
    left_out:     (path or tool, reason): was there, is not in the capture.
    not_everywhere: "host name", "user name": too short or too common a word to be distinguished
    from other text, so that it has a pseudonym only where it is known to stand.
    """

    homenode: str
    redacted: bool
    files: int
    links: int
    commands: tuple[str, ...]
    absent: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    not_everywhere: tuple[str, ...] = ()


def encode_manifest(manifest: Manifest) -> str:
    """The JSON document."""
    left_out = [{"what": what, "reason": reason} for what, reason in manifest.left_out]
    return formats.encode(KIND, manifest, changed={"left_out": left_out})


def check_manifest(text: str, source: str) -> None:
    """Raises InputError where a capture is newer than this program, or the document no manifest."""
    formats.version_of(text.encode("utf-8", "replace"), KIND, f"{source}: {MANIFEST}")
