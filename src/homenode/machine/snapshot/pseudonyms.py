"""Pseudonyms: replacements of secrets; the same secret always has the same pseudonym.

They are numbered in the order of the secrets and not derived from them, because the hash of a MAC
or a serial can be guessed in minutes. Each has the form of its secret: a MAC is a locally
administered MAC, an address is one of those set aside for documentation (RFC 5737, RFC 2544, RFC
3849), a UUID is a UUID.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable

_HEX = "0-9a-fA-F"
_UUID = re.compile(rf"(?<![{_HEX}])[{_HEX}]{{8}}(?:-[{_HEX}]{{4}}){{3}}-[{_HEX}]{{12}}(?![{_HEX}])")
# /etc/machine-id, and UUIDs in vital product data. CPU masks have a comma after 8 digits.
_LONG_HEX = re.compile(rf"(?<![{_HEX}x])[{_HEX}]{{32,}}(?![{_HEX}])")
# From 6 pairs on: MACs, EUI-64s (a PCI serial number is one), InfiniBand hardware addresses.
# A BDF has three pairs at most, and ranges of CPUs (00-11-22) do not chain.
_MAC = re.compile(
    rf"(?<![{_HEX}:-])[{_HEX}]{{2}}(?:(?::[{_HEX}]{{2}}){{5,19}}|(?:-[{_HEX}]{{2}}){{5,19}})"
    rf"(?![{_HEX}]|[:-][{_HEX}])"
)
_MAC_OF_FOURS = re.compile(
    rf"(?<![\w.])(?=[0-9.]*[a-fA-F])[{_HEX}]{{4}}\.[{_HEX}]{{4}}\.[{_HEX}]{{4}}(?![\w.])"
)
# Of an interface that systemd named by its MAC.
_MAC_OF_A_NAME = re.compile(rf"(?<=\b(?:en|ib|sl|wl|ww)x)[{_HEX}]{{12,}}(?!\w)")
_GUID_OF_FOURS = re.compile(rf"(?<![{_HEX}:])[{_HEX}]{{4}}(?::[{_HEX}]{{4}}){{3}}(?![{_HEX}:])")
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)")
_IPV6 = re.compile(rf"(?<![\w:.])(?=[{_HEX}:]*:[{_HEX}:]*:)[{_HEX}:]{{3,39}}(?:%\w+)?(?![\w:])")
_MAIL = re.compile(r"(?<![\w.+-])[A-Za-z][\w.+-]*@[A-Za-z](?:[\w.-]*\w)?(?!\w)")
_HOME = re.compile(r"(/home/|/Users/|/var/home/)([^/\s'\"<>,:;]+)")

_COMMON_WORDS = frozenset(
    """
    acpi all amd apple arm bridge bus cache cell class core cores cpu cpus debian default
    desktop device dmi domain driver gpu gpus guest host hosts hwloc ibm intel iommu kernel
    kvm libvirt linux localdomain localhost lspci machine mellanox memory nic node nodes
    none null numa nvidia nvlink nvme off pci pcie qemu red redhat rocm root server smt
    socket sys system test ubuntu unknown usb user users vcpu vfio virsh virtio virtual xen
""".split()
)
"""Names of hosts and users that are words of every tool's output: replacing them would break it
and hide nothing."""

_OF_TOOLS = re.compile(r"(?:GPU|NIC)\d+")

_SHORTEST = 3
"""Shorter names would be found everywhere."""

_OF_EVERY_HOST = frozenset({"localhost", "localdomain", "none", "null", "root", "user", "unknown"})
"""Common words that do not identify a person."""

# Certain places of a host's name: after these words, and in the output of uname -a.
_PLACE_OF_HOST = r"(?:\b(?:host|node)[ _-]?name\b(?:[\"']?\s*[:=>]\s*|\s+)[\"']?|^Linux (?=\S+ \d))"


class Pseudonyms:
    """Pseudonyms by secret, for one snapshot.

    >>> names = Pseudonyms(hosts=["gpu7.example.org"])
    >>> names.scrub("gpu7 has 3c:6a:48:11:22:33 and 10.1.2.3; GPU at 0000:3b:00.0")
    'host-1 has 02:00:00:00:00:01 and 192.0.2.1; GPU at 0000:3b:00.0'
    >>> names.scrub("3C-6A-48-11-22-33")
    '02-00-00-00-00-01'
    """

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self._of_secret: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._words: dict[str, str] = {}
        self._word_pattern: re.Pattern[str] | None = None
        self._placed: dict[str, str] = {}
        self._left: dict[str, None] = {}
        for host in hosts:
            host = host.strip().rstrip(".").lower()
            short = host.partition(".")[0]
            if _IPV4.fullmatch(host) or ":" in host:
                continue  # an address, which is found by its form
            pseudonym = self.replace_secret("host", short)
            for word in dict.fromkeys((host, short)):
                self._add_word(word, pseudonym)
                if word not in self._words and word not in _OF_EVERY_HOST:
                    self._placed[word] = pseudonym
                    self._left["host name"] = None
        for user in users:
            word = user.strip().lower()
            self._add_word(word, self.replace_secret("user", word))
            if word not in self._words and word not in _OF_EVERY_HOST:
                self._left["user name"] = None

    @property
    def not_everywhere(self) -> tuple[str, ...]:
        """Names that are replaced only in known places: too short or common names cannot be
        distinguished from other text."""
        return tuple(self._left)

    def replace_secret(self, kind: str, secret: str) -> str:
        """Return the pseudonym "KIND-N" of a secret. A pseudonym of that kind stays unchanged."""
        return self._remember(kind, secret, lambda count: f"{kind}-{count}")

    def replace_uuid(self, secret: str) -> str:
        """Return a UUID as the pseudonym of a UUID, or of another identifier of a machine."""
        key = secret.replace("-", "").lower()
        return self._remember("uuid", key, lambda n: f"00000000-0000-4000-8000-{n:012d}")

    def replace_serial(self, secret: str) -> str:
        """Return a pseudonym for a serial number; a long one is then replaced everywhere."""
        secret = secret.strip()
        pseudonym = self.replace_secret("serial", secret)
        # Short ones, and numbers that could be an amount of memory, are not looked for elsewhere.
        if len(secret) >= (12 if secret.isdigit() else 6) and len(set(secret)) > 2:
            self._add_word(secret.lower(), pseudonym)
        return pseudonym

    def scrub(self, text: str) -> str:
        """Replace everything in a text that is known or has a recognisable form. Call it only once:
        a pseudonym has the form of its secret, and would be replaced again."""
        return self.scrub_identities(self.scrub_forms(text))

    def scrub_identities(self, text: str) -> str:
        """Return the text with pseudonyms for the names and serials that are known by now."""
        text = _MAIL.sub(lambda found: self.replace_secret("mail", found[0].lower()), text)
        text = _HOME.sub(
            lambda found: found[1] + self.replace_secret("user", found[2].lower()), text
        )
        for word, pseudonym in self._placed.items():
            text = re.sub(
                rf"({_PLACE_OF_HOST}){re.escape(word)}(?![\w-]|\.\w)",
                rf"\g<1>{pseudonym}",
                text,
                flags=re.IGNORECASE | re.MULTILINE,
            )
        if self._words:
            if self._word_pattern is None:
                longest_first = sorted(self._words, key=lambda word: (-len(word), word))
                choice = "|".join(map(re.escape, longest_first))
                self._word_pattern = re.compile(
                    rf"(?<![A-Za-z0-9])(?:{choice})(?![A-Za-z0-9])", re.IGNORECASE
                )
            text = self._word_pattern.sub(self._replace_word, text)
        return text

    def scrub_forms(self, text: str) -> str:
        """Replace texts with a recognisable form. For paths: a host may be called node1, but a path
        of /sys never means the host."""
        text = _UUID.sub(lambda found: self.replace_uuid(found[0]), text)
        text = _LONG_HEX.sub(self._long_hex, text)
        text = _MAC.sub(self._replace_mac, text)
        text = _MAC_OF_FOURS.sub(self._mac_of_fours, text)
        text = _MAC_OF_A_NAME.sub(lambda found: self._mac_number(found[0]), text)
        text = _GUID_OF_FOURS.sub(self._replace_guid, text)
        text = _IPV4.sub(self._replace_ipv4, text)
        return _IPV6.sub(self._replace_ipv6, text)

    def _add_word(self, word: str, pseudonym: str) -> None:
        if len(word) >= _SHORTEST and word not in _COMMON_WORDS and word not in self._words:
            self._words[word] = pseudonym
            self._word_pattern = None

    def _remember(self, kind: str, secret: str, make: Callable[[int], str]) -> str:
        key = (kind, secret)
        if key not in self._of_secret:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._of_secret[key] = make(self._counts[kind])
        return self._of_secret[key]

    def _replace_word(self, match: "re.Match[str]") -> str:
        # On a host called gpu7, nvidia-smi's GPU7 is still a GPU.
        return match[0] if _OF_TOOLS.fullmatch(match[0]) else self._words[match[0].lower()]

    def _long_hex(self, match: "re.Match[str]") -> str:
        pseudonym = self.replace_uuid(match[0]).replace("-", "")
        return pseudonym.ljust(len(match[0]), "0")

    def _mac_number(self, digits: str) -> str:
        """Return the digits of a locally administered address, as many as there were."""
        digits = digits.lower()
        of_all = self._remember("mac", digits, lambda n: f"{n:x}")
        return "02" + of_all.rjust(len(digits) - 2, "0")

    def _replace_mac(self, match: "re.Match[str]") -> str:
        separator = match[0][2]
        digits = self._mac_number(match[0].replace(separator, ""))
        return separator.join(digits[at : at + 2] for at in range(0, len(digits), 2))

    def _mac_of_fours(self, match: "re.Match[str]") -> str:
        digits = self._mac_number(match[0].replace(".", ""))
        return f"{digits[:4]}.{digits[4:8]}.{digits[8:]}"

    def _replace_guid(self, match: "re.Match[str]") -> str:
        digits = self._mac_number(match[0].replace(":", ""))
        return ":".join(digits[at : at + 4] for at in range(0, 16, 4))

    def _replace_ipv4(self, match: "re.Match[str]") -> str:
        try:
            address = ipaddress.IPv4Address(match[0])
        except ipaddress.AddressValueError:
            return match[0]  # a version with four parts
        if address.is_unspecified or address.is_loopback:
            return match[0]
        return self._remember("ipv4", str(address), _documentation_ipv4)

    def _replace_ipv6(self, match: "re.Match[str]") -> str:
        text, percent, zone = match[0].partition("%")
        try:
            address = ipaddress.IPv6Address(text)
        except ipaddress.AddressValueError:
            return match[0]
        if address.is_unspecified or address.is_loopback:
            return match[0]
        return self._remember("ipv6", str(address), lambda n: f"2001:db8::{n:x}") + percent + zone


def _documentation_ipv4(count: int) -> str:
    """192.0.2.1 and on; after 254 the benchmarking network, which has space for 131,000 more."""
    if count < 255:
        return f"192.0.2.{count}"
    return str(ipaddress.IPv4Address("198.18.0.0") + (count - 254) % (1 << 17))
