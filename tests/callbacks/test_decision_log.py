"""The record of decisions survives interrupted runs and interrupted resumes."""

import pyarrow.parquet as pq
import pytest

from lightning_megatrain.callbacks.decision_log import DecisionLog, read_decisions


def steps_in(folder):
    return read_decisions(folder)["step"].to_pylist()


def log_of(folder, steps, flush_rows):
    log = DecisionLog(folder, flush_rows)
    for step in steps:
        log.append(step, index=[step, step + 100])
    log.flush()
    return log


@pytest.mark.parametrize("flush_rows", [1, 5, 1000])
def test_a_resume_keeps_what_came_before_it_and_goes_on(tmp_path, flush_rows):
    log_of(tmp_path / "d", range(10), flush_rows)
    log = DecisionLog(tmp_path / "d")
    log.resume(tmp_path / "d", 6)
    assert steps_in(tmp_path / "d") == [step for step in range(7) for _ in range(2)]
    log.append(7, index=[70])
    log.flush()
    assert read_decisions(tmp_path / "d")["index"].to_pylist()[-3:] == [6, 106, 70]


@pytest.mark.parametrize("flush_rows", [1, 5, 1000])
def test_another_folder_takes_a_copy_and_leaves_the_earlier_one_alone(tmp_path, flush_rows):
    log_of(tmp_path / "old", range(10), flush_rows)
    log_of(tmp_path / "new", [3], 1)
    DecisionLog(tmp_path / "new").resume(tmp_path / "old", 6)
    assert steps_in(tmp_path / "new") == [step for step in range(7) for _ in range(2)]
    assert steps_in(tmp_path / "new.1") == [3, 3]
    assert len(steps_in(tmp_path / "old")) == 20


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_resume_that_is_interrupted_loses_no_decision(tmp_path, monkeypatch, fails_at):
    log_of(tmp_path / "d", range(10), 6)  # steps 0 to 2, 3 to 5, 6 to 8, 9
    writes = []

    def full_disk(table, part, **options):
        writes.append(part)
        part.write_bytes(b"PAR1 and no more")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        if fails_at:  # after the first of the later files was rewritten
            patched.setattr("pathlib.Path.unlink", lambda *_: full_disk(None, tmp_path / "d" / ".x.part"))
        else:
            patched.setattr(pq, "write_table", full_disk)
        log = DecisionLog(tmp_path / "d")
        with pytest.raises(OSError, match="No space left"):
            log.resume(tmp_path / "d", 7)
    assert len(writes) == 1
    assert steps_in(tmp_path / "d")[:16] == [step for step in range(8) for _ in range(2)]
    DecisionLog(tmp_path / "d").resume(tmp_path / "d", 7)
    assert steps_in(tmp_path / "d") == [step for step in range(8) for _ in range(2)]


def test_files_of_one_step_are_read_in_the_order_they_were_written(tmp_path):
    log = DecisionLog(tmp_path / "d")
    for index in range(12):
        log.append(5, index=[index])
        log.flush()
    assert read_decisions(tmp_path / "d")["index"].to_pylist() == list(range(12))


def test_a_resume_to_before_the_first_decision_leaves_none(tmp_path):
    log = log_of(tmp_path / "d", range(5, 9), 1)
    log.resume(tmp_path / "d", 3)
    with pytest.raises(FileNotFoundError, match="no decisions"):
        read_decisions(tmp_path / "d")


def test_records_that_cannot_be_read_are_set_aside_with_a_warning(tmp_path):
    log_of(tmp_path / "d", range(4), 2)
    last = sorted((tmp_path / "d").glob("decisions-*.parquet"))[-1]
    last.write_bytes(last.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=r"cannot be read, so the records begin with this resume"):
        DecisionLog(tmp_path / "d").resume(tmp_path / "d", 2)
    assert len(list((tmp_path / "d.1").glob("decisions-*.parquet"))) == 4
