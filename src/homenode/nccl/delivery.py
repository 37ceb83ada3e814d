"""Delivery: a cloud-init snippet that puts a topology file where NCCL and RCCL look for it.

They look at NCCL_TOPO_FILE, else at DEFAULT_PATH. That is on a tmpfs, so the file itself lies in
/etc, and systemd-tmpfiles copies it at each boot. A copy, because a symbolic link would lead
nowhere in a container that mounts the folder.
"""

DEFAULT_PATH = "/var/run/nvidia-topologyd/virtualTopology.xml"
KEPT_PATH = "/etc/nccl/virtualTopology.xml"
_TMPFILES_PATH = "/etc/tmpfiles.d/nccl-topology.conf"
_RUN_PATH = DEFAULT_PATH.removeprefix("/var")


def cloud_config(topology: str) -> str:
    """The cloud-config of a file's text; to be merged with others that a VM may have.

    The text is indented, so it must have no tabs and no control characters: write_topology's has
    none.
    """
    folder = _RUN_PATH.rpartition("/")[0]
    rules = f"d {folder} 0755 root root -\nC {_RUN_PATH} 0644 root root - {KEPT_PATH}\n"
    return (
        "#cloud-config\n"
        "write_files:\n"
        f"{_file(KEPT_PATH, topology)}"
        f"{_file(_TMPFILES_PATH, rules)}"
        "runcmd:\n"
        f"  - [install, -D, -m, '0644', {KEPT_PATH}, {DEFAULT_PATH}]\n"
    )


def _file(path: str, content: str) -> str:
    indented = "".join(f"      {line}\n" for line in content.splitlines())
    return (
        f"  - path: {path}\n    owner: root:root\n    permissions: '0644'\n"
        f"    content: |\n{indented}"
    )
