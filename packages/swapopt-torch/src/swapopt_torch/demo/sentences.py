"""The sentences around the table: what it shows, what swapping costs, how figures are meant."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from swapopt_torch.demo.accelerator import Accelerator
from swapopt_torch.demo.results import ResultRow, RunKind, RunResult
from swapopt_torch.demo.settings import OBSERVED_STEPS, OPTIMIZERS, DemoSettings
from swapopt_torch.demo.table import milliseconds, percent

HIDDEN_SHARE_DEFINITION = (
    "Share of transfer time hidden = 1 - (optimizer step - native optimizer step) / transfer "
    "time, where transfer time is what the step's copies take by themselves, both directions "
    "added up. 100 %: the step takes no longer than the native one. On a full-duplex link the two "
    "directions hide up to half of it behind each other; hiding more takes longer updates."
)
TAIL_DEFINITION = (
    "An optimizer step is timed from an idle device to an idle device, so it includes its tail, "
    "the last copies to the host. Training does not wait for the tail: it runs beside the next "
    "forward. A whole iteration is forward, backward and optimizer step, one after another, the "
    "tail included."
)
NOTHING_HIDDEN = (
    '"none": the step grew by more than its copies take by themselves, as a rule because many '
    "small copies and updates take longer to launch than to run."
)


def say(console: Console, text: Text) -> None:
    """Print ``text`` at the width of the console, without spaces at the ends of lines."""
    lines = text.wrap(console, console.width)
    for line in lines:
        line.rstrip()
    console.print(Text("\n").join(lines))


def title(settings: DemoSettings) -> Text:
    """Return what stands above the table."""
    return Text(f"{OPTIMIZERS[settings.optimizer]}, {settings.steps} steps", "bold")


def caption(rows: Sequence[ResultRow], accelerator: Accelerator) -> Text:
    """Say whose times these are, and of which steps."""
    return Text(
        f"Times: {accelerator.clock_name}, mean of {len(rows[0].run.step_times)} steps. Left out "
        f"are the first step, which makes the states, and the last {OBSERVED_STEPS}, which are "
        "watched closely for the pictures.",
        "italic",
    )


def verdict(rows: Sequence[ResultRow]) -> Text:
    """Say in one or two sentences what the table shows."""
    native, packed = _run(rows, RunKind.NATIVE), _run(rows, RunKind.PACKED)
    unequal = [row for row in rows if row.equal_to_native is False]
    if unequal:
        return Text(
            "\n".join(
                f"The {row.run.kind.value} run differs from the native one in "
                f"{', '.join(row.differences[:5])}"
                f"{' and more' if len(row.differences) > 5 else ''}."
                for row in unequal
            ),
            "bold red",
        )
    return Text.assemble(
        ("Every loss, parameter and state is equal to native, bit for bit. ", "bold green"),
        f"Packed swapping took {percent(1 - packed.peak_nbytes / native.peak_nbytes)} off the "
        f"peak of device memory and {percent(1 - packed.idle_nbytes / native.idle_nbytes)} "
        "off what is held between steps.",
    )


def cost(rows: Sequence[ResultRow], accelerator: Accelerator) -> Text:
    """Say what packed swapping costs in time here, and where that pays."""
    native, packed = _run(rows, RunKind.NATIVE), _run(rows, RunKind.PACKED)
    rest_seconds = native.iteration_seconds - native.step_seconds
    counted = ", and virtual time counts their memory traffic but not their arithmetic"
    return Text.assemble(
        ("The price is time: ", "bold"),
        f"the packed optimizer step takes {milliseconds(packed.step_seconds)}, "
        f"{packed.step_seconds / native.step_seconds:.1f} times the native one, and a whole "
        f"iteration {milliseconds(packed.iteration_seconds)} instead of "
        f"{milliseconds(native.iteration_seconds)} "
        f"({_change(packed.iteration_seconds / native.iteration_seconds - 1)}). The price is the "
        "same however long forward and backward are. In a model and a batch of a demo's size they "
        f"are short (here {milliseconds(rest_seconds)}"
        f"{counted if accelerator.is_virtual else ''}). Swapping pays where device memory is short "
        "and forward and backward are long: large models, large batches, gradient accumulation.",
    )


def notes(rows: Sequence[ResultRow], accelerator: Accelerator) -> list[Text]:
    """Say how the figures are meant, and on a real card what its own tool shows."""
    lines = [Text(TAIL_DEFINITION, "dim"), Text(HIDDEN_SHARE_DEFINITION, "dim")]
    if any(row.hidden_share is not None and row.hidden_share < 0 for row in rows):
        lines.append(Text(NOTHING_HIDDEN, "dim"))
    if not accelerator.is_virtual:
        lines.append(Text(cache_note(accelerator.device.type), "yellow"))
    return lines


def cache_note(device_type: str) -> str:
    """Say why a card's own tool may show no saving, and what does."""
    tool = {"cuda": "nvidia-smi", "npu": "npu-smi", "xpu": "xpu-smi"}.get(device_type, "its tool")
    return (
        f"{tool} may show no saving. torch's caching allocator keeps freed memory reserved for "
        "itself, and the tool counts what is reserved. The saving is real: the memory is there "
        f"for activations and larger models. torch.{device_type}.max_memory_allocated() and "
        f"memory_allocated() show it; torch.{device_type}.empty_cache() hands unused memory back, "
        f"and then {tool} shows it too."
    )


def _run(rows: Sequence[ResultRow], kind: RunKind) -> RunResult:
    return next(row.run for row in rows if row.run.kind is kind)


def _change(share: float) -> str:
    return f"{share:+.0%}".replace("%", " %")
