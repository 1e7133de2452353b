"""Writes each page as Markdown beside its HTML, and ``llms.txt``, which lists them all.

The Markdown is the source of the page. Files that it includes are put in, pictures are those beside
the HTML, and a module's page has the docstrings of the module.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sphinx import addnodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

BLOCK = re.compile(
    r"^(?P<marks>`{3,}|:{3,})\{(?P<name>[\w-]+)\}(?P<argument>.*)\n(?P<body>(?:.*\n)*?)(?P=marks)\n",
    re.MULTILINE,
)
OPTION = re.compile(r"^:(?P<name>[\w-]+):[ ]*(?P<value>.*)$", re.MULTILINE)
MODULE = re.compile(r"^\.\. (?:auto|py:)module:: (?P<name>[\w.]+)", re.MULTILINE)
PICTURE = re.compile(r"(!\[[^\]]*\]\()([^)\s]+)(\))")
ROLE = re.compile(r"\{py:\w+\}`(?P<text>[^`]+)`")
PAGE = re.compile(r"\{doc\}`(?P<path>[^`<>]+)`")
SUMMARY = 200


class Entry(NamedTuple):
    """A page in a list: its name and the words over the list that it stands in."""

    page: str
    caption: str


def markdown_of(source: str, path: Path, depth: int) -> tuple[str, list[Path]]:
    """Return a page as plain Markdown, and the pictures that it shows.

    Args:
        source: its text.
        path: its file, from which other files are found.
        depth: how many folders it lies in, below the start page.
    """
    pictures: list[Path] = []

    def block(found: re.Match[str]) -> str:
        name, argument, body = found["name"], found["argument"].strip(), found["body"]
        if name == "literalinclude":
            options = {option["name"]: option["value"] for option in OPTION.finditer(body)}
            return included(path.parent / argument, options)
        if name == "eval-rst":
            return "\n\n".join(map(docstrings_of, MODULE.findall(body))) + "\n"
        if name in {"note", "warning"}:
            return f"**{name.capitalize()}:** {body}"
        return ""  # lists of pages and entries of the index

    def picture(found: re.Match[str]) -> str:
        file = path.parent / found[2]
        if "://" in found[2] or not file.is_file():
            return found[0]
        pictures.append(file.resolve())
        return f"{found[1]}{'../' * depth}_images/{file.name}{found[3]}"

    text = BLOCK.sub(block, source)
    text = PICTURE.sub(picture, text)
    text = ROLE.sub(lambda found: f"`{_name_of(found['text'])}`", text)
    text = PAGE.sub(r"[\g<path>](\g<path>.md)", text)
    return re.sub(r"\n{3,}", "\n\n", text), pictures


def _name_of(role: str) -> str:
    """Return the words of a reference: `~a.b.c` is `c`, `words <a.b>` is `words`."""
    words = role.partition(" <")[0]
    return words.rpartition(".")[2] if words.startswith("~") else words


def included(path: Path, options: dict[str, str]) -> str:
    """Return a file as a block, from the line on that its options name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    unknown = set(options) - {"language", "start-at"}
    if unknown:
        raise ValueError(f"{path.name} is included with {unknown}: extend markdown_pages.py.")
    start = options.get("start-at", "").strip("\"'")
    first = next(number for number, line in enumerate(lines) if start in line)
    return "\n".join([f"```{options.get('language', '')}", *lines[first:], "```", ""])


def docstrings_of(name: str) -> str:
    """Return the docstrings of a module and of what it defines for others."""
    module = importlib.import_module(name)
    parts = [inspect.getdoc(module) or ""]
    for label, thing in _defined(module, name):
        parts.append(f"### {name}.{label}{_signature(thing)}\n\n{inspect.getdoc(thing)}")
        if inspect.isclass(thing):
            parts += [
                f"#### {label}.{own}{_signature(method)}\n\n{inspect.getdoc(method)}"
                for own, method in vars(thing).items()
                if not own.startswith("_") and inspect.isfunction(method) and method.__doc__
            ]
    return "\n\n".join(part.replace("``", "`") for part in parts if part)


def _defined(module: Any, name: str) -> Iterator[tuple[str, Any]]:
    for label, thing in vars(module).items():
        is_own = getattr(thing, "__module__", None) == name and not label.startswith("_")
        if is_own and (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__doc__:
            yield label, thing


def _signature(thing: Any) -> str:
    try:
        return str(inspect.signature(thing))
    except (TypeError, ValueError):  # a class of C, or one with a signature that is computed
        return ""


def summary_of(text: str) -> str:
    """Return the first sentences of a page of plain Markdown."""
    without_code = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = re.split(r"\n\s*\n", without_code.strip())
    prose = next((part for part in paragraphs if re.match(r"[\w\[`*\"]", part)), "")
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)|\*\*", r"\1", " ".join(prose.split()))
    if len(words) <= SUMMARY:
        return words
    end = words.rfind(". ", 0, SUMMARY)
    return words[: end + 1] if end > 0 else words[: words.rfind(" ", 0, SUMMARY)] + " ..."


def entries(env: BuildEnvironment) -> Iterator[Entry]:
    """Yield all pages in the order of the lists, with the caption of the list of the start page."""
    start = env.get_doctree(env.config.root_doc)
    for toctree in start.findall(addnodes.toctree):
        caption = toctree.get("caption") or ""
        for _, page in toctree["entries"]:
            yield from (Entry(below, caption) for below in _with_below(env, page))


def _with_below(env: BuildEnvironment, page: str) -> Iterator[str]:
    yield page
    for below in env.toctree_includes.get(page, ()):
        yield from _with_below(env, below)


def llms_text(env: BuildEnvironment, texts: dict[str, str]) -> str:
    """Return the list of all pages, in the form of llmstxt.org.

    Args:
        env: of the build.
        texts: the Markdown of each page.
    """
    name = env.config.project
    lines = [f"# {name}", "", f"> {summary_of(texts[env.config.root_doc])}"]
    caption = None
    for entry in entries(env):
        if entry.caption != caption:
            caption = entry.caption
            lines += ["", f"## {caption}", ""]
        title = env.titles[entry.page].astext()
        summary = summary_of(texts[entry.page])
        lines.append(f"- [{title}]({entry.page}.md)" + (f": {summary}" if summary else ""))
    return "\n".join([*lines, ""])


def write(app: Sphinx, failure: Exception | None) -> None:
    """Write all of it once the pages are built."""
    if failure or app.builder.format != "html":
        return
    out = Path(app.outdir)
    texts = {}
    for page in app.env.found_docs:
        path = Path(app.env.doc2path(page))
        source = path.read_text(encoding="utf-8")
        texts[page], pictures = markdown_of(source, path, page.count("/"))
        (out / f"{page}.md").write_text(texts[page], encoding="utf-8")
        for picture in pictures:
            (out / "_images").mkdir(exist_ok=True)
            shutil.copy(picture, out / "_images")
    (out / "llms.txt").write_text(llms_text(app.env, texts), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
