"""Every error that cachegraph raises on purpose.

CachegraphError
├── ConfigError         a config.json, option or preset is not one we can build (also ValueError)
├── CheckpointError     weights are missing, unexpected, mis-shaped or damaged (also ValueError)
├── ContractError       a manifest, a graph and a session disagree (also ValueError)
├── BatchError          a batch breaks the rules of its family (also ValueError)
├── LogitsError         a row of logits offers no token: NaN, +inf or all masked
├── PlanError           a plan names rows it may not name
├── CapacityError       there is no room; nothing has changed
├── RewindError         a sequence cannot stand at a position; the reachable ones are named
├── StateFileError      a saved state is damaged, foreign or too large; live state is as it was
├── GraphBuildError     the builder cannot emit what was asked for
├── StepError           a graph call failed; the message says which sequences were dropped
├── DeviceError         the device asked for is not there, or a node ran elsewhere
├── DependencyError     an optional package is missing (also ImportError)
└── UsageError          an engine was used in a way it does not allow (closed, two threads)

Messages say what was wrong, what was wanted, where, and what to do.
"""


class CachegraphError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(CachegraphError, ValueError):
    """A model config, an export option or a preset cannot be used."""


class CheckpointError(CachegraphError, ValueError):
    """A checkpoint's tensors do not match its config, or a file is damaged."""


class ContractError(CachegraphError, ValueError):
    """Manifest, graph and runtime do not agree."""


class BatchError(CachegraphError, ValueError):
    """A batch is refused before planning; memory is as it was."""


class LogitsError(CachegraphError):
    """A row of logits has NaN, +inf or only -inf; no token was chosen."""


class PlanError(CachegraphError):
    """A logical plan is invalid; the graph was not run."""


class CapacityError(CachegraphError):
    """A cache, a context or a budget has no room; memory is as it was."""


class RewindError(CachegraphError):
    """A sequence cannot be cut where it was asked to; memory is as it was."""


class StateFileError(CachegraphError, ValueError):
    """A saved state cannot be restored; every live row is as it was."""


class GraphBuildError(CachegraphError):
    """The builder cannot emit the requested graph."""


class StepError(CachegraphError):
    """A graph call failed half-way; its sequences are dropped, all others stand."""


class DeviceError(CachegraphError):
    """The requested device is missing, or a node was placed elsewhere."""


class DependencyError(CachegraphError, ImportError):
    """An optional package that this call needs is not installed."""


class UsageError(CachegraphError):
    """An engine is closed, busy in another thread, or asked for what it cannot do."""
