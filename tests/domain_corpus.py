"""Our own sample documents: every odd spelling that we know of, each in a file of domains/."""

from pathlib import Path

DIRECTORY = Path(__file__).parent / "domains"
CORPUS = tuple(sorted(DIRECTORY.glob("*.xml")))
NAMES = tuple(path.stem for path in CORPUS)


def sample(name: str) -> bytes:
    return (DIRECTORY / f"{name}.xml").read_bytes()
