"""Output of lscpu -e."""

import pytest

from homenode.errors import ParseError
from homenode.machine.tools.lscpu import looks_like_lscpu, parse
from tests.mutations import MUTATIONS, survives

TABLE = """\
CPU NODE SOCKET CORE L1d:L1i:L2:L3 ONLINE    MAXMHZ   MINMHZ
  0    0      0    0 0:0:0:0          yes 3500.0000 800.0000
  1    0      0    0 0:0:0:0          yes 3500.0000 800.0000
  2    1      1    0 1:1:1:1          yes 3500.0000 800.0000
  3    -      -    - -                 no         -        -
"""


def test_columns_may_be_missing_and_stand_in_any_order() -> None:
    (cpu,) = parse("CPU CORE SOCKET\n  7    2      0\n").cpus
    assert (cpu.index, cpu.core, cpu.node, cpu.llc, cpu.is_online) == (7, 2, None, None, True)


def test_a_prompt_before_the_table_is_a_gap() -> None:
    text = f"$ lscpu -e\n{TABLE}"
    assert looks_like_lscpu(text)
    assert len(parse(text).gaps) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a header"),
        (TABLE.replace("3500.0000 800.0000\n", "\n", 1), "8 columns"),
        (TABLE.replace("  1    0 ", "  0    0 "), "each CPU once"),
        (TABLE.replace("  2    1 ", "  2    x "), "a number or -"),
        (TABLE.replace("  2    1 ", "  99999999    1 "), "at most"),
        (TABLE.replace("  2    1 ", "  2    1024 "), "at most 1023"),
        ("CPU NODE\n" + "".join(f"{cpu} 0\n" for cpu in range(8193)), "8192 at most"),
    ],
)
def test_a_table_of_another_form_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


def test_damaged_output_is_read_or_refused_and_nothing_else() -> None:
    assert survives(parse, TABLE, MUTATIONS) > 0
