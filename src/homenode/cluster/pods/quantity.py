"""Quantity: sizes and counts as Kubernetes spells them.

Source: k8s.io/apimachinery/pkg/api/resource, Quantity.
"""

import re
from decimal import Decimal
from typing import Any

from homenode.errors import ParseError

_QUANTITY = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)(?:([eE])(\d{1,2})|([a-zA-Z]{0,2}))\Z", re.ASCII)
_FACTOR = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{name: Decimal(1000) ** power for power, name in enumerate("kMGTPE", start=1)},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", start=1)},
}


def parse_quantity(value: Any, source: str) -> int:
    """The whole number of a quantity, rounded up as Kubernetes does. Raises ParseError.

    >>> parse_quantity("64Gi", "memory") >> 30, parse_quantity("1500m", "cpu")
    (64, 2)
    """
    return _whole(_number(value, source))


def parse_milli(value: Any, source: str) -> int:
    """Thousandths of a quantity, rounded up. Raises ParseError.

    >>> parse_milli("1500m", "cpu"), parse_milli(2, "cpu")
    (1500, 2000)
    """
    return _whole(_number(value, source) * 1000)


def is_whole(value: Any, source: str) -> bool:
    """Whether a quantity is a whole number. Raises ParseError.

    >>> is_whole("1.5Gi", "memory"), is_whole("1.3Ki", "memory")
    (True, False)
    """
    number = _number(value, source)
    return number == number.to_integral_value()


def _whole(number: Decimal) -> int:
    return int(number.to_integral_value(rounding="ROUND_CEILING"))


def _number(value: Any, source: str) -> Decimal:
    text = str(value).strip()
    match = _QUANTITY.match(text)
    if match is None or (match[4] or "") not in _FACTOR:
        raise ParseError(source, "a quantity such as 64Gi or 8", text)
    number = Decimal(match[1])
    return number * (Decimal(10) ** int(match[3]) if match[2] else _FACTOR[match[4] or ""])
