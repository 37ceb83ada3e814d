"""Options of every ssh connection: no forwarding, no tunnel, no local command."""

CLOSED = tuple(
    """
    -T -a -x -k -o ForwardX11Trusted=no -o ClearAllForwardings=yes -o Tunnel=no -o
    PermitLocalCommand=no
""".split()
)
"""Options of ssh to a machine that may be hostile, whatever the user's configuration says: neither
the user's agent, tickets, display nor network is lent to it, and no command runs here. How it is
reached (keys, ports, ProxyJump) stays the configuration's."""
