"""Dynamic sampling: which groups are trained, whatever order they arrive in."""

import random

import pytest

from rlboost_runtime.trainer.learn.sample import GroupSelection


def run(policy: str, wanted: int, flat: set[int], order: list[int]) -> tuple[list[int], GroupSelection]:
    selection = GroupSelection(policy, wanted)
    trained = [each for group in order for each in selection.arrived(group, flat=group in flat)]
    return trained, selection


def test_keep_trains_all_and_drop_leaves_the_flat_ones_out():
    trained, kept = run("keep", 4, {1, 2}, [3, 1, 0, 2])
    assert trained == [3, 1, 0, 2]
    assert kept.metrics() == {
        "groups_trained": 4, "groups_flat": 2, "groups_replaced": 0, "groups_spare_unused": 0,
    }  # fmt: skip
    trained, dropped = run("drop", 4, {1, 2}, [3, 1, 0, 2])
    assert trained == [3, 0]
    assert dropped.metrics()["groups_flat"] == 2


def test_spares_take_the_places_of_flat_groups_and_the_rest_is_counted():
    trained, selection = run("replace", 3, {0, 3}, [0, 1, 2, 3, 4, 5])
    assert trained == [1, 2, 4]
    assert selection.metrics() == {
        "groups_trained": 3, "groups_flat": 2, "groups_replaced": 1, "groups_spare_unused": 1,
    }  # fmt: skip


def test_a_spare_waits_until_it_is_certain():
    selection = GroupSelection("replace", 2)
    assert selection.arrived(2, flat=False) == []  # 0 and 1 may still both be good
    assert selection.arrived(1, flat=False) == [1]
    assert selection.arrived(0, flat=True) == [2]


@pytest.mark.parametrize("seed", range(20))
def test_the_set_does_not_depend_on_the_order_of_arrival(seed):
    draw = random.Random(seed)
    asked, wanted = 9, 6
    flat = {group for group in range(asked) if draw.random() < 0.3}
    order = draw.sample(range(asked), asked)
    trained, _ = run("replace", wanted, flat, order)
    assert sorted(trained) == [group for group in range(asked) if group not in flat][:wanted]
    assert len(set(trained)) == len(trained)


@pytest.mark.parametrize(
    ("flat", "asked", "more"),
    [(set(), 4, 0), ({0}, 4, 2), ({0, 1}, 4, 4), ({0, 1, 2}, 4, 4), ({0, 1, 2, 3}, 4, 4), ({1, 5}, 6, 0)],
)
def test_what_is_missing_is_asked_for_by_the_share_of_useful_groups(flat, asked, more):
    _, selection = run("replace", 4, flat, list(range(asked)))
    assert selection.num_to_ask_for(asked) == more
    _, dropped = run("drop", 4, flat, list(range(asked)))
    assert dropped.num_to_ask_for(asked) == 0


def test_too_few_spares_leave_a_smaller_step():
    trained, _ = run("replace", 3, {0, 1, 2}, [0, 1, 2, 3])
    assert trained == [3]
