"""A Hugging Face model generates, is copied and is evaluated in the middle of training."""

import copy
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megatrain import MegaTrainStrategy
from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same
from tests.strategy.subject import D, Subject, V, batches


class Llama(Subject):
    """Left as it comes: with its key-value cache switched on."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=V,
            hidden_size=D,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            pad_token_id=0,
            eos_token_id=None,
        )
        self.net = LlamaForCausalLM(config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[1]).loss

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.net(input_ids=tokens_BT).logits


class Generate(Callback):
    """Continues a prompt that lies on the host, as a tokenizer gives it, between two steps and in validation."""

    def __init__(self, **how: Any) -> None:
        self.how, self.texts = how, []  # type: ignore[var-annotated]

    def generate(self, pl_module: Any, prompt: Tensor) -> None:
        training = pl_module.training
        pl_module.eval()
        self.texts.append(pl_module.net.generate(prompt, max_new_tokens=5, **self.how).cpu())
        pl_module.train(training)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.generate(pl_module, torch.tensor([[1, 2, 3]]))

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.generate(pl_module, torch.tensor([[4, 5], [6, 7]]))


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "top_k": 4}, {"num_beams": 2, "do_sample": False}])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_generate_from_a_callback(how: dict[str, Any], precision: Any) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record, generate = Llama(), Recorder(), Generate(**how)
        make(max_epochs=1, precision=precision, callbacks=[record, generate]).fit(model, batches(2), batches(1))
        return record.everything(model), generate.texts

    assert_same(run, "cpu")


def test_generate_from_a_callback_on_a_device() -> None:
    def run(make: MakeTrainer) -> Any:
        model, record, generate = Llama(), Recorder(), Generate(do_sample=False)
        make(max_epochs=1, callbacks=[record, generate]).fit(model, batches(2), batches(1))
        return record.everything(model), generate.texts

    assert_same(run, "emu")


class Copy(Callback):
    """Copies the module in the middle of training, as averaging and teacher-student methods do, and uses and trains the copy."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        twin = copy.deepcopy(pl_module.net)
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in pl_module.parameters()}
        loads = trainer.strategy.engine.accounting.loads.total() if isinstance(trainer.strategy, MegaTrainStrategy) else 0
        tokens = batch[0].cpu()
        output = twin(tokens)
        output.sum().backward()
        self.seen.append([output.detach(), *(p.grad for p in twin.parameters())])
        if isinstance(trainer.strategy, MegaTrainStrategy):
            assert trainer.strategy.engine.accounting.loads.total() == loads, "the copy went through the engine"


def test_a_copy_made_in_the_middle_of_training_runs_plain(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record, twin = Subject(), Recorder(), Copy()
        make(max_epochs=1, callbacks=[record, twin]).fit(model, batches())
        return record.everything(model), twin.seen

    assert_same(run, place)


class TeacherStudent(Subject):
    """The teacher is a moving average of the student, written within the training step; the subclass says how."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.seen: list[Tensor] = []

    def follow(self, slow: Any, fast: Any) -> None:
        with torch.no_grad():
            slow.mul_(0.9).add_(fast, alpha=0.1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with torch.no_grad():
            target = self.teacher(batch[0])
        loss = (self.net(batch[0]) - target).square().mean() + self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        for _ in range(2):
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                self.follow(slow, fast)
            with torch.no_grad():
                self.seen.append(self.teacher(batch[0]).cpu())
        self.seen.append(loss.detach().cpu())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), self.lr)


class ByData(TeacherStudent):
    def follow(self, slow: Any, fast: Any) -> None:
        slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


class ByNewData(TeacherStudent):
    def follow(self, slow: Any, fast: Any) -> None:
        slow.data = slow.data * 0.9 + fast.data * 0.1


class ByStateDict(TeacherStudent):
    def follow(self, slow: Any, fast: Any) -> None:
        """All at once, below."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.teacher.load_state_dict(self.net.state_dict())


@pytest.mark.parametrize("kind", [TeacherStudent, ByData, ByNewData, ByStateDict])
def test_a_teacher_that_follows_its_student(place: Place, kind: type[TeacherStudent]) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = kind(), Recorder()
        make(max_epochs=2, callbacks=[record]).fit(model, batches())
        return record.everything(model), model.seen

    assert_same(run, place)
