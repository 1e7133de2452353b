"""Writes the snapshot anew: ``make messages``, after a change of texts."""

from __future__ import annotations

from tests.messages.collecting import SNAPSHOT, snapshot

if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
