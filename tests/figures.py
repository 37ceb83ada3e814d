"""Numbers of a message, so that tests need not repeat its words."""

import re


def numbers(text: str | None) -> list[int]:
    """The whole numbers of a text in their order; those of "4.5", "node0" or an address as well.

    >>> numbers("needs 60 free cores, 56 free")
    [60, 56]
    """
    return [int(one) for one in re.findall(r"\d+", text or "")]
