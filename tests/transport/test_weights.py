"""Weights arrive whole and as they were, or not at all: over HTTP and through a folder."""

from __future__ import annotations

import http.client
import socket
import socketserver
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import torch
from newest_weights import newest_version
from safetensors.torch import load_file, save_file

from stackrl.runtime.transport import hashes, pull_source, weights
from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.folder import FolderPublisher, complete_versions, write_folder
from stackrl.runtime.transport.messages import Version, WeightManifest, encode
from stackrl.runtime.transport.pull import PullPublisher
from stackrl.runtime.transport.weights import Publisher, WeightError, WeightsGone, describe, receive

TOKEN = "secret"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """All the kinds: large, small, a scalar, empty, strided, half precision, integers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(300, 1000, generator=generator),
        "half": torch.randn(7, 5, generator=generator).bfloat16(),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(6, 8, generator=generator).t(),
        "integers": torch.arange(seed, seed + 5),
        "flags": torch.tensor([True, False]),
    }


@pytest.fixture(params=["pull", "pull delta", "folder", "folder delta"])
def publisher(request: pytest.FixtureRequest, tmp_path) -> Iterator[Publisher]:
    transport, _, content = request.param.partition(" ")
    if transport == "folder":
        made = FolderPublisher(tmp_path, delta=content == "delta")
    else:
        made = PullPublisher("127.0.0.1", 0, TOKEN, delta=content == "delta")
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[PullPublisher]:
    made = PullPublisher("127.0.0.1", 0, TOKEN)
    yield made
    made.close()


def received(source: str, version: Version, token: str = TOKEN) -> dict[str, torch.Tensor]:
    return dict(receive(source, version, token, timeout=20))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_what_arrives_is_what_was_published(publisher: Publisher) -> None:
    live = tensors(1)
    publisher.publish(Version(1, 0), live.items())
    live["large"].zero_()  # the trainer goes on; what it published stays
    assert_same(received(publisher.source, Version(1, 0)), tensors(1))


def test_the_newest_and_the_one_before_it_are_kept(publisher: Publisher) -> None:
    for step in range(3):
        publisher.publish(Version(1, step), tensors(step).items())
    assert_same(received(publisher.source, Version(1, 1)), tensors(1))
    assert_same(received(publisher.source, Version(1, 2)), tensors(2))
    with pytest.raises(WeightsGone, match=r"1\.0 is gone.*1\.2 is the newest"):
        received(publisher.source, Version(1, 0))
    with pytest.raises(WeightError, match=r"1\.3 is not .*1\.2 is the newest") as caught:
        received(publisher.source, Version(1, 3))
    assert not isinstance(caught.value, WeightsGone)


def test_versions_only_go_up(publisher: Publisher) -> None:
    publisher.publish(Version(2, 5), tensors(1).items())
    for version in (Version(2, 5), Version(2, 4), Version(1, 9)):
        with pytest.raises(WeightError, match=r"does not follow 2\.5"):
            publisher.publish(version, tensors(1).items())
    publisher.publish(Version(3, 0), tensors(1).items())


def test_a_name_cannot_come_twice(publisher: Publisher) -> None:
    with pytest.raises(WeightError, match="published w twice"):
        publisher.publish(Version(1, 0), [("w", torch.ones(1)), ("w", torch.ones(1))])


def test_a_publication_that_fails_leaves_the_version_before_it(publisher: Publisher) -> None:
    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield "large", torch.ones(3)
        raise RuntimeError("a rank died")

    publisher.publish(Version(1, 0), tensors(0).items())
    with pytest.raises(RuntimeError, match="a rank died"):
        publisher.publish(Version(1, 1), breaks())
    assert_same(received(publisher.source, Version(1, 0)), tensors(0))
    publisher.publish(Version(1, 1), tensors(1).items())
    assert_same(received(publisher.source, Version(1, 1)), tensors(1))


# over HTTP


def test_every_route_needs_the_token(server: PullPublisher) -> None:
    server.publish(Version(1, 0), tensors(1).items())
    for token in ("", "secre", "secrets"):
        with pytest.raises(WeightError, match="401"):
            received(server.source, Version(1, 0), token)
    for path in ("/weights/manifest", "/weights/1.0/manifest", "/weights/1.0", "/other"):
        assert status(server.source, path, {}) == 401
        assert status(server.source, path, {"Authorization": TOKEN}) == 401


def test_requests_that_make_no_sense_are_refused(server: PullPublisher) -> None:
    assert status(server.source, "/weights/manifest") == 404
    assert newest_version(server.source, TOKEN) is None
    server.publish(Version(1, 0), tensors(1).items())
    assert newest_version(server.source, TOKEN) == Version(1, 0)
    answers = {
        "/weights": 404,
        "/weights/1.0/../../etc": 404,
        "/weights/1.0?offset=-1": 416,
        "/weights/1.0?offset=99999999": 416,
        "/weights/1.0?offset=12": 200,
        "/weights/2.0": 404,
        "/weights/0.7": 410,
    }
    assert {path: status(server.source, path) for path in answers} == answers


def test_a_receiver_too_slow_for_its_version_is_told_that_it_is_gone(server: PullPublisher) -> None:
    big = [
        ("big", torch.zeros(40 << 20, dtype=torch.uint8)),
        ("last", torch.zeros(40 << 20, dtype=torch.uint8)),
    ]
    server.publish(Version(1, 0), big)
    stream = receive(server.source, Version(1, 0), TOKEN, timeout=20)
    next(stream)
    for step in (1, 2):
        server.publish(Version(1, step), tensors(step).items())
    with pytest.raises(WeightsGone, match=r"1\.0 is gone"):
        next(stream)


def test_changed_bytes_are_noticed(server: PullPublisher) -> None:
    server.publish(Version(1, 0), tensors(1).items())
    server._store.newest().tensors[0][0, 0] += 1e-3
    with pytest.raises(WeightError, match=r"large of weight version 1\.0 .* is not what its manifest says"):
        received(server.source, Version(1, 0))


def test_a_chunk_that_came_wrong_once_is_fetched_again(server: PullPublisher, caplog, monkeypatch) -> None:
    monkeypatch.setattr(hashes, "CHUNK", 1 << 20)
    monkeypatch.setattr(weights, "CHUNK", 1 << 20)
    big = {"big": torch.arange(5 << 17), "small": torch.ones(3)}
    server.publish(Version(1, 0), big.items())
    with Proxy(server.source, cut_after=1 << 40, damage_at=5 << 19) as proxy:
        assert_same(received(proxy.url, Version(1, 0)), big)
    [said] = caplog.messages
    assert said.startswith("big of weight version 1.0 (chunk 3 of 5) from http://127.0.0.1:")
    assert said.endswith("came damaged and is fetched again")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bytes": 8}, "is not 8 bytes"),
        ({"dtype": "object"}, "does not travel"),
        ({"shape": [-1, -4]}, "does not travel"),
        ({"name": "scalar"}, "listed twice"),
        ({"chunks": []}, "has 0 chunks"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(server, monkeypatch, change, reason) -> None:
    server.publish(Version(1, 0), tensors(1).items())
    manifest = server._store.newest().manifest
    info = {field: getattr(manifest.tensors[0], field) for field in manifest.tensors[0].__struct_fields__}
    manifest.tensors[0] = type(manifest.tensors[0])(**(info | change))
    with pytest.raises(WeightError, match=reason):
        received(server.source, Version(1, 0))


def test_a_broken_connection_goes_on_where_it_broke(server: PullPublisher) -> None:
    server.publish(Version(1, 0), tensors(1).items())
    with Proxy(server.source, cut_after=300_000) as proxy:
        assert_same(received(proxy.url, Version(1, 0)), tensors(1))
        assert proxy.connections >= 5


def test_a_connection_that_brings_nothing_is_given_up(server: PullPublisher, monkeypatch) -> None:
    monkeypatch.setattr(pull_source.time, "sleep", lambda seconds: None)
    server.publish(Version(1, 0), tensors(1).items())
    with Proxy(server.source, cut_after=60) as proxy, pytest.raises(WeightError, match="in 5 attempts"):
        received(proxy.url, Version(1, 0))
    with pytest.raises(WeightError, match=r"did not give the manifest in 5 attempts.*refused"):
        received(proxy.url, Version(1, 0))


def test_a_transfer_has_an_end(server: PullPublisher) -> None:
    server.publish(Version(1, 0), tensors(1).items())
    with pytest.raises(WeightError, match="in time"):
        dict(receive(server.source, Version(1, 0), TOKEN, timeout=-1))


class Proxy:
    """Passes connections on to a weight server and cuts each after so many bytes of the answer; changes the
    byte ``damage_at`` of the first answer that is so long."""

    def __init__(self, target: str, cut_after: int, damage_at: int | None = None) -> None:
        address = urlsplit(target)
        outer = self
        self.connections, self.damage_at = 0, damage_at

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                outer.connections += 1
                with socket.create_connection((address.hostname, address.port)) as server:
                    server.sendall(self.request.recv(65536))
                    left = cut_after
                    while left and (data := bytearray(server.recv(min(left, 65536)))):
                        at = outer.damage_at
                        if at is not None and 0 <= at - (cut_after - left) < len(data):
                            data[at - (cut_after - left)] ^= 1
                            outer.damage_at = None
                        self.request.sendall(data)
                        left -= len(data)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def status(url: str, path: str, headers: dict[str, str] | None = None) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request("GET", path, headers=bearer(TOKEN) if headers is None else headers)
        return connection.getresponse().status
    finally:
        connection.close()


# through a folder


def test_a_version_without_its_manifest_is_not_there(tmp_path) -> None:
    write_folder(tmp_path, Version(1, 0), tensors(0).items())
    write_folder(tmp_path, Version(1, 1), tensors(1).items())
    (tmp_path / "1.1" / "manifest").unlink()
    assert complete_versions(tmp_path) == [Version(1, 0)]
    with pytest.raises(WeightError, match=r"1\.1 is not in .*1\.0 is the newest"):
        received(str(tmp_path), Version(1, 1))
    FolderPublisher(tmp_path).publish(Version(1, 1), tensors(5).items())
    assert_same(received(str(tmp_path), Version(1, 1)), tensors(5))


def test_older_versions_go_only_when_a_newer_one_is_whole(tmp_path) -> None:
    publisher = FolderPublisher(tmp_path)
    seen = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        seen.extend(complete_versions(tmp_path))
        yield from tensors(2).items()

    publisher.publish(Version(1, 9), tensors(0).items())
    publisher.publish(Version(1, 10), tensors(1).items())
    publisher.publish(Version(1, 11), watched())
    assert seen == [Version(1, 9), Version(1, 10)]
    assert complete_versions(tmp_path) == [Version(1, 10), Version(1, 11)]


def test_many_files_make_one_version(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("stackrl.runtime.transport.folder.SHARD", 100)
    write_folder(tmp_path, Version(1, 0), tensors(1).items())
    assert len(list((tmp_path / "1.0").glob("*.safetensors"))) >= 3
    assert_same(received(str(tmp_path), Version(1, 0)), tensors(1))


def test_a_folder_that_lost_a_tensor_or_its_value_is_refused(tmp_path) -> None:
    write_folder(tmp_path, Version(1, 0), tensors(1).items())
    [file] = (tmp_path / "1.0").glob("*.safetensors")
    content = load_file(file)
    save_file({name: tensor for name, tensor in content.items() if name != "half"}, file)
    with pytest.raises(WeightError, match=r"half of weight version 1\.0 is missing"):
        received(str(tmp_path), Version(1, 0))
    save_file(content | {"half": content["half"] * 2}, file)
    with pytest.raises(WeightError, match=r"half of weight version 1\.0 .* is not what its manifest says"):
        received(str(tmp_path), Version(1, 0))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightError, match="cannot be read"):
        received(str(tmp_path), Version(1, 0))


def test_a_manifest_of_another_version_is_refused(tmp_path) -> None:
    write_folder(tmp_path, Version(1, 0), tensors(1).items())
    info = describe("large", tensors(1)["large"])
    manifest = WeightManifest(version=Version(1, 1), tensors=[info])
    (tmp_path / "1.0" / "manifest").write_bytes(encode(manifest))
    with pytest.raises(WeightError, match=r"gave the manifest of 1\.1, asked for 1\.0"):
        received(str(tmp_path), Version(1, 0))
