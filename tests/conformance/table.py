"""The table of judges: those of all modules here, in the order of their modules' names."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from tests import conformance
from tests.command_line import has_cluster
from tests.conformance.judge import Judge

OF_CLUSTER = ("kubevirt", "kubevirt_chain", "slurmd")
LEFT_OUT = ("__main__", "table", *(() if has_cluster() else OF_CLUSTER))


def _judges() -> Iterator[Judge]:
    for module in iter_modules(conformance.__path__, f"{conformance.__name__}."):
        name = module.name.rpartition(".")[2]
        if name not in LEFT_OUT and not name.startswith("test_"):
            for value in vars(import_module(module.name)).values():
                yield from (value,) if isinstance(value, Judge) else _several(value)


def _several(value: object) -> tuple[Judge, ...]:
    judges = value if isinstance(value, tuple) else ()
    return tuple(one for one in judges if isinstance(one, Judge))


JUDGES = tuple({judge.name: judge for judge in _judges()}.values())
