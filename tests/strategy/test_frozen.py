"""What is frozen costs nothing: no gradient memory, no recompute, no second load. Adapters train."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, gradients, streamed
from tests.strategy.subject import Block, D, Subject, V, batches


def frozen(module: nn.Module) -> None:
    module.requires_grad_(False)


class FrozenPrefix(Subject):
    """Only the last block and the head train."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.net.embedding, self.net.blocks[0], self.net.blocks[1]):
            frozen(part)


class FrozenMiddle(Subject):
    def __init__(self) -> None:
        super().__init__()
        frozen(self.net.blocks[1])


class FrozenInPart(Subject):
    """One weight of a block trains, and one of another does not."""

    def __init__(self) -> None:
        super().__init__()
        frozen(self.net.blocks[0])
        self.net.blocks[0].up.bias.requires_grad_(True)
        self.net.blocks[2].down.weight.requires_grad_(False)


class FrozenResidents(Subject):
    def __init__(self) -> None:
        super().__init__()
        frozen(self.net.embedding)
        frozen(self.net.head)


@pytest.mark.parametrize("kind", [FrozenPrefix, FrozenMiddle, FrozenInPart, FrozenResidents])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_frozen_parts_equal_plain_and_have_no_gradient(place: Place, kind: type[Subject], precision: Any) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = kind(), Recorder()
        make(max_epochs=1, precision=precision, accumulate_grad_batches=2, callbacks=[record]).fit(model, batches())
        return record.everything(model), gradients(model)

    found, left = assert_same(run, place)
    assert [name for name, gradient in left.items() if gradient is None] == [
        name for name, p in kind().named_parameters() if not p.requires_grad
    ]


class Forwards(Callback):
    """Counts how often each block's inside ran, and the engine's loads, in one step."""

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.loads: list[int] = []
        self.stored = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.engine.accounting.reset()
        self.runs = [0] * len(pl_module.net.blocks)
        self.handles = [block.up.register_forward_hook(self._counter(i)) for i, block in enumerate(pl_module.net.blocks)]

    def _counter(self, index: int) -> Any:
        def count(*_: Any) -> None:
            self.runs[index] += 1

        return count

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        accounting = trainer.strategy.engine.accounting
        self.loads = [accounting.loads[f"net.blocks.{index}"] for index in range(len(pl_module.net.blocks))]
        self.stored = accounting.bytes_to_host
        for handle in self.handles:
            handle.remove()


class Deep(Subject):
    def __init__(self, frozen_blocks: int) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList([Block() for _ in range(6)])
        if frozen_blocks:
            frozen(self.net.embedding)
        for block in self.net.blocks[:frozen_blocks]:
            frozen(block)


@pytest.mark.parametrize("frozen_blocks", [0, 4])
def test_a_frozen_prefix_is_neither_recomputed_nor_loaded_again(place: Place, frozen_blocks: int) -> None:
    forwards, model = Forwards(), Deep(frozen_blocks)
    with streamed(place) as make:
        make(max_epochs=1, callbacks=[forwards]).fit(model, batches(2))
    assert forwards.runs == [1] * frozen_blocks + [2] * (6 - frozen_blocks)
    # the last two layers of the forward are still in their slots when backward starts
    assert forwards.loads == [1] * frozen_blocks + [2] * (4 - frozen_blocks) + [1, 1]
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert forwards.stored == (trained if place == "emu" else 0)


class Unfreeze(BaseFinetuning):
    """Trains the head alone at first, then adds the last block, as a group of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.embedding, pl_module.net.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[2], optimizer, lr=1e-3)
        if epoch == 2:
            self.unfreeze_and_add_param_group([pl_module.net.blocks[0], pl_module.net.embedding], optimizer)


class TrainableOnly(Subject):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.lr)


@pytest.mark.parametrize("fused", [False, True])
def test_finetuning_callbacks_add_groups_while_it_trains(place: Place, fused: bool) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = TrainableOnly(), Recorder()
        trainer = make(max_epochs=3, callbacks=[Unfreeze(), record])
        trainer.fit(model, batches())
        return record.everything(model), [len(group["params"]) for group in trainer.optimizers[0].param_groups]

    if not fused:
        assert_same(run, place)
    else:  # the fused kernel may differ in the last bit
        with streamed(place, fused_optimizer=True) as make:
            assert run(make)[1] == [4, 6, 7]


def test_backbone_finetuning(place: Place) -> None:
    class WithBackbone(TrainableOnly):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.net = self.net, nn.Identity()
            self.out = nn.Linear(V, V)

        def forward(self, tokens_BT: Tensor) -> Tensor:
            return self.out(self.backbone(tokens_BT))

    def run(make: MakeTrainer) -> Any:
        model, record = WithBackbone(), Recorder()
        make(max_epochs=3, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1), record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)


class LoRALinear(nn.Module):
    """A frozen linear map and a trained one of rank 2 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class HandWrittenLoRA(TrainableOnly):
    def __init__(self) -> None:
        super().__init__()
        frozen(self.net)
        for block in self.net.blocks:
            block.up, block.down = LoRALinear(block.up), LoRALinear(block.down)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_adapters_written_by_hand(place: Place, precision: Any) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = HandWrittenLoRA(), Recorder()
        make(max_epochs=2, precision=precision, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)


class PeftLlama(TrainableOnly):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=V, hidden_size=D, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1
        )
        lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False)
        self.net = get_peft_model(LlamaForCausalLM(config), lora)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.net(input_ids=tokens_BT).logits


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_peft_adapters_on_a_llama(place: Place, precision: Any) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = PeftLlama(), Recorder()
        make(max_epochs=1, precision=precision, callbacks=[record]).fit(model, batches())
        assert all((p.grad is None) != ("lora_" in name) for name, p in model.named_parameters())
        return record.everything(model)

    assert_same(run, place)
