"""JSON text of guests, tools and files, parsed so that no input can crash the reader."""

from threading import RLock
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

TYPES = RLock()
"""Lock for what makes msgspec look at a type: it stores what it knows of one before it is whole,
and a second thread that meets the type then ends the process with SIGSEGV. Seen with 0.22.0."""


class NotJsonError(ValueError):
    """Not JSON, not UTF-8, nested too deep, or not of the requested type."""


@overload
def decode_json(text: str | bytes) -> Any: ...
@overload
def decode_json(text: str | bytes, record_type: type[T]) -> T: ...
def decode_json(text: str | bytes, record_type: Any = Any) -> Any:
    """Return the value of a text. Raises NotJsonError, with the fault.

    >>> decode_json("[" * 100_000)
    Traceback (most recent call last):
    homenode.json_text.NotJsonError: nested too deep
    """
    try:
        with TYPES:
            return msgspec.json.decode(text, type=record_type)
    except RecursionError:
        raise NotJsonError("nested too deep") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise NotJsonError(str(error) if text.strip() else "nothing") from None
