"""The suggested fixes for arguments of other libraries that callbacks do not have, and for paths with `~`."""

import pytest

from fluxcb import CheckpointError
from tests.fixes.programs import check_row, error_of, row, run

PAIR_OF_DATA = "data=(BATCHES, BATCHES)"

METRICS = [
    ("val_accuracy", "accuracy"),
    ("val/accuracy", "accuracy"),
    ("validation_accuracy", "accuracy"),
    ("valid_accuracy", "accuracy"),
    ("validation/accuracy", "accuracy"),
    ("val_loss", "loss"),
    ("train_loss", "training/loss"),
    ("training/loss", "training/loss"),
    ("train_accuracy", "training/accuracy"),
]

MONITORS = [
    *(
        row(
            "`EarlyStopping` has no argument `monitor`",
            f'EarlyStopping(monitor="{theirs}", patience=3)',
            f'fit(Metrics(accuracy), EarlyStopping(metric="{ours}", patience=3), {PAIR_OF_DATA})',
        )
        for theirs, ours in METRICS
    ),
    # In Keras, these are metrics of the training; `val_` begins those of the validation.
    *(
        row(
            "`EarlyStopping` has no argument `monitor`",
            f'EarlyStopping(monitor="{name}", patience=3)',
            f"""
            fit(Metrics(accuracy), EarlyStopping(metric="training/{name}", patience=3), {PAIR_OF_DATA})
            fit(Metrics(accuracy), EarlyStopping(metric="{name}", patience=3), {PAIR_OF_DATA})
            """,
        )
        for name in ("loss", "accuracy")
    ),
    row(
        "`EarlyStopping` has no argument `monitor`",
        'EarlyStopping(monitor="val_accuracy", mode="max", patience=3)',
        f'fit(Metrics(accuracy), EarlyStopping(metric="accuracy", mode="max", patience=3), {PAIR_OF_DATA})',
    ),
    row(
        "`ReduceLROnPlateau` has no argument `monitor`",
        'ReduceLROnPlateau(monitor="val_accuracy", mode="max")',
        f'fit(Metrics(accuracy), ReduceLROnPlateau(metric="accuracy", mode="max"), {PAIR_OF_DATA})',
    ),
    row(
        "`StatMonitorParamSetter` has no argument `monitor`",
        'StatMonitorParamSetter(LearningRate, monitor="val_loss", value_func=lambda v: v / 2, threshold=0, last_k=3)',
        'StatMonitorParamSetter(LearningRate, metric="loss", value_func=lambda v: v / 2, threshold=0, last_k=3)',
    ),
    # savers
    row(
        "`MaxSaver` has no argument `monitor`",
        'MaxSaver("runs/1", monitor="val_accuracy")',
        f'fit(Metrics(accuracy), MaxSaver("runs/1", metric="accuracy"), {PAIR_OF_DATA})',
    ),
    row(
        "`MinSaver` has no argument `monitor`",
        'MinSaver("runs/1", monitor="train_loss")',
        'fit(Metrics(accuracy), MinSaver("runs/1", metric="training/loss"))',
    ),
    row(
        "`MinSaver` has no argument `monitor`",
        'MinSaver("runs/1", monitor="val_accuracy")',
        f'fit(Metrics(accuracy), MaxSaver("runs/1", metric="accuracy"), {PAIR_OF_DATA})',
    ),
    row(
        "`MinSaver` has no arguments `monitor` and `mode`",
        'MinSaver("runs/1", monitor="val_score", mode="max")',
        f'fit(Metrics(Metric(accuracy, name="score")), MaxSaver("runs/1", metric="score"), {PAIR_OF_DATA})',
    ),
    row(
        "`MaxSaver` has no arguments `monitor` and `mode`",
        'MaxSaver("runs/1", monitor="val_score", mode="max")',
        f"""
        fit(Metrics(Metric(accuracy, name="score")), MaxSaver("runs/1", metric="score"), {PAIR_OF_DATA})
        assert MaxSaver.__name__
        """,
    ),
    row(
        "`Checkpointer` has no arguments `monitor` and `save_top_k`",
        'Checkpointer("runs/1", monitor="val_accuracy", mode="max", save_top_k=1)',
        f"""
        kept = Checkpointer("runs/1", mode="max", keep_best=1, metric="accuracy")
        fit(Metrics(accuracy), kept, MaxSaver("runs/1", "accuracy"), {PAIR_OF_DATA})
        load_params("runs/1/max-validation-accuracy")
        """,
    ),
    row(
        "`Checkpointer` has no arguments `monitor` and `save_top_k`",
        'Checkpointer("runs/1", monitor="train_loss", save_top_k=5)',
        """
        fit(Metrics(), Checkpointer("runs/1", keep_best=5, metric="training/loss"), MinSaver("runs/1", "training/loss"))
        load_params("runs/1/min-training-loss")
        """,
    ),
    row(
        "`Checkpointer` has no argument `monitor`",
        'Checkpointer("runs/1", monitor="val_loss", keep_best=2)',
        f"""
        fit(Metrics(), Checkpointer("runs/1", keep_best=2, metric="loss"), MinSaver("runs/1", "loss"), {PAIR_OF_DATA})
        load_params("runs/1/min-validation-loss")
        """,
    ),
    row(
        "`Checkpointer` has no arguments `monitor` and `save_top_k`",
        'Checkpointer("runs/1", monitor="val_accuracy", mode="max", save_top_k=-1)',
        """
        fit(Checkpointer("runs/1", keep_every=1), epochs=6)
        import pathlib
        numbers = [int(path.name) for path in pathlib.Path("runs/1").iterdir() if path.name.isdigit()]
        assert sorted(numbers) == [4, 8, 12, 16, 20, 24]  # after each epoch
        """,
    ),
    row(
        "`Checkpointer` has no arguments `monitor` and `save_top_k`",
        'Checkpointer("runs/1", steps=2, monitor="val_accuracy", mode="max", save_top_k=1)',
        f'fit(Metrics(accuracy), Checkpointer("runs/1", steps=2), MaxSaver("runs/1", "accuracy"), {PAIR_OF_DATA})',
    ),
]

SAVERS = [
    row("`save_top_k`", 'Checkpointer("runs/1", save_top_k=0)', "fit()"),
    row(
        "`save_best_only`",
        'Checkpointer("runs/1", keep_best=2, save_best_only=True)',
        f"""
        fit(Metrics(), Checkpointer("runs/1", keep_best=2), MinSaver("runs/1", "loss"), {PAIR_OF_DATA})
        load_params("runs/1/min-validation-loss")
        """,
    ),
    row(
        "`MinSaver` has no argument `mode`",
        'MinSaver("runs/1", "accuracy", mode="max")',
        f'fit(Metrics(accuracy), MaxSaver("runs/1", "accuracy"), {PAIR_OF_DATA})',
    ),
    row("`save_freq`", 'Checkpointer("runs/1", save_freq=3)', 'fit(Checkpointer("runs/1", steps=3))'),
    row("`save_freq`", 'Checkpointer("runs/1", save_freq="epoch")', 'fit(Checkpointer("runs/1", epochs=1))'),
    row(
        "`every_n_train_steps`", 'Checkpointer("runs/1", every_n_train_steps=3)', 'fit(Checkpointer("runs/1", steps=3))'
    ),
    row("`every_n_epochs`", 'Checkpointer("runs/1", every_n_epochs=2)', 'fit(Checkpointer("runs/1", epochs=2))'),
    row(
        "`train_time_interval`",
        'import datetime; Checkpointer("runs/1", train_time_interval=datetime.timedelta(minutes=2))',
        'fit(Checkpointer("runs/1", seconds=120.0))',
    ),
    row("`save_last`", 'Checkpointer("runs/1", save_last=True)', 'fit(Checkpointer("runs/1", keep_last=3))'),
    row(
        "`save_best_only`",
        'Checkpointer("runs/1", save_best_only=False)',
        'fit(Checkpointer("runs/1", keep_last=3)); fit(Checkpointer("other"))',
    ),
    row(
        "`save_weights_only`",
        'Checkpointer("runs/1", save_weights_only=True)',
        'fit(Checkpointer("runs/1")); fluxcb.checkpoints.load_params("runs/1")',
    ),
    row(
        "`verbose`",
        'Checkpointer("runs/1", verbose=1)',
        'import pathlib; fit(Checkpointer("runs/1")); assert pathlib.Path("runs/1/4").is_dir()',
    ),
    row(
        "`save_top_k`",
        'MinSaver("runs/1", save_top_k=1)',
        f"""
        fit(Metrics(), MinSaver("runs/1"), {PAIR_OF_DATA})
        fit(Metrics(), Checkpointer("runs/1", keep_best=3), {PAIR_OF_DATA})
        """,
    ),
    row(
        "`every_n_epochs`",
        'MinSaver("runs/1", every_n_epochs=2)',
        f'fit(Metrics(), MinSaver("runs/1"), Checkpointer("runs/1", epochs=2), {PAIR_OF_DATA})',
    ),
    row(
        "`save_best_only`",
        'MaxSaver("runs/1", save_best_only=True)',
        f"""
        fit(Metrics(accuracy), MaxSaver("runs/1", metric="accuracy"), {PAIR_OF_DATA})
        fit(Metrics(), Checkpointer("other", keep_best=3), {PAIR_OF_DATA}); 'Checkpointer("runs/1", keep_best=3)'
        """,
    ),
]

OTHERS = [
    # EarlyStopping
    *(
        row(
            f"`{name}`",
            f'EarlyStopping(3, {name}=0.5, metric="accuracy")',
            f"""
            stopping = EarlyStopping(Threshold(0.5), 3, metric="accuracy")
            assert stopping.criteria[0] == Threshold(0.5, mode="max")
            fluxcb.stopping, fit(Metrics(accuracy), stopping, {PAIR_OF_DATA})
            """,
        )
        for name in ("threshold", "stopping_threshold", "baseline")
    ),
    row(
        "`stopping_threshold`",
        "EarlyStopping(3, stopping_threshold=-2.5)",
        f"fluxcb.stopping, fit(Metrics(), EarlyStopping(Threshold(-2.5), 3), {PAIR_OF_DATA})",
    ),
    row(
        "`divergence_threshold`",
        "EarlyStopping(3, divergence_threshold=9.0)",
        f"""
        fluxcb.stopping
        made = fit(Metrics(), EarlyStopping(3, ("loss", Threshold(9.0, mode="max"))), {PAIR_OF_DATA})
        assert made.stop_reason is None
        made = fit(
            Metrics(), EarlyStopping(3, ("loss", Threshold(9.0, mode="max"))), {PAIR_OF_DATA}, epochs=9,
            optimizer=optax.sgd(10.0),
        )
        assert made.epoch == 1 and "above 9" in made.stop_reason
        """,
    ),
    row(
        "`divergence_threshold`",
        'EarlyStopping(3, monitor="val_accuracy", divergence_threshold=0.1)',
        f"""
        stopping = EarlyStopping(3, ("accuracy", Threshold(0.1, mode="min")), metric="accuracy")
        fluxcb.stopping, fit(Metrics(accuracy), stopping, {PAIR_OF_DATA})
        """,
    ),
    # The metric gets worse in each epoch. The first value that counts is that of epoch 4, and the next one is worse.
    row(
        "`start_from_epoch`",
        'EarlyStopping(1, metric="training/loss", mode="max", start_from_epoch=3)',
        """
        stopping = fluxcb.when(EarlyStopping(1, metric="training/mse"), lambda learner: learner.progress.epoch > 3)
        mse = Metric(lambda outputs, ys: ((outputs - ys) ** 2).mean(), name="mse")
        made = fit(
            Metrics(mse), stopping, epochs=9, optimizer=optax.sgd(-0.1), loss_fn=lambda o, y: ((o - y) ** 2).mean()
        )
        assert made.epoch == 5
        """,
    ),
    row(
        "`check_finite`",
        "EarlyStopping(3, check_finite=True)",
        f"fluxcb.stopping, fit(Metrics(), EarlyStopping(InvalidValue(), 3), {PAIR_OF_DATA})",
    ),
    row("`strict`", "EarlyStopping(3, strict=True)", f"fit(Metrics(), EarlyStopping(3), {PAIR_OF_DATA})"),
    row(
        "`verbose`",
        "EarlyStopping(3, verbose=1)",
        f"learner = learner(Metrics(), EarlyStopping(3), {PAIR_OF_DATA}); learner.fit(1); learner.stop_reason",
    ),
    row(
        "`monitor` and `restore_best_weights`",
        'EarlyStopping(patience=3, monitor="val_accuracy", restore_best_weights=True)',
        f"""
        stopping = EarlyStopping(patience=3, metric="accuracy")
        learner = learner(Metrics(accuracy), stopping, MaxSaver("runs/1", "accuracy"), {PAIR_OF_DATA})
        learner.fit(1)
        learner.restore("runs/1/max-validation-accuracy")
        """,
    ),
    row("`restore_best_weights`", "EarlyStopping(3, restore_best_weights=False)", "EarlyStopping(3)"),
    # ReduceLROnPlateau
    *(
        row(
            f"`{name}`",
            f"ReduceLROnPlateau({name}=0.25)",
            f'fit(Metrics(), ReduceLROnPlateau(threshold=0.25, threshold_mode="abs"), {PAIR_OF_DATA})',
        )
        for name in ("min_delta", "epsilon")
    ),
    row(
        "`verbose`",
        "ReduceLROnPlateau(verbose=1)",
        'fit(Metrics(), ReduceLROnPlateau(), LogHyperParams(), Monitors(CSVBackend("log.csv")), '
        f"{PAIR_OF_DATA}, default_callbacks=True)",
    ),
    # times
    row("`minutes`", "StopAfter(minutes=10)", "fit(StopAfter(seconds=600))"),
    row("`hours` and `minutes`", "StopAfter(hours=1, minutes=30)", f"fit(StopAfter(seconds={3600 + 30 * 60}))"),
    row("`minutes`", "StopAfter(seconds=30, minutes=1)", "fit(StopAfter(seconds=90))"),
    row("`minutes`", "EverySeconds(minutes=0.25)", "EverySeconds(seconds=15)"),
    row("`hours`", "TimeLimit(hours=2)", "TimeLimit(seconds=7200)"),
    row("`timeout`", "StopAfter(timeout=0.5)", "StopAfter(seconds=0.5)"),
]

ROWS = MONITORS + SAVERS + OTHERS


@pytest.mark.parametrize("row", ROWS, ids=[row.broken for row in ROWS])
def test_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)


# -- paths with `~` --------------------------------------------------------------------------------

WRITTEN = [
    'CSVBackend("~/x.csv")',
    'JSONLinesBackend("~/x.jsonl")',
    'TensorBoardBackend("~/x")',
    'Checkpointer("~/x")',
    'MinSaver("~/x")',
    'BadSteps("~/x")',
    'ControlFile("~/x")',
    'DumpArrays("params", folder="~/x")',
    'PredictionWriter("~/x.jsonl")',
    'HumanHyperParamSetter("learning_rate", "~/x.txt")',
    'Profiler("~/x", steps=(1, 2))',
]
READ = [
    'load_params("~/runs")',
    'load_params("~/runs/4")',
    'learner(Checkpointer("runs")).restore("~/runs")',
    'learner(Checkpointer("runs")).replay("~/runs", steps=(1, 2))',
]


@pytest.mark.parametrize("program", WRITTEN + READ)
def test_path_with_tilde_is_expanded_by_the_fix(program, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    run('fit(Checkpointer("runs"))', home)
    error = error_of(program, tmp_path / "broken")
    assert isinstance(error, CheckpointError) == (program in READ)
    assert "`os.path.expanduser`" in str(error)
    name = program.split('"~/')[1].split('"')[0]
    assert error.fix == (f"write {str(home / name)!r}",)
    run(program.replace(f"~/{name}", str(home / name)), tmp_path / "mended")
    assert not list(tmp_path.rglob("~"))
