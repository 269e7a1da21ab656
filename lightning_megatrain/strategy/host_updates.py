"""When, and from what, the host's weights are updated: at once, before the next forward, or in backward."""

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_megatrain.engine import Engine
from lightning_megatrain.optim import HostAdamW
from lightning_megatrain.optim.deferred import DeferredUpdates
from lightning_megatrain.optim.in_backward import BackwardUpdates
from lightning_megatrain.strategy.known_code import BETWEEN_STEPS, GRADIENTS, OWN_STEPS, hooks_on, unknown_hooks, unknown_to_the_step


class HostUpdates:
    """The updates of one fit.

    The numbers are those of the plain loop, whichever way it goes. What is gained depends on what may run in between (`known_code`):

    * where no unknown hook may look at gradients, the norm for clipping is summed up as gradients land;
    * where the module's own code is known too, the clip coefficient is applied within the update, weights are trusted to change by the
      optimizer alone, and a gradient that is alone in its step stays in the dtype it came in.

    Args:
        trainer: The Trainer that fits.
        module: Its module.
        engine: Holds the module.
        optimizers: The module's.
        overlap: Update before the next forward.
        asked: Whether the user set `overlap`, and wants to know what is in its way.
        transient: Update in backward.

    Raises:
        MisconfigurationException: An option is set and something is in its way; it says what.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        engine: Engine,
        optimizers: Sequence[Optimizer],
        overlap: bool,
        asked: bool,
        transient: bool,
    ) -> None:
        self._trainer, self._module, self._engine, self._optimizers = trainer, module, engine, optimizers
        self._optimizer = optimizers[0] if len(optimizers) == 1 and isinstance(optimizers[0], HostAdamW) else None
        self._automatic = module.automatic_optimization
        self._accumulation = _accumulation(trainer)
        self._at_step = unknown_to_the_step(optimizers, [config.scheduler for config in trainer.strategy.lr_scheduler_configs])
        self.unknown = unknown_hooks(trainer, module, (*GRADIENTS, *BETWEEN_STEPS, *OWN_STEPS)) + self._at_step
        """Hooks that are in the way of what is gained where all code is known."""
        self._norms_known = self._automatic and not unknown_hooks(trainer, module, GRADIENTS)
        self._asked = asked
        self._deferred: DeferredUpdates | None = None
        self._in_backward: BackwardUpdates | None = None
        self._any_dtype: list[Parameter] = []
        if transient:
            self._begin_in_backward()
        elif overlap and (asked or not self.unknown):
            self._begin_deferred()
        if self._optimizer is not None and self.quiet:
            if not self._accumulation:
                self._keep_gradients_as_they_come()
            self._write_copies(self._optimizer)
        engine.trust_versions = self.quiet

    @property
    def quiet(self) -> bool:
        """Whether all code that runs between steps is known."""
        return self._automatic and not self.unknown

    @property
    def torn(self) -> bool:
        """Whether a backward updated some weights and failed."""
        return self._in_backward is not None and self._in_backward.torn

    def before_forward(self) -> None:
        """Looks for hooks that were hung on modules since, which may look at weights while forward runs.

        Raises:
            RuntimeError: The weights are of two steps.
        """
        if self._in_backward is not None:
            self._in_backward.check()
        if self._deferred is None and not self.quiet:
            return
        hook = hooks_on(self._module) or next(iter(unknown_to_the_step(self._optimizers, [])), None)
        if hook is not None:
            self._give_up_what_was_gained(hook)

    def before_backward(self, scale: float = 1.0) -> None:
        """Called before the last backward of a step: gradients are scaled, and their norms taken, as they become final."""
        clips = bool(self._trainer.gradient_clip_val) and self._trainer.gradient_clip_algorithm != "value"
        if scale != 1.0 or (clips and self._norms_known):
            self._engine.gradients.landing.expect_last([p for p in self._engine.parameters.values() if p.requires_grad], scale)

    def clip(self, optimizer: Optimizer, largest: float) -> bool:
        """Clips to a norm that was summed up as gradients landed; returns False where it is not known."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = self._engine.gradients.landing.total_norm(parameters) if self._norms_known else None
        if norm is None:
            return False
        coefficient = torch.clamp(largest / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
        if self._optimizer is not None and self.quiet:
            self._optimizer.next_grad_scale = float(coefficient)
        else:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(coefficient)
        return True

    def drain(self) -> None:
        """Runs every update that is still to come; to be called before unknown code may look.

        Raises:
            RuntimeError: The weights are of two steps.
        """
        if self._deferred is not None:
            self._deferred.drain()
        if self._in_backward is not None:
            self._in_backward.check()

    def close(self) -> None:
        """Runs what is still to come and gives the optimizer back as it was."""
        if self._in_backward is not None:
            self._in_backward.close()
            self._engine.update_in_backward(None)
        self._see_everything()

    def _give_up_what_was_gained(self, hook: str) -> None:
        if self._asked and self._deferred is not None:
            rank_zero_warn(f"overlap_optimizer=True has no more effect: {hook} may look at the weights while the next forward runs.")
        self.unknown.append(hook)
        self._norms_known = False
        self._see_everything()

    def _see_everything(self) -> None:
        """Lets weights and gradients be what plain training has at every moment."""
        if self._deferred is not None:
            self._deferred.close()
            self._deferred = None
            self._engine.update_before_load(None)
        self._engine.trust_versions = False
        self._engine.weights_changed()
        for layer in self._engine.layers:
            layer.copy_writer = None
        if self._optimizer is not None:
            for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
                self._optimizer.set_working_copy(parameter, None)
        for parameter in self._any_dtype:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32
            parameter.grad = gradient if gradient is None else gradient.float()
        self._any_dtype.clear()

    def _begin_deferred(self) -> None:
        if self._asked:
            self._require("overlap_optimizer")
        if self._optimizer is None or not self._automatic:
            return
        hooks = unknown_hooks(self._trainer, self._module, BETWEEN_STEPS) + self._at_step
        if hooks:
            rank_zero_warn(
                f"overlap_optimizer=True has no effect: {hooks[0]}{_and_more(hooks)} may look at the weights between two steps, so the "
                "whole update runs before it."
            )
            return
        self._deferred = DeferredUpdates(self._optimizer, self._engine.layer_of)
        self._engine.update_before_load(self._deferred)
        rank_zero_info("HostAdamW updates each layer just before the next forward loads it.")

    def _begin_in_backward(self) -> None:
        optimizer = self._require("transient_gradients")
        trainer = self._trainer
        if self._accumulation:
            what, instead = self._accumulation
            raise MisconfigurationException(
                f"transient_gradients=True uses each gradient when it comes, and {what} would add several. {instead}, or set "
                "MegaTrainStrategy(transient_gradients=False)."
            )
        if trainer.gradient_clip_val:
            raise MisconfigurationException(
                f"transient_gradients=True updates before all gradients are known, and gradient_clip_val={trainer.gradient_clip_val} needs "
                "them first. Set Trainer(gradient_clip_val=None), or MegaTrainStrategy(transient_gradients=False)."
            )
        hooks = unknown_hooks(trainer, self._module, GRADIENTS)
        if hooks:
            raise MisconfigurationException(
                f"transient_gradients=True stores no gradients, and {hooks[0]}{_and_more(hooks)} may look at them or skip the step. Take "
                "it out, or set MegaTrainStrategy(transient_gradients=False)."
            )
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        without = [name for name, p in self._engine.parameters.items() if p.requires_grad and p not in owned]
        if without:
            raise MisconfigurationException(
                f"transient_gradients=True has no place for the gradient of {without[0]!r}{_and_more(without)}, which require grad and are "
                "not in the optimizer. Give them to it, or call requires_grad_(False) on them."
            )
        self._in_backward = BackwardUpdates(optimizer)
        self._engine.update_in_backward(self._in_backward.take)
        rank_zero_info("HostAdamW updates each layer as its gradients land; they are not stored.")

    def _require(self, option: str) -> HostAdamW:
        if not self._automatic:
            raise MisconfigurationException(
                f"{option}=True needs automatic optimization: with automatic_optimization=False your training_step may look at weights "
                f"and gradients at any time. Set MegaTrainStrategy({option}=False)."
            )
        if self._optimizer is None:
            raise MisconfigurationException(
                f"{option}=True needs one lightning_megatrain.optim.HostAdamW as the only optimizer. Return one from "
                f"configure_optimizers(), or set MegaTrainStrategy({option}=False)."
            )
        return self._optimizer

    def _write_copies(self, optimizer: HostAdamW) -> None:
        """Lets the update write the BF16 copies that are sent, in the pass that it makes anyway."""
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        for layer in self._engine.layers:
            if owned.issuperset(layer.parameters):
                layer.copy_writer = optimizer

    def _keep_gradients_as_they_come(self) -> None:
        """Lets `.grad` hold BF16 where the device computed BF16."""
        for parameter in self._engine.parameters.values():
            if parameter.requires_grad and parameter.is_floating_point() and parameter.grad is None:
                parameter.grad_dtype = None
                self._any_dtype.append(parameter)


def _accumulation(trainer: Trainer) -> tuple[str, str] | None:
    """What lets gradients of several batches be added, and how it is taken out; None where nothing does."""
    if trainer.accumulate_grad_batches != 1:
        return f"accumulate_grad_batches={trainer.accumulate_grad_batches}", "Set Trainer(accumulate_grad_batches=1)"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
            return f"GradientAccumulationScheduler({callback.scheduling})", "Take that callback out"
    return None


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
