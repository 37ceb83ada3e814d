"""Two prints of one definition are the same, two definitions are not."""

from homenode.vm.domain.merge import same_definition

DOMAIN = b"""<domain type='kvm'>
  <name>a</name>
  <devices>
    <controller type='usb' index='0'/>
    <disk device='disk'><target dev='vda'/></disk>
    <disk device='disk'><target dev='vdb'/></disk>
    <controller type='pci' index='0'/>
  </devices>
</domain>
"""


def test_the_order_in_which_libvirt_prints_controllers_says_nothing() -> None:
    usb = b"    <controller type='usb' index='0'/>\n"
    moved = DOMAIN.replace(usb, b"").replace(b"  </devices>", usb + b"  </devices>")
    assert moved != DOMAIN
    assert same_definition(DOMAIN, moved)
    assert same_definition(DOMAIN, DOMAIN.replace(b"type='usb' index='0'", b"index='0' type='usb'"))
    assert same_definition(DOMAIN, DOMAIN + b"\n")


def test_the_order_of_disks_and_every_value_do() -> None:
    swapped = DOMAIN.replace(b"vda", b"x").replace(b"vdb", b"vda").replace(b"'x'", b"'vdb'")
    assert not same_definition(DOMAIN, swapped)
    assert not same_definition(DOMAIN, DOMAIN.replace(b"<name>a<", b"<name>a <"))
    assert not same_definition(DOMAIN, DOMAIN.replace(b"index='0'/>\n  </d", b"index='1'/>\n  </d"))
    assert not same_definition(DOMAIN, DOMAIN.replace(b"  <name>a</name>\n", b""))
