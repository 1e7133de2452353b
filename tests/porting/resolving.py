"""Whether Python finds the names that a recipe uses: `python -m tests.porting.resolving folder`."""

from __future__ import annotations

import ast
import json
import sys
from importlib import import_module
from pathlib import Path

import yaml

from ddpkit.porting.source_code import dotted


def exists(name):
    """Whether Python finds a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def names_of(path):
    """All dotted names that a file imports or uses, in full."""
    if path.suffix != ".py":
        tokens = [
            token.value for token in yaml.scan(path.read_text()) if isinstance(token, yaml.TagToken)
        ]
        return [word.rpartition(":")[2] for _, word in tokens]
    tree = ast.parse(path.read_text())
    found = []
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
            bound |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0]
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
            bound |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        first, _, rest = dotted(node).partition(".")
        if rest and first in bound and id(node) not in inner:
            found.append(f"{bound[first]}.{rest}")
    return found


def main(folder):
    """Print the names of SpeechBrain and ddpkit in a folder that Python does not find, and how many
    there are.
    """
    files = [
        path
        for path in Path(folder).rglob("*")
        if path.suffix in {".py", ".yaml"} and "/." not in str(path)
    ]
    names = {
        name
        for path in files
        for name in names_of(path)
        if name.split(".")[0] in {"speechbrain", "ddpkit"}
    }
    print(
        json.dumps(
            {
                "files": len(files),
                "names": len(names),
                "lost": sorted(one for one in names if not exists(one)),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
