"""Cloud Hypervisor: no judge, since nothing of its own reads a command without starting it."""

from tests.conformance.judge import Example

EXAMPLE = Example(
    file=b"""#!/bin/sh
# start it
cloud-hypervisor --kernel /boot/vmlinux --cmdline "console=hvc0 root=/dev/vda1" \\
  --cpus boot=8,max=8,features=amx \\
  --memory size=32G,shared=on \\
  --disk path=/srv/focal.raw path=/srv/seed.img \\
  --device path=/sys/bus/pci/devices/0000:19:00.0/,x_nv_gpudirect_clique=0 \\
  --net tap=,mac=12:34:56:78:90:ab
""",
    owned=r"  --(cpus|memory|memory-zone|numa|platform|device) ",
    free=r'#|set -euo|"\$@"',
    refused_for=("one host node",),
)
