"""Node 0's supervisor: its programs run here or on the other nodes of the run, and look alike."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stackrl.runtime.launch.ports import free_ports
from stackrl.runtime.nodes.channel import Channel, Lost, Stranger
from stackrl.runtime.nodes.meeting import Facts, differences
from stackrl.runtime.processes import LOST
from stackrl.runtime.stopping import Stopped
from stackrl.runtime.supervisor import Program, Running, Supervisor

ALIVE_SECONDS = 2.0
"""Between two signs of life of a node."""
ANSWER_LIMIT = 60.0
"""Seconds in which a node does what it is told: the end of a stubborn program takes longest."""
FAREWELL_LIMIT = 40.0
"""Seconds that the nodes have for their own end."""
SILENT_HELLO_LIMIT = 10.0
_SUSPENDED_SECONDS = 5.0
_GONE = -9


class NodeLost(Stopped):
    """A node has gone, and what ran there with it: the backend brings a new one."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; the run goes on from its last checkpoint when it is started again", LOST)


class Hand:
    """Another node, as node 0 sees it."""

    def __init__(self, rank: int, channel: Channel, facts: Facts) -> None:
        self.rank, self.channel, self.facts = rank, channel, facts
        self.heard = time.monotonic()
        self.answers: dict[int, dict[str, Any]] = {}
        self.gone = ""
        """Why nothing comes from it any more; empty while it is there."""

    @property
    def words(self) -> str:
        return f"node {self.rank} ({self.channel.peer})"


class Crew(Supervisor):
    """A supervisor with hands on other nodes. Alone, it is one like any other."""

    def __init__(self, *arguments: Any, silence: float = 60.0, **more: Any) -> None:
        """``silence``: seconds without a sign of life after which a node is lost."""
        super().__init__(*arguments, **more)
        self._silence = silence
        self._hands: dict[int, Hand] = {}
        self._questions = itertools.count(1)
        self._told_alive = self._looked = time.monotonic()
        self._asks: list[Stopped] = []

    # ---- meeting

    def meet(
        self,
        listener: socket.socket,
        token: str,
        mine: Facts,
        alike: list[list[int]],
        files: Mapping[str, bytes],
        limit: float,
    ) -> None:
        """Wait for the other nodes and give them the run's ``files``.

        ``alike``: groups of nodes that need the same GPUs. Raises TimeoutError with the ranks that did not
        come within ``limit`` s, ValueError with everything in which the nodes do not fit together, and
        Stopped.
        """
        guests: list[tuple[Channel, float]] = []

        def accept() -> None:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                connection, (host, port, *_) = listener.accept()
                try:
                    channel = Channel.accepted(connection, f"{host}:{port}", token)
                except (Stranger, Lost) as refused:
                    connection.close()
                    self._complain(f"a connection was refused: {refused}")
                else:
                    guests.append((channel, time.monotonic() + SILENT_HELLO_LIMIT))

        self.hear(listener, accept)
        deadline = time.monotonic() + limit
        try:
            while missing := set(range(1, mine.nodes)) - set(self._hands):
                self.turn(0.2)
                guests = [guest for guest in guests if not self._introduced(*guest)]
                if time.monotonic() > deadline:
                    ranks = ", ".join(map(str, sorted(missing)))
                    raise TimeoutError(f"node(s) {ranks} of {mine.nodes} did not come within {limit:.0f} s")
        finally:
            self.hear_no_more(listener)
            listener.close()
            for channel, _ in guests:
                channel.close()
        others = {rank: hand.facts for rank, hand in self._hands.items()}
        if wrong := differences(mine, others, alike):
            self._refuse("; ".join(wrong))
        for hand in self._hands.values():
            self._send(hand, "welcome", files=dict(files))

    def _introduced(self, channel: Channel, deadline: float) -> bool:
        """Whether nothing more is expected of a guest: it said who it is, or never will."""
        try:
            hello = channel.receive_one()
        except Lost:
            channel.close()
            return True
        if hello is None:
            if late := time.monotonic() > deadline:
                channel.close()
            return late
        facts = Facts(**{k: tuple(v) if k == "gpus" else v for k, v in hello.items() if k != "kind"})
        if facts.rank in self._hands or facts.rank == 0:
            with contextlib.suppress(Lost):
                channel.send("refused", why=f"there is a node {facts.rank} already")
            channel.close()
            return True
        hand = self._hands[facts.rank] = Hand(facts.rank, channel, facts)
        self.hear(channel, lambda: self._listen(hand))
        return True

    def _refuse(self, why: str) -> None:
        for hand in self._hands.values():
            with contextlib.suppress(Lost):
                hand.channel.send("refused", why=why)
        raise ValueError(f"the nodes do not fit together: {why}")

    # ---- what a supervisor does

    def start(self, program: Program, headline: str = "") -> Running:
        if program.node == 0:
            return super().start(program, headline)
        running = Running(program, None, self._open_log(program.name))
        self.running[program.name] = running
        if headline:
            self._write(running, headline.encode())
        self._send(
            self._hands[program.node],
            "start",
            name=program.name,
            command=list(program.command),
            environment=program.environment,
            endless=program.endless,
        )
        return running

    def turn(self, wait: float = 1.0) -> None:
        super().turn(min(wait, ALIVE_SECONDS) if self._hands else wait)
        if self._asks:
            raise self._asks[0]

    def rest(self, wait: float) -> None:
        super().rest(wait)
        now = time.monotonic()
        if now - self._looked > _SUSPENDED_SECONDS:  # this process was stopped itself
            for hand in self._hands.values():
                hand.heard = now
        self._looked = now
        for hand in self._hands.values():
            if not hand.gone and now - hand.heard > self._silence:
                self._lose(hand, f"{hand.words} gave no sign of life for {self._silence:.0f} s")
        if now - self._told_alive > ALIVE_SECONDS:
            self._told_alive = now
            for hand in self._hands.values():
                self._send(hand, "alive")

    def end(self, *limit: float) -> None:
        super().end(*limit)
        for hand in self._hands.values():  # without a farewell they end all that they run
            hand.channel.close()
        self._hands = {}

    def tell_to_end(self, running: Running) -> None:
        if running.process is not None:
            return super().tell_to_end(running)
        self._send(self._hands[running.program.node], "end", name=running.program.name)

    def _kill(self, running: Running) -> None:
        if running.process is not None:
            return super()._kill(running)
        hand = self._hands[running.program.node]
        if not hand.gone:
            self._ask(hand, "kill", name=running.program.name)
        if running.exit is None:
            self._ended(running, _GONE)

    # ---- what only a crew does

    def share(self, files: Mapping[str, bytes]) -> None:
        """Give all nodes these files of the run's folder, before the next order."""
        for hand in self._hands.values():
            self._send(hand, "files", files=dict(files))

    def free_ports(self, node: int, count: int, host: str) -> list[int]:
        """Ports that nobody listens on at ``host``, an address of ``node``. Raises OSError."""
        if node == 0:
            return free_ports(count, host)
        return self._answer(self._ask(self._hands[node], "ports", count=count, host=host), "ports")

    def fingerprints(self) -> dict[int, str]:
        """What each other node's first weights and tokenizer are, as short text."""
        return {
            rank: self._answer(self._ask(hand, "fingerprint"), "fingerprint")
            for rank, hand in self._hands.items()
        }

    def dump_stacks_elsewhere(self) -> None:
        """Ask all processes on other nodes for the stacks of their threads, which go to their logs."""
        for hand in self._hands.values():
            self._send(hand, "stacks")

    def dismiss(self, code: int) -> None:
        """End everything, and let the other nodes end with the exit code ``code``."""
        self._asks.clear()
        try:
            super().end()
        except TimeoutError as error:  # a process that SIGKILL does not end
            self._complain(str(error))
        for hand in self._hands.values():
            self._send(hand, "farewell", code=code)
        deadline = time.monotonic() + FAREWELL_LIMIT
        while any(not hand.gone for hand in self._hands.values()) and time.monotonic() < deadline:
            self.rest(0.2)
        for hand in self._hands.values():
            self._lose(hand, f"{hand.words} did not end within {FAREWELL_LIMIT:.0f} s")

    # ---- talk

    def _send(self, hand: Hand, kind: str, **content: Any) -> None:
        """To a node that has gone, nothing."""
        if hand.gone:
            return
        try:
            hand.channel.send(kind, **content)
        except Lost as lost:
            self._lose(hand, f"{hand.words} was lost: {lost}")

    def _ask(self, hand: Hand, kind: str, **content: Any) -> dict[str, Any]:
        """Send an order and wait for its answer. Raises NodeLost."""
        question = next(self._questions)
        self._send(hand, kind, question=question, **content)
        deadline = time.monotonic() + ANSWER_LIMIT
        while question not in hand.answers:
            if hand.gone:
                raise NodeLost(hand.gone)
            if time.monotonic() > deadline:
                self._lose(hand, f"{hand.words} did not answer within {ANSWER_LIMIT:.0f} s ({kind})")
                raise NodeLost(hand.gone)
            self.rest(0.2)
        return hand.answers.pop(question)

    @staticmethod
    def _answer(answer: dict[str, Any], name: str) -> Any:
        if "problem" in answer:
            raise OSError(answer["problem"])
        return answer[name]

    def _listen(self, hand: Hand) -> None:
        try:
            messages = hand.channel.receive()
        except Lost as lost:
            return self._lose(hand, f"{hand.words} was lost: {lost}")
        hand.heard = time.monotonic()
        for message in messages:
            self._heed(hand, message)

    def _heed(self, hand: Hand, message: dict[str, Any]) -> None:
        running = self.running.get(message.get("name", ""))
        if running is not None and running.program.node != hand.rank:
            return
        match message["kind"]:
            case "line" if running is not None and not running.log.closed:
                self._line(running, message["line"])
            case "ended" if running is not None and running.exit is None:
                running.verdict = running.verdict or message["verdict"]
                running.complaint = running.complaint or message["complaint"]
                self._ended(running, message["exit"])
            case "answer":
                hand.answers[message["question"]] = message
            case "asks":
                self._asks.append(Stopped(f"node {hand.rank}: {message['why']}", message["code"]))

    def _lose(self, hand: Hand, why: str) -> None:
        """All that ran there counts as killed."""
        if hand.gone:
            return
        hand.gone = why
        self.hear_no_more(hand.channel)
        hand.channel.close()
        for running in self.running.values():
            if running.program.node == hand.rank and running.exit is None:
                running.verdict = "went with its node"
                self._ended(running, _GONE)
        self._asks.append(NodeLost(why))


def contents(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files of a run's folder, as far as they are there."""
    return {name: file.read_bytes() for name in names if (file := folder / name).exists()}
