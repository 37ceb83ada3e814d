"""Manifest: what a capture says of itself, in manifest.json at its top."""

import json
from dataclasses import asdict, dataclass

from homenode.errors import InputError

MANIFEST = "manifest.json"
FORMAT = "homenode.snapshot"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
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
    fields = asdict(manifest)
    fields["left_out"] = [{"what": what, "reason": reason} for what, reason in manifest.left_out]
    return json.dumps({"format": f"{FORMAT}/{VERSION}", **fields}, indent=2) + "\n"


def check_manifest(text: str, source: str) -> None:
    """Raises InputError where a capture is newer than this program, or the document no manifest."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: manifest.json: expected JSON, found {error}") from None
    found = document.get("format") if isinstance(document, dict) else None
    kind, _, version = str(found).partition("/")
    if kind != FORMAT or not (version.isascii() and version.isdigit()):
        raise InputError(
            f'{source}: manifest.json: expected "format": "{FORMAT}/{VERSION}", found {found!r}'
        )
    if len(version) > 9 or int(version) > VERSION:
        raise InputError(
            f"{source}: expected a {FORMAT} up to version {VERSION}, found {version[:9]}",
            hint="it was written by a newer homenode: update this one",
        )
