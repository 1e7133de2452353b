"""The table of names in docs/porting.md: `python -m tests.porting.naming_table` writes it anew."""

from __future__ import annotations

from pathlib import Path

from ddpkit.porting import TABLE

PAGE = Path(__file__).resolve().parents[2] / "docs/porting.md"
BEGIN = "<!-- names: python -m tests.porting.naming_table -->\n"
END = "<!-- end of names -->\n"


def table():
    """One row for each pair of modules."""
    rows = ["| SpeechBrain | ddpkit | names |", "|---|---|---|"]
    for module, homes in TABLE.items():
        for home, listed in homes.items():
            names = [f"`{name}`" for name in listed.split()]
            rows += [f"| `{module}` | `{home}` | {', '.join(names)} |"] if names else []
    return "\n".join(rows) + "\n"


def parts():
    """The page before the table, the table, and the page after it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    shown, _, after = rest.partition(END)
    return before + BEGIN, shown, END + after


if __name__ == "__main__":
    first, _, last = parts()
    PAGE.write_text(f"{first}\n{table()}\n{last}", encoding="utf-8")
