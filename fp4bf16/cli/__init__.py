"""What ``python -m fp4bf16`` offers besides the trainer: `info`, `validate` and `bench`."""
