"""Networks on a GPU: their parameters in device memory, captured graphs."""
