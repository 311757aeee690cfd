"""Reading published weights: safetensors files, storage forms, names; one tensor at a time."""
