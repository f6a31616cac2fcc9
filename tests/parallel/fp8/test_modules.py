"""Which linear modules multiply in fp8, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.fp8 import modules
from pdrun.parallel.fp8.modules import Fp8Linear, check_device, choose_modules, use_fp8
from pdrun.parallel.fp8.options import Fp8
from pdrun.parallel.parallelize import parallelize
from tests.parallel.fp8.kinds import SCALES

pytestmark = pytest.mark.torch


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OwnInit(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), OwnInit(32, 16, bias=False)
        self.odd, self.own = nn.Linear(16, 3), OwnForward(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x))) + self.own(x) + self.odd(x).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def choose(model: nn.Module | None = None, **options: Any) -> Any:
    model = model or Model()
    return choose_modules(model, model, Fp8(**{"least": 0, **options}))


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="sum"), len(
        batch[1]
    )


def test_linear_modules_of_units_are_chosen_and_the_others_have_a_reason() -> None:
    found = choose()
    assert found.chosen == ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")
    assert dict(found.others) == {
        **{f"blocks.{n}.odd": "sizes must be multiples of 16 (3x16)" for n in (0, 1)},
        **{f"blocks.{n}.own": "a OwnForward with another forward" for n in (0, 1)},
        "head": "outside of units",
    }
    assert found.describe() == [
        "products in fp8, a scale per tensor: " + ", ".join(found.chosen),
        "products in bf16, sizes must be multiples of 16 (3x16): blocks.0.odd, blocks.1.odd",
        "products in bf16, a OwnForward with another forward: blocks.0.own, blocks.1.own",
        "products in bf16, outside of units: head",
    ]


def test_globs_include_and_exclude() -> None:
    assert choose(modules=["head", "blocks.0.*"]).chosen == ("blocks.0.up", "blocks.0.down", "head")
    found = choose(exclude=["blocks.0.*", "*.up"])
    assert found.chosen == ("blocks.1.down",)
    assert found.others["blocks.0.down"] == "excluded"
    assert choose(modules="head").others["blocks.0.up"] == "not named"


def test_small_weights_stay_in_bf16() -> None:
    model = Model()
    model.blocks[0].up = nn.Linear(16, 64)
    found = choose(model, least=1024)
    assert found.chosen == ("blocks.0.up",)
    assert found.others["blocks.0.down"] == "fewer than least=1,024 elements"


def test_replaced_forwards_attention_modules_and_codes_stay_in_bf16() -> None:
    model = Model()
    model.blocks[0].up.forward = model.blocks[0].up.forward  # type: ignore[method-assign]
    model.blocks[1].attention = nn.MultiheadAttention(16, 2)
    model.blocks[1].codes = nn.Linear(16, 16)
    codes = torch.zeros(16, 16, dtype=torch.int8)
    model.blocks[1].codes.weight = nn.Parameter(codes, requires_grad=False)
    found = choose(model)
    assert found.others["blocks.0.up"] == "a Linear with another forward"
    assert found.others["blocks.1.attention.out_proj"] == "an attention module reads its weight"
    assert found.others["blocks.1.codes"] == "its weight is int8"


def test_a_module_keeps_its_class_and_its_copy_multiplies_in_fp8() -> None:
    import copy

    model = Model()
    use_fp8(model, ["blocks.0.up", "blocks.0.down"], "tensor")
    assert type(model.blocks[0].up) is Fp8Linear
    assert isinstance(model.blocks[0].down, OwnInit) and isinstance(model.blocks[0].down, Fp8Linear)
    assert type(model.blocks[1].up) is nn.Linear
    x = torch.randn(16, 16)
    assert model.blocks[0].up(x).dtype == torch.bfloat16
    assert torch.equal(copy.deepcopy(model).blocks[0].up(x), model.blocks[0].up(x))
    use_fp8(model, ["blocks.0.down"], "tensor")
    assert type(model.blocks[0].down).__mro__.count(Fp8Linear) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scales": "block"}, "scales must be 'tensor' or 'row', got 'block'"),
        ({"modules": 3}, "modules must be a glob or a list of globs, got 3"),
        ({"exclude": [1]}, r"exclude must be a glob or a list of globs, got \[1\]"),
        ({"least": -1}, "least must be a number of elements, got -1"),
        ({"least": True}, "least must be a number of elements, got True"),
        ({"modules": ["heads"]}, "'heads' matches no linear module.*head"),
        ({"exclude": ["emb"]}, "'emb' matches no linear module"),
        ({"modules": ["*.odd", "*.up"]}, r"'\*.odd' matches no module that can: sizes must be"),
        ({"least": 1 << 21}, "no linear module of the model can.*blocks.0.up: fewer than least="),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){text}"):
        choose(**options)


def test_a_model_of_single_linear_units_must_name_them() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    with pytest.raises(UsageError, match="can multiply in fp8; 0: outside of units"):
        choose(model)
    assert choose(model, modules="2").chosen == ("2",)


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        (8, "precision must be 'bf16', 'fp16', 'fp8', a pdrun.Precision or a pdrun.Fp8, got 8"),
        ("fp8", "no linear module of the model can multiply in fp8; blocks.0.up: fewer than"),
    ],
)
def test_parallelize_refuses(precision: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        parallelize(Model(), lambda p: torch.optim.SGD(p, 0.1), loss, precision=precision)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compute": "fp16", "fp8": Fp8()}, "fp8 requires compute='bf16', got 'fp16'"),
        ({"fp8": Fp8()}, "fp8 requires compute='bf16', got None"),
        ({"compute": "bf16", "fp8": True}, "fp8 must be a pdrun.Fp8, got True"),
    ],
)
def test_a_precision_that_contradicts_itself_is_refused(options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        pdrun.Precision(**options)


@pytest.mark.parametrize("found", [(8, 0), (8, 6), (7, 5)])
def test_older_devices_are_refused(found: tuple[int, int], monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    text = r"needs a device of compute capability 8.9 or higher \(Ada, Hopper, Blackwell\), A100"
    with pytest.raises(UsageError, match=f"{text} has {found[0]}.{found[1]}"):
        check_device(torch.device("cuda", 0), "tensor")


def test_a_device_that_does_not_multiply_is_refused(monkeypatch: Any) -> None:
    def refuse(*args: Any) -> Tensor:
        raise RuntimeError("no such kernel\nC++ stack")

    monkeypatch.setattr(modules.product, "linear", refuse)
    text = "needs a device that multiplies in fp8 with a scale per row; cpu: no such kernel;"
    with pytest.raises(UsageError, match=text):
        check_device(torch.device("cpu"), "row")
    monkeypatch.setattr(modules.product, "linear", lambda x, *args: x @ x.t() * 1.5)
    with pytest.raises(UsageError, match="cpu does it wrongly"):
        check_device(torch.device("cpu"), "row")


@pytest.mark.parametrize("scales", SCALES)
def test_cpus_multiply(scales: str) -> None:
    check_device(torch.device("cpu"), scales)
