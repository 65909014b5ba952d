"""Shards in WebDataset's format that other programs made: of each image KEY.jpg, and its class number in KEY.cls.

Format: https://github.com/webdataset/webdataset; all before a name's first dot is the key.
"""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hpctrain.common.errors import HpctrainError
from hpctrain.common.shards.listing import (
    IMAGE_SUFFIXES,
    ImageFile,
    naming,
    open_tar,
    require_size,
    short_key,
    whole_members,
)

TAR = ".tar"
_LABEL = "cls"
_MOST_DIGITS = 9


@dataclass(frozen=True, kw_only=True)
class WebDatasetTar:
    """One such shard."""

    archive: Path

    def members(self) -> list[ImageFile]:
        """The images, in the order of their names in the tar.

        Raises:
            HpctrainError: cut short, damaged, or with samples that are not an image and its class number.
        """
        samples: dict[str, dict[str, tarfile.TarInfo]] = {}
        with open_tar(self.archive) as tar, naming(str(self.archive)):
            for file in whole_members(tar, str(self.archive)):
                path = PurePosixPath(file.name)
                key, _, ending = path.name.partition(".")
                samples.setdefault(str(path.parent / key), {})[ending.lower()] = file
            return [self._image(tar, key, files) for key, files in samples.items()]

    def _image(self, tar: tarfile.TarFile, key: str, files: dict[str, tarfile.TarInfo]) -> ImageFile:
        image = next((file for ending, file in files.items() if f".{ending}" in IMAGE_SUFFIXES), None)
        label = ""
        if _LABEL in files and files[_LABEL].size <= _MOST_DIGITS and (content := tar.extractfile(files[_LABEL])):
            label = content.read().decode(errors="replace").strip()
        if image is None or not re.fullmatch("[0-9]+", label):
            raise HpctrainError(
                "HT-webdataset-no-sample",
                "{archive}: {key} is not an image and its class number ({endings})",
                f"each sample has KEY{' or KEY'.join(IMAGE_SUFFIXES)}, and the number of its class in KEY.{_LABEL}",
                archive=self.archive,
                key=key,
                endings=", ".join(sorted(files)),
            )
        require_size(f"{self.archive}: {image.name}", image.size)
        # Keys are often numbers that begin anew in each shard.
        name = re.sub(r"[./]", "_", f"{self.archive.stem}_{key}")
        return ImageFile(str(self.archive), image.offset_data, image.size, int(label), short_key(name))
