"""The trainer: data, configuration, stages, checkpoints, report. ``python -m fp4bf16 train`` runs it."""
