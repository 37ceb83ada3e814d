"""Program text: our own measuring programs in Python, as they are sent to where they run. [I/O]

A Python with PyTorch gets one whole on its standard input. It may be another one than ours, on
another machine, from 3.8 on, without homenode: the text carries the modules that the program
imports, each under its own name.
"""

from importlib.resources import files

from homenode.errors import HostError

_PACKAGE = "homenode.bench.programs"
_CARRIED = ("torch_place", "torch_timing")

_LAUNCHER = """\
import sys, types
def _carry(name, source):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
"""


def program_text(name: str) -> str:
    """The text of a program of bench/programs, for `python3 - ...`.

    Raises HostError where the installation lacks it.
    """
    lines = [_LAUNCHER]
    for module in _CARRIED:
        lines.append(f"_carry({f'{_PACKAGE}.{module}'!r}, {_source(module)!r})\n")
    main = f'compile({_source(name)!r}, "homenode {name}", "exec")'
    lines.append(f'exec({main}, {{"__name__": "__main__"}})\n')
    return "".join(lines)


def _source(name: str) -> str:
    try:
        return files(_PACKAGE).joinpath(f"{name}.py").read_text("utf-8")
    except OSError as error:
        raise HostError(
            f"{name}: expected it in bench/programs, found: {error.strerror}",
            hint="install homenode again",
        ) from None
