"""Runs on a Slurm cluster."""
