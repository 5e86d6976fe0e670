"""Rollouts in processes of their own: for environments that lead them and for packages of others."""

from stackrl.runtime.environments.workers.parties import EnvironmentFailed, WorkerLost
from stackrl.runtime.environments.workers.pool import close_workers
from stackrl.runtime.environments.workers.remote import InWorkers, in_workers

__all__ = ["EnvironmentFailed", "InWorkers", "WorkerLost", "close_workers", "in_workers"]
