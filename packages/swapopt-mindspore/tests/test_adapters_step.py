"""One step of an adapter: its gradients, its order, its counters, and where it reads states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.nn.optim import optimizer as mindspore_optimizer

from adapting import Adapted
from cases import MINDFORMERS, NATIVE, Case, grouped
from swapopt_mindspore.adapters import MindSporeAdamBaseAdapter, base
from training import (
    Regressor,
    Run,
    assert_same_run,
    copy_of,
    eager,
    eager_leaving_alone,
    snapshot,
    towards_targets,
    train,
)

CASES = {
    name: {**NATIVE, **MINDFORMERS}[name]
    for name in ("adam_amsgrad", "adam_weight_decay_groups", "mindformers_masters")
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def make(case: Case) -> nn.Optimizer:
    return case.make(list(Regressor(case.dtypes).trainable_params()))


def gradients_of(optimizer: nn.Optimizer, step: int = 0) -> list[Tensor]:
    _, gradients = towards_targets(nn.Cell(), optimizer, step, 1.0)
    return list(gradients)


def pulled(case: Case, stepped: Callable[[nn.Optimizer], object], **options: object) -> Run:
    return train(case.make, stepped, dtypes=case.dtypes, differentiate=towards_targets, **options)


def test_a_parameter_without_a_gradient_is_left_alone(case: Case) -> None:
    # Step 5 has no gradient at all; its counters advance all the same.
    missing = {0: {1}, 2: {0, 5}, 3: {1, 2, 3, 4, 5}, 5: set(range(6))}
    expected = pulled(case, eager_leaving_alone, missing=missing)
    assert_same_run(pulled(case, Adapted, missing=missing), expected)
    assert expected.counters["global_step"] == [8]


def test_the_order_of_updates_does_not_matter(case: Case) -> None:
    def backwards(optimizer: nn.Optimizer) -> Adapted:
        return Adapted(optimizer, arrange=lambda batches: [batch[::-1] for batch in batches[::-1]])

    assert_same_run(pulled(case, backwards), pulled(case, eager))


def test_returns_one_flat_tuple_in_parameter_order(case: Case) -> None:
    optimizer = make(case)
    adapted, gradients = Adapted(optimizer), gradients_of(optimizer)
    assert adapted(tuple(gradients)) == (True,) * 6
    assert adapted((*gradients[:2], None, *gradients[3:])) == (True, True, None, True, True, True)


def test_gradients_may_be_a_list(case: Case) -> None:
    optimizer = make(case)
    assert Adapted(optimizer)(gradients_of(optimizer)) == (True,) * 6


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda gradients: gradients[:-1], "expected 6 gradients.*found 5"),
        (lambda gradients: [*gradients, None], "expected 6 gradients.*found 7"),
        (lambda gradients: gradients[0], "6 parameters; found"),
        (lambda gradients: None, "6 parameters; found NoneType"),
        (lambda gradients: [*gradients[:-1], 0.5], "norm.*dense Tensor or None; found float"),
        (lambda gradients: gradients[::-1], r"must have its shape.*found \(32,\)"),
    ],
    ids=["too few", "too many", "no tuple", "nothing", "a number", "other order"],
)
def test_wrong_gradients_are_refused_and_nothing_changes(
    spoil: Callable[[list[Tensor]], object], said: str
) -> None:
    optimizer = make(NATIVE["adam"])
    adapted = Adapted(optimizer)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=said):
        adapted(spoil(gradients_of(optimizer)))
    assert_same_run(snapshot(optimizer), before)


def test_states_are_read_and_written_through_their_slots(case: Case) -> None:
    """As when states are elsewhere: the optimizer's own tensors hold rubbish meanwhile."""
    optimizer, reference = make(case), make(case)
    adapted, step = Adapted(optimizer), eager(reference)
    slots = [slot for unit in adapted.adapter.units for slot in unit.slots]
    for slot in slots:
        slot.tensor = Tensor(copy_of(slot.parameter))
        slot.parameter.copy_(ops.full_like(slot.parameter, np.nan))
    for index in range(3):
        gradients = gradients_of(reference, index)
        adapted(tuple(gradients))
        step(tuple(gradients))
    for slot in slots:
        assert np.isnan(copy_of(slot.parameter)).all()
        slot.parameter.copy_(slot.operand())
    assert_same_run(snapshot(optimizer), snapshot(reference))


@pytest.mark.parametrize("updated", [0, 1, 3])
def test_a_failed_step_has_advanced_its_counters_if_it_has_updated_something(
    case: Case, updated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, reference = make(case), make(case)
    adapted = Adapted(optimizer)
    gradients = gradients_of(reference)
    original, calls = type(adapted.adapter).update, 0

    def failing(self: MindSporeAdamBaseAdapter[nn.Optimizer], unit: object) -> None:
        nonlocal calls
        calls += 1
        if calls > updated:
            raise KeyboardInterrupt
        original(self, unit)

    monkeypatch.setattr(type(adapted.adapter), "update", failing)
    with pytest.raises(KeyboardInterrupt):
        adapted(tuple(gradients))
    adapted.adapter.abandon_step()
    adapted.adapter.drop_gradients()

    if updated:
        missing = [None] * (len(gradients) - updated)
        eager_leaving_alone(reference)((*gradients[:updated], *missing))
    assert_same_run(snapshot(optimizer), snapshot(reference))


def test_an_interrupted_advance_is_finished(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, reference = make(case), make(case)
    adapted, gradients = Adapted(optimizer), gradients_of(reference)
    assign, interrupts = base._assign, [KeyboardInterrupt()]

    def interrupted(counter: Parameter, value: Tensor) -> None:
        assign(counter, value)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(base, "_assign", interrupted)
    with pytest.raises(KeyboardInterrupt):
        adapted(tuple(gradients))
    adapted.adapter.abandon_step()
    eager_leaving_alone(reference)((gradients[0], *[None] * 5))
    assert_same_run(snapshot(optimizer), snapshot(reference))


def test_gradients_are_forgotten_after_a_step(case: Case) -> None:
    optimizer = make(case)
    adapted = Adapted(optimizer)
    adapted(tuple(gradients_of(optimizer)))
    assert all(unit.grad is None for unit in adapted.adapter.units)
    assert not adapted.adapter.iter_update_units()


def test_a_learning_rate_set_between_steps_counts(case: Case) -> None:
    optimizer, reference = make(case), make(case)
    adapted, step = Adapted(optimizer), eager(reference)
    for index, rate in enumerate((0.1, 0.001)):
        gradients = tuple(gradients_of(reference, index))
        for owner in (optimizer, reference):
            rates = owner.learning_rate
            for parameter in (rates,) if isinstance(rates, Parameter) else rates:
                parameter.copy_(Tensor(rate, mstype.float32))
        adapted(gradients)
        step(gradients)
    assert_same_run(snapshot(optimizer), snapshot(reference))


def test_gradients_are_centralized_where_a_group_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for MindSpore's operator Centralization, which has no CPU kernel."""
    centralized: list[tuple[int, ...]] = []

    def stand_in(gradient: Tensor, axis: list[int]) -> Tensor:
        centralized.append(tuple(gradient.shape))
        return gradient - gradient.mean(axis=tuple(axis), keep_dims=True)

    monkeypatch.setattr(mindspore_optimizer, "op_gc", stand_in)
    groups = grouped({"grad_centralization": True, "weight_decay": 0.1}, {})
    case = Case(lambda params: nn.Adam(groups(params), learning_rate=0.02, loss_scale=2.0))
    expected = pulled(case, eager)
    native, centralized[:] = list(centralized), []
    assert_same_run(pulled(case, Adapted), expected)
    assert centralized == native
    assert set(native) == {(32, 16), (8, 32)}
