from __future__ import annotations

collect_ignore = ["recipes"]  # they import SpeechBrain
