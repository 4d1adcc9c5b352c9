"""The prefix cache's folder: what it keeps over a restart, and what it does not believe."""

from __future__ import annotations

import logging
import os
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import VOCAB, checkpoint
from offline import make_core, run

from plait.config import ConfigError
from plait.core.sampling_params import SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True, logprobs=1),
] * 4


def tokens(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def prompts() -> list[list[int]]:
    """Eight, of which some share beginnings."""
    shared = tokens(300)
    return [shared + tokens(40, i) for i in range(1, 4)] + [tokens(n, n) for n in (5, 16, 17, 200, 450)]


def ask(core, at_once=10**9):
    return run(core, prompts(), PARAMS, at_once=at_once, seeds=range(8))


def same(got, want) -> bool:
    return [(a.tokens, a.logprobs) for a in got] == [(a.tokens, a.logprobs) for a in want]


def end(core) -> None:
    assert core.flush(30)
    core.scheduler.check()
    core.close()


@pytest.fixture(scope="module")
def cold():
    """Answers that no cache had a part in."""
    return {family: ask(make_core(checkpoint(family), enable_prefix_caching=False)) for family in FAMILIES}


FAMILIES = ("qwen3_5", "llama")


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> dict[str, Path]:
    """Folders that an engine of each family has left; tests take copies."""
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp(family)
        core = make_core(checkpoint(family), prefix_cache_dir=str(folders[family]))
        ask(core)
        end(core)
    return folders


@pytest.fixture
def folder(kept, tmp_path) -> Path:
    """A copy of what the hybrid's engine has left."""
    return Path(shutil.copytree(kept["qwen3_5"], tmp_path / "kept"))


def files(folder: Path, suffix: str = "*") -> list[Path]:
    return sorted(path for path in folder.glob(f"*/*.{suffix}") if path.suffix in (".page", ".state"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restart_keeps_the_cache(family, kept, cold):
    core = make_core(checkpoint(family), prefix_cache_dir=str(kept[family]))
    got = ask(core)
    assert same(got, cold[family])
    for prompt, answer in zip(prompts(), got, strict=True):
        assert answer.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    counters = core.tiers.counters
    assert counters.pages_read > 50
    assert counters.snapshots_read == (0 if family == "llama" else 6)
    assert counters.pages_written == counters.snapshots_written == counters.reads_failed == 0
    end(core)


def test_only_what_memory_lacks_is_read(folder, cold):
    core = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(folder))
    ask(core)
    before = core.tiers.counters.pages_read
    assert same(ask(core), cold["qwen3_5"])
    assert core.tiers.counters.pages_read == before
    core.reset_prefix_cache()
    again = ask(core, at_once=1)
    assert same(again, cold["qwen3_5"])
    assert core.tiers.counters.pages_read > before
    assert again[0].num_cached_tokens == 336
    end(core)


def test_a_fork_hits_what_the_disk_has_of_it(folder):
    """The prompts' common part was a snapshot for the second and third of them."""
    core = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(folder))
    prompt = tokens(300) + tokens(100, 99)
    [first] = run(core, [prompt], PARAMS[0])
    assert first.num_cached_tokens == 288
    [alone] = run(make_core(checkpoint("qwen3_5")), [prompt], PARAMS[0])
    assert same([first], [alone])
    end(core)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "bfloat16"},
        {"block_size": 32},
        {"quantization": "int8"},
        {"load_format": "dummy", "seed": 5},
        {"model": "qwen3_5_moe"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_what_other_bits_made_is_not_seen(folder, settings):
    """Another format, layout or model has a namespace of its own, and leaves this one alone."""
    before = files(folder)
    settings = dict(settings)
    model = checkpoint(settings.pop("model", "qwen3_5"))
    core = make_core(model, prefix_cache_dir=str(folder), **settings)
    got = ask(core, at_once=1)
    assert [a.num_cached_tokens for a in got[:1] + got[3:]] == [0] * 6
    assert core.tiers.counters.pages_read == 0
    end(core)
    assert set(before) < set(files(folder))


def test_other_weights_are_other_weights(folder, tmp_path, cold):
    """One changed bit in the safetensors file is another model."""
    model = Path(shutil.copytree(checkpoint("qwen3_5"), tmp_path / "model"))
    [weights] = model.glob("*.safetensors")
    with weights.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    core = make_core(model, prefix_cache_dir=str(folder))
    [answer] = run(core, prompts()[:1], PARAMS[0])
    assert answer.num_cached_tokens == 0
    end(core)


def test_tenants_do_not_meet(folder):
    """A salt is part of every key."""
    core = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(folder))
    core.add("salted", prompts()[0], PARAMS[0], seed=0, max_tokens=1, cache_salt="tenant")
    while core.has_work:
        for progress in core.step().progress:
            assert progress.num_cached_tokens == 0
    end(core)


# -- what is not believed -----------------------------------------------------------------------


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def zero(path: Path, rng: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def swap(path: Path, rng: random.Random) -> None:
    other = rng.choice(files(path.parent.parent, path.suffix[1:]))
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, cut, zero, swap], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("share", [0.05, 1.0])
def test_damaged_files_are_ignored_with_one_line_each(folder, damage, share, cold, caplog):
    rng = random.Random(share)
    before = {path: path.read_bytes() for path in files(folder)}
    for path in rng.sample(list(before), max(1, int(share * len(before)))):
        damage(path, rng)
    harmed = {path for path, data in before.items() if path.read_bytes() != data}
    assert harmed
    with caplog.at_level(logging.WARNING):
        core = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(folder))
        assert same(ask(core), cold["qwen3_5"])
    assert core.tiers.counters.reads_failed == len(caplog.records)
    named = {path for path in harmed for record in caplog.records if path.name in record.getMessage()}
    if damage is cut:  # seen by its size, at start
        assert core.tier.files.found.foreign == len(harmed)
        assert not caplog.records
    elif share == 1:
        assert named
    assert core.flush(30)
    # What was found damaged was replaced; the next start has all that was asked for.
    again = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(folder))
    assert same(ask(again), cold["qwen3_5"])
    end(core)
    end(again)


def test_leftovers_and_strangers(folder, cold):
    """Files that no living engine writes are removed; what is not plait's own is left where it is."""
    home = files(folder)[0].parent
    (home / f"{'ab' * 16}.page.123-4.part").write_bytes(b"half")
    (home / "notes.txt").write_text("mine")
    (folder / "other").mkdir()
    (folder / "other" / f"{'cd' * 16}.page").write_bytes(b"not plait's")
    core = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(folder), prefix_cache_dir_limit=600_000)
    found = core.tier.files.found
    assert (found.half_written, found.foreign) == (1, 1)
    [line] = [str(d) for d in core.resolved.decisions if "on disk" in str(d)]
    assert "1 half-written removed" in line
    assert "1 foreign or damaged ignored" in line
    assert same(ask(core), cold["qwen3_5"])
    end(core)
    assert not list(home.glob("*.part"))
    assert (home / "notes.txt").read_text() == "mine"
    assert (folder / "other" / f"{'cd' * 16}.page").exists()


# -- bounds -------------------------------------------------------------------------------------


def test_the_folder_is_bounded_and_keeps_what_was_used_last(tmp_path):
    core = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(tmp_path))
    one = core.tier.files.file_bytes(0)
    end(core)
    limit = 120 * one + 20 * core.tier.files.file_bytes(1)
    core = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(tmp_path), prefix_cache_dir_limit=limit)
    often = tokens(400)
    for i in range(12):
        run(core, [often, tokens(400, i + 1)], PARAMS[0], at_once=1)
        core.reset_prefix_cache()  # so that it is read, and so used, each time
        core.flush(30)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    assert len(files(tmp_path)) < 12 * 25
    end(core)
    core = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(tmp_path), prefix_cache_dir_limit=limit)
    found = [run(core, [prompt], PARAMS[0])[0].num_cached_tokens for prompt in (often, tokens(400, 1))]
    assert found == [384, 0]
    end(core)


def test_a_limit_that_holds_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="set it to") as refusal:
        make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(tmp_path), prefix_cache_dir_limit=1000)
    least = int(str(refusal.value).split("set it to ")[1].split()[0])
    make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(tmp_path), prefix_cache_dir_limit=least).close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose a folder"):
        make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="prefix_cache_dir needs the prefix cache"):
        make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(tmp_path), enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="needs a prefix_cache_dir"):
        make_core(checkpoint("qwen3_5"), prefix_cache_dir_limit="1GiB")


FULL_DISK = """
import logging, resource, signal, sys
sys.path[:0] = {path!r}
from test_prefix_cache_dir import PARAMS, ask, checkpoint, make_core, prompts, run
logging.basicConfig(format="%(message)s")
core = make_core(checkpoint("qwen3_5"), prefix_cache_dir={folder!r}, prefix_cache_dir_limit="1GiB")
run(core, prompts()[-1:], PARAMS[0])
assert core.flush(30)
if {refuses}:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for sighting in range(2):
    answers = ask(core)
    assert core.flush(30)
    core.reset_prefix_cache()
assert answers[-1].num_cached_tokens == 448  # what is there is still read
assert core.tiers.counters.pages_written >= 28
core.close()
print([(answer.tokens, answer.logprobs) for answer in answers])
"""
"""Files of one prompt are written; then the system takes no more."""


def fill_disk(folder: Path, wrap: str, refuses: bool) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what the system refuses it would refuse to the tests too."""
    program = FULL_DISK.format(path=sys.path, folder=str(folder), refuses=refuses)
    command = ["sh", "-c", wrap.format(program=f"{sys.executable} -c {shlex.quote(program)}")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def check_full_disk(ran: subprocess.CompletedProcess[str], why: str, cold) -> None:
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("nothing more is written there until the next start") == 1
    assert ran.stderr.count(why) == 1
    assert ran.stdout.strip() == str([(answer.tokens, answer.logprobs) for answer in cold["qwen3_5"]])


def test_a_disk_that_takes_no_more_ends_writing_with_one_line(tmp_path, cold):
    check_full_disk(fill_disk(tmp_path, "exec {program}", refuses=True), "File too large", cold)
    assert not list(tmp_path.glob("*/*.part"))


def test_a_small_disk_that_fills_up(tmp_path, cold):
    """A file system of 1.8 MB, in a namespace of its own: the system's own "no space left"."""
    mount = f"mount -t tmpfs -o size=1800k none {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no mount namespaces")
    wrap = f"exec unshare -rm sh -c '{mount} && exec \"$@\"' sh " + "{program}"
    check_full_disk(fill_disk(tmp_path, wrap, refuses=False), "No space left on device", cold)


def test_two_engines_share_a_folder(tmp_path, cold):
    """Each finds what the other has written, at the next look; both write the same files at the same time."""
    one = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(tmp_path))
    two = make_core(checkpoint("qwen3_5"), prefix_cache_dir=str(tmp_path))
    assert same(ask(one), cold["qwen3_5"])
    assert same(ask(two), cold["qwen3_5"])  # before the first has written much
    assert one.flush(30)
    assert two.flush(30)
    extra = tokens(333, 77)
    run(one, [extra], PARAMS[0])
    assert one.flush(30)
    two.tier.files.look()
    [answer] = run(two, [extra], PARAMS[0])
    assert answer.num_cached_tokens == 320
    end(one)
    end(two)


def test_memory_too_small_for_a_restored_snapshot(folder, cold):
    """An arena that just holds a request: restores must not stand in the way of admission."""
    geometry = make_core(checkpoint("qwen3_5")).scheduler.cache.geometry
    longest = max(len(prompt) for prompt in prompts()) + 6
    for more in range(3):
        core = make_core(
            checkpoint("qwen3_5"), slabs=geometry.slabs_for(longest) + more, prefix_cache_dir=str(folder),
            max_num_batched_tokens=64,
        )  # fmt: skip
        assert same(ask(core), cold["qwen3_5"])
        end(core)
