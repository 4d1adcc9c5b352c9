"""docs/exactness.md says which pairs of features meet in the long array; it says what is so."""

from __future__ import annotations

import feature_pairs
from checkpoints import checkpoint
from differential import NUMERICS, SCHEDULE

from plait.config import EngineArgs
from plait.engine.resolve import resolve


def test_the_table_of_pairs_is_what_the_long_array_covers() -> None:
    page = feature_pairs.PAGE.read_text(encoding="utf-8")
    again = "the features have changed: python tests/feature_pairs.py writes the table anew"
    assert page == feature_pairs.replaced(page), again


def test_every_pair_that_can_be_is_in_the_table() -> None:
    table = feature_pairs.table()
    for name, values in (NUMERICS | SCHEDULE).items():
        assert f"| {name} | {', '.join(values)} |" in table
    shares = [
        cell.split("/") for line in table.splitlines() for cell in line.split("|") if cell.count("/") == 1
    ]
    cells = len(NUMERICS | SCHEDULE)
    assert len(shares) == cells * (cells - 1) // 2
    missing = sum(int(there) - int(met) for met, there in shares)
    assert missing == sum(line.startswith("* ") for line in table.splitlines())


def test_the_numerics_id_names_what_the_page_says() -> None:
    """Each format changes it; nothing else does."""

    def named(**settings: object) -> str:
        args = EngineArgs(model=str(checkpoint("qwen3_5")), device="cpu", **settings)  # type: ignore[arg-type]
        return resolve(args).numerics_id

    plain = named()
    formats = [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"mamba_ssm_cache_dtype": "bfloat16"}]
    assert len({plain, *(named(**one) for one in formats)}) == 4
    for other in (
        {"block_size": 64}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 17}, {"cpu_threads": 2},
        {"enable_prefix_caching": False}, {"max_model_len": 100}, {"seed": 5},
    ):  # fmt: skip
        assert named(**other) == plain
