"""Program text: our own measuring programs in Python, as they are sent to where they run. [I/O]"""

from importlib.resources import files

from homenode.errors import HostError


def program_text(name: str) -> str:
    """Source of a program of bench/programs. Raises HostError where the installation lacks it."""
    try:
        return files("homenode.bench.programs").joinpath(f"{name}.py").read_text("utf-8")
    except OSError as error:
        raise HostError(
            f"{name}: expected it in bench/programs, found: {error.strerror}",
            hint="install homenode again",
        ) from None
