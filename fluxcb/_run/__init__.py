"""Stage 4, run: what happens on every step. In: plans and compiled programs. Out: a trained state.

The public class is `Learner` (`learner.py`), which is assembled by `learner_core.py`. The state is in `progress.py`
(counters), `train_state.py` (the carry), `fit_record.py` (the record of a fit), and `moment.py` (what handlers may read
while they run). To learn how training runs, read `window.py`, `step_loop.py`, `emitter.py`, `engine.py`, `epochs.py`,
and `fit_loop.py`, in this order. Without errors, signals, and stops, these files do the following::

    emit(FitBegin)                                              # fit_loop.py
    while steps or epochs remain:
        for phase in training_phases:
            emit(EpochBegin, phase)                             # epochs.py
            pending = None
            while window := pull_batches(stream, length):       # step_loop.py
                if pending and pending.blocks:                  # one of its handlers changes what this window reads
                    replay(pending)
                    pending = None
                carry, outputs = program(carry, window)         # program_runner.py; does not wait for the device
                if pending:
                    replay(pending)                             # while the device runs this window
                pending = window
            replay(pending)
            emit(EpochEnd, phase)
        for phase in validation_phases:
            ...                                                 # the same, with steps that change no parameters
        emit(Trigger)
        take_requested_snapshots()                              # emitter.py, `between_steps`
    emit(FitStopping)
    emit(FitEnd)

    def replay(window):
        wait for the window's outputs
        for step in window:
            emit(StepBegin)                                     # sees the batch
            emit(StepEnd)                                       # sees the step's values
"""
