"""swapopt_torch.optim.AdamW by itself: torch's fused AdamW with one count per group."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn

from swapopt_torch import optim
from training import assert_same_bits

STEPS = 8


@pytest.fixture(params=["accelerator", "cpu"])
def place(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    return torch.device("cpu") if request.param == "cpu" else device


def parameters(
    place: torch.device, count: int = 4, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(70, 10 + index, generator=generator) for index in range(count)]
    return [nn.Parameter(value.to(place, dtype)) for value in values]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:1], "lr": 1e-3, "weight_decay": 0.3},
        {"params": params[1:], "betas": (0.8, 0.95), "eps": 1e-5},
    ]


def give_gradients(*models: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for twins in zip(*models, strict=True):
        grad = torch.randn(twins[0].shape, generator=generator)
        for parameter in twins:
            parameter.grad = grad.to(parameter.device, parameter.dtype)


def assert_equal(
    one: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    other: list[nn.Parameter],
    reference: torch.optim.Optimizer,
) -> None:
    """Parameters and moments are the same; only the count is kept elsewhere."""
    for index, (parameter, twin) in enumerate(zip(one, other, strict=True)):
        assert parameter.isfinite().all()
        assert_same_bits(parameter, twin, f"parameter {index}")
        state, expected = optimizer.state[parameter], reference.state[twin]
        assert "step" not in state
        assert set(state) == set(expected) - {"step"}
        for key, value in state.items():
            assert_same_bits(value, expected[key], f"{key} of parameter {index}")


def test_public_names() -> None:
    assert sorted(optim.__all__) == ["AdamW", "adamw"]
    assert issubclass(optim.AdamW, torch.optim.Optimizer)
    assert callable(optim.adamw)


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
def test_equals_torch_fused(place: torch.device, amsgrad: bool, maximize: bool) -> None:
    one, other = parameters(place), parameters(place)
    options = {"amsgrad": amsgrad, "maximize": maximize}
    optimizer = optim.AdamW(groups(one), 1e-2, **options)
    reference = torch.optim.AdamW(groups(other), 1e-2, fused=True, **options)
    for seed in range(STEPS):
        give_gradients(one, other, seed=seed)
        optimizer.step()
        reference.step(closure=None)
    assert_equal(one, optimizer, other, reference)
    assert [group["step"] for group in optimizer.param_groups] == [STEPS, STEPS]


def test_equals_torch_fused_with_mixed_dtypes(place: torch.device) -> None:
    """Parameters of two dtypes in turn in one group."""
    models = [
        [
            one
            for pair in zip(parameters(place, 3), parameters(place, 3, torch.bfloat16), strict=True)
            for one in pair
        ]
        for _ in range(2)
    ]
    optimizer = optim.AdamW(models[0], 1e-2)
    reference = torch.optim.AdamW(models[1], 1e-2, fused=True)
    for seed in range(STEPS):
        give_gradients(*models, seed=seed)
        optimizer.step()
        reference.step()
    assert_equal(models[0], optimizer, models[1], reference)


def test_defaults_are_torchs() -> None:
    ours = optim.AdamW(parameters(torch.device("cpu"))).defaults
    torchs = torch.optim.AdamW(parameters(torch.device("cpu"))).defaults
    assert ours == {key: torchs[key] for key in ours}
    assert set(ours) == {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"}


def test_a_group_counts_the_steps_in_which_it_has_a_gradient(place: torch.device) -> None:
    first, second, third = parameters(place, 3)
    optimizer = optim.AdamW([{"params": [first]}, {"params": [second]}])
    optimizer.add_param_group({"params": [third]})
    counts = []
    for active in ([first], [second], [first, second], []):
        for parameter in (first, second, third):
            parameter.grad = None
        give_gradients(active, seed=0)
        optimizer.step()
        counts.append([group["step"] for group in optimizer.param_groups])
    assert counts == [[1, 0, 0], [1, 1, 0], [2, 2, 0], [2, 2, 0]]
    assert third not in optimizer.state


def test_a_late_parameter_is_corrected_for_the_groups_count(place: torch.device) -> None:
    """Its first update has step 3 in the formula, unlike torch's, which counts for itself."""
    early, late = parameters(place, 2)
    twin = nn.Parameter(late.detach().clone())
    optimizer = optim.AdamW([early, late], 1e-2)
    for seed in range(2):
        give_gradients([early], seed=seed)
        optimizer.step()
    give_gradients([early, late], seed=2)
    twin.grad = late.grad
    optimizer.step()
    reference = torch.optim.AdamW([twin], 1e-2, fused=True)
    reference.state[twin] = {
        "step": torch.tensor(2.0, device=place),
        "exp_avg": torch.zeros_like(twin),
        "exp_avg_sq": torch.zeros_like(twin),
    }
    reference.step()
    assert_same_bits(late, twin, "late parameter")


def test_one_kernel_per_dtype_and_one_step_tensor(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, list[torch.Tensor]]] = []
    kernel = torch._fused_adamw_

    def record(params: list[torch.Tensor], *tensors: list[torch.Tensor], **options: Any) -> None:
        calls.append((len(params), tensors[-1]))
        kernel(params, *tensors, **options)

    monkeypatch.setattr(torch, "_fused_adamw_", record)
    params = parameters(device, 3) + parameters(device, 2, torch.bfloat16)
    optimizer = optim.AdamW(params)
    give_gradients(params, seed=0)
    optimizer.step()
    assert [count for count, _ in calls] == [3, 2]
    (step,) = {id(step): step for _, steps in calls for step in steps}.values()
    assert (step.device, step.dtype, step.shape, step.item()) == (device, torch.float32, (), 1.0)


def test_the_functional_alone(place: torch.device) -> None:
    one, other = parameters(place, 2), parameters(place, 2)
    give_gradients(one, other, seed=0)
    reference = torch.optim.AdamW(other, 1e-2, fused=True, amsgrad=True)
    reference.step()
    moments = [[torch.zeros_like(parameter) for parameter in one] for _ in range(3)]
    options: dict[str, Any] = {
        "amsgrad": True,
        "beta1": 0.9,
        "beta2": 0.999,
        "lr": 1e-2,
        "weight_decay": 1e-2,
        "eps": 1e-8,
        "maximize": False,
    }
    grads = [parameter.grad for parameter in one]
    with torch.no_grad():
        optim.adamw(one, grads, *moments, 1, **options)
        optim.adamw([], [], [], [], [], 1, **options)
    for parameter, twin in zip(one, other, strict=True):
        assert_same_bits(parameter, twin, "parameter")
    before = one[0].detach().clone()
    with pytest.raises(ValueError, match="2 params, 1 grads, 2 exp_avgs"):
        optim.adamw(one, grads[:1], *moments, 1, **options)
    assert_same_bits(one[0], before, "parameter")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "lr must be at least 0, but is -1.0"),
        ({"lr": float("nan")}, "lr must be at least 0"),
        ({"lr": torch.ones(2)}, "lr must have one element, but has 2"),
        ({"eps": -1e-8}, "eps must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] must be at least 0 and below 1, but is 1.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
        ({"betas": (0.9, torch.ones(2))}, r"betas\[1\] must have one element"),
    ],
)
def test_hyperparameters_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        optim.AdamW(parameters(torch.device("cpu")), **options)


def test_a_tensor_learning_rate_is_read_in_each_step(place: torch.device) -> None:
    one, other = parameters(place), parameters(place)
    optimizer = optim.AdamW(one, torch.tensor(1e-3))
    reference = torch.optim.AdamW(other, torch.tensor(1e-3), fused=True)
    for seed in range(3):
        give_gradients(one, other, seed=seed)
        optimizer.step()
        reference.step()
        for each in (optimizer, reference):
            each.param_groups[0]["lr"].mul_(0.5)
    assert_equal(one, optimizer, other, reference)


def test_refusals_change_nothing(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, embedding = parameters(place, 1)[0], nn.Embedding(8, 4, sparse=True)
    optimizer = optim.AdamW([{"params": [dense]}, {"params": [embedding.weight]}])
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)  # type: ignore[arg-type]
    give_gradients([dense], seed=0)
    embedding(torch.tensor([1, 2])).sum().backward()
    before = dense.detach().clone()
    with pytest.raises(ValueError, match=r"shape \(8, 4\) .* layout torch\.sparse_coo"):
        optimizer.step()
    embedding.weight.grad = None
    module = sys.modules["swapopt_torch.optim.adamw"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "is_capturing", lambda found: found == place)
        with pytest.raises(RuntimeError, match=f"graph is being captured on {place}"):
            optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
    assert not optimizer.state
    assert_same_bits(dense, before, "parameter")
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 0]


def test_no_scaling_support_is_claimed(place: torch.device) -> None:
    optimizer = optim.AdamW(parameters(place))
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def test_state_dict_copies_and_pickles_carry_the_counts(place: torch.device) -> None:
    params = parameters(place)
    optimizer = optim.AdamW(groups(params), amsgrad=True)
    for seed in range(3):
        give_gradients(params[:1] if seed else params, seed=seed)
        optimizer.step()
    fresh_params = [nn.Parameter(parameter.detach().clone()) for parameter in params]
    fresh = optim.AdamW(groups(fresh_params), amsgrad=True)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twins = [fresh, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    give_gradients(params, seed=9)
    optimizer.step()
    for twin in twins:
        own = [parameter for group in twin.param_groups for parameter in group["params"]]
        give_gradients(own, seed=9)
        twin.step()
        assert [g["step"] for g in twin.param_groups] == [g["step"] for g in optimizer.param_groups]
        assert_equal(own, twin, params, optimizer)
        assert len(twin._optimizer_load_state_dict_pre_hooks) == 1


def test_a_checkpoint_of_torchs_adamw_is_counted_per_group(place: torch.device) -> None:
    params, other = parameters(place), parameters(place)
    reference = torch.optim.AdamW(groups(params), fused=True)
    for seed in range(3):
        give_gradients(params, seed=seed)
        reference.step()
    saved = reference.state_dict()
    for target in (optim.AdamW(groups(other)), copy.deepcopy(optim.AdamW(groups(other)))):
        target.load_state_dict(copy.deepcopy(saved))
        own = [parameter for group in target.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter, value in zip(own, params, strict=True):
                parameter.copy_(value)
        assert [group["step"] for group in target.param_groups] == [3, 3]
        assert_equal(own, target, params, reference)


def test_a_checkpoint_with_several_counts_in_a_group_is_refused(place: torch.device) -> None:
    params = parameters(place)
    reference = torch.optim.AdamW(params, fused=True)
    give_gradients(params, seed=0)
    reference.step()
    params[0].grad = None
    reference.step()
    saved = reference.state_dict()
    optimizer = optim.AdamW(params)
    with pytest.raises(ValueError, match=r"counts 1 to 2 steps .* group 0"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    saved["param_groups"][0]["step"] = 2
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["step"] == 2
    assert all("step" not in state for state in optimizer.state.values())
    assert all("step" in state for state in saved["state"].values())
