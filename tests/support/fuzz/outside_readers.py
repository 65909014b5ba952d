"""Each reader of what comes from outside, by name, as one function of bytes.

It gives a value or raises :class:`hpctrain.common.errors.HpctrainError`; anything else is a fault of the reader.
"""

from __future__ import annotations

from support.fuzz import outside_data, outside_texts

READERS = {**outside_texts.READERS, **outside_data.READERS}
