"""What must fit together: rules over several keys, each with its mend.

A rule takes the checked stack (and SkyPilot's task) and yields problems. Registering one is adding it to
STACK_RULES or TASK_RULES.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path as File

from stackrl.schemas import skypilot
from stackrl.schemas.model import PretrainedModel, RandomModel
from stackrl.schemas.problems import Path, Problem, at
from stackrl.schemas.rules_of_arguments import arguments_agree, images_have_containers, judges_can_judge
from stackrl.schemas.rules_of_concurrency import rollouts_find_room
from stackrl.schemas.rules_of_data import (
    evaluations_need_engines,
    needs_engines,
    stages_have_a_length,
    stages_learn_from_one_source,
    validation_has_one_source,
)
from stackrl.schemas.rules_of_degrees import context_divides_heads, degrees_divide, engines_fill_their_gpus
from stackrl.schemas.rules_of_environments import judges_have_keys, rewards_are_known
from stackrl.schemas.rules_of_hardware import (
    all_roles_compute_alike,
    machines_are_skypilots,
    machines_end_alike,
    own_machines_are_of_one_kind,
    own_machines_are_whole,
)
from stackrl.schemas.rules_of_losses import corrections_have_room, own_losses_are_named, references_are_meant
from stackrl.schemas.rules_of_memory import accelerators_are_known, model_fits
from stackrl.schemas.rules_of_mixtures import replay_has_routes
from stackrl.schemas.rules_of_operation import (
    growth_can_count,
    idle_is_longer_than_work,
    kept_ones_are_made,
    secrets_are_brought,
    shared_checkpoints,
)
from stackrl.schemas.rules_of_optimizers import changes_belong, nesterov_has_momentum, schedules_fit
from stackrl.schemas.rules_of_pools import engine_arguments, experts_are_there, pairs_agree
from stackrl.schemas.rules_of_repositories import (
    rollouts_are_bounded_where_they_are_led,
    tests_leave_time_to_work,
)
from stackrl.schemas.rules_of_scheduling import (
    environments_fit_batches,
    environments_replies_fit,
    evaluations_train_nothing,
    held_out_ones_are_named,
)
from stackrl.schemas.rules_of_signals import (
    curricula_have_a_choice,
    curricula_see_all_groups,
    lone_rollouts_are_not_compared,
    overlong_begins_above_zero,
    reference_secrets_are_brought,
    references_are_looked_at,
    references_are_there,
    references_are_whole,
    references_see_the_same_temperature,
)
from stackrl.schemas.rules_of_tasks import keys_are_spelt, nodes_are_counted, secrets_are_not_written
from stackrl.schemas.rules_of_weights import broadcasts_have_their_gpus, buckets_are_worth_it
from stackrl.schemas.rules_of_workers import packages_are_named, packages_do_not_collide, workers_have_work
from stackrl.schemas.split import Task, is_mixed, kinds_of_role, roles_of
from stackrl.schemas.stack import Stack, settings_of
from stackrl.schemas.stages import RlStage, SupervisedStage

Problems = Iterator[Problem]

POSITIONS = {
    "llama": 2048,
    "qwen3": 32768,
    "qwen3_moe": 32768,
    "glm4_moe": 131072,
    "glm_moe_dsa": 202752,
    "minimax_m2": 196608,
}
"""`max_position_embeddings` where a random model leaves it out: the default of the family's config class."""


def check(stack: Stack, task: Task | None, file: File) -> list[Problem]:
    """All problems. ``task`` is None where SkyPilot's keys are wrong themselves: its rules wait then."""
    if foreign := list(changes_belong(stack)):
        return foreign
    problems = [problem for rule in STACK_RULES for problem in rule(stack)]
    if wrong_machines := list(machines_are_skypilots(stack)):
        return problems + wrong_machines
    if task is not None:
        problems += [problem for rule in TASK_RULES for problem in rule(stack, task)]
        problems += file_is_named(task, file)
        # what does not add up yet would be asked for memory that nobody means
        problems = problems or list(model_fits(stack, task))
    return problems


# ---- the stack by itself


def supervised_stages_first(stack: Stack) -> Problems:
    rl_seen = ""
    for index, stage in enumerate(stack.stages):
        if isinstance(stage, RlStage):
            rl_seen = rl_seen or stage.name
        elif rl_seen:
            what = f"the supervised stage {stage.name} comes after the rl stage {rl_seen}"
            yield Problem(at("stages", index, "type"), what, "put supervised stages first")


def names_are_unique(stack: Stack) -> Problems:
    yield from _unique([stage.name for stage in stack.stages], at("stages"), "stage")
    for path, environments in environment_lists(stack):
        yield from _unique([environment.name for environment in environments], path, "environment")


def _unique(names: list[str], path: Path, kind: str) -> Problems:
    counts = Counter(names)
    for index, name in enumerate(names):
        if counts[name] > 1 and name in names[:index]:
            yield Problem(
                (*path, index, "name"), f"there are two {kind}s called {name}", "give each its own name"
            )


def batches_hold_whole_groups(stack: Stack) -> Problems:
    for path, algorithm in _by_stage(stack, "algorithm"):
        size, group = algorithm.batch_size, algorithm.group_size
        if size % group:
            mend = f"make it {max(size // group, 1) * group} or {(size // group + 1) * group}"
            yield Problem((*path, "batch_size"), f"{size} rollouts are not whole groups of {group}", mend)


def replies_fit(stack: Stack) -> Problems:
    if not needs_engines(stack):
        return
    held, trained = stack.inference.max_model_length, stack.trainer.sequence_length
    if held > trained:
        what = f"an engine may write {held} tokens, the trainer takes sequences of {trained}"
        mend = f"raise trainer.sequence_length to {held}, or lower this"
        yield Problem(at("inference", "max_model_length"), what, mend)
    for path, sampling in _by_stage(stack, "sampling"):
        if sampling.max_tokens >= held:
            what = f"a reply of {sampling.max_tokens} tokens and its prompt do not fit in {held}"
            yield Problem((*path, "max_tokens"), what, "lower it, or raise inference.max_model_length")


def steps_suffice(stack: Stack) -> Problems:
    for index, stage in enumerate(stack.stages):
        if isinstance(stage, SupervisedStage) and stage.steps and stage.clean_steps > stage.steps:
            what = f"{stage.clean_steps} clean steps, but the stage has {stage.steps}"
            yield Problem(at("stages", index, "clean_steps"), what, f"make it at most {stage.steps}")


def environment_arguments(stack: Stack) -> Problems:
    """`args` against the JSON Schema that the environment declares."""
    from stackrl.runtime.environments import schema_of
    from stackrl.schemas.jsonschema_words import problems_by

    for path, environments in environment_lists(stack):
        for index, environment in enumerate(environments):
            yield from problems_by(schema_of(environment.type), environment.args, (*path, index, "args"))


def model_holds_replies(stack: Stack) -> Problems:
    """The shape of a model that is made at random; others are looked at when they are there."""
    if not isinstance(stack.model, RandomModel):
        return
    if (width := stack.model.config.get("head_dim", 0)) % 2:
        what = f"{width} is odd, and rotary positions turn pairs"
        yield Problem(at("model", "config", "head_dim"), what, f"make it {width + 1}")
    if not needs_engines(stack):
        return
    shape, held = stack.model.config, stack.inference.max_model_length
    positions = shape.get("max_position_embeddings", POSITIONS[stack.model.architecture])
    if positions < held:
        what = f"the model is made for {positions} tokens, an engine may write {held}"
        mend = f"make it {held}, or lower inference.max_model_length"
        yield Problem(at("model", "config", "max_position_embeddings"), what, mend)


def folders_have_no_revision(stack: Stack) -> Problems:
    model = stack.model
    if isinstance(model, PretrainedModel) and model.revision and File(model.id).expanduser().is_dir():
        what = f"{model.id} is a folder here, and a folder has no revisions"
        yield Problem(at("model", "revision"), what, "remove it")


def one_pool_or_a_pair(stack: Stack) -> Problems:
    roles = stack.roles
    pools = [name for name in ("inference", "prefill", "decode") if getattr(roles, name)]
    if not pools and not needs_engines(stack):
        return
    if pools not in (["inference"], ["prefill", "decode"]):
        what = f"engines are given as {' and '.join(pools)}" if pools else "there are no engines"
        yield Problem(at("roles"), what, "give `inference`, or both `prefill` and `decode`")


def roles_have_one_size(stack: Stack) -> Problems:
    for name, role in roles_of(stack):
        sizes = [
            key for key in ("nodes", "gpus", "processes", "share") if getattr(role, key, None) is not None
        ]
        if len(sizes) != 1:
            keys = "nodes, gpus or processes" + (", or share" if name != "trainer" else "")
            what = f"{' and '.join(sizes)} are given" if sizes else "has no size"
            yield Problem(at("roles", name), what, f"give exactly one of {keys}")


def sharing(stack: Stack) -> Problems:
    for name, role in roles_of(stack):
        if name == "trainer":
            continue
        if role.share and role.engine_memory is None:
            mend = "say engine_memory, for example 8GiB"
            yield Problem(at("roles", name), "an engine that shares the trainer's GPU needs a limit", mend)
        if role.share and stack.roles.trainer.gpus != 1:
            mend = "say trainer: {gpus: 1}, or give the engine its own GPUs"
            yield Problem(at("roles", name, "share"), "only a trainer on one GPU can share it", mend)
        if role.engine_memory and not role.share:
            mend = "remove it, or say share: trainer; inference.gpu_memory is for engines with their own GPU"
            yield Problem(at("roles", name, "engine_memory"), "only an engine that shares takes this", mend)


# ---- the stack and its machines


def roles_fit_machines(stack: Stack, task: Task) -> Problems:
    """The split adds up: to the nodes, to the GPUs of the one node, or to processes without GPUs."""
    nodes, kinds = skypilot.nodes(task), skypilot.gpus_of_node(task)
    counts = sorted({count for _, count in kinds})
    if is_mixed(stack):
        if not any(own_machines_are_whole(stack, task)):
            yield from _adds_up(stack, "nodes", nodes, f"num_nodes is {nodes}")
    elif len(counts) > 1:
        what = f"machines with {' or '.join(map(str, counts))} GPUs: the split cannot fit both"
        yield Problem(("resources",), what, "allow machines with equally many GPUs only")
    elif nodes > 1:
        yield from _adds_up(stack, "nodes", nodes, f"num_nodes is {nodes}")
    elif kinds and stack.device != "cpu":
        yield from _adds_up(stack, "gpus", counts[0], f"the node has {counts[0]} GPU{'s' * (counts[0] > 1)}")
    else:
        for name, role in roles_of(stack):
            if role.processes is None and not getattr(role, "share", None):
                mend = "count processes: {processes: 1}"
                yield Problem(at("roles", name), "the one node has no GPUs in `resources`", mend)
            elif getattr(role, "share", None):
                mend = "ask for one in `resources: {accelerators: ...}`, or say processes: 1"
                yield Problem(at("roles", name, "share"), "there is no GPU to share", mend)


def _adds_up(stack: Stack, unit: str, total: int, why: str) -> Problems:
    taken, rest = 0, []
    for name, role in roles_of(stack):
        count = getattr(role, unit)
        if getattr(role, "share", None):
            continue
        if count is None:
            yield Problem(at("roles", name), f"must count {unit}: {why}", f"say {name}: {{{unit}: …}}")
            return
        if count == "rest":
            rest.append(name)
        else:
            taken += count
    if len(rest) > 1:
        yield Problem(at("roles", rest[1], unit), f"{rest[0]} takes the rest already", "give a number")
    elif rest and taken >= total:
        what = f"nothing is left: the other roles take {taken} and {why}"
        yield Problem(at("roles", rest[0], unit), what, "make the other roles smaller")
    elif not rest and taken != total:
        yield Problem(
            at("roles"), f"the split adds up to {taken} {unit}, but {why}", f"make it add up to {total}"
        )


def device_fits(stack: Stack, task: Task) -> Problems:
    if stack.device == "cuda" and not any(kinds_of_role(stack, task, name) for name, _ in roles_of(stack)):
        mend = "ask for them: resources: {accelerators: 'H100:8'}"
        yield Problem(at("device"), "cuda needs accelerators, and `resources` asks for none", mend)


def token_for_several_nodes(stack: Stack, task: Task) -> Problems:
    secrets = task.get("secrets") or {}
    if skypilot.nodes(task) > 1 and "STACKRL_TOKEN" not in secrets:
        mend = "add secrets: {STACKRL_TOKEN: null}"
        yield Problem(("secrets",), "several nodes need a token for their sockets", mend, at_key=True)


def file_is_named(task: Task, file: File) -> Problems:
    """`envs.STACK` is the file itself, as seen from the work directory: nodes read it there.

    A relative work directory depends on where one stands: from inside it, or from elsewhere, only the end of
    the path can be compared.
    """
    named = (task.get("envs") or {}).get("STACK")
    workdir = task.get("workdir")
    written = File(workdir if isinstance(workdir, str) else ".").expanduser()
    root = written.resolve()
    real = file.resolve()
    below = real.relative_to(root).as_posix() if real.is_relative_to(root) else ""
    mend = f"say envs: {{STACK: {below or file.name}}}"
    if named is None:
        yield Problem(
            ("envs", "STACK"), "the key STACK is missing: nodes find the stack by it", mend, at_key=True
        )
        return
    path = os.path.normpath(str(named)).lstrip("/")
    ends_alike = real.as_posix().endswith(f"/{path}")
    from_inside = ends_alike and not written.is_absolute() and path.endswith(f"/{below}")
    if below and path != below and not from_inside:
        elsewhere = f", or stand in the folder from which {named} is its path" if ends_alike else ""
        yield Problem(("envs", "STACK"), f"{named} is not this file", mend + elsewhere)
    elif not below and not ends_alike:
        yield Problem(("envs", "STACK"), f"{named} is not this file, {file.name}", "name the file itself")


STACK_RULES = (
    supervised_stages_first,
    names_are_unique,
    stages_have_a_length,
    stages_learn_from_one_source,
    validation_has_one_source,
    evaluations_need_engines,
    batches_hold_whole_groups,
    replies_fit,
    environments_fit_batches,
    environments_replies_fit,
    evaluations_train_nothing,
    held_out_ones_are_named,
    tests_leave_time_to_work,
    rollouts_are_bounded_where_they_are_led,
    steps_suffice,
    corrections_have_room,
    own_losses_are_named,
    references_are_meant,
    schedules_fit,
    nesterov_has_momentum,
    environment_arguments,
    arguments_agree,
    judges_can_judge,
    images_have_containers,
    rewards_are_known,
    packages_are_named,
    packages_do_not_collide,
    workers_have_work,
    engine_arguments,
    pairs_agree,
    rollouts_find_room,
    experts_are_there,
    buckets_are_worth_it,
    model_holds_replies,
    context_divides_heads,
    folders_have_no_revision,
    one_pool_or_a_pair,
    roles_have_one_size,
    sharing,
    idle_is_longer_than_work,
    growth_can_count,
    kept_ones_are_made,
    lone_rollouts_are_not_compared,
    overlong_begins_above_zero,
    curricula_have_a_choice,
    curricula_see_all_groups,
    references_are_there,
    references_are_looked_at,
    references_are_whole,
    references_see_the_same_temperature,
)
TASK_RULES = (
    roles_fit_machines,
    own_machines_are_whole,
    own_machines_are_of_one_kind,
    all_roles_compute_alike,
    machines_end_alike,
    device_fits,
    broadcasts_have_their_gpus,
    accelerators_are_known,
    degrees_divide,
    engines_fill_their_gpus,
    replay_has_routes,
    token_for_several_nodes,
    nodes_are_counted,
    keys_are_spelt,
    secrets_are_not_written,
    reference_secrets_are_brought,
    shared_checkpoints,
    secrets_are_brought,
    judges_have_keys,
)


# ---- where rules look


def environment_lists(stack: Stack):
    yield at("environments"), stack.environments
    for index, stage in enumerate(stack.stages):
        if stage.environments:
            yield at("stages", index, "environments"), stage.environments
    if stack.evaluate:
        yield at("evaluate", "environments"), stack.evaluate.environments


def _by_stage(stack: Stack, section: str):
    """A section of the stack, then as each rl stage that changes it has it, with the path to blame."""
    yield at(section), getattr(stack, section)
    for index, stage in enumerate(stack.stages):
        if isinstance(stage, RlStage) and getattr(stage, section) is not None:
            yield at("stages", index, section), getattr(settings_of(stack, stage), section)
