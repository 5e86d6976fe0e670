"""Weights by broadcast arrive whole at every receiver that lives, whatever becomes of the others."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
from broadcast_receivers import Got, ReceiverProcess

from stackrl.runtime.transport import collective
from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.buckets import Bucket
from stackrl.runtime.transport.collective import SCHEME, CollectivePublisher
from stackrl.runtime.transport.collective_receiver import Receiver
from stackrl.runtime.transport.messages import Broadcast as Way
from stackrl.runtime.transport.messages import JoinBroadcast, Version, decode, encode
from stackrl.runtime.transport.process_group import Group, GroupError
from stackrl.runtime.transport.weights import WeightError, WeightsGone, describe, receive
from stackrl.schemas.inference import CollectiveWeights

TOKEN = "a-token-for-tests"
SILENCE = 3.0
GATHER = 1.0


def tensors(step: int, count: int = 14) -> dict[str, torch.Tensor]:
    """More bytes than all the sockets between two processes hold, in buckets of one tensor and of many."""
    generator = torch.Generator().manual_seed(step)
    made = {
        "half": torch.randn(7, 5, generator=generator).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(float(step)),
        "strided": torch.randn(6, 8, generator=generator).t(),
        "flags": torch.tensor([True, False, True]),
    }
    large = {f"large.{n}": torch.randn(1 << 18, generator=generator) for n in range(count)}
    return made | large | {"larger": torch.randn(600_000, generator=generator)}


@pytest.fixture
def publisher() -> Iterator[CollectivePublisher]:
    settings = CollectiveWeights(transport="collective", bucket="1MiB", gather=GATHER)
    made = CollectivePublisher("127.0.0.1", 0, TOKEN, "gloo", settings, SILENCE)
    yield made
    made.close()


@pytest.fixture
def start(publisher: CollectivePublisher) -> Iterator[Callable[[], ReceiverProcess]]:
    """Starts receivers, which end with the test."""
    started: list[ReceiverProcess] = []

    def one() -> ReceiverProcess:
        started.append(ReceiverProcess(publisher.source, TOKEN))
        return started[-1]

    yield one
    for receiver in started:
        receiver.kill()


def publish(publisher: CollectivePublisher, step: int) -> Version:
    version = Version(1, step)
    publisher.publish(version, tensors(step).items())
    return version


def taken(version: Version, *receivers: ReceiverProcess) -> list[Got]:
    for receiver in receivers:
        receiver.begin(version)
    return [whole(receiver.got(), version) for receiver in receivers]


def whole(got: Got | str, version: Version) -> Got:
    """``got``, which is all of ``version`` to the last bit."""
    assert isinstance(got, Got), got
    expected = tensors(version.step).items()
    assert got.tensors == [describe(name, tensor.contiguous()) for name, tensor in expected]
    return got


@pytest.mark.slow
def test_a_receiver_goes_alone_once_and_then_with_the_others(publisher, start) -> None:
    first, second = start(), start()
    version = publish(publisher, 0)
    assert [got.alone for got in taken(version, first, second)] == [len(tensors(0))] * 2
    groups = []
    for step in (1, 2):
        for got in taken(publish(publisher, step), first, second):
            assert (got.alone, got.warnings) == (0, [])
            groups.append(got.group)
    assert len(set(groups)) == 1, "the group is not used again"

    third = start()
    late = [got.alone for got in taken(publish(publisher, 3), first, second, third)]
    assert late == [0, 0, len(tensors(3))]
    everyone = taken(publish(publisher, 4), first, second, third)
    assert [got.alone for got in everyone] == [0, 0, 0]
    assert len({got.group for got in everyone}) == 1 and everyone[0].group not in groups


@pytest.mark.slow
def test_one_that_is_killed_in_the_middle_keeps_nobody_from_the_version(publisher, start, caplog) -> None:
    lives, dies = start(), start()
    taken(publish(publisher, 0), lives, dies)
    version = publish(publisher, 1)
    dies.begin(version, stop_at="large.3")
    lives.begin(version)
    dies.at_the_tensor()
    dies.kill()
    got = whole(lives.got(), version)
    assert 0 < got.alone < len(tensors(1)) - 3
    assert len(got.warnings) == 1 and "came by broadcast, the rest is fetched" in got.warnings[0]

    again = start()  # as the node program does
    first = taken(publish(publisher, 2), lives, again)
    assert [got.alone for got in first] == [0, len(tensors(2))]
    assert [got.alone for got in taken(publish(publisher, 3), lives, again)] == [0, 0]
    missed = [line for line in caplog.messages if "did not come" in line]
    assert len(missed) == 1 and missed[0].startswith("1 of 2 receivers did not come for weight version 1.2")


@pytest.mark.slow
@pytest.mark.nightly
def test_one_that_stands_still_in_the_middle_is_left_behind(publisher, start) -> None:
    goes, stands = start(), start()
    taken(publish(publisher, 0), goes, stands)
    version = publish(publisher, 1)
    stands.begin(version, stop_at="large.3")
    goes.begin(version)
    stands.at_the_tensor()
    stands.stand_still()
    began = time.monotonic()
    got = whole(goes.got(), version)
    assert got.alone and time.monotonic() - began < 3 * SILENCE
    stands.wake_up()
    stands.go_on()
    assert whole(stands.got(), version).alone
    assert [got.alone for got in taken(publish(publisher, 2), goes, stands)] == [0, 0]


@pytest.mark.slow
@pytest.mark.nightly
def test_what_is_changed_on_the_way_is_noticed_and_fetched(publisher, start, monkeypatch) -> None:
    packed = Bucket.pack

    def damaged(self, inside, device):
        content = packed(self, inside, device)
        if self.tensors[0].name == "large.7":
            content = content.clone()
            content[-1] ^= 1
        return content

    receivers = [start(), start()]
    taken(publish(publisher, 0), *receivers)
    monkeypatch.setattr(Bucket, "pack", damaged)
    for got in taken(publish(publisher, 1), *receivers):
        assert got.alone >= len(tensors(1)) - 5 - 8
        assert any("large.7" in warning or "broke off" in warning for warning in got.warnings)
    monkeypatch.undo()
    assert [got.alone for got in taken(publish(publisher, 2), *receivers)] == [0, 0]


def test_a_version_that_is_gone_and_a_wrong_token_are_told_as_by_any_transport(publisher) -> None:
    for step in range(3):
        publisher.publish(Version(1, step), [("weight", torch.ones(3))])
    with pytest.raises(WeightsGone, match=r"1\.0 is gone.*1\.2 is the newest"):
        dict(receive(publisher.source, Version(1, 0), TOKEN, 20))
    with pytest.raises(WeightError, match=r"1\.7 is not there"):
        dict(receive(publisher.source, Version(1, 7), TOKEN, 20))
    with pytest.raises(WeightError, match="401"):
        dict(receive(publisher.source, Version(1, 2), "another", 20))
    assert list(dict(receive(publisher.source, Version(1, 2), TOKEN, 20))) == ["weight"]


def test_a_receiver_that_fails_in_the_middle_takes_the_next_version_with_the_others(publisher) -> None:
    """The model did not take a tensor: what was left of the broadcast must not be taken for the next one."""
    receiver = Receiver()
    publisher.publish(Version(1, 0), tensors(0).items())
    dict(receiver.receive(publisher.source, Version(1, 0), TOKEN, 20))
    publisher.publish(Version(1, 1), tensors(1).items())
    stream = receiver.receive(publisher.source, Version(1, 1), TOKEN, 20)
    next(stream)
    stream.close()
    assert receiver._group is None
    publisher.publish(Version(1, 2), tensors(2).items())
    found = dict(receiver.receive(publisher.source, Version(1, 2), TOKEN, 20))
    assert receiver._group is not None
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(2).items())


# closed to strangers


def ask(
    source: str, method: str, path: str, body: bytes | None = None, token: str = TOKEN
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(source).netloc, timeout=20)
    try:
        connection.request(method, path, body, headers=bearer(token))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_every_route_needs_the_token(publisher) -> None:
    publisher.publish(Version(1, 0), [("weight", torch.ones(3))])
    wish = encode(JoinBroadcast(member="stranger"))
    group = "0" * 32
    for method, path in (
        ("POST", "/weights/1.0/broadcast"),
        ("PUT", f"/groups/{group}/0"),
        ("GET", f"/groups/{group}/0"),
        ("GET", "/weights/1.0"),
    ):
        assert ask(publisher.source, method, path, wish, token="wrong")[0] == 401
    assert publisher._leader._rounds._known == set()


def test_what_makes_no_sense_is_refused(publisher) -> None:
    publisher.publish(Version(1, 0), [("weight", torch.ones(3))])
    wish = encode(JoinBroadcast(member="one"))
    group = "0" * 32
    asked = {
        ("POST", "/weights/1.0/broadcast", b"nonsense"): 400,
        ("POST", "/weights/1.0/broadcast", bytes(collective.LARGEST_BODY + 1)): 413,
        ("POST", "/weights/9.9/broadcast", wish): 404,
        ("POST", "/weights/0.1/broadcast", wish): 410,
        ("POST", "/weights/x/broadcast", wish): 404,
        ("PUT", f"/groups/{group}/0", b"address"): 404,
        ("PUT", "/weights/1.0", b""): 404,
        ("GET", f"/groups/{group}/0", None): 410,
        ("POST", "/weights/1.0/broadcast", wish): 200,
    }
    assert {each: ask(publisher.source, *each)[0] for each in asked} == asked


def in_threads(works: list[Callable[[], object]]) -> list[object]:
    """What each returns or raises."""
    outcomes: list[object] = [None] * len(works)

    def run(place: int, work: Callable[[], object]) -> None:
        try:
            outcomes[place] = work()
        except Exception as error:
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def member(store: dist.Store, rank: int, ranks: int, token: str, silence: float = 5.0) -> Callable[[], Group]:
    return lambda: Group(
        store, "name", rank, ranks, backend="gloo", host="127.0.0.1", token=token, silence=silence
    )


def test_a_member_without_the_token_is_found_out_before_anything_is_sent() -> None:
    store = dist.HashStore()
    tokens = [TOKEN, TOKEN, "a-guess"]
    outcomes = in_threads([member(store, rank, 3, token) for rank, token in enumerate(tokens)])
    assert all(isinstance(outcome, GroupError) for outcome in outcomes), outcomes
    assert "rank 2 does not know the run's token" in str(outcomes[0])
    assert "rank 2 does not know the run's token" in str(outcomes[1])


def test_a_proof_is_of_no_use_in_another_place(monkeypatch) -> None:
    """One who repeats to each what it was shown by it is not let in."""
    honest = Group._proof
    shown = lambda self, token, sender, receiver: (  # noqa: E731
        honest(self, TOKEN, receiver, sender) if token == "repeats" else honest(self, token, sender, receiver)
    )
    monkeypatch.setattr(Group, "_proof", shown)
    store = dist.HashStore()
    outcomes = in_threads([member(store, 0, 2, TOKEN), member(store, 1, 2, "repeats")])
    assert isinstance(outcomes[0], GroupError) and "rank 1 does not know" in str(outcomes[0])


def test_a_group_waits_for_its_members_only_so_long() -> None:
    began = time.monotonic()
    with pytest.raises(GroupError, match="did not come together"):
        member(dist.HashStore(), 0, 2, TOKEN, silence=0.5)()
    assert time.monotonic() - began < 10


def test_a_receiver_is_told_what_it_needs(publisher) -> None:
    publisher.publish(Version(1, 0), [("weight", torch.ones(3))])
    wish = encode(JoinBroadcast(member="one"))
    assert ask(publisher.source, "POST", "/weights/1.0/broadcast", wish) == (200, b"")
    publisher.publish(Version(1, 1), [("weight", torch.ones(3))])
    status, body = ask(publisher.source, "POST", "/weights/1.1/broadcast", wish)
    way = decode(body, Way)
    assert (status, way.rank, way.ranks, way.backend, way.bucket) == (200, 1, 2, "gloo", 1 << 20)
    assert way.manifest.version == Version(1, 1) and publisher.source.startswith(SCHEME)


# on GPUs


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_by_nccl_between_two_gpus() -> None:
    """The tensors stay on the receiver's GPU, and are those that were sent."""
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank, and this machine has less than two")
    settings = CollectiveWeights(transport="collective", bucket="1MiB", gather=GATHER)
    torch.cuda.set_device(0)
    made = CollectivePublisher("127.0.0.1", 0, TOKEN, "nccl", settings, 60.0)
    receiver = Receiver()

    def take(version: Version) -> dict[str, torch.Tensor]:
        torch.cuda.set_device(1)
        return dict(receiver.receive(made.source, version, TOKEN, 120))

    try:
        for step in range(3):
            version = publish(made, step)
            (found,) = in_threads([lambda version=version: take(version)])
            assert isinstance(found, dict), found
            for name, tensor in tensors(step).items():
                assert found[name].device.type == ("cuda" if step else "cpu")
                assert torch.equal(found[name].cpu(), tensor)
    finally:
        receiver.leave()
        made.close()
