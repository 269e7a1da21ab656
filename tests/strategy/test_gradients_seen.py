"""Gradients are complete, on the host, and editable in every hook that Lightning gives."""

from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, gradients
from tests.strategy.subject import Subject, batches


def test_gradients_are_whole_in_on_after_backward_and_logged(place: Place) -> None:
    class Watching(Subject):
        def on_after_backward(self) -> None:
            assert all(p.grad is not None and p.grad.device.type == "cpu" for p in self.parameters())
            self.seen.append(gradients(self))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self, 2))

    def run(make: MakeTrainer) -> Any:
        model = Watching()
        model.seen = []
        trainer = make(max_epochs=1, accumulate_grad_batches=2)
        trainer.fit(model, batches())
        return model.seen, dict(trainer.callback_metrics)

    assert_same(run, place)


def test_edited_gradients_are_what_the_optimizer_takes(place: Place) -> None:
    class Editing(Subject):
        def on_after_backward(self) -> None:
            for parameter in self.net.blocks[0].parameters():
                parameter.grad = None
            self.net.head.weight.grad.mul_(2)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.net.blocks[1].up.weight.grad[0] = 0
            self.net.embedding.weight.grad = torch.ones_like(self.net.embedding.weight)

    def run(make: MakeTrainer) -> Any:
        model, record = Editing(), Recorder()
        make(max_epochs=2, accumulate_grad_batches=2, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)


def test_hooks_on_parameters_see_and_change_gradients(place: Place) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        seen: list[Tensor] = []
        for parameter in (model.net.blocks[1].up.weight, model.net.embedding.weight):
            parameter.register_hook(lambda gradient: gradient * 3)
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        make(max_epochs=1, accumulate_grad_batches=2, callbacks=[record]).fit(model, batches())
        return record.everything(model), seen

    assert_same(run, place)


def test_a_loss_changed_before_backward(place: Place) -> None:
    class Reweighted(Subject):
        def on_before_backward(self, loss: Tensor) -> None:
            loss.mul_(5)

    def run(make: MakeTrainer) -> Any:
        model, record = Reweighted(), Recorder()
        make(max_epochs=1, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)
