"""The command line and the environment of an engine, from the stack alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stackrl.runtime.inference.server import command, environment
from stackrl.schemas.engine_arguments import refusal
from stackrl.schemas.stack import Stack
from stackrl.schemas.trainer import Trainer

URL = "http://127.0.0.1:8123"
MODEL = Path("/run/model")


def stack(device: str = "cpu", role: dict | None = None, **inference: object) -> Stack:
    return Stack.model_validate(
        {
            "version": 1,
            "device": device,
            "seed": 7,
            "model": {"id": "owner/name", "dtype": "bfloat16"},
            "roles": {"trainer": {"processes": 1}, "inference": role or {"processes": 1}},
            "inference": inference,
            "environments": [{"name": "reverse", "type": "reverse_text"}],
            "stages": [{"name": "main", "type": "rl", "steps": 1}],
        }
    )


def flags(line: list[str]) -> dict[str, str | bool]:
    """The flags after `python -m module`, by name; the last one counts, as for vLLM."""
    result: dict[str, str | bool] = {}
    words = line[3:]
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            result[word[2:]] = True if following.startswith("--") else following
    return result


def test_an_engine_on_cpu() -> None:
    found = flags(command(stack(cache_memory="1.5GiB", max_requests=32, max_model_length=512), MODEL, URL))
    expected = {
        "model": "/run/model",
        "host": "127.0.0.1",
        "port": "8123",
        "dtype": "bfloat16",
        "seed": "7",
        "max-num-seqs": "32",
        "max-model-len": "512",
        "kv-cache-memory-bytes": str(3 << 29),
        "enforce-eager": True,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "no-enable-log-requests": True,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "gpu-memory-utilization" not in found


def test_an_engine_on_a_gpu_of_its_own() -> None:
    found = flags(command(stack("cuda", gpu_memory=0.8, tensor_parallel=2, quantization="fp8"), MODEL, URL))
    assert found["gpu-memory-utilization"] == "0.8"
    assert found["tensor-parallel-size"] == "2"
    assert found["quantization"] == "fp8"
    assert "no-enforce-eager" in found
    assert "kv-cache-memory-bytes" not in found
    assert "enforce-eager" in flags(command(stack("cuda", compile=False), MODEL, URL))


def test_an_engine_tells_routes_where_they_are_replayed() -> None:
    replaying = stack("cuda").model_copy(update={"trainer": Trainer(mixture={"router_replay": True})})
    assert "enable-return-routed-experts" in flags(command(replaying, MODEL, URL))
    assert environment(replaying, URL, {})["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "no-enable-return-routed-experts" in flags(command(stack("cuda"), MODEL, URL))
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment(stack("cuda"), URL, {})


def test_an_engine_that_shares_the_trainers_gpu() -> None:
    shared = stack("cuda", role={"share": "trainer", "engine_memory": "8GiB"})
    assert flags(command(shared, MODEL, URL, gpu_bytes=24 << 30))["gpu-memory-utilization"] == "0.3333"
    with pytest.raises(ValueError, match="none is visible"):
        command(shared, MODEL, URL)


def test_further_arguments_are_passed_on_and_cannot_undo_what_the_stack_says() -> None:
    arguments = {"block_size": 32, "enable-dbo": False, "compilation-config": {"level": 1}}
    found = flags(command(stack(arguments=arguments), MODEL, URL))
    assert found["block-size"] == "32"
    assert "no-enable-dbo" in found
    assert json.loads(found["compilation-config"]) == {"level": 1}
    for name in ("middleware", "port", "logprobs-mode", "dtype"):
        with pytest.raises(ValueError, match=rf"inference\.arguments\.{name} is decided by .*; remove it"):
            command(stack(arguments={name: "x"}), MODEL, URL)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_that_the_run_decides_is_reserved_but_the_size_of_a_step(device: str) -> None:
    given = flags(command(stack(device, quantization="fp8"), MODEL, URL))
    free = {name for name in given if refusal(name) is None}
    assert free == ({"max-num-batched-tokens"} if device == "cpu" else set())
    more = stack("cpu", arguments={"max_num_batched_tokens": 9999})
    assert command(more, MODEL, URL).count("--max-num-batched-tokens") == 1


def pair(**roles: object) -> Stack:
    one = stack()
    roles = {"trainer": {"processes": 1}, "prefill": {"processes": 1}, "decode": {"processes": 1}} | roles
    return Stack.model_validate(one.model_dump(exclude={"roles", "weights"}) | {"roles": roles})


def test_a_pool_has_degrees_and_arguments_of_its_own() -> None:
    wide = stack(
        role={
            "processes": 1,
            "tensor_parallel": 2,
            "data_parallel": 3,
            "expert_parallel": True,
            "arguments": {"block_size": 64},
        },
        arguments={"block-size": 32, "seed-everything": 1},
    )
    found = flags(command(wide, MODEL, URL))
    assert (found["tensor-parallel-size"], found["data-parallel-size"]) == ("2", "3")
    assert "enable-expert-parallel" in found
    assert (found["block-size"], found["seed-everything"]) == ("64", "1")
    found = flags(command(stack(), MODEL, URL))
    assert (found["tensor-parallel-size"], found["data-parallel-size"]) == ("1", "1")
    assert "no-enable-expert-parallel" in found
    with pytest.raises(ValueError, match=r"roles\.inference\.arguments\.port is decided by endpoints"):
        command(stack(role={"processes": 1, "arguments": {"port": 1}}), MODEL, URL)


def test_cores_are_dealt_to_the_processes_of_an_engine() -> None:
    def bound(cores: str, **role: int) -> str:
        one = stack(role={"processes": 1, **role})
        return environment(one, URL, {"STACKRL_CORES": cores})["VLLM_CPU_OMP_THREADS_BIND"]

    assert bound("0,1,2,3", tensor_parallel=2) == "0,1|2,3"
    assert bound("4,5", tensor_parallel=2, data_parallel=2) == "4|5|4|5"
    assert bound("4,5") == "4,5" and bound("", tensor_parallel=2) == "auto"


def test_engines_that_prefill_and_decode_can_move_keys() -> None:
    for pool in ("prefill", "decode"):
        found = json.loads(flags(command(pair(), MODEL, URL, pool=pool))["kv-transfer-config"])
        assert found["kv_connector"] == "NixlConnector"
        assert found["kv_load_failure_policy"] == "fail", "nothing is computed again in silence"
        silence = pair().limits.silence_seconds
        lease = found["kv_connector_extra_config"]["kv_lease_duration"]
        assert lease * 2 / 3 > silence, "keys wait longer than an engine may be silent"
        told = environment(pair(), URL, {}, pool)
        assert told["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        assert told["UCX_NET_DEVICES"].split(",")[0] == "lo"
    assert "kv-transfer-config" not in flags(command(stack(), MODEL, URL))
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" not in environment(stack(), URL, {})


def test_the_port_by_which_keys_are_told_is_none_that_the_kernel_gives_away() -> None:
    """vLLM binds it long after it was chosen, and waits for ever where it cannot."""
    copies = pair(decode={"processes": 1, "data_parallel": 3})
    ports = {int(environment(copies, URL, {}, "decode")["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for _ in range(20)}
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port + 2 < lowest for port in ports) and len(ports) > 1


def test_a_step_on_cpu_has_room_for_every_request() -> None:
    assert flags(command(stack(max_requests=5000), MODEL, URL))["max-num-batched-tokens"] == "5000"


def test_the_token_is_in_the_environment_only() -> None:
    base = {
        "STACKRL_TOKEN": "secret",
        "STACKRL_CORES": "1-2",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_API_KEY": "x",
    }
    found = environment(stack(), URL, base)
    assert found["STACKRL_TOKEN"] == "secret"
    assert not any("secret" in word for word in command(stack(), MODEL, URL))
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "1-2"
    assert found["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in found and "VLLM_API_KEY" not in found
    assert environment(stack(), URL, {})["VLLM_CPU_OMP_THREADS_BIND"] == "auto"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(stack("cuda"), URL, base)
