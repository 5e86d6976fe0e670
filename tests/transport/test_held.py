"""A receiver that holds a version fetches what changed, and has the newer one to the last bit."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stackrl.runtime.transport import held, held_folder, store
from stackrl.runtime.transport.folder import FolderPublisher
from stackrl.runtime.transport.held_folder import HeldFolder, held_path, sweep
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.pull import PullPublisher
from stackrl.runtime.transport.weights import Publisher, WeightError, as_bytes, receive

TOKEN = "secret"
Tensors = dict[str, torch.Tensor]


def first() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "embedding": torch.randn(400, 1000, generator=generator).bfloat16(),
        "norm": torch.ones(3),
        "frozen": torch.randn(100, 1000, generator=generator),
        "empty": torch.empty(0, 4),
        "head": torch.randn(399, 1001, generator=generator).bfloat16(),
    }


def stepped(tensors: Tensors, seed: int) -> Tensors:
    """A step at a small learning rate: some weights move to the next number."""
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("embedding", "head"):
        moved = torch.rand(new[name].shape, generator=generator) < 0.02
        new[name].view(torch.int16)[moved] += 1
    new["norm"][0] += 1e-6
    return new


def versions(count: int) -> list[Tensors]:
    made = [first()]
    while len(made) < count:
        made.append(stepped(made[-1], len(made)))
    return made


@pytest.fixture(params=["pull", "folder"])
def publisher(request: pytest.FixtureRequest, tmp_path) -> Iterator[Publisher]:
    if request.param == "folder":
        made = FolderPublisher(tmp_path / "published", delta=True)
    else:
        made = PullPublisher("127.0.0.1", 0, TOKEN, delta=True)
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[PullPublisher]:
    made = PullPublisher("127.0.0.1", 0, TOKEN, delta=True)
    yield made
    made.close()


class Receiver:
    """An engine's worker, and what it says of the bytes that it fetches."""

    def __init__(self, source: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "stackrl.runtime.transport.held")
        self.source, self.folder, self._caplog = source, HeldFolder(path), caplog

    def takes(self, step: int, expected: Tensors) -> float:
        """Receive version 1.``step``, which must be ``expected``. The share of its bytes that was fetched."""
        self._caplog.clear()
        found = dict(receive(self.source, Version(1, step), TOKEN, 20, self.folder))
        assert_same(found, expected)
        said = [re.match(r"weight version .*: (\d+) of (\d+) bytes", line) for line in self._caplog.messages]
        [(fetched, size)] = [match.groups() for match in said if match]
        return int(fetched) / int(size)


@pytest.fixture
def receiver(publisher: Publisher, tmp_path, caplog) -> Iterator[Receiver]:
    made = Receiver(publisher.source, tmp_path / "held", caplog)
    yield made
    made.folder.close()
    assert not (tmp_path / "held").exists()


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes(as_bytes(found[name])) == bytes(as_bytes(tensor)), name


def test_only_what_changed_is_fetched(publisher: Publisher, receiver: Receiver) -> None:
    for step, tensors in enumerate(versions(6)):
        published = publisher.publish(Version(1, step), tensors.items())
        share = receiver.takes(step, tensors)
        assert share == published.sent / published.whole
        assert share == 1 if step == 0 else 0 < share < 0.03


def test_what_a_receiver_does_with_its_copy_changes_nothing(publisher: Publisher, receiver: Receiver) -> None:
    old, new = versions(2)
    publisher.publish(Version(1, 0), old.items())
    for _, tensor in receive(publisher.source, Version(1, 0), TOKEN, 20, receiver.folder):
        tensor.zero_()
    publisher.publish(Version(1, 1), new.items())
    assert receiver.takes(1, new) < 0.03


def test_a_receiver_some_versions_behind_takes_a_chain(publisher: Publisher, receiver: Receiver) -> None:
    made, sent = versions(6), []
    for step, tensors in enumerate(made):
        published = publisher.publish(Version(1, step), tensors.items())
        sent.append(published.sent / published.whole)
        if step == 1:
            receiver.takes(1, tensors)
    assert receiver.takes(5, made[5]) == pytest.approx(sum(sent[2:]))


def test_who_comes_late_gets_everything(publisher: Publisher, receiver: Receiver) -> None:
    made = versions(4)
    for step, tensors in enumerate(made):
        publisher.publish(Version(1, step), tensors.items())
    assert 1 <= receiver.takes(3, made[3]) < 1.1


def test_who_is_too_far_behind_gets_everything_that_is_other(
    server: PullPublisher, tmp_path, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(store, "KEPT_CHANGES", 1)
    receiver, made = Receiver(server.source, tmp_path / "held", caplog), versions(4)
    for step, tensors in enumerate(made):
        server.publish(Version(1, step), tensors.items())
        if step == 0:
            receiver.takes(0, tensors)
    frozen = made[0]["frozen"].nbytes / sum(tensor.nbytes for tensor in made[0].values())
    assert receiver.takes(3, made[3]) == pytest.approx(1 - frozen)


def test_a_restarted_trainer_sends_what_is_other(publisher: Publisher, receiver: Receiver, tmp_path) -> None:
    old, new = versions(2)
    publisher.publish(Version(1, 0), old.items())
    receiver.takes(0, old)
    publisher._last = None  # what the folder's publisher remembers
    again = (
        publisher
        if isinstance(publisher, FolderPublisher)
        else PullPublisher("127.0.0.1", 0, TOKEN, delta=True)
    )
    again.publish(Version(1, 1), old.items())
    receiver.source = again.source
    assert receiver.takes(1, old) == 0
    again.publish(Version(1, 2), new.items())
    assert receiver.takes(2, new) < 0.03
    if again is not publisher:
        again.close()


@pytest.mark.parametrize("elements", [7, 0])
def test_other_tensors_are_a_new_beginning(publisher: Publisher, receiver: Receiver, elements: int) -> None:
    """Without elements the tensors that were there lie where they lay: those that are the same are found."""
    old, new = versions(2)
    publisher.publish(Version(1, 0), old.items())
    receiver.takes(0, old)
    new["another"] = torch.ones(elements)
    publisher.publish(Version(1, 1), new.items())
    assert (receiver.takes(1, new) == 1) == (elements > 0)


def test_a_patch_that_broke_off_is_mended(
    publisher: Publisher, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = versions(2)
    publisher.publish(Version(1, 0), old.items())
    receiver.takes(0, old)
    publisher.publish(Version(1, 1), new.items())
    patched = []

    def breaks(change, body, tensor) -> None:
        if patched:
            raise ValueError("power cut")
        patched.append(held_apply(change, body, tensor))

    held_apply = held.apply_change
    with monkeypatch.context() as patch, pytest.raises(WeightError, match="power cut"):
        patch.setattr(held, "apply_change", breaks)
        receiver.takes(1, new)
    share = receiver.takes(1, new)
    assert 0 < share < 0.8, "what was there already was fetched again"


def test_a_transfer_that_broke_off_goes_on(server: PullPublisher, tmp_path, caplog, monkeypatch) -> None:
    receiver, [only] = Receiver(server.source, tmp_path / "held", caplog), versions(1)
    server.publish(Version(1, 0), only.items())
    read = held.read_chunks

    def breaks(source, version, info, *rest) -> int:
        if info.name == "head":
            raise WeightError("cable out")
        return read(source, version, info, *rest)

    with monkeypatch.context() as patch, pytest.raises(WeightError, match="cable out"):
        patch.setattr(held, "read_chunks", breaks)
        receiver.takes(0, only)
    left = only["head"].nbytes / sum(tensor.nbytes for tensor in only.values())
    assert receiver.takes(0, only) == pytest.approx(left)


def test_memory_that_was_changed_is_mended(publisher: Publisher, receiver: Receiver) -> None:
    old, new = versions(2)
    publisher.publish(Version(1, 0), old.items())
    receiver.takes(0, old)
    with open(receiver.folder.weights, "r+b") as file:
        file.seek(1000)
        file.write(b"\0\1\2\3")
    publisher.publish(Version(1, 1), new.items())
    if isinstance(publisher, FolderPublisher):  # it has no more than what changed; the next try begins anew
        with pytest.raises(
            WeightError, match=r"embedding of weight version 1\.1 is not what its manifest says"
        ):
            receiver.takes(1, new)
    assert receiver.takes(1, new) < 0.9


def test_weights_that_are_again_what_they_were_are_checked_too(
    server: PullPublisher, tmp_path, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, (old, new) = Receiver(server.source, tmp_path / "held", caplog), versions(2)
    server.publish(Version(1, 0), old.items())
    receiver.takes(0, old)
    server.publish(Version(1, 1), new.items())
    server.publish(Version(1, 2), old.items())
    skipped, apply = [], held.apply_change

    def skips_one(change, body, tensor) -> None:
        if skipped:
            apply(change, body, tensor)
        skipped.append(change)

    monkeypatch.setattr(held, "apply_change", skips_one)
    assert receiver.takes(2, old) > 0.1


def test_the_workers_of_a_node_fetch_once(server: PullPublisher, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "stackrl.runtime.transport.held")
    old, new = versions(2)
    server.publish(Version(1, 0), old.items())
    workers = [HeldFolder(tmp_path / "held") for _ in range(4)]
    for step, tensors in enumerate((old, new)):
        if step:
            server.publish(Version(1, step), tensors.items())
        found = [{} for _ in workers]

        def take(worker: HeldFolder, into: Tensors, step: int = step) -> None:
            into.update(receive(server.source, Version(1, step), TOKEN, 20, worker))

        threads = [threading.Thread(target=take, args=pair) for pair in zip(workers, found, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for received in found:
            assert_same(received, tensors)
    assert len(caplog.messages) == 2
    for worker in workers:
        assert (tmp_path / "held").exists()
        worker.close()
    assert not (tmp_path / "held").exists()


def test_a_worker_that_keeps_its_turn_is_not_waited_for_without_end(server: PullPublisher, tmp_path) -> None:
    server.publish(Version(1, 0), first().items())
    other, mine = HeldFolder(tmp_path / "held"), HeldFolder(tmp_path / "held")
    other.enter()
    with (
        other.turn(0),
        pytest.raises(WeightError, match=r"another worker kept .*held to itself for too long"),
    ):
        dict(receive(server.source, Version(1, 0), TOKEN, 0.2, mine))


@pytest.mark.parametrize("what", ["posix_fallocate", "mkdir"])
def test_without_room_each_update_fetches_all(
    publisher: Publisher, tmp_path, caplog, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = HeldFolder(tmp_path / "held")
    for step, tensors in enumerate(versions(3)):
        publisher.publish(Version(1, step), tensors.items())
        with monkeypatch.context() as patch:
            patch.setattr(held.os if what == "posix_fallocate" else Path, what, full)
            assert_same(dict(receive(publisher.source, Version(1, step), TOKEN, 20, folder)), tensors)
    said = [line for line in caplog.messages if "cannot hold weights" in line]
    assert len(said) == 1
    assert "No space left on device): each update fetches all of them" in said[0]


def test_a_folder_of_somebody_else_is_not_used(server: PullPublisher, tmp_path, caplog, monkeypatch) -> None:
    server.publish(Version(1, 0), first().items())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "held").symlink_to(tmp_path / "elsewhere")
    assert_same(
        dict(receive(server.source, Version(1, 0), TOKEN, 20, HeldFolder(tmp_path / "held"))), first()
    )
    assert "it belongs to somebody else" in caplog.text
    assert not list((tmp_path / "elsewhere").iterdir())


LIVES = """
import sys, time
from pathlib import Path
from stackrl.runtime.transport.held_folder import HeldFolder
HeldFolder(Path(sys.argv[1])).enter()
print("in", flush=True)
time.sleep(60)
"""


def test_what_a_killed_engine_left_is_swept_away(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_folder, "_memory", lambda: tmp_path)
    paths = [held_path(tmp_path / "run-1", engine) for engine in (0, 1)]
    engines = [
        subprocess.Popen([sys.executable, "-c", LIVES, str(path)], stdout=subprocess.PIPE) for path in paths
    ]
    try:
        for engine in engines:
            assert engine.stdout.readline() == b"in\n"
        sweep()
        assert all(path.exists() for path in paths)
        engines[0].kill()
        engines[0].wait(20)
        sweep()
        assert [path.exists() for path in paths] == [False, True]
    finally:
        for engine in engines:
            engine.kill()
            engine.wait(20)
