"""Options that trade device memory for host memory or for the bus leave every number as it is."""

import logging
from typing import Any

import pytest

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, streamed
from tests.strategy.subject import Subject, batches


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("saved_inputs", ["host", "256B", "1KiB"])
def test_saved_inputs_off_the_device(saved_inputs: str, precision: Any) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        make(max_epochs=2, accumulate_grad_batches=2, precision=precision, callbacks=[record]).fit(model, batches(5), batches(2))
        return record.everything(model)

    assert_same(run, "emu", saved_inputs=saved_inputs)


def test_saved_inputs_are_counted_in_the_host_s_memory() -> None:
    class Looks(Recorder):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.strategy.engine.saved_inputs.host_bytes == 2 * 2 * 4 * 8 * 4  # two of three layers' inputs of B x T x D in FP32

    with streamed("emu", saved_inputs="host") as make:
        make(max_epochs=1, callbacks=[Looks()]).fit(Subject(), batches())


@pytest.mark.parametrize("place", ["cpu", "emu"])
def test_what_is_no_size_is_refused(place: Place) -> None:
    with streamed(place, saved_inputs="20 bananas") as make, pytest.raises(ValueError, match=r"saved_inputs='20 bananas' is no size"):
        make(max_epochs=1).fit(Subject(), batches())


def test_on_the_cpu_saved_inputs_are_where_they_lie() -> None:
    with streamed("cpu", saved_inputs="host") as make, pytest.warns(UserWarning, match="saved_inputs='host' is without meaning on the CPU"):
        make(max_epochs=1).fit(Subject(), batches())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("device_memory", ["1MiB", "auto"])
def test_layers_that_keep_their_weights_on_the_device(device_memory: str, precision: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")

    def run(make: MakeTrainer) -> Any:
        model, record = Subject(), Recorder()
        make(max_epochs=2, accumulate_grad_batches=2, precision=precision, callbacks=[record]).fit(model, batches(5), batches(2))
        return record.everything(model)

    assert_same(run, "emu", device_memory=device_memory)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("device_memory")]
    assert len(said) == 1
    assert said[0].startswith(f"device_memory='{device_memory}': 3 of 3 layers keep their weights on the device, ")
