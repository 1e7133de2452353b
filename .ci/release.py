#!/usr/bin/env python3
"""What a release needs: a version with a date, the same everywhere, and addresses.

    .ci/release.py begin 0.2.0        what is unreleased becomes 0.2.0, of today
    .ci/release.py check v0.2.0       version and changelog are those of this tag
    .ci/release.py notes v0.2.0       what the changelog says of it
    .ci/release.py addresses URL TAG  write the repository's address into pyproject.toml
                                      and README.md, which an index shows

Nothing is committed, tagged or published. `.github/workflows/release.yml` does that on a tag.
"""

from __future__ import annotations

import re
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION_LINE = re.compile(r'^__version__ = "(?P<version>[^"]+)"$', re.MULTILINE)
SECTION = re.compile(r"^## (?P<version>\d+\.\d+\.\d+) \((?P<date>\d{4}-\d\d-\d\d)\)$", re.MULTILINE)
CITED = re.compile(r"^version: .*$", re.MULTILINE)
UNRELEASED = "## Unreleased\n"
# A link to a file of the repository; what stands in a block of code is none.
LINK = re.compile(
    r"^(?P<fence>`{3,}).*?^(?P=fence)$"
    r"|(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#|mailto:)(?P<path>[^)\s#]+)(?P<place>#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)


def main(words: list[str], root: Path = ROOT) -> int:
    """Run a command; return the exit status."""
    commands = {
        "begin": (begin, 1),
        "check": (check, 1),
        "notes": (notes, 1),
        "addresses": (addresses, 2),
    }
    function, number = commands.get(words[0] if words else "", (None, 0))
    if function is None or len(words) != number + 1:
        sys.stderr.write(__doc__)
        return 2
    try:
        function(root, *words[1:])
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def begin(root: Path, version: str) -> None:
    """Give what is unreleased a version and a date."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"{version!r} is no version. Give three numbers, such as 0.2.0.")
    init, changelog = _files(root)
    text = changelog.read_text(encoding="utf-8")
    released = [found["version"] for found in SECTION.finditer(text)]
    if version in released:
        raise ValueError(f"the changelog has a section of {version} already.")
    if released and _numbers(version) < max(map(_numbers, released)):
        raise ValueError(f"{version} is older than what is released: {', '.join(released)}.")
    if UNRELEASED not in text:
        raise ValueError("the changelog has no section 'Unreleased'.")
    today = datetime.now(timezone.utc).date().isoformat()
    cited = root / "CITATION.cff"
    written = {  # all of it before the first file is changed
        changelog: text.replace(UNRELEASED, f"{UNRELEASED}\n## {version} ({today})\n", 1),
        cited: _replaced(cited, CITED, f"version: {version}"),
        init: _replaced(init, VERSION_LINE, f'__version__ = "{version}"'),
    }
    for path, content in written.items():
        path.write_text(content, encoding="utf-8")


def _replaced(path: Path, pattern: re.Pattern[str], line: str) -> str:
    """Return the text of a file with another line in the place of its only one of this pattern."""
    content, number = pattern.subn(line, path.read_text(encoding="utf-8"))
    if number != 1:
        raise ValueError(f"{path.name} has {number} lines such as {line!r}, and should have one.")
    return content


def check(root: Path, tag: str) -> None:
    """Refuse a tag that is not the version, or has no section with a date and a text."""
    init, _ = _files(root)
    found = VERSION_LINE.search(init.read_text(encoding="utf-8"))
    version = found["version"] if found else "none"
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag!r}, and ddpkit.__version__ is {version!r}.")
    if not _section(root, tag):
        raise ValueError(
            f"the changelog says nothing of {version}. Run `.ci/release.py begin {version}`, and "
            "commit that."
        )


def notes(root: Path, tag: str) -> None:
    """Print the section of a version."""
    sys.stdout.write(_section(root, tag) + "\n")


def addresses(root: Path, url: str, tag: str) -> None:
    """Write addresses where the page of an index needs them: no clone knows where it is from."""
    project = root / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    if "[project.urls]" in text:
        raise ValueError("pyproject.toml has addresses already.")
    urls = {
        "Repository": url,
        "Documentation": f"{url}/tree/{tag}/docs",
        "Changelog": f"{url}/blob/{tag}/docs/changelog.md",
        "Issues": f"{url}/issues",
    }
    lines = "\n".join(f'{name} = "{address}"' for name, address in urls.items())
    head, mark, rest = text.partition("[project.optional-dependencies]")
    if not mark:
        raise ValueError("pyproject.toml has no [project.optional-dependencies]: where to?")
    written = {  # all of it before the first file is changed
        root / "README.md": _with_addresses(root, url, tag),
        project: f"{head}[project.urls]\n{lines}\n\n{mark}{rest}",
    }
    for path, content in written.items():
        path.write_text(content, encoding="utf-8")


def _with_addresses(root: Path, url: str, tag: str) -> str:
    """Return README with an address in the place of each link to a file of the repository."""

    def absolute(found: re.Match[str]) -> str:
        if found["fence"]:
            return found[0]
        path = root / found["path"]
        if not path.exists():
            raise ValueError(f"README.md leads to {found['path']}, which is not in the repository.")
        kind = "raw" if found["mark"] else "tree" if path.is_dir() else "blob"
        address = f"{url}/{kind}/{tag}/{found['path']}{found['place'] or ''}"
        return f"{found['mark']}[{found['text']}]({address})"

    return LINK.sub(absolute, (root / "README.md").read_text(encoding="utf-8"))


def _files(root: Path) -> tuple[Path, Path]:
    return root / "ddpkit" / "__init__.py", root / "docs" / "changelog.md"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _section(root: Path, tag: str) -> str:
    """Return the text of a version's section, without its heading."""
    text = _files(root)[1].read_text(encoding="utf-8")
    for found in SECTION.finditer(text):
        if f"v{found['version']}" == tag:
            return re.split(r"^## ", text[found.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
