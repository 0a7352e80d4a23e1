"""The order of a step is data: golden for few batches, checked by rule for many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapopt_mindspore.schedule import AHEAD, Action, Verb, schedule

PER_TENSOR = {
    0: "",
    1: "H2D0 UPD0 D2H0 REL0",
    2: "H2D0 H2D1 UPD0 D2H0 REL0 UPD1 D2H1 REL1",
    3: "H2D0 H2D1 UPD0 D2H0 REL0 H2D2 UPD1 D2H1 REL1 UPD2 D2H2 REL2",
    4: "H2D0 H2D1 UPD0 D2H0 REL0 H2D2 UPD1 D2H1 REL1 H2D3 UPD2 D2H2 REL2 UPD3 D2H3 REL3",
    5: (
        "H2D0 H2D1 UPD0 D2H0 REL0 H2D2 UPD1 D2H1 REL1 H2D3 UPD2 D2H2 REL2 H2D4 UPD3 D2H3 REL3 "
        "UPD4 D2H4 REL4"
    ),
}
PACKED = {
    0: "",
    1: "H2D0 UPD0 D2H0 REL0",
    2: "H2D0 H2D1 UPD0 D2H0 UPD1 D2H1 REL0 REL1",
    3: "H2D0 H2D1 UPD0 D2H0 H2D2 UPD1 D2H1 UPD2 D2H2 REL1 REL2",
    4: "H2D0 H2D1 UPD0 D2H0 H2D2 UPD1 D2H1 H2D3 UPD2 D2H2 UPD3 D2H3 REL2 REL3",
    5: "H2D0 H2D1 UPD0 D2H0 H2D2 UPD1 D2H1 H2D3 UPD2 D2H2 H2D4 UPD3 D2H3 UPD4 D2H4 REL3 REL4",
}


@pytest.mark.parametrize("batches", range(6))
@pytest.mark.parametrize(
    ("reuses_memory", "golden"), [(False, PER_TENSOR), (True, PACKED)], ids=["per_tensor", "packed"]
)
def test_order_of_few_batches(batches: int, reuses_memory: bool, golden: dict[int, str]) -> None:
    actions = schedule(batches, window=2, reuses_memory=reuses_memory)
    assert " ".join(map(str, actions)) == golden[batches]


@pytest.mark.parametrize(
    ("reuses_memory", "golden"),
    [
        (
            False,
            "H2D0 H2D1 UPD0 D2H0 H2D2 UPD1 D2H1 H2D3 UPD2 D2H2 REL0 H2D4 UPD3 D2H3 REL1 H2D5 "
            "UPD4 D2H4 REL2 UPD5 D2H5 REL3 REL4 REL5",
        ),
        (
            True,
            "H2D0 H2D1 UPD0 D2H0 H2D2 UPD1 D2H1 H2D3 UPD2 D2H2 H2D4 UPD3 D2H3 H2D5 UPD4 D2H4 "
            "UPD5 D2H5 REL2 REL3 REL4 REL5",
        ),
    ],
    ids=["per_tensor", "packed"],
)
def test_order_of_more_batches_in_flight(reuses_memory: bool, golden: str) -> None:
    actions = schedule(6, window=4, reuses_memory=reuses_memory)
    assert " ".join(map(str, actions)) == golden


@given(batches=st.integers(0, 60), window=st.integers(2, 9), reuses_memory=st.booleans())
def test_rules_hold_for_any_number_of_batches(
    batches: int, window: int, reuses_memory: bool
) -> None:
    actions = list(schedule(batches, window=window, reuses_memory=reuses_memory))
    assert len(set(actions)) == len(actions)
    place = {action: index for index, action in enumerate(actions)}
    for position in range(batches):
        prefetch = place[Action(Verb.PREFETCH, position)]
        update = place[Action(Verb.UPDATE, position)]
        offload = place[Action(Verb.OFFLOAD, position)]
        assert prefetch < update < offload
        release = place.get(Action(Verb.RELEASE, position))
        assert release is None or offload < release
        if position + AHEAD < batches:
            assert offload < place[Action(Verb.PREFETCH, position + AHEAD)]
        if position + window < batches:
            taken_over = place[Action(Verb.PREFETCH, position + window)]
            assert offload < taken_over
            # Packed memory is handed over; otherwise it is given back before more is taken.
            assert release is None if reuses_memory else release < taken_over
        else:
            assert release is not None
