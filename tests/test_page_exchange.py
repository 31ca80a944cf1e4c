"""Pages go from process to process, backend to backend and machine to machine, and mean the same everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from batches import usable_backends
from page_exchange import CASES, check, is_of_earlier_encoder, pack, read, write

from nibblekv import FORMATS

# Files written on other machines and by earlier releases: they must be understood for ever.
KEPT = sorted((Path(__file__).parent / "golden" / "exchange").glob("*.json"))
EARLIER = [path for path in KEPT if is_of_earlier_encoder(path)]
TODAYS = [path for path in KEPT if path not in EARLIER]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a file from each backend of this process."""
    folder = tmp_path_factory.mktemp("exchange")
    found = {backend: folder / f"{backend}.json" for backend in usable_backends()}
    for backend, path in found.items():
        write(path, backend, "cpu")
    return found


def test_every_format_travels():
    assert {case["format"] for case in CASES.values()} == set(FORMATS)


def everything_is_understood(path: Path) -> bool:
    return len(check(path, usable_backends())) == len(json.loads(path.read_text())["cases"]) > 0


@pytest.mark.parametrize("path", EARLIER, ids=[path.stem for path in EARLIER])
def test_pages_of_an_earlier_encoder_decode_the_same(path: Path):
    """Catches a meaning of bytes that changed with an encoder. An H200 wrote some before keys were refitted."""
    assert everything_is_understood(path)


@pytest.mark.parametrize("path", TODAYS, ids=[path.stem for path in TODAYS])
def test_pages_from_elsewhere_are_understood(path: Path):
    """Catches a meaning of bytes that changed with the machine, the backend or the release, or an encoder that did."""
    assert everything_is_understood(path)


@pytest.mark.parametrize("backend", usable_backends())
def test_every_backend_reads_every_other(files, backend):
    """Catches a codec that only its own attention understands."""
    for path in files.values():
        check(path, [backend])


def test_the_interpreted_kernels_exchange_pages_with_the_others(files, tmp_path):
    """Catches Triton kernels whose pages, or reading of pages, are their own."""
    pytest.importorskip("triton")
    theirs = tmp_path / "triton.json"
    script = f"""
from pathlib import Path
from page_exchange import check, write
write(Path({str(theirs)!r}), "triton", "cpu")
for path in {[str(path) for path in files.values()]!r}:
    print(check(Path(path), ["triton"]))
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("attention within") == len(files) * len(CASES)
    check(theirs, usable_backends())


def flip_byte(text: str) -> str:
    record = json.loads(text)
    case = record["cases"]["int4"]
    case["pages"] = ("B" if case["pages"][100] != "B" else "C").join((case["pages"][:100], case["pages"][101:]))
    return json.dumps(record)


def edit(**changes: object):
    def change(text: str) -> str:
        record = json.loads(text)
        record["cases"]["int4"] |= changes
        return json.dumps(record)

    return change


HOSTILE = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "another kind": lambda text: text.replace("nibblekv pages 1", "nibblekv pages 2"),
    "a byte changed": flip_byte,
    "another version": edit(versions=[9, 9]),
    "another head size": edit(head_size=64),
    "impossible head size": edit(head_size=-8),
    "another format": edit(format="int8_per_token_head"),
    "unknown format": edit(format="os.system"),
    "unknown field": edit(eval="1"),
    "no base64": edit(out="*" * 64),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_something_else_is_refused(files, tmp_path, change):
    """Catches bytes that are read as pages of another shape, format or version than they are."""
    path = tmp_path / "hostile.json"
    path.write_text(change(files["reference"].read_text()))
    with pytest.raises(ValueError, match=r"hostile\.json: expected pages of this version, got") as raised:
        read(path)
    assert "\n" not in str(raised.value)


def test_a_pickle_is_refused_and_nothing_is_overwritten(files, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "hostile.json"
    path.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ValueError, match="expected pages of this version"):
        read(path)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(FileExistsError):
        write(path, "reference", "cpu")


@pytest.mark.parametrize("path", [None, *EARLIER], ids=["today's", *(path.stem for path in EARLIER)])
def test_damage_is_found(files, tmp_path, path):
    """Keeps the checks honest: attention that is off by a percent is refused, and one scale that is off by two."""
    written = (path or files["reference"]).read_text()
    layout, pages, out = read(path or files["reference"])["int4"]
    layout.views(pages).k_scale_cache[0, 0, 1] += 4 << 16
    packed = pack(pages)
    damages = {
        "from the writer's attention": {"out": pack(out * 1.01)},
        "scale|steps": {"pages": packed, "sha256": hashlib.sha256(packed.encode()).hexdigest()},
    }
    for number, (message, damage) in enumerate(damages.items()):
        damaged = tmp_path / f"{number}.json"
        damaged.write_text(edit(**damage)(written))
        with pytest.raises(AssertionError, match=message):
            check(damaged, ["reference"])
