"""The parameters that a plan is made for, and a rank's share of them."""

from __future__ import annotations

import math

import pytest
import torch

from swapopt_torch.plan.case import DTYPES, OPTIMIZERS, Case, Host
from swapopt_torch.plan.command import _DTYPES, _OPTIMIZERS, _PROFILES, _SHAPES
from swapopt_torch.plan.shapes import SHAPES, embedding, llama, shard, uniform
from swapopt_torch.virtual import PROFILES


@pytest.mark.parametrize("numel", [3 * 10**6, 10**9, 7 * 10**9, 70 * 10**9, 405 * 10**9])
def test_a_transformer_has_about_as_many_parameters_as_asked_for(numel: int) -> None:
    assert abs(llama(numel).numel - numel) < numel // 100


def test_seventy_billion_parameters_are_layers_like_those_of_the_known_model() -> None:
    model = llama(70 * 10**9)
    width = model.sizes[0][1]
    layers = (len(model.sizes) - 3) // 9
    assert 7_000 < width < 9_000
    assert 75 <= layers <= 85
    assert model.sizes[0] == model.sizes[-1] == (32_000, width)
    assert model.description.startswith(f"{layers} layers of width {width:,}, feed-forward ")


@pytest.mark.parametrize("numel", [100_000, 3 * 10**6 + 1, 10**9, 70 * 10**9 + 5])
def test_uniform_models_have_exactly_as_many(numel: int) -> None:
    assert uniform(numel).numel == numel


@pytest.mark.parametrize("numel", [100_000, 10**9])
def test_an_embedding_of_half_the_parameters(numel: int) -> None:
    model = embedding(numel)
    assert math.prod(model.sizes[0]) == pytest.approx(numel / 2, rel=0.01)
    assert model.numel == pytest.approx(numel, rel=0.01)


def test_shards_are_the_largest_that_fsdp_makes() -> None:
    sizes = [(10, 3), (4,), (1, 5)]
    assert shard(sizes, 1) == sizes
    expected = [tuple(torch.empty(size, device="meta").chunk(4)[0].shape) for size in sizes]
    assert shard(sizes, 4) == expected == [(3, 3), (1,), (1, 5)]


def test_a_host_shares_its_memory_among_ranks_and_directions() -> None:
    host = Host(ranks=8, bytes_per_second=400e9)
    h200, half = PROFILES["h200"], PROFILES["half-duplex"]
    assert host.share_bytes_per_second(h200) == 25e9
    assert host.share_bytes_per_second(half) == 50e9
    limited = host.limit(h200)
    assert limited.h2d_bytes_per_second == limited.d2h_bytes_per_second == 25e9
    assert host.limit(half).h2d_bytes_per_second == half.h2d_bytes_per_second
    assert Host(ranks=1).limit(h200).h2d_bytes_per_second == h200.h2d_bytes_per_second


def test_too_few_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 100,000 params, found 99,999"):
        Case(params=99_999)


def test_the_options_offer_what_there_is() -> None:
    # The command line lists them without importing torch's virtual accelerator.
    assert set(_PROFILES) == set(PROFILES)
    assert set(_OPTIMIZERS) == set(OPTIMIZERS)
    assert set(_DTYPES) == set(DTYPES)
    assert set(_SHAPES) == set(SHAPES)
