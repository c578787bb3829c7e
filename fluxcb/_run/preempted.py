"""The warning about a fit that SIGTERM has ended, for Learners whose callbacks do not report it."""

from fluxcb._check.graph import CallbackGraph
from fluxcb._declare.callback import unwrap
from fluxcb._run.progress import Progress
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks import FitSummary

__all__ = ["warn_of_preemption"]


def warn_of_preemption(graph: CallbackGraph, progress: Progress) -> None:
    """Warn that SIGTERM has ended the fit, because `fit` returns and the program continues.

    Without `FitSummary`, which prints how a fit ended, the program would silently use a model that is trained in part.
    """
    if any(isinstance(unwrap(declared.callback), FitSummary) for declared in graph.declared):
        return
    # 143 is the exit code of a process that SIGTERM has ended (128 + 15).
    warn_user(
        f"SIGTERM ended the fit after epoch {progress.epoch}, step {progress.step}, and the program continues after "
        '`fit`. To end the program, write `if learner.stop_reason == "preempted": raise SystemExit(143)` after `fit`.',
        RuntimeWarning,
    )
