"""Windows of text: which tokens stand where, in which pass."""

from __future__ import annotations

import numpy as np

from hpctrain.worker.data.sampling import endless_order
from hpctrain.worker.data.text import TokensInMemory, Windows, bundled_tokens

# A token says where it stands.
ROW = TokensInMemory(np.arange(1000, dtype=np.uint16))


def one(source: Windows, indices: np.ndarray):
    (samples,) = source.stream([indices], 0)
    return samples


def test_labels_are_the_tokens_after():
    windows = Windows(ROW, 16)
    assert len(windows) == 62
    samples = one(windows, np.arange(62))
    np.testing.assert_array_equal(samples.images, np.arange(992).reshape(62, 16))
    np.testing.assert_array_equal(samples.labels, samples.images + 1)
    assert (samples.images.dtype, samples.labels.dtype) == (np.int64, np.int64)


def test_the_last_label_must_be_there():
    assert [len(Windows(TokensInMemory(np.zeros(size, np.uint16)), 16)) for size in (0, 16, 17, 32, 33)] == [
        *(0, 0, 1, 1, 2)
    ]
    assert [len(Windows(TokensInMemory(np.zeros(size, np.uint16)), 16, 0)) for size in (0, 31, 32, 47, 48)] == [
        *(0, 0, 1, 1, 2)
    ]


def test_each_pass_sees_every_token_once_and_is_cut_elsewhere():
    windows = Windows(ROW, 16, seed=5)
    count = len(windows)
    order = endless_order(count, seed=5, first=0, count=40 * count)
    begins = []
    for number in range(40):
        own = order[number * count : (number + 1) * count]
        rows = np.sort(one(windows, own).images.ravel())
        np.testing.assert_array_equal(rows, np.arange(count * 16) + rows[0])
        begins.append(int(rows[0]))
    assert set(begins) <= set(range(16))
    assert len(set(begins)) > 8
    np.testing.assert_array_equal(one(Windows(ROW, 16, seed=5), order).images, one(windows, order).images)
    assert (one(Windows(ROW, 16, seed=6), order).images != one(windows, order).images).any()


def test_bundled_text_is_there_and_divided_by_document():
    train, val = (each.read(0, len(each)) for each in bundled_tokens())
    for tokens in (train, val):
        assert tokens.max() == 256
        assert tokens[-1] == 256
    documents = [bytes(part.astype(np.uint8)[:-1]) for part in np.split(train, np.flatnonzero(train == 256) + 1)[:-1]]
    held_out = [bytes(part.astype(np.uint8)[:-1]) for part in np.split(val, np.flatnonzero(val == 256) + 1)[:-1]]
    from pydoc_data.topics import topics

    assert sorted(documents + held_out) == sorted(text.encode() for text in topics.values())
    assert not set(documents) & set(held_out)
