"""What a model is: configs, cache layouts, the contract between the builder and the runtime.

Both halves import this package; it imports neither. Standard library, numpy and pydantic only.
"""
