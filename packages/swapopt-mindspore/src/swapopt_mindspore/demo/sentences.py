"""The sentences around the table: what it shows, what swapping costs, how figures are meant."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from swapopt_mindspore.demo import mindformers_adamw
from swapopt_mindspore.demo.results import ResultRow, RunKind, RunResult
from swapopt_mindspore.demo.settings import MINDFORMERS_ADAMW, OPTIMIZERS, DemoSettings
from swapopt_mindspore.demo.table import change, milliseconds, percent

TRANSFER_DEFINITION = (
    "Transfer time is while batches are being copied, both directions added up; hidden is the "
    "share of it that no update waited for. The step still grows by the launches of the copies, "
    "which take the host's time: two for each batch packed, two for each state per-tensor (small "
    "states of MindFormers' AdamW that are neighbours travel together)."
)
STEP_DEFINITION = (
    "An optimizer step is timed from an idle device to an idle device, the last copies to the "
    "host included. A whole iteration is forward, backward and optimizer step, one after another."
)
COUNTED = (
    "Device memory counts parameters, gradients, states, what forward keeps for backward, and "
    "what swapping brings in for a step; not what an operator needs while it runs. Time counts "
    "launches, copies and memory traffic, and no arithmetic. Native updates are charged the same "
    "launches and traffic as swapped ones, forward and backward a launch for each tensor that is "
    "kept or taken back."
)
REPORTED_NOTE = (
    "The last lines are what the specification reports of MindFormers' AdamW and a DeepSeek-V3 "
    "model on real hardware. There the optimizer took a tenth of an iteration, so that an "
    "iteration changes less than here; and which share of the memory the states were is not told."
)


def say(console: Console, text: Text) -> None:
    """Print ``text`` at the width of the console, without spaces at the ends of lines."""
    lines = text.wrap(console, console.width)
    for line in lines:
        line.rstrip()
    console.print(Text("\n").join(lines))


def clock_name(settings: DemoSettings) -> str:
    """Say whose time the figures are in."""
    return f"virtual time of the {settings.profile} profile"


def title(settings: DemoSettings, optimizer_name: str) -> Text:
    """Return what stands above the table."""
    return Text(f"{OPTIMIZERS[optimizer_name]}, {settings.steps} steps", "bold")


def caption(rows: Sequence[ResultRow], settings: DemoSettings) -> Text:
    """Say whose times these are, and of which steps."""
    return Text(
        f"Times: {clock_name(settings)}, mean of {len(rows[0].run.step_times)} steps. The first "
        "step is left out.",
        "italic",
    )


def verdict(rows: Sequence[ResultRow]) -> Text:
    """Say in one or two sentences what the table shows."""
    native, swapped = _native(rows), rows[-1].run
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
        f"Swapping took {percent(1 - swapped.peak_nbytes / native.peak_nbytes)} off the peak of "
        f"device memory and {percent(1 - swapped.idle_nbytes / native.idle_nbytes)} off what is "
        "held between steps.",
    )


def cost(rows: Sequence[ResultRow]) -> Text:
    """Say what swapping costs in time here, and where that pays."""
    native = _native(rows)
    steps = " and ".join(
        f"{change(row.ratios.step_seconds)} {row.run.kind.value}"
        for row in rows
        if row.ratios is not None
    )
    rest_seconds = native.iteration_seconds - native.step_seconds
    return Text.assemble(
        ("The price is time: ", "bold"),
        f"the optimizer step takes {milliseconds(native.step_seconds)} natively, {steps}. The "
        "price is the same however long forward and backward are. In a model and a batch of a "
        f"demo's size they are short (here {milliseconds(rest_seconds)}). Swapping pays where "
        "device memory is short and forward and backward are long: large models, large batches, "
        "gradient accumulation.",
    )


def notes() -> list[Text]:
    """Say how the figures are meant."""
    texts = (STEP_DEFINITION, TRANSFER_DEFINITION, COUNTED, REPORTED_NOTE)
    return [Text(text, "dim") for text in texts]


def optimizer_note(optimizer_name: str, asked: str | None) -> str:
    """Say which optimizer it is, and why it moves the way it does."""
    if optimizer_name == MINDFORMERS_ADAMW:
        return "MindFormers' AdamW, its module alone, unfused (fused needs an Ascend)"
    reason = "" if asked else f", since MindFormers is not here ({mindformers_adamw.INSTALL})"
    return f"{OPTIMIZERS[optimizer_name]}{reason}; packed movement is for MindFormers' AdamW"


def _native(rows: Sequence[ResultRow]) -> RunResult:
    return next(row.run for row in rows if row.run.kind is RunKind.NATIVE)
