"""nccl-tests and rccl-tests: collectives over message sizes.

    all_reduce_perf -b 8 -e 8G -f 2 -g 8 -w 10 -n 100 [-J out.json]

Seen of nccl-tests 2.0 to 2.19.6 and rccl-tests ae3e635; JSON of versions 1 to 3 (-J, since 2.17.3).
Source: src/common.cu and src/util.cu of both.

* The columns are time, algbw, busbw and #wrong, out of place and in place. Bus bandwidth is what is
  comparable across numbers of GPUs; algorithm bandwidth stands before it.
* There was no root column before 2.11, and a column "error" in place of "#wrong".
* -O 0 of rccl-tests prints one half; newer nccl-tests leave a half blank.
* "Avg bus bandwidth" is over all sizes, small ones included.
* The JSON holds the whole environment, secrets included: `env` and `args` are not read.
* Host names are not kept; hosts are numbered as they appear.
"""

from homenode.machine.tools.nccl_tests_json import parse_json
from homenode.machine.tools.nccl_tests_records import NcclTests
from homenode.machine.tools.nccl_tests_text import parse_text


def argv(
    gpus: int, *, largest_bytes: int, warmups: int = 10, iterations: int = 100
) -> tuple[str, ...]:
    """The command of an all-reduce from 8 bytes up, doubling; data are checked."""
    return (
        "all_reduce_perf",
        "-b",
        "8",
        "-e",
        str(largest_bytes),
        "-f",
        "2",
        "-g",
        str(gpus),
        "-w",
        str(warmups),
        "-n",
        str(iterations),
        "-c",
        "1",
    )


def parse(text: str) -> NcclTests:
    """The one run of an output, text or the file of -J. Raises ParseError."""
    return parse_json(text) if text.lstrip().startswith("{") else parse_text(text)
