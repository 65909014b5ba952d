"""The programs that can start ranks, and the command by which one does."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from hpctrain.common.cluster.launcher import TORCHRUN
from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.whole import write_whole
from hpctrain.common.settings import COLUMNS, STDIN


@dataclass(frozen=True, kw_only=True)
class Srun:
    """Slurm's srun, and its MPI plugin."""

    mpi: str

    @property
    def name(self) -> str:
        return f"srun --mpi={self.mpi}"


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """PyTorch's launcher: one torchrun per host starts that host's ranks, and all meet on the first host.

    Attributes:
        node: this host's index among the plan's hosts.
    """

    node: int = 0

    @property
    def name(self) -> str:
        return TORCHRUN


# An MPI installation stands for its mpirun.
Launcher = MpiInstallation | Srun | Torchrun


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to execute: a launcher with the program, changes of the environment, and the text of required files.

    Attributes:
        without: variables to remove from the inherited environment.
    """

    program: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The whole command line."""
        return self.launcher + self.program

    def environment_from(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the process to start."""
        kept = {name: value for name, value in inherited.items() if name not in self.without}
        return {**kept, **self.environment}

    def write_files(self) -> None:
        """Write :attr:`files`."""
        for path, text in self.files.items():
            write_whole(path, text.encode(), private=True)

    def start(self, output: IO[str] | None = None) -> subprocess.Popen[bytes]:
        """Start the process, in a session of its own, with both of its streams in ``output`` or else in one pipe.

        Raises:
            HpctrainError: the program does not exist or cannot be started.
        """
        try:
            return subprocess.Popen(
                self.arguments,
                env={
                    **self.environment_from(os.environ),
                    **({COLUMNS.name: str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}),
                    **({STDIN.name: f"{socket.gethostname()}:/proc/{os.getpid()}/fd/0"} if _may_read_stdin() else {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=output or subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise HpctrainError(
                "HT-launcher-not-started",
                "cannot start {program}: {reason}",
                program=self.arguments[0],
                reason=error.strerror,
            ) from error

    def shell(self) -> str:
        """The command as text for a POSIX shell, one setting per line, after the files."""
        files = [f"printf %s {shlex.quote(text)} > {shlex.quote(str(path))} &&\n" for path, text in self.files.items()]
        settings = [f"-u {name}" for name in self.without]
        settings += [shlex.quote(f"{name}={value}") for name, value in self.environment.items()]
        lines = ["env", *settings] if settings else []
        for number, word in enumerate(self.launcher):
            # Each option begins a line that its value stays on.
            if number == 0 or word.startswith("-"):
                lines.append(shlex.quote(word))
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return "".join(files) + " \\\n  ".join([*lines, shlex.join(self.program)])


def _may_read_stdin() -> bool:
    """Whether this process has a standard input; a terminal's is that of the job in its foreground."""
    try:
        return sys.stdin is not None and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        # No terminal, or one that controls no jobs.
        return True
