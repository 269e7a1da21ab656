"""A language model whose code is known: everything that may be gained is gained, and the numbers stay."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import DataLoader

from lightning_megatrain.datamodules.packing import IGNORED, pad_batch
from lightning_megatrain.engine.host import HostLayer
from lightning_megatrain.engine.resident import _Resident
from lightning_megatrain.engine.sources import OnTheWay, in_memory_order
from lightning_megatrain.language_model import CausalLM
from lightning_megatrain.language_model.token_window import TokenWindow
from lightning_megatrain.optim import HostAdamW, split
from tests.strategy.compare import MakeTrainer, Place, differences, plain, state, streamed

LLAMA = {
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def rows(lengths: list[int]) -> DataLoader[Any]:
    """Rows of unequal length, so that micro-batches of one window have unequal numbers of label tokens."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for length in lengths:
        ids = torch.randint(3, 60, (length,), generator=generator)
        labels = torch.cat([torch.tensor([IGNORED]), ids[1:]])
        data.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return DataLoader(data, 2, collate_fn=pad_batch)  # type: ignore[arg-type]


def trained(make: MakeTrainer, optimizer: str = "lightning_megatrain.optim.HostAdamW", **options: Any) -> Any:
    torch.manual_seed(0)
    model = CausalLM(LLAMA, optimizer=optimizer, learning_rate=1e-2)
    trainer = make(max_epochs=1, **options)
    trainer.fit(model, rows([5, 9, 3, 4, 12, 6, 8, 8, 4, 3]), rows([7, 4]))
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "second" not in name}, state(model)


@pytest.mark.parametrize(
    ("precision", "window", "clip", "optimizer"),
    [
        ("32-true", 1, 0.05, "lightning_megatrain.optim.HostAdamW"),
        ("bf16-mixed", 2, 0.05, "lightning_megatrain.optim.HostAdamW"),
        ("bf16-mixed", 3, None, "lightning_megatrain.optim.HostAdamW"),
        ("32-true", 2, 0.05, "torch.optim.AdamW"),
    ],
)
def test_numbers_are_those_of_plain_training(place: Place, precision: str, window: int, clip: float | None, optimizer: str) -> None:
    options = {"precision": precision, "accumulate_grad_batches": window, "gradient_clip_val": clip, "optimizer": optimizer}
    expected = trained(plain, **options)
    with streamed(place) as make:
        assert differences(expected, trained(make, **options)) == []


def round_ties_up(patch: pytest.MonkeyPatch) -> None:
    """Lets FP32 weights be rounded on their way as the upper half of a split one is: a cast rounds ties to even, one value in 65,536."""
    write, host_value = OnTheWay.write, _Resident.host_value

    def write_rounded(source: OnTheWay, out: Tensor, start: int) -> None:
        if source.dtype is torch.bfloat16:
            out.copy_(split(in_memory_order(source.parameter.detach())[start : start + out.numel()])[0])
        else:
            write(source, out, start)

    def rounded(resident: _Resident) -> Tensor:
        return split(resident.parameter.detach())[0] if resident.dtype is torch.bfloat16 else host_value(resident)

    made = HostLayer.__init__

    def with_halves(layer: HostLayer, *args: Any, **kwargs: Any) -> None:
        made(layer, *args, **kwargs)
        layer._has_halves = True  # a call's backward sends weights as its forward did

    patch.setattr(HostLayer, "__init__", with_halves)
    patch.setattr(OnTheWay, "write", write_rounded)
    patch.setattr(_Resident, "host_value", rounded)


@pytest.mark.parametrize(("precision", "window"), [("bf16-mixed", 2), ("bf16-true", 1), ("bf16-true", 2)])
def test_halves_too(place: Place, precision: str, window: int) -> None:
    options = {"precision": precision, "accumulate_grad_batches": window, "gradient_clip_val": 0.05}
    with pytest.MonkeyPatch.context() as patch, streamed(place, masters="fp32", working_copy="cast", overlap_optimizer=False) as make:
        round_ties_up(patch)
        expected = trained(make, **options)
    with streamed(place, masters="split") as make:
        assert differences(expected, trained(make, **options)) == []


class Passes:
    """Counts passes over host gradients: norms and multiplications of whole gradients, made outside of backward."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clips = 0
        clip = torch.nn.utils.clip_grad_norm_

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            self.clips += 1
            return clip(*args, **kwargs)

        patch.setattr(torch.nn.utils, "clip_grad_norm_", counted)


def test_neither_clipping_nor_the_window_takes_a_pass_over_gradients(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, scales, kept = Passes(monkeypatch), [], set()
    update = HostAdamW.update

    def seen(optimizer: HostAdamW, params: Any, gradients: Any = None, *, grad_scale: float = 1.0, groups: Any = None) -> None:
        scales.append(grad_scale)
        for parameter, gradient in zip(params, gradients or [p.grad for p in params], strict=True):
            kept.add((parameter.dtype, gradient.dtype))
        update(optimizer, params, gradients, grad_scale=grad_scale, groups=groups)

    def uncorrected(window: TokenWindow, parameters: Any, micro_batches: int) -> None:
        assert window.factor(micro_batches) == 1.0, "a pass over all gradients"

    monkeypatch.setattr(HostAdamW, "update", seen)
    monkeypatch.setattr(TokenWindow, "correct", uncorrected)
    with streamed(place, masters="split") as make:
        trained(make, precision="bf16-true", accumulate_grad_batches=2, gradient_clip_val=0.05)
    assert passes.clips == 0
    assert any(scale < 1 for scale in scales)
    assert kept == {(torch.bfloat16, torch.float32)}  # two micro-batches a window: the sum is FP32
    kept.clear()
    with streamed(place, masters="split") as make:
        trained(make, precision="bf16-true")
    assert kept == {(torch.bfloat16, torch.bfloat16)}  # one: the gradient stays as it came


def test_gradients_take_their_parameters_dtype_again_afterwards() -> None:
    with streamed("cpu", masters="split") as make:
        model = CausalLM(LLAMA, optimizer="lightning_megatrain.optim.HostAdamW")
        make(max_steps=1, precision="bf16-true").fit(model, rows([5, 9]))
    assert all(isinstance(p, Parameter) and p.grad_dtype is p.dtype is torch.float32 for p in model.parameters())


def test_the_update_writes_the_copies_that_are_sent(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    fill = HostAdamW.set_working_copy

    def counted(optimizer: HostAdamW, parameter: Tensor, copy: Tensor | None) -> None:
        filled.append(copy is not None)
        fill(optimizer, parameter, copy)

    monkeypatch.setattr(HostAdamW, "set_working_copy", counted)
    with streamed(place) as make:
        trained(make, precision="bf16-mixed")
    matrices = 2 * 7  # of two layers
    assert sum(filled) == matrices  # filled once, and never again in five steps


class ByTheOptimizer(CausalLM):
    """Writes weights after each step in a way that no version shows."""

    def configure_optimizers(self) -> Any:
        configured: Any = super().configure_optimizers()
        configured["optimizer"].register_step_post_hook(self.shrink)
        return configured

    def shrink(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(0.97)


def test_writes_that_no_version_shows() -> None:
    def run(make: MakeTrainer) -> Any:
        torch.manual_seed(0)
        model = ByTheOptimizer(LLAMA, optimizer="lightning_megatrain.optim.HostAdamW", learning_rate=1e-2)
        make(max_epochs=1, precision="bf16-mixed").fit(model, rows([5, 9, 3, 4, 12, 6]))
        return state(model)

    expected = run(plain)
    with streamed("cpu") as make:
        assert differences(expected, run(make)) == []


class AroundValidation(Callback):
    """Writes weights where no step is near."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for parameter in pl_module.parameters():
            parameter.data.mul_(0.97)

    on_validation_end = on_train_start


def test_writes_around_validation(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        torch.manual_seed(0)
        model = CausalLM(LLAMA, optimizer="lightning_megatrain.optim.HostAdamW", learning_rate=1e-2)
        trainer = make(max_epochs=2, precision="bf16-mixed", callbacks=[AroundValidation()])
        trainer.fit(model, rows([5, 9, 3, 4]), rows([5, 9]))
        return state(model)

    expected = run(plain)
    with streamed(place) as make:
        assert differences(expected, run(make)) == []


class Looks:
    """Keeps the weights of the last layer before each forward."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def hang_on(self, module: CausalLM) -> None:
        assert module.model is not None
        weight = module.model.model.layers[-1].mlp.up_proj.weight
        module.model.register_forward_pre_hook(lambda *_: self.seen.append(weight.detach().clone()))


class Late(Callback):
    """Hangs a hook when the run has begun."""

    def __init__(self, looks: Looks) -> None:
        self.looks = looks

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, CausalLM)
        self.looks.hang_on(pl_module)


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_a_module_sees_the_weights_of_the_step(late: bool) -> None:
    def run(make: MakeTrainer) -> Any:
        torch.manual_seed(0)
        model, looks = CausalLM(LLAMA, optimizer="lightning_megatrain.optim.HostAdamW", learning_rate=1e-2), Looks()
        model.configure_model()
        if not late:
            looks.hang_on(model)
        make(max_epochs=1, callbacks=[Late(looks)] if late else []).fit(model, rows([5, 9, 3, 4, 12, 6]))
        return looks.seen

    expected = run(plain)
    with streamed("cpu") as make:
        assert differences(expected, run(make)) == []
