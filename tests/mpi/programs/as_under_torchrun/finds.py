"""What a script finds on a rank, and what works there: its name, streams, environment, handlers, modules, children."""

from __future__ import annotations

import atexit
import inspect
import json
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import typing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

RANK = os.environ["RANK"]
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Its port and its name for the run are new each time, and the agent's store is torchrun's own.
CHANGING = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE")


@dataclass
class Point:
    """Something of this script's own that is pickled."""

    x: int
    y: Path


def named() -> object:
    main = sys.modules["__main__"]
    return [
        *(sys.argv[1:], Path(sys.argv[0]).name, Path(__file__).name, __name__, __doc__, __spec__, __package__),
        *(main.Point is Point, sys.path[0] == os.getcwd(), Path.cwd() == Path(__file__).resolve().parent),
        *(inspect.getsource(named), sorted(main.__dict__), __builtins__.__name__, sys.flags.optimize),
    ]


def variables() -> object:
    of_torchrun = {name for name in os.environ if name.startswith(("GROUP_", "ROLE_", "TORCHELASTIC_"))}
    return [
        {name: os.environ[name] for name in OF_RANKS},
        {name: os.environ[name] for name in sorted(of_torchrun.difference(CHANGING))},
        all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
        [os.environ.get(name) for name in ("OF_THE_USER", "OMP_NUM_THREADS", "HOME")],
    ]


def streams() -> object:
    each = [sys.stdin, sys.stdout, sys.stderr]
    return [[stream.encoding, stream.errors, stream.isatty(), stream.name, stream.closed] for stream in each], (
        sys.stdout.write_through,
        os.umask(os.umask(0)),
        os.getpriority(os.PRIO_PROCESS, 0),
        random.Random(0).random(),
        sys.getrecursionlimit(),
    )


def found_handlers() -> object:
    return {name: str(signal.getsignal(signal.Signals[name])) for name in ("SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE")}


def own_handlers() -> object:
    got: list[int] = []
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGHUP, signal.SIGINT]
    before = [signal.signal(number, lambda number, _: got.append(number)) for number in numbers]
    for number in numbers:
        os.kill(os.getpid(), number)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    return got


def threads() -> object:
    raised = []
    before, threading.excepthook = threading.excepthook, lambda given: raised.append(given.exc_type.__name__)
    thread = threading.Thread(target=lambda: 1 / 0, name="divides")
    thread.start()
    thread.join()
    threading.excepthook = before
    return raised, threading.current_thread() is threading.main_thread()


def double(number: int) -> int:
    return 2 * number


def fork() -> object:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(double, range(3))


def spawn() -> object:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(double, range(3)))


def pickled() -> object:
    text = pickle.dumps(Point(1, Path("a")))
    return pickle.loads(text) == Point(1, Path("a")), b"__main__" in text, typing.get_type_hints(Point)["x"].__name__


def imported() -> object:
    import beside.inner

    return beside.inner.NAME, beside.inner.__package__, beside.__path__ == [str(Path(__file__).with_name("beside"))]


def ends() -> object:
    # What is registered first comes last.
    atexit.register(LOG.write, "last handler\n")
    atexit.register(LOG.write, "first handler\n")
    threading.Thread(target=lambda: (threading.main_thread().join(), LOG.write("thread\n"))).start()
    return sys.exc_info()[0]


PROGRAMS = (
    *(named, variables, streams, found_handlers, own_handlers, threads, fork, spawn),
    *(pickled, imported, ends),
)

if __name__ == "__main__":
    # Left open at the end, in a cycle with the variables of this script.
    LOG = open(f"log-{RANK}.csv", "w")
    for program in PROGRAMS:
        Path(f"{program.__name__}-{RANK}.txt").write_text(json.dumps(program(), default=repr, indent=1))
        print(program.__name__, end=" ")
    print("é", file=sys.stdout)
    os.write(1, b"by the system\n")
    LOG.write("step 1, loss 0.5\n")
