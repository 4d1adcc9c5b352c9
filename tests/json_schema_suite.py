"""The JSON Schema test suite, as the source distribution of jsonschema carries it under its MIT licence."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFTS = ("draft2020-12", "draft2019-09", "draft7")


@dataclass(frozen=True)
class Case:
    """A schema of the suite; the same schema in a later draft is left out."""

    draft: str
    keyword: str
    description: str
    schema: Any

    def __str__(self) -> str:
        return f"{self.draft}: {self.keyword}: {self.description}"


def fetch(folder: Path) -> Path:
    """The folder of the suite's tests, downloaded.

    Raises:
        OSError: the package index cannot be reached.
    """
    package = f"jsonschema=={version('jsonschema')}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
        package,
    ]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise OSError(ended.stderr)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    [tests] = folder.glob("*/json/tests")
    return tests


def cases(tests: Path) -> Iterator[Case]:
    """Every schema of the suite's required part."""
    seen = set()
    for draft in DRAFTS:
        for file in sorted((tests / draft).glob("*.json")):
            for group in json.loads(file.read_text(encoding="utf-8")):
                schema = group["schema"]
                bare = (
                    {k: v for k, v in schema.items() if k != "$schema"}
                    if isinstance(schema, dict)
                    else schema
                )
                text = json.dumps(bare, sort_keys=True)
                if text not in seen:
                    seen.add(text)
                    if draft == "draft7" and isinstance(schema, dict):
                        schema = {"$schema": DRAFT_7} | schema  # without it a schema is read as of 2020-12
                    yield Case(draft, file.stem, group["description"], schema)
