"""Names that the program under test may spell otherwise than the frozen answers do.

The answers hold the names on the right. A later change of a name is a row here and nothing else.
"""

from collections.abc import Mapping

OBJECTIVES = {
    "host-bandwidth": "memory-bandwidth",
    "collective": "multi-gpu",
    "device-transfer": "gpu-copy",
}
SWITCHES = {
    "as-it-was": "keep",
    "as-they-were": "keep",
    "flat": "single",
    "mirrored": "host",
}
EARLIER_WORDS = ("host-bandwidth", "as-it-was")
"""Of each table the word by which the help of `plan` shows that the program has earlier names."""

KEYS = {
    "fallback": ("fallback", "rung"),
    "recommended": ("recommendations", "verdicts"),
}
"""Keys of a JSON document: any of these."""

RESULTS_FORMATS = ("homenode.results/1", "homenode.results/2")
"""What a results file may say of itself."""


def canonical(word: str | None) -> str:
    """The word as frozen answers have it."""
    return OBJECTIVES.get(word or "-", SWITCHES.get(word or "-", word or "-"))


def spelled(word: str, table: Mapping[str, str], help_text: str) -> str:
    """An earlier word as the program takes it. help_text: of `plan`, with all options."""
    sentinel = next(name for name in EARLIER_WORDS if name in table)
    return word if sentinel in help_text else table.get(word, word)
