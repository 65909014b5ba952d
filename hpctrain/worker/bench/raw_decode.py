"""Decodes whole photographs. The first line of input is a JSON list of files; each further line has them all decoded,
and is answered with their number, and with the processor's time that it took in nanoseconds.

It is a separate program so that nothing else takes its time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import simplejpeg


def main() -> None:
    contents = [Path(name).read_bytes() for name in json.loads(sys.stdin.readline())]
    for _ in sys.stdin:
        begin = time.process_time_ns()
        for content in contents:
            simplejpeg.decode_jpeg(content)
        print(len(contents), time.process_time_ns() - begin, flush=True)


if __name__ == "__main__":
    main()
