"""Files of pages and snapshots: whatever happens to a folder, they are read as written, or not at all."""

from __future__ import annotations

import os
import random
import stat
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from plait.core.plan import Kind
from plait.core.snapshots import SnapshotKind
from plait.core.tier import Item
from plait.worker import unit_files
from plait.worker.unit_files import DamagedError, UnitFiles

PAGE_SIZE = 4
SIZES = (96, 500)
NAMESPACE = bytes(range(16))


def item(number: int, kind: Kind = Kind.PAGE) -> Item:
    """An item whose every field follows from its number."""
    draw = random.Random(number)
    return Item(
        kind, draw.randbytes(16), draw.randbytes(16) if number % 3 else b"", draw.randrange(1, 1000),
        draw.randbytes(4 * PAGE_SIZE), SnapshotKind(draw.randrange(5)),
    )  # fmt: skip


def payload(number: int, kind: Kind = Kind.PAGE) -> bytes:
    return random.Random(-1 - number).randbytes(SIZES[kind])


def open_files(folder, limit: int = 10**9, namespace: bytes = NAMESPACE) -> UnitFiles:
    return UnitFiles(folder, namespace, page_size=PAGE_SIZE, sizes=SIZES, limit=limit, about="a test")


def write(files: UnitFiles, number: int, kind: Kind = Kind.PAGE) -> None:
    files.write(item(number, kind), memoryview(payload(number, kind)))


def read(files: UnitFiles, number: int, kind: Kind = Kind.PAGE) -> tuple[bytes, SnapshotKind]:
    buffer = bytearray(SIZES[kind])
    reason = files.read(item(number, kind), memoryview(buffer))
    return bytes(buffer), reason


@pytest.mark.parametrize("kind", list(Kind))
def test_what_is_written_is_read(tmp_path, kind):
    files = open_files(tmp_path)
    write(files, 7, kind)
    assert files.has(item(7, kind).name)
    for again in (files, open_files(tmp_path)):
        assert read(again, 7, kind) == (payload(7, kind), item(7, kind).reason)
    [path] = (tmp_path / NAMESPACE.hex()).glob(f"*.{kind.name.lower()}")
    assert path.stat().st_size == files.file_bytes(kind)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (path.parent / "about.txt").read_text() == "a test\n"


@pytest.mark.parametrize("kind", list(Kind))
def test_any_flipped_bit_and_any_cut_is_noticed(tmp_path, kind):
    files = open_files(tmp_path)
    write(files, 1, kind)
    [path] = (tmp_path / NAMESPACE.hex()).glob("*.[ps]*e")
    good = path.read_bytes()
    draw = random.Random(0)
    for place in range(0, len(good), 3):
        bad = bytearray(good)
        bad[place] ^= 1 << draw.randrange(8)
        for data in (bytes(bad), good[:place]):
            path.write_bytes(data)
            files.units[item(1, kind).name] = None
            with pytest.raises(DamagedError, match=path.name):
                read(files, 1, kind)
            assert not path.exists()
            assert not files.has(item(1, kind).name)


def test_another_unit_under_this_name_is_noticed(tmp_path):
    """Whole and sound, but for other tokens, another parent, another depth or another namespace."""
    files = open_files(tmp_path)
    true = item(1)
    for wrong in (
        Item(true.kind, true.key, true.parent, true.depth, item(2).tokens, true.reason),
        Item(true.kind, true.key, item(2).key, true.depth, true.tokens, true.reason),
        Item(true.kind, true.key, true.parent, true.depth + 1, true.tokens, true.reason),
    ):
        files.write(wrong, memoryview(payload(1)))
        with pytest.raises(DamagedError, match="something else"):
            read(files, 1)
    other = open_files(tmp_path, namespace=bytes(16))
    write(other, 1)
    home = tmp_path / NAMESPACE.hex()
    os.rename(tmp_path / bytes(16).hex() / f"{true.key.hex()}.page", home / f"{true.key.hex()}.page")
    with pytest.raises(DamagedError, match="something else"):
        read(open_files(tmp_path), 1)


def test_a_unit_that_is_not_wanted_any_more_leaves_nothing(tmp_path):
    files = open_files(tmp_path)
    files.write(item(1), memoryview(payload(1)), lambda: False)
    assert not files.has(item(1).name)
    assert [path.name for path in (tmp_path / NAMESPACE.hex()).iterdir()] == ["about.txt"]


def test_what_a_living_engine_writes_is_left_alone(tmp_path):
    """A second engine that starts meanwhile must not take it for a dead one's."""
    files = open_files(tmp_path)
    seen = []

    def look() -> bool:
        seen.append(open_files(tmp_path).found)
        return True

    files.write(item(1), memoryview(payload(1)), look)
    assert [found.half_written for found in seen] == [0]
    assert read(open_files(tmp_path), 1)[0] == payload(1)


def test_a_folder_that_was_removed_comes_back(tmp_path):
    files = open_files(tmp_path / "cache")
    os.unlink(tmp_path / "cache" / NAMESPACE.hex() / "about.txt")
    os.rmdir(tmp_path / "cache" / NAMESPACE.hex())
    write(files, 1)
    assert read(files, 1)[0] == payload(1)


def test_of_a_prefix_the_deepest_goes_first(tmp_path):
    """Those of one use stay together by depth, and later uses count more than depth."""
    files = open_files(tmp_path)
    chain = [Item(Kind.PAGE, bytes([i] * 16), b"", i, bytes(16)) for i in range(1, 9)]
    for part in chain:
        files.write(part, memoryview(bytes(96)))
    files.touch([(part.name, part.depth) for part in chain])
    files.touch([(chain[5].name, 6), (item(3).name, 1)])  # the second is not there
    files.limit = 4 * files.file_bytes(Kind.PAGE)
    files.trim()
    assert [part.depth for part in chain if files.has(part.name)] == [1, 2, 6]


class Folder(RuleBasedStateMachine):
    """Two engines of one namespace and one of another over a folder, and somebody who damages files."""

    numbers = st.integers(0, 12)
    kinds = st.sampled_from(list(Kind))

    @initialize(limit=st.sampled_from([2000, 6000, 10**6]))
    def start(self, limit: int) -> None:
        import tempfile
        from pathlib import Path

        self.place = tempfile.TemporaryDirectory()
        self.folder = Path(self.place.name)
        self.limit = limit
        self.engines = [self.open(0), self.open(1), self.open(2)]

    def open(self, which: int) -> UnitFiles:
        return open_files(self.folder, self.limit, bytes(16) if which == 2 else NAMESPACE)

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.place.cleanup()

    @rule(which=st.integers(0, 2), number=numbers, kind=kinds)
    def write(self, which: int, number: int, kind: Kind) -> None:
        files = self.engines[which]
        write(files, number, kind)
        assert files.has(item(number, kind).name)
        assert files.total <= self.limit

    @rule(which=st.integers(0, 2), number=numbers, kind=kinds)
    def read(self, which: int, number: int, kind: Kind) -> None:
        try:
            found = read(self.engines[which], number, kind)
        except (FileNotFoundError, DamagedError):
            assert not self.engines[which].has(item(number, kind).name)
        else:
            assert found == (payload(number, kind), item(number, kind).reason)

    @rule(which=st.integers(0, 2))
    def restart(self, which: int) -> None:
        self.engines[which] = self.open(which)

    @rule(data=st.data())
    def damage(self, data) -> None:
        paths = sorted(self.folder.glob("*/*.[ps]*e"))
        if paths:
            path = data.draw(st.sampled_from(paths))
            content = bytearray(path.read_bytes())
            match data.draw(st.sampled_from(["flip", "cut", "swap", "remove"])):
                case "flip" if content:
                    content[data.draw(st.integers(0, len(content) - 1))] ^= 4
                    path.write_bytes(content)
                case "cut":
                    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
                case "swap":
                    other = data.draw(st.sampled_from(paths))
                    path.write_bytes(other.read_bytes())
                case "remove":
                    path.unlink()

    @rule(which=st.integers(0, 2))
    def look(self, which: int) -> None:
        self.engines[which].look()

    @invariant()
    def nothing_is_half_written(self) -> None:
        if hasattr(self, "folder"):
            assert not list(self.folder.glob("*/*.part"))


Folder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestFolder = Folder.TestCase


def test_refreshing_finds_what_others_add(tmp_path, monkeypatch):
    monkeypatch.setattr(unit_files, "REFRESH_SECONDS", 0.0)
    one, two = open_files(tmp_path), open_files(tmp_path)
    write(one, 5)
    assert not two.has(item(5).name)
    deadline = time.monotonic() + 30
    while not two.has(item(5).name):
        assert time.monotonic() < deadline
        two.refresh()
    one.refresh()
    assert one.has(item(5).name)
