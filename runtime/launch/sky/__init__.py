"""Runs on machines that SkyPilot gets."""
