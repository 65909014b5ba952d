"""Ctrl-C reaches each rank as a KeyboardInterrupt, also one that sleeps; some scripts save then, and some do not."""

import os
import sys
import time

rank = os.environ["RANK"]
try:
    print("begun", flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(1)
    with open(f"saved-{rank}.txt", "w") as file:
        file.write("state")
    if "passes on" in sys.argv:
        if rank == "1":
            # As Lightning does.
            sys.exit(1)
        raise
