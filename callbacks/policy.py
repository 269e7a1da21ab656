"""The base of all policies: when to act, deciding once for all ranks, state, history and records."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_megatrain.callbacks.decision_log import DecisionLog
from lightning_megatrain.callbacks.errors import PolicyError
from lightning_megatrain.callbacks.figure import draw_history
from lightning_megatrain.callbacks.loader_access import attach, detach, training_loader
from lightning_megatrain.callbacks.schedule import Schedule
from lightning_megatrain.callbacks.target import warn_if_validated_on
from lightning_megatrain.datamodules.dynamic_loader import DynamicLoader
from lightning_megatrain.datamodules.sample_domains import DomainOf
from lightning_megatrain.loader_place import restore_place

T = TypeVar("T")


class Policy(pl.Callback):
    """Decides about the training data between two optimizer steps.

    A subclass says in :meth:`act` what to do when the schedule is due. All ranks call it at the same step; what it decides on must go
    through :meth:`agree`, so that rank 0 decides once for all. State and history are kept in the checkpoint, history goes to the
    loggers, decisions to a
    folder of parquet files, and a figure is drawn at the end.

    Args:
        warmup_steps: First acts after this many optimizer steps; 0 acts before the first.
        every_n_steps: Then acts each time this many more have passed; 0 acts only once.
        max_updates: Acts at most this often; 0 never acts, None has no limit.
        domain: For a plain DataLoader: the column, or the function of a sample, that gives the domain, a string or a whole number.
        name: Tells two policies of one class apart, in checkpoint, loggers and files (default: the class's name). A resumed run finds
            its state by it.
        record: Whether decisions are written to ``<log_dir>/policies/<name>/`` and a figure is drawn there.

    Raises:
        TypeError: a number of the schedule is not whole, or ``domain`` neither a name nor a function.
        ValueError: a number of the schedule is negative, or ``name`` no name of a folder.
        MisconfigurationException: (when a run begins) another policy of the Trainer has the same name.
    """

    def __init__(
        self,
        *,
        warmup_steps: int = 0,
        every_n_steps: int = 1,
        max_updates: int | None = None,
        domain: DomainOf | None = None,
        name: str | None = None,
        record: bool = True,
    ) -> None:
        self.schedule = Schedule(warmup_steps, every_n_steps, max_updates)
        if domain is not None and not isinstance(domain, str) and not callable(domain):
            raise TypeError(f"`domain` must be the name of a column or a function of a sample, got {domain!r}.")
        self.domain = domain
        self.name = name or type(self).__name__
        if self.name in (".", "..") or {"/", "\\"} & set(self.name):
            raise ValueError(f"`name` is also the name of a folder: it must not be '.' or '..', nor hold a slash, got {name!r}.")
        self.record = record
        self.updates = 0
        self.history: list[tuple[int, dict[str, float]]] = []
        self._step = -1  # optimizer steps done when last looked at
        self._log: DecisionLog | None = None
        self._earlier_log: Path | None = None  # of the run that was interrupted
        self._new: dict[str, Any] | None = None  # the state of a policy that has not decided
        self._resumed = False
        self._named_apart = False
        self._loader: DynamicLoader | None = None
        self._folder = Path()

    # ---------------------------------------------------------------- for subclasses

    @abstractmethod
    def act(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Decide and carry out; called on every rank when the schedule is due."""

    def due(self, step: int) -> bool:
        """Whether to act when ``step`` optimizer steps are done."""
        return self.schedule.due(step, self.updates)

    def prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Check and make ready, before the first step of a run (also a resumed one)."""

    records_the_step_under_way = False
    """Whether decisions are recorded while a step is under way, with the number of steps done before it."""

    def observe(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any) -> None:
        """See a micro-batch that was trained on; ``self.loader.last`` tells what it is made of."""

    @property
    def loader(self) -> DynamicLoader:
        """The training loader."""
        if self._loader is None:
            raise RuntimeError(f"{self.name} has no training loader yet: it is known once training starts.")
        return self._loader

    def agree(self, trainer: pl.Trainer, decide: Callable[[], T]) -> T:
        """Let rank 0 decide and return its decision on every rank.

        Args:
            trainer: Whose ranks.
            decide: Called on rank 0 only. It must not communicate. An exception in it is raised on every rank.
        """
        outcome: tuple[str, Any] = ("", None)
        error: Exception | None = None
        if trainer.is_global_zero:
            try:
                outcome = ("", decide())
            except Exception as e:  # the other ranks wait for word
                error, outcome = e, (f"{type(e).__name__}: {e}", None)
        message, decision = trainer.strategy.broadcast(outcome, src=0)
        if error is not None:
            raise error
        if message:
            raise RuntimeError(f"Rank 0 could not decide. {message}")
        return decision

    def report(self, trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
        """Add to the history and log as ``<name>/<metric>``. Use ``group/line`` names for metrics that belong in one panel."""
        values = {k: float(v) for k, v in metrics.items()}
        self.history.append((trainer.global_step, values))
        for logger in trainer.loggers:
            logger.log_metrics({f"{self.name}/{k}": v for k, v in values.items()}, step=trainer.global_step)

    def write(self, trainer: pl.Trainer, **columns: Any) -> None:
        """Record decisions: equally long columns ``index``, ``domain``, ``score``, ``weight`` (those that are known)."""
        if self._log is not None:
            self._log.append(trainer.global_step, **columns)

    def own_state(self) -> dict[str, Any]:
        """Return what a subclass must remember: plain values and tensors."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`own_state` returned."""

    # ---------------------------------------------------------------- Lightning's hooks

    @property
    @override
    def state_key(self) -> str:
        # Lightning wants these unique before `setup`, which refuses namesakes in clearer words.
        return f"{type(self).__qualname__}:{self.name}" + ("" if self._named_apart else f" at {id(self)}")

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._log is not None:
            self._log.flush()
        return {
            "step": self._step,
            "updates": self.updates,
            "history": self.history,
            "decisions": None if self._log is None else str(self._log.folder),
            "own": self.own_state(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = True
        self._step, self.updates = state_dict["step"], state_dict["updates"]
        self.history = [(int(step), dict(metrics)) for step, metrics in state_dict["history"]]
        self._earlier_log = Path(state_dict["decisions"]) if state_dict["decisions"] else None
        self.load_own_state(state_dict["own"])

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._refuse_namesakes(trainer)
        if stage == "fit":
            with self._naming_errors(trainer):
                if self._new is None and not self._resumed:
                    self._new = copy.deepcopy(self.state_dict())
                attach(trainer, self.domain, self.name)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        restore_place(trainer)
        if trainer.global_step == 0 and self._new is not None and not self._resumed:
            self.load_state_dict(copy.deepcopy(self._new))  # a new run, after another that this object was in
        with self._naming_errors(trainer):
            self._loader = training_loader(trainer)
            warn_if_validated_on(self, trainer)
            self._folder = Path(trainer.log_dir or trainer.default_root_dir) / "policies" / self.name  # on all ranks: it communicates
            if self.record and trainer.is_global_zero and not getattr(trainer, "fast_dev_run", 0):
                if self.schedule.max_updates != 0:
                    self._folder.mkdir(parents=True, exist_ok=True)  # finds now that it cannot be written
                self._log = DecisionLog(self._folder / "decisions")
                if self._resumed and self._earlier_log is not None:
                    self._log.resume(self._earlier_log, trainer.global_step - self.records_the_step_under_way)
                elif trainer.global_step == 0:
                    self._log.start()
            self.prepare(trainer, pl_module)
        finished = trainer.max_epochs not in (None, -1) and trainer.current_epoch >= (trainer.max_epochs or 0)
        if not finished and trainer.global_step != trainer.max_steps:
            self._act_if_due(trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.schedule.max_updates != 0:
            with self._naming_errors(trainer):
                self.observe(trainer, pl_module, outputs, batch)
        if not _training_ends(trainer):  # a longer run, resumed from here, acts when it starts
            self._act_if_due(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._log is not None:
            self._log.flush()
            draw_history(self.history, self.name, self._folder / "history.png")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            detach(trainer)
            self._resumed = False

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # Lightning calls no teardown hook then; the project must be left as it came all the same.
        if self._log is not None:
            self._log.flush()
        self.teardown(trainer, pl_module, "fit")

    def _refuse_namesakes(self, trainer: pl.Trainer) -> None:
        named = [type(c).__name__ for c in getattr(trainer, "callbacks", []) if isinstance(c, Policy) and c.name == self.name]
        if len(named) > 1:
            raise MisconfigurationException(
                f"{len(named)} policies of this Trainer are named {self.name!r} ({', '.join(named)}). State, metrics and records are kept "
                f"under the name: give each its own, for example {named[-1]}(..., name='{self.name}2')."
            )
        self._named_apart = True

    def _act_if_due(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step = trainer.global_step
        if step == self._step:
            return  # the step is not over, or was acted on before the checkpoint
        self._step = step
        if self.due(step):
            with self._naming_errors(trainer):
                self.act(trainer, module)
            self.updates += 1

    @contextmanager
    def _naming_errors(self, trainer: pl.Trainer) -> Iterator[None]:
        try:
            yield
        except PolicyError:
            raise
        except Exception as e:
            raise PolicyError(f"{self.name} failed at step {trainer.global_step}: {e}") from e


def _training_ends(trainer: pl.Trainer) -> bool:
    last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
    return trainer.global_step == trainer.max_steps or (last_epoch and trainer.is_last_batch)


def warn_once(policy: Policy, key: str, message: str) -> None:
    """Warn, on rank 0, once for each policy and key."""
    seen: set[str] = policy.__dict__.setdefault("_warned", set())
    if key not in seen:
        seen.add(key)
        rank_zero_warn(f"{policy.name}: {message}")
