"""The script of the page on object stores runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from ddpkit.mirror import forget_mirrors
from tests.mirror.conftest import fsspec

PAGE = Path(__file__).parents[2] / "docs/how-to/object-stores.md"


def test_the_script_of_the_page_goes_on_from_the_store(store):
    (script,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    before, parted, after = script.partition("result = train(3)")
    assert parted
    names = {}
    exec(compile(before, str(PAGE), "exec"), names)
    forget_mirrors()  # another machine
    exec(compile(parted + after, str(PAGE), "exec"), names)
    assert fsspec.filesystem("memory").find("my-bucket/runs/seven")
