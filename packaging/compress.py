"""Compresses wheels again, in place: zopfli makes them 3 % smaller for the same unpackers.

python packaging/compress.py WHEEL...
"""

import sys
import zipfile

from zopfli import zlib


class Zopfli:
    """A compressor as zipfile calls it; zlib's two bytes before and four after are not for zip."""

    def __init__(self) -> None:
        self.data = b""

    def compress(self, data: bytes) -> bytes:
        self.data += data
        return b""

    def flush(self) -> bytes:
        return zlib.compress(self.data, numiterations=1)[2:-4]


for path in sys.argv[1:]:
    with zipfile.ZipFile(path) as wheel:
        entries = [(info, wheel.read(info)) for info in wheel.infolist()]
    with zipfile.ZipFile(path, "w") as wheel:
        for info, data in entries:
            with wheel.open(info, "w") as entry:
                entry._compressor = Zopfli()
                entry.write(data)
