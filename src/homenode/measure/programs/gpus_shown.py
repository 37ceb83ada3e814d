"""GPUs shown: addresses of the GPUs that a driver gives to this process, in its order. [I/O]

    python3 - cuda|hip   < this

Runs in any Python from 3.6 on. Prints one line of JSON, homenode.gpus/1. A job or a container may
be given fewer GPUs than /sys shows, and CUDA_VISIBLE_DEVICES orders them as it likes.

Source: cuInit, cuDeviceGetCount, cuDeviceGetPCIBusId (CUDA driver API); hipGetDeviceCount,
hipDeviceGetPCIBusId (HIP).
"""

import ctypes
import json
import sys
from typing import Any

FORMAT = "homenode.gpus/1"

_LIBRARIES = {
    "cuda": ("libcuda.so.1",),
    "hip": (
        "libamdhip64.so",
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so.5",
        "/opt/rocm/lib/libamdhip64.so",
    ),
}
_NO_DEVICE = 100  # of both


def load_library(driver: str) -> Any:
    """Load the driver's library; None if none can be loaded."""
    for name in _LIBRARIES[driver]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def list_addresses(driver: str, calls: Any) -> "list[str]":
    """Return the GPUs' addresses, by number. Raises OSError with the driver's code on failure."""
    count = ctypes.c_int()
    if driver == "cuda":
        _check("cuInit", calls.cuInit(0))
        _check("cuDeviceGetCount", calls.cuDeviceGetCount(ctypes.byref(count)))
    else:
        _check("hipGetDeviceCount", calls.hipGetDeviceCount(ctypes.byref(count)))
    bus_ids = []
    for number in range(count.value):
        text = ctypes.create_string_buffer(64)
        if driver == "cuda":
            device = ctypes.c_int()
            _check("cuDeviceGet", calls.cuDeviceGet(ctypes.byref(device), number))
            _check("cuDeviceGetPCIBusId", calls.cuDeviceGetPCIBusId(text, 64, device))
        else:
            _check("hipDeviceGetPCIBusId", calls.hipDeviceGetPCIBusId(text, 64, number))
        bus_ids.append(text.value.decode("ascii", "replace").lower())
    return bus_ids


def _check(call: str, code: int) -> None:
    if code != 0:
        raise OSError(f"{call} says {'no GPU' if code == _NO_DEVICE else f'error {code}'}")


def main(words: "list[str]") -> None:
    driver = words[0]
    bus_ids: list[str] | None = None
    reason = None
    driver_library = load_library(driver)
    if driver_library is not None:
        try:
            bus_ids = list_addresses(driver, driver_library)
        except (OSError, AttributeError) as error:  # AttributeError: a library without the call
            bus_ids, reason = ([], str(error)) if isinstance(error, OSError) else (None, None)
    document = {"format": FORMAT, "addresses": bus_ids, "reason": reason}
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
