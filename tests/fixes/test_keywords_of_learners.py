"""The suggested fixes for arguments of other libraries that `Learner` and `fit` do not have, with the user's values."""

import pytest

from tests.fixes.programs import check_row, row

WITHOUT_OUTPUT = """
    learner = learner(default_callbacks=True, data=(BATCHES, BATCHES))
    learner.callbacks.remove(ProgressBar)
    for callback in (MetricsPrinter, FitSummary):
        learner.callbacks.remove(callback)
    learner.fit(1)
    """

WEIGHTED = """
    def weighted(outputs, ys):
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, ys)
        return (jnp.array([1.0, 3.0])[ys] * losses).mean()
    xs, ys = np.array([[1.0], [2.0]], np.float32), np.array([0, 1])
    model = (lambda key, xs: {"w": jnp.zeros((1, 2))}, lambda params, xs: xs @ params["w"])
    made = learner(Metrics(), model=model, loss_fn=weighted, data=[(xs, ys)])
    # All outputs are 0, so each example has the loss log(2).
    np.testing.assert_allclose(made.fit(1)["training/loss"], [np.log(2) * (1 + 3) / 2], rtol=1e-6)
    """

LEARNER = [
    # gradients
    row("`gradient_clip_val`", "learner(gradient_clip_val=1.5)", "fit(ClipGradients(1.5))"),
    row(
        "`gradient_clip_val` and `gradient_clip_algorithm`",
        'learner(gradient_clip_val=0.25, gradient_clip_algorithm="value")',
        "optimizer = optax.sgd(0.1); fit(optimizer=optax.chain(optax.clip(0.25), optimizer))",
    ),
    row("`clipnorm`", "learner(clipnorm=1.5)", "fit(ClipGradients(1.5))"),
    row("`global_clipnorm`", "learner(global_clipnorm=2)", "fit(ClipGradients(2))"),
    row("`max_grad_norm`", "learner(max_grad_norm=0.5)", "fit(ClipGradients(0.5))"),
    row(
        "`clipvalue`",
        "learner(clipvalue=0.25)",
        "optimizer = fluxcb.inject(optax.sgd, learning_rate=0.1)\n"
        "fit(optimizer=optax.chain(optax.clip(0.25), optimizer))",
    ),
    row("`accumulate_grad_batches`", "learner(accumulate_grad_batches=2)", "fit(AccumulateGradients(2))"),
    row("`gradient_accumulation_steps`", "learner(gradient_accumulation_steps=2)", "fit(AccumulateGradients(2))"),
    row(
        "`precision`",
        'learner(precision="16-mixed")',
        """
        from flax import linen as nn
        class Model(nn.Module):
            @nn.compact
            def __call__(self, xs):
                return nn.Dense(1)(nn.Dense(10, dtype=jnp.bfloat16)(xs))
        fit(DynamicLossScale(), model=Model())
        """,
    ),
    # data
    *(
        row(
            f"`{name}`", f"learner({name}=BATCHES)", "training = validation = BATCHES; fit(data=(training, validation))"
        )
        for name in ("val_dataloader", "val_dataloaders", "valid_data", "validation_data")
    ),
    row(
        "`train_dataloaders` and `val_dataloaders`",
        "Learner(PAIR, loss_fn, optax.sgd(0.1), train_dataloaders=BATCHES, val_dataloaders=BATCHES)",
        "training = validation = BATCHES; fit(data=(training, validation))",
    ),
    row(
        "`batch_size` and `shuffle`",
        "learner(batch_size=8, shuffle=False)",
        """
        xs = ys = XS
        made = fit(data=fluxcb.data.ArrayLoader((xs, ys), batch_size=8, shuffle=False))
        assert made.step == len(XS) / 8
        """,
    ),
    row(
        "`x`, `y` and `batch_size`".replace(",", " and"),
        "Learner(PAIR, loss_fn, optax.sgd(0.1), x=XS, y=XS, batch_size=8)",
        "xs = ys = XS; fit(data=fluxcb.data.ArrayLoader((xs, ys), batch_size=8))",
    ),
    # the optimizer
    *(
        row(
            f"`{name}`",
            f"learner({name}=optax.constant_schedule(0.1))",
            """
            fit(optimizer=optax.adam(optax.cosine_decay_schedule(1e-3, 1000)))
            schedule = optax.cosine_decay_schedule(1e-3, 1000)
            fit(Scheduler({LearningRate: schedule}), optimizer=fluxcb.inject(optax.adam, learning_rate=1e-3))
            """,
        )
        for name in ("scheduler", "lr_scheduler")
    ),
    *(
        row(
            f"`{name}`",
            f"learner({name}=0.25)",
            """
            made = fit(optimizer=fluxcb.inject(optax.adam, learning_rate=0.25))
            assert made.hyperparams.learning_rate == 0.25
            """,
        )
        for name in ("lr", "learning_rate")
    ),
    row("`weight_decay`", "learner(weight_decay=0.5)", "fit(optimizer=optax.adamw(1e-3, weight_decay=0.5))"),
    # folders and logs
    row(
        "`resume`",
        "learner(resume=True)",
        'learner = learner(Checkpointer("runs/1")); learner.fit(10, resume=True); assert learner.epoch == 10',
    ),
    row("`resume`", 'learner(resume="here")', 'learner = learner(Checkpointer("here")); learner.fit(10, resume=True)'),
    row(
        "`default_root_dir`",
        'learner(default_root_dir="here")',
        'fit(Checkpointer("here"), Monitors(CSVBackend("here/log.csv")), default_callbacks=True)',
    ),
    row(
        "`log_dir`",
        'learner(log_dir="here")',
        """
        import pathlib
        callbacks=[Monitors(CSVBackend("here/log.csv"))]
        Learner(PAIR, loss_fn, optax.sgd(0.1), data=BATCHES, callbacks=callbacks).fit(1)
        assert "training/loss" in pathlib.Path("here/log.csv").read_text()
        """,
    ),
    row("`checkpoint_dir`", 'learner(checkpoint_dir="here")', 'fit(Checkpointer("here"))'),
    row(
        "`log_every_n_steps`",
        "learner(log_every_n_steps=2)",
        """
        callbacks=[every(LogMetrics(), steps=2), Monitors(CSVBackend("log.csv"))]
        Learner(PAIR, loss_fn, optax.sgd(0.1), data=BATCHES, callbacks=callbacks).fit(1)
        """,
    ),
    row("`metrics`", "learner(metrics=[accuracy])", "fit(callbacks=[Metrics(accuracy)])"),
    *(
        row(
            f"`{name}`",
            f"learner({name}={value})",
            WITHOUT_OUTPUT,
        )
        for name, value in (("verbose", 0), ("progress", False))
    ),
    # the length, and where the training runs
    *(
        row(f"`{name}`", f"learner({name}=3)", "learner = learner(); learner.fit(3)")
        for name in ("max_epochs", "epochs")
    ),
    row("`max_steps`", "learner(max_steps=3)", "learner = learner(); learner.fit(steps=3); assert learner.step == 3"),
    row(
        "`max_time`",
        "import datetime; learner(max_time=datetime.timedelta(minutes=2))",
        "fit(StopAfter(seconds=120.0))",
    ),
    *(row(f"`{name}`", f"learner({name}=3)", "fit(key=3)") for name in ("seed", "rng")),
    row("`seed`", "learner(seed=-3)", "fit(key=-3)"),
    row("`rng`", "learner(rng=jax.random.key(5))", "fit(key=jax.random.key(5))"),
    row("`devices`", "learner(devices=1)", "fit(mesh=fluxcb.mesh(data=1))"),
    row("`strategy`", 'learner(strategy="ddp")', "fit(mesh=fluxcb.mesh(data=-1))"),
    row(
        "`devices` and `strategy`",
        'learner(devices=1, strategy="fsdp")',
        'fit(mesh=fluxcb.mesh(data=1), sharding="fsdp")',
    ),
    row(
        "`accelerator`",
        'learner(accelerator="gpu")',
        "import os; os.environ.get('JAX_PLATFORMS'); fit()",
    ),
]

FIT = [
    row("`class_weight`", "learner().fit(1, class_weight={0: 1.0, 1: 3.0})", WEIGHTED),
    row(
        "`sample_weight`",
        "learner().fit(1, sample_weight=np.ones(16))",
        """
        xs, ys, weights = XS, 3 * XS, np.arange(16, dtype=np.float32)
        def loss_fn(model, batch):
            xs, ys, weights = batch
            return (weights * (model(xs) - ys)[:, 0] ** 2).mean()
        made = learner(Metrics(), loss_fn=loss_fn, data=fluxcb.data.ArrayLoader((xs, ys, weights), batch_size=32))
        # The model begins with the output 0.
        np.testing.assert_allclose(made.fit(1)["training/loss"], [(weights * ys[:, 0] ** 2).mean()], rtol=1e-5)
        """,
    ),
    row(
        "`validation_split` and `batch_size`",
        "learner().fit(1, validation_split=0.25, batch_size=4)",
        "xs, ys = XS, 3 * XS\nn = int(0.75 * len(xs))\n"
        "data=(fluxcb.data.ArrayLoader((xs[:n], ys[:n]), batch_size=4), "
        "fluxcb.data.ArrayLoader((xs[n:], ys[n:]), batch_size=4))\n"
        "assert fit(Metrics(), data=data).step == 3",
    ),
    row(
        "`validation_data` and `batch_size`",
        "learner().fit(1, validation_data=BATCHES, batch_size=8)",
        """
        xs = ys = XS
        data=fluxcb.data.ArrayLoader((xs, ys), batch_size=8)
        training = validation = data
        learner = Learner(PAIR, loss_fn, optax.sgd(0.1), data=(training, validation))
        learner.fit(10)
        """,
    ),
    row(
        "`initial_epoch`",
        "learner().fit(10, initial_epoch=3)",
        """
        learner = learner(Checkpointer("runs/1"))
        learner.fit(10, resume=True)
        learner.fit(2)
        assert learner.epoch == 12
        """,
    ),
    row(
        "`shuffle`",
        "learner().fit(1, shuffle=False)",
        "xs = ys = XS; fit(data=fluxcb.data.ArrayLoader((xs, ys), batch_size=32, shuffle=False))",
    ),
    row("`lr`", "learner().fit(1, lr=0.25)", "fit(optimizer=fluxcb.inject(optax.adam, learning_rate=0.25))"),
    row("`seed`", "learner().fit(1, seed=3)", "Learner(PAIR, loss_fn, optax.sgd(0.1), data=BATCHES, key=3).fit(1)"),
    row("`max_grad_norm`", "learner().fit(1, max_grad_norm=0.5)", "fit(ClipGradients(0.5))"),
    row(
        "`callbacks`",
        "learner().fit(1, callbacks=[Metrics()])",
        "Learner(PAIR, loss_fn, optax.sgd(0.1), data=BATCHES, callbacks=[Metrics()]).fit(1)",
    ),
    row("`verbose`", "learner().fit(1, verbose=0)", WITHOUT_OUTPUT),
    row(
        "`ckpt_path`",
        'learner().fit(1, ckpt_path="other/4")',
        """
        fit(Checkpointer("other"))
        learner_of_user = learner
        learner = learner_of_user(Checkpointer("runs/1"))
        learner.restore("other/4")
        learner.fit(2)
        assert learner.epoch == 3
        learner = learner_of_user(Checkpointer("runs/1"))
        learner.fit(2, resume=True)
        assert learner.epoch == 3
        """,
    ),
    row(
        "`Population.fit` has no argument `lr`",
        "Population(lambda key: learner(key=key), key=[0, 1]).fit(1, lr=0.25)",
        """
        optimizer = fluxcb.inject(optax.adam, learning_rate=0.25)
        Population(lambda key: learner(optimizer=optimizer, key=key), key=[0, 1]).fit(1)
        """,
    ),
]


@pytest.mark.parametrize("row", LEARNER + FIT, ids=[row.broken for row in LEARNER + FIT])
def test_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)
