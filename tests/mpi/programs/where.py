"""Each rank writes what it finds of its place to a file of its own in the folder given."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

rank = os.environ["OMPI_COMM_WORLD_RANK"]
found = {
    "host": socket.gethostname(),
    "cores": sorted(os.sched_getaffinity(0)),
    "ucx": os.environ.get("UCX_NET_DEVICES"),
}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
