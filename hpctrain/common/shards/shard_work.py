"""The work of making a folder of images or text, as it is sent to the processes that do it."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.common.shards.make import ShardRequest, make_shards
from hpctrain.common.shards.manifest import ShardManifest
from hpctrain.common.shards.resumable import Map
from hpctrain.common.shards.text.prepare import Preparation, prepare_text
from hpctrain.common.shards.text.token_manifest import TextManifest

Work = ShardRequest | Preparation
Manifest = ShardManifest | TextManifest


def make(work: Work, run: Map, say: Callable[[str], None]) -> Manifest:
    """Make the folder, or what of it is missing or damaged.

    Raises:
        HpctrainError: see :func:`hpctrain.common.shards.make.make_shards` and
            :func:`hpctrain.common.shards.text.prepare.prepare_text`.
    """
    return make_shards(work, run, say) if isinstance(work, ShardRequest) else prepare_text(work, run, say)
