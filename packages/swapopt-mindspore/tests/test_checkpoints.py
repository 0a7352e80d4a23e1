"""Saving and loading: MindSpore's own files, names and functions, from and to host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore import dataset as ds

from cases import MINDFORMERS, NATIVE
from dtensor import DTensor
from swapopt_common import HostMemoryError, SlotState, SwapConfigError, SwapOptimizerConfig
from swapopt_mindspore import MindSporeSwapOptimizer, swap_optimizer
from swapopt_mindspore.emulated import EmulatedDevice
from swapping import Twins, adam, adamw, make_parameters
from training import (
    MakeOptimizer,
    Regressor,
    assert_same_bytes,
    assert_same_run,
    copy_of,
    eager,
    snapshot,
)

# The second is smaller than min_numel, and so its states stay on the device.
SHAPES = [(16, 8), (24,), (8, 8), (5, 7)]
CONFIG = SwapOptimizerConfig(swap_times=3, min_numel=30)
PACKED = SwapOptimizerConfig(swap_times=3, min_numel=30, include_master_params=True)


def adam_weight_decay(params: list[Parameter]) -> nn.Optimizer:
    optimizer: nn.Optimizer = nn.AdamWeightDecay(params, learning_rate=0.02, weight_decay=0.1)
    return optimizer


OPTIMIZERS: dict[str, Callable[[], Twins]] = {
    "adam": lambda: Twins(adam, SHAPES, EmulatedDevice(), CONFIG),
    "adam_amsgrad": lambda: Twins(NATIVE["adam_amsgrad"].make, SHAPES, EmulatedDevice(), CONFIG),
    "adam_weight_decay": lambda: Twins(adam_weight_decay, SHAPES, EmulatedDevice(), CONFIG),
    "mindformers": lambda: Twins(
        adamw, SHAPES, EmulatedDevice(), PACKED, (ms.bfloat16, ms.float32)
    ),
}


@pytest.fixture(params=OPTIMIZERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["ckpt", "safetensors"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def device_of(twins: Twins) -> EmulatedDevice:
    assert twins.swapped._engine is not None
    device = twins.swapped._engine._device
    assert isinstance(device, EmulatedDevice)
    return device


def swapped_names(optimizer: MindSporeSwapOptimizer) -> set[str]:
    assert optimizer._engine is not None
    return {slot.parameter.name for slot in optimizer._engine.layout.slots()}


def save_and_load(optimizer: nn.Optimizer, path: Path, form: str) -> dict[str, Parameter]:
    ms.save_checkpoint(optimizer, str(path), format=form)
    saved: dict[str, Parameter] = ms.load_checkpoint(f"{path}.{form}", format=form)
    return saved


def assert_same_values(found: dict[str, Parameter], expected: dict[str, Parameter]) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        assert_same_bytes(copy_of(value), copy_of(expected[name]), name)


class OnTheHost:
    """Checks that no swapped state comes to the device inside its block."""

    def __init__(self, twins: Twins) -> None:
        self._device = device_of(twins)
        self._optimizer = twins.swapped

    def __enter__(self) -> None:
        self._optimizer.synchronize()
        self._before_bytes = self._device.memory().allocated_bytes
        self._device.reset_peak()
        self._device.clear_timeline()

    def __exit__(self, *_: object) -> None:
        memory = self._device.memory()
        assert memory.peak_allocated_bytes == memory.allocated_bytes == self._before_bytes
        assert [row for row in self._device.timeline() if row.lane in {"h2d", "d2h"}] == []


# ------------------------------------------------------------------ the specification's scenarios
def roundtrip(twins: Twins, again: Twins, path: Path, form: str) -> None:
    """Save after three steps, load into a second optimizer that has taken one, go on."""
    twins.step(3)
    with OnTheHost(twins):
        saved = save_and_load(twins.swapped, path, form)
    native = save_and_load(twins.native, path.with_name("native"), form)
    assert_same_values(saved, native)
    again.step(1)
    told_to_be_on_the_host(again)
    with OnTheHost(again):
        ms.load_param_into_net(again.swapped, native)
        again.swapped.synchronize()
    ms.load_param_into_net(again.native, saved)
    again.steps = twins.steps
    for _ in range(2):
        again.assert_equal()
        assert_same_run(snapshot(again.swapped), snapshot(twins.native))
        again.step()
        twins.step()


def told_to_be_on_the_host(twins: Twins) -> None:
    """Let states that are given new tensors count as being on the host, as on Ascend.

    There tensors that were read from a file are on the host until an operator uses them.
    """
    device_of(twins).keep_on_host([slot.home for slot in twins.swapped._engine.layout.slots()])


@pytest.mark.parametrize("kind", ["adam", "adam_weight_decay"])
def test_native_adam_swap_optimizer_checkpoint_cpu_mirror_roundtrip(
    kind: str, form: str, tmp_path: Path
) -> None:
    twins, again = OPTIMIZERS[kind](), OPTIMIZERS[kind]()
    roundtrip(twins, again, tmp_path / "saved", form)
    assert swapped_names(again.swapped) == {
        f"{key}.p{index}"
        for key in (("moment1", "moment2") if kind == "adam" else ("adam_m", "adam_v"))
        for index in (0, 2, 3)
    }, "p1 is too small to swap, and was saved and loaded as natively"
    for slot in again.swapped._engine.layout.slots():
        assert slot.parameter.data_ptr() == slot.host_address


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not_strict"])
def test_native_adam_swap_optimizer_checkpoint_fresh_load_builds_slots(
    strict: bool, tmp_path: Path
) -> None:
    twins, fresh = OPTIMIZERS["adam"](), OPTIMIZERS["adam"]()
    twins.step(3)
    saved = save_and_load(twins.native, tmp_path / "saved", "ckpt")
    if not strict:
        saved["somebody.else"] = Parameter(Tensor(np.zeros(3, np.float32)))
        del saved["beta2_power"]
    slots = fresh.swapped._engine.layout.slots()
    addresses = [slot.host_address for slot in slots]
    with OnTheHost(fresh):
        incompatible = fresh.swapped.load_state_dict(saved, strict=strict)
    assert incompatible.missing_keys == ([] if strict else ["beta2_power"])
    assert incompatible.unexpected_keys == ([] if strict else ["somebody.else"])
    after = fresh.swapped._engine.layout.slots()
    assert all(one is other for one, other in zip(slots, after, strict=True))
    for slot, address in zip(slots, addresses, strict=True):
        assert slot.host_address == slot.parameter.data_ptr() == address
        assert slot.state is SlotState.HOST
        assert slot.tensor is slot.cpu_tensor
    if not strict:
        fresh.swapped.beta2_power.set_data(Tensor(copy_of(twins.native.beta2_power)))
    fresh.steps = twins.steps
    for _ in range(2):
        fresh.swapped.synchronize()
        assert_same_run(snapshot(fresh.swapped), snapshot(twins.native))
        fresh.swapped(twins.gradients())
        twins.step()


def test_mindformers_adamw_packed_swap_optimizer_checkpoint_roundtrip(
    form: str, tmp_path: Path
) -> None:
    twins, again = OPTIMIZERS["mindformers"](), OPTIMIZERS["mindformers"]()
    assert twins.swapped.swap_stats().packed
    roundtrip(twins, again, tmp_path / "saved", form)
    assert {name for name in swapped_names(again.swapped) if "main_param" in name} == {
        "main_param.p0",
        "main_param.p2",
    }


# ------------------------------------------------------------------ every way in and out
def test_names_and_values_are_native_whichever_way_they_are_read(kind: str) -> None:
    twins = OPTIMIZERS[kind]()
    for _ in range(2):
        twins.step(1, missing={2})
        native = twins.native.state_dict()
        # Each right after a step: the last offloads have not happened yet.
        assert_same_values(twins.swapped.state_dict(), native)
        twins.step()
        assert_same_values(twins.swapped.parameters_dict(), twins.native.parameters_dict())
        twins.step()
        ours, theirs = twins.swapped.get_parameters(), twins.native.get_parameters()
        assert_same_values({p.name: p for p in ours}, {p.name: p for p in theirs})
        twins.step()
        ours, theirs = (
            optimizer.parameters_and_names(expand=False)
            for optimizer in (twins.swapped, twins.native)
        )
        assert_same_values(dict(ours), dict(theirs))


def test_a_cell_around_it_saves_and_loads_it_too(tmp_path: Path) -> None:
    """As ModelCheckpoint does, which saves the whole training cell."""
    twins = OPTIMIZERS["adam"]()
    cells = [nn.CellList([optimizer]) for optimizer in (twins.swapped, twins.native)]
    twins.step(2)
    assert_same_values(*(save_and_load(cell, tmp_path / "saved", "ckpt") for cell in cells))
    twins.step()
    saved = cells[0].state_dict()
    assert_same_values(saved, cells[1].state_dict())
    expected = snapshot(twins.native)
    twins.step()
    incompatible = cells[0].load_state_dict(saved, strict=False)
    assert incompatible.missing_keys == incompatible.unexpected_keys == []
    assert_same_run(snapshot(twins.swapped), expected)
    misfit = {**saved, "0.moment1.p2": Parameter(Tensor(np.ones(3, np.float32)))}
    with pytest.raises(RuntimeError, match=r"0.moment1.p2 has shape \(3,\)"):
        cells[0].load_state_dict(misfit)
    assert_same_run(snapshot(twins.swapped), expected)


def test_native_and_swapped_load_each_others_states(kind: str) -> None:
    twins, fresh = OPTIMIZERS[kind](), OPTIMIZERS[kind]()
    twins.step(3)
    # MindSpore's own strict call refuses the dotted names that its own state_dict gave.
    fresh.native.load_state_dict(twins.swapped.state_dict(), strict=False)
    fresh.swapped.load_state_dict(twins.native.state_dict())
    fresh.steps = twins.steps
    fresh.assert_equal()
    fresh.step(2)
    twins.step(2)
    fresh.assert_equal()
    assert_same_run(snapshot(fresh.swapped), snapshot(twins.native))


@pytest.mark.filterwarnings("ignore:.*EmulatedDevice")  # that nothing swaps on a plain CPU
@pytest.mark.parametrize(
    ("source", "target"),
    [(CONFIG, SwapOptimizerConfig(swap_times=1, min_numel=0)), (CONFIG, None), (None, CONFIG)],
    ids=["other_batches", "to_a_plain_cpu", "from_a_plain_cpu"],
)
def test_what_swaps_is_no_part_of_a_checkpoint(
    source: SwapOptimizerConfig | None, target: SwapOptimizerConfig | None
) -> None:
    twins, again = (
        Twins(adam, SHAPES, EmulatedDevice() if config else None, config or CONFIG)
        for config in (source, target)
    )
    twins.step(2)
    again.swapped.load_state_dict(twins.swapped.state_dict())
    again.swapped.synchronize()
    assert_same_run(snapshot(again.swapped), snapshot(twins.native))


def test_the_rates_of_a_schedule_are_loaded_too() -> None:
    def scheduled(params: list[Parameter]) -> nn.Optimizer:
        optimizer: nn.Optimizer = nn.Adam(params, learning_rate=[0.1, 0.05, 0.02, 0.01])
        return optimizer

    twins, fresh = (Twins(scheduled, SHAPES, EmulatedDevice(), CONFIG) for _ in range(2))
    twins.step(2)
    saved = twins.swapped.state_dict()
    assert "learning_rate.learning_rate" in saved
    fresh.swapped.load_state_dict(saved)
    assert_same_run(snapshot(fresh.swapped), snapshot(twins.native))
    del saved["learning_rate.learning_rate"]
    twins.step()
    with pytest.raises(SwapConfigError, match=r"Missing.*learning_rate.learning_rate"):
        twins.swapped.load_state_dict(saved)
    twins.step()
    twins.assert_equal()


# ------------------------------------------------------------------ what does not fit
def bad_shape(saved: dict[str, Parameter]) -> None:
    saved["moment2.p3"] = Parameter(Tensor(np.zeros((7, 5), np.float32)))


def no_tensor(saved: dict[str, object]) -> None:
    saved["moment1.p0"] = "a string"


def missing(saved: dict[str, Parameter]) -> None:
    del saved["moment1.p3"]


def unexpected(saved: dict[str, Parameter]) -> None:
    saved["moment1.p9"] = saved["moment1.p3"]


BAD = {
    bad_shape: r"moment2.p3 has shape \(7, 5\).*has shape \(5, 7\)",
    no_tensor: "moment1.p0 is no tensor.*str",
    missing: "Missing.*moment1.p3",
    unexpected: "Unexpected.*moment1.p9",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_a_state_dict_that_does_not_fit_changes_nothing(
    spoil: Callable[[dict[str, Parameter]], None],
) -> None:
    twins, other = OPTIMIZERS["adam"](), OPTIMIZERS["adam"]()
    other.step(2)
    saved = other.swapped.state_dict()
    spoil(saved)
    twins.step()
    with pytest.raises(ValueError, match=f"(?s){BAD[spoil]}.*Nothing has been loaded") as caught:
        twins.swapped.load_state_dict(saved)
    assert isinstance(caught.value, RuntimeError), "which is what MindSpore raises"
    twins.assert_equal()
    twins.step(2)
    twins.assert_equal()


def test_something_else_is_refused_as_natively() -> None:
    twins = OPTIMIZERS["adam"]()
    for optimizer in (twins.swapped, twins.native):
        with pytest.raises(TypeError, match="dict-like"):
            optimizer.load_state_dict([1, 2])
    twins.step()
    twins.assert_equal()


def test_hooks_see_states_saved_and_loaded() -> None:
    twins, other = OPTIMIZERS["adam"](), OPTIMIZERS["adam"]()
    other.step(2)
    seen: list[str] = []

    def rename(cell: nn.Cell, state_dict: dict[str, Parameter], *_: object) -> None:
        assert cell is twins.swapped
        state_dict["moment1.p0"] = state_dict.pop("old.p0")

    def forgive(cell: nn.Cell, keys: object) -> None:
        seen.extend(keys.unexpected_keys)
        keys.unexpected_keys.clear()

    other.swapped.register_state_dict_post_hook(
        lambda cell, state_dict, prefix, metadata: state_dict.update(
            {"old.p0": state_dict.pop("moment1.p0"), "new": state_dict["moment1.p2"]}
        )
    )
    twins.swapped.register_load_state_dict_pre_hook(rename)
    twins.swapped.register_load_state_dict_post_hook(forgive)
    twins.swapped.load_state_dict(other.swapped.state_dict())
    assert seen == ["new"]
    assert_same_run(snapshot(twins.swapped), snapshot(other.native))


# ------------------------------------------------------------------ N2
@pytest.mark.parametrize(
    ("make", "here", "there"),
    [
        (NATIVE["adam_fp16"].make, ms.float16, ms.float32),
        (NATIVE["adam_fp16"].make, ms.float32, ms.float16),
        (MINDFORMERS["mindformers"].make, ms.bfloat16, ms.float16),
    ],
    ids=["fp32_into_fp16", "fp16_into_fp32", "mindformers"],
)
@pytest.mark.parametrize("into_net", [True, False], ids=["load_param_into_net", "load_state_dict"])
def test_n2_loaded_dtypes_are_natives(
    make: MakeOptimizer, here: ms.Type, there: ms.Type, into_net: bool
) -> None:
    config = SwapOptimizerConfig(swap_times=3, min_numel=0)
    other = make(make_parameters(SHAPES, (there,), seed=1))
    source = Twins(make, SHAPES, EmulatedDevice(), config, (there,))
    source.step(2)
    eager(other)(source.gradients())
    twins = Twins(make, SHAPES, EmulatedDevice(), config, (here,))
    twins.step()
    for optimizer in (twins.swapped, twins.native):
        # Each has its own: MindSpore lets what it loads share memory with the state dict.
        saved = {name: Parameter(Tensor(copy_of(p))) for name, p in other.parameters_dict().items()}
        if into_net:
            ms.load_param_into_net(optimizer, saved)
        else:
            optimizer.load_state_dict(saved, strict=False)
    twins.assert_equal()
    twins.step(2)
    twins.assert_equal()


# ------------------------------------------------------------------ snapshots
def test_c2_a_state_dict_is_a_snapshot(kind: str) -> None:
    twins = OPTIMIZERS[kind]()
    twins.step(2)
    saved = twins.swapped.state_dict()
    before = {name: copy_of(value) for name, value in saved.items()}
    twins.step(1, missing={0})
    twins.step(2)
    later = twins.swapped.state_dict()
    twins.swapped.load_state_dict(later)
    twins.assert_equal()
    for name, value in before.items():
        assert_same_bytes(copy_of(saved[name]), value, name)
    after = {name: copy_of(value) for name, value in later.items()}
    changed = {name for name, value in before.items() if (after[name] != value).any()}
    assert changed >= swapped_names(twins.swapped)
    twins.swapped.load_state_dict(saved)
    loaded = twins.swapped.state_dict()
    for name, value in before.items():
        assert_same_bytes(copy_of(loaded[name]), value, name)
        assert_same_bytes(copy_of(later[name]), after[name], f"{name}, beside a load")


def test_a_snapshot_costs_memory_only_in_a_step_and_only_while_it_lives(kind: str) -> None:
    twins = OPTIMIZERS[kind]()
    twins.step(2)
    device, pinned = device_of(twins), twins.swapped.swap_stats().pinned_nbytes
    saved = twins.swapped.state_dict()
    addresses = {saved[name].data_ptr() for name in swapped_names(twins.swapped)}
    slots = twins.swapped._engine.layout.slots()
    assert addresses == {slot.host_address for slot in slots}, "shared, not copied"
    assert device.memory().pinned_bytes == pinned
    twins.step()
    assert device.memory().pinned_bytes == 2 * pinned
    twins.step(2)
    twins.assert_equal()
    assert device.memory().pinned_bytes == 2 * pinned, "once copied, it is left alone"
    one = saved["learning_rate"]
    kept = saved[slots[0].parameter.name]
    del saved
    assert pinned < device.memory().pinned_bytes < 2 * pinned, "one tensor keeps its buffer"
    del kept
    assert device.memory().pinned_bytes == pinned
    addresses = {slot.host_address for slot in slots}
    twins.swapped.state_dict()
    twins.step()
    assert addresses == {slot.host_address for slot in slots}, "dropped in time, it cost nothing"
    assert one.asnumpy() == twins.native.learning_rate.asnumpy()


def test_states_without_a_gradient_stay_shared() -> None:
    twins = Twins(adam, SHAPES, EmulatedDevice(), SwapOptimizerConfig(swap_times=4, min_numel=0))
    twins.step()
    saved = twins.swapped.state_dict()
    twins.step(1, missing={0, 1, 2})
    twins.swapped.synchronize()
    shared = [
        saved[name].data_ptr() == twins.swapped.parameters_dict()[name].data_ptr()
        for name in (f"moment1.p{index}" for index in range(4))
    ]
    assert shared == [True, True, True, False]
    twins.assert_equal()


def test_anything_that_shares_a_snapshots_memory_keeps_it() -> None:
    twins = OPTIMIZERS["adam"]()
    twins.step()
    array = twins.swapped.state_dict()["moment1.p0"].asnumpy()
    before = array.copy()
    twins.step(2)
    twins.swapped.synchronize()
    assert_same_bytes(array, before, "an array over a snapshot's memory")


def test_no_host_memory_beside_a_snapshot_leaves_everything_as_it_was() -> None:
    device = EmulatedDevice(pinned_limit_bytes=2_500)
    twins = Twins(adam, SHAPES, device, CONFIG)
    twins.step()
    saved = twins.swapped.state_dict()
    before = {name: copy_of(value) for name, value in saved.items()}
    gradients = twins.gradients()
    with pytest.raises(HostMemoryError, match=r"drop it.*Pinned host memory ran out"):
        twins.swapped(gradients)
    twins.assert_equal()
    with pytest.raises(HostMemoryError, match="Pinned host memory ran out"):
        twins.swapped.load_state_dict(saved)
    twins.assert_equal()
    for name, value in before.items():
        assert_same_bytes(copy_of(saved[name]), value, name)
    del saved
    twins.step(2)
    twins.assert_equal()


def test_values_put_in_place_of_states_beside_a_snapshot() -> None:
    twins = OPTIMIZERS["mindformers"]()
    twins.step()
    saved = twins.swapped.state_dict()
    before = {name: copy_of(value) for name, value in saved.items()}
    for optimizer in (twins.swapped, twins.native):
        values = Parameter(Tensor(np.full(SHAPES[0], 0.25, np.float32)), name="adam_m.p0")
        ms.load_param_into_net(optimizer, {"adam_m.p0": values})
    twins.step()
    twins.assert_equal()
    for name, value in before.items():
        assert_same_bytes(copy_of(saved[name]), value, name)


def test_after_unswapping_it_saves_and_loads_what_the_base_has() -> None:
    twins = OPTIMIZERS["adam"]()
    twins.step(2)
    twins.swapped.unswap()
    saved = twins.swapped.state_dict()
    assert_same_values(saved, twins.native.state_dict())
    gradients = twins.gradients()
    expected = snapshot(twins.native)
    twins.base(gradients)
    twins.swapped.load_state_dict(saved)
    assert_same_run(snapshot(twins.base), expected)


def test_dictionaries_and_lists_of_states_are_saved(tmp_path: Path) -> None:
    twins = OPTIMIZERS["adam"]()
    twins.step()
    ms.save_checkpoint(twins.swapped.state_dict(), str(tmp_path / "dict"))
    twins.step()
    ms.save_checkpoint(list(twins.swapped.get_parameters()), str(tmp_path / "list"))
    assert_same_values(ms.load_checkpoint(str(tmp_path / "list.ckpt")), twins.native.state_dict())


# ------------------------------------------------------------------ MindSpore's own ways
def test_model_checkpoint_saves_what_it_saves_natively(tmp_path: Path) -> None:
    """A callback of Model.train, right after a step; it saves the training cell."""
    files = []
    for swaps in (True, False):
        model = Regressor((ms.float32,))
        optimizer = adam(list(model.trainable_params()))
        if swaps:
            optimizer = swap_optimizer(optimizer, CONFIG, device=EmulatedDevice())
        folder = tmp_path / str(swaps)
        save = ms.ModelCheckpoint("run", str(folder), ms.CheckpointConfig(save_checkpoint_steps=2))
        trainer = ms.Model(model, nn.MSELoss(), optimizer)
        trainer.train(1, rows_and_targets(4), callbacks=[save], dataset_sink_mode=False)
        files.append(ms.load_checkpoint(str(next(folder.glob("run*_4.ckpt")))))
    assert any(name.startswith("moment1.") for name in files[0])
    assert_same_values(*files)


def rows_and_targets(steps: int) -> ds.GeneratorDataset:
    random = np.random.default_rng(1)
    rows = random.normal(size=(steps, 12, 16)).astype(np.float32)
    targets = random.normal(size=(steps, 12, 8)).astype(np.float32)
    source = list(zip(rows, targets, strict=True))
    return ds.GeneratorDataset(source, ["rows", "targets"], shuffle=False)


def test_load_param_into_net_that_fails_has_loaded_what_it_loads_natively() -> None:
    twins = OPTIMIZERS["adam"]()
    twins.step()
    for optimizer in (twins.swapped, twins.native):
        saved = {
            name: Parameter(Tensor(np.full(param.shape, 0.25, np.float32)), name=name)
            for name, param in optimizer.parameters_dict().items()
            if "moment" in name
        }
        saved["moment2.p0"] = Parameter(Tensor(np.zeros(3, np.float32)), name="moment2.p0")
        with pytest.raises(RuntimeError, match="same shape"):
            ms.load_param_into_net(optimizer, saved)
    twins.assert_equal()
    assert (twins.swapped.moment1[3].asnumpy() == np.float32(0.25)).all()
    twins.step(2)
    twins.assert_equal()


# ------------------------------------------------------------------ DTensors
def sharded_adam(params: list[Parameter]) -> nn.Optimizer:
    """Make an optimizer over DTensors; it makes its states DTensors, too."""
    return adam([Parameter(DTensor(Tensor(copy_of(p))), name=p.name) for p in params])


def test_of_a_dtensor_the_local_part_is_loaded_and_the_state_itself_handed_out() -> None:
    twins, fresh = (Twins(sharded_adam, SHAPES, EmulatedDevice(), CONFIG) for _ in range(2))
    twins.step(2)
    saved = twins.swapped.state_dict()
    assert all(saved[state.name] is state for state in twins.base.moment1)
    assert_same_values(saved, twins.native.state_dict())
    slots = fresh.swapped._engine.layout.slots()
    addresses = [slot.host_address for slot in slots]
    fresh.swapped.load_state_dict(saved)
    assert [slot.home.data_ptr() for slot in slots] == addresses
    for _ in range(2):
        assert_same_run(snapshot(fresh.swapped), snapshot(twins.native))
        fresh.swapped(twins.gradients())
        twins.step()
        fresh.swapped.synchronize()
    misfit = {**saved, "moment1.p0": Parameter(Tensor(np.zeros((8, 8), np.float32)))}
    with pytest.raises(ValueError, match=r"moment1.p0 has shape \(8, 8\).*has shape \(16, 8\)"):
        fresh.swapped.load_state_dict(misfit)
    assert_same_run(snapshot(fresh.swapped), snapshot(twins.native))
