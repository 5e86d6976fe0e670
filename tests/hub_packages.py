"""Tiny packages as the Environments Hub has them, and interpreters with verifiers to run them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

NEEDS = {"v1": ["verifiers==0.4.0"], "v0": ["verifiers==0.3.1", "renderers==0.1.10", "transformers"]}
INSTALL_LIMIT = 1200.0

V1 = """
import asyncio, os
import verifiers.v1 as vf

class Config(vf.TasksetConfig):
    words: int = 8
    wrong: str = ""

class Data(vf.TaskData):
    word: str

class Reverse(vf.Task[Data]):
    async def setup(self, trace, runtime):
        if self.data.word.startswith("c"):
            match os.environ.get("TINY_FAULT"):
                case "raise": raise KeyError("no such word")
                case "die" if not os.path.exists(os.environ["TINY_ONCE"]):
                    open(os.environ["TINY_ONCE"], "x").close()
                    os._exit(3)
                case "hang": await asyncio.sleep(600)

    @vf.reward(weight=2.0)
    async def letters(self, task, trace) -> float:
        said = trace.last_reply
        return sum(a == b for a, b in zip(said, task.word[::-1])) / len(task.word)

    @vf.reward(weight=0.0)
    async def watched(self, trace) -> float:
        return 1.0

    @vf.metric
    async def solved(self, task, trace) -> float:
        return float(trace.last_reply == task.word[::-1])

class Words(vf.Taskset[Reverse, Config]):
    def load(self):
        for number in range(self.config.words):
            word = "abcdefghijklmnop"[number : number + 4]
            yield Reverse(Data(prompt=f"reverse: {word}", word=word), self.config.task)

__all__ = ["Words"]
"""
V0 = """
import verifiers as vf
from datasets import Dataset

class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="reverse: " + state["answer"][::-1])]

def load_environment(words: int = 8, turns: int = 2) -> vf.Environment:
    words = ["abcdefghijklmnop"[number : number + 4] for number in range(words)]
    rows = [{"question": "reverse: " + word, "answer": word[::-1]} for word in words]

    async def letters(completion, answer):
        said = completion[-1]["content"]
        return sum(a == b for a, b in zip(said, answer)) / len(answer)

    async def length(completion):
        return float(len(completion))

    rubric = vf.Rubric(funcs=[letters, length], weights=[2.0, 0.0])
    return Again(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=turns)
"""
TOOLS = '''
import verifiers as vf
from datasets import Dataset

async def turn_round(word: str) -> str:
    """Turn a word round."""
    return word[::-1]

def load_environment() -> vf.Environment:
    words = ["abcdefghijklmnop"[number : number + 4] for number in range(4)]
    rows = [{"question": "reverse: " + word, "answer": word[::-1]} for word in words]

    async def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    return vf.ToolEnv(tools=[turn_round], dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
'''
PACKAGES = {"tiny-words": V1, "tiny-classic": V0, "tiny-tools": TOOLS, "tiny-nothing": "answer = 42\n"}


def install(folder: Path) -> Path:
    """All packages in version 0.1.0, to be found by a PYTHONPATH of ``folder``."""
    for name, source in PACKAGES.items():
        module = name.replace("-", "_")
        about = folder / f"{module}-0.1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (about / "top_level.txt").write_text(f"{module}\n")
        (folder / f"{module}.py").write_text(source)
    return folder


@cache
def python_of(kind: str) -> str:
    """An interpreter with verifiers for packages of ``kind``, made once for all sessions; skips offline."""
    folder = Path(os.environ.get("STACKRL_TEST_VERIFIERS", Path(tempfile.gettempdir(), "stackrl-verifiers")))
    python = folder / kind / "bin" / "python"
    done = folder / kind / "installed"
    if not done.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", folder / kind], check=True, timeout=120)
            install = [python, "-m", "pip", "install", "-q", *NEEDS[kind]]
            subprocess.run(install, check=True, timeout=INSTALL_LIMIT, capture_output=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"verifiers cannot be installed here: {error}")
        done.touch()
    return str(python)
