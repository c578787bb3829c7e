"""A mesh and declared shardings, on eight simulated devices, beside loops written by hand and one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.every_callback import found

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments, devices=8):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(ROOT / "tests/windows/sharded_script.py"), *arguments],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process):
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    return json.loads(next(line for line in reversed(out.splitlines()) if line[:1] in "[{" and "Gloo" not in line))


def run(*arguments):
    return result_of(start(*arguments))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dp", "fsdp", "tp"])
def test_memory_and_collectives_are_those_of_a_loop_by_hand(kind):
    found = run("compare", kind)
    assert found["bytes"] <= 1.02 * found["by hand"]
    assert found["of ema"] == found["params"]
    assert found["collectives"] == [found["hand_collectives"]]
    assert sum(found["hand_collectives"].values()) > 0
    assert found["same"]
    assert found["compiles"] == {"traces": 1, "compiles": 1}
    assert found["error"] < 1e-5  # of the losses, relative to those of one device


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dp", "fsdp", "tp"])
def test_averages_validation_and_assignments_keep_the_shardings(kind):
    found = run("validating", kind)
    assert found["same"] == [True, True, True]
    assert found["compiles"] == [{"traces": 2, "compiles": 2}] * 2


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_every_callback_keeps_the_shardings(part):
    names = [name for name in found() if name != "ToDevice"][part::6]  # it is refused beside a mesh
    assert run("every_callback", *names) == {name: [] for name in names}


@pytest.mark.long
def test_ragged_batches():
    found = run("ragged")
    one, pad, drop = found["one device"], found["pad"], found["drop"]
    assert pad["values"].keys() == one["values"].keys()
    for name, values in one["values"].items():
        assert pad["values"][name] == pytest.approx(values, rel=1e-6, abs=1e-6), name
    assert (one["step"], pad["step"], drop["step"]) == (15, 15, 12)
    # A smaller last batch has programs of its own on one device.
    assert (one["compiles"], pad["compiles"], drop["compiles"]) == (4, 2, 2)


@pytest.mark.long
def test_dropped_batches_are_no_steps():
    found = run("dropping")
    assert found["loader"] == [[[4, 4], [4, 4]], ["4/4 steps"] * 2]  # 77 examples in batches of 16
    assert found["list"] == [[[2, 2], [2, 2]], ["2/2 steps"] * 2]
    assert found["unsized"] == [[[4, 2], [2, 2]], ["2/4 steps", "2/2 steps"]]  # known after the first epoch


@pytest.mark.long
def test_predict_and_evaluate_divide_all_batches():
    found = run("inference")
    # Batches of 16 and of 13 rows, over 8 devices or 4 pairs of devices.
    for kind, rows in (("dp", 2), ("tp", 4)):
        of_kind = found[kind]
        assert of_kind["outputs"] < 1e-5
        assert of_kind["loss"] < 1e-6
        assert of_kind["arrays"] < 1e-6
        assert of_kind["rows"] == [[rows, rows]] * 4  # two products in each of two programs, for two shapes


@pytest.mark.long
def test_meshes_of_plain_jax():
    found = run("meshes")
    assert found["devices"] == 8
    assert found["loss"] == pytest.approx([found["loss"][0]] * 4, rel=1e-5)


@pytest.mark.long
def test_annotations_of_flax_modules_are_used():
    tables = run("annotated")
    kernels = {"nnx": "kernel", "linen": "kernel.value", "logical": "kernel.value"}
    for name, kernel in kernels.items():
        assert tables[name] == {
            "params.bias": "P()",
            f"params.{kernel}": "P('model', None)",
            "opt_state.0.count": "P()",
            "opt_state.0.mu.bias": "P()",
            f"opt_state.0.mu.{kernel}": "P('model', None)",
            "opt_state.0.nu.bias": "P()",
            f"opt_state.0.nu.{kernel}": "P('model', None)",
            "counters": "P()",
        }


@pytest.mark.long
def test_models_that_are_divided_already_keep_their_shardings():
    found = run("divided_before")
    names = {"nnx": ("bias", "kernel", "P(None, 'model')"), "equinox": ("bias", "weight", "P('model', None)")}
    for name, (bias, weight, spec) in names.items():
        assert found["tables"][name] == {
            "counters": "P()",
            "opt_state.0.count": "P()",
            **{f"{tree}.{bias}": "P('model')" for tree in ("params", "opt_state.0.mu", "opt_state.0.nu")},
            **{f"{tree}.{weight}": spec for tree in ("params", "opt_state.0.mu", "opt_state.0.nu")},
        }
    assert set(found["tables"]["replicated"].values()) == {"P()"}  # a rule decides
    # Four devices have 1/4 of each parameter and of each moment. No program returned more.
    parameters = 4 * (256 * 1024 + 1024)
    assert max(found["largest"][name] for name in names) <= 2 * parameters // 4 + 64


@pytest.mark.long
def test_two_processes_train_from_their_own_rows():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    processes = [start("process", index, address, devices=4) for index in ("0", "1")]
    found = [result_of(process) for process in processes]
    one = run("one_process")
    assert found[0]["losses"] == found[1]["losses"] == pytest.approx(one["losses"], rel=1e-5)
    # Each process gets the outputs of its own examples, and the metrics of those of all processes.
    for number, each in enumerate(found):
        first, second = (one["outputs"][size * number : size * number + size] for size in (8, 6))
        for outputs, expected in zip(each["outputs"], first + second, strict=True):
            assert outputs == pytest.approx(expected, abs=1e-5)
        assert each["evaluated"] == pytest.approx(one["evaluated"], rel=1e-5)
    assert [each["same"] for each in found] == [True, True]
    assert found[0]["bytes"] == found[1]["bytes"] < 3 * 4 * (256 * 1024 + 1024 * 8) // 8 + 10_000


@pytest.mark.long
def test_no_device_ever_has_the_whole_parameters_or_optimizer_state():
    found = run("initialization")
    assert found["table"] == 3 * 4 * (256 * 1024 + 1024 * 8) // 8 + 4 + 6 * 4  # params, mu, nu; count; counters
    assert found["live"] <= found["table"] + 16
    assert found["largest output"] < 1024 * 256 * 4  # the largest parameter: no program returns it as a whole


@pytest.mark.long
def test_messages():
    assert run("errors") == [
        "DataError: A batch of `data.training` has 12 examples, which the 8 devices cannot divide evenly.\n"
        "  why:   12 is not a multiple of 8\n"
        "  fix:   leave such batches out: `sharding=fluxcb.Sharding(..., ragged='drop')`, or `drop_last=True` in the "
        "loader\n"
        "     or: fill them up: `sharding=fluxcb.Sharding(..., ragged='pad')`, with a loss that uses `batch.mask`\n"
        "     or: use batches of a multiple of 8 examples",
        "DataError: A batch of `run_step(TrainingPhase(), batch)` has 3 examples, which the 8 devices cannot divide "
        "evenly.\n"
        "  why:   3 is not a multiple of 8\n"
        "  fix:   use batches of 8 examples\n"
        "     or: fill them up: `sharding=fluxcb.Sharding(..., ragged='pad')`, with a loss that uses `batch.mask`",
        *[
            "DataError: A batch of `data.training` has 30 examples, which the 8 devices cannot divide evenly.\n"
            "  why:   30 is not a multiple of 8\n"
            "  fix:   use batches of 24 or 32 examples\n"
            "     or: fill them up: `sharding=fluxcb.Sharding(..., ragged='pad')`, with a loss that uses `batch.mask`",
        ]
        * 2,
        *["no error"] * 3,
        "DeclarationError: `fsdp(axis='data', min_bytes=4194304)` divides no parameter over the 8 devices of the axis "
        "`data`.\n"
        "  where: the largest parameter is `up` of shape (256, 1024), 1,048,576 bytes\n"
        "  why:   it is smaller than `min_bytes`\n"
        "  fix:   write `sharding=fluxcb.Sharding(params=fluxcb.fsdp(min_bytes=0))`\n"
        "     or: write `sharding='replicated'`",
        "DeclarationError: `fsdp(axis='data', min_bytes=0)` matches no parameter, because earlier rules match all of "
        "them.\n"
        "  why:   the first rule that matches an array decides\n"
        "  fix:   remove `fsdp(axis='data', min_bytes=0)` from the rules",
        "DeclarationError: `fsdp(axis='data', min_bytes=4194304)` divides no parameter over the 8 devices of the axis "
        "`data`.\n"
        "  where: the largest parameter without a rule is `down` of shape (1024, 8), 32,768 bytes\n"
        "  why:   it is smaller than `min_bytes`\n"
        "  fix:   write `sharding=fluxcb.Sharding(params=fluxcb.fsdp(min_bytes=0))`\n"
        "     or: write `sharding='replicated'`",
        "DeclarationError: `params.down` has the shape (1024, 8), and P(None, 'data') divides dimension 1 over 3 "
        "devices.\n"
        "  why:   8 is not a multiple of 3\n"
        "  fix:   divide another dimension\n"
        "     or: make the dimension a multiple of the devices",
        "DeclarationError: A mesh with data=3, model=1 does not fit 8 devices.\n"
        "  why:   the sizes multiply to 3, which must be the number of devices\n"
        "  fix:   let one axis use the remaining devices: `fluxcb.mesh(data=-1)`\n"
        "     or: choose the devices: `fluxcb.mesh(data=3, model=1, devices=jax.devices()[:3])`",
        "DeclarationError: A mesh with data=4, model=1 does not fit 8 devices.\n"
        "  why:   the sizes multiply to 4, which must be the number of devices\n"
        "  fix:   let one axis use the remaining devices: `fluxcb.mesh(data=-1)`\n"
        "     or: choose the devices: `fluxcb.mesh(data=4, model=1, devices=jax.devices()[:4])`",
        "DeclarationError: A callback has moved `params.down` to SingleDeviceSharding(device=CpuDevice(id=1), "
        "memory_kind=device).\n"
        "  why:   this Learner has a `mesh`, which decides where the train state is\n"
        "  fix:   remove `ToDevice` from the callbacks\n"
        "     or: leave out `mesh` and `sharding`",
    ]
