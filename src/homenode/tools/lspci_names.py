"""lspci names: numbers of the classes and vendors that lspci prints in words.

Only what decides something is here: classes that discovery distinguishes, and vendors of GPUs,
NICs, switches, disks and management controllers. Source: pci.ids (classes; vendors).
"""

_CLASSES = {
    "SCSI storage controller": 0x0100,
    "IDE interface": 0x0101,
    "RAID bus controller": 0x0104,
    "SATA controller": 0x0106,
    "Serial Attached SCSI controller": 0x0107,
    "Non-Volatile memory controller": 0x0108,
    "Mass storage controller": 0x0180,
    "Ethernet controller": 0x0200,
    "Infiniband controller": 0x0207,
    "Fabric controller": 0x0208,
    "Network controller": 0x0280,
    "VGA compatible controller": 0x0300,
    "XGA compatible controller": 0x0301,
    "3D controller": 0x0302,
    "Display controller": 0x0380,
    "Multimedia video controller": 0x0400,
    "Multimedia audio controller": 0x0401,
    "Audio device": 0x0403,
    "Multimedia controller": 0x0480,
    "RAM memory": 0x0500,
    "FLASH memory": 0x0501,
    "CXL": 0x0502,
    "Memory controller": 0x0580,
    "Host bridge": 0x0600,
    "ISA bridge": 0x0601,
    "PCI bridge": 0x0604,
    "CardBus bridge": 0x0607,
    "Semi-transparent PCI-to-PCI bridge": 0x0609,
    "Bridge": 0x0680,
    "Serial controller": 0x0700,
    "Parallel controller": 0x0701,
    "Communication controller": 0x0780,
    "PIC": 0x0800,
    "DMA controller": 0x0801,
    "Timer": 0x0802,
    "RTC": 0x0803,
    "PCI Hot-plug controller": 0x0804,
    "SD Host controller": 0x0805,
    "IOMMU": 0x0806,
    "System peripheral": 0x0880,
    "FireWire (IEEE 1394)": 0x0C00,
    "USB controller": 0x0C03,
    "Fibre Channel": 0x0C04,
    "SMBus": 0x0C05,
    "InfiniBand": 0x0C06,
    "IPMI Interface": 0x0C07,
    "Serial bus controller": 0x0C80,
    "Network and computing encryption device": 0x1000,
    "Encryption controller": 0x1080,
    "Performance counters": 0x1101,
    "Signal processing controller": 0x1180,
    "Processing accelerators": 0x1200,
    "Non-Essential Instrumentation": 0x1300,
    "Co-processor": 0x4000,
    "Unassigned class": 0xFF00,
}

# The longest name that fits decides: AMD and Broadcom have two numbers each.
_VENDORS = {
    "Advanced Micro Devices, Inc. [AMD/ATI]": 0x1002,
    "Advanced Micro Devices, Inc. [AMD]": 0x1022,
    "Amazon.com, Inc.": 0x1D0F,
    "ASPEED Technology, Inc.": 0x1A03,
    "ASMedia Technology Inc.": 0x1B21,
    "Broadcom / LSI": 0x1000,
    "Broadcom Inc. and subsidiaries": 0x14E4,
    "Broadcom Limited": 0x14E4,
    "Chelsio Communications Inc": 0x1425,
    "Cray Inc": 0x17DB,
    "Habana Labs Ltd.": 0x1DA3,
    "Intel Corporation": 0x8086,
    "KIOXIA Corporation": 0x1E0F,
    "LSI Logic / Symbios Logic": 0x1000,
    "Marvell Technology Group Ltd.": 0x11AB,
    "Matrox Electronics Systems Ltd.": 0x102B,
    "Mellanox Technologies": 0x15B3,
    "Micron Technology Inc": 0x1344,
    "Microchip Technology": 0x11F8,
    "NVIDIA Corporation": 0x10DE,
    "Pensando Systems": 0x1DD8,
    "PLDA": 0x1556,
    "PLX Technology, Inc.": 0x10B5,
    "PMC-Sierra Inc.": 0x11F8,
    "QLogic Corp.": 0x1077,
    "Red Hat, Inc.": 0x1AF4,
    "Samsung Electronics Co Ltd": 0x144D,
    "Sandisk Corp": 0x15B7,
    "SK hynix": 0x1C5C,
    "Solarflare Communications": 0x1924,
    "Solidigm": 0x025E,
    "Xilinx Corporation": 0x10EE,
}


def class_code_of(name: str) -> int | None:
    """16 bits of a class by its name; None for one that is not listed.

    >>> hex(class_code_of("3D controller") or 0), class_code_of("Flux capacitor")
    ('0x302', None)
    """
    return _CLASSES.get(name)


def vendor_id_of(words: str) -> int | None:
    """The vendor with whose name a function's words begin; None for one that is not listed.

    >>> hex(vendor_id_of("NVIDIA Corporation Device 2330") or 0)
    '0x10de'
    """
    fitting = [name for name in _VENDORS if words.startswith(name)]
    return _VENDORS[max(fitting, key=len)] if fitting else None
