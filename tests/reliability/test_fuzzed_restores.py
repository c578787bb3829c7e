"""Random changes of the JSON files and array headers of a checkpoint, with matching checksums.

The long form is `FLUXCB_LONG=84 pytest tests/reliability/test_fuzzed_restores.py`: 5,040 cases.
"""

import collections
import copy
import json
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import fluxcb
from fluxcb._errors import FluxcbError
from tests.reliability.forged_checkpoints import (
    as_bytes,
    comparable,
    header_of,
    host_of,
    learner,
    manifest_of,
    set_header,
    set_host,
    set_manifest,
    sign,
    store_of,
    told,
)
from tests.reliability.interrupted import differing, outcome

CASES = 60
PARTS = ("params", "opt_state", "cbstate")
INDEXES = ("_CHECKPOINT_METADATA", *(f"{part}/_METADATA" for part in PARTS))

# Texts in the place of which `json_of` puts something that `json.dumps` cannot write.
RAW = {
    "<5000 digits>": "1" + "0" * 5000,
    "<overflow>": "1e999",
    "<100 lists>": "[" * 100 + "]" * 100,
    "<900 lists>": "[" * 900 + "]" * 900,
    "<100000 lists>": "[" * 100_000 + "]" * 100_000,
    "<2000 objects>": '{"of": ' * 2000 + "1" + "}" * 2000,
}
AGAIN = "<again>"  # the ending of a key that is written down twice
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e300, float("nan"), float("inf"), -float("inf"), *RAW, "",
    "text", "4", "\ud800text", "\x00", "\x1b[2J", "../../etc", "x" * 100_000, "float64", "__class__", [], [[]], {},
    {"$": "state"}, {"$": "array", "at": "0"}, {"$": "numbers", "at": "1"}, {"$": "set", "of": [[1]]}, {"$": 1},
    {"$": "array", "at": "2", "as": "bfloat16"}, {"$": "deque", "of": [1], "as": -1},
]  # fmt: skip
HEADERS: dict[str, list[Any]] = {
    "shape": [[], [0, 3], [3, 2], [6], [-1, 3], [2, 10**12], [2**62, 2**62], [2.0, 3], "23"],
    "chunks": [[], [0, 0], [1, 1], [1, 3], [2, 10**12], [2**62, 3], [-1, 3], [1.5, 3]],
    "dtype": [
        "<f8", ">f4", "<f2", "<i4", "|b1", "|u1", "<c8", "|V4", "|O", "<U8", "<M8[s]", "bfloat16", [["x", "<f4"]],
    ],
    "fill_value": [0, 7, 1.5, "NaN", "Infinity", "-Infinity", True, "AAAA", 10**400],
    "compressor": [
        None, {"id": "zstd", "level": 10**9}, {"id": "zstd"}, {"id": "gzip", "level": 1}, {"id": "bz2", "level": 1},
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 2**31 - 1}, {"id": "no such"}, {},
    ],
    "order": ["F", "K", "c"],
    "filters": [[], [{"id": "delta", "dtype": "<f4"}], [{"id": "zstd", "level": 1}]],
    "dimension_separator": ["/", "", "x"],
    "zarr_format": [1, 3, 2.0, "2"],
}  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container and key in JSON."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def mutated(value: Any, draw: random.Random) -> Any:
    """Return JSON with one or two random changes."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 2])):
        container, key = draw.choice(list(places(value)))
        change = draw.choice(["replace", "replace", "remove", "exchange", "nest", "repeat", "again"])
        if change == "replace":
            container[key] = copy.deepcopy(draw.choice(VALUES))
        elif change == "remove":
            del container[key]
        elif change == "exchange":
            other, place = draw.choice(list(places(value)))
            container[key] = copy.deepcopy(other[place])
        elif change == "nest":
            container[key] = [container[key]]
        elif isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif change == "repeat":
            container[f"{key}+"] = copy.deepcopy(container[key])
        else:
            container[f"{key}{AGAIN}"] = copy.deepcopy(draw.choice([container[key], *VALUES]))
        if not value:
            break
    return value


def mutated_header(header: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return a header with one changed field, or with random changes."""
    if draw.random() < 0.3:
        return mutated(header, draw)
    field = draw.choice(list(HEADERS))
    return {**header, field: draw.choice(HEADERS[field])}


def json_of(value: Any) -> str:
    """Return JSON with the raw texts of `RAW`, and with duplicate keys."""
    text = json.dumps(value).replace(f'{AGAIN}"', '"')
    return re.sub("|".join(f'"{name}"' for name in RAW), lambda found: RAW[found[0].strip('"')], text)


def forge(folder: Path, draw: random.Random) -> str:
    """Change something in a checkpoint, and return a description of the change."""
    kind = draw.choices(["host", "manifest", "header", "index", "archive"], [45, 15, 20, 10, 10])[0]
    if kind == "host":
        set_host(folder, json_of(mutated(host_of(folder), draw)))
    elif kind == "manifest":
        set_manifest(folder, json_of(mutated(manifest_of(folder), draw)))
    elif kind == "archive":
        data = bytearray((folder / "host.npz").read_bytes())
        for _ in range(draw.choice([1, 1, 2, 10])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        (folder / "host.npz").write_bytes(data)
        sign(folder)
    elif kind == "header":
        part = draw.choice(PARTS)
        stored = sorted(name.decode() for name in store_of(folder, part).list().result())
        name = draw.choice([name.removesuffix("/.zarray") for name in stored if name.endswith("/.zarray")])
        set_header(folder, part, name, json_of(mutated_header(header_of(folder, part, name), draw)))
    else:
        index = folder / draw.choice(INDEXES)
        index.write_text(json_of(mutated(json.loads(index.read_text()), draw)))
        sign(folder)
    return kind


# -- what a checkpoint says, read without fluxcb -------------------------------------------------------


def read(folder: Path, part: str, name: str) -> np.ndarray:
    store = {"driver": "ocdbt", "base": f"file://{folder / part}/", "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result().read().result()


def said_by(folder: Path) -> dict[str, Any]:
    """Return what `told` returns after a checkpoint was restored."""
    trees = manifest_of(folder)["trees"]
    with np.load(folder / "host.npz") as held:
        arrays = dict(held)
    stored = {f"{part}.{name}": as_bytes(read(folder, part, name)) for part in PARTS for name in trees[part]}
    return {"trees": stored, "host": comparable(host_of(folder), arrays)}


def agree(said: Any, found: Any) -> bool:
    """Return whether two states agree wherever both have a value: classes may ignore fields or have defaults."""
    if isinstance(said, dict) and isinstance(found, dict):
        return all(agree(said[key], found[key]) for key in said.keys() & found.keys())
    return said == found


# -- the test -----------------------------------------------------------------------------------------


class Fuzzed:
    """A Learner that restores forged checkpoints, and after each of them another valid one."""

    def __init__(self, run: Path, good: list[Path]) -> None:
        self._run, self._good = run, good
        self.learner = learner(run)
        self.expected = []
        for path in good:
            untouched = learner(run)
            untouched.restore(path)
            self.expected.append(self.all_of(untouched))
        self.at = 0
        self.learner.restore(good[0])

    def all_of(self, learner: fluxcb.Learner) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return everything that the Learner would save, and the other state of its callbacks."""
        return told(learner), outcome(learner, self._run)

    def changed(self) -> bool:
        """Return whether anything differs from the valid checkpoint that was restored last."""
        (saved, held), (expected, held_then) = self.all_of(self.learner), self.expected[self.at]
        return saved != expected or differing(held_then, held) != []

    def restore_other(self) -> bool:
        """Restore the other valid checkpoint, and return whether the Learner has the expected state."""
        self.at = 1 - self.at
        self.learner.restore(self._good[self.at])
        return not self.changed()

    def renew(self) -> None:
        """Replace the Learner with a new one."""
        self.learner = learner(self._run)
        self.learner.restore(self._good[self.at])


# When one of several arrays cannot be read, orbax closes the event loop that the others still report to (0.12.8).
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_mutated_checkpoint_raises_or_restores_what_it_contains(
    original: Path, before: Path, tmp_path: Path, times: int
) -> None:
    fuzzed = Fuzzed(tmp_path / "run", [before, original])
    wrong, outcomes = [], collections.Counter()
    for case in range(CASES * times):
        folder = tmp_path / "mutated"
        shutil.copytree(original, folder)
        kind = forge(folder, random.Random(case))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fuzzed.learner.restore(folder)
        except FluxcbError:
            outcomes[kind, "refused"] += 1
            if fuzzed.changed():
                wrong.append((case, kind, "refused, and the Learner has changed"))
        except Exception as error:
            wrong.append((case, kind, f"{type(error).__name__}: {error}"[:300]))
        else:
            outcomes[kind, "equal"] += 1
            if not agree(said_by(folder), told(fuzzed.learner)):
                wrong.append((case, kind, "restored, and not what the checkpoint says"))
        if not fuzzed.restore_other():
            wrong.append((case, kind, "a good checkpoint cannot be restored any more"))
            fuzzed.renew()
        shutil.rmtree(folder)
    print(", ".join(f"{kind} {came}: {count}" for (kind, came), count in sorted(outcomes.items())))
    assert wrong == []
    refused = sum(count for (_, came), count in outcomes.items() if came == "refused")
    assert min(refused, outcomes.total() - refused) >= CASES // 10
