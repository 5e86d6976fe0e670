"""stacks/sft-cpu.yaml, shortened: a trainer alone learns from a file, with the numbers of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
from small_runs import lines
from transformers import AutoModelForCausalLM, AutoTokenizer

import stacks
from stackrl.runtime.data.order import held_out
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.run import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROWS, EPOCHS, STEPS, SHARE = 160, 4, 36, 0.1
CHANGES = {
    "roles.trainer.processes": 1,
    "stages.sums.data.limit": ROWS,
    "stages.sums.epochs": EPOCHS,
    "stages.sums.batch_size": 16,
    "checkpoint.every": 20,
}
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
"""The model's template with the marks from which transformers makes its own mask."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    home = tmp_path_factory.mktemp("home")
    changes = [word for key, value in CHANGES.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "stackrl", "launch", "stacks/sft-cpu.yaml", *changes],
        cwd=stacks.ROOT,
        env=os.environ | {"STACKRL_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    final = Path(done.stdout.strip())
    assert final.name == "final" and "of held-out rows" in done.stderr
    return RunFolder(final.parent)


@pytest.fixture(scope="module")
def documents(run: RunFolder) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and mask of each row, as transformers makes them."""
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    found = []
    for line in (stacks.ROOT / "stacks/data/sums.jsonl").read_text().splitlines()[:ROWS]:
        made = tokenizer.apply_chat_template(
            json.loads(line)["messages"],
            chat_template=MARKED,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        found.append((torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"]).bool()))
    return found


def test_it_learns_and_nothing_else_is_started(run: RunFolder) -> None:
    steps = lines(run.metrics)
    losses = [step["trainer/loss"] for step in steps]
    assert len(steps) == STEPS and fmean(losses[-5:]) < 0.5 * losses[0]
    measured = [step["trainer/validation_loss"] for step in steps if "trainer/validation_loss" in step]
    assert len(measured) == 4 and measured[-1] < measured[0]
    assert set(run.state().roles) == {"prepare", "trainer-0", "orchestrator"}
    assert not (run.path / "weights").exists() and (run.path / "report.html").exists()


def test_just_the_assistants_tokens_are_learnt(run: RunFolder, documents) -> None:
    learnt, _ = held_out(ROWS, SHARE, Seeds(0).branch("supervised", "sums"))
    once = sum(int(documents[row][1].sum()) for row in learnt)
    assert sum(step["trainer/tokens_trained"] for step in lines(run.metrics)) == EPOCHS * once


def test_the_last_loss_of_held_out_rows_is_the_final_models(run: RunFolder, documents) -> None:
    model = AutoModelForCausalLM.from_pretrained(run.final, dtype=torch.float32)
    _, out = held_out(ROWS, SHARE, Seeds(0).branch("supervised", "sums"))
    total, count = 0.0, 0
    for tokens, mask in (documents[row] for row in out):
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].double().log_softmax(-1)
        (places,) = torch.nonzero(mask, as_tuple=True)
        total -= float(logprobs[places - 1, tokens[places]].sum())
        count += len(places)
    last = lines(run.metrics)[-1]
    assert last["trainer/validation_tokens"] == count
    assert last["trainer/validation_loss"] == pytest.approx(total / count, rel=1e-4)
