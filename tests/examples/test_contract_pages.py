"""The contract of each promise: the tests, commands and options that its page names are there."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from pathlib import Path

import pytest

from ddpkit import RunOptions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "contracts"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
SECTIONS = (
    "What is promised",
    "On what it depends",
    "What is not covered",
    "How it is tested",
    "Words",
)
PROMISE = re.compile(r"^\| \*\*.+?\*\* \|.*\((?:docs/)?contracts/([\w-]+)\.md\) \|$", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:tests|benchmarks)/[\w/]+\.\w+(?:::\w+)?")
OPTION = re.compile(r"(?<![\w-])--(\w[\w-]*)")
WORD = re.compile(r"^(.+)\n: ", re.MULTILINE)
OF_OTHERS = {"kill-on-bad-exit"}  # of srun
# What reads the words that make hands on.
READERS = {
    "FAULTS_ARGS": "tests/faults/table.py",
    "MODEL_ARGS": "tests/model/__main__.py",
    "MUTANTS_ARGS": "tests/mutants/__main__.py",
}


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def page_of(name):
    return text_of(f"docs/contracts/{name}.md")


def sections_of(text):
    """Return the sections of a page by their headings, in their order."""
    _, *parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


# ----------------------------------------------------------------------- what a page names is there


def missing(text):
    """Return what a text names, as code, that is not there: files, tests, commands, options."""
    found = []
    for code in CODE.findall(text):
        if FILE.fullmatch(code):
            found += missing_file(code)
        elif code.startswith("make "):
            found += missing_of_make(code)
        elif code.startswith("python "):
            found += missing_of_python(code)
        else:
            options = set(OPTION.findall(code)) - OF_OTHERS - set(RunOptions())
            found += [f"the option --{name} of {code!r}" for name in sorted(options)]
    return found


def missing_file(code):
    path, _, test = code.partition("::")
    if not (ROOT / path).is_file():
        return [f"the file {path}"]
    return [f"the test {code}"] if test and f"def {test}(" not in text_of(path) else []


def missing_of_make(code):
    makefile = text_of("Makefile")
    found = []
    for word in shlex.split(code)[1:]:
        variable, is_variable, value = word.partition("=")
        if not is_variable:
            is_there = re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE)
            found += [] if is_there else [f"the target {word} of make"]
        elif variable not in READERS or f"$({variable})" not in makefile:
            found.append(f"the variable {variable} of make")
        else:
            found += missing_words(READERS[variable], shlex.split(value))
    return found


def missing_of_python(code):
    _, *words = shlex.split(code)
    if words[0] != "-m":
        return missing_file(words[0]) or missing_words(words[0], words[1:])
    if words[1] == "ddpkit":
        commands = text_of("ddpkit/cli/__init__.py")
        return [] if f'    "{words[2]}": ' in commands else [f"the command {words[2]}"]
    module = words[1].replace(".", "/")
    for path in (f"{module}.py", f"{module}/__main__.py"):
        if (ROOT / path).is_file():
            return missing_words(path, words[2:])
    return [f"the module {words[1]}"]


def missing_words(path, words):
    """Return the options that a program does not have, and values that stand for nothing."""
    program = text_of(path)
    found = []
    for option, value in itertools.pairwise([*words, ""]):
        if not option.startswith("--"):
            continue
        if f'"{option}"' not in program:
            found.append(f"the option {option} of {path}")
        elif option == "--rows":
            rows = re.search(r"^ALL = \((.*?)\)", program, re.MULTILINE | re.DOTALL)[1]
            found += [f"the row {row}" for row in value.split(",") if f'"{row}"' not in rows]
        elif option == "--only":
            record = text_of("tests/mutants/record.tsv")
            is_there = re.search(rf"^{re.escape(value)}\t", record, re.MULTILINE)
            found += [] if is_there else [f"the room {value}"]
    return found


@pytest.mark.parametrize("page", [*PAGES, "index"])
def test_what_a_page_names_is_there(page):
    assert missing(page_of(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_tests(page):
    tested = sections_of(page_of(page))["How it is tested"]
    assert any(FILE.fullmatch(code) for code in CODE.findall(tested))


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("tests/ranks/test_gone.py", "the file tests/ranks/test_gone.py"),
        ("tests/test_import.py::test_gone", "the test tests/test_import.py::test_gone"),
        ("make gone", "the target gone of make"),
        ('make faults GONE_ARGS="--rows F4"', "the variable GONE_ARGS of make"),
        ('make faults FAULTS_ARGS="--gone 4"', "the option --gone of tests/faults/table.py"),
        ('make faults FAULTS_ARGS="--rows F4,F99"', "the row F99"),
        ('make mutants MUTANTS_ARGS="--only gone"', "the room gone"),
        ("python benchmarks/gone.py", "the file benchmarks/gone.py"),
        ("python -m tests.gone", "the module tests.gone"),
        ("python -m tests.model --gone 3", "the option --gone of tests/model/__main__.py"),
        ("python -m ddpkit gone", "the command gone"),
        ("--gone=3", "the option --gone of '--gone=3'"),
    ],
)
def test_what_has_gone_is_told(named, told):
    assert missing(f"It is tested by `{named}`.") == [told]


# ------------------------------------------------------------------------------- what each page has


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_each_promise_leads_to_its_contract(page):
    assert sorted(PROMISE.findall(text_of(page))) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_its_sections_in_their_order(page):
    assert tuple(sections_of(page_of(page))) == SECTIONS


@pytest.mark.parametrize("page", PAGES)
def test_a_promise_is_one_sentence(page):
    promise = sections_of(page_of(page))["What is promised"].strip().split("\n\n")[0]
    assert promise.endswith(".")
    assert len(re.findall(r"[.!?](?=\s|$)", promise)) == 1


@pytest.mark.parametrize("page", PAGES)
def test_words_are_used_on_their_page(page):
    sections = sections_of(page_of(page))
    words = [word for line in WORD.findall(sections.pop("Words")) for word in line.split(", ")]
    assert words
    text = " ".join("".join(sections.values()).lower().split())
    unused = [word for word in words if word.lower().rstrip("s") not in text]
    assert unused == []


# ---------------------------------------------------------------- the same bits, as the code has it


def named_strings(path, *names):
    """Return the strings in the values of a module's constants."""
    for node in ast.parse(text_of(path)).body:
        target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
        if isinstance(target, ast.Name) and target.id in names:
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_the_page_of_the_same_bits_lists_the_options_that_are_refused():
    refused = [
        *named_strings("ddpkit/strategies/virtual_ranks.py", "NOT_WITH"),
        *named_strings("ddpkit/strategies/virtual_fsdp.py", "NOT_WITH"),
        *named_strings("ddpkit/strategies/names.py", "OF_DDP", "_SWITCHES"),
    ]
    options = [text for text in refused if text.partition("=")[0] in set(RunOptions())]
    assert {"check_parity", "fsdp_cpu_offload", "ddp_comm_hook"} <= set(options)
    page = page_of("same-bits")
    assert [option for option in options if f"`--{option}" not in page] == []


def test_the_page_of_the_same_bits_lists_the_optimizers_that_are_refused():
    optimizers = set(named_strings("ddpkit/strategies/fsdp.py", "WHOLE_MATRICES"))
    assert "Muon" in optimizers
    assert [name for name in optimizers if f"`{name}`" not in page_of("same-bits")] == []


def test_the_page_of_the_same_bits_lists_the_labels_of_a_run():
    tree = ast.parse(text_of("ddpkit/parts/hash_chain.py"))
    [labels] = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "labels"
    ]
    [returned] = [node for node in ast.walk(labels) if isinstance(node, ast.Return)]
    names = [ast.literal_eval(key) for key in returned.value.keys]
    assert "torch" in names
    listed = re.findall(r"^\| `(\w+)` \|", page_of("same-bits"), re.MULTILINE)
    assert sorted(set(names) & set(listed)) == sorted(names)
