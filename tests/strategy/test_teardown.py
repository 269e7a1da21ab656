"""After the Trainer the module is as it came: the same parameters and buffers, in the same memory, and nothing of ours."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.emulated import DEVICE
from tests.strategy.compare import MakeTrainer, Place, assert_same, streamed
from tests.strategy.subject import Subject, batches


class WithBuffers(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(11)
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.steps += 1
        logits_BTV = super().forward(tokens_BT)
        return self.statistics(logits_BTV.flatten(0, 1)).view_as(logits_BTV)


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything that a user could see changed, but for the numbers."""
    parameters = {name: (id(p), p.data_ptr(), p.device, p.requires_grad, type(p)) for name, p in model.named_parameters()}
    buffers = {name: (id(b), b.device) for name, b in model.named_buffers()}
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules() if module is not model}
    hooks = {
        name: [len(getattr(module, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")]
        for name, module in model.named_modules()
    }
    return {"parameters": parameters, "buffers": buffers, "attributes": attributes, "hooks": hooks, "forward": "forward" in vars(model)}


@pytest.mark.parametrize(
    ("stage", "precision"),
    [("fit", "32-true"), ("fit", "bf16-mixed"), ("fit", "bf16-true"), ("validate", "bf16-mixed"), ("predict", "bf16-true")],
)
def test_the_module_is_as_it_came(place: Place, stage: str, precision: Any) -> None:
    model = WithBuffers()
    before = fingerprint(model)
    with streamed(place) as make:
        trainer = make(max_epochs=1, precision=precision)
        getattr(trainer, stage)(model, batches(1))
    after = fingerprint(model)
    if place == "emu":  # Lightning's own teardown brings buffers back from a device, and plain training replaces them too
        before["buffers"] = {name: (0, device) for name, (_, device) in before["buffers"].items()}
        after["buffers"] = {name: (0, device) for name, (_, device) in after["buffers"].items()}
    assert after == before
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_the_user_put_on_the_instance_is_kept(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model = Subject()
        block, norm = model.net.blocks[0], model.net.norm
        patched = [lambda hidden: hidden * 2 + type(block).forward(block, hidden), lambda hidden: type(norm).forward(norm, hidden) + 1]
        block.forward, norm.forward = patched  # type: ignore[method-assign]
        make(max_epochs=1).fit(model, batches())
        assert [block.forward, norm.forward] == patched
        return {name: p.detach().cpu() for name, p in model.named_parameters()}

    assert_same(run, place)


def test_the_strategy_lets_go_of_the_engine(place: Place) -> None:
    with streamed(place) as make:
        trainer = make(max_epochs=1)
        trainer.fit(Subject(), batches(1))
        with pytest.raises(RuntimeError, match="only while the Trainer runs"):
            trainer.strategy.engine  # noqa: B018


def test_no_device_memory_is_held_after_a_fit() -> None:
    model = Subject()
    with streamed("emu") as make:
        gc.collect()
        held = DEVICE.live_bytes
        trainer = make(max_epochs=1)
        trainer.fit(model, batches(1))
        trainer.callback_metrics.clear()
        del trainer
        gc.collect()
        DEVICE.synchronize()
        assert DEVICE.live_bytes == held
