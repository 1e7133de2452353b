"""Real ranks: who speaks."""

from __future__ import annotations

import contextlib
import io

from ddpkit.logger import close_logging, get_logger, setup_logging


def speak():
    log = get_logger("ddpkit.tests")
    with contextlib.redirect_stderr(io.StringIO()) as screen:
        setup_logging()
        try:
            log.info("main")
            log.info("all", main_process_only=False)
            log.error("broken")
        finally:
            close_logging()
    return screen.getvalue()


def test_2_5_main_speaks_and_the_others_errors_do_not_vanish(ranks):
    assert ranks.run(speak) == [
        "main\nall\nERROR: broken\n",
        "[rank: 1] all\nERROR: [rank: 1] broken\n",
    ]
