"""Reaper: runs a program, and waits for the processes that it leaves without a parent.

Where the first process of a machine looks for ended ones once a second, libvirt takes that long to
end each QEMU: it waits until there is none. Prints the program's number; Python alone is needed.
"""

import ctypes
import os
import subprocess
import sys

SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): include/uapi/linux/prctl.h."""


def main() -> None:
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print(subprocess.Popen(sys.argv[1:]).pid, flush=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
