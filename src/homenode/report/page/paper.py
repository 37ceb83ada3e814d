"""Paper: a report as PDF, by WeasyPrint. [I/O]"""

import logging

from homenode.errors import HostError
from homenode.report.page.render import missing_extra


def pdf_pages(html: str) -> bytes:
    """The pages of a report. Raises HostError without WeasyPrint.

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
    assert isinstance(content, bytes)  # where it is given no file
    return content
