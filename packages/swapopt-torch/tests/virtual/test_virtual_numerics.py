"""Training gives on the virtual device the very bytes that it gives on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH, HEADS = 61, 12, 32, 4


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        parts = self.qkv(self.norm1(x)).view(batch, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, LENGTH, WIDTH))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class Transformer(nn.Module):
    def __init__(self, dropout: float, checkpointing: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.head(x)


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
adam = partial(torch.optim.Adam, lr=1e-3)
adamw = partial(torch.optim.AdamW, lr=1e-3)
FUSED = partial(adamw, fused=True)


@dataclass(frozen=True)
class Recipe:
    optimizer: MakeOptimizer
    dropout: float = 0.0
    checkpointing: str | None = None
    offload_activations: bool = False
    autocast: torch.dtype | None = None
    clip: bool = False
    keep_gradients: bool = False


RECIPES = {
    "adamw loop": Recipe(partial(adamw, foreach=False)),
    "adamw fused": Recipe(FUSED),
    "adamw foreach": Recipe(partial(adamw, foreach=True)),
    "adamw default": Recipe(adamw),
    "adam loop": Recipe(partial(adam, foreach=False)),
    "adam fused": Recipe(partial(adam, fused=True)),
    "amsgrad": Recipe(partial(adamw, foreach=False, amsgrad=True)),
    "sgd momentum": Recipe(partial(torch.optim.SGD, lr=1e-2, momentum=0.9)),
    "dropout": Recipe(FUSED, dropout=0.1),
    "checkpoint, dropout": Recipe(FUSED, dropout=0.1, checkpointing="non-reentrant"),
    "reentrant checkpoint, dropout": Recipe(FUSED, dropout=0.1, checkpointing="reentrant"),
    "activations on the host": Recipe(FUSED, offload_activations=True),
    "bf16 autocast": Recipe(FUSED, autocast=torch.bfloat16),
    "fp16 scaler, clipping": Recipe(
        partial(adamw, foreach=False), autocast=torch.float16, clip=True
    ),
    "fp16 scaler, fused": Recipe(FUSED, autocast=torch.float16),
    "clipping, kept gradients": Recipe(FUSED, clip=True, keep_gradients=True),
}


def token_batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shape = (2, 3, LENGTH)
    drawn = [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(steps)]
    return [(pair[0], pair[1]) for pair in drawn]


def train(recipe: Recipe, device: str, steps: int = 5) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Transformer(recipe.dropout, recipe.checkpointing).to(device)
    optimizer = recipe.optimizer(model.parameters())
    scaler = torch.amp.GradScaler(device, enabled=recipe.autocast is torch.float16)
    torch.manual_seed(1)
    losses = []
    for tokens, targets in token_batches(steps):
        with contextlib.ExitStack() as contexts:
            if recipe.offload_activations and device == "virtual":
                contexts.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=True))
            if recipe.autocast:
                contexts.enter_context(torch.autocast(device, dtype=recipe.autocast))
            scores = model(tokens.to(device)).flatten(0, 1).float()
            loss = F.cross_entropy(scores, targets.to(device).flatten())
        scaler.scale(loss).backward()
        if recipe.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=not recipe.keep_gradients)
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


def assert_same_bytes(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", RECIPES)
def test_training_a_transformer(name: str) -> None:
    losses, parameters = train(RECIPES[name], "virtual")
    expected_losses, expected_parameters = train(RECIPES[name], "cpu")
    assert losses == expected_losses
    assert len(set(losses)) == len(losses)
    assert_same_bytes(parameters, expected_parameters)


class Vision(nn.Module):
    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        # torch computes the gradient of GroupNorm for this layout in another order on the CPU
        norm = nn.BatchNorm2d(8) if channels_last else nn.GroupNorm(2, 8)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, stride=2, groups=4, bias=False),
            norm,
            nn.SiLU(),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_training_a_convolutional_network(
    autocast: torch.dtype | None, channels_last: bool
) -> None:
    def run(device: str) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        model = Vision(channels_last).to(device).to(memory_format=layout)
        optimizer = FUSED(model.parameters())
        images = torch.randn(4, 3, 12, 12).to(memory_format=layout)
        losses = []
        for _ in range(4):
            with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                scores = model(images.to(device))
            loss = F.cross_entropy(scores.float(), torch.tensor([0, 1, 2, 3], device=device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [each.detach().cpu() for each in model.state_dict().values()]

    losses, values = run("virtual")
    expected_losses, expected_values = run("cpu")
    assert losses == expected_losses
    assert_same_bytes(values, expected_values)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_convolution_in_one_and_three_dimensions(dimensions: int) -> None:
    convolution = F.conv1d if dimensions == 1 else F.conv3d
    results = []
    for device in ("cpu", "virtual"):
        torch.manual_seed(0)
        image = torch.randn(2, 3, *[6] * dimensions).to(device).requires_grad_()
        weight = torch.randn(4, 3, *[3] * dimensions).to(device).requires_grad_()
        convolution(image, weight).square().sum().backward()
        results.append([image.grad.cpu(), weight.grad.cpu()])
    assert_same_bytes(*results)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_agree_closely(kind: type[nn.RNNBase]) -> None:
    """Not to the last bit: torch takes another kernel for these on the CPU."""
    results = []
    for device in ("cpu", "virtual"):
        torch.manual_seed(0)
        network = kind(4, 6, num_layers=2).to(device)
        inputs = torch.randn(5, 2, 4).to(device).requires_grad_()
        network(inputs)[0].square().sum().backward()
        gradients = [inputs.grad, *(each.grad for each in network.parameters())]
        results.append([each.cpu() for each in gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "prelu": lambda x: F.prelu(x, x[0, :1]),
    "softmax": lambda x: x.softmax(-1),
    "exp": lambda x: x.exp(),
    "sum": lambda x: x.sum(),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "mse_loss": lambda x: F.mse_loss(x, x.sin()),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.long, device=x.device)),
    "cat of two dtypes": lambda x: torch.cat([x, x.float()]),
    "stack": lambda x: torch.stack([x, x.double()]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "vecdot": lambda x: torch.linalg.vecdot(x, x),
    "prod": lambda x: x.prod(),
    "trace": lambda x: x.trace(),
    "cumsum": lambda x: x.cumsum(0),
    "batch matmul": lambda x: torch.bmm(x[None], x[None]),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_casts_what_the_cpu_casts(name: str, given: torch.dtype) -> None:
    results = []
    for device in ("cpu", "virtual"):
        source = torch.linspace(-1, 1, 16).view(4, 4).to(device, given)
        with torch.autocast(device, dtype=torch.bfloat16):
            results.append([OPERATIONS[name](source).cpu()])
    assert_same_bytes(*results)


def test_every_operator_that_the_cpu_autocasts_is_autocast() -> None:
    def registered(key: str) -> set[str]:
        return {
            name
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith("aten::")
            and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        }

    assert registered("AutocastCPU") - registered("AutocastPrivateUse1") == set()


@pytest.mark.parametrize(
    "function",
    [F.mish, F.silu, F.gelu, F.softplus, torch.sgn, torch.special.i0, torch.logcumsumexp],
)
def test_gradients_of_functions(function: Callable[..., torch.Tensor]) -> None:
    results = []
    for device in ("cpu", "virtual"):
        inputs = torch.linspace(-2, 2, 33).to(device).requires_grad_()
        arguments = (0,) if function is torch.logcumsumexp else ()
        function(inputs, *arguments).sum().backward()
        results.append([inputs.grad.cpu()])
    assert_same_bytes(*results)
