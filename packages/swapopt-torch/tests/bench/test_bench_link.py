"""Measuring a link, and standing in for a model: on a device whose answers are known."""

from __future__ import annotations

import pytest
import torch
from bench_devices import OpenDevice

from swapopt_torch import virtual
from swapopt_torch.bench import device as bench_device
from swapopt_torch.bench.device import CardBenchDevice
from swapopt_torch.bench.link import MEASURED, measure_link
from swapopt_torch.demo.accelerator import CardAccelerator

NBYTES = 32 * 2**20


@pytest.mark.parametrize("profile", sorted(virtual.PROFILES))
def test_what_is_measured_is_what_the_profile_says(open_device: OpenDevice, profile: str) -> None:
    device = open_device(profile).accelerator.device
    known = virtual.PROFILES[profile]
    measured = measure_link(device, NBYTES)
    assert measured.link.source == MEASURED == "measured"
    for rate, expected in (
        (measured.h2d_alone_bytes_per_second, known.h2d_bytes_per_second),
        (measured.d2h_alone_bytes_per_second, known.d2h_bytes_per_second),
    ):
        # The event before the copy is recorded when the host gets to it: a launch earlier.
        beside_seconds = known.host_issue_seconds + known.copy_overhead_seconds
        assert NBYTES / rate == pytest.approx(NBYTES / expected + beside_seconds, abs=2e-9)
    assert measured.link.host_issue_seconds == pytest.approx(known.host_issue_seconds)
    # Small copies come as fast as the host issues them, or as the engine takes them.
    small = max(known.host_issue_seconds, known.copy_overhead_seconds + 4096 / 23e9)
    assert measured.link.copy_overhead_seconds == pytest.approx(small, rel=0.1)


def test_directions_that_take_turns_have_half_the_rate_each(open_device: OpenDevice) -> None:
    link = measure_link(open_device("half-duplex").accelerator.device, NBYTES).link
    known = virtual.PROFILES["half-duplex"]
    transfers = link.transfer_seconds(NBYTES)
    both = NBYTES / known.h2d_bytes_per_second + NBYTES / known.d2h_bytes_per_second
    assert transfers == pytest.approx(both, rel=0.02)


def test_a_full_duplex_link_keeps_its_rates(open_device: OpenDevice) -> None:
    link = measure_link(open_device("h200").accelerator.device, NBYTES).link
    assert link.transfer_seconds(NBYTES) == pytest.approx(NBYTES / 53e9, rel=0.02)


def test_a_card_is_kept_busy_with_as_many_products_as_the_time_holds(
    open_device: OpenDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device("h200").accelerator.device
    monkeypatch.setattr(bench_device, "_MATRIX_SIZE", 32)
    monkeypatch.setattr(bench_device, "measure_link", lambda device: measure_link(device, 4096))
    card = CardBenchDevice(CardAccelerator(device, "a card", "for a test", "wall time"))
    assert card.measures_host
    assert card.counts() is None
    monkeypatch.setattr(card, "_product_seconds", 0.5e-3)
    torch.virtual.synchronize(device)
    virtual.clear_operator_counts()
    card.train(4e-3)
    assert virtual.operator_counts() == {"aten::mm.out": 8}
