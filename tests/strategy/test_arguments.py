"""Arguments that cannot be are refused where they are given, by name, from Python and from YAML."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.engine import Engine
from tests.emulated import EmulatedAccelerator, emulated_device
from tests.engine.models import Tower
from tests.strategy.subject import Block
from tests.strategy.test_registration import CLASS, parsed

WRONG_KIND: dict[str, tuple[dict[str, Any], str]] = {
    "one layer name": ({"layers": "LlamaDecoderLayer"}, "layers='LlamaDecoderLayer' is one name, .*: layers=['LlamaDecoderLayer']."),
    "a class": ({"layers": [Block]}, "layers holds the class Block itself, .*: layers=['Block']."),
    "no names": ({"layers": 3}, "layers=3: it must be a list of class names or path patterns, not int."),
    "one resident name": ({"resident": "head"}, "resident='head' is one name, .*: resident=['head']."),
    "a number as name": ({"resident": ["head", 1]}, "resident holds 1: it must be a class name or a path pattern, not int."),
    "half a slot": ({"slots": 2.5}, "slots=2.5: it must be a whole number such as slots=2, not float."),
    "a true slot": ({"slots": True}, "slots=True: it must be a whole number"),
    "slots in words": ({"slots": "2"}, "slots='2': it must be a whole number"),
    "half a buffer": ({"staging_buffers": 1.0}, "staging_buffers=1.0: it must be a whole number such as staging_buffers=1, not float."),
    "casts in words": ({"stream_casts": "x"}, "stream_casts='x': it must be True or False, not str."),
    "saved inputs": ({"saved_inputs": 1.5}, "saved_inputs=1.5: a size is a number of bytes"),
    "no saved inputs": ({"saved_inputs": None}, "saved_inputs=None: a size is a number of bytes"),
    "all device memory": ({"device_memory": True}, "device_memory=True: a size is a number of bytes"),
    "a copy": ({"working_copy": True}, "working_copy=True: it must be 'kept' or 'cast', not bool."),
    "masters": ({"masters": 32}, "masters=32: it must be 'fp32', 'split' or 'auto', not int."),
    "overlap in words": ({"overlap_optimizer": "yes"}, "overlap_optimizer='yes': it must be True or False, not str."),
    "transient in words": ({"transient_gradients": "no"}, "transient_gradients='no': it must be True or False, not str."),
    "no transient": ({"transient_gradients": None}, "transient_gradients=None: it must be True or False"),
    "fused": ({"fused_optimizer": 1.5}, "fused_optimizer=1.5: it must be True or False, not float."),
    "checkpoints": ({"checkpoint_io": "torch"}, "checkpoint_io='torch': it must be a CheckpointIO, not str."),
    "precision": ({"precision_plugin": "bf16-true"}, "precision_plugin='bf16-true' is no plugin. .*Trainer(precision="),
}

OUT_OF_RANGE: dict[str, tuple[dict[str, Any], str]] = {
    "no slot": ({"slots": 0}, "slots=0: at least 2 are needed, .*. Pass slots=2."),
    "no staging buffer": ({"staging_buffers": 0}, "staging_buffers=0: at least 1 is needed .*. Pass staging_buffers=1."),
    "no layer": ({"layers": []}, "layers=[] names nothing to stream. .*leave it out"),
    "gigabits": ({"device_memory": "20Gb"}, "device_memory='20Gb': Gb counts bits, and a size is in bytes. Write '20GB'."),
    "binary gigabits": ({"saved_inputs": "1.5 Gib"}, "saved_inputs='1.5 Gib': Gib counts bits, .*. Write '1.5GiB'."),
    "part of a byte": ({"device_memory": "1.5"}, "device_memory='1.5' is no whole number of bytes. .*'1.5GiB'."),
    "gigabytes": ({"device_memory": 20}, "device_memory=20 counts bytes, .*. '20GB' says gigabytes, and '20B' that bytes are meant."),
    "gigabytes of inputs": ({"saved_inputs": 4}, "saved_inputs=4 counts bytes, .*. '4GB' says gigabytes, and '4B' that bytes are meant."),
    "nothing": ({"device_memory": "0.0001KiB"}, "device_memory='0.0001KiB': a size must be above zero."),
    "another place": ({"saved_inputs": "Host"}, "saved_inputs='Host' is no size. Write 'device' or 'host' or a number .*'20GiB'."),
    "another word": ({"device_memory": "all"}, "device_memory='all' is no size. Write 'auto' or a number of bytes or .*'20GiB'."),
    "another copy": ({"working_copy": "none"}, "working_copy='none': it must be 'kept' or 'cast'."),
    "other masters": ({"masters": "half"}, "masters='half': it must be 'fp32', 'split' or 'auto'."),
}

NULL = "no saved inputs"  # the parser takes null for every option
ENGINE_OPTIONS = {"layers", "resident", "slots", "staging_buffers", "stream_casts", "saved_inputs", "device_memory"}
OF_THE_ENGINE = [name for name, (arguments, _) in (WRONG_KIND | OUT_OF_RANGE).items() if ENGINE_OPTIONS.issuperset(arguments)]
KNOWN_TO_THE_PARSER = [*(name for name in OF_THE_ENGINE if name in WRONG_KIND and name != NULL), "another copy", "other masters"]


def matching(text: str) -> str:
    return re.escape(text).replace(r"\.\*", ".*")


def refused(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=matching(text)) as raised:
        call()
    assert raised.type is kind


@pytest.mark.parametrize("name", WRONG_KIND)
def test_what_is_of_the_wrong_kind_is_refused(name: str) -> None:
    arguments, text = WRONG_KIND[name]
    refused(lambda: MegaTrainStrategy(**arguments), TypeError, text)


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_what_is_out_of_range_is_refused(name: str) -> None:
    arguments, text = OUT_OF_RANGE[name]
    refused(lambda: MegaTrainStrategy(**arguments), ValueError, text)


def test_two_times_of_update_are_refused() -> None:
    refused(lambda: MegaTrainStrategy(overlap_optimizer=True, transient_gradients=True), MisconfigurationException, "set one of them")


@pytest.mark.parametrize("name", OF_THE_ENGINE)
def test_the_engine_refuses_the_same_before_it_looks_at_the_module(name: str) -> None:
    arguments, text = (WRONG_KIND | OUT_OF_RANGE)[name]
    unread: Any = None
    refused(lambda: Engine(unread, **arguments), TypeError if name in WRONG_KIND else ValueError, text)


@pytest.mark.parametrize("name", [NULL, *(name for name in OUT_OF_RANGE if name not in KNOWN_TO_THE_PARSER)])
def test_from_yaml_values_out_of_range_are_refused_in_the_same_words(name: str, tmp_path: Path) -> None:
    arguments, text = (WRONG_KIND | OUT_OF_RANGE)[name]
    refused(lambda: parsed(tmp_path, {"class_path": CLASS, "init_args": arguments}), ValueError, text)


@pytest.mark.parametrize("name", KNOWN_TO_THE_PARSER)
def test_from_yaml_the_parser_refuses_what_is_of_the_wrong_kind(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((option, value),) = (WRONG_KIND | OUT_OF_RANGE)[name][0].items()
    in_yaml = {"a class": [{"Block": 1}], "slots in words": "two"}.get(name, value)  # YAML has no classes, and reads "2" as a number
    with pytest.raises(SystemExit):
        parsed(tmp_path, {"class_path": CLASS, "init_args": {option: in_yaml}})
    assert f'Parser key "{option}"' in capsys.readouterr().err


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("no", False), ("true", True)])
def test_yaml_s_words_for_true_and_false_are_what_they_say(tmp_path: Path, text: str, value: bool) -> None:
    strategy = parsed(tmp_path, {"class_path": CLASS, "init_args": {"overlap_optimizer": text, "transient_gradients": False}})
    assert strategy.overlap_optimizer is value


def test_a_budget_that_the_device_has_not_is_refused_before_memory_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_device():
        monkeypatch.setattr("lightning_megatrain.engine.engine.LockedMemory", lambda *_: pytest.fail("memory was to be locked"))
        with pytest.raises(ValueError, match="device_memory='2TiB' is more than emu has"):
            Engine(Tower(2), "emu", device_memory="2TiB")


@pytest.mark.parametrize("size", ["20gb", "20 gib", "20GB", "20 GiB", "20KB", "20kB"])
def test_units_are_read_as_people_write_them(size: str) -> None:
    assert MegaTrainStrategy(device_memory=size, accelerator=EmulatedAccelerator())._engine_options["device_memory"] == size
