"""Paper: a report as PDF, by WeasyPrint. [I/O]"""

import logging
from pathlib import Path

from homenode.errors import HostError
from homenode.report.page.render import missing_extra


def write_pdf(html: str, path: Path) -> None:
    """Write the pages of a report. Raises HostError without WeasyPrint, or where writing fails.

    Nothing is fetched: an address in the document, of whatever kind, is refused.
    """
    try:
        from weasyprint import HTML  # type: ignore[import-untyped]
        from weasyprint.urls import URLFetcher  # type: ignore[import-untyped]
    except ImportError as error:
        raise missing_extra(error.name or "weasyprint") from None
    except OSError as error:  # Pango is a library of the system's, loaded when it is imported
        raise HostError(
            f"report: expected the library Pango, found: {str(error).splitlines()[0]}",
            hint="Debian, Ubuntu: apt install libpango-1.0-0 libpangoft2-1.0-0; or write .html",
        ) from None
    logging.getLogger("weasyprint").setLevel(logging.ERROR)
    logging.getLogger("fontTools").setLevel(logging.ERROR)
    fetches_nothing = URLFetcher(allowed_protocols=())
    content = HTML(string=html, url_fetcher=fetches_nothing).write_pdf()
    assert content is not None  # it returns bytes where it is given no file
    replace_file(path, content)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises HostError."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise HostError(f"{path}: expected to write there, found: {error.strerror}") from None
