"""`python -m stackrl.runtime.trainer.models.prepare RUN_DIR`: make RUN_DIR/model before the roles start.

A Hugging Face folder (config, safetensors, tokenizer, chat template) that engines and trainer both load.
Where it is there already, as after a restart, nothing is done.
"""

from __future__ import annotations

import sys

from transformers.utils.logging import disable_progress_bar

from stackrl.runtime.run import RunFolder
from stackrl.runtime.trainer.models.families import ModelError
from stackrl.runtime.trainer.models.folder import replacing
from stackrl.runtime.trainer.models.sources import packaged_model, pretrained_model, random_model
from stackrl.schemas.model import PackagedModel, PretrainedModel, RandomModel


def prepare(run: RunFolder) -> None:
    """Make the model folder of ``run``, whole or not at all. Raises ModelError with what to do."""
    if run.model.is_dir():
        return
    stack = run.stack()
    with replacing(run.model) as target:
        match stack.model:
            case RandomModel() as source:
                random_model(source, stack.seed, target)
            case PretrainedModel() as source:
                pretrained_model(source, target)
            case PackagedModel() as source:
                packaged_model(source, target)


def main() -> int:
    disable_progress_bar()  # the output is a log
    try:
        prepare(RunFolder(sys.argv[1]))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
