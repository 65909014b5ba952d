"""The lines of a tool's output, which may be interleaved with its warnings."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.records import LANE_GBIT, Remark

# Far longer than any line of the tools, whose descriptions of nodes have 64 characters at most.
_LONGEST_LINE = 4096


class Listing:
    """A text by lines, with the common parts of its error messages.

    Args:
        where: the file's name, for messages.
        tool: the command that prints such a text.

    Raises:
        HpctrainError: it is empty or binary.
    """

    def __init__(self, text: str, where: str, tool: str) -> None:
        self.where = where
        self.tool = tool
        self._lines = text.split("\n")
        if "\r" in text:
            self._lines = [line.rstrip("\r") for line in self._lines]
        self._lanes: dict[tuple[str, str], tuple[int | None, str | None]] = {}
        self._noise = 0
        self._first_noise = ""
        self._first_noise_line = 0
        if not text.strip() or "\0" in text:
            raise self.foreign("text")

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """The number of each line and the line, without its end."""
        if max(map(len, self._lines)) > _LONGEST_LINE:
            number, line = next(pair for pair in enumerate(self._lines, 1) if len(pair[1]) > _LONGEST_LINE)
            raise self.damaged(f"a line of {len(line)} characters", number, line)
        return enumerate(self._lines, 1)

    @property
    def last(self) -> int:
        """The number of the last line that is not empty."""
        return len(self._lines) - (self._lines[-1] == "")

    def damaged(self, problem: str, number: int, line: str = "") -> HpctrainError:
        """The error for a line: its place, what is wrong with it, and how to write the file again."""
        return HpctrainError(
            "HT-fabric-file-damaged",
            "{where}: {problem}",
            f"write the file again: {self.tool} > {self.where}",
            where=f"{self.where}:{number}",
            problem=f"{problem}: {line.strip()[:60]!r}" if line else problem,
        )

    def cut_off(self, missing: int, first: str) -> HpctrainError:
        """The error for cables to nodes that the text does not list; ``first`` is the place of such a cable."""
        return self.damaged(
            f"the file is cut off: {missing} nodes at the end of cables are not in it (see {first})", self.last
        )

    def foreign(self, missing: str) -> HpctrainError:
        """The error for a text that has none of what the tool prints."""
        return HpctrainError(
            "HT-fabric-unknown-format",
            "{where}: no {missing} in it, so it is not the output of {tool}",
            f"write it with {self.tool} > {self.where}",
            where=self.where,
            missing=missing,
            tool=self.tool,
        )

    def pass_over(self, number: int, line: str) -> None:
        """Count a line that is not part of the tool's output.

        Raises:
            HpctrainError: the line is the last one and has no line break, so the text is cut off in it.
        """
        if not line.strip():
            return
        if number == len(self._lines):
            raise self.damaged("the file is cut off in the middle of its last line", number, line)
        if not self._noise:
            self._first_noise, self._first_noise_line = line.strip()[:60], number
        self._noise += 1

    def remarks(self) -> Iterator[Remark]:
        """One remark about all lines that were skipped."""
        if self._noise:
            yield Remark(
                text=f"ignored what {self.tool} does not print (lines: {self._noise}): {self._first_noise!r}",
                where=f"{self.where}:{self._first_noise_line}",
            )

    def lanes(self, number: int, width: str, speed: str) -> tuple[int | None, str | None]:
        """Width and speed as the tools abbreviate them: ``4x`` and ``HDR``; ``??`` and ``???`` are unknown.

        Raises:
            HpctrainError: a speed that InfiniBand does not have.
        """
        known = self._lanes.get((width, speed))
        if known is None:
            if speed != "???" and speed not in LANE_GBIT:
                raise self.damaged(f"the link speed {speed!r} is not one of {', '.join(LANE_GBIT)}", number)
            known = int(width[:-1]) if width[0].isdigit() else None, speed if speed != "???" else None
            self._lanes[width, speed] = known
        return known
