"""The rule of buckets: each gradient once, in the reverse order, of one kind, up to the size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.bucket_groups import BucketMember, group

MEMBERS = st.lists(
    st.builds(
        BucketMember,
        nbytes=st.one_of(st.integers(0, 1000), st.integers(3_999_990, 9_000_000)),
        kind=st.sampled_from(["float32", "bf16"]),
        dense=st.booleans(),
    ),
    max_size=30,
)


@given(parameters=MEMBERS, size=st.floats(1, 3e7), in_place=st.booleans(), compressed=st.booleans())
def test_each_parameter_is_in_one_bucket_of_its_kind(
    parameters: list[BucketMember], size: float, in_place: bool, compressed: bool
) -> None:
    groups = group(parameters, size, in_place=in_place, compressed=compressed)
    assert sorted(number for each in groups for number in each.members) == list(range(len(parameters)))
    for each in groups:
        assert list(each.members) == sorted(each.members, reverse=True)
        assert len({parameters[number].kind for number in each.members}) == 1
        # It would have been closed before.
        assert sum(parameters[number].nbytes for number in each.members[:-1]) < size
    assert [each.flags for each in groups] == [0] * (len(groups) - 1) + [len(parameters)] * bool(groups)


@given(parameters=MEMBERS, size=st.floats(1, 3e7))
def test_what_is_in_place_is_large_alone_and_not_last(parameters: list[BucketMember], size: float) -> None:
    groups = group(parameters, size, in_place=True, compressed=False)
    large = min(size, 4_000_000)
    for each in groups[:-1]:
        first = parameters[each.members[0]]
        assert each.in_place == (first.nbytes >= large and first.dense)
        assert not each.in_place or len(each.members) == 1
    assert not any(each.in_place for each in groups[-1:])
    for engine in ({"in_place": False, "compressed": False}, {"in_place": True, "compressed": True}):
        assert not any(each.in_place for each in group(parameters, size, **engine))


def test_buckets_of_one_kind_close_at_their_size() -> None:
    parameters = [BucketMember(nbytes=each) for each in (1, 8, 4, 5, 2, 3)]
    groups = group(parameters, 10, in_place=False, compressed=False)
    assert [each.members for each in groups] == [(5, 4, 3), (2, 1), (0,)]
