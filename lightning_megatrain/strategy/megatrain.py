"""`Trainer(strategy="megatrain")`: trains with the parameters in host memory."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatrain.engine import Engine
from lightning_megatrain.engine.options import check_choice, check_flag, check_options
from lightning_megatrain.engine.report import report
from lightning_megatrain.optim import HostAdamW
from lightning_megatrain.optim.fused import FusedSwitches
from lightning_megatrain.optim.split_masters import SplitMasters
from lightning_megatrain.strategy.host_masters import Masters, split_masters
from lightning_megatrain.strategy.host_updates import HostUpdates
from lightning_megatrain.strategy.precision import HostPrecision, MegaTrainMixedPrecision, MegaTrainPrecision, compute_dtype, host_precision
from lightning_megatrain.strategy.progress import locking_progress
from lightning_megatrain.strategy.torn import mark_torn, refuse_torn
from lightning_megatrain.strategy.user_settings import (
    check_optimizer,
    keep_averages_on_host,
    refuse_compiled,
    refuse_nodes,
    refuse_settings,
    refuse_several,
)


class MegaTrainStrategy(SingleDeviceStrategy):
    """Trains any LightningModule on one device while its parameters and the optimizer's state stay in host memory.

    Layers' weights are streamed to the device while they run, and their gradients back; the optimizer works on the module's own
    parameters, on the host. Each layer runs once more in backward, so a step takes one forward more than plain training. Losses, gradients
    and weights are those of plain training.

    Args:
        layers: Class names (``["LlamaDecoderLayer"]``) or path patterns (``["model.layers.*"]``) of the modules to stream. Left out:
            Hugging Face's layers, else every run of two or more like blocks in a `ModuleList` or `Sequential`. Device memory holds what is
            not streamed.
        resident: Class names or path patterns of modules to keep on the device though they could be streamed. Costs device memory for
            their weights and gradients, saves their recompute. Left out: none.
        slots: Buffers on the device for weights, each of the size of the largest layer (default 2, the least). More of them help only
            where layers differ much in size.
        staging_buffers: Buffers on the host for gradients on their way, each of the size of the largest layer's gradients (default 2).
            With 1, gradients cannot arrive while others leave.
        stream_casts: Under ``precision="bf16-mixed"``, send those parameters as BF16 that autocast would only ever cast to BF16 (default
            True). Half the bytes over the bus and in the slots, with the same result; costs 2 bytes of host memory for each such parameter.
        saved_inputs: Where layers keep their inputs for backward: ``"device"`` (default); ``"host"``, which leaves those of two layers on
            the device whatever the depth; or the bytes that may stay there (``"20GiB"``, or an int), the first layers' going to the host.
            The numbers are the same. Costs as much page-locked host memory, and the bus once each way beside the layers' computation.
        device_memory: Device memory that training may use in all: ``"20GiB"``, an int of bytes, or ``"auto"``, what is free after the first
            optimizer step less a tenth of the device's. As many layers as fit beside that step's peak keep their weights on the device,
            and are loaded once instead of twice a micro-batch, or less often where nothing can have changed them. The numbers are the
            same. Left out: none are kept. Choose a size where later batches may be larger than the first.
        working_copy: What becomes of parameters that travel in BF16 and lie in FP32: ``"kept"`` keeps a BF16 copy beside each, made once
            a step (2 bytes a parameter more); ``"cast"`` casts at every load, one pass over host memory more.
        masters: How the host keeps the FP32 weights of a `HostAdamW`. ``"fp32"``: as they are. ``"split"``: parameters become BF16 while
            training lasts and the optimizer keeps the low 16 bits of each, 12 bytes a parameter with moments and the same numbers (but
            for ties: the upper half rounds them up, a cast to even). Code of yours that reads a parameter then sees BF16, and what it
            writes is all that is kept of the parameter: its low bits go. Checkpoints hold FP32. ``"auto"``: FP32 if its bytes fit into
            the free host memory, else split. Left out: ``"auto"`` for `CausalLM`, else ``"fp32"``.
        overlap_optimizer: Let `HostAdamW` update each layer just before the next forward loads it, beside the device's work, not within
            `optimizer.step()`; everything is done before validation, checkpoints, and hooks that are not Lightning's. Only right if your
            ``training_step`` reads no layer's weights but by calling the layer, and your dataset and schedule read none. Left out: True
            for `CausalLM`, else False.
        transient_gradients: Let `HostAdamW` update each layer in backward, as its gradients land; they are never stored. Needs one
            backward a step, no accumulation, no clipping, and no hook of yours that looks at gradients. A backward that fails half-way
            leaves weights of two steps: what follows is refused, and training goes on from a checkpoint.
        fused_optimizer: Switch plain Adam, AdamW and SGD to torch's fused CPU kernels (default True): 5 to 10 times faster; results may
            differ in the last bit. False leaves the optimizer as it is.
        accelerator: For the Trainer's own use.
        checkpoint_io: Reads and writes checkpoints; left out: Lightning's.
        precision_plugin: For the Trainer's own use; see ``Trainer(precision=...)``. ``"32-true"``, ``"bf16-mixed"`` and ``"bf16-true"``
            are supported.

    Raises:
        TypeError: An argument is of the wrong kind. ValueError: It is out of range, or nothing in the module can be streamed.
        MisconfigurationException: More than one device, MPS, another precision, ``sync_batchnorm``, or ``torch.compile`` of the whole
        module; ``masters="split"``, ``overlap_optimizer`` or ``transient_gradients`` where they cannot be right.
    """

    strategy_name = "megatrain"

    def __init__(
        self,
        layers: list[str] | None = None,
        resident: list[str] | None = None,
        slots: int = 2,
        staging_buffers: int = 2,
        stream_casts: bool = True,
        saved_inputs: int | str = "device",
        device_memory: int | str | None = None,
        working_copy: Literal["kept", "cast"] = "kept",
        masters: Masters | None = None,
        overlap_optimizer: bool | None = None,
        transient_gradients: bool = False,
        fused_optimizer: bool = True,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        self._engine_options: dict[str, Any] = {
            "layers": layers,
            "resident": resident,
            "slots": slots,
            "staging_buffers": staging_buffers,
            "stream_casts": stream_casts,
            "saved_inputs": saved_inputs,
            "device_memory": device_memory,
            "working_copies": working_copy == "kept",
        }
        check_options(**self._engine_options)
        check_choice("working_copy", working_copy, ("kept", "cast"))
        if masters is not None:
            check_choice("masters", masters, ("fp32", "split", "auto"))
        if overlap_optimizer is not None:
            check_flag("overlap_optimizer", overlap_optimizer)
        check_flag("transient_gradients", transient_gradients)
        check_flag("fused_optimizer", fused_optimizer)
        if not isinstance(checkpoint_io, CheckpointIO | None):
            raise TypeError(f"checkpoint_io={checkpoint_io!r}: it must be a CheckpointIO, not {type(checkpoint_io).__name__}.")
        if overlap_optimizer and transient_gradients:
            raise MisconfigurationException("overlap_optimizer=True and transient_gradients=True both say when to update; set one of them.")
        self.masters, self.overlap_optimizer, self.transient_gradients = masters, overlap_optimizer, transient_gradients
        self._split: SplitMasters | None = None
        self._updates: HostUpdates | None = None
        self.fused_optimizer = fused_optimizer
        self._fused = FusedSwitches([], nn.Module())
        self._layer_sync: Any = None  # the Trainer puts `sync_batchnorm` here
        self._engine: Engine | None = None
        self._reported = False

    @property
    def engine(self) -> Engine:
        """The streaming engine, from `setup` to `teardown`."""
        if self._engine is None:
            raise RuntimeError("The engine exists only while the Trainer runs: between the strategy's setup and its teardown.")
        return self._engine

    # --- device and precision ---

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The one device, where the Trainer looks for it; it is not for the strategy's constructor to say."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        refuse_several(devices)
        if devices:
            self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """The one machine; the Trainer says how many it was given."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        refuse_nodes(number)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = host_precision(precision_plugin)

    @override
    def connect(self, model: LightningModule) -> None:
        refuse_compiled(model)
        super().connect(model)

    @override
    def setup_environment(self) -> None:
        refuse_settings(self.accelerator, self._layer_sync)
        if isinstance(self.precision_plugin, MegaTrainMixedPrecision):
            self.precision_plugin.device = self.root_device.type
        assert self.lightning_module is not None
        if self.root_device.type != "cpu":
            keep_averages_on_host(self.lightning_module.trainer)
        super().setup_environment()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # parameters live on the host, in FP32, whatever the precision of compute
        with _EmptyInit(enabled=bool(empty_init)), torch.device("cpu"):
            yield

    # --- setup and teardown ---

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        refuse_torn(self.lightning_module)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        preferred = getattr(self.lightning_module, "megatrain_defaults", {})
        masters = self.masters or preferred.get("masters", "fp32")
        if fitting and masters != "fp32":  # the engine must find the weights in their form, which is the optimizers' to say
            self.setup_optimizers(trainer)
            bf16 = not isinstance(self.precision_plugin, MegaTrainPrecision)
            copies = bf16 and self._engine_options["working_copies"]
            self._split = split_masters(masters, self.optimizers, trainer, computes_in_bf16=bf16, working_copy=copies)
        self.model_to_device()
        if fitting:
            if masters == "fp32":
                self.setup_optimizers(trainer)
            overlap = self.overlap_optimizer
            self._updates = HostUpdates(
                trainer,
                self.lightning_module,
                self.engine,
                self.optimizers,
                overlap=preferred.get("overlap_optimizer", False) if overlap is None else overlap,
                asked=overlap is not None,
                transient=self.transient_gradients,
            )
            self._know_norm(self._updates.clip)
        self.setup_precision_plugin()

    def _know_norm(self, clip: Callable[[Optimizer, float], bool] | None) -> None:
        assert isinstance(self.precision_plugin, HostPrecision)
        self.precision_plugin.clip_by_known_norm = clip

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        if self._engine is not None:
            self._engine.close()
        with locking_progress(self.lightning_module, self.root_device) as progress:
            self._engine = Engine(
                self.lightning_module,
                self.root_device,
                compute_dtype=compute_dtype(self.precision_plugin),
                tell=rank_zero_info,
                split=self._split,
                progress=progress,
                **self._engine_options,
            )
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):  # a metric's states are neither parameters nor buffers
                module.to(self.root_device)
        self._reported = False

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        for optimizer in self.optimizers:
            check_optimizer(optimizer)
        self._fused = FusedSwitches(self.optimizers if self.fused_optimizer else [], self.lightning_module, tell=rank_zero_info)

    @override
    def teardown(self) -> None:
        torn = self._updates is not None and self._updates.torn
        if self._updates is not None:
            self._updates.close()
            self._updates = None
            self._know_norm(None)
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._split is not None:
            self._split.join()
            self._split = None
        if torn and self.lightning_module is not None:
            mark_torn(self.lightning_module)
        super().teardown()

    # --- steps ---

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self._updates is not None
        self._updates.before_forward()
        with self.engine.step():
            output = super().training_step(*args, **kwargs)
        self._updates.drain()
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self._updates is not None
        if self._is_last_of_step():
            self._updates.before_backward()
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def scale_gradients(self, factor: float) -> bool:
        """Multiplies all gradients of this step by `factor` as they become final in the backward that comes next, its last.

        Saves a pass over host memory; the numbers are those of multiplying afterwards.

        Returns:
            False where unknown code may add to gradients in between: then nothing is done.
        """
        assert self._updates is not None
        if not self._updates.quiet:
            return False
        self._updates.before_backward(factor)
        return True

    def _is_last_of_step(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization and not self.lightning_module.trainer.fit_loop._should_accumulate()

    @override
    def on_validation_start(self) -> None:
        self._drain()

    @override
    def on_validation_end(self) -> None:
        self.engine.weights_changed()  # its hooks may have written weights in ways that cannot be told

    @override
    def on_train_start(self) -> None:
        self.engine.weights_changed()  # as above, before the first step

    @override
    def on_train_end(self) -> None:
        self._drain()

    def _drain(self) -> None:
        if self._updates is not None:
            self._updates.drain()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.engine.step():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.engine.step():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.step():
            return super().predict_step(*args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        if not self._reported:
            self._reported = True
            rank_zero_info(report(self.engine, self.optimizers))
        return output

    # --- state ---

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._drain()
        if self.lightning_module is not None:
            refuse_torn(self.lightning_module)
        state = super().lightning_module_state_dict()
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.cpu()  # buffers are on the device
        if self._split is not None and self.lightning_module is not None:
            self._split.put_exact(self.lightning_module, state)
        return state

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._drain()
        super().load_model_state_dict(checkpoint, strict=strict)
        if self._split is not None and self.lightning_module is not None:
            self._split.take_exact(self.lightning_module, checkpoint["state_dict"])
        if self._engine is not None:
            self._engine.weights_changed()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._drain()
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._split is not None and isinstance(plain, HostAdamW):
            return plain.state_dict(masters=False)  # the module's state has the exact weights
        return self._fused.original(plain, super().optimizer_state(optimizer))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # the base class would move the state to the device
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
        self._fused.apply()


StrategyRegistry.register(
    MegaTrainStrategy.strategy_name, MegaTrainStrategy, description="Parameters in host memory, streamed layer by layer"
)
