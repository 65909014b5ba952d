"""The lines of a tool's output, which noise of the tool's own warnings may run through."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.errors import HpctrainError
from hpctrain.topology.link_speed import LANE_GBIT
from hpctrain.topology.records import Remark

# A node's description has 64 characters at most; nothing that the tools print comes near this.
_LONGEST_LINE = 4096


class Listing:
    """A text by lines, with what is common to every fault in it.

    Args:
        text: the whole of it.
        where: the file's name, for messages.
        tool: the command that prints such a text.

    Raises:
        HpctrainError: it is empty or binary.
    """

    def __init__(self, text: str, where: str, tool: str) -> None:
        self.where = where
        self.tool = tool
        self._lines = text.split("\n")
        self._noise = 0
        self._first_noise = ""
        self._first_noise_line = 0
        if not text.strip():
            raise HpctrainError(f"{where}: the file is empty", f"write it with {tool} > {where}")
        if "\0" in text:
            raise HpctrainError(f"{where}: a binary file, not the output of {tool}", f"write it with {tool} > {where}")

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """The number of each line and the line, without its end."""
        for number, line in enumerate(self._lines, start=1):
            if len(line) > _LONGEST_LINE:
                raise self.fault(number, f"a line of {len(line)} characters", line)
            yield number, line.rstrip("\r")

    @property
    def last(self) -> int:
        """The number of the last line that is not empty."""
        return len(self._lines) - (self._lines[-1] == "")

    def fault(self, number: int, what: str, line: str = "") -> HpctrainError:
        """The error for a line: what is wrong with it, and how to get the file again."""
        shown = f": {line.strip()[:60]!r}" if line else ""
        return HpctrainError(
            f"{self.where}:{number}: {what}{shown}", f"write the file again: {self.tool} > {self.where}"
        )

    def cut_off(self, missing: int, first: str) -> HpctrainError:
        """The error for cables that lead to nodes which the text does not list; ``first`` is where one is named."""
        return self.fault(
            self.last, f"the file is cut off: {missing} nodes at the end of cables are not in it (see {first})"
        )

    def pass_over(self, number: int, line: str) -> None:
        """Count a line that is none of the tool's own.

        Raises:
            HpctrainError: it is the last one and has no end, so the text is cut off within it.
        """
        if not line.strip():
            return
        if number == len(self._lines):
            raise self.fault(number, "the file is cut off in the middle of its last line", line)
        if not self._noise:
            self._first_noise, self._first_noise_line = line.strip()[:60], number
        self._noise += 1

    def remarks(self) -> Iterator[Remark]:
        """One remark for all the lines that were passed over."""
        if self._noise:
            yield Remark(
                text=f"passed over what {self.tool} does not print (lines: {self._noise}): {self._first_noise!r}",
                where=f"{self.where}:{self._first_noise_line}",
            )

    def lanes(self, number: int, width: str, speed: str) -> tuple[int | None, str | None]:
        """Width and speed as the tools abbreviate them: ``4x`` and ``HDR``; ``??`` and ``???`` are unknown.

        Raises:
            HpctrainError: a speed that InfiniBand does not have.
        """
        if speed != "???" and speed not in LANE_GBIT:
            raise self.fault(number, f"the link speed {speed!r} is none of {', '.join(LANE_GBIT)}")
        return int(width[:-1]) if width[0].isdigit() else None, speed if speed != "???" else None
