"""Where the names of other projects lead: to their own pages, if a build is told where those are.

A build without a network has to pass, and a list that cannot be loaded is a warning, which is an
error here. So the lists are used when they are asked for:

    DDPKIT_DOCS_LINKS=web                 they are downloaded
    DDPKIT_DOCS_LINKS=/path/to/lists      they lie there: torch.inv, python.inv, numpy.inv; any of them
"""  # noqa: E501

from __future__ import annotations

from pathlib import Path

VARIABLE = "DDPKIT_DOCS_LINKS"
PROJECTS = {
    "torch": "https://docs.pytorch.org/docs/stable/",
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
}


def mapping(asked: str) -> dict[str, tuple[str, str | None]]:
    """Return what ``intersphinx_mapping`` is to be.

    Args:
        asked: the value of the environment variable; empty for no links.

    Raises:
        SystemExit: it is neither `web` nor a folder with a list.
    """
    if not asked:
        return {}
    if asked == "web":
        return {name: (address, None) for name, address in PROJECTS.items()}
    lists = {name: Path(asked, f"{name}.inv").resolve() for name in PROJECTS}
    found = {name: (PROJECTS[name], str(path)) for name, path in lists.items() if path.is_file()}
    if not found:
        wanted = ", ".join(path.name for path in lists.values())
        raise SystemExit(
            f"{VARIABLE}={asked} is neither 'web' nor a folder with one of {wanted}. Say 'web', "
            "put the lists there (objects.inv of each project, under these names), or leave it out."
        )
    return found
