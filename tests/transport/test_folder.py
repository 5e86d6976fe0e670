"""A folder of weights: what is read stays, a full disk is waited for, and deltas lean on what is whole."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from stackrl.runtime.transport import folder as module
from stackrl.runtime.transport.folder import FolderPublisher, complete_versions
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.weights import WeightError, WeightsGone, receive

SIZE = 100_000


def weights(step: int, moved: int = 50) -> dict[str, torch.Tensor]:
    """Each step moves other ``moved`` weights of the first ones."""
    tensor = torch.zeros(SIZE)
    tensor[step * moved : (step + 1) * moved] = 1.0
    return {"a": tensor, "b": torch.full((10,), float(step))}


def steps(folder: Path) -> list[int]:
    return [version.step for version in complete_versions(folder)]


def whole(folder: Path) -> list[int]:
    return sorted({int(file.parent.name.split(".")[1]) for file in folder.glob("*/*.safetensors")})


def received(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return dict(receive(str(folder), Version(1, step), "", 20))


def assert_has(folder: Path, step: int, **moved: int) -> None:
    found, expected = received(folder, step), weights(step, **moved)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_versions_are_whole_now_and_then(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_CHANGES", 3)
    publisher = FolderPublisher(tmp_path, delta=True)
    for step in range(8):
        published = publisher.publish(Version(1, step), weights(step).items())
        assert (published.sent < 0.05 * published.whole) == (step > 0)
        assert_has(tmp_path, step)
        if step:
            assert_has(tmp_path, step - 1)
    assert steps(tmp_path) == [6, 7]
    assert whole(tmp_path) == [6]


def test_changes_that_add_up_to_half_make_a_version_whole(tmp_path) -> None:
    publisher = FolderPublisher(tmp_path, delta=True)
    for step in range(5):
        publisher.publish(Version(1, step), weights(step, moved=10_000).items())
        assert_has(tmp_path, step, moved=10_000)
    sizes = [(tmp_path / f"1.{step}" / "changes").stat().st_size for step in steps(tmp_path)[1:]]
    assert max(sizes) < 0.5 * 4 * SIZE


def test_a_new_publisher_begins_with_a_whole_version(tmp_path) -> None:
    FolderPublisher(tmp_path, delta=True).publish(Version(1, 0), weights(0).items())
    FolderPublisher(tmp_path, delta=True).publish(Version(1, 1), weights(1).items())
    assert whole(tmp_path) == [0, 1]
    assert_has(tmp_path, 1)


def test_a_version_without_what_it_is_made_from_is_refused(tmp_path) -> None:
    publisher = FolderPublisher(tmp_path, delta=True)
    for step in range(3):
        publisher.publish(Version(1, step), weights(step).items())
    shutil.rmtree(tmp_path / "1.1")
    with pytest.raises(WeightError, match=r"weight version 1\.1 neither whole nor as what changed"):
        received(tmp_path, 2)


def test_damaged_changes_are_named(tmp_path) -> None:
    publisher = FolderPublisher(tmp_path, delta=True)
    for step in range(2):
        publisher.publish(Version(1, step), weights(step).items())
    file = tmp_path / "1.1" / "changes"
    content = bytearray(file.read_bytes())
    content[20] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        WeightError, match=r"what changed in a of weight version 1\.1 .* not what its manifest says"
    ):
        received(tmp_path, 1)


# readers


def test_what_is_being_read_stays_until_it_is_read(tmp_path) -> None:
    publisher = FolderPublisher(tmp_path)
    publisher.publish(Version(1, 0), weights(0).items())
    reading = receive(str(tmp_path), Version(1, 0), "", 20)
    next(reading)
    for step in (1, 2, 3):
        publisher.publish(Version(1, step), weights(step).items())
    assert steps(tmp_path) == [0, 2, 3]
    name, last = next(reading)
    assert name == "b" and torch.equal(last, weights(0)["b"])
    assert next(reading, None) is None
    publisher.publish(Version(1, 4), weights(4).items())
    assert steps(tmp_path) == [3, 4]
    assert not list(tmp_path.glob("*/readers/*"))
    with pytest.raises(WeightsGone):
        received(tmp_path, 0)


def test_a_reader_that_died_is_not_waited_for_without_end(tmp_path, monkeypatch, caplog) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    publisher = FolderPublisher(tmp_path, patience=60)
    publisher.publish(Version(1, 0), weights(0).items())
    (tmp_path / "1.0" / "readers" / "host-4711").touch()
    for step in range(1, 4):
        publisher.publish(Version(1, step), weights(step).items())
        now[0] += 20
    assert steps(tmp_path) == [0, 2, 3]
    now[0] += 30
    publisher.publish(Version(1, 4), weights(4).items())
    assert steps(tmp_path) == [3, 4]
    assert "host-4711 of weight version 1.0 have not ended; it is removed" in caplog.text


def test_a_folder_that_cannot_be_written_to_is_read_without_a_word(tmp_path) -> None:
    FolderPublisher(tmp_path).publish(Version(1, 0), weights(0).items())
    (tmp_path / "1.0" / "readers").rmdir()
    assert_has(tmp_path, 0)


# a full disk


@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
def test_room_on_a_full_disk_is_waited_for(tmp_path, monkeypatch, caplog, delta: bool) -> None:
    publisher = FolderPublisher(tmp_path, delta=delta)
    for step in range(2):
        publisher.publish(Version(1, step), weights(step).items())
    tries, write = count(), module.write_durably

    def full_at_first(path: Path, data: bytes) -> None:
        if next(tries) < 3:
            assert steps(tmp_path)[-1] == 1, "the version before it went"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(module, "write_durably", full_at_first)
    monkeypatch.setattr(module, "TRY_AGAIN", 0.01)
    publisher.publish(Version(1, 2), weights(2).items())
    assert_has(tmp_path, 2)
    [said] = caplog.messages
    assert said.startswith(
        f"{tmp_path} is full: new weights wait for room there for 300 s, and the engines go on"
    )


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_stays_full_is_an_error_that_says_so(small_disk: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "TRY_AGAIN", 0.01)
    publisher = FolderPublisher(small_disk, patience=0.1)
    publisher.publish(Version(1, 0), weights(0).items())
    publisher.publish(Version(1, 1), weights(1).items())
    publisher.publish(Version(1, 2), weights(2).items())  # the third fits when the first has gone
    assert_has(small_disk, 2)
    big = {"a": torch.zeros(300_000)}
    with pytest.raises(WeightError, match=r"disk is full for 0.1 s: make room .* or say weights\.path"):
        publisher.publish(Version(1, 3), big.items())
    assert_has(small_disk, 2)
    assert sum("is full: new weights wait" in line for line in caplog.messages) <= 2
