"""Incus"""

from tests.conformance.judge import Example

EXAMPLE = Example(
    file=b"""architecture: x86_64
config:
  image.os: Ubuntu
  limits.cpu: "8"
  limits.memory: 32GiB
  raw.qemu.conf: |-
    [device "qemu_balloon"]
    [global][2]
    driver = "ICH9-LPC"
    property = "disable_s4"
    value = "0"
  volatile.uuid: 2d5a0b2e-3b0f-4c53-8f51-1b0f2c3d4e5f
devices:
  gpu:
    gputype: physical
    pci: 0000:19:00.0
    type: gpu
  root:
    path: /
    pool: default
    type: disk
ephemeral: false
profiles:
- default
description: ""
""",
    owned=r"  (limits\.|raw\.qemu\.conf|user\.homenode)|    (\[numa\]|(type|src|dst|val) =)",
    free=r"#|name:|type:|homenode[0-9]:|gputype:",
    refused_for=(
        "x86_64",
        "a guest cell for each host node",
        "random order",
        "equal shares",
    ),
)
