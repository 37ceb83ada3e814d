"""Listings of lspci -vvv of our own making, for tests of links."""


def port(
    bdf: str,
    ids: str,
    kind: str,
    primary: str,
    secondary: str,
    subordinate: str,
    most: float,
    lanes: int,
    speed: float,
    width: int,
) -> str:
    """A bridge with its buses, what its link can and what it has."""
    return (
        f"{bdf} PCI bridge [0604]: A maker's bridge [{ids}]\n"
        f"\tBus: primary={primary}, secondary={secondary}, "
        f"subordinate={subordinate}, sec-latency=0\n"
        f"\tCapabilities: [40] Express (v2) {kind}, MSI 00\n"
        f"\t\tLnkCap:\tPort #1, Speed {most}GT/s, Width x{lanes}\n"
        f"\t\tLnkSta:\tSpeed {speed}GT/s (ok), Width x{width} (ok)"
    )


def arc() -> str:
    """Intel's Arc: a GPU that says 2.5 GT/s x1 behind a switch of its own, whose uplink is real."""
    return "\n\n".join(
        (
            port("00:01.0", "8086:a70d", "Root Port (Slot+)", "00", "01", "04", 16, 8, 16, 8),
            port("01:00.0", "8086:4fa1", "Upstream Port", "01", "02", "04", 16, 8, 16, 8),
            port(
                "02:01.0", "8086:4fa4", "Downstream Port (Slot-)", "02", "03", "03", 2.5, 1, 2.5, 1
            ),
            "03:00.0 VGA compatible controller [0300]: Intel Corporation DG2 [8086:56a0]\n"
            "\tCapabilities: [70] Express (v2) Endpoint, MSI 00\n"
            "\t\tLnkCap:\tPort #0, Speed 2.5GT/s, Width x1\n"
            "\t\tLnkSta:\tSpeed 2.5GT/s (ok), Width x1 (ok)",
        )
    )
