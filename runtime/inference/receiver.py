"""The receiving end of a weight update, inside each vLLM worker.

An update is one bracket: start_weight_update, one update_weights, finish_weight_update. In it vLLM's layers
stand ready to be loaded anew; each tensor is checked against the manifest, handed to the model's own
loader (which takes this worker's shard of it), and let go when its layer is complete. So a worker holds few
layers more than its model (those whose vocabulary is padded wait to the end), never a second model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_size
from vllm.platforms import current_platform

from stackrl.runtime.inference.cpu import experts_packed_again, pack_embeddings_again
from stackrl.runtime.run import run_token
from stackrl.runtime.transport.held_folder import HELD_VARIABLE, HeldFolder, sweep
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.weights import WeightError, receive

log = logging.getLogger("vllm.stackrl")
logging.getLogger("stackrl").parent = log  # what transports say stands among vLLM's own lines


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be arranged before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What an engine is asked to load."""

    source: str
    """URL of the weight server, or the shared folder."""
    version: str
    timeout: float
    """Seconds for the transfer."""


class WeightReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads one version after the other into the worker's model, in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _held_folder: HeldFolder | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to arrange."""

    def start_weight_update(self) -> None:
        self._mends = ExitStack()
        if current_platform.is_cpu():
            self._mends.enter_context(experts_packed_again(self.model))
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        """Load the whole version. Raises WeightError and leaves a model that can run, of mixed weights."""
        failure = ""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            self._check_complete(update_info["version"])
        except Exception as error:
            log.exception("weight version %s was not loaded", update_info.get("version"))
            failure = str(error) or repr(error)
            self._give_up()
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()
        self._raise_together(failure)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        version = Version.parse(update_info.version)
        held = self._held()
        self.model.load_weights(receive(update_info.source, version, run_token(), update_info.timeout, held))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._mends.close()
        if current_platform.is_cpu():
            pack_embeddings_again(self.model)

    def shutdown(self) -> None:
        if self._held_folder:
            self._held_folder.close()

    def _held(self) -> HeldFolder | None:
        """Where this node's workers of the engine keep a version, if they are to."""
        if self._held_folder is None and (path := os.environ.get(HELD_VARIABLE)):
            sweep()
            self._held_folder = HeldFolder(Path(path))
        return self._held_folder

    def _check_complete(self, version: str) -> None:
        """Raise WeightError unless every parameter of this worker's model was written."""
        if missing := list(_unloaded(self.model)):
            raise WeightError(
                f"weight version {version} leaves old weights in {len(missing)} layers, first {missing[0]}: "
                "the trainer did not send every tensor of the model"
            )

    def _raise_together(self, failure: str) -> None:
        """Raise the first failure of any worker, on the last worker alone.

        vLLM reads the workers' answers in order and stops at an error: an error of another than the last
        would leave answers behind, to be taken for those of later calls.
        """
        failures = [failure] * self.parallel_config.world_size
        if len(failures) > 1:
            torch.distributed.all_gather_object(failures, failure, group=get_world_group().cpu_group)
        if any(failures) and self.parallel_config.rank == len(failures) - 1:
            raise WeightError(next(filter(None, failures)))

    def _give_up(self) -> None:
        """Put back what was not replaced."""
        for module in self.model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self.finish_weight_update()


def _unloaded(model: torch.nn.Module) -> Iterator[str]:
    """Names of the layers that still wait for elements of their parameters.

    A layer whose parameters are those of a layer that was loaded (a tied head) waits for nothing.
    """
    waiting: dict[str, list[torch.nn.Parameter]] = {}
    loaded: set[int] = set()
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        parameters = (info.kernel_tensors[0] if info.kernel_tensors else module._parameters).values()
        complete = not info.can_load() or info.load_numel >= get_layer_size(module) - _padding(module)
        if complete or is_deferred_attention_layer(module):
            loaded.update(map(id, parameters))
        elif parameters:
            waiting[name] = list(parameters)
    return (name for name, parameters in waiting.items() if not loaded.issuperset(map(id, parameters)))


def _padding(module: torch.nn.Module) -> int:
    """Elements of a layer that no checkpoint holds: rows that pad the vocabulary."""
    if not isinstance(module, VocabParallelEmbedding):
        return 0
    held = module.shard_indices.num_org_elements + module.shard_indices.num_added_elements
    return (module.num_embeddings_per_partition - held) * module.embedding_dim
