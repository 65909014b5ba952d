"""Small files that take far more memory or time than their size suggests, and what reading one costs a process."""

from __future__ import annotations

import io
import os
import struct
import sys
import tempfile
import zlib
from dataclasses import dataclass

from PIL import Image


def _jpeg(width: int, height: int, **options: object) -> bytes:
    """A JPEG file of 16 x 16 pixels whose header says another size: what lacks is grey."""
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "JPEG", **options)
    content = bytearray(buffer.getvalue())
    frame = content.index(b"\xff\xc2" if options.get("progressive") else b"\xff\xc0")
    content[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def progressive_jpeg(width: int, height: int, more_scans: int) -> bytes:
    """A progressive JPEG file with further scans, each a pass over all of its pixels."""
    content = _jpeg(width, height, progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + last * more_scans + content[-2:]


def wide_jpeg(width: int, height: int) -> bytes:
    """A JPEG file of some hundred bytes."""
    return _jpeg(width, height)


def png(width: int, height: int, depth: int = 8, colour: int = 6) -> bytes:
    """A PNG file of zeros; by default RGBA."""
    samples = {0: 1, 2: 3, 6: 4}[colour]
    rows = bytes(1 + -(-width * depth * samples // 8))
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(rows) for _ in range(height)) + packer.flush()

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    """A lossless WebP file of one colour, 34 bytes for any size: that of a small one with another header."""
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "WEBP", lossless=True, quality=0, method=0)
    content = bytearray(buffer.getvalue())
    place = content.index(b"VP8L") + 9
    bits = int.from_bytes(content[place : place + 4], "little") >> 28 << 28
    content[place : place + 4] = (bits | (height - 1) << 14 | (width - 1)).to_bytes(4, "little")
    return bytes(content)


def eps() -> bytes:
    """A PostScript program, which Pillow hands to Ghostscript."""
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n"


@dataclass(frozen=True)
class Cost:
    """What a child process took.

    Attributes:
        status: its exit status; negative for a signal.
        cpu: in seconds.
        peak: of its memory, in bytes; 0 if a signal ended it.
    """

    status: int
    cpu: float
    peak: int
    stdout: str
    stderr: str


# wait4 has the peak of this process too, from before the child's program began.
_TELL_PEAK = """
import atexit
@atexit.register
def tell_peak():
    with open("/proc/self/status") as file:
        peak = next(line.split()[1] for line in file if line.startswith("VmHWM"))
    print(peak, file=__import__("sys").__stdout__)
"""


def cost_of(program: str, *arguments: str) -> Cost:
    """Run Python text with arguments in a process of its own."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", _TELL_PEAK + program, *arguments],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, stdout.fileno(), 1), (os.POSIX_SPAWN_DUP2, stderr.fileno(), 2)],
        )
        _, status, used = os.wait4(pid, 0)
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode())
    lines = texts[0].splitlines()
    code = os.waitstatus_to_exitcode(status)
    peak = 1024 * int(lines.pop()) if code >= 0 else 0
    return Cost(code, used.ru_utime + used.ru_stime, peak, "\n".join(lines), texts[1])
