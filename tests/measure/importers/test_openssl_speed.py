"""Output of openssl speed."""

import shutil
import subprocess

import pytest

from homenode.errors import ParseError
from homenode.measure.importers.openssl_speed import argv, parse
from tests.mutations import MUTATIONS, survives

RSA_3_0 = """\
Forked child 0
Forked child 1
Got: +F2:2:2048:1281.188119:19883.000000 from 0
version: 3.0.19
built on: Fri Apr  3 12:29:32 2026 UTC
options: bn(64,64)
compiler: gcc -fPIC -pthread -m64 -Wall -O3
CPUINFO: OPENSSL_ia32cap=0xfffa3203078bffff:0x405fc6f1bf07ab
                  sign    verify    sign/s verify/s
rsa 4096 bits 0.000394s 0.000026s   2535.2  38747.0
"""

RSA_3_5 = """\
version: 3.5.0
                   sign    verify    encrypt   decrypt   sign/s verify/s  encr./s  decr./s
rsa  4096 bits 0.000987s 0.000041s 0.000042s 0.000987s   1013.3  24544.8  23868.2   1013.6
"""

BULK = """\
version: 3.0.19
The 'numbers' are in 1000s of bytes per second processed.
type             16 bytes     64 bytes   1024 bytes
sha256           91340.65k   334785.45k  1446966.14k
                              sign    verify    sign/s verify/s
 256 bits ecdsa (nistp256)   0.0000s   0.0001s  46752.0  16328.0
"""


def test_rates_of_an_algorithm_are_read_by_their_header() -> None:
    run = parse(RSA_3_0)
    assert (run.version, run.processes) == ("3.0.19", 2)
    assert [(r.algorithm, r.operation, r.operations_per_s) for r in run.rates] == [
        ("rsa 4096 bits", "sign", 2535.2),
        ("rsa 4096 bits", "verify", 38747.0),
    ]
    assert not run.gaps


def test_columns_that_newer_versions_add_do_not_shift_the_others() -> None:
    assert {r.operation: r.operations_per_s for r in parse(RSA_3_5).rates} == {
        "sign": 1013.3,
        "verify": 24544.8,
        "encrypt": 23868.2,
        "decrypt": 1013.6,
    }


def test_bulk_ciphers_are_in_bytes_per_second_by_block() -> None:
    run = parse(BULK)
    assert [bulk.block_bytes for bulk in run.bulk] == [16, 64, 1024]
    rates = [bulk.bytes_per_s for bulk in run.bulk]
    assert rates == pytest.approx([91_340_650, 334_785_450, 1_446_966_140])
    assert run.rates[0].algorithm == "256 bits ecdsa (nistp256)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a row such as"),
        ("+F2:2:2048:2950.000000:41178.000000\n", "output of -mr is not read"),
        (RSA_3_0.replace("sign/s verify/s", "sign/s"), "1 times and 1 rates"),
        (BULK.replace("  334785.45k", ""), "3 rates"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError) as refused:
        parse(text)
    assert says in str(refused.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_installed_tool_is_understood() -> None:
    done = subprocess.run(argv("rsa1024", 2, 1), capture_output=True, text=True, check=False)
    run = parse(done.stdout)
    assert {"sign", "verify"} <= {rate.operation for rate in run.rates}
    assert not run.gaps


@pytest.mark.parametrize("text", [RSA_3_0, RSA_3_5, BULK])
def test_damaged_output_is_read_or_refused_and_nothing_else(text: str) -> None:
    assert survives(parse, text, MUTATIONS) > 0
