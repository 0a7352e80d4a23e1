"""SwapOptimizerConfig: defaults, what it accepts, and what each refusal says."""

import dataclasses
import pickle
from collections.abc import Iterator
from enum import IntEnum

import pytest

from swapopt_common import STATE_KEYS, SwapConfigError, SwapOptimizerConfig


class ForeignInteger:
    """Converts to int, as the integers of other libraries do, without being one."""

    def __index__(self) -> int:
        return 16

    def __repr__(self) -> str:
        return "ForeignInteger(16)"


def names() -> Iterator[str]:
    yield "exp_avg"


def test_parameters_and_defaults_are_those_of_the_specification() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(SwapOptimizerConfig)}
    assert fields == {
        "swap_times": 16,
        "state_keys": None,
        "min_numel": 1024,
        "include_master_params": False,
        "packed_swap": None,
    }
    assert STATE_KEYS == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")


def test_every_accepted_value_is_kept() -> None:
    config = SwapOptimizerConfig(1, ["exp_avg"], 0, True, False)
    assert dataclasses.astuple(config) == (1, ("exp_avg",), 0, True, False)
    assert SwapOptimizerConfig(packed_swap=True).packed_swap is True
    assert SwapOptimizerConfig(swap_times=IntEnum("Times", {"FEW": 4}).FEW).swap_times == 4


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
def test_state_keys_are_kept_as_a_tuple_in_canonical_order(kind: type) -> None:
    config = SwapOptimizerConfig(state_keys=kind(["master_param", "exp_avg_sq", "exp_avg"]))
    assert config.state_keys == ("exp_avg", "exp_avg_sq", "master_param")
    assert config == SwapOptimizerConfig(state_keys=["exp_avg", "exp_avg_sq", "master_param"])


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("swap_times", 0, "an int >= 1"),
        ("swap_times", -3, "an int >= 1"),
        ("swap_times", True, "neither a bool"),
        ("swap_times", 16.0, "a Python int >= 1"),
        ("swap_times", "16", "a Python int >= 1"),
        ("swap_times", None, "a Python int >= 1"),
        ("swap_times", ForeignInteger(), "nor an integer of another library"),
        ("min_numel", -1, "an int >= 0"),
        ("min_numel", False, "neither a bool"),
        ("min_numel", 1024.0, "a Python int >= 0"),
        ("min_numel", ForeignInteger(), "nor an integer of another library"),
        ("state_keys", "exp_avg", "None or a list, tuple, set or frozenset"),
        ("state_keys", b"exp_avg", "None or a list, tuple, set or frozenset"),
        ("state_keys", names(), "None or a list, tuple, set or frozenset"),
        ("state_keys", {"exp_avg": True}, "None or a list, tuple, set or frozenset"),
        ("state_keys", [], "at least one name"),
        ("state_keys", frozenset(), "at least one name"),
        ("state_keys", ["exp_avg", "exp_avg"], "free of duplicates"),
        ("state_keys", ("exp_avg", "exp_avg_sq", "exp_avg"), "free of duplicates"),
        ("state_keys", ["exp_avg", "step"], "'step' is none of them"),
        ("state_keys", ["Exp_Avg"], "exp_avg, exp_avg_sq, max_exp_avg_sq, master_param"),
        ("state_keys", ["exp_avg", 7], "7 is none of them"),
        ("state_keys", [["exp_avg"]], "['exp_avg'] is none of them"),
        ("include_master_params", 1, "True or False"),
        ("include_master_params", None, "True or False"),
        ("packed_swap", 0, "True, False or None"),
        ("packed_swap", "auto", "True, False or None"),
    ],
)
def test_refusal_names_field_value_and_rule(field: str, value: object, rule: str) -> None:
    with pytest.raises(SwapConfigError) as refusal:
        SwapOptimizerConfig(**{field: value})
    message = str(refusal.value)
    assert f"SwapOptimizerConfig.{field} " in message
    assert f"found {value!r} ({type(value).__name__})" in message
    assert rule in message


def test_refusals_are_value_errors() -> None:
    assert issubclass(SwapConfigError, ValueError)


def test_frozen_hashable_and_picklable() -> None:
    config = SwapOptimizerConfig(state_keys={"exp_avg_sq", "exp_avg"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.swap_times = 2  # type: ignore[misc]
    assert hash(config) == hash(SwapOptimizerConfig(state_keys=("exp_avg", "exp_avg_sq")))
    assert pickle.loads(pickle.dumps(config)) == config


def test_replace_validates_again() -> None:
    config = SwapOptimizerConfig(state_keys=["exp_avg"])
    assert dataclasses.replace(config, swap_times=2).state_keys == ("exp_avg",)
    with pytest.raises(SwapConfigError, match="swap_times"):
        dataclasses.replace(config, swap_times=0)
