"""Complete or not at all: what counts as a checkpoint, and which one is used."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from stackrl.runtime import checkpoints
from stackrl.runtime.checkpoints import CheckpointError


def make(path: Path, index: int, *, finish: bool = True) -> Path:
    folder = checkpoints.folder(path, index)
    for part in ("trainer", "orchestrator"):
        (folder / part).mkdir(parents=True)
        (folder / part / "data").write_bytes(f"{part} {index}".encode() * 100)
    if finish:
        checkpoints.write_manifest(folder, {"index": index})
    return folder


def test_a_manifest_lists_every_file_and_keeps_what_it_is_given(tmp_path: Path) -> None:
    folder = make(tmp_path, 50)
    assert folder.name == "step-000050" and checkpoints.index_of(folder) == 50
    manifest = checkpoints.verify(folder)
    assert manifest["index"] == 50
    assert set(manifest["files"]) == {"trainer/data", "orchestrator/data"}


def flip_a_byte(file: Path, place: int = 7) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def say(folder: Path, **facts: Any) -> None:
    """Have another manifest, as whole as any."""
    checkpoints.store_manifest(folder, checkpoints.verify(folder) | facts)


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda folder: flip_a_byte(folder / "trainer/data"), "trainer/data is damaged"),
        (lambda folder: (folder / "trainer/data").write_bytes(b"short"), "trainer/data is damaged"),
        (lambda folder: (folder / "orchestrator/data").unlink(), "orchestrator/data is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "was never finished"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is damaged"),
        (lambda folder: truncate(folder / "manifest.json"), "manifest.json is damaged"),
        (lambda folder: flip_a_byte(folder / "manifest.json"), "manifest.json is damaged"),
        (lambda folder: flip_a_byte(folder / "manifest.json", -1), "manifest.json is damaged"),
        (lambda folder: flip_a_byte(folder / "manifest.json", 99), "manifest.json is damaged"),
        (lambda folder: say(folder, index=11), "that of optimizer step 11"),
        (lambda folder: say(folder, format=1), "has format 1, not 2"),
        (lambda folder: as_folder(folder / "manifest.json"), "manifest.json cannot be read"),
        (lambda folder: as_folder(folder / "trainer/data"), "trainer/data is missing"),
    ],
)
def test_a_damaged_one_is_refused_by_name_and_the_one_before_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, complaint: str
) -> None:
    before, folder = make(tmp_path, 9), make(tmp_path, 10)
    assert checkpoints.newest(tmp_path) == folder
    damage(folder)
    with pytest.raises(CheckpointError, match=complaint):
        checkpoints.verify(folder)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest(tmp_path) == before
    assert "step-000010" in caplog.text and complaint in caplog.text


def test_names_and_sizes_are_compared_without_reading_contents(tmp_path: Path) -> None:
    folder = make(tmp_path, 10)
    assert checkpoints.verify(folder, contents=False) == checkpoints.verify(folder)
    flip_a_byte(folder / "trainer/data")
    checkpoints.verify(folder, contents=False)
    truncate(folder / "trainer/data")
    with pytest.raises(CheckpointError, match="trainer/data is damaged"):
        checkpoints.verify(folder, contents=False)
    (folder / "trainer/data").unlink()
    with pytest.raises(CheckpointError, match="trainer/data is missing"):
        checkpoints.verify(folder, contents=False)


def test_a_file_that_is_not_listed_does_no_harm(tmp_path: Path) -> None:
    folder = make(tmp_path, 10)
    (folder / "trainer.partial").mkdir()
    (folder / "trainer.partial/data").write_text("of another life")
    assert checkpoints.newest(tmp_path) == folder


def test_there_may_be_none(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path / "nowhere") is None
    make(tmp_path, 1, finish=False)
    assert checkpoints.newest(tmp_path) is None


def test_newest_goes_by_number_and_not_by_name(tmp_path: Path) -> None:
    make(tmp_path, 999_999)
    newest = make(tmp_path, 1_000_000)
    assert checkpoints.newest(tmp_path) == newest


def test_pruning_deletes_damaged_ones_older_than_those_it_keeps(tmp_path: Path) -> None:
    for index in (10, 20, 30, 40):
        make(tmp_path, index)
    for index in (10, 30):
        flip_a_byte(checkpoints.folder(tmp_path, index) / "trainer/data")
        checkpoints.folder(tmp_path, index).rename(tmp_path / f"step-{index:06d}.damaged")
    checkpoints.prune(tmp_path, 2)
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "step-000020",
        "step-000030.damaged",
        "step-000040",
    }


def names(path: Path) -> list[int]:
    return sorted(checkpoints.index_of(entry) for entry in path.iterdir() if "." not in entry.name)


def test_pruning_keeps_the_newest_complete_ones_and_what_is_being_written(tmp_path: Path) -> None:
    for index in (10, 20, 30, 40):
        make(tmp_path, index, finish=index != 30)
    make(tmp_path, 50, finish=False)
    checkpoints.prune(tmp_path, 2)
    assert names(tmp_path) == [20, 30, 40, 50]
    checkpoints.prune(tmp_path, 1)
    assert names(tmp_path) == [40, 50]


def test_pruning_keeps_complete_ones_at_every_nth_step_for_good(tmp_path: Path) -> None:
    for index in (10, 20, 25, 30, 40, 50, 60):
        make(tmp_path, index, finish=index != 40)
    checkpoints.prune(tmp_path, 1, keep_every=20)
    assert names(tmp_path) == [20, 60], "40 was never finished"
    make(tmp_path, 70)
    make(tmp_path, 80)
    checkpoints.prune(tmp_path, 2, keep_every=20)
    assert names(tmp_path) == [20, 60, 70, 80]
    checkpoints.prune(tmp_path, 1)
    assert names(tmp_path) == [80]


def test_pruning_never_takes_the_last_complete_one(tmp_path: Path) -> None:
    make(tmp_path, 10)
    make(tmp_path, 20, finish=False)
    checkpoints.prune(tmp_path, 1)
    assert names(tmp_path) == [10, 20]
    checkpoints.prune(tmp_path, 2)
    assert names(tmp_path) == [10, 20]


def test_pruning_does_not_mind_who_else_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rmtree = checkpoints.shutil.rmtree

    def too_late(folder: Path) -> None:
        rmtree(folder)
        rmtree(folder)

    monkeypatch.setattr(checkpoints.shutil, "rmtree", too_late)
    for index in (10, 20, 30):
        make(tmp_path, index)
    checkpoints.prune(tmp_path, 1)
    assert names(tmp_path) == [30]


def test_what_a_resumed_run_passed_over_is_not_its_newest(tmp_path: Path) -> None:
    for index in (50, 100, 110):
        make(tmp_path, index, finish=index != 110)
    for _ in range(2):  # the same one may be damaged again
        flip_a_byte(checkpoints.folder(tmp_path, 100) / "trainer/data")
        used = checkpoints.newest(tmp_path)
        assert checkpoints.set_aside(tmp_path, checkpoints.index_of(used)) == [
            tmp_path / "step-000100.damaged"
        ]
        assert names(tmp_path) == [50] and (tmp_path / "step-000100.damaged/trainer/data").exists()
        make(tmp_path, 100)
    checkpoints.set_aside(tmp_path, 50)
    make(tmp_path, 60)
    checkpoints.prune(tmp_path, 1)
    assert names(tmp_path) == [60] and checkpoints.newest(tmp_path).name == "step-000060"
