"""Slots: every pair of states is either a step of the life cycle or an error."""

import itertools

import pytest

from swapopt_common import SlotState, SwapSlot, UpdateUnit, move_slots

LIFE_CYCLE = [
    ("pending", "host"),
    ("host", "h2d"),
    ("h2d", "device"),
    ("device", "d2h"),
    ("d2h", "host"),
]
AFTER_A_FAILED_COPY = [("h2d", "host"), ("d2h", "device")]
ALLOWED = {*LIFE_CYCLE, *AFTER_A_FAILED_COPY}
FORBIDDEN = sorted(
    {(a.value, b.value) for a, b in itertools.product(SlotState, repeat=2)} - ALLOWED
)

Slot = SwapSlot[bytearray, object]


def slot_in(state: str) -> Slot:
    return Slot("exp_avg", state=SlotState(state))


@pytest.mark.parametrize(("before", "after"), sorted(ALLOWED))
def test_allowed_move(before: str, after: str) -> None:
    slots = [slot_in(before), slot_in(before)]
    move_slots(iter(slots), SlotState(after))
    assert [slot.state.value for slot in slots] == [after, after]


@pytest.mark.parametrize(("before", "after"), FORBIDDEN)
def test_forbidden_move_names_slot_and_states(before: str, after: str) -> None:
    slot = slot_in(before)
    with pytest.raises(AssertionError, match=f"exp_avg.*{before} -> {after}"):
        move_slots([slot], SlotState(after))
    assert slot.state.value == before


def test_a_move_takes_its_event_along() -> None:
    slot, copied = slot_in("host"), object()
    move_slots([slot], SlotState.H2D, copied)
    assert slot.event is copied
    move_slots([slot], SlotState.DEVICE)
    assert slot.event is None


def test_all_pairs_are_covered() -> None:
    assert len(ALLOWED) == 7
    assert len(FORBIDDEN) == 18


def test_slots_and_units_are_identities() -> None:
    tensor = bytearray(8)
    assert Slot("exp_avg", tensor) != Slot("exp_avg", tensor)
    assert len({Slot("exp_avg", tensor), Slot("exp_avg", tensor)}) == 2
    assert UpdateUnit(0, tensor) != UpdateUnit(0, tensor)


def test_unit_counts_the_bytes_that_move() -> None:
    unit = UpdateUnit(
        0,
        bytearray(),
        slots=[
            Slot("exp_avg", storage_nbytes=4096),
            Slot("exp_avg_sq", storage_nbytes=2048),
            Slot("step", storage_nbytes=4, swappable=False),
        ],
    )
    assert unit.swappable_nbytes == 6144
    unit.slots[1].swappable = False
    assert unit.swappable_nbytes == 4096
    assert UpdateUnit(0, bytearray()).swappable_nbytes == 0
